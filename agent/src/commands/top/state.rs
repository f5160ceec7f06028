//! The state of `top`, from which the screen is drawn. Nothing here reads, waits or draws.

use std::{
    cmp::Ordering,
    collections::BTreeMap,
    time::{Duration, Instant},
};

use rto_agent_core::{
    policy::PolicyName,
    wire::{experiments::ExperimentsAnswer, stats::StatsAnswer, tune::TuneAnswer},
};

use super::history::{Column, PolicyHistory, Row, Scope};

/// Beyond two intervals and this delay without an answer, the daemon counts as hanging.
const LATE: Duration = Duration::from_secs(2);

/// The daemon's answers.
#[derive(Clone, Debug, Default)]
pub(super) struct Answers {
    pub(super) tune: TuneAnswer,
    pub(super) experiments: ExperimentsAnswer,
}

/// The page of timers: [`super::tuning`] changes it.
#[derive(Debug, Default)]
pub(super) struct Page {
    pub(super) is_open: bool,
    /// `None` until the first answer.
    pub(super) answers: Option<Answers>,
    pub(super) selected: Option<PolicyName>,
    /// The row of the selected policy, for when the policy is gone.
    pub(super) index: usize,
}

/// Everything that is drawn.
#[derive(Debug)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "each is a switch of its own to the user"
)]
pub(super) struct State {
    pub(super) socket: String,
    pub(super) interval: Duration,
    /// Whether statistics are on.
    pub(super) on: bool,
    /// Samples 1 in N loss-free connections.
    pub(super) sampling: u32,
    /// When smoothed RTTs are sampled.
    pub(super) rtt_sampling: String,
    /// When the last answer came.
    looked: Instant,
    /// Why the last request failed.
    error: Option<String>,
    /// The daemon's time of the last answer that was used.
    at_ms: u64,
    pub(super) histories: BTreeMap<PolicyName, PolicyHistory>,
    selected: Option<PolicyName>,
    /// The policy that a key selected: while the filter hides it, another is selected.
    chosen: Option<PolicyName>,
    /// The selected row, for when its policy is gone.
    pub(super) index: usize,
    pub(super) sort: Column,
    pub(super) reversed: bool,
    pub(super) scope: Scope,
    pub(super) filter: String,
    /// Whether the filter is being typed.
    pub(super) typing: bool,
    /// Whether the selected policy is open.
    pub(super) open: bool,
    /// The page of learnt and guarded timers.
    pub(super) page: Page,
    pub(super) help: bool,
    pub(super) paused: bool,
}

impl State {
    /// The state after the first answer.
    pub(super) fn new(
        socket: String,
        interval: Duration,
        first: StatsAnswer,
        now: Instant,
    ) -> Self {
        let mut state = Self {
            socket,
            interval,
            on: true,
            sampling: 1,
            rtt_sampling: String::new(),
            looked: now,
            error: None,
            at_ms: 0,
            histories: BTreeMap::new(),
            selected: None,
            chosen: None,
            index: 0,
            sort: Column::ConnectionRate,
            reversed: false,
            scope: Scope::default(),
            filter: String::new(),
            typing: false,
            open: false,
            page: Page::default(),
            help: false,
            paused: false,
        };
        state.update(first, now);
        state
    }

    /// Takes an answer.
    pub(super) fn update(&mut self, answer: StatsAnswer, now: Instant) {
        self.looked = now;
        self.error = None;
        if self.paused {
            // After the pause, the next answer has rates since this one.
            return;
        }
        let took_ms = answer.at_ms.saturating_sub(self.at_ms);
        self.at_ms = answer.at_ms;
        self.on = answer.on;
        self.sampling = answer.sampling;
        self.rtt_sampling = answer.rtt_sampling;
        let mut before = std::mem::take(&mut self.histories);
        for (name, stats) in answer.policies {
            let history = match before.remove(&name) {
                Some(mut history) => {
                    history.update(stats, took_ms);
                    history
                }
                None => PolicyHistory::new(stats),
            };
            self.histories.insert(name, history);
        }
        self.settle();
    }

    /// Records why a request failed.
    pub(super) fn failed(&mut self, error: String) {
        self.error = Some(error);
    }

    /// Time since the last answer.
    pub(super) fn age(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.looked)
    }

    /// When the last answer came.
    #[cfg(test)]
    pub(super) const fn looked(&self) -> Instant {
        self.looked
    }

    /// The daemon's problem, if there is one.
    pub(super) fn trouble(&self, now: Instant) -> Option<&str> {
        let late = self.age(now) > self.interval * 2 + LATE;
        let hangs = late.then_some("the daemon answers slowly");
        self.error.as_deref().or(hangs)
    }

    /// The rows that pass the filter, sorted.
    pub(super) fn rows(&self) -> Vec<Row<'_>> {
        let mut rows: Vec<_> = self
            .histories
            .iter()
            .filter(|(name, _)| name.as_str().contains(&self.filter))
            .map(|(name, history)| history.row(name, self.scope))
            .collect();
        // The sort is stable, so equal rows stay sorted by name.
        rows.sort_by(|a, b| self.order(a, b));
        rows
    }

    /// Names from a to z and numbers from the largest, unless reversed. Undefined values are always
    /// last.
    fn order(&self, a: &Row<'_>, b: &Row<'_>) -> Ordering {
        let turned = |order: Ordering| {
            if self.reversed {
                order.reverse()
            } else {
                order
            }
        };
        if self.sort == Column::Policy {
            return turned(a.name.cmp(b.name));
        }
        match (a.value(self.sort), b.value(self.sort)) {
            (Some(a), Some(b)) => turned(b.total_cmp(&a)),
            (a, b) => b.is_some().cmp(&a.is_some()),
        }
    }

    /// Whether the order is from small to large.
    pub(super) fn ascending(&self) -> bool {
        (self.sort == Column::Policy) != self.reversed
    }

    /// Whether there are no policies.
    pub(super) fn is_empty(&self) -> bool {
        self.histories.is_empty()
    }

    /// Index of the selected row.
    pub(super) fn selected(&self) -> Option<usize> {
        let selected = self.selected.as_ref()?;
        self.rows().iter().position(|row| row.name == selected)
    }

    /// The policy whose histograms are shown.
    pub(super) fn opened(&self) -> Option<(&PolicyName, &PolicyHistory)> {
        let selected = self.selected.as_ref().filter(|_| self.open)?;
        self.histories.get_key_value(selected)
    }

    /// Called after the rows changed: the selection stays with its policy, or moves to the policy
    /// that is now in its row.
    pub(super) fn settle(&mut self) {
        let rows = self.rows();
        let is_shown = |name: &&PolicyName| rows.iter().any(|row| row.name == *name);
        let chosen = self.chosen.as_ref().filter(is_shown).cloned();
        if chosen.is_some() {
            self.selected = chosen;
        }
        if let Some(index) = self.selected() {
            self.index = index;
        } else {
            self.open = false;
            self.show(self.index);
        }
    }

    /// Selects a row for the user; the last row if there are fewer.
    pub(super) fn select(&mut self, index: usize) {
        self.show(index);
        self.chosen.clone_from(&self.selected);
    }

    fn show(&mut self, index: usize) {
        let rows = self.rows();
        let index = index.min(rows.len().saturating_sub(1));
        let selected = rows.get(index).map(|row| row.name.clone());
        self.index = index;
        self.selected = selected;
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::samples::{answer, look, names, press, selected, state},
        *,
    };

    #[test]
    fn the_busiest_comes_first_and_those_without_a_rate_last() {
        let mut state = state(&[("a", 0), ("b", 0), ("c", 0)]);
        assert_eq!(names(&state), ["a", "b", "c"]);
        look(
            &mut state,
            2000,
            &[("a", 10), ("b", 30), ("c", 30), ("new", 900)],
        );
        assert_eq!(names(&state), ["b", "c", "a", "new"]);
        press(&mut state, "r");
        assert_eq!(names(&state), ["a", "b", "c", "new"]);
        let rate = |i: usize| state.rows()[i].value(Column::ConnectionRate);
        assert_eq!((rate(0), rate(1), rate(3)), (Some(10.0), Some(30.0), None));
    }

    #[test]
    fn every_column_sorts() {
        let mut state = state(&[("a", 1), ("b", 2)]);
        look(&mut state, 2000, &[("a", 1), ("b", 3)]);
        let mut seen = Vec::new();
        for _ in Column::ALL {
            seen.push(state.sort.title());
            let forth = names(&state).join("");
            press(&mut state, "r");
            assert!(state.ascending() != (state.sort == Column::Policy));
            assert_eq!(names(&state).len(), forth.len());
            press(&mut state, "s");
            assert!(!state.reversed);
        }
        assert_eq!(state.sort, Column::ConnectionRate);
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), Column::ALL.len());
        while state.sort != Column::Policy {
            press(&mut state, "s");
        }
        assert_eq!(names(&state), ["a", "b"]);
        press(&mut state, "r");
        assert_eq!(names(&state), ["b", "a"]);
    }

    #[test]
    fn the_selection_follows_its_policy() {
        let mut state = state(&[("a", 0), ("b", 0), ("c", 0)]);
        press(&mut state, "jj");
        assert_eq!((selected(&state), state.selected()), ("c", Some(2)));
        look(&mut state, 2000, &[("a", 0), ("b", 0), ("c", 5)]);
        assert_eq!((selected(&state), state.selected()), ("c", Some(0)));
        press(&mut state, "jjjjjj");
        assert_eq!(selected(&state), "b");
        press(&mut state, "kkkkkk");
        assert_eq!(selected(&state), "c");
        for keys in ["r", "r", "s", "s", "r"] {
            press(&mut state, keys);
            assert_eq!(selected(&state), "c", "{keys}");
        }
        state.sort = Column::ConnectionRate;
        state.reversed = false;
        state.settle();
        // The policy is gone: the policy in its row is selected.
        look(&mut state, 3000, &[("a", 0), ("b", 0)]);
        assert_eq!(selected(&state), "a");
        look(&mut state, 4000, &[]);
        assert_eq!((selected(&state), state.selected()), ("", None));
        look(&mut state, 5000, &[("z", 0)]);
        assert_eq!(selected(&state), "z");
    }

    #[test]
    fn a_pause_holds_the_picture_and_not_the_clock() {
        let mut state = state(&[("a", 0)]);
        press(&mut state, "p");
        let rate = |state: &State| state.rows()[0].value(Column::ConnectionRate);
        look(&mut state, 2000, &[("a", 10)]);
        assert_eq!(rate(&state), None);
        press(&mut state, "p");
        look(&mut state, 5000, &[("a", 40)]);
        assert_eq!(rate(&state), Some(10.0));
    }

    #[test]
    fn a_daemon_that_does_not_answer_is_told() {
        let mut state = state(&[("a", 0)]);
        let start = state.looked;
        let at = |s| start + Duration::from_secs(s);
        assert_eq!(state.trouble(at(4)), None);
        assert!(state.trouble(at(5)).is_some());
        state.failed("gone".to_owned());
        assert_eq!(state.trouble(at(1)), Some("gone"));
        state.update(answer(9000, &[]), at(9));
        assert_eq!(
            (state.trouble(at(9)), state.age(at(12))),
            (None, Duration::from_secs(3))
        );
    }

    #[test]
    fn shares_and_times_are_since_the_policy_or_since_top_began() {
        let mut state = state(&[("a", 100)]);
        look(&mut state, 2000, &[("a", 101)]);
        let total = |state: &State| state.rows()[0].value(Column::Connections);
        assert_eq!(total(&state), Some(101.0));
        press(&mut state, "t");
        assert_eq!(total(&state), Some(1.0));
    }
}
