//! Checks that the kernel's maps and pins match the desired state, as other processes may write
//! them.

use std::time::Instant;

use rto_agent_core::{
    policy::{PolicyName, differences::Cursor},
    wire::{stats::PolicyStats, types::VerifyAnswer},
};

use super::{
    Snapshot,
    snapshot::{Round, locked},
};

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
        if self.agent().statistics {
            let read = cursor.policy.checked_sub(first).filter(|read| *read > 0);
            let names = resolved.set.policies.keys().skip(first);
            self.look_for_harm(names.take(read.unwrap_or(usize::MAX)), cursor.policy == 0);
        }
        // A read error counts as a difference, so that the engine checks.
        let differs = !compared.is_ok_and(|differences| differences.is_empty());
        Some(Round { cursor, differs })
    }

    /// Reads the counters of these policies for `status`, unless the engine changes the kernel.
    pub(super) fn look_for_harm<'a>(
        &self,
        policies: impl Iterator<Item = &'a PolicyName>,
        is_last: bool,
    ) {
        let read: Option<Result<Vec<_>, _>> = self.unchanged(|reader| {
            let read = policies.filter_map(|name| match reader.statistics_of(name) {
                Ok(statistics) => Some(Ok((name, PolicyStats::from(&statistics?)))),
                Err(e) => Some(Err(e)),
            });
            read.collect()
        });
        let mut harms = locked(&self.shared.harms);
        match read {
            Some(Ok(read)) => {
                let read = read.iter().map(|(name, stats)| (*name, stats));
                harms.note(Instant::now(), read, is_last);
            }
            Some(Err(e)) => harms.note_unread(&e),
            None => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{fmt::Write as _, sync::Arc};

    use super::*;
    use crate::engine::{
        desired::tests::{NEAR, desired},
        fake::FakeHost,
        snapshot::tests::healthy,
    };

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
