//! Checks that the factors, levels and measures that a definition names exist.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context as _, bail, ensure};

use super::{Definition, is_file_name};
use crate::engine::{Only, Stat};

/// Names that are reserved for tables of every report.
const TAKEN: [&str; 3] = ["effects", "differences", "agreement"];

/// The existing names.
struct Known<'a> {
    /// Levels by factor as in the file, including the levels that a quick run omits.
    levels: BTreeMap<&'a str, Vec<&'a str>>,
    measures: &'a BTreeSet<&'static str>,
}

/// Rejects names that do not exist or occur twice; the error contains the place and the existing names.
pub(super) fn names(
    definition: &Definition,
    measures: &BTreeSet<&'static str>,
    asked: &Only,
) -> anyhow::Result<()> {
    let Definition {
        factor: factors,
        effect: effects,
        table: tables,
        chart: charts,
        references,
        ..
    } = definition;
    let mut levels = BTreeMap::new();
    for factor in factors {
        let name = factor.name.as_str();
        // `rto-lab compare` uses "log" as a factor.
        ensure!(
            !name.is_empty() && name != "log",
            "[[factor]]: {name:?} is not allowed as the name of a factor: choose another"
        );
        let all = factor.all.iter().map(String::as_str).collect();
        ensure!(
            levels.insert(name, all).is_none(),
            "[[factor]]: two are named {name}: merge their levels, or rename one"
        );
    }
    let mut known = Known { levels, measures };
    known.only(asked).context("--only")?;
    for factor in factors {
        for level in &factor.level {
            let at = || {
                let level = level.name.as_deref().unwrap_or_default();
                format!("factor {}, level {level}: only", factor.name)
            };
            ensure!(
                !level.only.contains_key(&factor.name),
                "{}: {} is the same factor: use levels of other factors",
                at(),
                factor.name
            );
            known.only(&level.only).with_context(at)?;
        }
    }
    for (number, one) in (1..).zip(references) {
        for (name, level) in &one.factors {
            let at = || format!("[[published]] {number}");
            known.factor(name).with_context(at)?;
            known.levels.entry(name).or_default().push(level);
        }
    }
    // A published value may lack a factor.
    if !references.is_empty() {
        known.levels.values_mut().for_each(|levels| levels.push(""));
    }
    for (number, one) in (1..).zip(effects) {
        let used = known.used(&[(&*one.measure, Some(&one.stat))], &[&one.rows], &one.only);
        used.and_then(|()| known.level(&one.across, &one.base).context("base"))
            .with_context(|| format!("[[effect]] {number}"))?;
    }
    let mut named = BTreeSet::from(TAKEN);
    for one in tables {
        let name = one.name.as_str();
        ensure!(
            is_file_name(name) && named.insert(name),
            "[[table]]: {name:?} is used as a file name: only letters, digits, - and _ are allowed, and each name only once"
        );
        let columns = one.columns.iter();
        let columns = columns.map(|column| (&*column.measure, Some(&column.stat)));
        let columns: Vec<_> = columns.collect();
        known
            .used(&columns, &[&one.rows, &one.across], &one.only)
            .with_context(|| format!("[[table]] {name}"))?;
    }
    for (number, one) in (1..).zip(charts) {
        known
            .used(
                &[(&*one.measure, one.stat.as_ref())],
                &[one.x.as_slice(), &one.per, &one.across],
                &one.only,
            )
            .with_context(|| format!("[[chart]] {number}"))?;
    }
    Ok(())
}

impl Known<'_> {
    fn factor(&self, name: &str) -> anyhow::Result<&[&str]> {
        let Some(levels) = self.levels.get(name) else {
            let all: Vec<&str> = self.levels.keys().copied().collect();
            bail!("no factor {name}; there are {}", all.join(", "));
        };
        Ok(levels)
    }

    /// Checks measures with their statistics, factors, and a selection of levels.
    fn used(
        &self,
        measures: &[(&str, Option<&Stat>)],
        factors: &[&[String]],
        only: &Only,
    ) -> anyhow::Result<()> {
        for (measure, stat) in measures {
            let whole = match stat {
                Some(Stat::PercentOf(whole)) => whole.as_str(),
                _ => *measure,
            };
            for one in [*measure, whole] {
                let all: Vec<&str> = self.measures.iter().copied().collect();
                ensure!(
                    self.measures.contains(one),
                    "nothing measures {one}; there are {}",
                    all.join(", ")
                );
            }
        }
        for name in factors.iter().copied().flatten() {
            self.factor(name)?;
        }
        self.only(only).context("only")
    }

    fn level(&self, factor: &str, level: &str) -> anyhow::Result<()> {
        let levels = self.factor(factor)?;
        ensure!(
            levels.contains(&level),
            "{factor} has no level {level}; there are {}",
            levels.join("; ")
        );
        Ok(())
    }

    fn only(&self, only: &Only) -> anyhow::Result<()> {
        let mut all = only
            .iter()
            .flat_map(|(factor, levels)| levels.iter().map(move |level| (factor, level)));
        all.try_for_each(|(factor, level)| self.level(factor, level))
    }
}
