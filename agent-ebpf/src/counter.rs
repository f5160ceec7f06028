//! Which counter of a policy an event belongs to.

use core::mem::{offset_of, size_of};

use rto_agent_common::{Counters, SockOpt};

/// One counter, as its place in [`Counters`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counter(usize);

impl Counter {
    /// [`Counters::syn_timeouts_set`].
    pub const SYN_TIMEOUTS_SET: Self = Self(offset_of!(Counters, syn_timeouts_set));
    /// [`Counters::syn_ack_timeouts_set`].
    pub const SYN_ACK_TIMEOUTS_SET: Self = Self(offset_of!(Counters, syn_ack_timeouts_set));
    /// [`Counters::established_active`].
    pub const ESTABLISHED_ACTIVE: Self = Self(offset_of!(Counters, established_active));
    /// [`Counters::established_passive`].
    pub const ESTABLISHED_PASSIVE: Self = Self(offset_of!(Counters, established_passive));
    /// [`Counters::syn_retransmissions`].
    pub const SYN_RETRANSMISSIONS: Self = Self(offset_of!(Counters, syn_retransmissions));
    /// [`Counters::syn_ack_retransmissions`].
    pub const SYN_ACK_RETRANSMISSIONS: Self = Self(offset_of!(Counters, syn_ack_retransmissions));
    /// [`Counters::storage_failures`].
    pub const STORAGE_FAILURES: Self = Self(offset_of!(Counters, storage_failures));

    /// [`Counters::setsockopt_failures`] of an option.
    #[inline(always)]
    #[must_use]
    pub const fn failures_of(option: SockOpt) -> Self {
        Self(offset_of!(Counters, setsockopt_failures) + option as usize * size_of::<u64>())
    }

    /// Bytes from the start of [`Counters`]; a `u64` lies there.
    #[inline(always)]
    #[must_use]
    pub const fn offset(self) -> usize {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_counter_is_a_word_of_its_own() {
        let named = [
            Counter::SYN_TIMEOUTS_SET,
            Counter::SYN_ACK_TIMEOUTS_SET,
            Counter::ESTABLISHED_ACTIVE,
            Counter::ESTABLISHED_PASSIVE,
            Counter::SYN_RETRANSMISSIONS,
            Counter::SYN_ACK_RETRANSMISSIONS,
            Counter::STORAGE_FAILURES,
        ];
        let mut seen = [false; size_of::<Counters>() / size_of::<u64>()];
        let failures = SockOpt::NAMES
            .iter()
            .map(|(option, _)| Counter::failures_of(*option));
        for counter in named.into_iter().chain(failures) {
            assert_eq!(counter.offset() % size_of::<u64>(), 0);
            let word = &mut seen[counter.offset() / size_of::<u64>()];
            assert!(!*word, "{counter:?} twice");
            *word = true;
        }
    }
}
