//! What a socket remembers between callbacks.

use crate::event::COMM_LEN;

/// What a socket remembers between callbacks (value of `SOCKETS`). Most connections have none: see
/// [`crate::policy_flags::STORED`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SocketState {
    /// Its policy's [`crate::arm`]; 0, which is no policy's, once the socket was reconnected to an address without an
    /// entry.
    pub arm: u32,
    /// [`crate::Policy::generation`] of its policy at that time.
    pub generation: u32,
    /// One of [`crate::direction`].
    pub direction: u32,
    /// Bits of [`socket_flags`].
    pub flags: u32,
    /// Of the connection's handshake.
    pub handshake: Handshake,
    /// What the program set on the socket, or is to set.
    pub options: Options,
    /// For statistics and events.
    pub watch: Watch,
}

/// The handshake of a connection.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Handshake {
    /// bpf_ktime_get_ns() when it began (active). Once it is over: how long it took, nanoseconds; 0 where that is
    /// not known (passive).
    pub ns: u64,
    /// The SYN's initial RTO that this connection began with, jiffies; asked again at each SYN timeout. 0: the
    /// kernel's own, of which nothing is answered.
    pub initial_rto_jiffies: u32,
    /// The initial RTO in force, the kernel's own included, microseconds.
    pub initial_rto_us: u32,
    /// The socket's total_retrans already counted.
    pub retransmissions_counted: u32,
    /// Retransmissions of which it is not known yet whether they were needed.
    pub in_question: u32,
    /// At most so many of those were spurious.
    pub spurious_at_most: u32,
    /// RTT samples seen since.
    pub samples: u32,
}

/// The options of a socket that a policy decides.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// What is set, and what it was before.
    pub rto_min: Remembered,
    /// As above.
    pub delack_max: Remembered,
    /// As above.
    pub thin_linear: Remembered,
    /// As above.
    pub rto_max: Remembered,
    /// As above.
    pub user_timeout: Remembered,
    /// TCP_SYNCNT the socket had before this program set another; 0: not touched.
    pub syn_retries_before: u32,
    /// TCP_SYNCNT this program set; 0: not touched.
    pub syn_retries_set: u32,
    /// [`crate::Policy::user_timeout_ms`] this connection began with, for when it is established.
    pub user_timeout_ms: u32,
    /// [`crate::Policy::linear_retries`] this connection began with; 0: the kernel's own number.
    pub linear_retries: u32,
    /// [`crate::Policy::restart_hz`] this connection began with; 0 once somebody else has set the option.
    pub restart_hz: u32,
    /// [`crate::Policy::rto_min_us`] this connection began with, where `restart_hz` is not 0. (What is set now
    /// is in `rto_min`.)
    pub restart_rto_min_us: u32,
    /// Bits of bpf_sock_ops.bpf_sock_ops_cb_flags that this program added.
    pub cb_flags_added: u32,
    /// Of the options that are being set: [`settled`] bits. Only one callback's; kept here since what a
    /// map holds does not multiply the states the verifier goes through.
    pub settled: u32,
    /// [`crate::Policy::epochs`] of the initial RTO this connection began with; 0: of no present one.
    pub epoch: u32,
}

/// What is watched of a connection.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Watch {
    /// bpf_ktime_get_ns() of the last sample of the smoothed RTT that was counted.
    pub srtt_sampled_ns: u64,
    /// Bytes that will have been acknowledged once everything is that was outstanding at the last
    /// retransmission timeout: until then what is sent again belongs to that timeout. 0: none was.
    pub loss_end: u64,
    /// How many connections this one stands for in what is sampled: [`crate::globals::SAMPLING`] for one that was
    /// chosen, 1 for one that has storage for another reason.
    pub weight: u32,
    /// Process that called connect(); 0: not known.
    pub pid: u32,
    /// Its name, padded with NUL.
    pub comm: [u8; COMM_LEN],
}

/// Bits of [`SocketState::flags`].
pub mod socket_flags {
    /// The connection is in no count: the agent's own probe, known by [`crate::PROBE_MARK`].
    pub const UNCOUNTED: u32 = 1 << 0;
    /// The connection keeps all of the kernel's timers.
    pub const KERNEL_TIMERS: u32 = 1 << 1;
    /// The RTO hook has linear mode switched off.
    pub const LINEAR_OFF: u32 = 1 << 2;
    /// The initial RTO was given, and counted, for this connection attempt.
    pub const INITIAL_RTO_SET: u32 = 1 << 3;
    /// The kernel has given the connection attempt up.
    pub const EXPIRED: u32 = 1 << 5;
    /// Delays of the peer's ACKs are counted.
    pub const MEASURES_ACKS: u32 = 1 << 4;
    /// A brake held when the connection began: it gets the policy's rto_max when it is established.
    pub const RTO_MAX_LATER: u32 = 1 << 6;
}

/// Bits of [`Options::settled`].
pub mod settled {
    /// The kernel took a value.
    pub const CHANGED: u32 = 1;
    /// It did not.
    pub const REFUSED: u32 = 2;
}

/// One option of a socket, so that it can be given back.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Remembered {
    /// 1 if the program set it.
    pub is_set: u32,
    /// The value it set.
    pub value: u32,
    /// The value before; [`Remembered::UNKNOWN`] where the kernel does not tell.
    pub before: u32,
}

impl Remembered {
    /// The kernel did not say what the option was.
    pub const UNKNOWN: u32 = u32::MAX;

    /// What to remember as the value before, when the socket now says `in_force` and the program
    /// sets the option: what the program set itself does not count.
    #[inline(always)]
    #[must_use]
    pub const fn before(&self, in_force: Option<u32>) -> u32 {
        match in_force {
            Some(value) if self.is_set != 0 && value == self.value => self.before,
            Some(value) => value,
            None if self.is_set != 0 => self.before,
            None => Self::UNKNOWN,
        }
    }

    /// The value to give back, when the socket now says `in_force`; `None` if the program did not
    /// set the option or somebody has set another value since. `default` is the kernel's own value.
    #[inline(always)]
    #[must_use]
    pub const fn to_restore(&self, in_force: Option<u32>, default: u32) -> Option<u32> {
        if self.is_set == 0 {
            return None;
        }
        match in_force {
            Some(value) if value != self.value => None,
            _ if self.before == Self::UNKNOWN => Some(default),
            _ => Some(self.before),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SET: Remembered = Remembered {
        is_set: 1,
        value: 8000,
        before: 200_000,
    };

    #[test]
    fn a_bit_has_one_meaning() {
        use socket_flags::*;
        const ALL: [u32; 7] = [
            UNCOUNTED,
            KERNEL_TIMERS,
            LINEAR_OFF,
            INITIAL_RTO_SET,
            EXPIRED,
            MEASURES_ACKS,
            RTO_MAX_LATER,
        ];
        let mut seen = 0;
        for bit in ALL {
            assert_eq!((bit.count_ones(), seen & bit), (1, 0));
            seen |= bit;
        }
    }

    #[test]
    fn the_value_before_is_never_the_programs_own() {
        assert_eq!(Remembered::default().before(Some(7)), 7);
        assert_eq!(Remembered::default().before(None), Remembered::UNKNOWN);
        assert_eq!(SET.before(Some(8000)), 200_000);
        // Somebody has set another since.
        assert_eq!(SET.before(Some(9000)), 9000);
        assert_eq!(SET.before(None), 200_000);
    }

    #[test]
    fn only_what_is_still_the_programs_is_given_back() {
        assert_eq!(Remembered::default().to_restore(Some(7), 1), None);
        assert_eq!(SET.to_restore(Some(8000), 1), Some(200_000));
        assert_eq!(SET.to_restore(Some(9000), 1), None);
        assert_eq!(SET.to_restore(None, 1), Some(200_000));
        let unknown = Remembered {
            before: Remembered::UNKNOWN,
            ..SET
        };
        assert_eq!(unknown.to_restore(Some(8000), 1), Some(1));
    }
}
