//! Timers that are learnt or guarded, a row each, and below them what is known of the selected policy.

use std::time::Duration;

use ratatui::{
    Frame,
    layout::{Constraint, Layout, Rect},
    style::{Color, Modifier, Style, Stylize as _},
    text::{Line, Text},
    widgets::{Cell, Paragraph, Row as TableRow, Table, TableState, Wrap},
};
use rto_model::tune::experiment::{GAIN, HARM, MISMATCH};

use super::{
    history::{float, share},
    state::State,
    table::{number, percent, shortened},
    tuning::Shown,
};
use crate::{
    commands::tune::kind_text,
    policy::units::format_duration,
    wire::{
        experiments::{ArmsView, ExperimentView, State as ExperimentState},
        stats::{DirectionStats, PolicyStats},
        tune::{TimerKind, TunedTimer},
    },
};

/// What the columns mean.
pub(super) const HELP: &str = "\
up, down, k, j   select a policy
u, Esc           back
t                count arms since the policy or since top began
p                hold the picture
q, Ctrl-C        quit

TIMER    initial_rto of active and passive connections; rto_min
VALUE    the value in force; kernel: its own
ASKED    what the samples ask for
STATE    learning, lowering, steady; red: the kernel's own is in force
HOLD     time until it may be lowered again
BUDGET   what is left for retransmissions; new connections are
         braked from half on
FUSE     what is left for spurious ones
SPUR%    spurious, of connections since the value was set
HARM, e  proven from 400 on";

/// Lines of the selected policy that there is room for before the table takes more than a third.
const BELOW: u16 = 14;
/// Width of the name, at least.
const NAME: u16 = 12;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Column {
    Timer,
    Value,
    Asked,
    State,
    Hold,
    Budget,
    Fuse,
    Samples,
    Spurious,
    Kind,
    Experiment,
}

impl Column {
    /// From left to right.
    const ALL: [Self; 11] = [
        Self::Timer,
        Self::Value,
        Self::Asked,
        Self::State,
        Self::Hold,
        Self::Budget,
        Self::Fuse,
        Self::Samples,
        Self::Spurious,
        Self::Kind,
        Self::Experiment,
    ];
    /// The most important first.
    const IMPORTANCE: [Self; 11] = [
        Self::Timer,
        Self::Value,
        Self::State,
        Self::Asked,
        Self::Spurious,
        Self::Fuse,
        Self::Budget,
        Self::Hold,
        Self::Samples,
        Self::Experiment,
        Self::Kind,
    ];

    const fn title(self) -> &'static str {
        match self {
            Self::Timer => "TIMER",
            Self::Value => "VALUE",
            Self::Asked => "ASKED",
            Self::State => "STATE",
            Self::Hold => "HOLD",
            Self::Budget => "BUDGET",
            Self::Fuse => "FUSE",
            Self::Samples => "SAMPLES",
            Self::Spurious => "SPUR%",
            Self::Kind => "KIND",
            Self::Experiment => "EXPERIMENT",
        }
    }

    const fn width(self) -> u16 {
        match self {
            Self::Timer | Self::Value | Self::Asked | Self::Samples | Self::Kind => 7,
            Self::State => 9,
            Self::Hold | Self::Fuse => 5,
            Self::Budget | Self::Spurious => 6,
            Self::Experiment => 12,
        }
    }

    /// Words on the left, numbers on the right.
    const fn is_number(self) -> bool {
        !matches!(
            self,
            Self::Timer | Self::State | Self::Kind | Self::Experiment
        )
    }

    /// Those that fit beside the name.
    fn for_width(width: u16) -> Vec<Self> {
        let mut left = width.saturating_sub(NAME);
        let mut fits = Vec::new();
        for column in Self::IMPORTANCE {
            let Some(rest) = left.checked_sub(1 + column.width()) else {
                break;
            };
            left = rest;
            fits.push(column);
        }
        let all = Self::ALL.into_iter();
        all.filter(|column| fits.contains(column)).collect()
    }
}

/// Draws the page.
pub(super) fn draw(frame: &mut Frame<'_>, area: Rect, state: &State) {
    let shown = state.shown();
    if shown.is_empty() {
        let text = Paragraph::new(nothing(state)).wrap(Wrap { trim: true });
        frame.render_widget(text, area);
        return;
    }
    let selected = state.selected_on_page();
    let rows = shown.iter().map(|shown| timers(shown).len().max(1));
    let rows = u16::try_from(1 + rows.sum::<usize>()).unwrap_or(u16::MAX);
    let most = area.height.saturating_sub(BELOW).max(area.height / 3);
    let [top, below] =
        Layout::vertical([Constraint::Length(rows.min(most)), Constraint::Fill(1)]).areas(area);
    draw_table(frame, top, &shown, selected);
    if let Some(shown) = shown.get(selected) {
        let lines = details(state, shown);
        let text = Paragraph::new(lines).wrap(Wrap { trim: false });
        frame.render_widget(text, below);
    }
}

/// Why there is nothing.
fn nothing(state: &State) -> String {
    let Some(answers) = &state.page.answers else {
        return "asking the daemon".to_owned();
    };
    if answers.tune.is_none() && answers.experiments.is_none() {
        return "this daemon is older than rto-agent top: it has neither automatic nor guarded timers, nor experiments"
            .to_owned();
    }
    if !state.filter.is_empty() {
        return format!("no policy's name has {:?} in it", state.filter);
    }
    "no policy has an automatic or guarded timer, a control arm or an experiment".to_owned()
}

fn timers<'a>(shown: &Shown<'a>) -> &'a [TunedTimer] {
    shown.tuned.map_or(&[], |tuned| &tuned.timers)
}

fn draw_table(frame: &mut Frame<'_>, area: Rect, all: &[Shown<'_>], selected: usize) {
    let columns = Column::for_width(area.width);
    let widths = columns.iter().map(|column| column.width() + 1);
    let name = area.width.saturating_sub(widths.sum());
    let cells = |name: String, cell: &dyn Fn(Column) -> (String, Style)| {
        let cell = |column: &Column| {
            let (text, style) = cell(*column);
            let text = Text::from(text);
            let text = match column.is_number() {
                true => text.right_aligned(),
                false => text,
            };
            Cell::new(text).style(style)
        };
        let name = std::iter::once(Cell::new(name));
        name.chain(columns.iter().map(cell)).collect::<Vec<_>>()
    };
    let header = cells("POLICY".to_owned(), &|column| {
        (column.title().to_owned(), Style::new())
    });
    let header = TableRow::new(header).style(Modifier::BOLD);
    let mut rows = Vec::new();
    let mut first = 0;
    for (index, shown) in all.iter().enumerate() {
        if index == selected {
            first = rows.len();
        }
        let style = match index == selected {
            true => Style::new().add_modifier(Modifier::REVERSED),
            false => Style::new(),
        };
        let text = shortened(shown.name.as_str(), name.into());
        let timers = timers(shown).iter().map(Some);
        let none = timers.len() == 0;
        for timer in timers.chain(none.then_some(None)) {
            let row = cells(text.clone(), &|column| cell(shown, timer, column));
            rows.push(TableRow::new(row).style(style));
        }
    }
    let widths = columns.iter().map(|column| column.width());
    let widths = std::iter::once(name).chain(widths);
    let table = Table::new(rows, widths.map(Constraint::Length)).header(header);
    let mut scrolled = TableState::new().with_selected(Some(first));
    frame.render_stateful_widget(table, area, &mut scrolled);
}

fn cell(shown: &Shown<'_>, timer: Option<&TunedTimer>, column: Column) -> (String, Style) {
    let (bad, warning) = (Style::new().fg(Color::Red), Style::new().fg(Color::Yellow));
    if column == Column::Experiment {
        let state = shown.experiment.map(|experiment| experiment.state);
        let style = state.map_or_else(Style::new, experiment_style);
        let name = state.map_or_else(String::new, |state| state.name().to_owned());
        return (name, style);
    }
    let Some(timer) = timer else {
        return (String::new(), Style::new());
    };
    let brakes = timer.brakes.as_ref();
    let evidence = &timer.evidence;
    let plain = |text: String| (text, Style::new());
    match column {
        Column::Timer if timer.direction == "both" => plain(timer.setting.clone()),
        Column::Timer => plain(timer.direction.clone()),
        Column::Value => plain(in_force(timer).map_or_else(|| "kernel".to_owned(), short)),
        Column::Asked => plain(evidence.want_us.map_or_else(dash, short)),
        Column::State => {
            let style = match timer.phase.as_str() {
                "suspended" | "frozen" => bad,
                "backoff" | "throttled" => warning,
                _ => Style::new(),
            };
            (timer.phase.clone(), style)
        }
        Column::Hold => {
            let hold = timer.next.in_s.filter(|_| timer.next.kind == "hold-ends");
            plain(hold.map_or_else(dash, short_s))
        }
        Column::Budget => {
            let style = match brakes.is_some_and(|brakes| brakes.throttled) {
                true => warning,
                false => Style::new(),
            };
            let left = brakes.map(|brakes| whole_percent(brakes.budget_left));
            (left.unwrap_or_else(dash), style)
        }
        Column::Fuse if brakes.is_some_and(|brakes| brakes.blown) => ("BLOWN".to_owned(), bad),
        Column::Fuse => {
            let left = brakes.map(|brakes| whole_percent(1.0 - brakes.fuse_spent));
            plain(left.unwrap_or_else(dash))
        }
        Column::Samples => plain(number(float(evidence.samples))),
        Column::Spurious => {
            let judged = evidence.clean.saturating_add(evidence.spurious);
            let share = share(evidence.spurious, judged).filter(|_| timer.direction != "both");
            plain(share.map_or_else(dash, percent))
        }
        Column::Kind => plain(timer.kind.name().to_owned()),
        Column::Experiment => plain(String::new()),
    }
}

/// The value that connections get, microseconds.
fn in_force(timer: &TunedTimer) -> Option<u64> {
    match timer.kind {
        TimerKind::Auto | TimerKind::Guarded => timer.value_us,
        TimerKind::Watched => timer.configured_us,
        TimerKind::Advice => None,
    }
}

fn dash() -> String {
    "-".to_owned()
}

fn short(us: u64) -> String {
    format_duration(Duration::from_micros(us))
}

/// "40s", "9m", "3h".
fn short_s(s: u64) -> String {
    match s {
        s if s < 120 => format!("{s}s"),
        s if s < 7200 => format!("{}m", s / 60),
        s => format!("{}h", s / 3600),
    }
}

fn whole_percent(share: f64) -> String {
    format!("{:.0}%", share * 100.0)
}

fn experiment_style(state: ExperimentState) -> Style {
    match state {
        ExperimentState::Harm | ExperimentState::Invalid => Style::new().fg(Color::Red),
        ExperimentState::GainProven | ExperimentState::Promoted => Style::new().fg(Color::Green),
        ExperimentState::Inconclusive | ExperimentState::Stopped => Style::new().fg(Color::Yellow),
        ExperimentState::Settling | ExperimentState::Running => Style::new(),
    }
}

/// The selected policy: what comes next, what happened last, its arms, its experiment.
fn details(state: &State, shown: &Shown<'_>) -> Vec<Line<'static>> {
    let mut lines = vec![Line::from(shown.name.to_string()).bold()];
    for timer in timers(shown) {
        lines.push(next_line(timer));
    }
    let tune = state
        .page
        .answers
        .as_ref()
        .and_then(|all| all.tune.as_ref());
    if let (Some(tune), Some(last)) = (tune, shown.tuned.and_then(|t| t.transitions.last())) {
        let ago_s = tune.at_ms.saturating_sub(last.at_ms) / 1000;
        lines.push(Line::from(format!("{} ago: {last}", short_s(ago_s))));
    }
    let notes = shown.tuned.into_iter().flat_map(|tuned| &tuned.notes);
    lines.extend(notes.map(|note| Line::from(format!("note: {note}"))));
    if let Some(problem) = tune.and_then(|tune| tune.not_stored.as_ref()) {
        lines.push(Line::from(format!("warning: {problem}")).yellow());
    }
    if let Some(experiment) = shown.experiment {
        lines.extend(experiment_lines(experiment));
    } else if let Some(stats) = state.stats_of(shown.name) {
        lines.extend(arms_lines(&stats));
    }
    lines
}

fn next_line(timer: &TunedTimer) -> Line<'static> {
    let canary = match timer.percent {
        100 => String::new(),
        percent => format!(" for {percent}% of connections"),
    };
    let of = format!("{} {}", timer.setting, timer.direction);
    let rest = format!(
        " ({}): {}{canary}; next: {}",
        kind_text(timer),
        timer.value(),
        timer.next.describe()
    );
    Line::from(vec![of.cyan(), rest.into()])
}

fn experiment_lines(experiment: &ExperimentView) -> Vec<Line<'static>> {
    let style = experiment_style(experiment.state);
    let mut lines = vec![Line::from(format!("experiment: {}", experiment.text)).style(style)];
    lines.push(arm_line("", "TREATED", "CONTROL", "HARM, e").bold());
    let ArmsView { treated, control } = experiment.attempts;
    let count = |count: u64| number(float(count));
    lines.push(arm_line("attempts", &count(treated), &count(control), ""));
    for outcome in &experiment.outcomes {
        let of = |count: u64, rate: Option<f64>| with_share(count, rate);
        lines.push(arm_line(
            &outcome.outcome,
            &of(outcome.count.treated, outcome.rate.treated),
            &of(outcome.count.control, outcome.rate.control),
            &outcome.harm_e.map_or_else(dash, e_value),
        ));
    }
    if let (Some(gain), Some(mismatch)) = (experiment.gain_e, experiment.mismatch_e) {
        let ratio = experiment.ratio.map(|ratio| {
            format!(
                "; ratio beyond 500 ms {} ({} to {})",
                ratio.likeliest.map_or_else(dash, e_value),
                e_value(ratio.low),
                ratio.high.map_or_else(|| "any".to_owned(), e_value)
            )
        });
        lines.push(Line::from(format!(
            "e: gain {} of {GAIN}, mismatch {} of {MISMATCH}, harm of {HARM}{}",
            e_value(gain),
            e_value(mismatch),
            ratio.unwrap_or_default()
        )));
    }
    let waits = experiment.waits_for.iter();
    lines.extend(waits.map(|wait| Line::from(format!("waits for {wait}"))));
    lines
}

/// Nothing of a policy without a control arm.
fn arms_lines(stats: &PolicyStats) -> Vec<Line<'static>> {
    let Some((control, title)) = stats.control.as_ref().zip(stats.control_title()) else {
        return Vec::new();
    };
    let (treated, control) = (stats.treated.total(), control.total());
    let mut lines = vec![arm_line("", "TREATED", &title.to_uppercase(), "").bold()];
    let connections = |stats: &DirectionStats| number(float(stats.connections));
    let row = |name: &str, of: &dyn Fn(&DirectionStats) -> String| {
        arm_line(name, &of(&treated), &of(&control), "")
    };
    lines.push(row("connections", &connections));
    lines.push(row("failed", &|stats| {
        // They are not among those established.
        let attempts = stats.connections.saturating_add(stats.failed);
        with_share(stats.failed, share(stats.failed, attempts))
    }));
    let of_connections = |name: &str, counter: fn(&DirectionStats) -> u64| {
        row(name, &|stats| {
            let count = counter(stats);
            with_share(count, share(count, stats.connections))
        })
    };
    lines.extend([
        of_connections("beyond-500-ms", |stats| stats.slow_handshakes),
        of_connections("spurious", |stats| stats.spurious_connections),
        of_connections("dsack", |stats| stats.dsack_connections),
        of_connections("aborted", |stats| stats.aborted_after_loss),
    ]);
    lines
}

fn arm_line(name: &str, treated: &str, control: &str, harm: &str) -> Line<'static> {
    let line = format!("{name:14}{treated:>18}{control:>18}{harm:>12}");
    Line::from(line.trim_end().to_owned())
}

fn with_share(count: u64, rate: Option<f64>) -> String {
    let count = number(float(count));
    match rate {
        Some(rate) => format!("{count} ({})", percent(rate)),
        None => count,
    }
}

/// In three digits where they are seen.
fn e_value(value: f64) -> String {
    match value {
        v if v >= 1e6 => ">1M".to_owned(),
        v => number(v),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_important_columns_go_first() {
        let all = |width| Column::for_width(width);
        assert_eq!(all(0), []);
        assert_eq!(all(20), [Column::Timer]);
        let of_80 = all(80);
        assert!(!of_80.contains(&Column::Experiment) && of_80.contains(&Column::Samples));
        assert_eq!(all(101).len(), Column::ALL.len());
    }

    #[test]
    fn numbers_are_short() {
        for (s, text) in [(0, "0s"), (119, "119s"), (600, "10m"), (7200, "2h")] {
            assert_eq!(short_s(s), text);
        }
        assert_eq!(
            (e_value(1e300), e_value(0.5)),
            (">1M".to_owned(), "0.50".to_owned())
        );
        assert_eq!(with_share(3, Some(0.003)), "3 (0.30%)");
        assert_eq!(with_share(0, None), "0");
    }

    #[test]
    fn what_is_advised_is_not_in_force() {
        let mut timer = super::super::samples::timer("active", "steady");
        assert_eq!(in_force(&timer), timer.value_us);
        timer.kind = TimerKind::Advice;
        assert_eq!(in_force(&timer), None);
        timer.kind = TimerKind::Watched;
        timer.configured_us = Some(8_000);
        assert_eq!(in_force(&timer), Some(8_000));
    }
}
