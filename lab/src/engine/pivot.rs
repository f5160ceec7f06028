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
