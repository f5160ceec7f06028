//! Checks that the kernel's maps and pins match the desired state, as other processes may write
//! them.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use rto_agent_core::{
    policy::{
        Cidr, PolicyName,
        differences::{Cursor, Differences},
    },
    wire::types::{VerifyAnswer, now_s},
};
use tracing::warn;

use super::{
    Engine, Snapshot,
    audit::{Cause, Source},
    jobs::comparing::Round,
};

/// Counts changes by other processes and logs them at most once a minute.
#[derive(Debug, Default)]
pub(super) struct DifferenceLog {
    counts: BTreeMap<String, u64>,
    logged_at: Option<Instant>,
    /// Changes since `logged_at`.
    unlogged: u64,
}

impl DifferenceLog {
    pub(super) fn record(&mut self, differences: &Differences) {
        const INTERVAL: Duration = Duration::from_secs(60);
        for (kind, count) in &differences.counts {
            *self.counts.entry(kind.clone()).or_default() += count;
        }
        if self.logged_at.is_some_and(|at| at.elapsed() < INTERVAL) {
            self.unlogged += differences.total();
            return;
        }
        self.logged_at = Some(Instant::now());
        warn!(
            differences = differences.total(),
            not_logged_before = std::mem::take(&mut self.unlogged),
            "another process changed the kernel's maps: {differences}"
        );
    }

    pub(super) fn counts(&self) -> &BTreeMap<String, u64> {
        &self.counts
    }
}

impl Snapshot {
    /// The number of entries in the desired state.
    pub(super) fn entries(&self) -> usize {
        self.resolved.as_ref().map_or(0, |r| r.set.entries.len())
    }

    /// Compares the kernel with the desired state; `None` if the engine changes it during the comparison.
    #[must_use]
    pub fn verify(&self) -> Option<VerifyAnswer> {
        let resolved = self.resolved.as_ref()?;
        let (differences, problem) = self.unchanged(|reader| {
            let problem = reader.attachment().problem;
            (reader.differences(&resolved.maps).ok(), problem)
        })?;
        let (differences, problems) = (differences?, Vec::from_iter(problem));
        Some(VerifyAnswer {
            ok: differences.is_empty() && problems.is_empty() && self.health.in_sync,
            entries: resolved.set.entries.len(),
            policies: resolved.set.policies.len(),
            repaired: true,
            differences,
            problems,
        })
    }

    /// Compares up to `entries` entries from the cursor on, and the tables beside them; `None` if the
    /// engine changes the kernel during the comparison, as a difference means nothing then.
    pub(super) fn compare_part(&self, cursor: Cursor, entries: usize) -> Option<Round> {
        let resolved = self.resolved.as_ref()?;
        let desired = &resolved.maps;
        let mut cursor = cursor.resumed(&desired.entries);
        let first = cursor.policy;
        let compared = self.unchanged(|reader| reader.compare(desired, &mut cursor, entries))?;
        if self.about.statistics {
            let read = cursor.policy.checked_sub(first).filter(|read| *read > 0);
            let names = resolved.set.policies.keys().skip(first);
            self.look_for_harm(names.take(read.unwrap_or(usize::MAX)), cursor.policy == 0);
        }
        // A read error counts as a difference, so that the engine checks.
        let differs = !compared.is_ok_and(|differences| differences.is_empty());
        Some(Round { cursor, differs })
    }
}

impl Engine {
    /// Compares the kernel with the desired state and repairs differences. The caller publishes.
    pub(super) fn verify(&mut self) -> VerifyAnswer {
        let (begin, at_s) = (Instant::now(), now_s());
        let mut problems = Vec::new();
        if let Some(reader) = self
            .reconciler
            .reader()
            .filter(|_| self.detached_by.is_none())
        {
            problems.extend(reader.attachment().problem);
        } else {
            problems.extend(self.reconciler.detached().problem);
            return self.verified(Differences::default(), problems);
        }
        let differences = self.reconciler.verify();
        if !problems.is_empty() || !self.reconciler.in_sync() {
            self.repair();
        }
        problems.extend(self.reconciler.problems().cloned());
        self.comparing.all_compared(at_s, begin.elapsed());
        self.verified(differences, problems)
    }

    fn verified(&self, differences: Differences, problems: Vec<String>) -> VerifyAnswer {
        let set = &self.reconciler.resolved().set;
        VerifyAnswer {
            ok: differences.is_empty() && problems.is_empty(),
            entries: set.entries.len(),
            policies: set.policies.len(),
            repaired: self.detached_by.is_none() && self.reconciler.problems().next().is_none(),
            differences,
            problems,
        }
    }

    /// Attaches again if necessary, and rewrites what differs. The caller publishes.
    pub(super) fn repair(&mut self) {
        let Some(change) = self.reconciler.repair() else {
            return;
        };
        self.probing.invalidate();
        let cause = Cause::from(Source::Repair);
        cause.audit(&change);
        // Connections may have begun without a policy while detached.
        self.apply_to_open(&cause);
    }

    /// Repairs changes that other processes made to these entries. Called before a change, as its
    /// plan assumes that the maps hold what was last written.
    pub(super) fn verify_entries(&mut self, cidrs: &[Cidr], policy: &PolicyName) {
        let reader = self
            .reconciler
            .reader()
            .filter(|_| self.detached_by.is_none());
        let maps = &self.reconciler.resolved().maps;
        let found = reader.map(|reader| reader.finds(maps, cidrs, policy));
        if matches!(found, Some(Ok(false))) && self.restoring.is_none() {
            self.verify();
        }
    }

    /// Begins to compare the next part.
    pub(super) fn compare_next(&mut self) {
        let snapshot = self.snapshots.borrow().clone();
        self.comparing.consider(&snapshot);
    }

    /// Handles the result of comparing a part.
    pub(super) fn compared(&mut self, round: Option<Round>) {
        if self.comparing.done(round) && self.detached_by.is_none() {
            self.verify();
            self.publish();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{fmt::Write as _, sync::Arc};

    use rto_agent_core::policy::differences::Difference;

    use super::*;
    use crate::engine::{
        desired::tests::{NEAR, desired},
        fake::FakeHost,
        snapshot::tests::healthy,
    };

    #[test]
    fn foreign_changes_are_logged_once_a_minute() {
        let mut differences = Differences::default();
        (0..3).for_each(|_| differences.push(Difference::ControlArm));
        let mut log = DifferenceLog::default();
        for round in 1..=3 {
            log.record(&differences);
            assert_eq!(log.counts()["control-arm"], 3 * round);
            assert_eq!(log.unlogged, 3 * (round - 1));
        }
        log.logged_at = Instant::now().checked_sub(Duration::from_secs(60));
        log.record(&differences);
        assert!(
            log.logged_at
                .is_some_and(|at| at.elapsed() < Duration::from_secs(30))
        );
    }

    /// A snapshot with two entries and its kernel, which holds both and is attached.
    fn near() -> (FakeHost, Snapshot) {
        healthy(desired(NEAR))
    }

    #[test]
    fn any_one_thing_that_is_wrong_is_not_ok() {
        let (host, snapshot) = near();
        let is_ok = |snapshot: &Snapshot| snapshot.verify().unwrap().ok;
        assert!(is_ok(&snapshot));
        let mut out_of_sync = snapshot.clone();
        Arc::make_mut(&mut out_of_sync.health).in_sync = false;
        assert!(!is_ok(&out_of_sync));
        host.state().attached = false;
        assert!(!is_ok(&snapshot));
        host.state().attached = true;
        let gone = "10.1.0.0/16".parse().unwrap();
        assert!(host.state().maps.entries.remove(&gone));
        assert!(!is_ok(&snapshot));
    }

    #[test]
    fn a_part_after_an_entry_that_is_gone_begins_with_the_first() {
        let (host, snapshot) = near();
        let compared_after = |text: &str| {
            let cursor = Cursor {
                after: text.parse().ok(),
                ..Cursor::default()
            };
            let before = host.state().compared;
            let round = snapshot.compare_part(cursor, 4096).unwrap();
            (host.state().compared - before, round.differs)
        };
        let (known, gone) = ("10.1.0.0/16", "10.2.0.0/16");
        let all = host.state().maps.entries.len();
        assert_eq!(compared_after(gone).0, compared_after(known).0 + 1);
        assert!(compared_after(gone).0 <= all);
        assert!(!compared_after(gone).1);
        assert!(host.state().maps.entries.remove(&known.parse().unwrap()));
        assert!(compared_after(gone).1);
    }

    #[test]
    fn a_part_is_no_larger_than_asked_and_each_entry_is_read_once() {
        const OF_EACH_FAMILY: u32 = 2500;
        const PART: usize = 1000;
        let mut text = "[policy.near]\ninitial_rto = \"100ms\"\ncidrs = [\n".to_owned();
        for n in 0..OF_EACH_FAMILY {
            writeln!(text, "\"11.{}.{}.0/24\",", n >> 8, n & 0xff).unwrap();
            writeln!(text, "\"2001:db8:{n:x}::/48\",").unwrap();
        }
        text.push_str("]\n");
        let (host, snapshot) = healthy(desired(&text));
        let (mut cursor, mut rounds) = (Cursor::default(), 0);
        loop {
            let before = host.state().compared;
            let round = snapshot.compare_part(cursor, PART).unwrap();
            let read = host.state().compared - before;
            assert!(!round.differs && read <= PART, "{round:?}, {read} entries");
            cursor = round.cursor;
            rounds += 1;
            if cursor.is_at_start() {
                break;
            }
        }
        let all = snapshot.entries();
        assert_eq!(
            (all, host.state().compared),
            (2 * OF_EACH_FAMILY as usize, all)
        );
        // A family ends with a part that may be smaller.
        assert!(rounds <= all / PART + 2, "{rounds} rounds");
    }
}
