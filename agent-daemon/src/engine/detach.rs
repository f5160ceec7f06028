//! `rto-agent detach` and `attach`. A detachment lasts until it is undone: [`DetachMark`] keeps it over restarts, upgrades
//! and reboots.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use rto_agent_core::wire::{
    kernel::Removed,
    types::{Caller, ChangeAnswer, DetachAnswer, DetachRequest},
};
use rto_agent_kernel::datapath::{DatapathError, NewConnections, handover};
use tracing::{info, warn};

use super::{Engine, EngineError, Reply, audit::Cause, document::Document, jobs::walk, systemd};
use crate::problem::Problem;

/// Limit of `detach --restore`: shorter than its client waits.
const RESTORE_LIMIT: Duration = Duration::from_secs(60);

pub(super) const FILE: &str = "detached.json";
const FORMAT: u32 = 1;

/// Remembers in `persistent_dir` which user has detached the daemon of a configuration file.
pub struct DetachMark {
    document: Document,
    /// Why the file is older than the state in force.
    problem: Problem,
}

impl DetachMark {
    /// The mark in this `persistent_dir`.
    #[must_use]
    pub fn new(dir: &Path, config_path: &Path) -> Self {
        let owner = config_path.to_string_lossy().into_owned();
        Self {
            document: Document::new(dir, FILE, FORMAT, owner),
            problem: Problem::default(),
        }
    }

    /// The user that has detached the daemon, if any.
    pub(super) fn load(&mut self) -> std::io::Result<Option<Caller>> {
        let (by, lost) = self.document.load::<Option<Caller>>()?;
        if let Some(why) = lost {
            warn!("it is unknown whether the policies were detached on purpose: {why}");
        }
        Ok(by.flatten())
    }

    /// Stores which user has detached the daemon, or `None` for attached.
    pub fn set(&mut self, by: Option<Caller>) -> std::io::Result<()> {
        // Not stored: the next start reads `attach` from the configuration again.
        let saved = self
            .document
            .write(&by.filter(|by| *by != Caller::CONFIGURATION));
        let problem = saved.as_ref().err().map(|e| {
            format!("{e}; until it is saved, a restart returns to the state saved before")
        });
        self.problem.becomes(problem, |text| warn!("{text}"));
        saved
    }

    /// Stores the mark again if that failed or the file was removed.
    pub(super) fn retry(&mut self, by: Option<Caller>) {
        let is_gone =
            || by.is_some_and(|by| by != Caller::CONFIGURATION) && !self.document.path().exists();
        if self.problem().is_some() || is_gone() {
            let _said = self.set(by);
        }
    }

    /// Why the file is older than the state in force.
    pub(super) fn problem(&self) -> Option<&String> {
        self.problem.text()
    }
}

/// A detachment whose sockets are being restored.
pub(super) struct Restoring {
    reply: Reply<DetachAnswer>,
    pub(super) deadline: Instant,
}

/// Why a request that needs an attached program is refused.
pub(super) const DETACHED: &str = "no policy is active; run rto-agent attach to activate them";

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
        self.mark_detached(by);
        self.walks.stop();
        self.keep_experiments();
        self.end_schedules(NewConnections::LeftAlone);
        // The thread loads a program over the pins that are about to be removed.
        self.events.end();
        if let Err(e) = self.reconciler.unlink() {
            return Err(self.not_detached(e));
        }
        let links = self.detached(by);
        Ok(self.detach_answer(links))
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
        DetachAnswer {
            removed,
            by_daemon: true,
            notes: self.detach_mark.problem().cloned().into_iter().collect(),
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

    /// Attaches or detaches as `attach` in `[agent]` of the new files says.
    pub(super) fn follow_attach(&mut self, cause: &Cause) -> Result<(), EngineError> {
        match (
            self.reconciler.resolved().config().agent.attach,
            self.detached_by,
        ) {
            (false, None) => self.detach_now(Caller::CONFIGURATION).map(drop),
            (true, Some(Caller::CONFIGURATION)) => self.attach(cause).map(drop),
            _ => Ok(()),
        }
    }

    /// `rto-agent attach`: ends a detachment. The counters continue.
    pub(super) fn attach(&mut self, cause: &Cause) -> Result<ChangeAnswer, EngineError> {
        self.check_not_restoring()?;
        let mut answer = ChangeAnswer::default();
        let Some(by) = self.detached_by else {
            answer.notes.push("already attached".to_owned());
            return Ok(answer);
        };
        if !self.reconciler.resolved().config().agent.attach {
            return Err(EngineError::Refused(format!(
                "detached by {by}, which rto-agent attach cannot override: set it to true"
            )));
        }
        self.detach_mark.set(None).map_err(EngineError::Unsaved)?;
        let maps_are_new = self.reconciler.kernel().is_none();
        if let Err(e) = self.reconciler.attach_detached() {
            self.mark_detached(by);
            return Err(e);
        }
        self.detached_by = None;
        if maps_are_new {
            self.maps_are_new();
        } else {
            self.renew_lease();
        }
        self.publish();
        self.resume_events();
        self.probing.look(&self.reconciler.options().cgroup);
        answer.notes.push("attached again".to_owned());
        cause.audit_other("attach");
        self.apply_to_open(cause);
        Ok(answer)
    }

    /// Detaches the programs and begins to restore sockets. `finish_restore()` completes the
    /// detachment.
    fn begin_restore(&mut self, by: Caller) -> Result<(), EngineError> {
        self.check_can_walk()?;
        self.walks.stop();
        self.events.end();
        if self.walks.is_running() {
            return Err(EngineError::Refused(
                "the walk over open sockets is blocked; try again, or detach without --restore"
                    .to_owned(),
            ));
        }
        self.mark_detached(by);
        self.keep_experiments();
        self.end_schedules(NewConnections::LeftAlone);
        let walkers = match self.reconciler.unlink_for_restoring() {
            Ok(walkers) => walkers,
            Err(e) => return Err(self.not_detached(e)),
        };
        self.detached(by);
        self.walks.begin(walkers, walk::RESTORE, Vec::new());
        Ok(())
    }

    /// Ends SYN schedules before the program is unloaded, or may be.
    pub(super) fn end_schedules(&self, new: NewConnections) {
        if self.reconciler.kernel().is_some() {
            let pin_dir = &self.reconciler.options().pin_dir;
            walk::end_schedules(pin_dir, new, walk::SCHEDULES_LIMIT);
        }
    }

    /// Completes a detachment once its walk has ended, or has taken too long.
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
                "not finished after {} s: blocked by a socket that is in use",
                RESTORE_LIMIT.as_secs()
            ));
        }
        let kept = if restored.is_complete() {
            self.reconciler.restored().map(|()| None)
        } else {
            Ok(Some(self.reconciler.leave_maps()))
        };
        info!(complete = restored.is_complete(), "restored open sockets");
        self.publish();
        let answer = kept.map(|kept| DetachAnswer {
            restored: Some(restored),
            kept,
            ..self.detach_answer(1)
        });
        drop(reply.send(answer.map_err(EngineError::from)));
    }

    /// If the service manager keeps descriptors, hands it the pinned objects for the next start,
    /// and unpins them. It drops them, and the link with them, when the daemon has ended and is not
    /// restarted. Returns whether it has them.
    pub(super) fn hand_over(&self) -> bool {
        if !systemd::says_it_keeps() {
            return false;
        }
        let pin_dir = &self.reconciler.options().pin_dir;
        self.end_schedules(NewConnections::Treated);
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
    pub(super) fn check_not_restoring(&self) -> Result<(), EngineError> {
        if self.restoring.is_some() {
            return Err(EngineError::Refused(
                "sockets are being restored; try again in a few seconds".to_owned(),
            ));
        }
        Ok(())
    }
}
