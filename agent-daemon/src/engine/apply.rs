//! What is in the kernel, and the jobs that read or change it.

use std::{
    sync::{Arc, mpsc},
    time::{Duration, Instant},
};

use rto_agent_core::{
    config::OnExit,
    policy::{Cidr, HostFacts, PolicyName, differences::Differences, plan::ChangeSummary},
    wire::{
        events::StreamItem,
        kernel::{Feature, Found, Presence, Verdict},
        types::{ApplyRequest, Caller, DetachAnswer, NotLasting, VerifyAnswer, WalkView, now_s},
    },
};
use rto_agent_kernel::{
    datapath::{KernelReader, Options, StatisticsOptions, left_set, room_for, walk::Mode},
    kernel::features::{self, can_set},
};
use tokio::sync::broadcast;
use tracing::{info, warn};

use super::{
    Done, EngineConfig, EngineError, Message, Open, Reply, Snapshot,
    audit::{Cause, Change, Source},
    desired::{Desired, Resolved},
    detach_mark::{DETACHED, DetachMark},
    draining::left_draining,
    error::refused,
    jobs::{
        comparing::Comparing,
        events::Events,
        probing::Probing,
        walk::{self, Walks},
    },
    reconcile::{Persist, Reconciler},
    snapshot::{Health, Published, Shared},
    store::RuntimeStore,
};
use crate::problem::Problem;

pub(super) mod detach;

/// Owns the kernel and its jobs, and whether the program is attached: all writes go through it.
pub(super) struct Apply {
    config: Arc<EngineConfig>,
    reconciler: Reconciler,
    /// As last published.
    reader: Option<Arc<dyn KernelReader>>,
    detached_by: Option<Caller>,
    detach_mark: DetachMark,
    restoring: Option<Restoring>,
    /// Detached, but the program stays until no socket with its timers is connecting.
    is_draining: bool,
    /// Why SYNs have the kernel's doubling, if they do.
    unshaped: Problem,
    /// Runtime entries that are left out, with the reasons.
    left_out: Problem,
    /// Decisions that the policies' settings do not allow.
    misfits: Problem,
    events: Events,
    walks: Walks,
    probing: Probing,
    comparing: Comparing,
}

/// How long a daemon that stops, or a command without a daemon, waits for connecting sockets before it leaves the
/// program with them. Most outages are shorter.
pub const DRAIN_LIMIT: Duration = Duration::from_secs(5);

/// A detachment whose sockets are being restored.
struct Restoring {
    reply: Reply<DetachAnswer>,
    deadline: Instant,
    not_lasting: Option<NotLasting>,
}

impl Apply {
    /// As [`Reconciler::start`].
    pub(super) fn start(
        opening: (Open, Arc<Shared>),
        desired: Desired,
        store: RuntimeStore,
        config: &Arc<EngineConfig>,
        messages: &mpsc::Sender<Message>,
    ) -> anyhow::Result<(Self, Change)> {
        let agent = &config.config.agent;
        let mut detach_mark = DetachMark::new(agent);
        let by_configuration = (!agent.attach).then_some(Caller::CONFIGURATION);
        let detached_by = detach_mark.load().or(by_configuration);
        let (reconciler, change, is_draining) = Reconciler::start(
            opening,
            options(config),
            desired,
            store,
            detached_by.is_some(),
        )?;
        log_start(&reconciler, detached_by);
        let mut apply = Self {
            config: config.clone(),
            reconciler,
            reader: None,
            detached_by,
            detach_mark,
            restoring: None,
            is_draining,
            unshaped: Problem::default(),
            left_out: Problem::default(),
            misfits: Problem::default(),
            events: Events::new(),
            walks: Walks::new(messages.clone()),
            probing: Probing::new(messages.clone()),
            comparing: Comparing::new(messages.clone()),
        };
        // The start has read all maps, and has written each difference.
        apply.comparing.all_compared(now_s(), Duration::ZERO);
        Ok((apply, change))
    }

    /// Makes a change from any source: reconciles, writes the audit line, and starts a walk over
    /// the open sockets; or changes nothing. The caller publishes the result.
    pub(super) fn reconcile(
        &mut self,
        next: Desired,
        persist: &Persist,
        cause: &Cause,
    ) -> Result<Change, EngineError> {
        let was_on = self.applies_to_open();
        let change = self.reconciler.reconcile(next, persist);
        if !change.as_ref().is_err_and(EngineError::is_refusal) {
            // The probe under way matches neither state.
            self.probing.invalidate();
        }
        let change = change?;
        if cause.is_tuner() {
            // A decision covers no further connection.
            return Ok(change);
        }
        cause.audit(&change);
        // Only additions and changes need a walk: the addresses of a removed entry already have the
        // timers of its covering entry.
        let ChangeSummary { added, changed, .. } = change.summary;
        if added + changed > 0 || !was_on {
            self.apply_to_open(cause);
        }
        Ok(change)
    }

    /// See [`Reconciler::take_maps_are_new`].
    pub(super) fn take_maps_are_new(&mut self) -> bool {
        self.reconciler.take_maps_are_new()
    }

    /// The next start reads its mark in the `persistent_dir` of the files in force.
    pub(super) fn follow_persistent_dir(&mut self) {
        let dir = &self.reconciler.resolved().config().agent.persistent_dir;
        self.detach_mark.follow(dir, self.detached_by);
    }

    /// The desired state in force, or to be in force once attached again.
    pub(super) fn desired(&self) -> &Desired {
        self.reconciler.desired()
    }

    pub(super) fn resolved(&self) -> &Arc<Resolved> {
        self.reconciler.resolved()
    }

    pub(super) fn reconciler(&self) -> &Reconciler {
        &self.reconciler
    }

    /// A reader of the kernel, as last published.
    pub(super) const fn reader(&self) -> Option<&Arc<dyn KernelReader>> {
        self.reader.as_ref()
    }

    /// See [`Reconciler::set_host_defaults`].
    pub(super) fn set_host_defaults(&mut self, host: HostFacts) {
        self.reconciler.set_host_defaults(host);
    }

    /// The health of the kernel, to be published with [`Self::reader`].
    pub(super) fn health(&mut self) -> Health {
        let reconciler = &mut self.reconciler;
        self.reader = reconciler.reader();
        if reconciler.take_renewed() {
            self.resume_events();
        }
        let reconciler = &self.reconciler;
        self.events.policies_changed(self.reader.as_deref());
        let mut warnings = Vec::from_iter(reconciler.store_problem());
        warnings.extend(self.detach_mark.problem().cloned());
        warnings.extend(self.unshaped.text().cloned());
        let mut problems: Vec<String> = reconciler.problems().cloned().collect();
        for other in self.probing.others() {
            if other.is_managed {
                warnings.push(format!("{other}; another daemon seems to manage it"));
            } else {
                problems.push(format!(
                    "{other}, and no daemon manages it: rto-agent detach removes it"
                ));
            }
        }
        let resolved = reconciler.resolved();
        for (known, text) in [
            (&mut self.misfits, resolved.misfits_text()),
            (&mut self.left_out, resolved.left_out_text()),
        ] {
            known.becomes(text, |text| warn!("{text}"));
            warnings.extend(known.text().cloned());
        }
        Health {
            problems,
            in_sync: reconciler.in_sync(),
            map_differences: reconciler.difference_counts().clone(),
            maps_compared_at_s: self.comparing.compared_at_s(),
            attachment: match &self.reader {
                Some(reader) if self.detached_by.is_none() => reader.attachment(),
                _ => reconciler.detached(self.connecting()),
            },
            warnings,
            detached_by: self.detached_by,
            found: reconciler.found(),
            max_entries: reconciler.options().max_entries,
            probe: self.probing.last().cloned(),
            programs: self.probing.in_ancestry().to_vec(),
            ..Health::default()
        }
    }

    /// Repairs what other processes changed, and retries what failed. Returns whether the program
    /// is attached.
    pub(super) fn check_health(&mut self) -> bool {
        self.events.end_if_unwatched();
        self.reconciler.retry_save();
        self.detach_mark.retry(self.detached_by);
        if self.detached_by.is_some() {
            self.look_at_programs();
            return false;
        }
        self.repair();
        self.consider_probe();
        self.look_at_schedules();
        true
    }

    /// Reports a kernel on which options of a moment stayed on a socket.
    fn look_at_schedules(&mut self) {
        let found = left_set(&self.reconciler.options().pin_dir).unwrap_or_default();
        let text = (found != 0).then(|| {
            format!(
                "{found} sockets kept a TCP_USER_TIMEOUT of the SYN schedule: this kernel or another program does not \
                 let the program take it back, so SYNs have the kernel's doubling from initial_rto on"
            )
        });
        self.unshaped.becomes(text, |text| warn!("{text}"));
    }

    /// Compares the kernel with the desired state and repairs differences. The caller publishes.
    pub(super) fn verify(&mut self) -> VerifyAnswer {
        let (begin, at_s) = (Instant::now(), now_s());
        let mut problems = Vec::new();
        if let Some(reader) = self.attached_reader() {
            problems.extend(reader.attachment().problem);
        } else {
            problems.extend(self.reconciler.detached(self.connecting()).problem);
            return self.verified(Differences::default(), problems);
        }
        let differences = self.reconciler.verify();
        if !problems.is_empty() || !self.reconciler.in_sync() {
            self.repair();
        }
        problems.extend(self.reconciler.problems().cloned());
        self.comparing.all_compared(at_s, begin.elapsed());
        self.verified(differences, problems)
    }

    fn verified(&self, differences: Differences, problems: Vec<String>) -> VerifyAnswer {
        let set = &self.reconciler.resolved().set;
        VerifyAnswer {
            ok: differences.is_empty() && problems.is_empty(),
            entries: set.entries.len(),
            policies: set.policies.len(),
            repaired: self.detached_by.is_none() && self.reconciler.problems().next().is_none(),
            differences,
            problems,
        }
    }

    /// Attaches again if necessary, and rewrites what differs. The caller publishes.
    fn repair(&mut self) {
        let Some(change) = self.reconciler.repair() else {
            return;
        };
        self.probing.invalidate();
        let cause = Cause::from(Source::Repair);
        cause.audit(&change);
        // Connections may have begun without a policy while detached.
        self.apply_to_open(&cause);
    }

    /// A reader of the kernel while the program is attached.
    fn attached_reader(&self) -> Option<Arc<dyn KernelReader>> {
        self.reconciler
            .reader()
            .filter(|_| self.detached_by.is_none())
    }

    /// Repairs changes that other processes made to these entries. Called before a change, as its
    /// plan assumes that the maps hold what was last written.
    pub(super) fn verify_entries(&mut self, cidrs: &[Cidr], policy: &PolicyName) {
        let reader = self.attached_reader();
        let maps = &self.reconciler.resolved().maps;
        let found = reader.map(|reader| reader.finds(maps, cidrs, policy));
        if matches!(found, Some(Ok(false))) && self.restoring.is_none() {
            self.verify();
        }
    }

    /// The next comparison is of everything and does not wait.
    pub(super) fn compare_all(&mut self) {
        self.comparing.compare_all();
    }

    /// Begins to compare the next part.
    pub(super) fn compare_next(&mut self, snapshot: &Arc<Snapshot>) {
        self.comparing.consider(snapshot);
    }

    /// Handles the result of a job; returns whether there is something to publish.
    pub(super) fn done(&mut self, done: Done) -> bool {
        match done {
            Done::Walk { number, view } => {
                self.walks.done(number, view.map(|view| *view));
                false
            }
            Done::Probe(verdict) => {
                self.probing.done(verdict);
                true
            }
            Done::Compare(round) => {
                let differs = self.comparing.done(round) && self.detached_by.is_none();
                if differs {
                    self.verify();
                }
                differs
            }
        }
    }

    /// Whether open sockets get the options of a policy that begins to cover them.
    fn applies_to_open(&self) -> bool {
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

    /// Begins the walk that was requested during the last one.
    pub(super) fn walk_again(&mut self) {
        if let Some(cause) = self.walks.take_again() {
            self.apply_to_open(&cause);
        }
    }

    /// `rto-agent apply`.
    pub(super) fn walk(
        &mut self,
        request: &ApplyRequest,
        by: Caller,
    ) -> Result<WalkView, EngineError> {
        if self.walks.is_running() {
            return refused("open sockets are already being walked; see rto-agent status");
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
            return refused(DETACHED);
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
            Mode::Restore => "restore open sockets",
        });
        let cause = cause.to_string();
        Ok(self.walks.begin(vec![walker], &cause, notes))
    }

    fn check_can_walk(&self) -> Result<(), EngineError> {
        if can_set(&self.config.features, "iter-tcp") == Some(false) {
            return refused(
                "this kernel has no iterator over open sockets (Linux 5.15 and later; see iter-tcp \
                 in rto-agent doctor); nothing was changed",
            );
        }
        Ok(())
    }

    pub(super) fn walk_progress(&self) -> &Published<WalkView> {
        self.walks.progress()
    }

    /// Updates which programs are attached at the cgroup and above.
    fn look_at_programs(&mut self) {
        let own = self.reconciler.reader();
        let own = own.and_then(|reader| reader.attachment().program_id);
        let options = self.reconciler.options();
        self.probing.look(&options.cgroup, &options.pin_dir, own);
    }

    /// Begins a probe if one is needed.
    pub(super) fn consider_probe(&mut self) {
        self.look_at_programs();
        if self.detached_by.is_none() {
            let resolved = self.reconciler.resolved();
            let in_force = |name: &PolicyName| {
                let jiffies = resolved.policies.get(name)?.kernel.initial_rto_jiffies;
                (jiffies != 0).then_some(u64::from(jiffies))
            };
            let host = &resolved.desired.host;
            let target = resolved.set.probe_target_by(host, in_force);
            self.probing
                .consider(&self.reconciler.options().cgroup, target);
        }
    }

    /// Records the verdict of a client's probe.
    pub(super) fn record_probe(&mut self, verdict: Verdict, by: Caller) {
        self.probing.record(verdict, &format!("doctor, {by}"));
    }

    /// `rto-agent watch`.
    pub(super) fn watch(
        &mut self,
        policy: Option<&PolicyName>,
    ) -> Result<broadcast::Receiver<Arc<StreamItem>>, EngineError> {
        let agent = &self.config.config.agent;
        if !agent.statistics {
            return refused("no statistics: statistics = false in [agent]");
        }
        let policies = &self.reconciler.resolved().set.policies;
        if let Some(policy) = policy {
            let unmatched = agent.count_unmatched.then(PolicyName::unmatched);
            let known = || policies.keys().chain(&unmatched);
            if !known().any(|known| known == policy) {
                let known: Vec<_> = known().map(PolicyName::as_str).collect();
                return refused(format!(
                    "no active policy {policy}; active policies: {}",
                    known.join(", ")
                ));
            }
        }
        let host = &self.reconciler.desired().host;
        self.events.subscribe(self.reconciler.kernel(), host)
    }

    /// Sends an item to watchers.
    pub(super) fn tell(&self, item: StreamItem) {
        self.events.tell(item);
    }

    pub(super) fn unwatched(&mut self) {
        self.events.end_if_unwatched();
    }

    fn resume_events(&mut self) {
        if let Some(kernel) = self.reconciler.kernel() {
            self.events.resume(kernel, &self.reconciler.desired().host);
        }
    }

    /// Tells the jobs to end.
    pub(super) fn cancel_jobs(&mut self) {
        self.walks.cancel();
        self.events.end();
    }

    /// Waits for the cancelled jobs, or leaves those that miss the deadline.
    pub(super) fn finish_jobs(&mut self, deadline: Instant) {
        self.probing.finish(deadline);
        self.walks.finish(deadline);
    }

    /// Leaves the kernel as `on_exit` says.
    pub(super) fn leave(mut self) -> anyhow::Result<()> {
        if self.restoring.is_some() || self.reconciler.has_kept_maps() {
            let kept = self.reconciler.leave_maps();
            warn!(
                "some sockets could not be restored: the maps in {} are kept; run rto-agent detach \
                 --restore as root to finish",
                kept.display()
            );
            return Ok(());
        }
        if self.is_draining {
            warn!("{}", left_draining(self.connecting()));
            return Ok(());
        }
        let deadline = Instant::now() + DRAIN_LIMIT;
        match self.reconciler.resolved().config().agent.on_exit {
            OnExit::Keep if self.detached_by.is_some() => {
                info!("stopping; no policy is active, and statistics are kept");
            }
            OnExit::Keep => {
                info!("stopping; the policies stay active (on_exit = \"keep\")");
            }
            OnExit::Detach if self.detached_by.is_none() && self.hand_over(deadline) => {}
            OnExit::Detach => {
                let left = self.drain(until(deadline))?;
                if left != 0 {
                    warn!("{}", left_draining(left));
                    self.reconciler.leave_draining();
                    return Ok(());
                }
                let removed = self.reconciler.detach()?;
                info!(links = removed.links, "stopping; detached");
            }
        }
        Ok(())
    }
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

fn until(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now())
}

/// Reading the kernel's types again, only to fail again, would take a third of the start.
fn without_clone(features: &[Feature]) -> Option<String> {
    let feature = features.iter().find(|f| f.name == "bpf-lsm-cgroup")?;
    let refused = matches!(feature.presence, Presence::Absent | Presence::Refused);
    refused.then(|| feature.evidence.clone())
}

fn log_start(reconciler: &Reconciler, detached_by: Option<Caller>) {
    if let Some(by) = detached_by {
        return warn!("{}", by.detached());
    }
    info!(
        found = match reconciler.found() {
            Found::Nothing => "nothing",
            Found::Adopted => "adopted",
            Found::MapsKept => "maps-kept",
            Found::Replaced => "replaced",
        },
        entries = reconciler.resolved().set.entries.len(),
        cgroup = %reconciler.options().cgroup.display(),
        "policies are active"
    );
}
