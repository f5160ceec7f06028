//! What is in the kernel: the maps, as last read or written, and the attachment. A failed write is
//! rolled back.

use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use rto_agent_core::{
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
    audit::Change,
    comparison::{Comparison, Part, compare},
    desired::Resolved,
    detachment::draining,
    error::EngineError,
    memory::{self, Need},
    snapshot::Shared,
};
use crate::problem::Problem;

/// The problem shown while the maps differ.
const DIFFERS: &str = "the kernel's maps differ from the desired state";

/// The number of changes that are logged individually.
const WORDS: usize = 12;

/// Opens the kernel.
pub(super) type Open = Arc<dyn Fn(Options) -> Result<Box<dyn Kernel>, DatapathError> + Send + Sync>;

/// The kernel and its content.
pub(super) struct ManagedKernel {
    open: Open,
    shared: Arc<Shared>,
    /// Absent after [`ManagedKernel::leave_maps`]. Written through [`ManagedKernel::writer`] only.
    kernel: Option<Box<dyn Kernel>>,
    /// The maps are not changed while sockets are restored, as they hold the sockets' former options,
    /// and while the program drains. [`ManagedKernel::resume`] writes the changes of meanwhile.
    pub(super) is_frozen: bool,
    pub(super) options: Options,
    pub(super) found: Found,
    /// What the maps hold, as last read or written.
    pub(super) maps: MapState,
    /// Why the maps differ from the desired state, if they do.
    pub(super) out_of_sync: Option<String>,
    /// Changes of the maps by other processes, by kind.
    pub(super) differences: BTreeMap<String, u64>,
    /// Why the last repair of the attachment failed.
    broken: Problem,
    /// Programs and tries were re-created since the last snapshot.
    pub(super) renewed: bool,
    /// All maps were re-created since the last snapshot, and count from 0.
    pub(super) maps_are_new: bool,
    /// Maps without a program were left, because sockets' former options are still in them.
    pub(super) has_left_maps: bool,
}

impl ManagedKernel {
    /// Opens the kernel for a desired state, which the caller writes. Also returns whether the program of an earlier run
    /// stays for connecting sockets.
    pub(super) fn open(
        (open, shared): (Open, Arc<Shared>),
        options: Options,
        resolved: &Resolved,
        is_detached: bool,
    ) -> Result<(Self, bool), DatapathError> {
        // A daemon that was killed while detaching, or that stopped while sockets were connecting, has left a link.
        let is_draining = is_detached && drain(&options.pin_dir, Duration::ZERO)? != 0;
        if is_detached && !is_draining {
            remove_links(&options.pin_dir)?;
        }
        // Opening may already write.
        shared.begin();
        let kernel = open(Options {
            max_entries: resolved.room(),
            ..options
        })?;
        let managed = Self {
            open,
            shared,
            options: kernel.options().clone(),
            found: kernel.found(),
            maps: kernel.read()?,
            kernel: Some(kernel),
            is_frozen: is_draining,
            out_of_sync: None,
            differences: BTreeMap::new(),
            broken: Problem::default(),
            renewed: false,
            maps_are_new: false,
            has_left_maps: false,
        };
        Ok((managed, is_draining))
    }

    /// Begins a change of the kernel, which ends with the next snapshot.
    fn writer(&mut self) -> Option<&mut Box<dyn Kernel>> {
        let kernel = self.kernel.as_mut()?;
        self.shared.begin();
        Some(kernel)
    }

    /// The writes that turn the content of the maps into a resolved state.
    ///
    /// # Errors
    ///
    /// [`EngineError::is_refusal`] if there is no memory for them.
    pub(super) fn plan(&self, next: &Resolved) -> Result<Plan, EngineError> {
        progress::checkpoint()?;
        let plan = Plan::between(&self.maps, &next.maps);
        progress::checkpoint()?;
        self.check_memory(&plan, next)?;
        Ok(plan)
    }

    /// Describes a plan, against the content `before`.
    pub(super) fn describe(&self, plan: &Plan, before: &MapState, next: &Resolved) -> Change {
        let summary = if self.maps == *before {
            ChangeSummary::of(plan, before, &next.maps)
        } else {
            ChangeSummary::between(before, &next.maps)
        };
        Change {
            summary,
            detail: plan.describe(WORDS, before, |name| settings_text(next.effects(name))),
            unsaved: None,
        }
    }

    /// Writes a state that was in force before, or that the next start has found.
    pub(super) fn write(&mut self, next: &Resolved) -> Result<Change, EngineError> {
        let plan = self.plan(next)?;
        let change = self.describe(&plan, &self.maps, next);
        self.apply(&plan, next)?;
        Ok(change)
    }

    /// The kernel has a change that could not be saved. The next repair writes the previous state
    /// again.
    pub(super) fn not_back(&mut self, unsaved: std::io::Error, back: EngineError) -> EngineError {
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
    pub(super) fn apply(&mut self, plan: &Plan, next: &Resolved) -> Result<(), EngineError> {
        let begin = Instant::now();
        let room = self.options.max_entries.max(next.room());
        let Some(kernel) = self.kernel.as_mut().filter(|_| !self.is_frozen) else {
            self.options.max_entries = room;
            return Ok(());
        };
        self.shared.begin();
        let cause = match kernel.apply(next.room(), &self.maps, plan, &next.maps) {
            Ok(renewed) => {
                debug!(written = ?begin.elapsed(), "maps written");
                self.renewed |= renewed;
                self.maps.clone_from(&next.maps);
                self.out_of_sync = None;
                self.options.max_entries = room;
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
            let back = Plan::between(&actual, &self.maps);
            kernel.apply(0, &actual, &back, &self.maps)
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
                let state = match kernel.read() {
                    Ok(actual) => {
                        let text = maps_after_failed_rollback(&ChangeSummary::between(
                            &self.maps, &actual,
                        ));
                        self.maps = actual;
                        text
                    }
                    Err(_) => "the kernel's maps cannot be read".to_owned(),
                };
                Err(EngineError::OutOfSync { cause, undo, state })
            }
        }
    }

    /// Sets the values that the program assumes where it cannot query a socket.
    pub(super) fn set_host_defaults(&mut self, host: HostFacts) {
        if host.defaults() == self.options.host_defaults {
            return;
        }
        self.options.host_defaults = host.defaults();
        if let Some(kernel) = self.writer()
            && let Err(e) = kernel.set_host_defaults(host.defaults())
        {
            error!("the program uses outdated settings of the host: {e}");
        }
    }

    pub(super) fn attach(&mut self) -> Result<(), DatapathError> {
        self.writer().map_or(Ok(()), |kernel| kernel.attach())
    }

    /// Attaches again after [`ManagedKernel::unlink`]; opens the kernel again after [`ManagedKernel::leave_maps`].
    pub(super) fn attach_detached(&mut self, resolved: &Resolved) -> Result<(), EngineError> {
        if self.reader().is_none_or(|reader| reader.has_frozen_map()) {
            self.reopen()?;
        }
        self.rewrite(resolved)?;
        Ok(self.attach()?)
    }

    /// Opens the kernel again, which creates the maps that are missing or frozen. The program
    /// stays attached until it is replaced.
    fn reopen(&mut self) -> Result<(), EngineError> {
        self.shared.begin();
        let kernel = (self.open)(self.options.clone())?;
        self.maps = kernel.read()?;
        self.renewed = true;
        self.maps_are_new |= matches!(kernel.found(), Found::Nothing | Found::Replaced);
        self.kernel = Some(kernel);
        self.has_left_maps = false;
        Ok(())
    }

    /// Compares the kernel's maps with the desired state; [`ManagedKernel::repair`] corrects a difference.
    pub(super) fn verify(&mut self, resolved: &Resolved) -> Differences {
        let kernel = self.kernel.as_ref().filter(|_| !self.is_frozen);
        let Some(kernel) = kernel else {
            return Differences::default();
        };
        let compared = compare(kernel.reader().as_ref(), &resolved.maps, Part::ALL);
        let read = compared.and_then(|Comparison { differences, .. }| {
            let found = (!differences.is_empty())
                .then(|| kernel.read())
                .transpose()?;
            Ok((differences, found))
        });
        match read {
            Ok((differences, None)) => {
                self.out_of_sync = None;
                // Both tables are equal now: shares one, to save memory.
                self.maps.clone_from(&resolved.maps);
                differences
            }
            Ok((differences, Some(found))) => {
                self.maps = found;
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
    pub(super) fn repair(&mut self, resolved: &Resolved) -> Option<Change> {
        let attached = self.attach_again(resolved);
        if self.out_of_sync.is_none() {
            return attached;
        }
        match self.rewrite(resolved) {
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

    /// Attaches again what another process detached, and restores missing pins; creates maps that
    /// another process has frozen again, with the program that uses them. The entries are
    /// unchanged, but connections may have begun without a policy.
    fn attach_again(&mut self, resolved: &Resolved) -> Option<Change> {
        let reader = self.reader()?;
        if !reader.missing_stats().is_empty() {
            self.writer()?.retry_statistics();
        }
        let Some(problem) = reader.attachment().problem else {
            self.broken = Problem::default();
            return None;
        };
        let (attached, done, doing) = if reader.has_frozen_map() {
            let attached = self.attach_detached(resolved);
            (attached, "maps created again", "creating the maps again")
        } else {
            let attached = self.attach().map_err(EngineError::from);
            (attached, "attached again", "attaching again")
        };
        if let Err(e) = attached {
            let broken = format!("{problem}; {doing} failed: {e}");
            self.broken.becomes(Some(broken), |text| error!("{text}"));
            return None;
        }
        warn!(problem, "{done}");
        self.broken = Problem::default();
        Some(Change {
            detail: format!("{done}: {problem}"),
            ..Change::default()
        })
    }

    /// After a detachment that failed: connections get their policies' timers and SYN schedules again.
    pub(super) fn resume(&mut self, resolved: &Resolved) {
        if let Err(e) = self.rewrite(resolved) {
            error!("the kernel's maps are out of sync after a failed detachment: {e}");
        }
    }

    fn rewrite(&mut self, resolved: &Resolved) -> Result<Change, EngineError> {
        if !self.is_frozen
            && let Some(kernel) = self.writer()
        {
            kernel.restore_tables()?;
            self.maps = kernel.read()?;
        }
        self.write(resolved)
    }

    /// Detaches the programs. The maps stay, with their counters, and follow changes.
    pub(super) fn unlink(&mut self) -> Result<(), DatapathError> {
        match self.writer() {
            Some(kernel) => kernel.unlink(),
            None => self.detach().map(drop),
        }
    }

    /// Detaches the programs, if attached and not draining, and returns the walkers that restore the sockets' former
    /// options. The maps are unchanged until [`ManagedKernel::restored`] or
    /// [`ManagedKernel::leave_maps`].
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
            self.shared.begin();
            kernel.unlink()?;
        }
        self.is_frozen = true;
        Ok(vec![walker])
    }

    /// Drops the kernel; the program stays attached with its pins, for connecting sockets.
    pub(super) fn leave_draining(&mut self) {
        self.forget();
        self.kernel = None;
    }

    /// All sockets are restored: the maps follow changes again.
    pub(super) fn restored(&mut self, resolved: &Resolved) -> Result<(), DatapathError> {
        self.is_frozen = false;
        if self.has_left_maps {
            self.detach()?;
        }
        self.resume(resolved);
        Ok(())
    }

    /// Drops the kernel that [`ManagedKernel::unlink_for_restoring`] detached and leaves the maps, which
    /// hold the sockets' former options; returns their directory.
    pub(super) fn leave_maps(&mut self) -> PathBuf {
        self.forget();
        self.kernel = None;
        self.is_frozen = false;
        self.has_left_maps = true;
        self.options.pin_dir.clone()
    }

    /// Removes everything from the kernel.
    pub(super) fn detach(&mut self) -> Result<Removed, DatapathError> {
        self.forget();
        self.has_left_maps = false;
        match self.kernel.take() {
            Some(kernel) => {
                self.shared.begin();
                kernel.detach()
            }
            None => remove_pins(&self.options.pin_dir),
        }
    }

    /// Clears the state of a kernel that is no longer managed.
    fn forget(&mut self) {
        self.maps = MapState::default();
        self.out_of_sync = None;
        self.broken = Problem::default();
    }

    pub(super) fn kernel(&self) -> Option<&dyn Kernel> {
        self.kernel.as_deref()
    }

    pub(super) fn reader(&self) -> Option<Arc<dyn KernelReader>> {
        self.kernel.as_ref().map(|kernel| kernel.reader())
    }

    pub(super) fn problems(&self) -> impl Iterator<Item = &String> {
        self.out_of_sync.iter().chain(self.broken.text())
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
fn maps_after_failed_rollback(differs: &ChangeSummary) -> String {
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
