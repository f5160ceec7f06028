//! Per-socket state that lasts between callbacks.

use crate::{SockOpt, event::COMM_LEN, series::Series, syn::Attempt};

/// Per-socket state that lasts between callbacks (value of `SOCKETS`). Most connections have none: see
/// [`crate::policy_flags::STORED`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SocketState {
    /// The socket's [`crate::arm`]; 0 (no policy) after the socket was reconnected to an address without an entry.
    pub arm: u32,
    /// [`crate::Policy::generation`] of the policy when it was assigned.
    pub generation: u32,
    /// One of [`crate::direction`].
    pub direction: u32,
    /// Bits of [`socket_flags`].
    pub flags: u32,
    /// State of the connection's handshake.
    pub handshake: Handshake,
    /// Options that the program has set on the socket, or will set.
    pub options: Options,
    /// The SYN schedule while the socket connects; after that its [`Series`] of timeouts ([`Schedule::series`]).
    pub schedule: Schedule,
    /// State for statistics and events.
    pub watch: Watch,
}

/// The SYN schedule of a connecting socket, from its first loss on.
///
/// TCP_USER_TIMEOUT and TCP_RTO_MAX_MS are on the socket only for the moment in which the kernel arms the timer:
/// [`schedule_flags::SHAPED`], [`schedule_flags::HELD`]. Only TCP_SYNCNT stays until the attempt ends.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Schedule {
    /// What the rule remembers.
    pub attempt: Attempt,
    /// The TCP_USER_TIMEOUT that makes the next timer, milliseconds; 0: the kernel's own interval is right.
    pub user_timeout_ms: u32,
    /// The socket's own TCP_USER_TIMEOUT, milliseconds.
    pub own_user_timeout_ms: u32,
    /// The limit of the doubling, milliseconds; while [`schedule_flags::HELD`], the socket's own TCP_RTO_MAX_MS. 0:
    /// none.
    pub rto_max_ms: u32,
    /// The socket's own TCP_SYNCNT, or its namespace's `tcp_syn_retries`.
    pub own_retries: u8,
    /// The TCP_SYNCNT that the program has set; 0: none.
    pub retries: u8,
    /// Bits of [`schedule_flags`].
    pub flags: u16,
}

impl Schedule {
    /// The series of an established connection, if [`socket_flags::SERIES`] is set. It has no memory of its own, so that
    /// the storage fits its allocation class. Only `attempt.start` is still needed then.
    #[inline(always)]
    #[must_use]
    pub const fn series(&self) -> Series {
        Series {
            start_us: self.attempt.answered,
            last_us: self.user_timeout_ms,
            gain_us: self.own_user_timeout_ms.cast_signed(),
            dsacks: self.rto_max_ms,
        }
    }

    /// Keeps the series of an established connection.
    #[inline(always)]
    pub const fn keep(&mut self, series: Series) {
        self.attempt.answered = series.start_us;
        self.user_timeout_ms = series.last_us;
        self.own_user_timeout_ms = series.gain_us.cast_unsigned();
        self.rto_max_ms = series.dsacks;
    }
}

/// Bits of [`Schedule::flags`].
pub mod schedule_flags {
    /// RTO_CB has planned a timer that no callback has seen armed.
    pub const PLANNED: u16 = 1 << 0;
    /// TCP_USER_TIMEOUT is the program's.
    pub const SHAPED: u16 = 1 << 1;
    /// TCP_RTO_MAX_MS is the program's.
    pub const HELD: u16 = 1 << 2;
    /// SO_TXREHASH is off.
    pub const KEEPS_PATH: u16 = 1 << 3;
    /// RETRANS_CB did not follow RTO_CB: the host has no route, or the last SYN is still in its queue.
    pub const NOT_SENT: u16 = 1 << 4;
    /// RETRANS_CB has followed RTO_CB.
    pub const SENT: u16 = 1 << 6;
    /// TCP_USER_TIMEOUT stays until it ends the attempt: the policy says when connect() gives up.
    pub const LAST: u16 = 1 << 5;
}

/// The handshake of a connection.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Handshake {
    /// During the handshake: bpf_ktime_get_ns() at its start (active). After it: its duration in nanoseconds; 0 if
    /// unknown (passive, with a retransmission).
    pub ns: u64,
    /// The initial RTO of this connection's SYN, jiffies. The kernel asks for it again at each SYN timeout. 0: the
    /// kernel's own, for which the program does not reply.
    pub initial_rto_jiffies: u32,
    /// The initial RTO in effect, the kernel's own included, microseconds.
    pub initial_rto_us: u32,
    /// The part of the socket's total_retrans that is already counted.
    pub retransmissions_counted: u32,
    /// Retransmissions that are not judged yet, because judging them requires RTT samples; or [`Handshake::WHOLE`].
    pub in_question: u16,
    /// The maximum number of these that can be spurious.
    pub spurious_at_most: u16,
    /// RTT samples since the connection was established.
    pub samples: u32,
    /// The longest of these samples, microseconds; 0 if the kernel does not pass the sample (before Linux 6.10).
    pub rtt_max_us: u32,
    /// When the last two copies of the SYN were sent, microseconds since the first.
    pub copies_us: [u32; 2],
}

impl Handshake {
    /// [`Handshake::in_question`] of a long handshake without retransmissions: RTT samples show whether its time is the
    /// path RTT.
    pub const WHOLE: u16 = u16::MAX;
}

/// Most options that a policy sets: one bit each in the masks of [`Options`].
pub const MAX_KEPT: usize = 8;

/// Options of a socket that a policy controls.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// The values, by [`SockOpt`].
    kept: [Remembered; SockOpt::KEPT],
    // Fields that are reset together are adjacent and aligned: the compiler would call memset() for others, which the
    // verifier of Linux 6.1 refuses.
    /// Options to set once the connection is established. Their value is in `kept`, though they are not set yet.
    later: u8,
    /// [`crate::Policy::linear_retries`] when this connection began; 0: the kernel's own number.
    pub linear_retries: u8,
    /// [`crate::Policy::restart_hz`] when this connection began; 0 after another program has set the option.
    pub restart_hz: u16,
    /// Options that the program has set, a bit for each.
    set: u8,
    /// [`settled`] bits of the options that the current callback sets. Kept in the map because the verifier does not
    /// track map values, so this does not multiply its states.
    pub settled: u8,
    /// Keeps the size a multiple of 4.
    pub reserved: u16,
    /// [`crate::Policy::rto_min_us`] when this connection began, if `restart_hz` is not 0. ([`SockOpt::RtoMin`] has
    /// the value that is set now.)
    pub restart_rto_min_us: u32,
    /// [`crate::Policy::epochs`] of this connection's initial RTO; 0: it has no current epoch.
    pub epoch: u32,
}

impl Options {
    /// Whether the program has set any option of the socket.
    #[inline(always)]
    #[must_use]
    pub const fn is_any_set(&self) -> bool {
        self.set != 0
    }

    /// Whether the program has set the option.
    #[inline(always)]
    #[must_use]
    pub const fn is_set(&self, option: SockOpt) -> bool {
        self.set & bit(option) != 0
    }

    /// The value that the program has set.
    #[inline(always)]
    #[must_use]
    pub const fn value(&self, option: SockOpt) -> Option<u32> {
        if self.is_set(option) {
            Some(self.kept[option as usize].value)
        } else {
            None
        }
    }

    /// Notes that the program has set the option to `value` where `before` was.
    #[inline(always)]
    pub const fn note(&mut self, option: SockOpt, value: u32, before: u32) {
        self.kept[option as usize] = Remembered { value, before };
        self.set |= bit(option);
    }

    /// Notes that the option has the value from before again.
    #[inline(always)]
    pub const fn forget(&mut self, option: SockOpt) {
        self.set &= !bit(option);
    }

    /// Notes that the option is to be set once the connection is established. An option that is still set is left
    /// alone: its value tells whether another program has changed it since.
    #[inline(always)]
    pub const fn set_later(&mut self, option: SockOpt, value: u32) {
        if !self.is_set(option) {
            self.kept[option as usize].value = value;
            self.later |= bit(option);
        }
    }

    /// The value to set once the connection is established.
    #[inline(always)]
    #[must_use]
    pub const fn later(&self, option: SockOpt) -> Option<u32> {
        if self.later & bit(option) != 0 {
            Some(self.kept[option as usize].value)
        } else {
            None
        }
    }

    /// Whether the option is set, or is to be set once the connection is established.
    #[inline(always)]
    #[must_use]
    pub const fn is_wanted(&self, option: SockOpt) -> bool {
        (self.set | self.later) & bit(option) != 0
    }

    /// The option is not to be set later either.
    #[inline(always)]
    pub const fn never_set(&mut self, option: SockOpt) {
        self.later &= !bit(option);
    }

    /// Nothing is to be set once the connection is established.
    #[inline(always)]
    pub const fn set_nothing_later(&mut self) {
        self.later = 0;
    }

    /// The value to remember as the one before, when the socket now reports `in_force` and the program is about to set
    /// the option. A value that the program itself set is never remembered as the one before.
    #[inline(always)]
    #[must_use]
    pub fn before(&self, option: SockOpt, in_force: Option<u32>) -> u32 {
        let Remembered { value, before } = self.remembered(option);
        match in_force {
            Some(current) if self.is_set(option) && current == value => before,
            Some(current) => current,
            None if self.is_set(option) => before,
            None => Remembered::UNKNOWN,
        }
    }

    /// The value to restore when the socket now reports `in_force`; `None` if the program did not set the option, or if
    /// the application or another program has changed it since. `default` is the kernel's own value.
    #[inline(always)]
    #[must_use]
    pub fn to_restore(&self, option: SockOpt, in_force: Option<u32>, default: u32) -> Option<u32> {
        let Remembered { value, before } = self.remembered(option);
        if !self.is_set(option) {
            return None;
        }
        match in_force {
            Some(current) if current != value => None,
            _ if before == Remembered::UNKNOWN => Some(default),
            _ => Some(before),
        }
    }

    /// What is remembered of an option, read in any case: the compiler may compute with a register that has no value
    /// where the option is not set, which the verifier refuses (Linux 6.1).
    #[inline(always)]
    fn remembered(&self, option: SockOpt) -> Remembered {
        // SAFETY: a reference is valid for reads.
        unsafe { core::ptr::read_volatile(&raw const self.kept[option as usize]) }
    }
}

#[inline(always)]
const fn bit(option: SockOpt) -> u8 {
    1 << option as u32
}

/// State of a connection for statistics and events.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Watch {
    /// bpf_ktime_get_ns() of the last counted sample of the smoothed RTT.
    pub srtt_sampled_ns: u64,
    /// The value of bytes_acked at which everything that was outstanding at the last retransmission timeout is
    /// acknowledged. Until then, retransmissions belong to that timeout. 0: no timeout yet.
    pub loss_end: u64,
    /// Number of connections that this one represents in samples: [`crate::globals::SAMPLING`] if it was drawn, 1 if it
    /// has storage for another reason.
    pub weight: u32,
    /// Process that called connect(); 0: unknown.
    pub pid: u32,
    /// The process's name, padded with NUL.
    pub comm: [u8; COMM_LEN],
}

/// Bits of [`SocketState::flags`].
pub mod socket_flags {
    /// The connection is not counted: it is the agent's own probe, recognised by [`crate::PROBE_MARK`].
    pub const UNCOUNTED: u32 = 1 << 0;
    /// The connection keeps all of the kernel's own timers.
    pub const KERNEL_TIMERS: u32 = 1 << 1;
    /// The RTO hook has switched linear mode off.
    pub const LINEAR_OFF: u32 = 1 << 2;
    /// The socket is connecting: this is the state of the attempt under way.
    pub const CONNECTING: u32 = 1 << 3;
    /// From its first loss until it is established or has failed, the socket has a [`super::Schedule`], and is counted
    /// in [`crate::maps::SCHEDULES`].
    pub const SYN_SCHEDULE: u32 = 1 << 4;
    /// The connection is established, and a [`crate::series`] of timeouts has begun.
    pub const SERIES: u32 = 1 << 5;
}

/// Bits of [`Options::settled`].
pub mod settled {
    /// The kernel accepted a value.
    pub const CHANGED: u8 = 1;
    /// The kernel refused a value.
    pub const REFUSED: u8 = 2;
}

/// A value that the program has set, and the one to restore.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Remembered {
    /// The value that the program has set, or will set.
    pub value: u32,
    /// The value before; [`Remembered::UNKNOWN`] if the kernel does not report it.
    pub before: u32,
}

impl Remembered {
    /// The kernel did not report the option's value.
    pub const UNKNOWN: u32 = u32::MAX;
}

#[cfg(test)]
mod tests {
    use super::*;

    const OPTION: SockOpt = SockOpt::RtoMin;

    fn set() -> Options {
        let mut options = Options::default();
        options.note(OPTION, 8000, 200_000);
        options
    }

    #[test]
    fn a_bit_has_one_meaning() {
        use socket_flags::*;
        const ALL: [u32; 6] = [
            UNCOUNTED,
            KERNEL_TIMERS,
            LINEAR_OFF,
            CONNECTING,
            SYN_SCHEDULE,
            SERIES,
        ];
        let mut seen = 0;
        for bit in ALL {
            assert_eq!((bit.count_ones(), seen & bit), (1, 0));
            seen |= bit;
        }
    }

    #[test]
    fn series_is_read_as_it_was_kept() {
        let series = Series {
            start_us: 1,
            last_us: u32::MAX,
            gain_us: -2,
            dsacks: 3,
        };
        let mut schedule = Schedule::default();
        schedule.attempt.start = 4;
        schedule.keep(series);
        assert_eq!((schedule.series(), schedule.attempt.start), (series, 4));
    }

    #[test]
    fn value_before_is_never_the_programs_own() {
        let none = Options::default();
        assert_eq!(none.before(OPTION, Some(7)), 7);
        assert_eq!(none.before(OPTION, None), Remembered::UNKNOWN);
        assert_eq!(set().before(OPTION, Some(8000)), 200_000);
        // The application has set another value since.
        assert_eq!(set().before(OPTION, Some(9000)), 9000);
        assert_eq!(set().before(OPTION, None), 200_000);
    }

    #[test]
    fn only_values_of_the_program_are_restored() {
        assert_eq!(Options::default().to_restore(OPTION, Some(7), 1), None);
        assert_eq!(set().to_restore(OPTION, Some(8000), 1), Some(200_000));
        assert_eq!(set().to_restore(OPTION, Some(9000), 1), None);
        assert_eq!(set().to_restore(OPTION, None, 1), Some(200_000));
        let mut unknown = Options::default();
        unknown.note(OPTION, 8000, Remembered::UNKNOWN);
        assert_eq!(unknown.to_restore(OPTION, Some(8000), 1), Some(1));
    }

    #[test]
    fn options_have_places_of_their_own() {
        let mut options = Options::default();
        for option in (0..SockOpt::KEPT).map(SockOpt::at) {
            assert_eq!((options.value(option), options.later(option)), (None, None));
            options.set_later(option, option as u32);
            assert!(!options.is_set(option));
            options.note(option, 10 + option as u32, 20);
        }
        for option in (0..SockOpt::KEPT).map(SockOpt::at) {
            assert_eq!(options.value(option), Some(10 + option as u32));
            options.set_later(option, 0);
            assert_eq!(options.value(option), Some(10 + option as u32));
            options.forget(option);
            assert_eq!(options.value(option), None);
        }
        assert!(!options.is_any_set());
        options.set_nothing_later();
        assert_eq!(options.later(OPTION), None);
    }
}
