//! Experiments defined by a TOML file: factors, and the settings of their levels. `rto-lab loss`, `rtt`, `tail` and
//! `workloads` are such files, and `rto-lab run FILE.toml` runs a user's own.

mod check;
mod design;
mod run;
mod settings;

use std::{collections::BTreeSet, path::Path, sync::Mutex};

use anyhow::{Context as _, ensure};
use rto_testbed::{agent, machine::Machine, process::require};
use serde::Deserialize;

pub(crate) use self::settings::Settings;
use self::settings::{Dropped, Sweep};
use crate::{
    cli::EngineArgs,
    commands::run::Defined,
    engine::{
        CONGESTION, ChartSpec, Design, EffectSpec, Only, Record, TableSpec, references, seed_of,
    },
    published,
    topology::LinkBackend,
};

/// One of the lab's own experiments: command, definition, published values.
type Own = (&'static str, &'static str, fn() -> Vec<Record>);
macro_rules! own {
    ($name:literal, $published:expr) => {{
        let definition = include_str!(concat!("../../../experiments/", $name, ".toml"));
        ($name, definition, $published)
    }};
}
const OWN: [Own; 7] = [
    own!("loss", published::loss),
    own!("pages", published::pages),
    own!("programs", Vec::new),
    own!("rtt", published::rtt),
    own!("sampler", published::sampler),
    own!("tail", published::tail),
    own!("workloads", Vec::new),
];
/// The sysctl of the congestion control.
const CONTROL: &str = "net.ipv4.tcp_congestion_control";
/// Maximum number of cells of an experiment: more would take days.
const CELLS: usize = 10_000;
/// Maximum number of testbeds of all kinds: each has its own address.
const TESTBEDS: usize = 200;

/// The file.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Definition {
    name: String,
    question: String,
    /// Runs of a cell.
    #[serde(default = "runs")]
    runs: u32,
    #[serde(default = "quick_runs")]
    quick_runs: u32,
    /// Settings of all runs, unless a level overrides them.
    #[serde(default)]
    settings: Settings,
    factor: Vec<Factor>,
    #[serde(default)]
    effect: Vec<EffectSpec>,
    /// Whether the first effect also gets a small table: rows by levels.
    #[serde(default)]
    pivot: bool,
    #[serde(default)]
    table: Vec<TableSpec>,
    #[serde(default)]
    chart: Vec<ChartSpec>,
    /// Published values: levels by name, and numbers of a measure, `"time p50" = 3.0`.
    #[serde(default)]
    published: Vec<toml::Table>,
    /// The same as records, and those of the lab's own experiments.
    #[serde(skip)]
    references: Vec<Record>,
}

impl Definition {
    /// The measures of all its levels.
    fn measures(&self) -> BTreeSet<&'static str> {
        let levels = self.factor.iter().flat_map(|factor| &factor.level);
        let all = levels.map(|level| level.over(&self.settings));
        let all = all.chain([self.settings.clone()]);
        all.flat_map(|settings| settings.measures()).collect()
    }

    /// All combinations of levels.
    fn cells(&self, args: &Defined, asked: Only, runs: u32) -> anyhow::Result<Vec<Cell>> {
        let factors = &self.factor;
        let count = factors
            .iter()
            .map(|factor| factor.level.len())
            .try_fold(1, usize::checked_mul);
        ensure!(
            !factors.is_empty() && count.is_some_and(|count| (1..=CELLS).contains(&count)),
            "[[factor]]: define at least one factor, and at most {CELLS} combinations of levels"
        );
        let mut all: Vec<Combination> = vec![(Vec::new(), self.settings.clone(), vec![asked])];
        for factor in factors {
            let with = |(levels, below, only): &Combination, level: &Settings| {
                let mut levels = levels.clone();
                levels.push((factor.name.clone(), level.name.clone().unwrap_or_default()));
                let mut only = only.clone();
                only.push(level.only.clone());
                (levels, level.over(below), only)
            };
            all = all
                .iter()
                .flat_map(|cell| factor.level.iter().map(|level| with(cell, level)))
                .collect();
        }
        let mut cells = Vec::new();
        for (levels, mut settings, only) in all {
            let is_meant = |(factor, level): &(String, String)| {
                let mut all = only.iter().filter_map(|only| only.get(factor));
                all.all(|levels| levels.contains(level))
            };
            let rule = settings.drop.as_ref().map(Dropped::rule).transpose();
            // nftables cannot distinguish retransmissions from first copies.
            let is_possible = args.engine.link == LinkBackend::Relay
                || rule.as_ref().is_ok_and(|rule| {
                    rule.is_none_or(|rule| {
                        !rule.filter.first_time && rule.filter.from_byte.is_none()
                    })
                });
            if !levels.iter().all(is_meant) || !is_possible {
                continue;
            }
            if args.engine.common.quick {
                settings.count = settings.quick_count.or(settings.count);
            }
            cells.push(Cell {
                levels,
                settings,
                runs,
            });
        }
        ensure!(
            !cells.is_empty(),
            "`only` (or --only, with --quick) excludes all combinations of levels"
        );
        Ok(cells)
    }
}

const fn runs() -> u32 {
    10
}

const fn quick_runs() -> u32 {
    5
}

/// A factor: levels with their own settings, or values of one setting.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Factor {
    name: String,
    #[serde(default)]
    level: Vec<Settings>,
    sets: Option<Sweep>,
    #[serde(default)]
    values: Vec<String>,
    /// Levels of a quick run; empty: all.
    #[serde(default)]
    quick: Vec<String>,
    /// Names of all levels, including the levels that a quick run omits.
    #[serde(skip)]
    all: Vec<String>,
}

/// Levels of factors, their merged settings, and the combinations that each of them allows.
type Combination = (Vec<(String, String)>, Settings, Vec<Only>);

/// A combination of levels of all factors, and its settings.
#[derive(Clone, Debug)]
pub(crate) struct Cell {
    pub(crate) levels: Vec<(String, String)>,
    pub(crate) settings: Settings,
    pub(crate) runs: u32,
}

impl Cell {
    /// The same with a congestion control, unless its own settings have one.
    fn with_congestion(&self, name: &str, is_factor: bool) -> Self {
        let mut cell = self.clone();
        let sysctls = cell.settings.sysctls.get_or_insert_default();
        let own = sysctls.entry(CONTROL.to_owned());
        own.or_insert_with(|| toml::Value::String(name.to_owned()));
        if is_factor {
            cell.levels.push((CONGESTION.to_owned(), name.to_owned()));
        }
        cell
    }
}

/// The congestion controls of this list that namespaces may use. The others are named in the method.
fn allowed(asked: &[String], design: &mut Design) -> anyhow::Result<Vec<String>> {
    let known = std::fs::read_to_string("/proc/sys/net/ipv4/tcp_allowed_congestion_control")?;
    let is_known = |name: &&String| known.split_whitespace().any(|one| one == *name);
    let (allowed, others): (Vec<_>, Vec<_>) = asked.iter().partition(is_known);
    let allowed: Vec<String> = allowed.into_iter().cloned().collect();
    ensure!(
        !allowed.is_empty(),
        "--congestion: this host allows {}: change net.ipv4.tcp_allowed_congestion_control, or take one of these",
        known.trim()
    );
    for name in others {
        let why = "left out: not in net.ipv4.tcp_allowed_congestion_control".to_owned();
        design.method.push((name.clone(), why));
    }
    design
        .method
        .push((CONGESTION.to_owned(), allowed.join(", ")));
    Ok(allowed)
}

/// A whole experiment.
#[derive(Debug)]
pub struct Plan {
    design: Design,
    /// The measure for the longest transaction of an outage.
    outages_are: &'static str,
    cells: Vec<Cell>,
    /// The kind of testbed of each cell.
    kind_of: Vec<usize>,
    /// Settings of each kind of testbed, and the number of testbeds.
    kinds: Vec<(Settings, usize)>,
    backend: LinkBackend,
    seed: u64,
    hz: u32,
    agent: std::path::PathBuf,
    /// Lets only one run with an outage connect and transact at a time; the idle ones do not disturb others.
    gate: Mutex<()>,
}

impl Plan {
    /// Reads the experiment of a file.
    pub fn read(path: &Path, args: &Defined) -> anyhow::Result<Self> {
        let at = || path.display().to_string();
        let text = std::fs::read_to_string(path).with_context(at)?;
        Self::of(toml::from_str(&text).with_context(at)?, args).with_context(at)
    }

    /// Reads one of the lab's own experiments.
    pub fn own(verb: &str, args: &Defined) -> anyhow::Result<Self> {
        let own = OWN
            .iter()
            .find(|(name, ..)| *name == verb)
            .context("no such experiment")?;
        let mut definition: Definition = toml::from_str(own.1)?;
        definition.references = own.2();
        if args.engine.link == LinkBackend::Nft {
            // The lab's own experiments also work without the delay, which a veth does not have.
            definition.settings.delay = None;
        }
        Self::of(definition, args)
    }

    fn of(mut definition: Definition, args: &Defined) -> anyhow::Result<Self> {
        ensure!(
            is_file_name(&definition.name),
            "name: {:?} is used as a file name: only letters, digits, - and _ are allowed",
            definition.name
        );
        let measures = definition.measures();
        let published = references(&definition.published);
        definition.references.extend(published);
        for factor in &mut definition.factor {
            factor.complete(args.engine.common.quick)?;
        }
        let mut only = Only::new();
        for (factor, level) in args.only.iter().cloned() {
            only.entry(factor).or_default().push(level);
        }
        check::names(&definition, &measures, &only)?;
        let runs = args.runs.unwrap_or(match args.engine.common.quick {
            true => definition.quick_runs,
            false => definition.runs,
        });
        let cells = definition.cells(args, only, runs)?;
        let design = definition.shown(runs, args.engine.link);
        Self::new(design, "time", cells, &args.engine)
    }

    /// An experiment of these cells.
    pub(crate) fn new(
        mut design: Design,
        outages_are: &'static str,
        cells: Vec<Cell>,
        args: &EngineArgs,
    ) -> anyhow::Result<Self> {
        let controls = allowed(&args.congestion, &mut design)?;
        let cells: Vec<Cell> = controls
            .iter()
            .flat_map(|name| {
                cells
                    .iter()
                    .map(|cell| cell.with_congestion(name, controls.len() > 1))
            })
            .collect();
        design.with_congestion(&controls);
        let mut kinds: Vec<(Settings, usize)> = Vec::new();
        let mut kind_of = Vec::new();
        for Cell {
            levels, settings, ..
        } in &cells
        {
            settings.check(args.link).with_context(|| named(levels))?;
            let links = settings.links.unwrap_or(2);
            let same = kinds
                .iter()
                .position(|(known, _)| known.has_testbed_of(settings));
            kind_of.push(same.unwrap_or(kinds.len()));
            match same {
                Some(kind) => kinds[kind].1 = kinds[kind].1.max(links),
                None => kinds.push((settings.clone(), links)),
            }
        }
        // Runs of other cells, or with other settings, must not be continued.
        let all: Vec<_> = cells
            .iter()
            .map(|cell| (&cell.levels, &cell.settings))
            .collect();
        let hash = format!("{}, hash {:016x}", cells.len(), seed_of(0, &all));
        design.method.push(("cells".to_owned(), hash));
        if cells.iter().any(|cell| cell.settings.sample.is_some()) {
            require(&["ping"])?;
        }
        let testbeds: usize = kinds.iter().map(|(_, links)| links).sum();
        ensure!(
            testbeds <= TESTBEDS,
            "links: {testbeds} in total; at most {TESTBEDS} are possible"
        );
        Ok(Self {
            design,
            outages_are,
            cells,
            kind_of,
            kinds,
            backend: args.link,
            seed: args.common.seed,
            hz: u32::try_from(Machine::here()?.hz)?,
            agent: agent::find(args.common.agent.as_deref())?,
            gate: Mutex::new(()),
        })
    }
}

/// Whether this name is valid for the files of a report.
fn is_file_name(name: &str) -> bool {
    let is_fine = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    !name.is_empty() && name.chars().all(is_fine)
}

/// The name of a combination, such as "timers agent, pause 8".
fn named(levels: &[(String, String)]) -> String {
    let levels = levels
        .iter()
        .map(|(factor, level)| format!("{factor} {level}"));
    levels.collect::<Vec<_>>().join(", ")
}

impl Factor {
    /// Turns values into levels, and drops the levels that a quick run omits.
    fn complete(&mut self, quick: bool) -> anyhow::Result<()> {
        let name = &self.name;
        let at = || format!("factor {name}");
        let is_sweep = self.sets.is_some();
        ensure!(
            self.values.is_empty() != is_sweep && self.level.is_empty() == is_sweep,
            "factor {name}: give levels ([[factor.level]]), or `sets` (pause, delay, round_trip, jitter or outage) and `values`"
        );
        if let Some(sets) = self.sets {
            let levels = self
                .values
                .iter()
                .map(|value| Settings::of_sweep(sets, value));
            self.level = levels.collect::<Result<_, _>>().with_context(at)?;
        }
        let names: Vec<String> = self
            .level
            .iter()
            .filter_map(|level| level.name.clone())
            .collect();
        ensure!(
            names.len() == self.level.len(),
            "factor {name}: each level needs a `name`"
        );
        for (number, one) in names.iter().enumerate() {
            ensure!(
                !names[..number].contains(one),
                "factor {name}: two levels {one}"
            );
        }
        let unknown = self
            .quick
            .iter()
            .find(|one| !names.contains(one) && !self.values.contains(one));
        if let Some(one) = unknown {
            anyhow::bail!(
                "factor {name}: quick: no level {one}; there are {}",
                names.join(", ")
            );
        }
        self.all = names;
        if quick && !self.quick.is_empty() {
            let mut number = 0;
            self.level.retain(|level| {
                let value = self.values.get(number);
                number += 1;
                let is = |one: &String| Some(one) == level.name.as_ref() || Some(one) == value;
                self.quick.iter().any(is)
            });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
