//! The table of policies: chooses the columns that fit, and fills them.

use ratatui::{
    Frame,
    layout::{Constraint, Rect},
    style::{Color, Modifier, Style},
    text::{Line, Text},
    widgets::{Cell, Row as TableRow, Table, TableState},
};
use rto_agent_core::wire::stats::TOO_MANY_SPURIOUS;

use super::{
    bars,
    history::{Column, Row, SAMPLES},
    state::State,
};
use crate::commands::stats::short_us;

/// The least widths of the columns with names and with bars.
const NAME: u16 = 12;
const PAST: u16 = 8;

/// All columns but the name, the most important first; `None` is the sparkline.
const IMPORTANCE: [Option<Column>; 12] = [
    Some(Column::ConnectionRate),
    Some(Column::Retransmissions),
    Some(Column::Spurious),
    Some(Column::Bad),
    Some(Column::ConnectP99),
    Some(Column::ConnectP999),
    Some(Column::ConnectP50),
    Some(Column::SrttP99),
    None,
    Some(Column::AbortedRate),
    Some(Column::SrttP50),
    Some(Column::Connections),
];

pub(super) fn draw(frame: &mut Frame<'_>, area: Rect, state: &State) {
    let rows = state.rows();
    if rows.is_empty() {
        let text = if state.is_empty() {
            "no policy is active".to_owned()
        } else {
            format!("no policy's name contains {:?}", state.filter)
        };
        frame.render_widget(Line::from(text), area);
        return;
    }
    let longest = rows.iter().map(|r| r.name.as_str().len()).max();
    let columns = Columns::for_width(area.width, longest.unwrap_or(0));
    let header = columns.cells(
        |column| {
            let style = if column == state.sort {
                Modifier::BOLD | Modifier::UNDERLINED
            } else {
                Modifier::BOLD
            };
            (column.title().to_owned(), Style::new().add_modifier(style))
        },
        || "HISTORY".to_owned(),
    );
    let body = rows.iter().map(|row| {
        let past = || bars::sparkline(row.past(), columns.past.into());
        TableRow::new(columns.cells(|column| cell(row, column, columns.name), past))
    });
    let table = Table::new(body, columns.widths())
        .header(TableRow::new(header))
        .row_highlight_style(Modifier::REVERSED);
    let mut selected = TableState::new().with_selected(state.selected());
    frame.render_stateful_widget(table, area, &mut selected);
}

fn cell(row: &Row<'_>, column: Column, name_width: u16) -> (String, Style) {
    if column == Column::Policy {
        return (
            shortened(row.name.as_str(), name_width.into()),
            Style::new(),
        );
    }
    let Some(value) = row.value(column) else {
        return ("-".to_owned(), Style::new());
    };
    let text = match column {
        Column::Retransmissions | Column::Spurious | Column::Bad => percent(value),
        Column::ConnectP50
        | Column::ConnectP99
        | Column::ConnectP999
        | Column::SrttP50
        | Column::SrttP99 => short_us(value),
        Column::Policy | Column::ConnectionRate | Column::AbortedRate | Column::Connections => {
            number(value)
        }
    };
    let style = if column == Column::Spurious && value > TOO_MANY_SPURIOUS {
        Style::new().fg(Color::Red).add_modifier(Modifier::BOLD)
    } else {
        Style::new()
    };
    (text, style)
}

/// The columns that fit.
struct Columns {
    shown: Vec<Column>,
    name: u16,
    /// Width of the sparkline; 0 if it does not fit.
    past: u16,
}

impl Columns {
    fn for_width(width: u16, longest: usize) -> Self {
        let longest = u16::try_from(longest).unwrap_or(u16::MAX).max(6);
        let mut left = width.saturating_sub(longest.min(NAME));
        let mut fits = Vec::new();
        for column in IMPORTANCE {
            let Some(rest) = left.checked_sub(1 + column.map_or(PAST, width_of)) else {
                break;
            };
            left = rest;
            fits.push(column);
        }
        let grown = longest.saturating_sub(NAME).min(left);
        let past = if fits.contains(&None) {
            (PAST + left - grown).min(u16::try_from(SAMPLES).unwrap_or(PAST))
        } else {
            0
        };
        let shown = |column: &Column| *column == Column::Policy || fits.contains(&Some(*column));
        Self {
            shown: Column::ALL.into_iter().filter(shown).collect(),
            name: (longest.min(NAME) + grown).min(width),
            past,
        }
    }

    fn widths(&self) -> Vec<Constraint> {
        let width = |column: &Column| match column {
            Column::Policy => self.name,
            column => width_of(*column),
        };
        let past = (self.past > 0).then_some(self.past);
        let widths = self.shown.iter().map(width).chain(past);
        widths.map(Constraint::Length).collect()
    }

    fn cells<'a>(
        &self,
        text: impl Fn(Column) -> (String, Style),
        past: impl FnOnce() -> String,
    ) -> Vec<Cell<'a>> {
        let cell = |column: &Column| {
            let (text, style) = text(*column);
            let text = Text::from(text);
            let text = if *column == Column::Policy {
                text
            } else {
                text.right_aligned()
            };
            Cell::new(text).style(style)
        };
        let past = (self.past > 0).then(|| Cell::new(past()));
        self.shown.iter().map(cell).chain(past).collect()
    }
}

/// The width for the title and for the texts of [`number`], [`percent`] and [`short_us`].
fn width_of(column: Column) -> u16 {
    u16::try_from(column.title().len()).unwrap_or(6).max(6)
}

/// Truncates a name to a width, visibly.
pub(super) fn shortened(name: &str, width: usize) -> String {
    if name.chars().count() <= width {
        return name.to_owned();
    }
    let kept = name.chars().take(width.saturating_sub(1));
    kept.chain(['…']).collect()
}

/// A number in three digits: "1.25", "99.9", "100", "1.25k".
pub(super) fn number(value: f64) -> String {
    // Counts need no fraction, and zero reads best as "0".
    if value < 1e3 && value.fract() == 0.0 {
        return format!("{value:.0}");
    }
    let (value, unit) = match value {
        v if v < 1e3 => (v, ""),
        v if v < 1e6 => (v / 1e3, "k"),
        v if v < 1e9 => (v / 1e6, "M"),
        v => (v / 1e9, "G"),
    };
    match value {
        v if v < 10.0 => format!("{v:.2}{unit}"),
        v if v < 100.0 => format!("{v:.1}{unit}"),
        v => format!("{v:.0}{unit}"),
    }
}

/// A share in per cent: "0%", "0.12%", "100%", ">999%".
pub(super) fn percent(share: f64) -> String {
    match share * 100.0 {
        0.0 => "0%".to_owned(),
        v if v < 10.0 => format!("{v:.2}%"),
        v if v < 100.0 => format!("{v:.1}%"),
        v if v < 999.5 => format!("{v:.0}%"),
        _ => ">999%".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_important_columns_go_first() {
        let shown = |width| Columns::for_width(width, 8).shown.len();
        assert_eq!(shown(120), Column::ALL.len());
        assert_eq!(shown(6), 1);
        for width in 1..100 {
            let columns = Columns::for_width(width, 40);
            let sum: u16 = columns.shown[1..].iter().map(|c| 1 + width_of(*c)).sum();
            let past = if columns.past > 0 {
                1 + columns.past
            } else {
                0
            };
            assert!(columns.name + sum + past <= width.max(NAME), "{width}");
        }
        let without = |column| !Columns::for_width(78, 12).shown.contains(&column);
        assert!(without(Column::Connections));
    }

    #[test]
    fn numbers_have_three_digits() {
        for (value, text) in [
            (0.0, "0"),
            (7.0, "7"),
            (0.5, "0.50"),
            (99.94, "99.9"),
            (250.4, "250"),
            (1250.0, "1.25k"),
            (4.2e7, "42.0M"),
        ] {
            assert_eq!(number(value), text);
        }
        for (share, text) in [
            (0.0, "0%"),
            (0.0012, "0.12%"),
            (0.25, "25.0%"),
            (1.0, "100%"),
            (f64::INFINITY, ">999%"),
        ] {
            assert_eq!(percent(share), text);
        }
    }

    #[test]
    fn long_names_are_cut() {
        assert_eq!(shortened("database", 8), "database");
        assert_eq!(shortened("database", 5), "data…");
        assert_eq!(shortened("database", 0), "…");
    }
}
