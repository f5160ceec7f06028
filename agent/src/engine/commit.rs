//! What every change does, wherever it comes from: the one way to the kernel.

use super::{Engine, EngineError, audit::Cause};
use crate::policy::{PolicySet, plan::ChangeSummary};

impl Engine {
    /// Puts a set in force, or leaves everything as it is. `keep` is for what the set came from, once the kernel has
    /// it: where that fails the kernel goes back.
    ///
    /// # Errors
    ///
    /// As [`super::state::State::become_set`], or what `keep` says.
    pub(super) fn put_in_force(
        &mut self,
        set: PolicySet,
        action: &str,
        cause: &Cause,
        keep: impl FnOnce(&mut Self) -> Result<(), EngineError>,
    ) -> Result<ChangeSummary, EngineError> {
        let _busy = self.busy.begin();
        // A probe under way is of neither state.
        self.probing.disturb();
        let changed = self.state.become_set(set)?;
        if let Err(e) = keep(self) {
            let before = self.manual.over(&self.config.set);
            return Err(match self.state.become_set(before) {
                Ok(_) => e,
                Err(back) => EngineError::Failed(format!("{e}; going back failed: {back}")),
            });
        }
        self.publish_reading();
        cause.audit(action, &changed, self.state.last_change());
        // Who is covered by fewer entries than before has what it needs.
        if changed.added + changed.changed > 0 {
            self.apply_to_open(cause);
        }
        Ok(changed)
    }
}
