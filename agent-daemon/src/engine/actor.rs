//! The engine's thread: its queue and its timers. Map writes block, and the socket must keep answering during them.

use std::{
    sync::{Arc, mpsc},
    time::{Duration, Instant},
};

use rto_agent_core::{
    config::{AgentConfig, Config, FilesReader, OnExit, atomic_file::AtomicFile},
    policy::PolicyName,
    progress::{self, Progress},
    wire::{
        events::StreamItem,
        kernel::{Feature, Found, Presence},
        types::{Caller, ReloadRequest, ReloadView, now_s},
    },
};
use rto_agent_kernel::{
    datapath::{BpfKernel, NewConnections, Options, StatisticsOptions, room_for},
    kernel::{clock::boottime_ms, facts::host_facts, features::can_set},
};
use tokio::sync::{broadcast, watch};
use tracing::{error, info, warn};

use super::{
    Channels, EngineConfig, EngineError, LastGood, Message, Open, Reply, STOP_LIMIT, Snapshot,
    adjusting::Deciding,
    audit::{Cause, Source},
    desired::{Desired, LoadedConfig},
    detach::{DetachMark, Restoring},
    experiments::RunningExperiments,
    jobs::{Done, comparing::Comparing, events::Events, probing::Probing, walk::Walks},
    memory::{self, Need},
    reconcile::{Persist, Reconciler},
    reload::start_view,
    snapshot::{About, Health, Shared},
    store::RuntimeStore,
    systemd::{self, Systemd},
};
use crate::problem::Problem;

/// Interval between checks of the attachment, the host's sysctls and a part of the maps.
pub(super) const HEALTH_INTERVAL: Duration = Duration::from_secs(5);

/// Time the probe and the walk together get to finish after a stop. Shorter than the daemon's own
/// limit for the engine, so that the engine can still detach.
const JOBS_LIMIT: Duration = STOP_LIMIT.saturating_sub(Duration::from_millis(500));

/// The single writer to the kernel.
pub struct Engine {
    pub(super) config: EngineConfig,
    pub(super) reconciler: Reconciler,
    /// When expired entries are looked for again, if the kernel refused to remove them.
    expiry_after: Option<Instant>,
    pub(super) files: FilesReader,
    pub(super) last_good: LastGood,
    /// Fingerprint of the files last read, good or bad; `None` if they could not be read.
    pub(super) fingerprint: Option<u64>,
    pub(super) last_reload: ReloadView,
    pub(super) warnings: Vec<String>,
    pub(super) detached_by: Option<Caller>,
    pub(super) detach_mark: DetachMark,
    /// Why the policies could not be computed for the host's current settings.
    host_problem: Problem,
    /// Runtime entries that are left out, with the reasons.
    left_out: Problem,
    /// Decisions that the policies' settings do not allow.
    misfits: Problem,
    messages: mpsc::Receiver<Message>,
    pub(super) snapshots: watch::Sender<Arc<Snapshot>>,
    about: Arc<About>,
    shared: Arc<Shared>,
    progress: Progress,
    pub(super) systemd: Systemd,
    /// See [`systemd::step_interval`].
    step_interval: Duration,
    /// [`HEALTH_INTERVAL`], except in tests.
    health_interval: Duration,
    pub(super) events: Events,
    pub(super) walks: Walks,
    pub(super) restoring: Option<Restoring>,
    pub(super) probing: Probing,
    pub(super) comparing: Comparing,
    pub(super) deciding: Deciding,
}

impl Engine {
    /// Brings the kernel in line with the configuration, attaches, and publishes the first
    /// snapshot.
    ///
    /// # Errors
    ///
    /// If the program cannot be attached. Whatever an earlier run left in force stays in force.
    pub fn start(
        config: EngineConfig,
        last_good: LastGood,
        channels: Channels,
    ) -> anyhow::Result<Self> {
        Self::start_with(
            Arc::new(|options| Ok(Box::new(BpfKernel::open(options)?))),
            config,
            last_good,
            channels,
        )
    }

    /// As [`Self::start`], with another way to open the kernel.
    pub(super) fn start_with(
        open: Open,
        config: EngineConfig,
        mut last_good: LastGood,
        channels: Channels,
    ) -> anyhow::Result<Self> {
        channels.progress.count_this_thread();
        progress::step();
        let agent = &config.config.agent;
        let mut store = RuntimeStore::new(&agent.state_dir);
        memory::check(&Need::of_store(store.size()))?;
        let (saved, lost) = store.load()?;
        let saved_path = Config::saved_path(&config.config_path);
        if let Err(e) = AtomicFile::remove_stale(&saved_path) {
            warn!(
                "a temporary file of {} cannot be removed: {e}",
                saved_path.display()
            );
        }
        let files = Arc::new(LoadedConfig {
            config: config.config.clone(),
            fingerprint: config.fingerprint,
            host: config.host,
        });
        let mut runtime = saved.clone();
        runtime.expire(boottime_ms());
        let desired = Desired::new(files, runtime, config.host);
        if desired.runtime != saved {
            store.save(&desired.runtime);
        }
        let experiments = RunningExperiments::load(agent)?;
        let options = Options {
            cgroup: config.cgroup.clone(),
            pin_dir: agent.pin_dir.clone(),
            max_entries: room_for(0, agent.max_entries),
            statistics: statistics_options(agent, config.tells_process),
            features: 0,
            without_clone: without_clone(&config.features),
            hz: config.host.hz,
            syn_cap: ["tcp-rto-max", "iter-tcp"]
                .iter()
                .all(|name| can_set(&config.features, name) == Some(true)),
            host_defaults: config.host.defaults(),
        };
        let (deciding, desired) = Deciding::start(agent, experiments, desired);
        let starting = channels.snapshots.borrow().clone();
        let opening = (open, starting.shared.clone());
        let mut detach_mark = DetachMark::new(&agent.persistent_dir, &config.config_path);
        let by_configuration = (!agent.attach).then_some(Caller::CONFIGURATION);
        let detached_by = detach_mark.load()?.or(by_configuration);
        let (reconciler, change) =
            Reconciler::start(opening, options, desired, store, detached_by.is_some())?;
        log_start(&reconciler, detached_by);
        last_good.commit();
        let cause = Cause::from(Source::Start);
        cause.audit(&change);
        if let Some(warning) = &lost {
            warn!("{warning}");
        }
        let mut engine = Self {
            files: FilesReader::default(),
            fingerprint: match &config.refused {
                Some(refused) => refused.fingerprint,
                None => Some(config.fingerprint),
            },
            last_good,
            reconciler,
            expiry_after: None,
            last_reload: start_view(&config, &cause),
            warnings: lost.into_iter().collect(),
            detached_by,
            detach_mark,
            host_problem: Problem::default(),
            left_out: Problem::default(),
            misfits: Problem::default(),
            messages: channels.messages,
            about: starting.about.clone(),
            shared: starting.shared.clone(),
            progress: channels.progress,
            snapshots: channels.snapshots,
            systemd: Systemd::default(),
            step_interval: systemd::step_interval(),
            health_interval: HEALTH_INTERVAL,
            events: Events::new(),
            walks: Walks::new(channels.sender.clone()),
            comparing: Comparing::new(channels.sender.clone()),
            restoring: None,
            probing: Probing::new(channels.sender),
            deciding,
            config,
        };
        // The start has read all maps, and has written each difference.
        engine.comparing.all_compared(now_s(), Duration::ZERO);
        if engine.reconciler.found() == Found::Adopted
            || engine.reconciler.found() == Found::MapsKept
        {
            engine.renew_lease();
            engine.resume_experiments();
        } else {
            engine.maps_are_new();
        }
        engine.publish();
        memory::trim_heap();
        Ok(engine)
    }

    /// Serves messages until it is stopped, then leaves the kernel as `on_exit` says.
    pub fn run(mut self) -> anyhow::Result<()> {
        self.systemd.ready(&self.snapshots.borrow().status_line());
        self.apply_to_open(&Source::Start.into());
        self.consider_probe();
        let mut next_health = Instant::now() + self.health_interval;
        // After a stop, queued messages are dropped.
        while progress::checkpoint().is_ok() {
            let message = self.messages.recv_timeout(self.until_next(next_health));
            match message {
                Ok(Message::Stop) | Err(mpsc::RecvTimeoutError::Disconnected) => break,
                Ok(message) => self.handle(message),
                Err(mpsc::RecvTimeoutError::Timeout) => {}
            }
            if progress::checkpoint().is_err() {
                break;
            }
            if Instant::now() >= next_health {
                self.check_health();
                next_health = Instant::now() + self.health_interval;
            }
            self.expire();
            self.tick_if_due();
            self.finish_restore();
            if let Some(cause) = self.walks.take_again() {
                self.apply_to_open(&cause);
            }
        }
        self.stop()
    }

    fn until_next(&self, next_health: Instant) -> Duration {
        let now = Instant::now();
        let mut wait = next_health.saturating_duration_since(now);
        if let Some(end) = self.reconciler.desired().runtime.next_expiry_ms() {
            let due = Duration::from_millis(end.saturating_sub(boottime_ms()));
            let again = self
                .expiry_after
                .map(|after| after.saturating_duration_since(now));
            wait = wait.min(due.max(again.unwrap_or_default()));
        }
        if let Some(restoring) = &self.restoring {
            wait = wait.min(restoring.deadline.saturating_duration_since(now));
        }
        if let Some(due) = self.until_tick() {
            wait = wait.min(due);
        }
        wait.min(self.step_interval)
    }

    fn handle(&mut self, message: Message) {
        match message {
            Message::Add(request, by, reply) => {
                let answer = self.add(*request, by);
                self.answer(reply, answer);
            }
            Message::Remove(request, by, reply) => {
                let answer = self.remove(request, by);
                self.answer(reply, answer);
            }
            Message::Reload(request, by, reply) => {
                let answer = self.reload_asked(&request, &Cause::asked(by));
                self.answer(reply, answer);
                memory::trim_heap();
            }
            Message::Detach(request, by, reply) => self.detach(&request, by, reply),
            Message::Attach(by, reply) => {
                let answer = self.attach(&Cause::asked(by));
                self.answer(reply, answer);
            }
            Message::Apply(request, by, reply) => {
                let answer = self.apply(&request, by);
                self.answer(reply, answer);
            }
            Message::StartExperiment(policy, request, by, reply) => {
                let answer = self.start_experiment(policy, &request, by);
                self.answer(reply, answer);
            }
            Message::StopExperiment(policy, by, reply) => {
                let answer = self.stop_experiment(&policy, by);
                self.answer(reply, answer);
            }
            Message::ClearExperiment(policy, by, reply) => {
                let answer = self.clear_experiment(&policy, by);
                self.answer(reply, answer);
            }
            Message::Probed(verdict, by, reply) => {
                self.probing.record(verdict, &format!("doctor, {by}"));
                self.answer(reply, Ok(()));
            }
            // The client has disconnected, and the comparison takes long.
            Message::Verify(reply) if reply.is_closed() => {}
            Message::Verify(reply) => {
                let answer = self.verify();
                self.answer(reply, Ok(answer));
            }
            Message::Watch(policy, reply) => {
                let answer = self.watch(policy.as_ref());
                self.answer(reply, answer);
            }
            Message::Tune(action, policy, by, reply) => {
                let answer = self.tune(action, &policy, by);
                self.answer(reply, answer);
            }
            Message::Unwatched => self.events.end_if_unwatched(),
            Message::Done(Done::Walk { number, view }) => {
                self.walks.done(number, view.map(|view| *view));
            }
            Message::Done(Done::Probe(verdict)) => {
                self.probing.done(verdict);
                self.publish();
            }
            Message::Done(Done::Compare(round)) => self.compared(round),
            Message::Sighup => {
                let request = ReloadRequest::default();
                let reloaded = self.reload_asked(&request, &Source::Signal.into());
                self.log(reloaded);
            }
            Message::FilesChanged => self.files_changed(),
            Message::Stop => {}
        }
    }

    /// Publishes the result, then answers.
    fn answer<T>(&mut self, reply: Reply<T>, answer: Result<T, EngineError>) {
        self.publish();
        // A client that disconnected before its answer is not an error.
        drop(reply.send(answer));
    }

    /// Logs a change that has no client.
    pub(super) fn log<T>(&mut self, changed: Result<T, EngineError>) {
        // `not_reloaded()` has logged why the files were rejected.
        if let Err(e) = changed
            && !matches!(e, EngineError::NotReloaded(_))
        {
            warn!("{e}");
        }
        self.publish();
        memory::trim_heap();
    }

    /// Publishes the state as it is now.
    pub(super) fn publish(&mut self) {
        let reader = self.reconciler.reader();
        if self.reconciler.take_renewed() {
            self.resume_events();
        }
        self.events.policies_changed(reader.as_deref());
        let mut warnings = self.warnings.clone();
        warnings.extend(self.reconciler.store_problem());
        warnings.extend(self.last_good.problem().cloned());
        warnings.extend(self.detach_mark.problem().cloned());
        warnings.extend(self.deciding.experiments.problem().cloned());
        warnings.extend(self.deciding.problems());
        let resolved = self.reconciler.resolved();
        for (known, text) in [
            (&mut self.misfits, resolved.misfits_text()),
            (&mut self.left_out, resolved.left_out_text()),
        ] {
            known.becomes(text, |text| warn!("{text}"));
            warnings.extend(known.text().cloned());
        }
        let attachment = match &reader {
            Some(reader) if self.detached_by.is_none() => reader.attachment(),
            _ => self.reconciler.detached(),
        };
        let snapshot = Snapshot {
            about: self.about.clone(),
            resolved: Some(self.reconciler.resolved().clone()),
            reader,
            health: Arc::new(Health {
                problems: self
                    .reconciler
                    .problems()
                    .chain(self.host_problem.text())
                    .cloned()
                    .collect(),
                in_sync: self.reconciler.in_sync(),
                map_differences: self.reconciler.difference_counts().clone(),
                maps_compared_at_s: self.comparing.compared_at_s(),
                attachment,
                warnings,
                last_reload: self.last_reload.clone(),
                detached_by: self.detached_by,
                found: self.reconciler.found(),
                max_entries: self.reconciler.options().max_entries,
                probe: self.probing.last().cloned(),
                programs: self.probing.in_ancestry().to_vec(),
            }),
            walk: self.walks.progress().clone(),
            tuned: self.deciding.tuned.clone(),
            experiments: self.deciding.experiments.shared.clone(),
            epoch: self.shared.next_epoch(),
            shared: self.shared.clone(),
        };
        self.systemd.status(&snapshot.status_line());
        let snapshot = Arc::new(snapshot);
        self.snapshots.send_replace(snapshot.clone());
        self.shared.published(&snapshot);
    }

    pub(super) fn resume_events(&mut self) {
        if let Some(kernel) = self.reconciler.kernel() {
            self.events.resume(kernel, &self.reconciler.desired().host);
        }
    }

    fn watch(
        &mut self,
        policy: Option<&PolicyName>,
    ) -> Result<broadcast::Receiver<Arc<StreamItem>>, EngineError> {
        let agent = &self.config.config.agent;
        if !agent.statistics {
            return Err(EngineError::Refused(
                "no statistics: statistics = false in [agent]".to_owned(),
            ));
        }
        let policies = &self.reconciler.resolved().set.policies;
        if let Some(policy) = policy {
            let unmatched = agent.count_unmatched.then(PolicyName::unmatched);
            let known = || policies.keys().chain(&unmatched);
            if !known().any(|known| known == policy) {
                let known: Vec<_> = known().map(PolicyName::as_str).collect();
                return Err(EngineError::Refused(format!(
                    "no active policy {policy}; active policies: {}",
                    known.join(", ")
                )));
            }
        }
        let host = &self.reconciler.desired().host;
        self.events.subscribe(self.reconciler.kernel(), host)
    }

    /// Removes expired entries, from the kernel first. The file holds their expiry times, so they
    /// stay expired even if it cannot be written.
    fn expire(&mut self) {
        if self
            .expiry_after
            .is_some_and(|after| Instant::now() < after)
        {
            return;
        }
        let Some(next) = self.reconciler.desired().expired(boottime_ms()) else {
            return;
        };
        match self.reconcile(next, &Persist::Later, &Source::Ttl.into()) {
            Ok(_) => self.expiry_after = None,
            Err(e) => {
                error!("expired entries could not be removed and will be tried again: {e}");
                self.expiry_after = Some(Instant::now() + HEALTH_INTERVAL);
            }
        }
        self.publish();
    }

    fn check_health(&mut self) {
        self.events.end_if_unwatched();
        self.reconciler.retry_save();
        self.deciding.experiments.retry_save();
        self.detach_mark.retry(self.detached_by);
        self.keep_last_good();
        if self.detached_by.is_some() {
            self.probing.look(&self.reconciler.options().cgroup);
            self.publish();
            return;
        }
        self.repair();
        self.consider_probe();
        match host_facts(&self.config.features) {
            Ok(host) if host != self.reconciler.desired().host => self.take_host(host),
            Ok(_) => self.host_problem = Problem::default(),
            Err(e) => warn!("{e}"),
        }
        self.publish();
        self.compare_next();
    }

    fn take_host(&mut self, host: rto_agent_core::policy::HostFacts) {
        // Set even if the policies cannot be computed for the new settings.
        self.reconciler.set_host_defaults(host);
        let next = self.reconciler.desired().with_host(host);
        let changed = self.reconcile(next, &Persist::Later, &Source::Host.into());
        if changed.is_ok() {
            info!(?host, "the host's TCP settings changed");
        }
        let problem = changed.err().map(|e| {
            format!("the host's TCP settings changed, and the policies could not be updated: {e}")
        });
        self.host_problem.becomes(problem, |text| error!("{text}"));
    }

    fn consider_probe(&mut self) {
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

    fn stop(mut self) -> anyhow::Result<()> {
        let begin = self.progress.stopped_at().unwrap_or_else(Instant::now);
        let deadline = begin + JOBS_LIMIT;
        self.walks.cancel();
        self.events.end();
        self.store_tuning();
        self.probing.finish(deadline);
        self.walks.finish(deadline);
        self.keep_experiments();
        if self.restoring.is_some() || self.reconciler.has_kept_maps() {
            let kept = self.reconciler.leave_maps();
            warn!(
                "some sockets could not be restored: the maps in {} are kept; run rto-agent detach \
                 --restore as root to finish",
                kept.display()
            );
            return Ok(());
        }
        match self.reconciler.resolved().config().agent.on_exit {
            OnExit::Keep if self.detached_by.is_some() => {
                info!("stopping; no policy is active, and statistics are kept");
                Ok(())
            }
            OnExit::Keep => {
                info!("stopping; the policies stay active (on_exit = \"keep\")");
                Ok(())
            }
            OnExit::Detach if self.detached_by.is_none() && self.hand_over() => Ok(()),
            OnExit::Detach => {
                self.end_schedules(NewConnections::LeftAlone);
                let removed = self.reconciler.detach()?;
                info!(links = removed.links, "stopping; detached");
                Ok(())
            }
        }
    }
}

fn log_start(reconciler: &Reconciler, detached_by: Option<Caller>) {
    if let Some(by) = detached_by {
        return warn!("{}", by.detached());
    }
    info!(
        found = found(reconciler.found()),
        entries = reconciler.resolved().set.entries.len(),
        cgroup = %reconciler.options().cgroup.display(),
        "policies are active"
    );
}

/// The name that `status` shows.
const fn found(found: Found) -> &'static str {
    match found {
        Found::Nothing => "nothing",
        Found::Adopted => "adopted",
        Found::MapsKept => "maps-kept",
        Found::Replaced => "replaced",
    }
}

fn statistics_options(agent: &AgentConfig, process: bool) -> StatisticsOptions {
    StatisticsOptions {
        on: agent.statistics,
        unmatched: agent.count_unmatched,
        sampling: agent.sampling,
        rtt: agent.rtt_sampling,
        process,
    }
}

/// Reading the kernel's types again, only to fail again, would take a third of the start.
fn without_clone(features: &[Feature]) -> Option<String> {
    let feature = features.iter().find(|f| f.name == "bpf-lsm-cgroup")?;
    let refused = matches!(feature.presence, Presence::Absent | Presence::Refused);
    refused.then(|| feature.evidence.clone())
}

#[cfg(test)]
mod tests;
