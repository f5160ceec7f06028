//! `rto-agent detach` and `attach`. A detachment lasts until it is undone, see
//! [`DetachMark`](crate::engine::DetachMark).

use std::time::{Duration, Instant};

use rto_agent_core::printable::counted;
use rto_agent_core::wire::{
    kernel::Removed,
    types::{Caller, DetachAnswer, DetachRequest, WalkView},
};
use rto_agent_kernel::datapath::{DatapathError, connecting, drain, handover, until_connected};
use tracing::{info, warn};

use super::{Apply, DRAIN_LIMIT, Restoring};
use crate::engine::{EngineError, Reply, audit::Cause, error::refused, jobs::walk, systemd};

/// Limit of `detach --restore`: shorter than its client waits.
const RESTORE_LIMIT: Duration = Duration::from_secs(60);
/// How often a draining program is looked at.
const DRAIN_INTERVAL: Duration = Duration::from_secs(1);

/// An answer, to be sent once the change is published.
type Answer = (Reply<DetachAnswer>, Result<DetachAnswer, EngineError>);

impl Apply {
    /// The user that has detached the program.
    pub(in crate::engine) const fn detached_by(&self) -> Option<Caller> {
        self.detached_by
    }

    /// Whether the program is attached, and no sockets are being restored.
    pub(in crate::engine) const fn is_attached(&self) -> bool {
        self.detached_by.is_none() && self.restoring.is_none()
    }

    /// `rto-agent detach`; `None`: [`Self::finish_restore`] answers.
    pub(in crate::engine) fn detach(
        &mut self,
        request: &DetachRequest,
        by: Caller,
        reply: Reply<DetachAnswer>,
    ) -> Option<Answer> {
        self.probing.invalidate();
        let restores = self.reconciler.kernel().is_some() || self.reconciler.has_kept_maps();
        let begun = self.check_not_restoring().and_then(|()| {
            if request.restore && restores {
                self.begin_restore(by).map(|()| None)
            } else {
                self.detach_now(by).map(Some)
            }
        });
        let Some(answer) = begun.transpose() else {
            let deadline = Instant::now() + RESTORE_LIMIT;
            self.restoring = Some(Restoring { reply, deadline });
            return None;
        };
        Some((reply, answer))
    }

    /// Detaches the program at once.
    pub(in crate::engine) fn detach_now(
        &mut self,
        by: Caller,
    ) -> Result<DetachAnswer, EngineError> {
        self.mark_detached(by);
        self.walks.stop();
        // The thread loads a program over the pins that are about to be removed.
        self.events.end();
        let left = self.drain(Duration::ZERO);
        let unlinked = left.and_then(|left| match left {
            0 => self.reconciler.unlink(),
            _ => {
                self.reconciler.freeze();
                self.is_draining = true;
                Ok(())
            }
        });
        if let Err(e) = unlinked {
            return Err(self.not_detached(e));
        }
        if !self.is_draining {
            self.reconciler.resume();
        }
        let links = self.detached(by);
        Ok(self.detach_answer(links))
    }

    /// Leaves new connections to the kernel's own timers, and waits for those that are connecting; returns how many
    /// still are.
    pub(super) fn drain(&self, limit: Duration) -> Result<u64, DatapathError> {
        match self.reconciler.kernel() {
            Some(_) => drain(&self.reconciler.options().pin_dir, limit),
            None => Ok(0),
        }
    }

    /// The number of connecting sockets for which a draining program stays; 0 if none is draining.
    pub(super) fn connecting(&self) -> u64 {
        if !self.is_draining {
            return 0;
        }
        let left = connecting(&self.reconciler.options().pin_dir);
        left.unwrap_or_else(|e| {
            warn!("{e}");
            0
        })
    }

    /// When a draining program is to be looked at again.
    pub(in crate::engine) fn drain_due(&self) -> Option<Instant> {
        self.is_draining.then(|| Instant::now() + DRAIN_INTERVAL)
    }

    /// Unloads a draining program once no socket with its timers is connecting. Returns whether it has.
    pub(in crate::engine) fn finish_draining(&mut self) -> bool {
        if !self.is_draining || self.restoring.is_some() || self.connecting() != 0 {
            return false;
        }
        if let Err(e) = self.reconciler.unlink() {
            warn!("the program is still attached, but treats no connection: {e}");
            return false;
        }
        self.is_draining = false;
        self.reconciler.thaw();
        info!("no socket with the policies' timers is connecting: the program is removed");
        true
    }

    /// Persist first, so that a crash cannot lose the decision. If it cannot be stored, the
    /// detachment lasts until the daemon ends.
    fn mark_detached(&mut self, by: Caller) {
        let _said = self.detach_mark.set(Some(by));
    }

    fn not_detached(&mut self, error: DatapathError) -> EngineError {
        let _said = self.detach_mark.set(self.detached_by);
        self.reconciler.resume();
        error.into()
    }

    fn detach_answer(&self, links: usize) -> DetachAnswer {
        let removed = Removed {
            links,
            ..Removed::default()
        };
        let connecting = self.connecting();
        let draining = (connecting != 0).then(|| draining(connecting));
        let unsaved = self.detach_mark.problem().cloned();
        DetachAnswer {
            removed,
            by_daemon: true,
            connecting,
            notes: draining.into_iter().chain(unsaved).collect(),
            ..DetachAnswer::default()
        }
    }

    /// Records the detachment, and returns the number of links it removed.
    fn detached(&mut self, by: Caller) -> usize {
        // Watchers wait for the next maps.
        self.events.end();
        let was_attached = self.detached_by.replace(by).is_none();
        let cgroup = &self.reconciler.options().cgroup;
        self.probing.look(cgroup);
        self.probing.sweep(cgroup);
        Cause::asked(by).audit_other("detach");
        info!("detached: no policy is active until rto-agent attach");
        was_attached.into()
    }

    /// Attaches again, with the counters of before unless the maps are new; returns whether they
    /// are, or `None` if the program is attached. [`Self::attached`] follows once that is published.
    pub(in crate::engine) fn attach(&mut self) -> Result<Option<bool>, EngineError> {
        self.check_not_restoring()?;
        let Some(by) = self.detached_by else {
            return Ok(None);
        };
        if !self.reconciler.resolved().config().agent.attach {
            return refused(format!(
                "detached by {by}, which rto-agent attach cannot override: set it to true"
            ));
        }
        self.detach_mark.set(None).map_err(EngineError::Unsaved)?;
        if std::mem::take(&mut self.is_draining) {
            self.reconciler.thaw();
        }
        let maps_are_new = self.reconciler.kernel().is_none();
        if let Err(e) = self.reconciler.attach_detached() {
            self.mark_detached(by);
            return Err(e);
        }
        self.detached_by = None;
        Ok(Some(maps_are_new))
    }

    /// Resumes the jobs after an attachment.
    pub(in crate::engine) fn attached(&mut self, cause: &Cause) {
        self.resume_events();
        self.probing.look(&self.reconciler.options().cgroup);
        cause.audit_other("attach");
        self.apply_to_open(cause);
    }

    /// Detaches the programs and begins to restore sockets. `finish_restore()` completes the
    /// detachment.
    fn begin_restore(&mut self, by: Caller) -> Result<(), EngineError> {
        self.check_can_walk()?;
        self.walks.stop();
        self.events.end();
        if self.walks.is_running() {
            return refused(
                "the walk over open sockets is blocked; try again, or detach without --restore",
            );
        }
        self.mark_detached(by);
        let left = self.drain(Duration::ZERO);
        let walkers = left.and_then(|left| {
            self.is_draining = left != 0;
            self.reconciler.unlink_for_restoring(self.is_draining)
        });
        let walkers = match walkers {
            Ok(walkers) => walkers,
            Err(e) => {
                self.is_draining = false;
                return Err(self.not_detached(e));
            }
        };
        self.detached(by);
        self.walks.begin(walkers, walk::RESTORE, Vec::new());
        Ok(())
    }

    /// When [`Self::finish_restore`] is due at the latest.
    pub(in crate::engine) fn restore_deadline(&self) -> Option<Instant> {
        Some(self.restoring.as_ref()?.deadline)
    }

    /// Completes a detachment once its walk has ended, or has taken too long.
    pub(in crate::engine) fn finish_restore(&mut self) -> Option<Answer> {
        let over = |restoring: &Restoring| Instant::now() >= restoring.deadline;
        if self.walks.is_running() && !self.restoring.as_ref().is_some_and(over) {
            return None;
        }
        let Restoring { reply, .. } = self.restoring.take()?;
        let mut restored = WalkView::clone(&self.walks.progress().borrow());
        if self.walks.is_running() {
            self.walks.stop();
            restored.problems.push(format!(
                "not finished after {} s: blocked by a socket that is in use",
                RESTORE_LIMIT.as_secs()
            ));
        }
        let kept = if self.is_draining {
            // The maps stay as they are for the program.
            Ok(None)
        } else if restored.is_complete() {
            self.reconciler.restored().map(|()| None)
        } else {
            Ok(Some(self.reconciler.leave_maps()))
        };
        info!(complete = restored.is_complete(), "restored open sockets");
        let answer = kept.map(|kept| DetachAnswer {
            restored: Some(restored),
            kept,
            ..self.detach_answer(1)
        });
        Some((reply, answer.map_err(EngineError::from)))
    }

    /// If the service manager keeps descriptors, hands it the pinned objects for the next start,
    /// and unpins them. It drops them, and the link with them, when the daemon has ended and is not
    /// restarted. Returns whether it has them.
    pub(super) fn hand_over(&self) -> bool {
        if !systemd::says_it_keeps() {
            return false;
        }
        let pin_dir = &self.reconciler.options().pin_dir;
        // The program is gone as soon as the service manager drops the descriptors.
        if until_connected(pin_dir, DRAIN_LIMIT).is_ok_and(|left| left != 0) {
            return false;
        }
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
                    info!("stopping; the service manager keeps the active policies for a restart");
                }
                kept
            }
            Err(e) => {
                warn!(
                    "the service manager could not take over the active policies; no policy is \
                     active until the next start: {e}"
                );
                false
            }
        }
    }

    /// Refuses other changes while sockets are being restored.
    pub(in crate::engine) fn check_not_restoring(&self) -> Result<(), EngineError> {
        if self.restoring.is_some() {
            return refused("sockets are being restored; try again in a few seconds");
        }
        Ok(())
    }
}

/// What is said of a program that stays for this many connecting sockets.
pub(in crate::engine) fn draining(connecting: u64) -> String {
    let count = counted(
        usize::try_from(connecting).unwrap_or(usize::MAX),
        "connection",
        "connections",
    );
    format!(
        "{count} still connecting with a policy's timers: the program treats no others and is removed when they end"
    )
}

/// The same where no daemon is left to remove it.
#[must_use]
pub fn left_draining(connecting: u64) -> String {
    let count = counted(
        usize::try_from(connecting).unwrap_or(usize::MAX),
        "connection",
        "connections",
    );
    format!(
        "{count} still connecting with a policy's timers: the program stays attached for them and treats no others; \
         the next start or rto-agent detach removes it"
    )
}
