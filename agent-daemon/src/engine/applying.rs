//! Sockets that are already open: walks on request, and after changes with `apply_to_open`.

use rto_agent_core::wire::types::{ApplyRequest, Caller, WalkView};
use rto_agent_kernel::{datapath::walk::Mode, kernel::features::can_set};
use tracing::warn;

use super::{Engine, EngineError, audit::Cause, detach::DETACHED, jobs::walk};

impl Engine {
    /// Whether open sockets get the options of a policy that begins to cover them.
    pub(super) fn applies_to_open(&self) -> bool {
        self.reconciler.resolved().config().agent.apply_to_open
    }

    /// Walks over the open sockets, with `apply_to_open`.
    pub(super) fn apply_to_open(&mut self, cause: &Cause) {
        if !self.applies_to_open() || self.detached_by.is_some() {
            return;
        }
        if self.walks.is_running() {
            self.walks.ask_again(cause);
        } else if let Err(e) = self.begin_walk(Mode::ApplyToNew, cause) {
            warn!("open sockets were not changed: {e}");
            self.walks.refused(&cause.to_string(), e.to_string());
        }
    }

    pub(super) fn apply(
        &mut self,
        request: &ApplyRequest,
        by: Caller,
    ) -> Result<WalkView, EngineError> {
        if self.walks.is_running() {
            return Err(EngineError::Refused(
                "open sockets are already being walked; see rto-agent status".to_owned(),
            ));
        }
        let mode = if request.new_only {
            Mode::ApplyToNew
        } else {
            Mode::Apply
        };
        self.begin_walk(mode, &Cause::asked(by))
    }

    fn begin_walk(&mut self, mode: Mode, cause: &Cause) -> Result<WalkView, EngineError> {
        self.check_not_restoring()?;
        let kernel = self.reconciler.kernel();
        let Some(kernel) = kernel.filter(|_| self.detached_by.is_none()) else {
            return Err(EngineError::Refused(DETACHED.to_owned()));
        };
        self.check_can_walk()?;
        let walker = kernel.walker(mode)?;
        let has_hook = can_set(&self.config.features, "rto-hook-on-open-sockets") != Some(false);
        let mut policies = self.reconciler.resolved().set.policies.values();
        let sets_rto_min = policies.any(|policy| policy.settings.rto_min.is_some());
        let notes = walk::notes(sets_rto_min, has_hook);
        cause.audit_other(match mode {
            Mode::Apply => "apply to open sockets",
            Mode::ApplyToNew => "apply to new open sockets",
            Mode::Restore | Mode::EndSchedules => "restore open sockets",
        });
        let cause = cause.to_string();
        Ok(self.walks.begin(vec![walker], &cause, notes))
    }

    pub(super) fn check_can_walk(&self) -> Result<(), EngineError> {
        if can_set(&self.config.features, "iter-tcp") == Some(false) {
            return Err(EngineError::Refused(
                "this kernel has no iterator over open sockets (Linux 5.15 and later; see iter-tcp \
                 in rto-agent doctor); nothing was changed"
                    .to_owned(),
            ));
        }
        Ok(())
    }
}
