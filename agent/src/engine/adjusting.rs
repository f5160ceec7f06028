//! What the daemon decides about policies beside their settings: decided once a second, and put in force as every
//! other change is.

use std::time::{Duration, Instant};

use tracing::warn;

use super::{
    Engine, EngineError,
    audit::{Cause, Source},
    desired::Desired,
    reconcile::{Change, Persist},
};
use crate::policy::Adjustments;

/// How often what was counted is taken in.
pub(super) const TICK: Duration = Duration::from_secs(1);

/// When the next tick is due.
#[derive(Debug)]
pub(super) struct Ticks {
    next: Instant,
}

impl Ticks {
    pub(super) fn new() -> Self {
        Self {
            next: Instant::now(),
        }
    }

    fn is_due(&mut self) -> bool {
        let now = Instant::now();
        let is_due = now >= self.next;
        if is_due {
            self.next = now + TICK;
        }
        is_due
    }
}

impl Engine {
    /// How long until the next tick; `None` while no policy needs one: an idle daemon does not wake for it.
    pub(super) fn until_tick(&self) -> Option<Duration> {
        self.needs_ticks()
            .then(|| self.ticks.next.saturating_duration_since(Instant::now()))
    }

    fn needs_ticks(&self) -> bool {
        self.detached_by.is_none() && self.restoring.is_none() && self.tuning.needs_ticks()
    }

    /// Takes in what was counted, and puts in force what follows from it, if a tick is due.
    pub(super) fn tick_if_due(&mut self) {
        if self.needs_ticks() && self.ticks.is_due() {
            self.tick();
        }
    }

    fn tick(&mut self) {
        if let Err(e) = self.adjust(&Source::Tuner.into()) {
            warn!("what was decided is not in force: {e}");
        }
    }

    /// Decisions about the policies of a desired state, from all that decide. A later one overrides an earlier one.
    fn adjustments(&self, next: &Desired) -> Adjustments {
        let mut all = Adjustments::new();
        self.tuning.adjust(&next.policies(), &mut all);
        all
    }

    /// A desired state with what is decided about its policies.
    pub(super) fn adjusted(&self, next: Desired) -> Desired {
        let adjustments = self.adjustments(&next);
        if *next.adjustments == adjustments {
            return next;
        }
        next.with_adjustments(adjustments)
    }

    /// After a change: what is tuned is what the policies in force say.
    pub(super) fn follow_policies(&mut self) {
        let policies = self.reconciler.desired().policies();
        self.tuning.follow(&policies);
    }

    /// Has the kernel hold what is decided now. Reconciles only where that is something else than before.
    ///
    /// # Errors
    ///
    /// As [`Engine::reconcile`].
    pub(super) fn adjust(&mut self, cause: &Cause) -> Result<Option<Change>, EngineError> {
        let desired = self.reconciler.desired();
        let adjustments = self.adjustments(desired);
        if *desired.adjustments == adjustments {
            return Ok(None);
        }
        let next = desired.with_adjustments(adjustments);
        self.reconcile(next, &Persist::Later, cause).map(Some)
    }
}
