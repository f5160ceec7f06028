//! `rto-agent detach`: at once, or when sockets have been given back what they had.

use std::time::{Duration, Instant};

use tracing::{info, warn};

use super::{Engine, EngineError, Reply, audit::Cause, jobs::walk, systemd};
use crate::{
    datapath::{Removed, handover},
    wire::types::{Caller, DetachAnswer, DetachRequest},
};

/// How long `detach --restore` may take: less than its client waits.
const RESTORE_LIMIT: Duration = Duration::from_secs(60);

/// A detachment whose sockets are being given back what they had.
pub(super) struct Restoring {
    reply: Reply<DetachAnswer>,
    pub(super) deadline: Instant,
}

impl Engine {
    pub(super) fn detach(
        &mut self,
        request: &DetachRequest,
        by: Caller,
        reply: Reply<DetachAnswer>,
    ) {
        self.probing.invalidate();
        let restores = self.reconciler.kernel().is_some() || self.reconciler.has_kept_maps();
        let begun = self.check_not_restoring().and_then(|()| {
            if request.restore && restores {
                self.begin_restore(by).map(|()| None)
            } else {
                self.detach_now(by).map(Some)
            }
        });
        self.publish();
        match begun.transpose() {
            None => {
                let deadline = Instant::now() + RESTORE_LIMIT;
                self.restoring = Some(Restoring { reply, deadline });
            }
            Some(answer) => drop(reply.send(answer)),
        }
    }

    fn detach_now(&mut self, by: Caller) -> Result<DetachAnswer, EngineError> {
        self.walks.stop();
        self.keep_experiments();
        // Its thread loads a program over the very pins that go.
        self.events.end();
        let removed = self.reconciler.detach()?;
        self.detached(by);
        Ok(DetachAnswer {
            removed,
            by_daemon: true,
            ..DetachAnswer::default()
        })
    }

    fn detached(&mut self, by: Caller) {
        // Who watches waits for the next maps.
        self.events.end();
        self.detached_by = Some(by);
        self.probing.look(&self.reconciler.options().cgroup);
        Cause::asked(by).audit_other("detach");
        info!("detached: nothing is in force until rto-agent reload");
    }

    /// Takes the programs out of force and begins to give sockets back what they had; the rest of
    /// the detachment comes when that is done.
    fn begin_restore(&mut self, by: Caller) -> Result<(), EngineError> {
        self.check_can_walk()?;
        self.walks.stop();
        self.events.end();
        if self.walks.is_running() {
            return Err(EngineError::Refused(
                "a walk over the open sockets is held up; try again, or detach without --restore"
                    .to_owned(),
            ));
        }
        let walkers = self.reconciler.unlink_for_restoring()?;
        self.detached(by);
        self.walks.begin(walkers, walk::RESTORE, Vec::new());
        Ok(())
    }

    /// Ends a detachment once its walk has ended, or has taken too long.
    pub(super) fn finish_restore(&mut self) {
        let over = |restoring: &Restoring| Instant::now() >= restoring.deadline;
        if self.walks.is_running() && !self.restoring.as_ref().is_some_and(over) {
            return;
        }
        let Some(Restoring { reply, .. }) = self.restoring.take() else {
            return;
        };
        let mut restored = (*self.walks.progress().get()).clone();
        if self.walks.is_running() {
            self.walks.stop();
            restored.problems.push(format!(
                "not done after {} s: a socket that is in use holds it up",
                RESTORE_LIMIT.as_secs()
            ));
        }
        let answer = if restored.is_complete() {
            let removed = self.reconciler.detach();
            removed.map(|removed| (removed, None))
        } else {
            Ok((Removed::default(), Some(self.reconciler.leave_maps())))
        };
        info!(
            complete = restored.is_complete(),
            "gave back to open sockets"
        );
        self.publish();
        let answer = answer.map(|(removed, kept)| DetachAnswer {
            removed,
            by_daemon: true,
            restored: Some(restored),
            kept,
        });
        drop(reply.send(answer.map_err(EngineError::from)));
    }

    /// Hands what is in force to the service manager for the next start, where it keeps descriptors: it drops them, and
    /// with them the link, once it knows that there is none. Whether that was done.
    pub(super) fn hand_over(&self) -> bool {
        let pin_dir = &self.reconciler.options().pin_dir;
        let done = handover::pinned_objects(pin_dir).and_then(|objects| {
            let kept = systemd::hand_over(&objects)?;
            if kept {
                handover::unpin(pin_dir)?;
            }
            Ok(kept)
        });
        match done {
            Ok(kept) => {
                if kept {
                    info!("stopping; the service manager has what is in force, for a restart");
                }
                kept
            }
            Err(e) => {
                warn!(
                    "the service manager does not have what is in force, and until the next start nothing is: {e}"
                );
                false
            }
        }
    }

    /// While sockets are given back what they had, nothing else goes.
    pub(super) fn check_not_restoring(&self) -> Result<(), EngineError> {
        if self.restoring.is_some() {
            return Err(EngineError::Refused(
                "sockets are being given back what they had; try again soon".to_owned(),
            ));
        }
        Ok(())
    }
}
