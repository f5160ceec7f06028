//! Compares two logs in one report.

use anyhow::ensure;

use super::{Design, Manifest, Record, render};
use crate::report::Report;

/// Compares two logs of the same experiment; the first is the base of the comparison.
/// Fails if the logs are of different experiments.
pub fn compare(
    one: (&str, &Manifest, &[Record]),
    other: (&str, &Manifest, &[Record]),
) -> anyhow::Result<Report> {
    const LOG: &str = "log";
    let designs = [&one.1.design, &other.1.design];
    ensure!(
        designs[0].name == designs[1].name,
        "{} and {}: different experiments",
        designs[0].name,
        designs[1].name
    );
    let names = match one.0 == other.0 {
        true => ["A".to_owned(), "B".to_owned()],
        false => [one.0, other.0].map(str::to_owned),
    };
    let sides = || [one, other].into_iter().zip(&names);
    let both = sides().flat_map(|((_, _, records), name)| {
        records.iter().map(move |record| {
            let mut record = record.clone();
            record.factors.insert(LOG.to_owned(), name.clone());
            record
        })
    });
    let both: Vec<Record> = both.collect();
    let mut design = designs[0].clone();
    design.levels.insert(LOG.to_owned(), names.to_vec());
    for spec in &mut design.effects {
        spec.rows
            .push(std::mem::replace(&mut spec.across, LOG.to_owned()));
        spec.base.clone_from(&names[0]);
        spec.paired = false;
    }
    for table in &mut design.tables {
        // If lines have all factors, the logs become lines below each other.
        let to = if table.across.is_empty() {
            &mut table.rows
        } else {
            &mut table.across
        };
        to.push(LOG.to_owned());
    }
    design
        .charts
        .iter_mut()
        .for_each(|chart| chart.across.push(LOG.to_owned()));
    let machines = sides().map(|((_, manifest, _), name)| {
        let machine = manifest.machine.describe();
        (name.clone(), format!("{machine}; seed {}", manifest.seed))
    });
    design.name = format!("{}-compared", design.name);
    design.method = machines.collect();
    // Only the facts of the hosts that differ.
    let facts =
        [one.1, other.1].map(|manifest| render::method(&Design::default(), &manifest.hosts));
    for (name, own, others) in [
        (&names[0], &facts[0], &facts[1]),
        (&names[1], &facts[1], &facts[0]),
    ] {
        let differs = own.iter().filter(|fact| !others.contains(fact));
        let named = differs.map(|(fact, is)| (format!("{name}: {fact}"), is.clone()));
        design.method.extend(named);
    }
    // Both logs have the same agreements, so the comparison omits them.
    design.agreements.clear();
    design.references.clear();
    // The coarser of both jiffies is the tolerance.
    let coarser = if one.1.machine.hz < other.1.machine.hz {
        one.1
    } else {
        other.1
    };
    let manifest = Manifest {
        machine: coarser.machine.clone(),
        seed: one.1.seed,
        plan: one.1.plan,
        design,
        hosts: Vec::new(),
    };
    Ok(Report {
        machine: one.1.machine.clone(),
        ..render::report(&manifest, &both)
    })
}

#[cfg(test)]
mod tests {
    use crate::chart::Chart;

    use super::*;
    use crate::engine::{
        self,
        render::tests::{manifest, records},
    };

    #[test]
    fn two_logs_are_compared() {
        let (manifest, slow, fast) = (manifest(), records(40.0), records(16.0));
        let report = compare(("a", &manifest, &slow), ("b", &manifest, &fast)).unwrap();
        let effects = &report.effects[1];
        assert_eq!(effects.columns[..3], ["lost, ms", "timers", "log"]);
        let verdict = |timers: &str| {
            let of = effects.rows.iter().filter(|row| row[1] == timers);
            of.map(|row| row.last().unwrap().as_str())
                .collect::<Vec<_>>()
        };
        assert_eq!(
            (verdict("kernel"), verdict("agent")),
            (vec!["no different"; 2], vec!["better"; 2])
        );
        // Each curve appears twice in one chart.
        let series = |charts: &[Chart]| charts.iter().map(|one| one.series.len()).sum::<usize>();
        let own = engine::report(&manifest, &slow);
        assert_eq!(report.charts.len(), own.charts.len());
        assert_eq!(series(&report.charts), 2 * series(&own.charts));
        let mut other = manifest.clone();
        other.design.name = "other".to_owned();
        assert!(compare(("a", &manifest, &slow), ("b", &other, &fast)).is_err());
    }
}
