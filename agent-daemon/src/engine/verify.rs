//! Checks that the kernel's maps and pins match the desired state, as other processes may write
//! them.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use rto_agent_core::{
    policy::{Cidr, PolicyName, differences::Differences},
    wire::types::{VerifyAnswer, now_s},
};
use rto_agent_kernel::datapath::{DatapathError, TrieCursor};
use tracing::warn;

use super::{
    Engine, Snapshot,
    audit::{Cause, Source},
    jobs::comparing::{Position, Round},
};

/// Policies whose statistics are checked in one round: each value has a part per processor.
const POLICIES: usize = 32;

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

    /// Compares up to `entries` entries from a position, and the tables beside them; `None` if the
    /// engine changes the kernel during the comparison, as a difference means nothing then.
    pub(super) fn compare_part(&self, mut position: Position, entries: usize) -> Option<Round> {
        let resolved = self.resolved.as_ref()?;
        let desired = &resolved.maps;
        // Removed since the last part: the kernel would continue from an arbitrary key.
        if let TrieCursor::After(cidr) = position.entries
            && !desired.entries.contains_key(&cidr)
        {
            position.entries = TrieCursor::default();
        }
        let first = position.policies;
        let tables = self
            .unchanged(|reader| reader.compare_tables(desired, &mut position.policies, POLICIES))?;
        if self.about.statistics {
            let names = resolved.set.policies.keys().skip(first).take(POLICIES);
            self.look_for_harm(names, position.policies == 0);
        }
        let mut differs = is_different(&tables);
        let mut left = entries;
        loop {
            let compared = self.unchanged(|reader| {
                reader.compare_entries(desired, &mut position.entries, left.min(PIECE))
            })?;
            differs |= is_different(&compared);
            left = left.saturating_sub(PIECE);
            let is_last = position.entries == TrieCursor::default();
            if is_last || left == 0 || differs {
                return Some(Round {
                    position,
                    differs,
                    is_last,
                });
            }
        }
    }
}

/// Entries per system call.
const PIECE: usize = 4096;

/// A read error counts as a difference, so that the engine checks.
fn is_different(compared: &Result<Differences, DatapathError>) -> bool {
    !compared.as_ref().is_ok_and(Differences::is_empty)
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
            let position = Position {
                entries: TrieCursor::After(text.parse().unwrap()),
                ..Position::default()
            };
            let before = host.state().compared;
            let round = snapshot.compare_part(position, PIECE).unwrap();
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
        let (mut position, mut rounds) = (Position::default(), 0);
        loop {
            let before = host.state().compared;
            let round = snapshot.compare_part(position, PART).unwrap();
            let read = host.state().compared - before;
            assert!(!round.differs && read <= PART, "{round:?}, {read} entries");
            position = round.position;
            rounds += 1;
            if round.is_last {
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
