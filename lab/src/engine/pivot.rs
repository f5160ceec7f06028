//! Effects in a small table: a line for each row, a column for each level.

use super::{
    Design, EffectSpec,
    effects::{Effect, Verdict},
};
use crate::report::Table;

/// The differences with their intervals; `=` for no difference, `?` for inconclusive.
pub(super) fn table(design: &Design, spec: &EffectSpec, effects: &[Effect]) -> Table {
    let mut levels: Vec<&str> = Vec::new();
    let mut rows: Vec<&[String]> = Vec::new();
    for effect in effects {
        if !levels.contains(&&*effect.level) {
            levels.push(&effect.level);
        }
        if !rows.contains(&&*effect.rows) {
            rows.push(&effect.rows);
        }
    }
    let unit = design.units.get(&spec.measure).map_or("", String::as_str);
    let title = format!(
        "{} ({}) less {}'s, {unit}, with its 95 % interval; = no different, ? inconclusive",
        spec.measure, spec.stat, spec.base
    );
    let mut columns = design.all_titled(&spec.rows);
    columns.push(spec.base.clone());
    columns.extend(levels.iter().map(|&level| level.to_owned()));
    let mut table = Table::with_columns("differences", &title, columns);
    for row in rows {
        let of_row = || effects.iter().filter(|effect| *effect.rows == *row);
        let mut cells = row.to_vec();
        let number = |value: f64| design.number(&spec.measure, value);
        cells.push(
            of_row()
                .next()
                .map_or_else(String::new, |one| number(one.base)),
        );
        for level in &levels {
            let effect = of_row().find(|effect| effect.level == *level);
            cells.push(effect.map_or_else(String::new, |effect| cell(effect, number)));
        }
        table.row(cells);
    }
    table
}

fn cell(effect: &Effect, number: impl Fn(f64) -> String) -> String {
    let interval = effect.interval.map_or_else(String::new, |(low, high)| {
        format!(" [{}, {}]", number(low), number(high))
    });
    match effect.verdict {
        Verdict::Same => "=".to_owned(),
        Verdict::Better | Verdict::Worse => format!("{}{interval}", number(effect.difference())),
        Verdict::Inconclusive => format!("?{interval}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{Record, Stat, log, report};

    #[test]
    fn a_line_for_each_row_and_a_column_for_each_level() {
        let record = |timers: &str, lost: &str, run: u32, ms: f64| {
            Record::new([("timers", timers), ("lost", lost)], run).with("time", ms)
        };
        let mut records = Vec::new();
        for run in 0..20 {
            let noise = f64::from(run % 5) / 10.0;
            for (timers, syn) in [("kernel", 1030.0), ("short", 110.0)] {
                records.push(record(timers, "nothing", run, 3.0 + noise));
                records.push(record(timers, "SYN", run, syn + noise));
                records.push(record(timers, "some", run, f64::from(run * 20)));
            }
        }
        let design = Design {
            units: [("time".to_owned(), "ms".to_owned())].into(),
            effects: vec![EffectSpec {
                measure: "time".to_owned(),
                stat: Stat::Mean,
                across: "timers".to_owned(),
                base: "kernel".to_owned(),
                rows: vec!["lost".to_owned()],
                ..EffectSpec::default()
            }],
            pivot: true,
            ..Design::default()
        };
        let manifest = log::tests::manifest_of(design);
        let report = report(&manifest, &records);
        let table = report
            .effects
            .iter()
            .find(|table| table.name == "differences")
            .unwrap();
        assert_eq!(table.columns, ["lost", "kernel", "short"]);
        let cell = |lost: &str| {
            let row = table.rows.iter().find(|row| row[0] == lost).unwrap();
            row[2].clone()
        };
        assert_eq!(cell("nothing"), "=");
        assert!(cell("SYN").starts_with("-920 [-920"), "{}", cell("SYN"));
        assert!(cell("some").starts_with("? ["), "{}", cell("some"));
    }
}
