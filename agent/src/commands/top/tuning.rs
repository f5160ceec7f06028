//! The state of the page of learnt, guarded and compared timers. [`super::timers`] draws it.

use std::collections::BTreeSet;

use rto_agent_core::{
    policy::PolicyName,
    wire::{experiments::ExperimentView, stats::PolicyStats, tune::TunedPolicy},
};

use super::state::{Answers, State};
use crate::client::{Client, ClientError};

/// Requests them.
pub(super) fn ask(client: &Client) -> Result<Answers, ClientError> {
    Ok(Answers {
        tune: client.get("/v1/tune")?,
        experiments: client.get("/v1/experiments")?,
    })
}

/// The data shown for one policy.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shown<'a> {
    pub(super) name: &'a PolicyName,
    pub(super) tuned: Option<&'a TunedPolicy>,
    pub(super) experiment: Option<&'a ExperimentView>,
}

impl State {
    /// Takes the daemon's answers.
    pub(super) fn update_page(&mut self, answers: Answers) {
        if !self.paused {
            self.page.answers = Some(answers);
            self.settle_page();
        }
    }

    /// The policies of the page whose names pass the filter.
    pub(super) fn shown(&self) -> Vec<Shown<'_>> {
        let Some(answers) = &self.page.answers else {
            return Vec::new();
        };
        let tuned = &answers.tune.policies;
        let experiments = &answers.experiments.experiments;
        let mut names: BTreeSet<&PolicyName> = self.with_control().collect();
        names.extend(tuned.keys());
        names.extend(experiments.keys());
        names.retain(|name| name.as_str().contains(&self.filter));
        let shown = |name| Shown {
            name,
            tuned: tuned.get(name),
            experiment: experiments.get(name),
        };
        names.into_iter().map(shown).collect()
    }

    /// The policies with a control arm.
    fn with_control(&self) -> impl Iterator<Item = &PolicyName> {
        let all = self.histories.iter();
        let with = all.filter(|(_, history)| history.has_control());
        with.map(|(name, _)| name)
    }

    /// The statistics of a policy.
    pub(super) fn stats_of(&self, name: &PolicyName) -> Option<PolicyStats> {
        let history = self.histories.get(name)?;
        Some(history.stats(self.scope))
    }

    /// Index of the policy that is selected on the page.
    pub(super) fn selected_on_page(&self) -> usize {
        let selected = self.page.selected.as_ref();
        let shown = self.shown();
        let at = shown.iter().position(|shown| Some(shown.name) == selected);
        at.unwrap_or_else(|| self.page.index.min(shown.len().saturating_sub(1)))
    }

    /// Selects a row of the page; the last row if there are fewer.
    pub(super) fn select_on_page(&mut self, index: usize) {
        let shown = self.shown();
        let index = index.min(shown.len().saturating_sub(1));
        let selected = shown.get(index).map(|shown| shown.name.clone());
        self.page.selected = selected;
        self.page.index = index;
    }

    /// Called after the policies changed: the selection stays with its policy, or moves to the
    /// policy that is now in its row.
    fn settle_page(&mut self) {
        self.select_on_page(self.selected_on_page());
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::samples::{press, state, tuned},
        *,
    };

    fn names(state: &State) -> Vec<&str> {
        let shown = state.shown();
        shown.iter().map(|shown| shown.name.as_str()).collect()
    }

    fn selected(state: &State) -> &str {
        names(state)[state.selected_on_page()]
    }

    #[test]
    fn every_policy_with_a_timer_an_experiment_or_a_control_arm_is_there() {
        let mut state = tuned();
        assert_eq!(names(&state), ["far", "near", "region"]);
        press(&mut state, "u");
        assert_eq!(selected(&state), "far");
        press(&mut state, "j");
        assert_eq!(selected(&state), "near");
        state.update_page(state.page.answers.clone().unwrap());
        assert_eq!(selected(&state), "near");
        let mut answers = state.page.answers.clone().unwrap();
        answers.tune.policies.clear();
        state.update_page(answers);
        assert_eq!(names(&state), ["far", "near", "region"]);
        assert_eq!(selected(&state), "near");
        press(&mut state, "jjjj");
        assert_eq!(selected(&state), "region");
        press(&mut state, "p");
        state.update_page(Answers::default());
        assert_eq!(names(&state).len(), 3);
        press(&mut state, "p");
        state.update_page(Answers::default());
        assert_eq!(names(&state), ["near"]);
    }

    #[test]
    fn the_page_is_left_by_its_key_or_escape_and_hides_what_was_open() {
        let mut state = state(&[("a", 0)]);
        press(&mut state, "\nu");
        assert!(state.page.is_open && state.opened().is_some());
        assert!(!press(&mut state, "\u{1b}"));
        assert!(!state.page.is_open && state.opened().is_some());
        press(&mut state, "uu");
        assert!(!state.page.is_open);
        // Keys of the table have no effect on this page.
        press(&mut state, "\u{1b}us/r\n");
        assert!(state.page.is_open && !state.typing && state.opened().is_none());
        assert!(press(&mut state, "q"));
    }
}
