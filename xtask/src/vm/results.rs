//! Parses the output of the integration tests into results by name.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

/// Prefix of the line that a test prints when it does less on an emulated CPU.
const SCALED: &str = "scaled: ";
/// Prefix of the line with a result for the table.
const MEASURED: &str = "measured: ";

/// The tests of one group, by their names in it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Group {
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub(super) passed: BTreeSet<String>,
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub(super) failed: BTreeSet<String>,
    /// Not run here, by the reason that the tests give.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) elsewhere: BTreeMap<String, BTreeSet<String>>,
    /// Passed by asserting that a feature is missing, by feature.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) absent: BTreeMap<String, BTreeSet<String>>,
}

impl Group {
    /// All names, with any result.
    pub(super) fn names(&self) -> impl Iterator<Item = &String> {
        let elsewhere = self.elsewhere.values().flatten();
        let absent = self.absent.values().flatten();
        let all = self.passed.iter().chain(&self.failed);
        all.chain(elsewhere).chain(absent)
    }

    /// The cell of the table.
    pub(super) fn cell(&self) -> String {
        let mut parts = Vec::new();
        if !self.passed.is_empty() {
            parts.push(format!("{} passed", self.passed.len()));
        }
        for (feature, names) in &self.absent {
            parts.push(format!("{} without {feature}", names.len()));
        }
        for (why, names) in &self.elsewhere {
            parts.push(format!("{} {why}", names.len()));
        }
        if !self.failed.is_empty() {
            parts.push(format!("**{} failed**", self.failed.len()));
        }
        parts.join(", ")
    }
}

/// The tests that ran, by group.
pub(super) fn groups(lines: &[String]) -> BTreeMap<String, Group> {
    let titles = lines.iter().filter_map(|line| line.strip_prefix("---- "));
    let failed: BTreeSet<&str> = titles
        .filter_map(|line| line.strip_suffix(" ----"))
        .collect();
    let mut groups: BTreeMap<String, Group> = BTreeMap::new();
    for line in lines {
        let Some(rest) = line.strip_prefix("test ").filter(|l| l.contains(" ... ")) else {
            continue;
        };
        // "[absent: FEATURE] GROUP::NAME"
        let with_kind = rest.strip_prefix('[').and_then(|l| l.split_once("] "));
        let (kind, name) = with_kind.unwrap_or(("", rest));
        let full = name.split_whitespace().next().unwrap_or_default();
        let (group, name) = full.split_once("::").unwrap_or((full, full));
        let group = groups.entry(group.to_owned()).or_default();
        let names = if failed.contains(full) {
            &mut group.failed
        } else if line.ends_with(" ... ignored") {
            let why = if kind.is_empty() { "ignored" } else { kind };
            group.elsewhere.entry(why.to_owned()).or_default()
        } else if let Some(feature) = kind.strip_prefix("absent: ") {
            group.absent.entry(feature.to_owned()).or_default()
        } else {
            &mut group.passed
        };
        names.insert(name.to_owned());
    }
    groups
}

/// The tests that were scaled down. The prefix may be in the middle of a line.
pub(super) fn scaled(lines: &[String]) -> BTreeSet<String> {
    let scaled = lines.iter().filter_map(|line| line.split_once(SCALED));
    scaled.map(|(_, what)| what.trim().to_owned()).collect()
}

/// What was measured, by its name. The prefix may be in the middle of a line.
pub(super) fn measured(lines: &[String]) -> BTreeMap<String, String> {
    let measured = lines.iter().filter_map(|line| line.split_once(MEASURED));
    measured
        .filter_map(|(_, what)| what.trim().rsplit_once(": "))
        .map(|(what, result)| (what.to_owned(), result.to_owned()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_parsed_by_name() {
        let lines = ["..measured: 100 ms: SYNs lost: -1.7 s, +0.0 s ".to_owned()];
        let found = measured(&lines);
        assert_eq!(found["100 ms: SYNs lost"], "-1.7 s, +0.0 s");
    }

    #[test]
    fn failed_tests_are_listed_by_group() {
        let lines = [
            "test syn::one                    ... ok",
            "test syn::two                    ... the daemon has ended",
            "FAILED",
            "test [absent: iter-tcp] open_sockets::walk ... ok",
            "test [only in cargo xtask vm] faults::clock ... ignored",
            "---- syn::two ----",
            "gaps are not those of their timers",
        ];
        let lines = lines.map(str::to_owned);
        let groups = groups(&lines);
        let one = |name: &str| BTreeSet::from([name.to_owned()]);
        assert_eq!(groups["syn"].passed, one("one"));
        assert_eq!(groups["syn"].failed, one("two"));
        assert_eq!(groups["open_sockets"].absent["iter-tcp"], one("walk"));
        assert!(groups["faults"].passed.is_empty());
        let elsewhere = &groups["faults"].elsewhere["only in cargo xtask vm"];
        assert_eq!(*elsewhere, one("clock"));
        assert_eq!(groups["syn"].names().collect::<Vec<_>>(), ["one", "two"]);
    }
}
