//! Notes for an answer.

use rto_agent_core::{
    policy::{Cidr, Entries, PolicyName},
    progress::stepping,
};

/// How many of a request's CIDRs have their notes shown.
pub(super) const SHOWN: usize = 50;

/// Notes for an answer. Only the first are kept: half a million take 100 MB.
#[derive(Default)]
pub(super) struct Notes {
    shown: Vec<String>,
    more: usize,
}

impl Notes {
    pub(super) fn push(&mut self, note: impl FnOnce() -> String) {
        if self.shown.len() < SHOWN {
            self.shown.push(note());
        } else {
            self.more += 1;
        }
    }

    /// Notes which CIDRs leave another policy, either their own entry's or a covering entry's.
    /// (Only the first [`SHOWN`] are checked for a covering entry, as each check reads every
    /// runtime entry.)
    pub(super) fn add_taken(&mut self, before: &Entries, cidrs: &[Cidr], policy: &PolicyName) {
        for (i, cidr) in stepping(cidrs).enumerate() {
            let own = before.get(cidr);
            let outer = match own {
                None if i < SHOWN => before.covering_cidr(cidr),
                _ => None,
            };
            let covering = outer.and_then(|outer| Some((before.get(&outer)?.policy, Some(outer))));
            let former = own.map(|entry| (entry.policy, None)).or(covering);
            match former.filter(|(former, _)| *former != policy) {
                Some((former, None)) => self.push(|| format!("{cidr} was in policy {former}")),
                Some((former, Some(outer))) => {
                    self.push(|| {
                        format!("{cidr} now overrides {outer}, which is in policy {former}")
                    });
                }
                None => {}
            }
        }
    }

    pub(super) fn end(mut self) -> Vec<String> {
        if self.more != 0 {
            self.shown.push(format!("... and {} more", self.more));
        }
        self.shown
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::desired::tests::desired;

    #[test]
    fn notes_are_limited_to_fifty() {
        for count in [0, 1, SHOWN, SHOWN + 1, 3 * SHOWN] {
            let mut notes = Notes::default();
            for n in 0..count {
                notes.push(|| n.to_string());
            }
            let mut wanted: Vec<String> = (0..count.min(SHOWN)).map(|n| n.to_string()).collect();
            if count > SHOWN {
                wanted.push(format!("... and {} more", count - SHOWN));
            }
            assert_eq!(notes.end(), wanted);
        }
    }

    #[test]
    fn add_names_policy_that_loses_prefix() {
        let desired = desired(
            "[policy.far]\ninitial_rto = \"300ms\"\ncidrs = [\"10.0.0.0/8\", \"10.2.0.0/16\"]\n\
             [policy.near]\ninitial_rto = \"100ms\"\ncidrs = [\"10.1.0.0/16\"]\n",
        );
        let entries = &desired.files.config.set.entries;
        let note = |cidr: &str| {
            let mut notes = Notes::default();
            notes.add_taken(entries, &[cidr.parse().unwrap()], &"near".parse().unwrap());
            notes.end().join("\n")
        };
        assert_eq!(note("10.2.0.0/16"), "10.2.0.0/16 was in policy far");
        let taken = "10.3.0.0/16 now overrides 10.0.0.0/8, which is in policy far";
        assert_eq!(note("10.3.0.0/16"), taken);
        for others in ["10.1.0.0/16", "10.1.2.0/24", "192.0.2.0/24"] {
            assert_eq!(note(others), "");
        }
    }
}
