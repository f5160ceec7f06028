//! `cargo xtask bench [NAME...]`: runs the benchmarks in turn, checks their goals, and writes the documents.

use std::{
    fs,
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use clap::ValueEnum;
use rto_testbed::machine::Machine;

use crate::{
    add, alternatives, callback, fleet, gap, idle, memory, page,
    process::check_signals,
    pure, rate,
    result::{BenchResult, Goal, goals_table},
    scale, start, tick,
};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// The benchmarks to run; without a name all of them, and the results are written to the documents
    names: Vec<Name>,
    #[command(flatten)]
    scale: scale::Args,
    /// Take too few samples for a result, to test the benchmarks themselves; no document is written
    #[arg(long)]
    quick: bool,
    /// Also write the results of benchmarks with a page of their own (`scale`, `alternatives`) when they run by name
    #[arg(long, conflicts_with = "quick")]
    write: bool,
    /// Fail if a goal is missed
    #[arg(long)]
    strict: bool,
}

/// A benchmark, and the name of its part in the documents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Name {
    /// Time of a callback, against an empty program and two in C
    Callback,
    /// Connections per second, against an empty program and none
    Rate,
    /// Kernel memory of open connections
    Memory,
    /// Accuracy of the gaps between SYNs
    Gap,
    /// Time from start to ready, and from SIGTERM to the end
    Start,
    /// Time from `add` to its effect
    Add,
    /// CPU time of an idle daemon
    Idle,
    /// CPU time of decisions about 1,000 automatic policies
    Tick,
    /// A million entries: load, reload, list, lookup, detach, memory
    Scale,
    /// Queries about 1,000 hosts in one Prometheus
    Fleet,
    /// Gains of what users could choose instead
    Alternatives,
    /// Functions without a kernel, by criterion
    Pure,
}

/// Parts of the documents that are not benchmarks themselves.
const MACHINE: &str = "machine";
const GOALS: &str = "goals";

/// Sample sizes of the benchmarks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SampleSizes {
    /// Rounds of a comparison.
    pub(crate) rounds: u32,
    /// Connections of each side in a round.
    pub(crate) connections: u32,
    /// Simultaneously open connections.
    pub(crate) open: u32,
    /// Connections to a black hole.
    pub(crate) handshakes: usize,
    /// Starts, and additions.
    pub(crate) starts: u32,
    /// Duration of the idle measurement.
    pub(crate) idle: Duration,
    /// Loads of the full set of entries, and reloads in each.
    pub(crate) loads: u32,
    /// Entries of the full set.
    pub(crate) entries: u32,
    /// Simulated hosts in one Prometheus.
    pub(crate) hosts: u32,
}

impl SampleSizes {
    const FULL: Self = Self {
        rounds: 11,
        connections: 4000,
        open: 100_000,
        handshakes: 1000,
        starts: 21,
        idle: Duration::from_secs(60),
        loads: 3,
        entries: 1_000_000,
        hosts: 1000,
    };
    const QUICK: Self = Self {
        rounds: 3,
        connections: 200,
        open: 2000,
        handshakes: 50,
        starts: 3,
        idle: Duration::from_secs(2),
        loads: 1,
        entries: 20_000,
        hosts: 20,
    };
}

impl Args {
    /// Chooses the benchmarks that show the cost of statistics.
    pub(crate) fn choose_overhead(&mut self) {
        self.names = vec![Name::Callback, Name::Rate];
    }

    /// Runs the benchmarks that need no privilege.
    pub(crate) fn prepare(&self) -> anyhow::Result<()> {
        if self.chosen().contains(&Name::Pure) {
            pure::measure(self.quick)?;
        }
        Ok(())
    }

    /// Measures, prints, and writes the documents.
    pub(crate) fn run(&self, programs: &Path) -> anyhow::Result<()> {
        let run = Run::begin()?;
        let mut parts = Vec::new();
        let mut goals = Vec::new();
        let mut all_met = true;
        for name in self.chosen() {
            check_signals()?;
            println!("## {}\n", name.part());
            let own = Run::begin()?;
            let result = self.measure(name, programs);
            let BenchResult { text, goals: more } = result.with_context(|| name.part())?;
            all_met &= more.iter().all(|goal| goal.met);
            let text = if !name.has_own_page() {
                goals.extend(more);
                text
            } else if more.is_empty() {
                format!("{}\n{text}", own.end()?)
            } else {
                format!("{}\n{text}\n{}", own.end()?, goals_table(&more))
            };
            println!("{text}");
            parts.push((name, text));
        }
        self.conclude(&parts, &goals, &run.end()?)?;
        ensure!(!self.strict || all_met, "a goal is missed");
        Ok(())
    }

    fn measure(&self, name: Name, programs: &Path) -> anyhow::Result<BenchResult> {
        let sizes = if self.quick {
            SampleSizes::QUICK
        } else {
            SampleSizes::FULL
        };
        match name {
            Name::Callback => callback::run(sizes, programs),
            Name::Rate => rate::run(sizes, programs),
            Name::Memory => memory::run(sizes, programs),
            Name::Gap => gap::run(sizes, programs),
            Name::Start => start::run(sizes, programs),
            Name::Add => add::run(sizes, programs),
            Name::Idle => idle::run(sizes, programs),
            Name::Tick => tick::run(sizes, programs),
            Name::Scale => scale::run(sizes, &self.scale, programs),
            Name::Fleet => fleet::run(sizes, programs),
            Name::Alternatives => alternatives::run(sizes, programs),
            Name::Pure => pure::result(),
        }
    }

    /// Prints the goals, and writes the documents if all benchmarks were run.
    fn conclude(
        &self,
        parts: &[(Name, String)],
        goals: &[Goal],
        machine: &str,
    ) -> anyhow::Result<()> {
        let goals = goals_table(goals);
        if self.chosen() != [Name::Scale] {
            println!("## {GOALS}\n\n{goals}\n{machine}");
        }
        let is_all = self.names.is_empty() && !self.quick;
        for (name, text) in parts {
            if is_all || self.write && name.has_own_page() {
                page::rewrite(&name.part(), text)?;
            }
        }
        if is_all {
            page::rewrite(GOALS, &goals)?;
            page::rewrite(MACHINE, machine)?;
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
    /// Whether its results are on a separate page.
    const fn has_own_page(self) -> bool {
        matches!(self, Self::Scale | Self::Alternatives)
    }

    fn part(self) -> String {
        let value = self.to_possible_value();
        value.map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

/// The names of all parts of the documents.
#[cfg(test)]
pub(crate) fn parts() -> Vec<String> {
    let names = Name::value_variants().iter().map(|name| name.part());
    names.chain([GOALS, MACHINE].map(str::to_owned)).collect()
}

/// A measurement's duration and the host's load.
struct Run {
    begin: Instant,
    load: String,
}

impl Run {
    fn begin() -> anyhow::Result<Self> {
        Ok(Self {
            begin: Instant::now(),
            load: load_average()?,
        })
    }

    /// A sentence about the run, with the machine.
    fn end(&self) -> anyhow::Result<String> {
        Ok(format!(
            "{}. Load average {} before the run and {} after it; the run took {} s.\n",
            Machine::here()?.describe(),
            self.load,
            load_average()?,
            self.begin.elapsed().as_secs()
        ))
    }
}

fn load_average() -> anyhow::Result<String> {
    let text = fs::read_to_string("/proc/loadavg")?;
    Ok(text.split(' ').next().unwrap_or_default().to_owned())
}
