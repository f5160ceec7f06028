//! What the integration tests print, by the tests' names.

use std::collections::{BTreeMap, BTreeSet};

use rto_testbed::emulated::SCALED;
use serde::{Deserialize, Serialize};

/// The tests of one group, by their names in it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Group {
    /// Those that ran and passed.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub(super) passed: BTreeSet<String>,
    /// Those that failed.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub(super) failed: BTreeSet<String>,
    /// Those that do not run in this place, by the reason they give.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) elsewhere: BTreeMap<String, BTreeSet<String>>,
    /// Those that asserted instead that a feature is missing, by feature.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) absent: BTreeMap<String, BTreeSet<String>>,
}

impl Group {
    /// All of them, whatever came of them.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        let elsewhere = self.elsewhere.values().flatten();
        let absent = self.absent.values().flatten();
        let all = self.passed.iter().chain(&self.failed);
        all.chain(elsewhere).chain(absent).map(String::as_str)
    }

    /// For the table.
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

/// The tests that ran, by their groups, and how many passed and failed: one that ran twice counts twice, as for
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
        // What the test is printed with, and its name.
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

/// The tests may say it in the middle of a line of their own.
pub(super) fn scaled(lines: &[String]) -> BTreeSet<String> {
    let said = lines.iter().filter_map(|line| line.split_once(SCALED));
    said.map(|(_, what)| what.trim().to_owned()).collect()
}

/// Passed and failed, as the tests add them up.
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

/// The names of all tests, as the sources register them: `test!(NAME` in a group's file, or in its directory.
#[cfg(test)]
pub(super) fn in_the_tree() -> BTreeSet<String> {
    fn add(dir: &std::path::Path, group: Option<&str>, names: &mut BTreeSet<String>) {
        for entry in std::fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            let stem = path.file_stem().unwrap().to_str().unwrap();
            let group = group.unwrap_or(stem);
            if path.is_dir() {
                add(&path, Some(group), names);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let source = std::fs::read_to_string(&path).unwrap();
                names.extend(registered(&source).map(|name| format!("{group}::{name}")));
            }
        }
    }
    let mut names = BTreeSet::new();
    add(
        &crate::root().join("tests/tests/integration"),
        None,
        &mut names,
    );
    names
}

#[cfg(test)]
fn registered(source: &str) -> impl Iterator<Item = &str> {
    let calls = source.split("\ntest!(").skip(1);
    calls.map(|call| {
        let call = call.trim_start();
        let end = call.find(|c: char| !c.is_alphanumeric() && c != '_');
        &call[..end.unwrap_or(call.len())]
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_as_they_are_registered() {
        let source = "\
use x;

test!(one);
fn one() {}

/// test!(no_test)
test!(
    two_, needs = [CLOCK],
    two
);
";
        assert_eq!(registered(source).collect::<Vec<_>>(), ["one", "two_"]);
        assert!(in_the_tree().contains("faults::the_wall_clock_is_set"));
    }

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
