//! `docs/benchmarks.md` and `docs/scale.md`: what is measured, in one run, between markers of the pages. What stands
//! outside of them is written by hand.

use std::{
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use clap::ValueEnum;
use rto_testbed::machine::Machine;

use super::{add, callback, gap, go_on, idle, pure, rate, scale, start};
use crate::root;

/// `cargo xtask bench [NAME...]`.
#[derive(clap::Args)]
pub(super) struct Page {
    /// What to measure; without a name all of it, which rewrites docs/benchmarks.md and docs/scale.md
    names: Vec<Name>,
    #[command(flatten)]
    scale: scale::Many,
    /// So little of each that only the bench itself is tested: no page is written
    #[arg(long)]
    quick: bool,
    /// The page instead of docs/benchmarks.md, for a run of everything
    #[arg(long, value_name = "FILE", conflicts_with_all = ["names", "quick"])]
    page: Option<PathBuf>,
    /// Rewrite docs/scale.md also if nothing but `scale` is measured
    #[arg(long, conflicts_with = "quick")]
    write: bool,
    /// Fail if a goal is missed
    #[arg(long)]
    strict: bool,
}

/// A part of the page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Name {
    /// The time of a callback, against an empty program and one in C
    Callback,
    /// Connections a second, against an empty program and none
    Rate,
    /// How exact the gaps between SYNs are
    Gap,
    /// From start to ready, and to the end
    Start,
    /// From `add` to its effect
    Add,
    /// CPU time while nothing happens
    Idle,
    /// A million entries: load, reload, list, lookup, detach, memory
    Scale,
    /// What needs no kernel, by criterion
    Pure,
}

/// Parts of the page beside those of [`Name`].
const MACHINE: &str = "machine";
const GOALS: &str = "goals";
/// The pages, in docs.
const PAGE: &str = "benchmarks.md";
const SCALE_PAGE: &str = "scale.md";

/// How much is measured.
#[derive(Clone, Copy, Debug)]
pub(super) struct Amount {
    /// How often one thing is compared with another.
    pub(super) pairs: u32,
    /// Connections of each in a comparison.
    pub(super) connections: u32,
    /// Connections to a black hole.
    pub(super) handshakes: usize,
    /// Starts, and additions.
    pub(super) starts: u32,
    /// How long nothing happens.
    pub(super) idle: Duration,
    /// Loads of very many entries, and of reloads in each.
    pub(super) loads: u32,
    /// How many they are.
    pub(super) entries: u32,
}

impl Amount {
    const FULL: Self = Self {
        pairs: 11,
        connections: 4000,
        handshakes: 1000,
        starts: 21,
        idle: Duration::from_secs(60),
        loads: 3,
        entries: 1_000_000,
    };
    const QUICK: Self = Self {
        pairs: 3,
        connections: 200,
        handshakes: 50,
        starts: 3,
        idle: Duration::from_secs(2),
        loads: 1,
        entries: 20_000,
    };
}

/// What a bench found.
#[derive(Debug)]
pub(super) struct Found {
    /// Markdown.
    pub(super) text: String,
    /// What was wanted.
    pub(super) goals: Vec<Goal>,
}

/// A number that is wanted, and the one there is.
#[derive(Debug)]
pub(super) struct Goal {
    /// Of what.
    pub(super) what: &'static str,
    /// Most or least, in words.
    pub(super) wanted: &'static str,
    /// What was measured, in words.
    pub(super) measured: String,
    /// Whether that is good enough.
    pub(super) met: bool,
}

impl Page {
    /// What needs no privilege, before the rest is run as root.
    pub(super) fn prepare(&self) -> anyhow::Result<()> {
        if !self.chosen().contains(&Name::Pure) {
            return Ok(());
        }
        pure::measure(self.quick)
    }

    /// Measures, prints, and writes the page.
    pub(super) fn run(&self, programs: &Path) -> anyhow::Result<()> {
        let amount = if self.quick {
            Amount::QUICK
        } else {
            Amount::FULL
        };
        let run = Run::begin()?;
        let mut parts = Vec::new();
        let mut goals = Vec::new();
        let mut all_met = true;
        for name in self.chosen() {
            go_on()?;
            println!("## {}\n", name.marker());
            let part = Run::begin()?;
            let found = match name {
                Name::Callback => callback::run(amount, programs),
                Name::Rate => rate::run(amount, programs),
                Name::Gap => gap::run(amount, programs),
                Name::Start => start::run(amount, programs),
                Name::Add => add::run(amount, programs),
                Name::Idle => idle::run(amount, programs),
                Name::Scale => scale::run(amount, &self.scale, programs),
                Name::Pure => pure::run(),
            };
            let Found { text, goals: more } = found.with_context(|| name.marker())?;
            all_met &= more.iter().all(|goal| goal.met);
            let text = if name == Name::Scale {
                // On a page of its own.
                format!("{}\n{text}\n{}", part.end()?, goals_table(&more))
            } else {
                goals.extend(more);
                text
            };
            println!("{text}");
            parts.push((name, text));
        }
        let (goals, machine) = (goals_table(&goals), run.end()?);
        if self.chosen() != [Name::Scale] {
            println!("## {GOALS}\n\n{goals}\n{machine}");
        }
        self.write(&parts, &goals, &machine)?;
        ensure!(!self.strict || all_met, "a goal is missed");
        Ok(())
    }

    fn write(&self, parts: &[(Name, String)], goals: &str, machine: &str) -> anyhow::Result<()> {
        let is_all = self.names.is_empty() && !self.quick;
        let of = |scale: bool| {
            let parts = parts
                .iter()
                .filter(move |(n, _)| scale == (*n == Name::Scale));
            parts.map(|(name, text)| (name.marker(), text.as_str()))
        };
        if is_all {
            let more = [(GOALS.to_owned(), goals), (MACHINE.to_owned(), machine)];
            let path = self.page.clone().unwrap_or_else(|| page(PAGE));
            rewrite(&path, of(false).chain(more))?;
        }
        if is_all && self.page.is_none() || self.write {
            rewrite(&page(SCALE_PAGE), of(true))?;
        }
        Ok(())
    }

    fn chosen(&self) -> Vec<Name> {
        if self.names.is_empty() {
            Name::value_variants().to_vec()
        } else {
            self.names.clone()
        }
    }
}

impl Name {
    fn marker(self) -> String {
        let value = self.to_possible_value();
        value.map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

fn page(name: &str) -> PathBuf {
    root().join("docs").join(name)
}

/// Puts parts in their places.
fn rewrite<'a>(path: &Path, parts: impl Iterator<Item = (String, &'a str)>) -> anyhow::Result<()> {
    let mut text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
    for (name, part) in parts {
        text = replaced(&text, &name, part)?;
    }
    fs::write(path, text)?;
    println!("written: {}", path.display());
    Ok(())
}

/// When something was measured, and beside what.
struct Run {
    begin: Instant,
    load: String,
}

impl Run {
    fn begin() -> anyhow::Result<Self> {
        Ok(Self {
            begin: Instant::now(),
            load: load()?,
        })
    }

    /// In words, with the machine.
    fn end(&self) -> anyhow::Result<String> {
        Ok(format!(
            "{}. Load average before the run {}, at its end {}; it took {} s.\n",
            Machine::here()?.describe(),
            self.load,
            load()?,
            self.begin.elapsed().as_secs()
        ))
    }
}

fn load() -> anyhow::Result<String> {
    let text = fs::read_to_string("/proc/loadavg")?;
    Ok(text.split(' ').next().unwrap_or_default().to_owned())
}

fn goals_table(goals: &[Goal]) -> String {
    let rows = goals.iter().map(|goal| {
        let verdict = if goal.met { "met" } else { "**missed**" };
        let Goal {
            what,
            wanted,
            measured,
            ..
        } = goal;
        [
            (*what).into(),
            (*wanted).into(),
            measured.clone(),
            verdict.into(),
        ]
    });
    table(["", "goal", "measured", ""], rows)
}

/// A table in Markdown.
pub(super) fn table<const N: usize>(
    head: [&str; N],
    rows: impl IntoIterator<Item = [String; N]>,
) -> String {
    let line = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
    let mut text = line(&head.map(str::to_owned));
    text.push_str(&format!("|{}\n", "---|".repeat(N)));
    for row in rows {
        text.push_str(&line(&row));
    }
    text
}

/// The text with this part between its markers.
fn replaced(text: &str, name: &str, part: &str) -> anyhow::Result<String> {
    let (begin, end) = (begin(name), end(name));
    let (before, rest) = text.split_once(&begin).with_context(|| begin.clone())?;
    let (_, after) = rest.split_once(&end).with_context(|| end.clone())?;
    Ok(format!("{before}{begin}\n{part}{end}{after}"))
}

fn begin(name: &str) -> String {
    format!("<!-- bench: {name} -->")
}

fn end(name: &str) -> String {
    format!("<!-- end: {name} -->")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pages_have_a_place_for_every_part() {
        let of = |name: &Name| match name {
            Name::Scale => SCALE_PAGE,
            _ => PAGE,
        };
        let names = Name::value_variants().iter();
        let more = [GOALS, MACHINE].map(|name| (PAGE, name.to_owned()));
        for (file, name) in names.map(|name| (of(name), name.marker())).chain(more) {
            let text = fs::read_to_string(page(file)).unwrap();
            let new = replaced(&text, &name, "| new |\n").unwrap();
            let (_, rest) = new.split_once(&begin(&name)).unwrap();
            assert!(rest.starts_with(&format!("\n| new |\n{}", end(&name))));
            // And what is there was written by a run.
            let (_, rest) = text.split_once(&begin(&name)).unwrap();
            let (part, _) = rest.split_once(&end(&name)).unwrap();
            assert!(part.trim().len() > 20, "{name} has never been measured");
        }
    }

    #[test]
    fn only_the_part_is_replaced() {
        let text = "a\n<!-- bench: x -->\nold\n<!-- end: x -->\nb\n";
        let new = replaced(text, "x", "new\n").unwrap();
        assert_eq!(new, text.replace("old", "new"));
        assert!(replaced(text, "y", "new\n").is_err());
    }
}
