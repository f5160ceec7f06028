//! Compares the kernel's maps with the desired state in parts, as other processes may write them.

use std::{
    sync::{Arc, mpsc},
    time::{Duration, Instant},
};

use rto_agent_core::{policy::differences::Cursor, wire::types::now_s};
use rto_agent_kernel::datapath::DatapathError;
use tracing::debug;

use super::{Done, Job, Message};
use crate::engine::{
    comparison::{Comparison, Part},
    snapshot::Snapshot,
};

/// Rounds in which all entries are compared, unless [`MOST_ENTRIES`] requires more: a million take
/// nine minutes, with a round every five seconds.
const ROUNDS: usize = 100;
/// Fewest entries compared in a round.
const LEAST_ENTRIES: usize = 4096;
/// More entries a round would take more than 0.5 % of a processor (1 us an entry, see
/// docs/reference/scale.md).
const MOST_ENTRIES: usize = 10_486;
/// After a complete comparison the job pauses for this multiple of its duration.
const PAUSE: u32 = 20;

/// Compares in parts, each on a thread of its own.
pub(in crate::engine) struct Comparing {
    messages: mpsc::Sender<Message>,
    cursor: Cursor,
    pending: Option<Job>,
    not_before: Instant,
    /// The next round compares everything.
    all_next: bool,
    /// When the current comparison began with the first entry, Unix seconds; `None`: it did not
    /// begin there.
    began_at_s: Option<u64>,
    /// When the last complete comparison began, Unix seconds.
    compared_at_s: Option<u64>,
}

impl Comparing {
    pub(in crate::engine) fn new(messages: mpsc::Sender<Message>) -> Self {
        Self {
            messages,
            cursor: Cursor::default(),
            pending: None,
            not_before: Instant::now(),
            all_next: false,
            began_at_s: None,
            compared_at_s: None,
        }
    }

    /// Begins to compare the next part, unless a comparison is running.
    pub(in crate::engine) fn consider(&mut self, snapshot: &Arc<Snapshot>) {
        if self.pending.is_some() || (Instant::now() < self.not_before && !self.all_next) {
            return;
        }
        let entries = if std::mem::take(&mut self.all_next) {
            self.cursor = Cursor::default();
            usize::MAX
        } else {
            let resolved = snapshot.resolved.as_ref();
            entries_of_round(resolved.map_or(0, |resolved| resolved.set.entries.len()))
        };
        let (snapshot, cursor) = (snapshot.clone(), self.cursor);
        if cursor.is_at_start() {
            self.began_at_s = Some(now_s());
        }
        let part = Part { cursor, entries };
        let work = move || Done::Compare(snapshot.compare_in_turn(part));
        match Job::begin("compare", &self.messages, Done::Compare(None), work) {
            Ok(job) => self.pending = Some(job),
            Err(e) => debug!("the kernel's maps were not compared: {e}"),
        }
    }

    /// The next round compares everything and does not wait.
    pub(in crate::engine) fn compare_all(&mut self) {
        self.all_next = true;
    }

    /// Handles the result of a part; returns whether the kernel differs, or cannot be read.
    pub(in crate::engine) fn done(
        &mut self,
        compared: Option<Result<Comparison, DatapathError>>,
    ) -> bool {
        self.pending = None;
        let Comparison {
            cursor,
            differences,
        } = match compared {
            Some(Ok(comparison)) => comparison,
            Some(Err(_)) => return true,
            // The engine changed the kernel during this part: it is compared again.
            None => return false,
        };
        self.cursor = cursor;
        if cursor.is_at_start() && differences.is_empty() {
            self.compared_at_s = self.began_at_s.take().or(self.compared_at_s);
        }
        !differences.is_empty()
    }

    /// The engine has compared everything, which took this long.
    pub(in crate::engine) fn all_compared(&mut self, began_at_s: u64, took: Duration) {
        self.cursor = Cursor::default();
        self.began_at_s = None;
        self.compared_at_s = Some(began_at_s);
        self.not_before = Instant::now() + PAUSE * took;
    }

    /// When all maps were last found correct or were repaired, Unix seconds.
    pub(in crate::engine) fn compared_at_s(&self) -> Option<u64> {
        self.compared_at_s
    }
}

/// How many of `all` entries are compared in a round.
fn entries_of_round(all: usize) -> usize {
    all.div_ceil(ROUNDS).clamp(LEAST_ENTRIES, MOST_ENTRIES)
}

#[cfg(test)]
mod tests {
    use rto_agent_core::policy::differences::{Difference, Differences};

    use super::*;
    use crate::engine::{actor::HEALTH_INTERVAL, config::EngineConfig};

    #[test]
    fn comparison_has_one_part_at_a_time() {
        let (messages, posted) = mpsc::channel();
        let mut comparing = Comparing::new(messages);
        let snapshot = Arc::new(Snapshot::starting(&EngineConfig::for_tests()));
        comparing.not_before = Instant::now() + Duration::from_secs(3600);
        comparing.consider(&snapshot);
        assert!(comparing.pending.is_none());
        comparing.not_before = Instant::now();
        comparing.consider(&snapshot);
        // There is no desired state to compare with yet.
        let done = posted.recv_timeout(Duration::from_secs(60)).unwrap();
        assert!(matches!(done, Message::Done(Done::Compare(None))));
        assert!(comparing.pending.is_some() && comparing.began_at_s.take().is_some());
        comparing.consider(&snapshot);
        assert!(comparing.began_at_s.is_none(), "one is under way");
        comparing.done(None);
        comparing.cursor.after = "10.0.0.0/8".parse().ok();
        comparing.consider(&snapshot);
        assert!(comparing.pending.is_some() && comparing.began_at_s.is_none());
        comparing.done(None);
        comparing.not_before = Instant::now() + Duration::from_secs(3600);
        comparing.compare_all();
        comparing.consider(&snapshot);
        assert!(comparing.pending.is_some() && comparing.began_at_s.is_some());
    }

    #[test]
    fn comparison_without_difference_records_its_begin() {
        let mut comparing = Comparing::new(mpsc::channel().0);
        let part = |differs, is_last: bool| {
            let cursor = Cursor {
                is_ipv6: !is_last,
                ..Cursor::default()
            };
            let mut differences = Differences::default();
            if differs {
                differences.push(Difference::ControlArm);
            }
            Some(Ok(Comparison {
                cursor,
                differences,
            }))
        };
        comparing.began_at_s = Some(100);
        assert!(!comparing.done(part(false, false)) && !comparing.done(None));
        assert_eq!(comparing.compared_at_s(), None);
        assert!(comparing.done(part(true, true)));
        assert_eq!(comparing.compared_at_s(), None);
        assert!(!comparing.done(part(false, true)));
        assert_eq!(comparing.compared_at_s(), Some(100));
        comparing.all_compared(200, Duration::from_secs(1));
        assert_eq!(comparing.compared_at_s(), Some(200));
        // A comparison that takes a second of processor time is not repeated at once.
        assert!(comparing.not_before > Instant::now() + Duration::from_secs(10));
    }

    #[test]
    fn million_entries_are_compared_slowly_in_ten_minutes() {
        // Twice the time that an entry takes.
        const COST: Duration = Duration::from_micros(2);
        for all in [1, LEAST_ENTRIES, LEAST_ENTRIES + 1, 100_000, 1 << 20] {
            let entries = entries_of_round(all);
            // The last part of each family may be smaller.
            let rounds = all.div_ceil(entries) + 2;
            let most = 600 / HEALTH_INTERVAL.as_secs();
            assert!((rounds as u64) < most, "{all}: {rounds} rounds");
            let took = COST.as_micros() * entries as u128;
            assert!(200 * took < HEALTH_INTERVAL.as_micros(), "{all}: {took} us");
        }
    }
}
