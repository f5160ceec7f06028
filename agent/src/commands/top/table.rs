//! The table of policies: chooses the columns that fit, and fills them.

use std::iter;

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

/// The columns beside the name, from left to right; `None` is the sparkline.
const COLUMNS: [Spec<Option<Column>>; 12] = [
    column(Column::ConnectionRate, 6, 0),
    column(Column::Retransmissions, 6, 1),
    column(Column::Spurious, 6, 2),
    column(Column::Bad, 6, 3),
    column(Column::ConnectP50, 6, 6),
    column(Column::ConnectP99, 6, 4),
    column(Column::ConnectP999, 6, 5),
    column(Column::SrttP50, 7, 10),
    column(Column::SrttP99, 7, 7),
    column(Column::AbortedRate, 6, 9),
    column(Column::Connections, 6, 11),
    Spec::text(None, "HISTORY", PAST, 8),
];

const fn column(column: Column, width: u16, rank: usize) -> Spec<Option<Column>> {
    Spec::number(Some(column), column.title(), width, rank)
}

/// A column of a table that may be too narrow for all.
pub(super) struct Spec<C> {
    pub(super) column: C,
    pub(super) title: &'static str,
    pub(super) width: u16,
    /// The lower, the more important.
    rank: usize,
    is_number: bool,
}

impl<C> Spec<C> {
    pub(super) const fn text(column: C, title: &'static str, width: u16, rank: usize) -> Self
    where
        C: Copy,
    {
        Self {
            column,
            title,
            width,
            rank,
            is_number: false,
        }
    }

    pub(super) const fn number(column: C, title: &'static str, width: u16, rank: usize) -> Self
    where
        C: Copy,
    {
        Self {
            is_number: true,
            ..Self::text(column, title, width, rank)
        }
    }

    /// Text is left-aligned, numbers are right-aligned.
    pub(super) fn cell<'a>(&self, (text, style): (String, Style)) -> Cell<'a> {
        let text = Text::from(text);
        let text = match self.is_number {
            true => text.right_aligned(),
            false => text,
        };
        Cell::new(text).style(style)
    }
}

/// The most important columns that fit, each after a space, in their order; and the rest of the width.
pub(super) fn fitting<C>(all: &'static [Spec<C>], width: u16) -> (Vec<&'static Spec<C>>, u16) {
    let mut ranked: Vec<_> = all.iter().collect();
    ranked.sort_by_key(|spec| spec.rank);
    let (mut left, mut count) = (width, 0);
    for spec in ranked {
        let Some(rest) = left.checked_sub(1 + spec.width) else {
            break;
        };
        (left, count) = (rest, count + 1);
    }
    (all.iter().filter(|spec| spec.rank < count).collect(), left)
}

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
    let header = columns.cells(|column| {
        let title = column.map_or("HISTORY", Column::title);
        let style = match column {
            Some(column) if column == state.sort => Modifier::BOLD | Modifier::UNDERLINED,
            Some(_) => Modifier::BOLD,
            None => Modifier::empty(),
        };
        (title.to_owned(), Style::new().add_modifier(style))
    });
    let body = rows.iter().map(|row| {
        TableRow::new(columns.cells(|column| match column {
            Some(column) => cell(row, column, columns.name),
            None => {
                let past = bars::sparkline(row.past(), columns.past.into());
                (past, Style::new())
            }
        }))
    });
    let table = Table::new(body, columns.widths().map(Constraint::Length))
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
    shown: Vec<&'static Spec<Option<Column>>>,
    name: u16,
    /// Width of the sparkline.
    past: u16,
}

impl Columns {
    fn for_width(width: u16, longest: usize) -> Self {
        let longest = u16::try_from(longest).unwrap_or(u16::MAX).max(6);
        let (shown, left) = fitting(&COLUMNS, width.saturating_sub(longest.min(NAME)));
        let grown = longest.saturating_sub(NAME).min(left);
        Self {
            shown,
            name: (longest.min(NAME) + grown).min(width),
            past: (PAST + left - grown).min(u16::try_from(SAMPLES).unwrap_or(PAST)),
        }
    }

    fn widths(&self) -> impl Iterator<Item = u16> {
        let of = |spec: &&Spec<Option<Column>>| spec.column.map_or(self.past, |_| spec.width);
        iter::once(self.name).chain(self.shown.iter().map(of))
    }

    fn cells<'a>(&self, text: impl Fn(Option<Column>) -> (String, Style)) -> Vec<Cell<'a>> {
        let (name, style) = text(Some(Column::Policy));
        let cells = self.shown.iter().map(|spec| spec.cell(text(spec.column)));
        iter::once(Cell::new(name).style(style))
            .chain(cells)
            .collect()
    }
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
        assert_eq!(shown(120), COLUMNS.len());
        assert_eq!(shown(6), 0);
        for width in 1..100 {
            let columns = Columns::for_width(width, 40);
            let sum: u16 = columns.widths().map(|width| 1 + width).sum();
            assert!(sum - 1 <= width.max(NAME), "{width}");
        }
        let columns = Columns::for_width(78, 12);
        let is_last = |spec: &&Spec<_>| spec.column == Some(Column::Connections);
        assert!(!columns.shown.iter().any(is_last));
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
