//! Parses the output of the integration tests into results by name.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

/// Prefix of the line that a test prints when it does less on an emulated CPU.
const SCALED: &str = "scaled: ";

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
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        let elsewhere = self.elsewhere.values().flatten();
        let absent = self.absent.values().flatten();
        let all = self.passed.iter().chain(&self.failed);
        all.chain(elsewhere).chain(absent).map(String::as_str)
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

/// The tests that ran, by group, and the number of passed and failed tests; a test that ran twice counts twice, as in
/// [`results`].
pub(super) fn groups(lines: &[String]) -> (BTreeMap<String, Group>, (usize, usize)) {
    let title = |line: &'_ String| -> Option<String> {
        let name = line.strip_prefix("---- ")?.strip_suffix(" ----")?;
        Some(name.to_owned())
    };
    let failed: Vec<String> = lines.iter().filter_map(title).collect();
    let mut groups: BTreeMap<String, Group> = BTreeMap::new();
    let (mut passed, mut failures) = (0, 0);
    for line in lines {
        let Some(rest) = line.strip_prefix("test ").filter(|l| l.contains(" ... ")) else {
            continue;
        };
        // The kind of a test and its name.
        let (kind, name) = match rest
            .strip_prefix('[')
            .and_then(|rest| rest.split_once("] "))
        {
            Some((kind, name)) => (Some(kind), name),
            None => (None, rest),
        };
        let full = name.split_whitespace().next().unwrap_or_default();
        let (group, name) = full.split_once("::").unwrap_or((full, full));
        let group = groups.entry(group.to_owned()).or_default();
        let absent = kind.and_then(|kind| kind.strip_prefix("absent: "));
        let names = if failed.iter().any(|failed| failed == full) {
            failures += 1;
            &mut group.failed
        } else if line.ends_with(" ... ignored") {
            let why = kind.unwrap_or("ignored").to_owned();
            group.elsewhere.entry(why).or_default()
        } else if let Some(feature) = absent {
            passed += 1;
            group.absent.entry(feature.to_owned()).or_default()
        } else {
            passed += 1;
            &mut group.passed
        };
        names.insert(name.to_owned());
    }
    (groups, (passed, failures))
}

/// The tests that were scaled down. The prefix may be in the middle of a line.
pub(super) fn scaled(lines: &[String]) -> BTreeSet<String> {
    let said = lines.iter().filter_map(|line| line.split_once(SCALED));
    said.map(|(_, what)| what.trim().to_owned()).collect()
}

/// Numbers of passed and failed tests, by the summary lines.
pub(super) fn results(lines: &[String]) -> (usize, usize) {
    let number = |line: &str, what: &str| {
        line.split(['.', ';'])
            .find_map(|part| part.trim().strip_suffix(what)?.trim().parse::<usize>().ok())
            .unwrap_or(0)
    };
    lines
        .iter()
        .filter(|line| line.starts_with("test result: "))
        .fold((0, 0), |(passed, failed), line| {
            (
                passed + number(line, " passed"),
                failed + number(line, " failed"),
            )
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_by_group() {
        let lines: Vec<String> = "\
test syn::one                    ... ok
test syn::two                    ... the daemon has ended
FAILED
test [absent: iter-tcp] open_sockets::walk ... ok
test [only in cargo xtask vm] faults::clock ... ignored

failures:

---- syn::two ----
gaps are not those of their timers

failures:
    syn::two

test result: FAILED. 2 passed; 1 failed; 0 ignored; 0 measured; 3 filtered out; finished in 1.96s
"
        .lines()
        .map(str::to_owned)
        .collect();
        let (groups, named) = groups(&lines);
        let one = |name: &str| BTreeSet::from([name.to_owned()]);
        assert_eq!(groups["syn"].passed, one("one"));
        assert_eq!(groups["syn"].failed, one("two"));
        assert_eq!(groups["open_sockets"].absent["iter-tcp"], one("walk"));
        assert!(groups["faults"].passed.is_empty());
        let elsewhere = &groups["faults"].elsewhere["only in cargo xtask vm"];
        assert_eq!(*elsewhere, one("clock"));
        assert_eq!(groups["syn"].names().collect::<Vec<_>>(), ["one", "two"]);
        assert_eq!(results(&lines), (2, 1));
        assert_eq!(named, (2, 1));
    }
}
