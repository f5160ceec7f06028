//! The engine's thread: its queue and its timers. Map writes block, and the socket must keep answering during them.

use std::{
    sync::{Arc, mpsc},
    time::{Duration, Instant},
};

use rto_agent_core::{
    policy::HostFacts,
    progress::{self, Progress},
    wire::{
        kernel::Found,
        types::{Caller, ChangeAnswer, DetachAnswer, DetachRequest, ReloadRequest},
    },
};
use rto_agent_kernel::{
    datapath::BpfKernel,
    kernel::{clock::boottime_ms, facts::host_facts},
};
use tokio::sync::watch;
use tracing::{error, info, warn};

use super::{
    Channels, EngineConfig, EngineError, LastGood, Message, Open, Reply, STOP_LIMIT, Snapshot,
    apply::Apply,
    audit::{Cause, Change, Source},
    control::Control,
    desired::Desired,
    memory,
    reconcile::Persist,
    snapshot::{Health, Shared},
    state::{self, State},
    systemd::{self, Systemd},
};
use crate::problem::Problem;

/// Interval between checks of the attachment, the host's sysctls and a part of the maps.
pub(super) const HEALTH_INTERVAL: Duration = Duration::from_secs(5);

/// Interval between attempts to remove expired entries. (The program ignores them, 69 s late at
/// most.)
const EXPIRY_RETRY: Duration = Duration::from_secs(1);

/// Time the probe and the walk together get to finish after a stop. Shorter than the daemon's own
/// limit for the engine, so that the engine can still detach.
const JOBS_LIMIT: Duration = STOP_LIMIT.saturating_sub(Duration::from_millis(500));

/// The single writer to the kernel: owns the queue of messages, and publishes what its parts have
/// done.
pub struct Engine {
    pub(super) config: Arc<EngineConfig>,
    pub(super) state: State,
    pub(super) apply: Apply,
    pub(super) control: Control,
    /// When expired entries are looked for again, if the kernel refused to remove them.
    expiry_after: Option<Instant>,
    /// Why the policies could not be computed for the host's current settings.
    host_problem: Problem,
    /// Why expired entries are still in the kernel.
    expiry_problem: Problem,
    /// Why the metrics are not served.
    metrics_problem: Problem,
    messages: mpsc::Receiver<Message>,
    snapshots: watch::Sender<Arc<Snapshot>>,
    started: Instant,
    shared: Arc<Shared>,
    progress: Progress,
    pub(super) systemd: Systemd,
    /// See [`systemd::step_interval`].
    step_interval: Duration,
    /// [`HEALTH_INTERVAL`], except in tests.
    health_interval: Duration,
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
        last_good: LastGood,
        channels: Channels,
    ) -> anyhow::Result<Self> {
        channels.progress.count_this_thread();
        progress::step();
        let config = Arc::new(config);
        let agent = &config.config.agent;
        let (desired, store, lost) = state::load(&config)?;
        let (mut control, desired) = Control::start(agent, desired);
        let starting = channels.snapshots.borrow().clone();
        let opening = (open, starting.shared.clone());
        let (apply, change) = Apply::start(opening, desired, store, &config, &channels.sender)?;
        let cause = Cause::from(Source::Start);
        cause.audit(&change);
        if let Some(warning) = &lost {
            warn!("{warning}");
        }
        match apply.reconciler().found() {
            Found::Adopted | Found::MapsKept => {}
            Found::Nothing | Found::Replaced => control.maps_are_new(),
        }
        let mut engine = Self {
            state: State::start(
                config.clone(),
                last_good,
                &cause,
                lost.into_iter().collect(),
            ),
            config,
            apply,
            control,
            expiry_after: None,
            host_problem: Problem::default(),
            expiry_problem: Problem::default(),
            metrics_problem: Problem::default(),
            messages: channels.messages,
            started: starting.started,
            shared: starting.shared.clone(),
            progress: channels.progress,
            snapshots: channels.snapshots,
            systemd: Systemd::default(),
            step_interval: systemd::step_interval(),
            health_interval: HEALTH_INTERVAL,
        };
        engine.publish();
        memory::trim_heap();
        Ok(engine)
    }

    /// Serves messages until it is stopped, then leaves the kernel as `on_exit` says.
    pub fn run(mut self) -> anyhow::Result<()> {
        self.systemd.ready(&self.snapshots.borrow().status_line());
        self.apply.apply_to_open(&Source::Start.into());
        self.apply.consider_probe();
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
            if self.control.tick_if_due(&mut self.apply) {
                self.publish();
            }
            if let Some((reply, answer)) = self.apply.finish_restore() {
                self.answer(reply, |_| answer);
            }
            if self.apply.finish_draining() {
                self.publish();
            }
            self.apply.walk_again();
        }
        self.stop()
    }

    fn until_next(&self, next_health: Instant) -> Duration {
        let now = Instant::now();
        let mut wait = next_health.saturating_duration_since(now);
        if let Some(end) = self.apply.desired().runtime.next_expiry_ms() {
            let due = Duration::from_millis(end.saturating_sub(boottime_ms()));
            let again = self
                .expiry_after
                .map(|after| after.saturating_duration_since(now));
            wait = wait.min(due.max(again.unwrap_or_default()));
        }
        if let Some(deadline) = self.apply.restore_deadline() {
            wait = wait.min(deadline.saturating_duration_since(now));
        }
        if let Some(due) = self.apply.drain_due() {
            wait = wait.min(due.saturating_duration_since(now));
        }
        if let Some(due) = self.control.until_tick(&self.apply) {
            wait = wait.min(due);
        }
        wait.min(self.step_interval)
    }

    fn handle(&mut self, message: Message) {
        match message {
            Message::Add(request, by, reply) => self.answer(reply, |e| e.add(*request, by)),
            Message::Remove(request, by, reply) => self.answer(reply, |e| e.remove(request, by)),
            Message::Reload(request, by, reply) => {
                self.answer(reply, |e| e.reload_asked(&request, &Cause::asked(by)));
                memory::trim_heap();
            }
            Message::Detach(request, by, reply) => self.detach(&request, by, reply),
            Message::Attach(by, reply) => self.answer(reply, |e| e.attach(&Cause::asked(by))),
            Message::Apply(request, by, reply) => {
                self.answer(reply, |e| e.apply.walk(&request, by));
            }
            Message::Probed(verdict, by, reply) => self.answer(reply, |e| {
                e.apply.record_probe(verdict, by);
                Ok(())
            }),
            // The client has disconnected, and the comparison takes long.
            Message::Verify(reply) if reply.is_closed() => {}
            Message::Verify(reply) => self.answer(reply, |e| Ok(e.apply.verify())),
            Message::Watch(policy, reply) => {
                self.answer(reply, |e| e.apply.watch(policy.as_ref()));
            }
            Message::Tune(action, policy, by, reply) => {
                self.answer(reply, |e| e.control.tune(&mut e.apply, action, &policy, by));
            }
            Message::Metrics(problem) => {
                if problem.as_ref() != self.metrics_problem.text() {
                    self.metrics_problem
                        .becomes(problem, |text| warn!("{text}"));
                    self.publish();
                }
            }
            Message::Unwatched => self.apply.unwatched(),
            Message::Done(done) => {
                if self.apply.done(done) {
                    self.publish();
                }
            }
            Message::Sighup => {
                let request = ReloadRequest::default();
                let reloaded = self.reload_asked(&request, &Source::Signal.into());
                self.log(reloaded);
            }
            Message::FilesChanged => self.files_changed(),
            // What is due after each message is done then.
            Message::Resumed | Message::Stop => {}
        }
    }

    /// Publishes the result, then answers.
    fn answer<T>(
        &mut self,
        reply: Reply<T>,
        carry_out: impl FnOnce(&mut Self) -> Result<T, EngineError>,
    ) {
        let answer = carry_out(self);
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
        if self.apply.take_maps_are_new() {
            self.control.maps_are_new();
        }
        let mut health = self.apply.health();
        health.problems.extend(self.host_problem.text().cloned());
        health.problems.extend(self.expiry_problem.text().cloned());
        health.warnings.extend(self.metrics_problem.text().cloned());
        health.warnings.extend(self.state.warnings());
        health.warnings.extend(self.control.problems());
        let snapshot = Snapshot {
            started: self.started,
            config: self.config.clone(),
            resolved: Some(self.apply.resolved().clone()),
            reader: self.apply.reader().cloned(),
            health: Arc::new(Health {
                last_reload: self.state.last_reload().clone(),
                ..health
            }),
            walk: self.apply.walk_progress().clone(),
            tuned: self.control.published(),
            epoch: self.shared.next_epoch(),
            shared: self.shared.clone(),
        };
        self.systemd.status(&snapshot.status_line());
        let snapshot = Arc::new(snapshot);
        self.snapshots.send_replace(snapshot.clone());
        self.shared.published(&snapshot);
    }

    /// Makes a change, together with the current decisions about its policies.
    pub(super) fn reconcile(
        &mut self,
        next: &Desired,
        persist: &Persist,
        cause: &Cause,
    ) -> Result<Change, EngineError> {
        self.control
            .reconcile(&mut self.apply, next, persist, cause)
    }

    /// Begins to compare the next part of the kernel's maps.
    pub(super) fn compare_next(&mut self) {
        let snapshot = self.snapshots.borrow().clone();
        self.apply.compare_next(&snapshot);
    }

    fn detach(&mut self, request: &DetachRequest, by: Caller, reply: Reply<DetachAnswer>) {
        match self.apply.detach(request, by, reply) {
            Some((reply, answer)) => self.answer(reply, |_| answer),
            None => self.publish(),
        }
    }

    /// `rto-agent attach`: ends a detachment. The counters continue.
    pub(super) fn attach(&mut self, cause: &Cause) -> Result<ChangeAnswer, EngineError> {
        let note = if self.apply.attach()? {
            self.publish();
            self.apply.attached(cause);
            "attached again"
        } else {
            "already attached"
        };
        Ok(ChangeAnswer {
            notes: vec![note.to_owned()],
            ..ChangeAnswer::default()
        })
    }

    /// Attaches or detaches as `attach` in `[agent]` of the new files says.
    pub(super) fn follow_attach(&mut self, cause: &Cause) -> Result<(), EngineError> {
        let attach = self.apply.resolved().config().agent.attach;
        match (attach, self.apply.detached_by()) {
            (false, None) => self.apply.detach_now(Caller::CONFIGURATION).map(drop),
            (true, Some(Caller::CONFIGURATION)) => self.attach(cause).map(drop),
            _ => Ok(()),
        }
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
        let Some(next) = self.apply.desired().expired(boottime_ms()) else {
            return;
        };
        match self.reconcile(&next, &Persist::Later, &Source::Ttl.into()) {
            Ok(_) => {
                self.expiry_after = None;
                self.expiry_problem = Problem::default();
            }
            Err(e) => {
                let problem = format!(
                    "expired entries could not be removed, which is tried again every second: {e}"
                );
                self.expiry_problem
                    .becomes(Some(problem), |text| error!("{text}"));
                self.expiry_after = Some(Instant::now() + EXPIRY_RETRY);
            }
        }
        self.publish();
    }

    fn check_health(&mut self) {
        self.keep_last_good();
        if !self.apply.check_health() {
            self.publish();
            return;
        }
        match host_facts(&self.config.features) {
            Ok(host) if host != self.apply.desired().host => self.take_host(host),
            Ok(_) => self.host_problem = Problem::default(),
            Err(e) => warn!("{e}"),
        }
        self.publish();
        self.compare_next();
    }

    fn take_host(&mut self, host: HostFacts) {
        // Set even if the policies cannot be computed for the new settings.
        self.apply.set_host_defaults(host);
        let next = self.apply.desired().with_host(host);
        let changed = self.reconcile(&next, &Persist::Later, &Source::Host.into());
        if changed.is_ok() {
            info!(?host, "the host's TCP settings changed");
        }
        let problem = changed.err().map(|e| {
            format!("the host's TCP settings changed, and the policies could not be updated: {e}")
        });
        self.host_problem.becomes(problem, |text| error!("{text}"));
    }

    fn stop(mut self) -> anyhow::Result<()> {
        let begin = self.progress.stopped_at().unwrap_or_else(Instant::now);
        self.apply.cancel_jobs();
        self.control.store_tuning();
        self.apply.finish_jobs(begin + JOBS_LIMIT);
        self.apply.leave()
    }
}

#[cfg(test)]
mod tests;
