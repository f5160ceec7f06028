//! The table of socket options that the programs set.
//!
//! Setting, restoring and lifting these options, the socket scan, the probe of the kernel's features, the counters of
//! failures and the tests of all of these iterate over it. A new option is a row of [`TABLE`] and an arm of
//! [`SockOpt::wanted`].

use crate::{Policy, policy_flags};

/// A socket option that a program sets. The value is the index of its row, and of its counter
/// ([`crate::Counters::setsockopt_failures`]).
///
/// Invariant: options that a policy sets come first ([`SockOpt::KEPT`]).
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SockOpt {
    /// TCP_BPF_RTO_MIN, microseconds.
    RtoMin,
    /// TCP_BPF_DELACK_MAX, microseconds.
    DelackMax,
    /// TCP_THIN_LINEAR_TIMEOUTS: 0 or 1.
    ThinLinear,
    /// TCP_RTO_MAX_MS, milliseconds.
    RtoMax,
    /// TCP_USER_TIMEOUT, milliseconds.
    UserTimeout,
    /// TCP_SYNCNT.
    SynCnt,
    /// SO_TXREHASH: whether a retransmission changes the hash by which routers choose a path.
    TxRehash,
    /// TCP_BPF_IW: the initial window, segments.
    InitialWindow,
    /// TCP_BPF_SOCK_OPS_CB_FLAGS, or bpf_sock_ops_cb_flags_set(): the RTO hook.
    CbFlags,
}

/// A row of [`TABLE`].
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// The option.
    pub option: SockOpt,
    /// The kernel's name.
    pub name: &'static str,
    /// The level of bpf_setsockopt().
    pub level: i32,
    /// The number of bpf_setsockopt().
    pub number: i32,
    /// A value, other than the kernel's own, that every kernel with the option accepts: the probe and the tests set it.
    pub example: u32,
    /// How the option is set and restored if a policy sets it; otherwise the SYN schedule, the hook or the end of the
    /// handshake does both.
    pub kept: Option<Kept>,
}

/// An option that a policy sets. Its former value is kept in the socket's storage and restored when the connection ends,
/// when the socket is connected to another address, and by a restoring socket scan.
#[derive(Clone, Copy, Debug)]
pub struct Kept {
    /// The kernel's own value, which is restored where the former one cannot be read. (A socket scan knows the
    /// namespace's: [`crate::WalkControl::defaults`].)
    pub former: u32,
    /// The largest value that the option takes. A namespace's default may be larger.
    pub largest: u32,
    /// Which of the application's own values stay.
    pub own: Own,
    /// When the option is set.
    pub when: When,
    /// Bits of [`also`].
    pub also: u32,
}

/// Which of the application's own values, or of those that a sysctl has set, are stricter than the policy's and stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Own {
    /// One that is lower.
    Lower,
    /// One that is higher.
    Higher,
    /// Any: the kernel's own is 0.
    Any,
}

/// When an option is set on a connection that this host opens. On an accepted one all are set when it is established.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// Before the first SYN.
    Connecting,
    /// Before the first SYN if the policy's timer decides when that is retransmitted. With the kernel's own timer, the
    /// option would make connect() give up earlier: then as [`When::Established`].
    ConnectingWithTimer,
    /// Once established: on a connecting socket the option would make connect() give up earlier.
    Established,
}

/// Bits of [`Kept::also`]: properties that only some options have.
pub mod also {
    /// Set by `rto_clone` as well, before an accepted socket's first RTT sample.
    pub const AT_CLONE: u32 = 1 << 0;
    /// Restored when the application closes the socket, which the kernel would give up too early otherwise.
    pub const LIFTED: u32 = 1 << 1;
    /// Needs no storage, because its value shows that a policy has set it ([`crate::lasting`]). The program reads the
    /// field of the kernel's struct that tells whether the socket has the kernel's own value.
    pub const RECOGNISED: u32 = 1 << 2;
}

const SOL_SOCKET: i32 = 1;
const SOL_TCP: i32 = 6;

/// The options, in the order of [`SockOpt`]. Numbers are from include/uapi/linux/tcp.h and asm-generic/socket.h; those
/// above 1000 from include/uapi/linux/bpf.h.
pub const TABLE: [Row; SockOpt::COUNT] = [
    Row {
        option: SockOpt::RtoMin,
        name: "TCP_BPF_RTO_MIN",
        level: SOL_TCP,
        number: 1004,
        example: 100_000,
        kept: Some(Kept {
            former: LARGEST_US,
            largest: LARGEST_US,
            own: Own::Lower,
            when: When::Connecting,
            also: also::AT_CLONE | also::RECOGNISED,
        }),
    },
    Row {
        option: SockOpt::DelackMax,
        name: "TCP_BPF_DELACK_MAX",
        level: SOL_TCP,
        number: 1003,
        example: 100_000,
        kept: Some(Kept {
            former: LARGEST_US,
            largest: LARGEST_US,
            own: Own::Lower,
            when: When::Connecting,
            also: also::RECOGNISED,
        }),
    },
    Row {
        option: SockOpt::ThinLinear,
        name: "TCP_THIN_LINEAR_TIMEOUTS",
        level: SOL_TCP,
        number: 16,
        example: 1,
        kept: Some(Kept {
            former: 0,
            largest: 1,
            own: Own::Higher,
            when: When::Connecting,
            also: 0,
        }),
    },
    Row {
        option: SockOpt::RtoMax,
        name: "TCP_RTO_MAX_MS",
        level: SOL_TCP,
        number: 44,
        example: 60_000,
        kept: Some(Kept {
            former: RTO_MAX_MS,
            largest: RTO_MAX_MS,
            own: Own::Lower,
            when: When::ConnectingWithTimer,
            also: also::LIFTED,
        }),
    },
    Row {
        option: SockOpt::UserTimeout,
        name: "TCP_USER_TIMEOUT",
        level: SOL_TCP,
        number: 18,
        example: 60_000,
        kept: Some(Kept {
            former: 0,
            largest: i32::MAX.cast_unsigned(),
            own: Own::Any,
            when: When::Established,
            also: 0,
        }),
    },
    Row {
        option: SockOpt::SynCnt,
        name: "TCP_SYNCNT",
        level: SOL_TCP,
        number: 7,
        example: 3,
        kept: None,
    },
    Row {
        option: SockOpt::TxRehash,
        name: "SO_TXREHASH",
        level: SOL_SOCKET,
        number: 74,
        example: 0,
        kept: None,
    },
    Row {
        option: SockOpt::InitialWindow,
        name: "TCP_BPF_IW",
        level: SOL_TCP,
        number: 1001,
        example: 10,
        kept: None,
    },
    Row {
        option: SockOpt::CbFlags,
        name: "TCP_BPF_SOCK_OPS_CB_FLAGS",
        level: SOL_TCP,
        number: 1008,
        example: 1,
        kept: None,
    },
];

/// `TCP_RTO_MIN` and `TCP_DELACK_MAX`: the kernel's own values, and the largest that the options take.
pub const LARGEST_US: u32 = 200_000;
/// `TCP_RTO_MAX`, milliseconds.
pub const RTO_MAX_MS: u32 = 120_000;

impl SockOpt {
    /// Number of options.
    pub const COUNT: usize = 9;
    /// Number of options that a policy sets.
    pub const KEPT: usize = 5;

    /// What a policy sets the option to; `None`: it leaves the kernel's own value. An option that no policy sets has
    /// no value either.
    #[inline(always)]
    #[must_use]
    pub const fn wanted(self, policy: &Policy) -> Option<u32> {
        match self {
            Self::RtoMin => unless_zero(policy.rto_min_us),
            Self::DelackMax => unless_zero(policy.delack_max_us),
            Self::ThinLinear if policy.flags & policy_flags::THIN_LINEAR_SET == 0 => None,
            Self::ThinLinear => Some((policy.flags / policy_flags::THIN_LINEAR) & 1),
            Self::RtoMax => unless_zero(policy.rto_max_ms),
            Self::UserTimeout => unless_zero(policy.user_timeout_ms),
            Self::SynCnt | Self::TxRehash | Self::InitialWindow | Self::CbFlags => None,
        }
    }

    /// The option's row.
    #[inline(always)]
    #[must_use]
    pub const fn row(self) -> &'static Row {
        &TABLE[self as usize]
    }

    /// The option with an index, or the last one.
    #[inline(always)]
    #[must_use]
    pub const fn at(index: usize) -> Self {
        let last = Self::COUNT - 1;
        TABLE[if index < last { index } else { last }].option
    }

    /// Whether the option has a property: a bit of [`also`].
    #[inline(always)]
    #[must_use]
    pub const fn is(self, property: u32) -> bool {
        match self.row().kept {
            Some(kept) => kept.also & property != 0,
            None => false,
        }
    }

    /// Whether an own value of the socket is stricter than a policy's and therefore stays.
    #[inline(always)]
    #[must_use]
    pub const fn keeps_own(self, own: u32, policys: u32) -> bool {
        match self.row().kept {
            Some(Kept {
                own: Own::Lower, ..
            }) => own < policys,
            Some(Kept {
                own: Own::Higher, ..
            }) => own > policys && own != crate::Remembered::UNKNOWN,
            Some(Kept { own: Own::Any, .. }) => own != 0 && own != crate::Remembered::UNKNOWN,
            None => false,
        }
    }
}

/// 0 means that the policy does not set the option.
#[inline(always)]
const fn unless_zero(value: u32) -> Option<u32> {
    if value == 0 { None } else { Some(value) }
}

const _: () = {
    // The masks of `Options` have a bit for each.
    assert!(SockOpt::KEPT <= crate::MAX_KEPT && crate::MAX_KEPT <= SockOpt::COUNT);
    let mut index = 0;
    while index < SockOpt::COUNT {
        let row = &TABLE[index];
        assert!(row.option as usize == index, "a row in the wrong place");
        assert!(row.kept.is_some() == (index < SockOpt::KEPT));
        index += 1;
    }
};

#[cfg(test)]
mod tests {
    use super::*;

    const UNKNOWN: u32 = crate::Remembered::UNKNOWN;

    #[test]
    fn stricter_own_values_stay() {
        for (option, own, policys, stays) in [
            (SockOpt::RtoMin, 40_000, 100_000, true),
            (SockOpt::RtoMin, 100_000, 40_000, false),
            (SockOpt::RtoMin, UNKNOWN, 40_000, false),
            (SockOpt::ThinLinear, 1, 0, true),
            (SockOpt::ThinLinear, 0, 1, false),
            (SockOpt::ThinLinear, UNKNOWN, 0, false),
            (SockOpt::UserTimeout, 60_000, 20_000, true),
            (SockOpt::UserTimeout, 0, 20_000, false),
            (SockOpt::UserTimeout, UNKNOWN, 20_000, false),
        ] {
            assert_eq!(option.keeps_own(own, policys), stays, "{option:?} {own}");
        }
    }

    /// An option that is set once established must not shorten connect(), and one that is recognised by its value must
    /// not need another moment.
    #[test]
    fn recognised_options_are_set_while_connecting() {
        for row in TABLE {
            let Some(kept) = row.kept else { continue };
            assert!(kept.former <= kept.largest, "{row:?}");
            assert_ne!(row.example, kept.former, "{row:?}");
            if row.option.is(also::RECOGNISED) {
                assert_eq!(kept.when, When::Connecting, "{row:?}");
            }
        }
    }
}
