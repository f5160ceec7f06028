//! What was found on each kernel: docs/matrix.json, and the table made of it in docs/reference/kernel.md.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    fs,
};

use anyhow::{Context as _, ensure};
use rto_tests::{features::FEATURES, verifier};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::{
    HOST, LEFT_OUT,
    kernels::{KERNELS, Kernel, NEWEST},
    results::{Group, groups, results, scaled},
};
use crate::root;

const DATA: &str = "docs/matrix.json";
const PAGE: &str = "docs/reference/kernel.md";
const LOCK: &str = "target/vm/matrix.lock";
const BEGIN: &str = "<!-- matrix: made by cargo xtask vm --kernel all -->\n";
const END: &str = "<!-- end of the matrix -->\n";
/// What the tests print before their report.
const REPORT: &str = "RTO_TESTS_REPORT ";

/// All kernels.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Matrix {
    columns: Vec<Column>,
}

/// A kernel.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Column {
    /// As it calls itself; of a host only the version, as "6.18.44".
    kernel: String,
    /// Of a developer's own machine, and not in an emulated one.
    is_host: bool,
    /// SHA-256 of the eBPF object that was tested.
    object: String,
    /// Presence by feature.
    features: BTreeMap<String, String>,
    /// Instructions by program, or a word.
    verifier: BTreeMap<String, serde_json::Value>,
    /// By group.
    tests: BTreeMap<String, Group>,
    /// Of what less was done than on a real machine, as the tests say.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    scaled: BTreeSet<String>,
    /// Tests that were not run yet with this object, by their full names: `cargo xtask vm --pending` lists them.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pending: BTreeSet<String>,
    /// Exit status of the tests.
    #[serde(skip)]
    status: i32,
}

#[derive(Deserialize)]
struct Report {
    features: BTreeMap<String, String>,
    verifier: BTreeMap<String, serde_json::Value>,
}

impl Column {
    /// From what the tests printed.
    pub(super) fn of(
        kernel: String,
        is_host: bool,
        status: i32,
        lines: &[String],
    ) -> anyhow::Result<Self> {
        let report = lines.iter().rev().find_map(|l| l.strip_prefix(REPORT));
        let report: Report = serde_json::from_str(report.context("the tests gave no report")?)?;
        let (tests, counted) = groups(lines);
        let told = results(lines);
        ensure!(
            told == counted,
            "the tests say {told:?} passed and failed, and {counted:?} are named"
        );
        Ok(Self {
            kernel,
            is_host,
            object: object(),
            features: report.features,
            verifier: report.verifier,
            tests,
            scaled: scaled(lines),
            pending: BTreeSet::new(),
            status,
        })
    }

    /// Whose column it is: as `--kernel` names it. There is one of each.
    fn place(&self) -> &'static str {
        if self.is_host {
            return HOST;
        }
        let is_of = |kernel: &&Kernel| kernel.is_of_series(&self.kernel);
        KERNELS.iter().find(is_of).map_or(NEWEST, |k| k.name)
    }

    /// With groups that were tested on the same kernel later.
    fn with(mut self, later: &Self) -> Self {
        self.features.clone_from(&later.features);
        self.verifier.clone_from(&later.verifier);
        self.tests.extend(later.tests.clone());
        let run = self.names();
        self.pending.retain(|test| !run.contains(test));
        // "36 kills instead of 200" stands for any other number of kills.
        let what = |said: &String| said.split_once(' ').map(|(_, what)| what.to_owned());
        let again: BTreeSet<_> = later.scaled.iter().map(what).collect();
        self.scaled.retain(|said| !again.contains(&what(said)));
        self.scaled.extend(later.scaled.clone());
        self.status = self.status.max(later.status);
        self
    }

    /// What is wrong with it.
    fn failure(&self) -> Option<String> {
        let failed: Vec<String> = self.failed().collect();
        let over = self.over_the_limit();
        if !over.is_empty() {
            return Some(format!(
                "the verifier processes more than the limit: {over:?}"
            ));
        }
        (!failed.is_empty() || self.status != 0)
            .then(|| format!("status {}, failed: {}", self.status, failed.join(", ")))
    }

    fn failed(&self) -> impl Iterator<Item = String> {
        let groups = self.tests.iter();
        groups.flat_map(|(name, group)| {
            group
                .failed
                .iter()
                .map(move |test| format!("{name}::{test}"))
        })
    }

    /// Tests that have a result of whatever kind, by their full names.
    fn names(&self) -> BTreeSet<String> {
        let groups = self.tests.iter();
        groups
            .flat_map(|(name, group)| group.names().map(move |test| format!("{name}::{test}")))
            .collect()
    }

    fn over_the_limit(&self) -> Vec<String> {
        let is_over = |name: &&String| {
            let limit = verifier::LIMITS
                .iter()
                .find(|(known, _)| known == name)
                .map_or(0, |(_, limit)| u64::from(*limit));
            self.verifier[*name].as_u64().is_some_and(|n| n > limit)
        };
        self.verifier.keys().filter(is_over).cloned().collect()
    }

    /// "5.10.0-46-cloud-amd64" is 5.10 to a reader.
    fn version(&self) -> String {
        self.kernel
            .split(['.', '-'])
            .take(2)
            .collect::<Vec<_>>()
            .join(".")
    }

    fn number(&self) -> (u32, u32) {
        let version = self.version();
        let mut parts = version.split('.').map(|part| part.parse().unwrap_or(0));
        (parts.next().unwrap_or(0), parts.next().unwrap_or(0))
    }
}

/// Of the object in the tree.
fn object() -> String {
    Sha256::digest(verifier::OBJECT)
        .iter()
        .map(|b| format!("{b:02x}"))
        .collect()
}

impl Matrix {
    /// As in the tree.
    fn kept() -> anyhow::Result<Self> {
        match fs::read_to_string(root().join(DATA)) {
            Ok(text) => Ok(serde_json::from_str(&text).context(DATA)?),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(Self::default()),
            Err(e) => Err(e).context(DATA),
        }
    }

    /// Puts a column into the tree. Two of `cargo xtask vm` may do so at once.
    pub(super) fn add(column: &Column) -> anyhow::Result<()> {
        let lock = fs::File::create(root().join(LOCK))?;
        lock.lock().context(LOCK)?;
        let mut kept = Self::kept()?;
        kept.take(column);
        kept.keep()
    }

    /// Puts the groups that ran into the column of this place; what another object or kernel gave there is dropped.
    pub(super) fn take(&mut self, column: &Column) {
        let place = column.place();
        let is_same = |old: &&Column| {
            old.place() == place && old.object == column.object && old.kernel == column.kernel
        };
        let taken = match self.columns.iter().find(is_same) {
            Some(old) => old.clone().with(column),
            None => column.clone(),
        };
        self.columns.retain(|old| old.place() != place);
        self.columns.push(taken);
        self.columns
            .sort_by_key(|column| (column.is_host, column.number()));
    }

    /// What is wrong, by kernel.
    pub(super) fn failures(&self) -> Vec<String> {
        self.columns
            .iter()
            .filter_map(|column| Some(format!("Linux {}: {}", column.kernel, column.failure()?)))
            .collect()
    }

    /// Tests that should have run and have no result, by kernel.
    pub(super) fn missing(&self, expected: &BTreeSet<String>) -> Vec<String> {
        let columns = self.columns.iter();
        columns
            .filter_map(|column| {
                let names = column.names();
                let missing: Vec<&str> = expected.difference(&names).map(String::as_str).collect();
                let said = || {
                    format!(
                        "Linux {}: no result of {}",
                        column.kernel,
                        missing.join(", ")
                    )
                };
                (!missing.is_empty()).then(said)
            })
            .collect()
    }

    /// Notes in the tree which of these tests have no result yet on which kernel; how many that are.
    pub(super) fn note_pending(expected: &BTreeSet<String>) -> anyhow::Result<usize> {
        let mut kept = Self::kept()?;
        for column in &mut kept.columns {
            column.pending = expected.difference(&column.names()).cloned().collect();
        }
        kept.keep()?;
        Ok(kept.columns.iter().map(|column| column.pending.len()).sum())
    }

    /// Into the tree: the data and the table.
    fn keep(&self) -> anyhow::Result<()> {
        let data = serde_json::to_string_pretty(self)? + "\n";
        fs::write(root().join(DATA), data)?;
        let page = root().join(PAGE);
        let text = fs::read_to_string(&page)?;
        let (before, _, after) = around(&text)?;
        fs::write(
            &page,
            format!("{before}{BEGIN}{}{END}{after}", self.table()),
        )?;
        Ok(())
    }

    /// Features, tests and the verifier's work by kernel, in Markdown.
    pub(super) fn table(&self) -> String {
        let mut text = String::new();
        let mut row = |first: &str, cell: &dyn Fn(&Column) -> String| {
            let cells: Vec<String> = self.columns.iter().map(cell).collect();
            // Nothing fails that writes into a String.
            let _written = writeln!(text, "| {first} | {} |", cells.join(" | "));
        };
        row("feature", &|column| {
            let place = if column.is_host { ", a host" } else { "" };
            format!("{}{place}", column.version())
        });
        row("---", &|_| "---".to_owned());
        for (name, (major, minor)) in FEATURES {
            row(&format!("{name} ({major}.{minor})"), &|column| match column
                .features
                .get(name)
                .map(String::as_str)
            {
                Some("present") => "yes".to_owned(),
                Some(other) => format!("**{other}**"),
                None => "?".to_owned(),
            });
        }
        let groups: BTreeSet<&String> = self.columns.iter().flat_map(|c| c.tests.keys()).collect();
        for group in groups {
            row(&format!("tests: {group}"), &|column| {
                column.tests.get(group).map_or("–".to_owned(), Group::cell)
            });
        }
        if self.columns.iter().any(|column| !column.pending.is_empty()) {
            row("tests not run yet", &|column| match column.pending.len() {
                0 => "none".to_owned(),
                pending => format!("**{pending}**"),
            });
        }
        for (name, limit) in verifier::LIMITS {
            row(
                &format!("verifier: {name} (limit {limit})"),
                &|column| match column.verifier.get(name) {
                    Some(serde_json::Value::Number(n)) => n.to_string(),
                    Some(serde_json::Value::String(word)) => word.clone(),
                    _ => "?".to_owned(),
                },
            );
        }
        for (name, why) in LEFT_OUT {
            let _written = writeln!(text, "\nLeft out in the machines: {name}\\* ({why}).");
        }
        let scaled: BTreeSet<&str> = self
            .columns
            .iter()
            .flat_map(|column| column.scaled.iter().map(String::as_str))
            .collect();
        if !scaled.is_empty() {
            let scaled: Vec<&str> = scaled.into_iter().collect();
            let _written = writeln!(text, "\nLess work in the machines: {}.", scaled.join(", "));
        }
        for column in &self.columns {
            let failed: Vec<String> = column.failed().collect();
            if !failed.is_empty() {
                let _written = writeln!(
                    text,
                    "\nFailed on {}: {}.",
                    column.version(),
                    failed.join(", ")
                );
            }
        }
        text
    }
}

/// The page before the table, the table, and the page after it.
fn around(page: &str) -> anyhow::Result<(&str, &str, &str)> {
    let marks = || format!("{PAGE} has no marks around the matrix");
    let (before, rest) = page.split_once(BEGIN).with_context(marks)?;
    let (table, after) = rest.split_once(END).with_context(marks)?;
    Ok((before, table, after))
}

#[cfg(test)]
mod tests {
    use super::{
        super::{is_left_out, results::in_the_tree},
        *,
    };

    #[test]
    fn the_page_has_the_table_of_the_data() {
        let page = fs::read_to_string(root().join(PAGE)).unwrap();
        let (_, table, _) = around(&page).unwrap();
        assert_eq!(table, Matrix::kept().unwrap().table());
    }

    /// Every kernel and a host's own was tested with the object in the tree, and nothing is above its limit.
    #[test]
    fn the_data_is_of_the_object_in_the_tree() {
        let kept = Matrix::kept().unwrap();
        let mut places: Vec<&str> = kept.columns.iter().map(Column::place).collect();
        let mut expected: Vec<&str> = KERNELS.iter().map(|kernel| kernel.name).collect();
        expected.push(HOST);
        places.sort_unstable();
        expected.sort_unstable();
        assert_eq!(places, expected, "run cargo xtask vm --kernel all");
        for column in &kept.columns {
            assert_eq!(
                column.object,
                object(),
                "Linux {}: stale; run cargo xtask vm --kernel all",
                column.kernel
            );
            assert!(column.over_the_limit().is_empty(), "{column:#?}");
        }
    }

    /// Every test that there is was run on every kernel, by its name, or is listed as not run yet; and no other; none
    /// failed.
    #[test]
    fn the_data_has_every_test() {
        let expected: BTreeSet<String> = in_the_tree()
            .into_iter()
            .filter(|name| !is_left_out(name))
            .collect();
        let kept = Matrix::kept().unwrap();
        let mut wrong = Vec::new();
        for column in &kept.columns {
            let names = column.names();
            let missing: BTreeSet<String> = expected.difference(&names).cloned().collect();
            let unsaid = missing.symmetric_difference(&column.pending);
            wrong.extend(unsaid.map(|name| {
                format!(
                    "Linux {}: {name} has no result, or has and is pending",
                    column.kernel
                )
            }));
            let gone = names.difference(&expected);
            wrong.extend(gone.map(|name| format!("Linux {}: there is no {name}", column.kernel)));
            let failed = column.failed();
            wrong.extend(failed.map(|name| format!("Linux {}: {name} failed", column.kernel)));
        }
        assert!(
            wrong.is_empty(),
            "run cargo xtask vm --kernel all, or --keep GROUP:: for some:\n{}",
            wrong.join("\n")
        );
    }

    /// A limit that is far from what is measured holds nothing.
    #[test]
    fn limits_are_near_what_is_measured() {
        let kept = Matrix::kept().unwrap();
        for (name, limit) in verifier::LIMITS {
            let measured = kept.columns.iter();
            let measured = measured.filter_map(|column| column.verifier[name].as_u64());
            let most = measured.max().unwrap();
            let limit = u64::from(limit);
            assert!(
                most <= limit && limit < 2 * most,
                "{name}: {most}, limit {limit}"
            );
        }
    }

    /// What one kernel has and another has not is an error, also where both have as many.
    #[test]
    fn a_missing_test_is_named() {
        let mut matrix = Matrix::default();
        for (kernel, test) in [("6.1.0-56", "one"), ("6.12.0-1", "other")] {
            let mut column = column(kernel, false, "syn");
            let group = column.tests.get_mut("syn").unwrap();
            group.passed.insert(test.to_owned());
            matrix.take(&column);
        }
        let all = ["syn::one", "syn::other"].map(str::to_owned).into();
        assert_eq!(
            matrix.missing(&all),
            [
                "Linux 6.1.0-56: no result of syn::other",
                "Linux 6.12.0-1: no result of syn::one"
            ]
        );
        assert_eq!(matrix.missing(&BTreeSet::new()), [] as [&str; 0]);
    }

    fn column(kernel: &str, is_host: bool, group: &str) -> Column {
        Column {
            kernel: kernel.to_owned(),
            is_host,
            object: object(),
            features: BTreeMap::new(),
            verifier: BTreeMap::new(),
            tests: [(group.to_owned(), Group::default())].into(),
            scaled: ["20 kills instead of 200".to_owned()].into(),
            pending: BTreeSet::new(),
            status: 0,
        }
    }

    /// A newer kernel takes the place of the newest until then, and one of a series that of the same series.
    #[test]
    fn one_column_for_each_place() {
        let mut matrix = Matrix::default();
        for kernel in ["7.2.13+deb14", "5.10.0-46", "7.3.1+deb14", "6.1.0-56"] {
            matrix.take(&column(kernel, false, "syn"));
        }
        matrix.take(&column("6.18.44", true, "syn"));
        matrix.take(&column("6.1.0-57", false, "syn"));
        matrix.take(&Column {
            scaled: ["36 kills instead of 200".to_owned()].into(),
            ..column("6.1.0-57", false, "top")
        });
        let kernels: Vec<&str> = matrix.columns.iter().map(|c| c.kernel.as_str()).collect();
        assert_eq!(kernels, ["5.10.0-46", "6.1.0-57", "7.3.1+deb14", "6.18.44"]);
        let tests: Vec<&String> = matrix.columns[1].tests.keys().collect();
        assert_eq!(tests, ["syn", "top"]);
        let scaled: Vec<&String> = matrix.columns[1].scaled.iter().collect();
        assert_eq!(scaled, ["36 kills instead of 200"]);
    }
}
