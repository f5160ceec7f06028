//! The only way to the kernel: the desired state is resolved, planned against the content of the
//! maps, and written; a failed write is rolled back.

use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use rto_agent_core::{
    config::save,
    policy::{
        HostFacts,
        compile::settings_text,
        differences::Differences,
        plan::{ChangeSummary, MapState, Plan},
    },
    progress,
    wire::kernel::{Attachment, Found, Removed},
};
use rto_agent_kernel::{
    datapath::{
        DatapathError, Kernel, KernelReader, Options, drain, remove_links, remove_pins, walk,
        walk::{Mode, Walker},
    },
    kernel::cgroup,
};
use tracing::{debug, error, info, warn};

use super::{
    EngineError, Open,
    audit::Change,
    changing::SharedKernel,
    desired::{Desired, Resolved},
    draining::draining,
    error::{in_words, refused},
    memory::{self, Need},
    snapshot::Shared,
    store::RuntimeStore,
};
use crate::problem::Problem;

/// The problem shown while the maps differ.
const DIFFERS: &str = "the kernel's maps differ from the desired state";

/// The number of changes that are logged individually.
const WORDS: usize = 12;

/// What must be on disk before a change is answered.
pub(super) enum Persist {
    /// The runtime entries.
    Runtime,
    /// An edit of the file of saved entries.
    File(save::Edit),
    /// Nothing: changed runtime entries are saved after the kernel has the change, and retried
    /// until that works.
    Later,
}

/// The kernel, its desired state, and its content.
pub(super) struct Reconciler {
    open: Open,
    shared: Arc<Shared>,
    /// Absent after [`Reconciler::leave_maps`].
    kernel: Option<SharedKernel>,
    /// The maps are not changed while sockets are restored: they hold the sockets' former options.
    is_frozen: bool,
    options: Options,
    found: Found,
    /// The desired state in force, or to be in force once attached again.
    resolved: Arc<Resolved>,
    /// What the maps hold, as last read or written.
    held: MapState,
    /// Why the maps differ from the desired state, if they do.
    out_of_sync: Option<String>,
    /// Changes of the maps by other processes, by kind.
    differences: BTreeMap<String, u64>,
    /// Why the last repair of the attachment failed.
    broken: Problem,
    /// Programs and tries were re-created.
    renewed: bool,
    /// All maps were re-created, and count from 0.
    maps_are_new: bool,
    /// Maps without a program were left, see [`Reconciler::leave_maps`].
    kept: bool,
    store: RuntimeStore,
}

impl Reconciler {
    /// Opens the kernel, applies the desired state and attaches, unless detached. Also returns whether the program of an
    /// earlier run stays for connecting sockets.
    pub(super) fn start(
        (open, shared): (Open, Arc<Shared>),
        options: Options,
        desired: Desired,
        store: RuntimeStore,
        is_detached: bool,
    ) -> Result<(Self, Change, bool), EngineError> {
        let resolved = Arc::new(desired.resolve()?);
        // A daemon that was killed while detaching, or that stopped while sockets were connecting, has left a link.
        let is_draining = is_detached && drain(&options.pin_dir, Duration::ZERO)? != 0;
        if is_detached && !is_draining {
            remove_links(&options.pin_dir)?;
        }
        let options = Options {
            max_entries: resolved.room(),
            ..options
        };
        let kernel = SharedKernel::open(&open, options, shared.clone())?;
        let held = kernel.read()?;
        let mut reconciler = Self {
            open,
            shared,
            options: kernel.options().clone(),
            found: kernel.found(),
            kernel: Some(kernel),
            is_frozen: is_draining,
            resolved: resolved.clone(),
            held: held.clone(),
            out_of_sync: None,
            differences: BTreeMap::new(),
            broken: Problem::default(),
            renewed: false,
            maps_are_new: false,
            kept: false,
            store,
        };
        let change = reconciler.write(&held, &resolved)?;
        if !is_detached {
            reconciler.attach()?;
        }
        Ok((reconciler, change, is_draining))
    }

    /// Applies a desired state and persists its source, or changes nothing.
    ///
    /// # Errors
    ///
    /// [`EngineError::is_refusal`] if this host does not support it. Otherwise the change was
    /// rolled back, or [`Reconciler::problems`] reports that the rollback failed.
    pub(super) fn reconcile(
        &mut self,
        next: Desired,
        persist: &Persist,
    ) -> Result<Change, EngineError> {
        let resolved = Arc::new(next.resolve()?);
        if matches!(persist, Persist::Runtime)
            && let Some(reason) = resolved.leaves_out(&self.resolved)
        {
            return refused(reason);
        }
        progress::checkpoint()?;
        let before = self.resolved.clone();
        let runtime_changes = resolved.desired.runtime != before.desired.runtime;
        let edit = match persist {
            Persist::File(edit) => Some((edit, edit.stage()?)),
            Persist::Runtime | Persist::Later => None,
        };
        let runtime = match persist {
            Persist::Runtime => true,
            Persist::File(_) => runtime_changes,
            Persist::Later => false,
        };
        let runtime = runtime.then(|| self.store.stage(&resolved.desired.runtime));
        let runtime = runtime.transpose().map_err(EngineError::Unsaved)?;
        let mut change = self.write(&before.maps, &resolved)?;
        // The edit comes first: after a crash between the two, the runtime entries that it replaces
        // are still in force.
        let saved = match (edit, runtime) {
            (None, None) => Ok(None),
            (None, Some(runtime)) => self.store.commit(runtime).map(|()| None),
            (Some((edit, draft)), runtime) => edit.commit(draft).map(|()| runtime),
        };
        let runtime = match saved {
            Ok(runtime) => runtime,
            Err(unsaved) => {
                return Err(match self.write(&resolved.maps, &before) {
                    Ok(_) => EngineError::Unsaved(unsaved),
                    Err(back) => self.not_back(unsaved, back),
                });
            }
        };
        let is_saved = runtime.is_some_and(|draft| self.store.commit(draft).is_ok());
        self.resolved = resolved;
        if self.resolved.desired.host != before.desired.host {
            self.set_host_defaults(self.resolved.desired.host);
        }
        if !is_saved && runtime_changes && !matches!(persist, Persist::Runtime) {
            self.store.save(&self.resolved.desired.runtime);
            change.unsaved = self.store.problem();
        }
        Ok(change)
    }

    /// The kernel has a change that could not be saved. The next repair writes the previous state
    /// again.
    fn not_back(&mut self, unsaved: std::io::Error, back: EngineError) -> EngineError {
        let back = match back {
            EngineError::Undone(cause) => cause.to_string(),
            other => other.to_string(),
        };
        self.out_of_sync.get_or_insert_with(|| {
            format!(
                "a change could not be saved ({unsaved}), and its rollback in the kernel \
                     failed: {back}"
            )
        });
        EngineError::NotBack { unsaved, back }
    }

    /// Writes a resolved state to the maps. `before` is the content that the change is described
    /// against.
    fn write(&mut self, before: &MapState, next: &Resolved) -> Result<Change, EngineError> {
        progress::checkpoint()?;
        let begin = Instant::now();
        let plan = Plan::between(&self.held, &next.maps);
        let compared = begin.elapsed();
        progress::checkpoint()?;
        self.check_memory(&plan, next)?;
        let summary = if self.held == *before {
            ChangeSummary::of(&plan, before, &next.maps)
        } else {
            ChangeSummary::between(before, &next.maps)
        };
        let detail = plan.describe(WORDS, before, |name| settings_text(next.effects(name)));
        self.apply(&plan, &next.maps, next.room())?;
        debug!(?compared, written = ?begin.elapsed() - compared, "slow change");
        self.options.max_entries = self.options.max_entries.max(next.room());
        Ok(Change {
            summary,
            detail,
            unsaved: None,
        })
    }

    /// Refuses a change that the maps have no memory for.
    fn check_memory(&self, plan: &Plan, next: &Resolved) -> Result<(), EngineError> {
        if self.kernel.is_none() || self.is_frozen {
            // Nothing is written.
            return Ok(());
        }
        let added = if next.room() > self.options.max_entries {
            // The former tries stay until the new ones are full.
            next.maps.entries.len()
        } else {
            plan.entries_write.len() - plan.entries_repointed
        };
        memory::check(&Need::of_maps(added))
    }

    /// Applies a plan; rolls it back if a write fails.
    fn apply(&mut self, plan: &Plan, desired: &MapState, room: u32) -> Result<(), EngineError> {
        let Some(kernel) = self.kernel.as_mut().filter(|_| !self.is_frozen) else {
            return Ok(());
        };
        let cause = match kernel.change().apply(room, &self.held, plan, desired) {
            Ok(renewed) => {
                self.renewed |= renewed;
                self.held.clone_from(desired);
                self.out_of_sync = None;
                return Ok(());
            }
            Err(DatapathError::Stopped) => {
                // The next start reads the maps, and completes the change or undoes it.
                let text = "the daemon was stopped during a change";
                self.out_of_sync = Some(text.to_owned());
                return Err(EngineError::Interrupted);
            }
            Err(cause) => cause,
        };
        error!("{cause}; rolling back");
        let undone = kernel.read().and_then(|actual| {
            let back = Plan::between(&actual, &self.held);
            kernel.change().apply(0, &actual, &back, &self.held)
        });
        match undone {
            Ok(renewed) => {
                self.renewed |= renewed;
                Err(EngineError::Undone(cause))
            }
            Err(undo) => {
                self.out_of_sync = Some(format!(
                    "the kernel's maps are out of sync: {cause}; the rollback failed as well: \
                     {undo}"
                ));
                let held = match kernel.read() {
                    Ok(actual) => {
                        let text = held(&ChangeSummary::between(&self.held, &actual));
                        self.held = actual;
                        text
                    }
                    Err(_) => "the kernel's maps cannot be read".to_owned(),
                };
                Err(EngineError::OutOfSync { cause, undo, held })
            }
        }
    }

    /// Sets the values that the program assumes where it cannot query a socket.
    pub(super) fn set_host_defaults(&mut self, host: HostFacts) {
        if host.defaults() == self.options.host_defaults {
            return;
        }
        self.options.host_defaults = host.defaults();
        if let Some(kernel) = &mut self.kernel
            && let Err(e) = kernel.change().set_host_defaults(host.defaults())
        {
            error!("the program uses outdated settings of the host: {e}");
        }
    }

    fn attach(&mut self) -> Result<(), DatapathError> {
        self.kernel
            .as_mut()
            .map_or(Ok(()), |kernel| kernel.change().attach())
    }

    /// Attaches again after [`Reconciler::unlink`]; opens the kernel again after [`Reconciler::leave_maps`].
    pub(super) fn attach_detached(&mut self) -> Result<(), EngineError> {
        if self
            .kernel
            .as_ref()
            .is_none_or(|kernel| kernel.reader().has_frozen_map())
        {
            self.reopen()?;
        }
        self.rewrite()?;
        Ok(self.attach()?)
    }

    /// Opens the kernel again, which creates the maps that are missing or frozen. The program
    /// stays attached until it is replaced.
    fn reopen(&mut self) -> Result<(), EngineError> {
        let (options, shared) = (self.options.clone(), self.shared.clone());
        let kernel = SharedKernel::open(&self.open, options, shared)?;
        self.held = kernel.read()?;
        self.renewed = true;
        self.maps_are_new |= matches!(kernel.found(), Found::Nothing | Found::Replaced);
        self.kernel = Some(kernel);
        self.kept = false;
        Ok(())
    }

    /// Compares the kernel's maps with the desired state; [`Reconciler::repair`] corrects a difference.
    pub(super) fn verify(&mut self) -> Differences {
        let kernel = self.kernel.as_ref().filter(|_| !self.is_frozen);
        let Some(kernel) = kernel else {
            return Differences::default();
        };
        let compared = kernel.reader().differences(&self.resolved.maps);
        let read = compared.and_then(|differences| {
            let held = (!differences.is_empty())
                .then(|| kernel.read())
                .transpose()?;
            Ok((differences, held))
        });
        match read {
            Ok((differences, None)) => {
                self.out_of_sync = None;
                // Both tables are equal now: shares one, to save memory.
                self.held.clone_from(&self.resolved.maps);
                differences
            }
            Ok((differences, Some(held))) => {
                self.held = held;
                if self.out_of_sync.is_none() {
                    for (kind, count) in &differences.counts {
                        *self.differences.entry(kind.clone()).or_default() += count;
                    }
                    warn!("another process changed the kernel's maps: {differences}");
                    self.out_of_sync = Some(format!("{DIFFERS}: {differences}"));
                }
                differences
            }
            // The caller ends at its next step.
            Err(DatapathError::Stopped) => Differences::default(),
            Err(e) => {
                let text = format!("the kernel's maps cannot be read: {e}");
                if self.out_of_sync.is_none() {
                    error!("{text}");
                }
                self.out_of_sync = Some(text);
                Differences::default()
            }
        }
    }

    /// Attaches again what another process detached, and rewrites what differs. Returns the change,
    /// if any.
    pub(super) fn repair(&mut self) -> Option<Change> {
        let attached = self.attach_again();
        if self.out_of_sync.is_none() {
            return attached;
        }
        match self.rewrite() {
            Ok(change) => {
                info!("the kernel's maps are in sync again");
                Some(change)
            }
            Err(e) => {
                error!("the kernel's maps are still out of sync: {e}");
                attached
            }
        }
    }

    /// Attaches again what another process detached, and restores missing pins. The entries are
    /// unchanged, but connections may have begun without a policy.
    fn attach_again(&mut self) -> Option<Change> {
        let kernel = self.kernel.as_mut()?;
        if !kernel.reader().missing_stats().is_empty() {
            kernel.change().retry_statistics();
        }
        let problem = kernel.reader().attachment().problem;
        if let Some(problem) = problem
            .as_ref()
            .filter(|_| kernel.reader().has_frozen_map())
        {
            return self.replace_frozen(problem.clone());
        }
        let (attached, broken) = match problem.map(|problem| (kernel.change().attach(), problem)) {
            None => (None, None),
            Some((Ok(()), problem)) => {
                warn!(problem, "attached again");
                let detail = format!("attached again: {problem}");
                let change = Change {
                    detail,
                    ..Change::default()
                };
                (Some(change), None)
            }
            Some((Err(e), problem)) => {
                let broken = format!("{problem}; attaching again failed: {}", in_words(&e));
                (None, Some(broken))
            }
        };
        self.broken.becomes(broken, |text| error!("{text}"));
        attached
    }

    /// Replaces frozen maps, with the program that uses them.
    fn replace_frozen(&mut self, problem: String) -> Option<Change> {
        let (change, broken) = match self.attach_detached() {
            Ok(()) => {
                warn!(problem, "the maps were created again");
                let change = Change {
                    detail: format!("maps created again: {problem}"),
                    ..Change::default()
                };
                (Some(change), None)
            }
            Err(e) => {
                let broken = format!("{problem}; creating the maps again failed: {e}");
                (None, Some(broken))
            }
        };
        self.broken.becomes(broken, |text| error!("{text}"));
        change
    }

    /// After a detachment that failed: connections get their policies' timers and SYN schedules again.
    pub(super) fn resume(&mut self) {
        if let Err(e) = self.rewrite() {
            error!("the kernel's maps are out of sync after a failed detachment: {e}");
        }
    }

    fn rewrite(&mut self) -> Result<Change, EngineError> {
        if let Some(kernel) = self.kernel.as_mut().filter(|_| !self.is_frozen) {
            kernel.change().restore_tables()?;
            self.held = kernel.read()?;
        }
        let (before, resolved) = (self.held.clone(), self.resolved.clone());
        self.write(&before, &resolved)
    }

    /// Detaches the programs. The maps stay, with their counters, and follow changes.
    pub(super) fn unlink(&mut self) -> Result<(), DatapathError> {
        match &mut self.kernel {
            Some(kernel) => kernel.change().unlink(),
            None => self.detach().map(drop),
        }
    }

    /// Detaches the programs, if attached and not draining, and returns the walkers that restore the sockets' former
    /// options. The maps are unchanged until [`Reconciler::restored`] or
    /// [`Reconciler::leave_maps`].
    pub(super) fn unlink_for_restoring(
        &mut self,
        is_draining: bool,
    ) -> Result<Vec<Walker>, DatapathError> {
        let Some(kernel) = &mut self.kernel else {
            return walk::for_restoring(
                &self.options.pin_dir,
                Some(&self.options.cgroup),
                Mode::Restore,
            );
        };
        // First, so that an unavailable walker changes nothing.
        let walker = kernel.walker(Mode::Restore)?;
        if !is_draining {
            kernel.change().unlink()?;
        }
        self.is_frozen = true;
        Ok(vec![walker])
    }

    /// The maps stay as they are while the program drains.
    pub(super) fn freeze(&mut self) {
        self.is_frozen = true;
    }

    /// The maps follow changes again; [`Self::resume`] writes those of meanwhile.
    pub(super) const fn thaw(&mut self) {
        self.is_frozen = false;
    }

    /// Drops the kernel; the program stays attached with its pins, for connecting sockets.
    pub(super) fn leave_draining(&mut self) {
        self.forget();
        self.kernel = None;
    }

    /// All sockets are restored: the maps follow changes again.
    pub(super) fn restored(&mut self) -> Result<(), DatapathError> {
        self.is_frozen = false;
        if self.kept {
            self.detach()?;
        }
        self.resume();
        Ok(())
    }

    /// Drops the kernel that [`Reconciler::unlink_for_restoring`] detached and leaves the maps, which
    /// hold the sockets' former options; returns their directory.
    pub(super) fn leave_maps(&mut self) -> PathBuf {
        self.forget();
        self.kernel = None;
        self.is_frozen = false;
        self.kept = true;
        self.options.pin_dir.clone()
    }

    /// Removes everything from the kernel.
    pub(super) fn detach(&mut self) -> Result<Removed, DatapathError> {
        self.forget();
        self.kept = false;
        match self.kernel.take() {
            Some(kernel) => kernel.detach(),
            None => remove_pins(&self.options.pin_dir),
        }
    }

    /// Clears the state of a kernel that is no longer managed.
    fn forget(&mut self) {
        self.held = MapState::default();
        self.out_of_sync = None;
        self.broken = Problem::default();
    }

    /// Saves the runtime entries again if that failed or the file was removed.
    pub(super) fn retry_save(&mut self) {
        self.store.retry_save(&self.resolved.desired.runtime);
    }

    pub(super) fn options(&self) -> &Options {
        &self.options
    }

    pub(super) fn found(&self) -> Found {
        self.found
    }

    pub(super) fn resolved(&self) -> &Arc<Resolved> {
        &self.resolved
    }

    pub(super) fn desired(&self) -> &Desired {
        &self.resolved.desired
    }

    pub(super) fn kernel(&self) -> Option<&dyn Kernel> {
        self.kernel.as_deref()
    }

    pub(super) fn reader(&self) -> Option<Arc<dyn KernelReader>> {
        self.kernel.as_ref().map(|kernel| kernel.reader())
    }

    pub(super) fn store_problem(&self) -> Option<String> {
        self.store.problem()
    }

    pub(super) fn problems(&self) -> impl Iterator<Item = &String> {
        self.out_of_sync.iter().chain(self.broken.text())
    }

    /// Changes by other processes, by kind.
    pub(super) fn difference_counts(&self) -> &BTreeMap<String, u64> {
        &self.differences
    }

    pub(super) fn in_sync(&self) -> bool {
        self.out_of_sync.is_none()
    }

    /// Whether the maps were left because sockets' former options are still in them.
    pub(super) fn has_kept_maps(&self) -> bool {
        self.kept
    }

    /// Whether all maps were re-created since the last call.
    pub(super) fn take_maps_are_new(&mut self) -> bool {
        std::mem::take(&mut self.maps_are_new)
    }

    /// Whether programs and tries were re-created since the last call.
    pub(super) fn take_renewed(&mut self) -> bool {
        std::mem::take(&mut self.renewed)
    }

    /// The attachment that `status` shows while detached, with the number of sockets for which the program stays.
    pub(super) fn detached(&self, connecting: u64) -> Attachment {
        let detached = "detached on purpose; run rto-agent attach to attach again";
        Attachment {
            problem: Some(match connecting {
                0 => detached.to_owned(),
                _ => format!("{detached}; {}", draining(connecting)),
            }),
            cgroup: self.options.cgroup.clone(),
            is_root: cgroup::is_root(&self.options.cgroup),
            ..Attachment::default()
        }
    }
}

/// Describes the maps' content after a failed rollback, as differences from the previous state.
fn held(differs: &ChangeSummary) -> String {
    let ChangeSummary {
        added,
        changed,
        removed,
        ..
    } = differs;
    format!(
        "the previous policies are active, except for entries added: {added}, changed: {changed}, \
         removed: {removed}"
    )
}

#[cfg(test)]
mod tests;
