//! The table of learnt and guarded timers, and below it the details of the selected policy.

use std::time::Duration;

use ratatui::{
    Frame,
    layout::{Constraint, Layout, Rect},
    style::{Color, Modifier, Style, Stylize as _},
    text::Line,
    widgets::{Cell, Paragraph, Row as TableRow, Table, TableState, Wrap},
};
use rto_agent_core::{
    policy::units::format_duration,
    wire::{
        experiments::{ExperimentView, State as ExperimentState},
        stats::{DirectionStats, PolicyStats},
        tune::{TimerKind, TunedTimer, next_text},
    },
};
use rto_model::tune::{
    experiment::{Arms, GAIN, HARM, MISMATCH, Outcome},
    tuner::{Next, State as TunerState, Value},
};

use super::{
    history::{float, share},
    state::State,
    table::{Spec, fitting, number, percent, shortened},
    tuning::Shown,
};
use crate::commands::{stats::short_us, tune::kind_text};

/// Explains the columns.
pub(super) const HELP: &str = "\
up, down, k, j   select a policy
u, Esc           back
t                count arms since the policy was added or since top started
p                pause the display
q, Ctrl-C        quit

TIMER    initial_rto of active and passive connections; rto_min
VALUE    the active value; kernel: the kernel's own
ASKED    the value that the samples suggest
STATE    learning, active; frozen, or braked by its fuse or budget: the
         kernel's own is active
HOLD     time until the value returns after a blown fuse
BUDGET   remaining budget for retransmissions; new connections
         are braked at half or less
FUSE     remaining budget for spurious ones
SPUR%    connections with a spurious one, since the value was set
HARM, e  proven at 400";

/// Lines reserved for the selected policy; the table may still use a third of the height.
const BELOW: u16 = 14;
/// The least width of the name.
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

/// The columns beside the name, from left to right.
const COLUMNS: [Spec<Column>; 11] = [
    Spec::text(Column::Timer, "TIMER", 7, 0),
    Spec::number(Column::Value, "VALUE", 7, 1),
    Spec::number(Column::Asked, "ASKED", 7, 3),
    Spec::text(Column::State, "STATE", 9, 2),
    Spec::number(Column::Hold, "HOLD", 5, 7),
    Spec::number(Column::Budget, "BUDGET", 6, 6),
    Spec::number(Column::Fuse, "FUSE", 5, 5),
    Spec::number(Column::Samples, "SAMPLES", 7, 8),
    Spec::number(Column::Spurious, "SPUR%", 6, 4),
    Spec::text(Column::Kind, "KIND", 7, 10),
    Spec::text(Column::Experiment, "EXPERIMENT", 12, 9),
];

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
    draw_table(frame, top, &shown, selected, now_ms(state));
    if let Some(shown) = shown.get(selected) {
        let lines = details(state, shown);
        let text = Paragraph::new(lines).wrap(Wrap { trim: false });
        frame.render_widget(text, below);
    }
}

/// Why the page is empty.
fn nothing(state: &State) -> String {
    if state.page.answers.is_none() {
        return "waiting for the daemon".to_owned();
    }
    if !state.filter.is_empty() {
        return format!("no policy's name contains {:?}", state.filter);
    }
    "no policy has a learnt or guarded timer, a control arm or an experiment".to_owned()
}

/// The daemon's time of the answer.
fn now_ms(state: &State) -> u64 {
    let answers = state.page.answers.as_ref();
    answers.map_or(0, |answers| answers.tune.at_ms)
}

fn timers<'a>(shown: &Shown<'a>) -> &'a [TunedTimer] {
    shown.tuned.map_or(&[], |tuned| &tuned.timers)
}

fn draw_table(frame: &mut Frame<'_>, area: Rect, all: &[Shown<'_>], selected: usize, now_ms: u64) {
    let columns = fitting(&COLUMNS, area.width.saturating_sub(NAME)).0;
    let widths = columns.iter().map(|spec| spec.width + 1);
    let name = area.width.saturating_sub(widths.sum());
    let cells = |name: String, cell: &dyn Fn(&Spec<Column>) -> (String, Style)| {
        let name = std::iter::once(Cell::new(name));
        let cells = columns.iter().map(|spec| spec.cell(cell(spec)));
        name.chain(cells).collect::<Vec<_>>()
    };
    let header = cells("POLICY".to_owned(), &|spec| {
        (spec.title.to_owned(), Style::new())
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
            let row = cells(text.clone(), &|spec| {
                cell(shown, timer, spec.column, now_ms)
            });
            rows.push(TableRow::new(row).style(style));
        }
    }
    let widths = columns.iter().map(|spec| spec.width);
    let widths = std::iter::once(name).chain(widths);
    let table = Table::new(rows, widths.map(Constraint::Length)).header(header);
    let mut scrolled = TableState::new().with_selected(Some(first));
    frame.render_stateful_widget(table, area, &mut scrolled);
}

fn cell(
    shown: &Shown<'_>,
    timer: Option<&TunedTimer>,
    column: Column,
    now_ms: u64,
) -> (String, Style) {
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
            let style = match timer.state {
                TunerState::Frozen => bad,
                TunerState::BrakedFuse | TunerState::BrakedBudget => warning,
                TunerState::Learning | TunerState::Active => Style::new(),
            };
            // The colour shows the rest of the name.
            let name = timer.state.name();
            (name.trim_start_matches("braked-").to_owned(), style)
        }
        Column::Hold => {
            let hold = match timer.next {
                Next::HoldEnds { at_ms } => Some(at_ms.saturating_sub(now_ms) / 1000),
                _ => None,
            };
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
            let counts = evidence.counts;
            let share = share(counts.spurious, counts.connections);
            let share = share.filter(|_| timer.direction != "both");
            plain(share.map_or_else(dash, percent))
        }
        Column::Kind => plain(timer.kind.name().to_owned()),
        Column::Experiment => plain(String::new()),
    }
}

/// The active value, microseconds.
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
        ExperimentState::Running => Style::new(),
    }
}

/// Details of the selected policy: what comes next, what happened last, its arms, its experiment.
fn details(state: &State, shown: &Shown<'_>) -> Vec<Line<'static>> {
    let mut lines = vec![Line::from(shown.name.to_string()).bold()];
    for timer in timers(shown) {
        lines.push(next_line(timer, now_ms(state)));
    }
    if let Some(last) = shown.tuned.and_then(|t| t.transitions.last()) {
        let ago_s = now_ms(state).saturating_sub(last.transition.at_ms) / 1000;
        lines.push(Line::from(format!("{} ago: {last}", short_s(ago_s))));
    }
    let notes = shown.tuned.into_iter().flat_map(|tuned| &tuned.notes);
    lines.extend(notes.map(|note| Line::from(format!("note: {note}"))));
    let answers = state.page.answers.as_ref();
    if let Some(problem) = answers.and_then(|answers| answers.tune.not_stored.as_ref()) {
        lines.push(Line::from(format!("warning: {problem}")).yellow());
    }
    if let Some(experiment) = shown.experiment {
        lines.extend(experiment_lines(experiment));
    } else if let Some(stats) = state.stats_of(shown.name) {
        lines.extend(arms_lines(&stats));
    }
    lines
}

fn next_line(timer: &TunedTimer, now_ms: u64) -> Line<'static> {
    let of = format!("{} {}", timer.setting, timer.direction);
    let rest = format!(
        " ({}): {}; next: {}",
        kind_text(timer),
        Value(timer.value_us),
        next_text(timer.next, now_ms)
    );
    Line::from(vec![of.cyan(), rest.into()])
}

fn experiment_lines(experiment: &ExperimentView) -> Vec<Line<'static>> {
    let style = experiment_style(experiment.state);
    let mut lines = vec![
        Line::from(format!("experiment: {}", experiment.text)).style(style),
        Line::from(experiment.answer.clone()),
    ];
    let evidence = experiment.evidence.as_ref();
    lines.push(arm_line("", "TREATED", "CONTROL", "HARM, e").bold());
    let attempts = experiment
        .counts
        .map(|counts| number(float(counts.attempts)));
    lines.push(arm_line(
        "attempts",
        &attempts.treated,
        &attempts.control,
        "",
    ));
    for outcome in Outcome::ALL {
        let Arms { treated, control } = experiment.counts.map(|counts| {
            let count = counts.of(outcome);
            with_share(count, share(count, counts.all(outcome)))
        });
        let e = evidence.and_then(|evidence| evidence.harm_e.get(&outcome));
        let e = e.map_or_else(dash, |e| e_value(*e));
        lines.push(arm_line(outcome.name(), &treated, &control, &e));
    }
    if let Some(evidence) = evidence {
        lines.push(Line::from(format!(
            "e: gain {} of {GAIN}, mismatch {} of {MISMATCH}, harm of {HARM}",
            e_value(evidence.gain_e),
            e_value(evidence.mismatch_e)
        )));
    }
    let next = experiment.next.iter();
    lines.extend(next.map(|next| Line::from(format!("next: {next}"))));
    lines
}

/// Empty for a policy without a control arm.
fn arms_lines(stats: &PolicyStats) -> Vec<Line<'static>> {
    let Some((control, title)) = stats.control.as_ref().zip(stats.control_title()) else {
        return Vec::new();
    };
    let (treated, control) = (&stats.treated.active, &control.active);
    let mut lines = vec![arm_line("", "TREATED", &title.to_uppercase(), "").bold()];
    let row = |name: &str, of: &dyn Fn(&DirectionStats) -> String| {
        arm_line(name, &of(treated), &of(control), "")
    };
    let of_connections = |name: &str, counter: fn(&DirectionStats) -> u64| {
        row(name, &|stats| {
            let count = counter(stats);
            with_share(count, share(count, stats.connections))
        })
    };
    let connect_time = |name: &str, part: f64| {
        row(name, &|stats| {
            let us = stats.connect_time.quantile_us(part);
            us.map_or_else(|| "-".to_owned(), short_us)
        })
    };
    lines.extend([
        row("attempts", &|stats| number(float(stats.attempts))),
        row("beyond 500 ms", &|stats| {
            let bad = stats.bad("active");
            with_share(bad, share(bad, stats.attempts))
        }),
        connect_time("p50", 0.5),
        connect_time("p99", 0.99),
        connect_time("p99.9", 0.999),
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

/// With three digits.
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
        let all = |width: u16| {
            let (fit, _) = fitting(&COLUMNS, width.saturating_sub(NAME));
            fit.iter().map(|spec| spec.column).collect::<Vec<_>>()
        };
        assert_eq!(all(0), []);
        assert_eq!(all(20), [Column::Timer]);
        let of_80 = all(80);
        assert!(!of_80.contains(&Column::Experiment) && of_80.contains(&Column::Samples));
        assert_eq!(all(101).len(), COLUMNS.len());
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
    fn advised_timer_is_not_in_force() {
        let mut timer = rto_agent_core::testing::timer("active", TunerState::Active);
        assert_eq!(in_force(&timer), timer.value_us);
        timer.kind = TimerKind::Advice;
        assert_eq!(in_force(&timer), None);
        timer.kind = TimerKind::Watched;
        timer.configured_us = Some(8_000);
        assert_eq!(in_force(&timer), Some(8_000));
    }
}
