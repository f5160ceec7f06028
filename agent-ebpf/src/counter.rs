//! The counters of a policy, by their offset in memory.

use core::mem::{offset_of, size_of};

use rto_agent_common::{Counters, RTO_STEPS, SockOpt};

/// A counter, as its offset in [`Counters`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counter(usize);

impl Counter {
    /// [`Counters::untimed`].
    pub const UNTIMED: Self = Self(offset_of!(Counters, untimed));
    /// [`Counters::attempts`].
    pub const ATTEMPTS: Self = Self(offset_of!(Counters, attempts));
    /// [`Counters::handshake_retransmissions`].
    pub const HANDSHAKE_RETRANSMISSIONS: Self =
        Self(offset_of!(Counters, handshake_retransmissions));
    /// [`Counters::spurious`].
    pub const SPURIOUS: Self = Self(offset_of!(Counters, spurious));
    /// [`Counters::undecided`].
    pub const UNDECIDED: Self = Self(offset_of!(Counters, undecided));
    /// [`Counters::recovered`].
    pub const RECOVERED: Self = Self(offset_of!(Counters, recovered));
    /// [`Counters::time_saved_us`].
    pub const TIME_SAVED: Self = Self(offset_of!(Counters, time_saved_us));
    /// [`Counters::time_lost_us`].
    pub const TIME_LOST: Self = Self(offset_of!(Counters, time_lost_us));
    /// [`Counters::storage_failures`].
    pub const STORAGE_FAILURES: Self = Self(offset_of!(Counters, storage_failures));

    /// [`Counters::expired`].
    pub const EXPIRED: Self = Self(offset_of!(Counters, expired));
    /// [`Counters::tail_loss_probes`].
    pub const TAIL_LOSS_PROBES: Self = Self(offset_of!(Counters, tail_loss_probes));
    /// [`Counters::segments_retransmitted`].
    pub const SEGMENTS_RETRANSMITTED: Self = Self(offset_of!(Counters, segments_retransmitted));
    /// [`Counters::linear_ended`].
    pub const LINEAR_ENDED: Self = Self(offset_of!(Counters, linear_ended));
    /// [`Counters::open_sockets`].
    pub const OPEN_SOCKETS: Self = Self(offset_of!(Counters, open_sockets));
    /// [`Counters::aborted`].
    pub const ABORTED: Self = Self(offset_of!(Counters, aborted));
    /// [`Counters::late`].
    pub const LATE: Self = Self(offset_of!(Counters, late));
    /// [`Counters::spurious_connections`].
    pub const SPURIOUS_CONNECTIONS: Self = Self(offset_of!(Counters, spurious_connections));
    /// [`Counters::dsack_connections`].
    pub const DSACK_CONNECTIONS: Self = Self(offset_of!(Counters, dsack_connections));
    /// [`Counters::retransmitted_handshakes`].
    pub const RETRANSMITTED_HANDSHAKES: Self = Self(offset_of!(Counters, retransmitted_handshakes));
    /// [`Counters::aborted_after_loss`].
    pub const ABORTED_AFTER_LOSS: Self = Self(offset_of!(Counters, aborted_after_loss));
    /// [`Counters::fallbacks`].
    pub const FALLBACKS: Self = Self(offset_of!(Counters, fallbacks));
    /// [`Counters::callbacks_lost`].
    pub const CALLBACKS_LOST: Self = Self(offset_of!(Counters, callbacks_lost));
    /// [`Counters::data_time_saved_us`].
    pub const DATA_TIME_SAVED: Self = Self(offset_of!(Counters, data_time_saved_us));
    /// [`Counters::data_time_lost_us`].
    pub const DATA_TIME_LOST: Self = Self(offset_of!(Counters, data_time_lost_us));
    /// [`Counters::rtos`] after this number of consecutive timeouts; higher numbers belong to the last step.
    #[inline(always)]
    #[must_use]
    pub const fn rtos(step: Step) -> Self {
        Self(offset_of!(Counters, rtos) + step.0 * size_of::<u64>())
    }

    /// [`Counters::setsockopt_failures`] of an option.
    #[inline(always)]
    #[must_use]
    pub const fn failures_of(option: SockOpt) -> Self {
        Self(offset_of!(Counters, setsockopt_failures) + option as usize * size_of::<u64>())
    }

    /// Bytes from the start of [`Counters`]; a `u64` is at this offset.
    #[inline(always)]
    #[must_use]
    pub const fn offset(self) -> usize {
        self.0
    }
}

/// An index into [`Counters::rtos`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step(usize);

impl Step {
    /// The step after this number of consecutive timeouts.
    #[inline(always)]
    #[must_use]
    pub const fn of(before: u32) -> Self {
        let last = RTO_STEPS - 1;
        let before = before as usize;
        Self(if before > last { last } else { before })
    }

    /// The index.
    #[inline(always)]
    #[must_use]
    pub const fn index(self) -> usize {
        self.0
    }

    /// From an index below [`RTO_STEPS`].
    #[inline(always)]
    #[must_use]
    pub const fn with_index(index: usize) -> Self {
        Self(index)
    }
}

#[cfg(test)]
mod tests {
    use rto_agent_common::SOCKET_OPTIONS;

    use super::*;

    #[test]
    fn steps_end_at_the_last() {
        for before in [0, 1, 6, 7, 8, u32::MAX] {
            let step = Step::of(before);
            assert_eq!(step.index(), before.min(7) as usize);
            assert!(step.index() < RTO_STEPS);
        }
    }

    #[test]
    fn every_counter_is_a_word_of_its_own() {
        let named = [
            Counter::UNTIMED,
            Counter::ATTEMPTS,
            Counter::HANDSHAKE_RETRANSMISSIONS,
            Counter::SPURIOUS,
            Counter::UNDECIDED,
            Counter::RECOVERED,
            Counter::TIME_SAVED,
            Counter::TIME_LOST,
            Counter::ABORTED,
            Counter::STORAGE_FAILURES,
            Counter::EXPIRED,
            Counter::TAIL_LOSS_PROBES,
            Counter::SEGMENTS_RETRANSMITTED,
            Counter::LINEAR_ENDED,
            Counter::OPEN_SOCKETS,
            Counter::LATE,
            Counter::SPURIOUS_CONNECTIONS,
            Counter::DSACK_CONNECTIONS,
            Counter::RETRANSMITTED_HANDSHAKES,
            Counter::ABORTED_AFTER_LOSS,
            Counter::FALLBACKS,
            Counter::CALLBACKS_LOST,
            Counter::DATA_TIME_SAVED,
            Counter::DATA_TIME_LOST,
        ];
        let mut seen = [false; size_of::<Counters>() / size_of::<u64>()];
        let failures = SOCKET_OPTIONS
            .iter()
            .map(|row| Counter::failures_of(row.option));
        for counter in named
            .into_iter()
            .chain(failures)
            .chain((0..8).map(|n| Counter::rtos(Step::of(n))))
        {
            assert_eq!(counter.offset() % size_of::<u64>(), 0);
            let word = &mut seen[counter.offset() / size_of::<u64>()];
            assert!(!*word, "{counter:?} twice");
            *word = true;
        }
    }
}
