//! What the engine owns, and the one function that changes it.

use std::{
    sync::{Arc, mpsc},
    time::{Duration, Instant},
};

use rto_agent_core::{
    config::save,
    policy::plan::ChangeSummary,
    wire::{
        kernel::{Feature, Found, Presence},
        types::{Caller, WalkView, now_s},
    },
};
use rto_agent_kernel::{
    datapath::{KernelReader, Options, StatisticsOptions, connecting, room_for, walk::Mode},
    kernel::features::{self, can_set},
};
use tokio::sync::watch;
use tracing::{info, warn};

use super::{
    audit::{Cause, Change, Source},
    config::EngineConfig,
    control::Control,
    desired::{Desired, Resolved},
    detachment::Detachment,
    error::{EngineError, refused},
    files::{ConfigFiles, load_desired},
    handle::Message,
    jobs::{
        comparing::Comparing,
        events::Events,
        probing::Probing,
        walk::{self, Walks},
    },
    kernel::{ManagedKernel, Open},
    snapshot::{Health, Shared, Snapshot},
    status::status_line,
    store::{LastGood, NOT_ACTIVE, Store},
    systemd::Systemd,
};
use crate::problem::Problem;

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

/// The single writer to the kernel.
pub(super) struct Engine {
    pub(super) config: Arc<EngineConfig>,
    /// The desired state in force, or to be in force once attached again.
    pub(super) resolved: Arc<Resolved>,
    pub(super) kernel: ManagedKernel,
    pub(super) control: Control,
    pub(super) store: Store,
    pub(super) files: ConfigFiles,
    pub(super) detachment: Detachment,
    pub(super) events: Events,
    pub(super) walks: Walks,
    pub(super) probing: Probing,
    pub(super) comparing: Comparing,
    pub(super) problems: Problems,
    pub(super) systemd: Systemd,
    /// The reader of the kernel that was last published.
    pub(super) reader: Option<Arc<dyn KernelReader>>,
    pub(super) snapshots: watch::Sender<Arc<Snapshot>>,
    started: Instant,
    shared: Arc<Shared>,
}

/// Lasting problems that `status` shows.
#[derive(Default)]
pub(super) struct Problems {
    /// Why the policies could not be computed for the host's current settings.
    pub(super) host: Problem,
    /// Why expired entries are still in the kernel.
    pub(super) expiry: Problem,
    /// Why the metrics are not served.
    pub(super) metrics: Problem,
    /// Why SYNs have the kernel's doubling.
    pub(super) unshaped: Problem,
    /// Runtime entries that are left out, with the reasons.
    left_out: Problem,
    /// Decisions that the policies' settings do not allow.
    conflicting: Problem,
}

impl Engine {
    /// Brings the kernel in line with the configuration, attaches, and publishes the first
    /// snapshot.
    ///
    /// # Errors
    ///
    /// If the program cannot be attached. Whatever an earlier run left in force stays in force.
    pub(super) fn start(
        open: Open,
        config: EngineConfig,
        last_good: LastGood,
        messages: &mpsc::Sender<Message>,
        snapshots: watch::Sender<Arc<Snapshot>>,
    ) -> anyhow::Result<Self> {
        let config = Arc::new(config);
        let agent = &config.config.agent;
        let (mut store, learnt) = Store::open(agent, last_good);
        let (desired, lost) = load_desired(&config, &mut store.runtime)?;
        let (mut control, desired) = Control::start(agent, desired, learnt, &mut store.tuning);
        let by_configuration = (!agent.attach).then_some(Caller::CONFIGURATION);
        let detached_by = store.mark.load().or(by_configuration);

        let resolved = Arc::new(desired.resolve()?);
        let starting = snapshots.borrow().clone();
        let opening = (open, starting.shared.clone());
        let (mut kernel, is_draining) =
            ManagedKernel::open(opening, options(&config), &resolved, detached_by.is_some())?;
        let change = kernel.write(&resolved)?;
        if detached_by.is_none() {
            kernel.attach().map_err(EngineError::from)?;
        }
        log_start(&kernel, &resolved, detached_by);
        let cause = Cause::from(Source::Start);
        cause.audit(&change);
        if let Some(warning) = &lost {
            warn!("{warning}");
        }
        match kernel.found {
            Found::Adopted | Found::MapsKept => {}
            Found::Nothing | Found::Replaced => control.maps_are_new(),
        }
        let mut comparing = Comparing::new(messages.clone());
        // The start has read all maps, and has written each difference.
        comparing.all_compared(now_s(), Duration::ZERO);
        let warnings = lost.into_iter().collect();
        store.last_good.commit();
        let mut engine = Self {
            files: ConfigFiles::start(config.clone(), &cause, warnings),
            config,
            resolved,
            kernel,
            control,
            store,
            detachment: Detachment {
                by: detached_by,
                restoring: None,
                is_draining,
            },
            events: Events::new(),
            walks: Walks::new(messages.clone()),
            probing: Probing::new(messages.clone()),
            comparing,
            problems: Problems::default(),
            systemd: Systemd::default(),
            reader: None,
            started: starting.started,
            shared: starting.shared.clone(),
            snapshots,
        };
        engine.publish();
        Ok(engine)
    }

    /// Makes a change from any source completely, or changes nothing. Nothing else writes a new
    /// desired state.
    ///
    /// # Errors
    ///
    /// [`EngineError::is_refusal`] if this host does not support the state. Otherwise the change was
    /// rolled back, or [`ManagedKernel::problems`] reports that the rollback failed.
    pub(super) fn change(
        &mut self,
        next: &Desired,
        persist: &Persist,
        cause: &Cause,
    ) -> Result<Change, EngineError> {
        // Adjust by the current decisions about the policies, and resolve for this host.
        let next = Arc::new(self.control.adjusted(next).resolve()?);
        let before = self.resolved.clone();
        if matches!(persist, Persist::Runtime)
            && let Some(reason) = next.leaves_out(&before)
        {
            return refused(reason);
        }

        let plan = self.kernel.plan(&next)?;
        let mut change = self.kernel.describe(&plan, &before.maps, &next);

        // Stage the files.
        let runtime = &next.desired.runtime;
        let runtime_changes = *runtime != before.desired.runtime;
        let (edit, stages_runtime) = match persist {
            Persist::File(edit) => (Some((edit, edit.stage()?)), runtime_changes),
            Persist::Runtime => (None, true),
            Persist::Later => (None, false),
        };
        let mut draft = match stages_runtime {
            true => Some(
                self.store
                    .runtime
                    .stage(runtime)
                    .map_err(EngineError::Unsaved)?,
            ),
            false => None,
        };

        // Apply, or roll back. A probe under way matches neither state.
        self.probing.invalidate();
        self.kernel.apply(&plan, &next)?;

        // Commit. The edit comes first: after a crash between the two, the runtime entries that it
        // replaces are still in force.
        let committed = match (edit, persist) {
            (Some((edit, draft)), _) => edit.commit(draft),
            (None, Persist::Runtime) => draft
                .take()
                .map_or(Ok(()), |draft| self.store.runtime.commit(draft)),
            (None, _) => Ok(()),
        };
        if let Err(unsaved) = committed {
            return Err(match self.kernel.write(&before) {
                Ok(_) => EngineError::Unsaved(unsaved),
                Err(back) => self.kernel.not_back(unsaved, back),
            });
        }
        self.resolved = next;
        let desired = &self.resolved.desired;
        if runtime_changes
            && !matches!(persist, Persist::Runtime)
            && !draft.is_some_and(|draft| self.store.runtime.commit(draft).is_ok())
        {
            self.store.runtime.save(&desired.runtime);
            change.unsaved = self.store.runtime.problem().cloned();
        }
        if desired.host != before.desired.host {
            self.kernel.set_host_defaults(desired.host);
        }
        self.control.follow(desired, &mut self.store.tuning);

        // Audit. The tuner has logged its decisions, which cover no further connection.
        if !cause.is_tuner() {
            cause.audit(&change);
            // Only additions and changes need a walk: the addresses of a removed entry already have
            // the timers of its covering entry.
            let ChangeSummary { added, changed, .. } = change.summary;
            if added + changed > 0 || !before.config().agent.apply_to_open {
                self.apply_to_open(cause);
            }
        }

        self.publish();
        Ok(change)
    }

    /// Publishes the state as it is now.
    pub(super) fn publish(&mut self) {
        if std::mem::take(&mut self.kernel.maps_are_new) {
            self.control.maps_are_new();
        }
        self.reader = self.kernel.reader();
        if std::mem::take(&mut self.kernel.renewed) {
            self.resume_events();
        }
        self.events.policies_changed(self.reader.as_deref());
        let snapshot = Snapshot {
            started: self.started,
            config: self.config.clone(),
            resolved: Some(self.resolved.clone()),
            reader: self.reader.clone(),
            health: Arc::new(self.health()),
            walk: self.walks.progress().clone(),
            tuned: self.control.published(),
            epoch: self.shared.next_epoch(),
            shared: self.shared.clone(),
        };
        self.systemd.status(&status_line(&snapshot));
        let snapshot = Arc::new(snapshot);
        self.snapshots.send_replace(snapshot.clone());
        self.shared.published(&snapshot);
    }

    /// The health, to be published with [`Self::reader`].
    fn health(&mut self) -> Health {
        let known = &mut self.problems;
        let mut problems: Vec<String> = self.kernel.problems().cloned().collect();
        let mut warnings: Vec<String> = self.store.problems().collect();
        warnings.extend(known.unshaped.text().cloned());
        for other in self.probing.others() {
            if other.is_managed {
                warnings.push(format!("{other}; another daemon seems to manage it"));
            } else {
                problems.push(format!(
                    "{other}, and no daemon manages it: rto-agent detach removes it"
                ));
            }
        }
        for (known, text) in [
            (&mut known.conflicting, self.resolved.conflicting_text()),
            (&mut known.left_out, self.resolved.left_out_text()),
        ] {
            known.becomes(text, |text| warn!("{text}"));
            warnings.extend(known.text().cloned());
        }
        problems.extend(known.host.text().cloned());
        problems.extend(known.expiry.text().cloned());
        warnings.extend(known.metrics.text().cloned());
        warnings.extend(self.files.warnings.iter().cloned());
        warnings.extend(self.control.problem().cloned());
        Health {
            problems,
            in_sync: self.kernel.out_of_sync.is_none(),
            map_differences: self.kernel.differences.clone(),
            maps_compared_at_s: self.comparing.compared_at_s(),
            attachment: match &self.reader {
                Some(reader) if self.detachment.by.is_none() => reader.attachment(),
                _ => self.kernel.detached(self.connecting()),
            },
            warnings,
            last_reload: self.files.last_reload.clone(),
            detached_by: self.detachment.by,
            found: self.kernel.found,
            max_entries: self.kernel.options.max_entries,
            probe: self.probing.last().cloned(),
            programs: self.probing.in_ancestry().to_vec(),
        }
    }

    /// The desired state in force, or to be in force once attached again.
    pub(super) fn desired(&self) -> &Desired {
        &self.resolved.desired
    }

    /// A reader of the kernel while the program is attached.
    pub(super) fn attached_reader(&self) -> Option<Arc<dyn KernelReader>> {
        let is_attached = self.detachment.by.is_none();
        self.kernel.reader().filter(|_| is_attached)
    }

    /// The number of connecting sockets for which a draining program stays; 0 if none is draining.
    pub(super) fn connecting(&self) -> u64 {
        if !self.detachment.is_draining {
            return 0;
        }
        let left = connecting(&self.kernel.options.pin_dir);
        left.unwrap_or_else(|e| {
            warn!("{e}");
            0
        })
    }

    pub(super) fn resume_events(&mut self) {
        if let Some(kernel) = self.kernel.kernel() {
            self.events.resume(kernel, &self.resolved.desired.host);
        }
    }

    /// Walks over the open sockets, with `apply_to_open`: these get the options of a policy that
    /// begins to cover them.
    pub(super) fn apply_to_open(&mut self, cause: &Cause) {
        if !self.resolved.config().agent.apply_to_open || self.detachment.by.is_some() {
            return;
        }
        if self.walks.is_running() {
            self.walks.ask_again(cause);
        } else if let Err(e) = self.begin_walk(Mode::ApplyToNew, cause) {
            warn!("open sockets were not changed: {e}");
            self.walks.refused(&cause.to_string(), e.to_string());
        }
    }

    /// Begins a walk; the caller has checked that none is running.
    pub(super) fn begin_walk(
        &mut self,
        mode: Mode,
        cause: &Cause,
    ) -> Result<WalkView, EngineError> {
        self.detachment.check_not_restoring()?;
        let kernel = self.kernel.kernel();
        let Some(kernel) = kernel.filter(|_| self.detachment.by.is_none()) else {
            return refused(NOT_ACTIVE);
        };
        check_can_walk(&self.config)?;
        let walker = kernel.walker(mode)?;
        let has_hook = can_set(&self.config.features, "rto-hook-on-open-sockets") != Some(false);
        let mut policies = self.resolved.set.policies.values();
        let sets_rto_min = policies.any(|policy| policy.settings.rto_min.is_some());
        let notes = walk::notes(sets_rto_min, has_hook);
        cause.audit_other(match mode {
            Mode::Apply => "apply to open sockets",
            Mode::ApplyToNew => "apply to new open sockets",
            Mode::Restore => "restore open sockets",
        });
        let cause = cause.to_string();
        Ok(self.walks.begin(vec![walker], &cause, notes))
    }
}

/// Refuses a walk over open sockets that this kernel does not support.
pub(super) fn check_can_walk(config: &EngineConfig) -> Result<(), EngineError> {
    if can_set(&config.features, "iter-tcp") == Some(false) {
        return refused(
            "this kernel has no iterator over open sockets (Linux 5.15 and later; see iter-tcp \
             in rto-agent doctor); nothing was changed",
        );
    }
    Ok(())
}

fn options(config: &EngineConfig) -> Options {
    let agent = &config.config.agent;
    let can_set = |name: &&str| can_set(&config.features, name) == Some(true);
    Options {
        cgroup: config.cgroup.clone(),
        pin_dir: agent.pin_dir.clone(),
        max_entries: room_for(0, agent.max_entries),
        statistics: StatisticsOptions {
            on: agent.statistics,
            unmatched: agent.count_unmatched,
            sampling: agent.sampling,
            rtt: agent.rtt_sampling,
            process: config.tells_process,
        },
        features: 0,
        without_clone: without_clone(&config.features),
        hz: config.host.hz,
        shapes_syns: can_set(&features::SYN_SCHEDULE),
        host_defaults: config.host.defaults(),
    }
}

/// Reading the kernel's types again, only to fail again, would take a third of the start.
fn without_clone(features: &[Feature]) -> Option<String> {
    let feature = features.iter().find(|f| f.name == "bpf-lsm-cgroup")?;
    let refused = matches!(feature.presence, Presence::Absent | Presence::Refused);
    refused.then(|| feature.evidence.clone())
}

fn log_start(kernel: &ManagedKernel, resolved: &Resolved, detached_by: Option<Caller>) {
    if let Some(by) = detached_by {
        return warn!("{}", by.detached());
    }
    info!(
        found = match kernel.found {
            Found::Nothing => "nothing",
            Found::Adopted => "adopted",
            Found::MapsKept => "maps-kept",
            Found::Replaced => "replaced",
        },
        entries = resolved.set.entries.len(),
        cgroup = %kernel.options.cgroup.display(),
        "policies are active"
    );
}

#[cfg(test)]
mod tests;
