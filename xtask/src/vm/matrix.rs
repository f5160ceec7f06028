//! Test results on each kernel: docs/matrix.json, and its table in the document with the markers.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
};

use anyhow::{Context as _, ensure};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{
    LEFT_OUT,
    declared::{FEATURES, VERIFIER_LIMITS},
    kernels::{KERNELS, Kernel},
    results::{Group, groups, measured, scaled},
};
use crate::{ebpf, root};

/// What to do after a change of the eBPF program.
const SHORT_ROUTE: &str = "cargo xtask vm --kernel all --keep kernel:: GROUP:: runs the groups that the change \
                           concerns (minutes), cargo xtask vm --pending lists the others as not run yet; without \
                           groups the whole suite runs (hours)";
const DATA: &str = "docs/matrix.json";
const PAGE: &str = "docs/reference/kernel.md";
const BEGIN: &str = "<!-- matrix: made by cargo xtask vm --kernel all -->\n";
const END: &str = "<!-- end of the matrix -->\n";
/// Printed by the tests before their report.
const REPORT: &str = "RTO_TESTS_REPORT ";

/// All kernels.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Matrix {
    columns: Vec<Column>,
}

/// The results on a kernel.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Column {
    /// The kernel's release; for a host only the version, as "6.18.44".
    kernel: String,
    /// Tested on a developer's machine, not in an emulated one.
    is_host: bool,
    /// SHA-256 of the tested eBPF object, without its line information.
    object: String,
    /// Whether each feature is present.
    features: BTreeMap<String, String>,
    /// Verified instructions by program, or a word.
    verifier: BTreeMap<String, Value>,
    /// Tests by group.
    tests: BTreeMap<String, Group>,
    /// Measured results by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    measured: BTreeMap<String, String>,
    /// Tests that did less than on a real machine.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    scaled: BTreeSet<String>,
    /// Full names of tests without a result yet: `cargo xtask vm --pending` lists them.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pending: BTreeSet<String>,
    /// Exit status of the tests.
    #[serde(skip)]
    status: i32,
}

#[derive(Deserialize)]
struct Report {
    features: BTreeMap<String, String>,
    verifier: BTreeMap<String, Value>,
}

impl Column {
    /// Parses the output of the tests.
    pub(super) fn of(
        kernel: String,
        is_host: bool,
        status: i32,
        lines: &[String],
    ) -> anyhow::Result<Self> {
        let report = lines.iter().rev().find_map(|l| l.strip_prefix(REPORT));
        let report: Report = serde_json::from_str(report.context("the tests gave no report")?)?;
        Ok(Self {
            kernel,
            is_host,
            object: object()?,
            features: report.features,
            verifier: report.verifier,
            tests: groups(lines),
            measured: measured(lines),
            scaled: scaled(lines),
            pending: BTreeSet::new(),
            status,
        })
    }

    /// The column's position in the table, which is unique.
    fn place(&self) -> usize {
        if self.is_host {
            KERNELS.len()
        } else {
            Kernel::index_of(&self.kernel)
        }
    }

    /// This column, updated with groups that were tested later on the same kernel.
    fn with(mut self, later: &Self) -> Self {
        self.features.clone_from(&later.features);
        self.verifier.clone_from(&later.verifier);
        self.tests.extend(later.tests.clone());
        self.measured.extend(later.measured.clone());
        let run = self.names();
        self.pending.retain(|test| !run.contains(test));
        // "36 kills instead of 200" replaces any other number of kills.
        let what = |message: &String| message.split_once(' ').map(|(_, what)| what.to_owned());
        let again: BTreeSet<_> = later.scaled.iter().map(what).collect();
        self.scaled
            .retain(|message| !again.contains(&what(message)));
        self.scaled.extend(later.scaled.clone());
        self.status = self.status.max(later.status);
        self
    }

    fn failure(&self) -> Option<String> {
        let failed: Vec<String> = self.full_names(|group| group.failed.iter()).collect();
        let (kernel, status) = (&self.kernel, self.status);
        let is_bad = !failed.is_empty() || status != 0;
        is_bad.then(|| format!("Linux {kernel}: status {status}, failed: {failed:?}"))
    }

    /// Full names of these tests of each group.
    fn full_names<'a, I: Iterator<Item = &'a String>>(
        &'a self,
        of: impl Fn(&'a Group) -> I,
    ) -> impl Iterator<Item = String> {
        self.tests
            .iter()
            .flat_map(move |(name, group)| of(group).map(move |test| format!("{name}::{test}")))
    }

    /// Full names of tests with any result.
    fn names(&self) -> BTreeSet<String> {
        self.full_names(Group::names).collect()
    }

    /// "5.10" of "5.10.0-46-cloud-amd64".
    fn version(&self) -> String {
        let parts: Vec<&str> = self.kernel.split(['.', '-']).take(2).collect();
        parts.join(".")
    }
}

/// SHA-256 of the eBPF object in the tree, without its line information.
fn object() -> anyhow::Result<String> {
    let object = fs::read(root().join(ebpf::OBJECT)).context(ebpf::OBJECT)?;
    ebpf::executed_sha256(&object)
}

impl Matrix {
    /// Reads the data in the tree.
    fn kept() -> anyhow::Result<Self> {
        let text = fs::read_to_string(root().join(DATA)).context(DATA)?;
        serde_json::from_str(&text).context(DATA)
    }

    /// Adds a column to the tree. Two `cargo xtask vm` may do this at the same time.
    pub(super) fn add(column: &Column) -> anyhow::Result<()> {
        let lock = fs::File::open(root().join(DATA)).context(DATA)?;
        lock.lock().context(DATA)?;
        let mut kept = Self::kept()?;
        kept.take(column);
        kept.keep()
    }

    /// Adds the groups that ran to the column of this kernel; results of another object or kernel release are dropped.
    pub(super) fn take(&mut self, column: &Column) {
        let place = column.place();
        let old = self.columns.iter().position(|old| old.place() == place);
        let old = old.map(|index| self.columns.remove(index));
        self.columns.push(match old {
            Some(old) if old.object == column.object && old.kernel == column.kernel => {
                old.with(column)
            }
            _ => column.clone(),
        });
        self.columns.sort_by_key(Column::place);
    }

    /// Failures, by kernel.
    pub(super) fn failures(&self) -> Vec<String> {
        self.columns.iter().filter_map(Column::failure).collect()
    }

    /// Fails unless the tree has a result of each of these tests on each kernel, or lists the test as pending, and has
    /// no other results.
    pub(super) fn check(expected: &BTreeSet<String>) -> anyhow::Result<()> {
        let wrong = Self::kept()?.mismatches(expected);
        ensure!(
            wrong.is_empty(),
            "{DATA}: {SHORT_ROUTE}:\n{}",
            wrong.join("\n")
        );
        Ok(())
    }

    /// Expected tests without a result that are not pending either, and results of tests that are not expected.
    pub(super) fn mismatches(&self, expected: &BTreeSet<String>) -> Vec<String> {
        let mut wrong = Vec::new();
        for column in &self.columns {
            let kernel = &column.kernel;
            let known = &column.names() | &column.pending;
            for (tests, why) in [
                (expected - &known, "has no result and is not pending"),
                (&known - expected, "has a result, but is not a test"),
            ] {
                let line = |test| format!("Linux {kernel}: {test} {why}");
                wrong.extend(tests.iter().map(line));
            }
        }
        wrong
    }

    /// Marks the tests without a result as pending in the tree; returns the number of pending results.
    pub(super) fn note_pending(expected: &BTreeSet<String>) -> anyhow::Result<usize> {
        let mut kept = Self::kept()?;
        for column in &mut kept.columns {
            column.pending = expected - &column.names();
        }
        kept.keep()?;
        Ok(kept.columns.iter().map(|column| column.pending.len()).sum())
    }

    /// Writes the data and the table to the tree.
    fn keep(&self) -> anyhow::Result<()> {
        let data = serde_json::to_string_pretty(self)? + "\n";
        fs::write(root().join(DATA), data)?;
        let page = root().join(PAGE);
        let text = fs::read_to_string(&page)?;
        let (before, _, after) = around(&text)?;
        let text = format!("{before}{BEGIN}{}{END}{after}", self.table());
        Ok(fs::write(page, text)?)
    }

    /// Features, tests and instructions of the verifier by kernel, in Markdown.
    pub(super) fn table(&self) -> String {
        let mut text = String::new();
        let mut row = |first: &str, cell: &dyn Fn(&Column) -> String| {
            let cells: Vec<String> = self.columns.iter().map(cell).collect();
            text += &format!("| {first} | {} |\n", cells.join(" | "));
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
                .map_or("?", String::as_str)
            {
                "present" => "yes".to_owned(),
                "?" => "?".to_owned(),
                other => format!("**{other}**"),
            });
        }
        let groups = self.columns.iter().flat_map(|column| column.tests.keys());
        for group in groups.collect::<BTreeSet<_>>() {
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
        for (name, limit) in VERIFIER_LIMITS {
            row(&format!("verifier: {name} (limit {limit})"), &|column| {
                let work = column.verifier.get(name).map(ToString::to_string);
                work.map_or("?".to_owned(), |work| work.replace('"', ""))
            });
        }
        let measured = self
            .columns
            .iter()
            .flat_map(|column| column.measured.keys());
        for name in measured.collect::<BTreeSet<_>>() {
            row(name, &|column| {
                let result = column.measured.get(name);
                result.cloned().unwrap_or_else(|| "–".to_owned())
            });
        }
        for (name, why) in LEFT_OUT {
            text += &format!("\nLeft out in the machines: {name}\\* ({why}).\n");
        }
        let scaled = self.columns.iter().flat_map(|column| column.scaled.clone());
        let scaled = Vec::from_iter(scaled.collect::<BTreeSet<_>>());
        if !scaled.is_empty() {
            text += &format!("\nLess work in the machines: {}.\n", scaled.join(", "));
        }
        text
    }
}

/// The document before the table, the table, and the document after it.
fn around(text: &str) -> anyhow::Result<(&str, &str, &str)> {
    let (before, rest) = text.split_once(BEGIN).context(BEGIN)?;
    let (table, after) = rest.split_once(END).context(END)?;
    Ok((before, table, after))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_page_has_table_of_matrix() {
        let text = fs::read_to_string(root().join(PAGE)).unwrap();
        let (_, table, _) = around(&text).unwrap();
        assert_eq!(table, Matrix::kept().unwrap().table());
    }

    /// All kernels were tested with the object in the tree, no test failed, and no program exceeds its limit.
    #[test]
    fn matrix_is_of_object_in_tree() {
        let kept = Matrix::kept().unwrap();
        let places: Vec<usize> = kept.columns.iter().map(Column::place).collect();
        let expected: Vec<usize> = (0..=KERNELS.len()).collect();
        assert_eq!(places, expected, "run cargo xtask vm --kernel all");
        for column in &kept.columns {
            assert_eq!(
                column.object,
                object().unwrap(),
                "Linux {}: tested with another eBPF object; {SHORT_ROUTE}",
                column.kernel
            );
            assert_eq!(column.failure(), None);
        }
    }

    /// A limit far above the measured values limits nothing.
    #[test]
    fn limits_are_near_measured_values() {
        let kept = Matrix::kept().unwrap();
        for (name, limit) in VERIFIER_LIMITS {
            let measured = kept.columns.iter().map(|column| &column.verifier[name]);
            let most = measured.filter_map(Value::as_u64).max().unwrap();
            let fits = (most..2 * most).contains(&limit.into());
            assert!(fits, "{name}: {most}, limit {limit}");
        }
    }

    fn column(kernel: &str, is_host: bool, group: &str) -> Column {
        Column {
            kernel: kernel.to_owned(),
            is_host,
            object: object().unwrap(),
            features: BTreeMap::new(),
            verifier: BTreeMap::new(),
            tests: [(group.to_owned(), Group::default())].into(),
            measured: BTreeMap::new(),
            scaled: ["20 kills instead of 200".to_owned()].into(),
            pending: BTreeSet::new(),
            status: 0,
        }
    }

    /// Each test has a result or is pending, and each result belongs to a test.
    #[test]
    fn tests_and_results_match() {
        let mut matrix = Matrix::default();
        let mut column = column("6.1.0-56", false, "syn");
        let group = column.tests.get_mut("syn").unwrap();
        group.passed.extend(["one", "gone"].map(str::to_owned));
        column.pending.insert("syn::later".to_owned());
        matrix.take(&column);
        let expected = ["syn::one", "syn::later", "syn::new"].map(str::to_owned);
        assert_eq!(
            matrix.mismatches(&expected.into()),
            [
                "Linux 6.1.0-56: syn::new has no result and is not pending",
                "Linux 6.1.0-56: syn::gone has a result, but is not a test",
            ]
        );
    }

    /// A newer kernel replaces the former newest one; a newer release of a series replaces its predecessor.
    #[test]
    fn matrix_keeps_one_column_per_kernel_series() {
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
