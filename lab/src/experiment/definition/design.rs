//! The report's design for the records of a definition.

use std::collections::BTreeMap;

use super::{Definition, Factor, Settings};
use crate::{
    engine::{ChartSpec, Column, Design, EffectSpec, Stat, TableSpec, by_level},
    sampler::MEASURES,
    topology::LinkBackend,
};

/// The default of an unchanged namespace (`TCP_RTO_MIN`, include/net/tcp.h).
const KERNEL_RTO_MIN: &str = "200 ms";
/// Measures that are times.
const MILLISECONDS: [&str; 9] = [
    "time",
    "ping",
    "page time",
    "time of tails",
    "lasted",
    "smoothed RTT at the client",
    "smoothed RTT at the server",
    "RTO at the server",
    "value that was learnt",
];

impl Definition {
    /// The design of the file, or a default: the first factor's levels compared with the first of them.
    pub(super) fn shown(&self, runs: u32, backend: LinkBackend) -> Design {
        let Self {
            factor: factors, ..
        } = self;
        let mut method = vec![("runs of a cell".to_owned(), runs.to_string())];
        method.push(("link".to_owned(), format!("{backend:?}").to_lowercase()));
        method.push(("all".to_owned(), self.settings.describe()));
        for factor in factors.iter().filter(|factor| factor.sets.is_none()) {
            method.extend(factor.level.iter().map(|level| {
                let name = level.name.clone().unwrap_or_default();
                (format!("{} {name}", factor.name), level.describe())
            }));
        }
        method.retain(|(_, value)| !value.is_empty());
        let mut units: BTreeMap<String, String> = MILLISECONDS
            .iter()
            .chain(&MEASURES)
            .map(|name| ((*name).to_owned(), "ms".to_owned()))
            .collect();
        let swept = factors.iter().filter(|factor| factor.sets.is_some());
        units.extend(
            swept
                .clone()
                .map(|factor| (factor.name.clone(), "ms".to_owned())),
        );
        let levels = factors.iter().map(|factor| {
            let names = factor.level.iter().filter_map(|level| level.name.clone());
            (factor.name.clone(), names.collect())
        });
        let mut design = Design {
            name: self.name.clone(),
            question: self.question.clone(),
            method,
            levels: levels.collect(),
            units,
            effects: self.effect.clone(),
            tables: self.table.clone(),
            charts: self.chart.clone(),
            pivot: self.pivot,
            rto_min: self.rto_min(),
            references: self.references.clone(),
            ..Design::default()
        };
        let compared = &factors[0];
        let across = vec![compared.name.clone()];
        let others: Vec<String> = factors[1..]
            .iter()
            .map(|factor| factor.name.clone())
            .collect();
        let measure = "time";
        if design.effects.is_empty() {
            design.effects.push(EffectSpec {
                measure: measure.to_owned(),
                stat: Stat::P50,
                across: compared.name.clone(),
                base: compared.level[0].name.clone().unwrap_or_default(),
                rows: others.clone(),
                ..EffectSpec::default()
            });
        }
        if design.tables.is_empty() {
            design.tables.push(TableSpec {
                name: "medians".to_owned(),
                title: format!("{measure}, ms: medians"),
                rows: others.clone(),
                across: across.clone(),
                columns: vec![Column::new(measure, Stat::P50, "p50")],
                ..TableSpec::default()
            });
        }
        if design.charts.is_empty() {
            let x = swept
                .map(|factor| factor.name.clone())
                .find(|name| *name != compared.name);
            design.charts.push(ChartSpec {
                title: measure.to_owned(),
                per: others
                    .into_iter()
                    .filter(|name| Some(name) != x.as_ref())
                    .collect(),
                across,
                stat: x.is_some().then_some(Stat::P50),
                x,
                measure: measure.to_owned(),
                ..ChartSpec::default()
            });
        }
        design
    }

    /// Levels by their rto_min: "kernel 200 ms; agent, both 10 ms".
    fn rto_min(&self) -> String {
        let own = |settings: &Settings| settings.rto_min();
        let of = |settings: &Settings| own(settings).unwrap_or_else(|| KERNEL_RTO_MIN.to_owned());
        let sets_it = |factor: &&Factor| factor.level.iter().any(|level| own(level).is_some());
        let levels = self
            .factor
            .iter()
            .filter(sets_it)
            .flat_map(|one| &one.level);
        let named: Vec<_> = levels
            .map(|level| (of(&level.over(&self.settings)), level.name.as_deref()))
            .collect();
        if named.is_empty() {
            return of(&self.settings);
        }
        let pairs = named
            .iter()
            .map(|(is, name)| (&**is, name.unwrap_or_default()));
        let each = by_level(pairs).into_iter();
        let each = each.map(|(is, names)| format!("{} {is}", names.join(", ")));
        each.collect::<Vec<_>>().join("; ")
    }
}
