//! The state of `top`, and what answers and keys change in it. Nothing here reads, waits or draws.

use std::{
    cell::Cell,
    cmp::Ordering,
    collections::BTreeMap,
    ops::ControlFlow,
    time::{Duration, Instant},
};

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use rto_agent_core::{
    policy::PolicyName,
    wire::{
        stats::{PolicyStats, StatsAnswer},
        tune::TuneAnswer,
    },
};

use super::row::{COLUMNS, CONNECTION_RATE, POLICY, Row};
use crate::commands::{stats, tune};

/// Beyond two intervals and this delay without an answer, the daemon counts as hanging.
const LATE: Duration = Duration::from_secs(2);
/// Lines of a page up or down.
const PAGE: usize = 10;

/// The daemon's answers.
#[derive(Clone, Debug, Default)]
pub(super) struct Answers {
    pub(super) stats: StatsAnswer,
    pub(super) tune: TuneAnswer,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum View {
    Table,
    /// `rto-agent stats` of the selected policy.
    Policy,
    /// `rto-agent tune`.
    Timers,
}

/// What keys mean.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Input {
    Commands,
    Filter,
    Help,
}

/// Everything that is drawn.
#[derive(Debug)]
pub(super) struct State {
    pub(super) socket: String,
    pub(super) interval: Duration,
    pub(super) answers: Answers,
    /// The statistics of the previous answer that can be compared with the last one.
    before: StatsAnswer,
    /// Each policy's counts when `top` first saw it.
    first: BTreeMap<PolicyName, PolicyStats>,
    /// When the last answer came.
    looked: Instant,
    /// Why the last request failed.
    error: Option<String>,
    /// The policy that a key selected. The filter may hide it.
    chosen: Option<PolicyName>,
    /// The selected row while the chosen policy is not shown.
    index: usize,
    /// Index of a column.
    pub(super) sort: usize,
    pub(super) reversed: bool,
    /// Counts since `top` started, instead of since the policy was added.
    pub(super) since_start: bool,
    pub(super) filter: String,
    pub(super) input: Input,
    pub(super) view: View,
    /// Lines of a text above the screen; drawing limits it.
    pub(super) scroll: Cell<usize>,
}

impl State {
    /// The state after the first answers.
    pub(super) fn new(socket: String, interval: Duration, first: Answers, now: Instant) -> Self {
        let mut state = Self {
            socket,
            interval,
            answers: Answers::default(),
            before: StatsAnswer::default(),
            first: BTreeMap::new(),
            looked: now,
            error: None,
            chosen: None,
            index: 0,
            sort: CONNECTION_RATE,
            reversed: false,
            since_start: false,
            filter: String::new(),
            input: Input::Commands,
            view: View::Table,
            scroll: Cell::default(),
        };
        state.update(first, now);
        state
    }

    /// Takes answers.
    pub(super) fn update(&mut self, answers: Answers, now: Instant) {
        self.looked = now;
        self.error = None;
        self.before = std::mem::replace(&mut self.answers, answers).stats;
        let policies = &self.answers.stats.policies;
        self.first.retain(|name, _| policies.contains_key(name));
        for (name, stats) in policies {
            let connections = |stats: &PolicyStats| stats.treated.total().connections;
            let before = self.before.policies.get(name);
            if before.is_some_and(|before| connections(stats) < connections(before)) {
                // The counts restarted: the policy was removed and added again.
                self.before.policies.remove(name);
                self.first.insert(name.clone(), PolicyStats::default());
            } else if !self.first.contains_key(name) {
                self.first.insert(name.clone(), stats.clone());
            }
        }
        if self.view == View::Policy
            && !self
                .chosen
                .as_ref()
                .is_some_and(|c| policies.contains_key(c))
        {
            self.view = View::Table;
        }
    }

    /// Records why a request failed.
    pub(super) fn failed(&mut self, error: String) {
        self.error = Some(error);
    }

    /// Time since the last answer.
    pub(super) fn age(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.looked)
    }

    /// The daemon's problem, if there is one.
    pub(super) fn trouble(&self, now: Instant) -> Option<&str> {
        let late = self.age(now) > self.interval * 2 + LATE;
        let hangs = late.then_some("the daemon answers slowly");
        self.error.as_deref().or(hangs)
    }

    fn passes(&self, name: &PolicyName) -> bool {
        name.as_str().contains(&self.filter)
    }

    /// A policy's counts as of the last answer.
    fn counts(&self, name: &PolicyName, now: &PolicyStats) -> PolicyStats {
        let first = self.first.get(name).filter(|_| self.since_start);
        first.map_or_else(|| now.clone(), |first| now.since(first))
    }

    /// The rows that pass the filter, sorted.
    pub(super) fn rows(&self) -> Vec<Row<'_>> {
        let all = self.answers.stats.policies.iter();
        let shown = all.filter(|(name, _)| self.passes(name));
        let mut rows: Vec<_> = shown.map(|(name, now)| self.row(name, now)).collect();
        // The sort is stable, so equal rows stay sorted by name.
        rows.sort_by(|a, b| self.order(a, b));
        rows
    }

    fn row<'a>(&'a self, name: &'a PolicyName, now: &PolicyStats) -> Row<'a> {
        let took_ms = self.answers.stats.at_ms.saturating_sub(self.before.at_ms);
        let before = self.before.policies.get(name);
        let since = before.map(|before| (now.treated.since(&before.treated), took_ms));
        Row::new(name, self.counts(name, now).treated, since)
    }

    /// Names from a to z and numbers from the largest, unless reversed. Undefined values are always
    /// last.
    fn order(&self, a: &Row<'_>, b: &Row<'_>) -> Ordering {
        let turned = |order: Ordering| match self.reversed {
            true => order.reverse(),
            false => order,
        };
        let value = COLUMNS[self.sort].value;
        match (value(a), value(b)) {
            _ if self.sort == POLICY => turned(a.name.cmp(b.name)),
            (Some(a), Some(b)) => turned(b.total_cmp(&a)),
            (a, b) => b.is_some().cmp(&a.is_some()),
        }
    }

    /// Whether the order is from small to large.
    pub(super) fn ascending(&self) -> bool {
        (self.sort == POLICY) != self.reversed
    }

    /// Index of the selected row: that of the chosen policy, if it is shown.
    pub(super) fn selected(&self, rows: &[Row<'_>]) -> usize {
        let at = rows
            .iter()
            .position(|row| Some(row.name) == self.chosen.as_ref());
        at.unwrap_or_else(|| self.index.min(rows.len().saturating_sub(1)))
    }

    /// The text that is shown instead of the table.
    pub(super) fn text(&self, columns: Option<usize>) -> String {
        let mut answers = self.answers.clone();
        if self.view == View::Policy {
            let policies = &mut answers.stats.policies;
            policies.retain(|name, _| Some(name) == self.chosen.as_ref());
            for (name, stats) in policies {
                *stats = self.counts(name, stats);
            }
            return stats::in_top(&answers.stats, columns);
        }
        answers.tune.policies.retain(|name, _| self.passes(name));
        tune::text(&answers.tune)
    }

    /// Handles a key; `Break` ends `top`.
    pub(super) fn key(&mut self, key: KeyEvent) -> ControlFlow<()> {
        let is_control = key.modifiers.contains(KeyModifiers::CONTROL);
        match self.input {
            _ if key.kind == KeyEventKind::Release => {}
            _ if is_control && key.code == KeyCode::Char('c') => return ControlFlow::Break(()),
            _ if is_control => {}
            Input::Help => self.input = Input::Commands,
            Input::Filter => self.type_filter(key.code),
            Input::Commands => return self.command(key.code),
        }
        ControlFlow::Continue(())
    }

    fn command(&mut self, code: KeyCode) -> ControlFlow<()> {
        match code {
            KeyCode::Up | KeyCode::Char('k') => self.step(|at| at.saturating_sub(1)),
            KeyCode::Down | KeyCode::Char('j') => self.step(|at| at + 1),
            KeyCode::PageUp => self.step(|at| at.saturating_sub(PAGE)),
            KeyCode::PageDown => self.step(|at| at + PAGE),
            KeyCode::Home => self.step(|_| 0),
            KeyCode::End => self.step(|_| usize::MAX),
            KeyCode::Char('?') => self.input = Input::Help,
            KeyCode::Char('t') => self.since_start = !self.since_start,
            KeyCode::Char('u') if self.view == View::Timers => self.show(View::Table),
            KeyCode::Char('u') => self.show(View::Timers),
            KeyCode::Esc if self.view != View::Table => self.show(View::Table),
            KeyCode::Esc if !self.filter.is_empty() => self.filter.clear(),
            KeyCode::Char('q') | KeyCode::Esc => return ControlFlow::Break(()),
            // The table is hidden.
            _ if self.view != View::Table => {}
            KeyCode::Enter => {
                self.step(|at| at);
                if self.chosen.is_some() {
                    self.show(View::Policy);
                }
            }
            KeyCode::Char('s') => {
                self.sort = (self.sort + 1) % COLUMNS.len();
                self.reversed = false;
            }
            KeyCode::Char('r') => self.reversed = !self.reversed,
            KeyCode::Char('/') => {
                self.filter.clear();
                self.input = Input::Filter;
            }
            _ => {}
        }
        ControlFlow::Continue(())
    }

    fn show(&mut self, view: View) {
        self.view = view;
        self.scroll.set(0);
    }

    /// Selects another row, or scrolls the text.
    fn step(&mut self, to: impl Fn(usize) -> usize) {
        if self.view != View::Table {
            self.scroll.set(to(self.scroll.get()));
            return;
        }
        let rows = self.rows();
        let index = to(self.selected(&rows)).min(rows.len().saturating_sub(1));
        let chosen = rows.get(index).map(|row| row.name.clone());
        self.index = index;
        self.chosen = chosen;
    }

    fn type_filter(&mut self, code: KeyCode) {
        match code {
            KeyCode::Enter => self.input = Input::Commands,
            KeyCode::Esc => {
                self.input = Input::Commands;
                self.filter.clear();
            }
            KeyCode::Backspace => {
                // Backspace in an empty filter ends typing.
                if self.filter.pop().is_none() {
                    self.input = Input::Commands;
                }
            }
            KeyCode::Char(c) => self.filter.push(c),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::samples::{answers, look, press, state},
        *,
    };

    /// The policies from top to bottom.
    fn names(state: &State) -> Vec<&str> {
        state.rows().iter().map(|row| row.name.as_str()).collect()
    }

    fn selected(state: &State) -> &str {
        let index = state.selected(&state.rows());
        names(state).get(index).copied().unwrap_or_default()
    }

    fn value(state: &State, row: usize, title: &str) -> Option<f64> {
        let column = COLUMNS.iter().find(|column| column.title == title);
        (column.unwrap().value)(&state.rows()[row])
    }

    #[test]
    fn busiest_policy_sorts_first() {
        let mut state = state(&[("a", 0), ("b", 0), ("c", 0)]);
        assert_eq!(names(&state), ["a", "b", "c"]);
        let next = [("a", 5), ("b", 15), ("c", 15), ("new", 900)];
        look(&mut state, 1500, &next);
        assert_eq!(names(&state), ["b", "c", "a", "new"]);
        press(&mut state, "r");
        assert_eq!(names(&state), ["a", "b", "c", "new"]);
        let rate = |row| value(&state, row, "CONN/S");
        assert_eq!((rate(0), rate(1), rate(3)), (Some(10.0), Some(30.0), None));
    }

    #[test]
    fn every_column_sorts() {
        let mut state = state(&[("a", 1), ("b", 2)]);
        look(&mut state, 2000, &[("a", 1), ("b", 3)]);
        for _ in &COLUMNS {
            press(&mut state, "r");
            assert!(state.ascending() != (state.sort == POLICY));
            assert_eq!(names(&state).len(), 2);
            press(&mut state, "s");
            assert!(!state.reversed);
        }
        assert_eq!(
            (state.sort, names(&state)),
            (CONNECTION_RATE, vec!["b", "a"])
        );
        state.sort = POLICY;
        assert_eq!(names(&state), ["a", "b"]);
        press(&mut state, "r");
        assert_eq!(names(&state), ["b", "a"]);
    }

    #[test]
    fn selection_follows_policy() {
        let mut state = state(&[("a", 0), ("b", 0), ("c", 0)]);
        press(&mut state, "jj");
        assert_eq!(selected(&state), "c");
        look(&mut state, 2000, &[("a", 0), ("b", 0), ("c", 5)]);
        assert_eq!((selected(&state), names(&state)[0]), ("c", "c"));
        press(&mut state, "jjjjjj");
        assert_eq!(selected(&state), "b");
        // The policy is gone: a row is selected.
        look(&mut state, 3000, &[("a", 0)]);
        assert_eq!(selected(&state), "a");
        look(&mut state, 4000, &[]);
        assert_eq!(selected(&state), "");
    }

    #[test]
    fn filter_is_applied_by_enter_and_dropped_by_escape() {
        let mut state = state(&[("db-far", 0), ("db-near", 0), ("web", 0)]);
        press(&mut state, "j/q");
        assert_eq!(names(&state).len(), 0);
        press(&mut state, "\u{8}web");
        assert_eq!((names(&state), selected(&state)), (vec!["web"], "web"));
        press(&mut state, "\n");
        assert!(state.input == Input::Commands && state.filter == "web");
        // The selection returns, unless another policy was chosen in between.
        press(&mut state, "\u{1b}");
        assert_eq!((names(&state).len(), selected(&state)), (3, "db-near"));
        press(&mut state, "/web\nj\u{1b}");
        assert_eq!((names(&state).len(), selected(&state)), (3, "web"));
        press(&mut state, "/d\u{1b}");
        assert_eq!((state.input, names(&state).len()), (Input::Commands, 3));
        press(&mut state, "/\u{8}");
        assert_eq!(state.input, Input::Commands);
    }

    #[test]
    fn quit_keys_end_top() {
        for (keys, ends) in [
            ("q", true),
            ("\u{1b}", true),
            ("\u{3}", true),
            ("/\u{3}", true),
            ("?\u{3}", true),
            ("\nq", true),
            ("uq", true),
            ("\n\u{1b}", false),
            ("\n\u{1b}\u{1b}", true),
            ("u\u{1b}", false),
            ("?q", false),
            ("?\u{1b}", false),
            ("/q", false),
            ("/\u{1b}", false),
            ("/a\n\u{1b}", false),
            ("/a\n\u{1b}\u{1b}", true),
            ("jkxsrt", false),
        ] {
            let mut state = state(&[("a", 0)]);
            assert_eq!(press(&mut state, keys), ends, "{keys:?}");
        }
    }

    #[test]
    fn open_policy_closes_by_escape_or_removal() {
        let mut state = state(&[("a", 0), ("b", 0)]);
        press(&mut state, "\n");
        assert_eq!((state.view, selected(&state)), (View::Policy, "a"));
        // Keys of the table have no effect, and others scroll.
        press(&mut state, "s/rjj");
        assert_eq!((state.sort, state.scroll.get()), (CONNECTION_RATE, 2));
        look(&mut state, 2000, &[("b", 0)]);
        assert_eq!((state.view, selected(&state)), (View::Table, "b"));
        press(&mut state, "\nuu");
        assert_eq!(state.view, View::Table);
    }

    #[test]
    fn unanswered_request_is_reported() {
        let mut state = state(&[("a", 0)]);
        let start = state.looked;
        let at = |s| start + Duration::from_secs(s);
        assert_eq!(state.trouble(at(4)), None);
        assert!(state.trouble(at(5)).is_some());
        state.failed("gone".to_owned());
        assert_eq!(state.trouble(at(1)), Some("gone"));
        state.update(answers(9000, &[]), at(9));
        assert_eq!(
            (state.trouble(at(9)), state.age(at(12)).as_secs()),
            (None, 3)
        );
    }

    #[test]
    fn counts_are_since_the_policy_or_since_top_started() {
        let mut state = state(&[("a", 100)]);
        look(&mut state, 2000, &[("a", 101)]);
        assert_eq!(value(&state, 0, "CONNS"), Some(101.0));
        press(&mut state, "t");
        assert_eq!(value(&state, 0, "CONNS"), Some(1.0));
        // The counts restart.
        look(&mut state, 3000, &[("a", 3)]);
        assert_eq!(value(&state, 0, "CONNS"), Some(3.0));
        assert_eq!(value(&state, 0, "CONN/S"), None);
        look(&mut state, 4000, &[("a", 4)]);
        assert_eq!(value(&state, 0, "CONN/S"), Some(1.0));
    }
}
