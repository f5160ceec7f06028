//! `rto-agent detach` and `attach`. A detachment lasts until it is undone, see
//! [`DetachMark`](crate::engine::DetachMark).

use std::time::{Duration, Instant};

use rto_agent_core::wire::{
    kernel::Removed,
    types::{Caller, DetachAnswer, DetachRequest, NotLasting, WalkView},
};
use rto_agent_kernel::datapath::{
    DatapathError, OtherProgram, connecting, drain, handover, remove_pins, until_connected,
};
use tracing::{info, warn};

use super::{Apply, DRAIN_LIMIT, Restoring, until};
use crate::engine::{
    EngineError, Reply,
    audit::Cause,
    draining::{draining, left_draining},
    error::refused,
    jobs::walk,
    systemd,
};

/// Limit of `detach --restore`: shorter than its client waits.
const RESTORE_LIMIT: Duration = Duration::from_secs(60);
/// How often a draining program is looked at.
const DRAIN_INTERVAL: Duration = Duration::from_secs(1);

/// Why `rto-agent attach` is refused where the configuration detaches.
const ATTACH_IS_OFF: &str =
    "attach = false in [agent] detaches this host: set it to true; nothing was changed";

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
        if let Err(refusal) = self.check_not_restoring() {
            return Some((reply, Err(refusal)));
        }
        let restores = self.reconciler.kernel().is_some() || self.reconciler.has_kept_maps();
        if !request.restore || !restores {
            return Some((reply, self.detach_now(by)));
        }
        match self.begin_restore(by) {
            Ok(not_lasting) => {
                self.restoring = Some(Restoring {
                    reply,
                    deadline: Instant::now() + RESTORE_LIMIT,
                    not_lasting,
                });
                None
            }
            Err(refusal) => Some((reply, Err(refusal))),
        }
    }

    /// Detaches the program at once.
    pub(in crate::engine) fn detach_now(
        &mut self,
        by: Caller,
    ) -> Result<DetachAnswer, EngineError> {
        let not_lasting = self.detach_mark.set(by);
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
        let mut answer = detach_answer(links, not_lasting, self.connecting());
        self.detach_others(&mut answer);
        Ok(answer)
    }

    fn detach_others(&mut self, answer: &mut DetachAnswer) {
        self.look_at_programs();
        remove_others(self.probing.others(), answer);
        self.look_at_programs();
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
        if !self.is_draining || self.restoring.is_some() {
            return false;
        }
        match connecting(&self.reconciler.options().pin_dir) {
            Ok(0) => {}
            Ok(_) => return false,
            Err(e) => {
                warn!("whether sockets are connecting is unknown: {e}");
                return false;
            }
        }
        if let Err(e) = self.reconciler.unlink() {
            warn!("the program is still attached, but treats no connection: {e}");
            return false;
        }
        self.is_draining = false;
        self.reconciler.thaw();
        self.reconciler.resume();
        info!("no socket with the policies' timers is connecting: the program is removed");
        true
    }

    fn not_detached(&mut self, error: DatapathError) -> EngineError {
        let back = match self.detached_by {
            Some(by) => {
                self.detach_mark.retry(Some(by));
                Ok(())
            }
            None => self.detach_mark.clear(),
        };
        if let Err(e) = back {
            warn!("the next start is detached, though this detachment failed: {e}");
        }
        self.reconciler.resume();
        error.into()
    }

    /// Records the detachment, and returns the number of links it removed.
    fn detached(&mut self, by: Caller) -> usize {
        // Watchers wait for the next maps.
        self.events.end();
        let was_attached = self.detached_by.replace(by).is_none();
        let cgroup = &self.reconciler.options().cgroup;
        self.probing.sweep(cgroup);
        Cause::asked(by).audit_other("detach");
        info!("detached: no policy is active until rto-agent attach");
        was_attached.into()
    }

    /// Attaches again, with the counters of before unless the maps are new; returns whether the
    /// program was detached. [`Self::attached`] follows once that is published.
    pub(in crate::engine) fn attach(&mut self) -> Result<bool, EngineError> {
        self.check_not_restoring()?;
        let Some(by) = self.detached_by else {
            return Ok(false);
        };
        if !self.reconciler.resolved().config().agent.attach {
            return refused(ATTACH_IS_OFF);
        }
        self.detach_mark.clear().map_err(EngineError::Unsaved)?;
        self.reconciler.thaw();
        if let Err(e) = self.reconciler.attach_detached() {
            let _ = self.detach_mark.set(by); // Its problem says how it went.
            if self.is_draining {
                // Policies may have been written again.
                if let Err(e) = self.drain(Duration::ZERO) {
                    warn!("the program may still treat new connections: {e}");
                }
                self.reconciler.freeze();
            }
            return Err(e);
        }
        self.is_draining = false;
        self.detached_by = None;
        Ok(true)
    }

    /// Resumes the jobs after an attachment.
    pub(in crate::engine) fn attached(&mut self, cause: &Cause) {
        self.resume_events();
        self.look_at_programs();
        cause.audit_other("attach");
        self.apply_to_open(cause);
    }

    /// Detaches the programs and begins to restore sockets. `finish_restore()` completes the
    /// detachment.
    fn begin_restore(&mut self, by: Caller) -> Result<Option<NotLasting>, EngineError> {
        self.check_can_walk()?;
        self.walks.stop();
        self.events.end();
        if self.walks.is_running() {
            return refused(
                "the walk over open sockets is blocked; try again, or detach without --restore",
            );
        }
        let not_lasting = self.detach_mark.set(by);
        let was_draining = self.is_draining;
        let left = self.drain(Duration::ZERO);
        let walkers = left.and_then(|left| {
            self.is_draining = left != 0;
            self.reconciler.unlink_for_restoring(self.is_draining)
        });
        let walkers = match walkers {
            Ok(walkers) => walkers,
            Err(e) => {
                self.is_draining = was_draining;
                return Err(self.not_detached(e));
            }
        };
        self.detached(by);
        self.walks.begin(walkers, walk::RESTORE, Vec::new());
        Ok(not_lasting)
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
        let Restoring {
            reply, not_lasting, ..
        } = self.restoring.take()?;
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
            let pin_dir = &self.reconciler.options().pin_dir;
            Ok((!restored.is_complete()).then(|| pin_dir.clone()))
        } else if restored.is_complete() {
            self.reconciler.restored().map(|()| None)
        } else {
            Ok(Some(self.reconciler.leave_maps()))
        };
        info!(complete = restored.is_complete(), "restored open sockets");
        let answer = kept.map(|kept| {
            let mut answer = DetachAnswer {
                restored: Some(restored),
                kept,
                ..detach_answer(1, not_lasting, self.connecting())
            };
            self.detach_others(&mut answer);
            answer
        });
        Some((reply, answer.map_err(EngineError::from)))
    }

    /// If the service manager keeps descriptors, hands it the pinned objects for the next start,
    /// and unpins them. It drops them, and the link with them, when the daemon has ended and is not
    /// restarted. Returns whether it has them.
    pub(super) fn hand_over(&self, deadline: Instant) -> bool {
        if !systemd::says_it_keeps() {
            return false;
        }
        let pin_dir = &self.reconciler.options().pin_dir;
        // The program is gone as soon as the service manager drops the descriptors.
        if until_connected(pin_dir, until(deadline)).is_ok_and(|left| left != 0) {
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

/// Removes programs of other pin directories that no daemon manages, and notes what is left.
pub fn remove_others(others: &[OtherProgram], answer: &mut DetachAnswer) {
    for other in others {
        let Some(pin_dir) = other.pin_dir.as_ref().filter(|_| !other.is_managed) else {
            answer.notes.push(format!(
                "{other}: another daemon seems to manage it, and it is left"
            ));
            continue;
        };
        match drain(pin_dir, DRAIN_LIMIT) {
            Ok(0) => {}
            Ok(connecting) => {
                answer
                    .notes
                    .push(format!("{other}: {}", left_draining(connecting)));
                continue;
            }
            Err(e) => {
                answer.notes.push(format!("{other}, and is left: {e}"));
                continue;
            }
        }
        match remove_pins(pin_dir) {
            Ok(Removed {
                generations,
                links,
                left,
            }) => {
                answer.removed.links += links;
                answer.removed.generations.extend(generations);
                answer.removed.left.extend(left);
                answer
                    .notes
                    .push(format!("{other}: it was detached as well"));
            }
            Err(e) => answer.notes.push(format!("{other}, and is left: {e}")),
        }
    }
}

fn detach_answer(links: usize, not_lasting: Option<NotLasting>, connecting: u64) -> DetachAnswer {
    DetachAnswer {
        connecting,
        notes: (connecting != 0)
            .then(|| draining(connecting))
            .into_iter()
            .collect(),
        removed: Removed {
            links,
            ..Removed::default()
        },
        by_daemon: true,
        not_lasting,
        ..DetachAnswer::default()
    }
}
