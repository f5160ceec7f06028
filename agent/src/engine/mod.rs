//! The one owner of the datapath. Every change (file reload, CLI call, TTL expiry, signal) is a
//! message to it, so there is one writer and no lock.
//!
//! It runs on a thread of its own: map writes block, and the socket must keep answering meanwhile.
//! What the kernel should hold is always computed anew from two sources, the files and what was
//! said by hand, and the difference to what it holds is written; a write that fails is undone.

use std::{
    path::PathBuf,
    sync::{Arc, mpsc},
    time::{Duration, Instant},
};

use tokio::sync::{broadcast, oneshot, watch};
use tracing::{debug, error, info, warn};

use crate::{
    config::{AgentConfig, Config, Files, OnExit, atomic_file::AtomicFile},
    datapath::{self, Datapath, Found, Options, StatisticsOptions, walk::Mode},
    kernel::{
        facts::host_facts,
        features::{Feature, Presence, can_set},
        interference::{Target, Verdict},
    },
    policy::{HostFacts, PolicyName},
    wire::{
        events::StreamItem,
        stats::StatsAnswer,
        types::{
            AddRequest, ApplyRequest, Caller, ChangeAnswer, DetachAnswer, DetachRequest,
            ReloadView, RemoveRequest, StatusAnswer, WalkView, now_s,
        },
    },
};

mod audit;
mod busy;
mod changes;
mod commit;
mod events;
pub mod manual;
pub mod memory;
mod probing;
mod reading;
mod state;
pub mod systemd;
mod views;
pub mod walk;

use audit::{Cause, Source};
use busy::Busy;
use manual::{Manual, Shelf, boottime_ms};
use probing::Probing;
pub use reading::Reading;
use state::State;
use walk::Walks;

/// How often the attachment and the host's sysctls are looked at.
const HEALTH_INTERVAL: Duration = Duration::from_secs(5);

/// How long `detach --restore` may take: less than its client waits.
const RESTORE_LIMIT: Duration = Duration::from_secs(60);
/// Readiness may be asked more often than reading the maps is worth.
const VERIFY_INTERVAL: Duration = Duration::from_secs(1);
/// How often it is looked at meanwhile.
const RESTORE_INTERVAL: Duration = Duration::from_millis(10);

/// Why a request was refused. The text goes to the person who asked.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The request is wrong; nothing changed.
    #[error("{0}")]
    Refused(String),
    /// The request is right and could not be carried out; nothing changed, or `status` says what did.
    #[error("{0}")]
    Failed(String),
    /// The daemon is going down.
    #[error("the daemon is stopping")]
    Stopping,
}

type Reply<T> = oneshot::Sender<Result<T, EngineError>>;

/// What the engine is asked.
pub enum Message {
    /// `rto-agent add`.
    Add(Box<AddRequest>, Caller, Reply<ChangeAnswer>),
    /// `rto-agent remove`.
    Remove(RemoveRequest, Caller, Reply<ChangeAnswer>),
    /// `rto-agent reload`.
    Reload(Caller, Reply<ChangeAnswer>),
    /// `rto-agent detach`.
    Detach(DetachRequest, Caller, Reply<DetachAnswer>),
    /// `rto-agent apply`.
    Apply(ApplyRequest, Caller, Reply<WalkView>),
    /// What `rto-agent doctor` found by its own probe.
    Probed(Verdict, Caller, Reply<()>),
    /// Look at the kernel now and publish a fresh status.
    Refresh(Reply<()>),
    /// Compare the kernel's maps with what they should hold; what is amiss, if anything.
    Verify(Reply<Vec<String>>),
    /// `rto-agent watch`: retransmissions from now on.
    Watch(
        Option<PolicyName>,
        Reply<broadcast::Receiver<Arc<StreamItem>>>,
    ),
    /// Somebody who watched has gone.
    Unwatched,
    /// SIGHUP.
    Hangup,
    /// A watched file changed.
    FilesChanged,
    /// SIGTERM or SIGINT.
    Stop,
}

/// The engine's address.
#[derive(Clone)]
pub struct Handle {
    messages: mpsc::Sender<Message>,
    status: watch::Receiver<Arc<StatusAnswer>>,
    stats: watch::Receiver<Arc<StatsAnswer>>,
    files: watch::Receiver<Arc<Vec<PathBuf>>>,
    walk: watch::Receiver<Arc<WalkView>>,
    reading: watch::Receiver<Option<Arc<Reading>>>,
    busy: Busy,
}

impl Handle {
    /// The address of no engine: whoever has the receiver answers, and `status` is what was published.
    #[must_use]
    pub fn to_nobody(status: StatusAnswer) -> (Self, mpsc::Receiver<Message>) {
        let (messages, receiver) = mpsc::channel();
        let handle = Self {
            messages,
            status: watch::Sender::new(Arc::new(status)).subscribe(),
            stats: watch::Sender::new(Arc::default()).subscribe(),
            files: watch::Sender::new(Arc::default()).subscribe(),
            walk: watch::Sender::new(Arc::default()).subscribe(),
            reading: watch::Sender::new(Some(Arc::default())).subscribe(),
            busy: Busy::default(),
        };
        (handle, receiver)
    }

    /// Sends a message and waits for the answer.
    ///
    /// # Errors
    ///
    /// What the engine answers, or [`EngineError::Stopping`] if it is gone.
    pub async fn ask<T>(
        &self,
        message: impl FnOnce(Reply<T>) -> Message,
    ) -> Result<T, EngineError> {
        let (reply, answer) = oneshot::channel();
        self.messages
            .send(message(reply))
            .map_err(|_| EngineError::Stopping)?;
        answer.await.map_err(|_| EngineError::Stopping)?
    }

    /// Has the engine publish its state anew and waits for that, but no longer than `patience`, of which the
    /// time that it has been at a change already is a part: under a long one there is nothing to wait for.
    ///
    /// # Errors
    ///
    /// [`EngineError::Stopping`] if it is gone.
    pub async fn refresh(&self, patience: Duration) -> Result<(), EngineError> {
        let patience = patience.saturating_sub(self.busy.time());
        if patience.is_zero() {
            return Ok(());
        }
        let refreshed = tokio::time::timeout(patience, self.ask(Message::Refresh)).await;
        refreshed.unwrap_or(Ok(()))
    }

    /// Sends a message that has no answer; a stopped engine needs none.
    pub fn tell(&self, message: Message) {
        let _stopped = self.messages.send(message);
    }

    /// How long the engine has been at the change it is at.
    #[must_use]
    pub fn busy_for(&self) -> Duration {
        self.busy.time()
    }

    /// How far its work has come: another number each time that it has got on.
    #[must_use]
    pub fn steps(&self) -> u64 {
        self.busy.steps()
    }

    /// Whether the engine has not come to its end of starting yet.
    #[must_use]
    pub fn is_starting(&self) -> bool {
        self.reading.borrow().is_none()
    }

    /// The last published status. Never waits.
    #[must_use]
    pub fn status(&self) -> Arc<StatusAnswer> {
        self.status.borrow().clone()
    }

    /// The statistics published with it. Never waits.
    #[must_use]
    pub fn stats(&self) -> Arc<StatsAnswer> {
        self.stats.borrow().clone()
    }

    /// The walk over open sockets that runs, or the last one. Never waits.
    #[must_use]
    pub fn walk(&self) -> Arc<WalkView> {
        self.walk.borrow().clone()
    }

    /// What `list` and `lookup` go by. Waits only for the end of the engine's start.
    ///
    /// # Errors
    ///
    /// [`EngineError::Stopping`] if the start failed.
    pub async fn reading(&self) -> Result<Arc<Reading>, EngineError> {
        let mut reading = self.reading.clone();
        let there = reading.wait_for(Option::is_some).await;
        let there = there.map_err(|_| EngineError::Stopping)?;
        there.clone().ok_or(EngineError::Stopping)
    }

    /// The files the configuration was read from, as they change.
    #[must_use]
    pub fn files(&self) -> watch::Receiver<Arc<Vec<PathBuf>>> {
        self.files.clone()
    }
}

/// What the daemon is started with.
#[derive(Clone, Debug)]
pub struct Start {
    /// The configuration file.
    pub config_path: PathBuf,
    /// The configuration read from it.
    pub config: Config,
    /// [`Files::fingerprint`] of what was read.
    pub fingerprint: u64,
    /// The cgroup2 directory to attach to.
    pub cgroup: PathBuf,
    /// The host.
    pub host: HostFacts,
    /// Kernel release, for status.
    pub kernel: String,
    /// What the kernel has.
    pub features: Vec<Feature>,
    /// It tells a program which process called connect().
    pub tells_process: bool,
}

/// The engine: see the module.
pub struct Engine {
    start: Start,
    /// Configuration in force: the last good one.
    config: Config,
    manual: Manual,
    shelf: Shelf,
    /// When entries past their time are looked at again; absent unless the kernel would not have them out.
    expiry_after: Option<Instant>,
    state: State,
    /// Fingerprint of the files last read, good or bad.
    fingerprint: u64,
    /// Fingerprint of the files that `config` is, and the host it was checked for.
    config_of: (u64, HostFacts),
    last_reload: ReloadView,
    warnings: Vec<String>,
    detached_by: Option<Caller>,
    started: Instant,
    messages: mpsc::Receiver<Message>,
    status: watch::Sender<Arc<StatusAnswer>>,
    stats: watch::Sender<Arc<StatsAnswer>>,
    /// When the statistics were last read, and how long that took.
    stats_read: (Instant, Duration),
    files: watch::Sender<Arc<Vec<PathBuf>>>,
    systemd: systemd::Systemd,
    events: events::Events,
    walks: Walks,
    reading: watch::Sender<Option<Arc<Reading>>>,
    busy: Busy,
    restoring: Option<Restoring>,
    probing: Probing,
    /// When the kernel's maps were last compared, and how long that took.
    verified: Option<(Instant, Duration)>,
}

/// A detachment whose sockets are being given back what they had.
struct Restoring {
    reply: Reply<DetachAnswer>,
    deadline: Instant,
}

/// The engine's ends of what a [`Handle`] has the others of.
pub struct Channels {
    messages: mpsc::Receiver<Message>,
    status: watch::Sender<Arc<StatusAnswer>>,
    stats: watch::Sender<Arc<StatsAnswer>>,
    files: watch::Sender<Arc<Vec<PathBuf>>>,
    reading: watch::Sender<Option<Arc<Reading>>>,
    busy: Busy,
    walks: Walks,
}

/// An engine's address, which can be given to others before the engine has started.
#[must_use]
pub fn channels(start: &Start) -> (Channels, Handle) {
    let (sender, messages) = mpsc::channel();
    let (files, files_seen) = watch::channel(Arc::new(start.config.files.clone()));
    let status = views::initial(start, Found::Nothing);
    let (status, status_seen) = watch::channel(Arc::new(status));
    let (stats, stats_seen) = watch::channel(Arc::new(StatsAnswer::default()));
    let (reading, reading_seen) = watch::channel(None);
    let (walks, walk_seen) = Walks::new();
    let busy = Busy::default();
    let channels = Channels {
        busy: busy.clone(),
        messages,
        status,
        stats,
        files,
        reading,
        walks,
    };
    let handle = Handle {
        messages: sender,
        status: status_seen,
        stats: stats_seen,
        files: files_seen,
        walk: walk_seen,
        reading: reading_seen,
        busy,
    };
    (channels, handle)
}

impl Engine {
    /// Brings the kernel in line with the configuration and attaches; says so to `channels`' other ends.
    ///
    /// # Errors
    ///
    /// If the program cannot be put in force; what an earlier run left in force stays.
    pub fn start(start: Start, channels: Channels) -> anyhow::Result<Self> {
        channels.busy.work_here();
        let starting = channels.busy.begin();
        let agent = &start.config.agent;
        let (mut manual, lost) = Manual::load(&agent.state_dir)?;
        let mut shelf = Shelf::new(agent.state_dir.clone());
        let saved_path = Config::saved_path(&start.config_path);
        if let Err(e) = AtomicFile::remove_stale(&saved_path) {
            warn!("a draft of {} cannot be removed: {e}", saved_path.display());
        }
        let saved = manual.clone();
        manual.expire(boottime_ms());
        let set = manual.over(&start.config.set);
        let options = Options {
            cgroup: start.cgroup.clone(),
            pin_dir: agent.pin_dir.clone(),
            max_entries: datapath::room_for(set.entries.len(), agent.max_entries),
            statistics: statistics_options(agent, start.tells_process),
            without_clone: without_clone(&start.features),
            hz: start.host.hz,
            host_defaults: start.host.defaults(),
        };
        let datapath = Datapath::open(options)?;
        let mut state = State::new(datapath, start.host, agent.max_entries)?;
        let found = state.found();
        let changed = state.become_set(set)?;
        state.attach()?;
        log_start(found, &state);
        if manual != saved {
            shelf.save(&manual);
        }
        Cause::from(Source::Start).audit("start", &changed, state.last_change());

        let config = start.config.clone();
        let last_reload = reload_view(&Source::Start.into(), Ok(&config));
        let warnings: Vec<String> = lost.into_iter().collect();
        for warning in &warnings {
            warn!("{warning}");
        }
        let mut engine = Self {
            fingerprint: start.fingerprint,
            config_of: (start.fingerprint, start.host),
            start,
            config,
            manual,
            shelf,
            expiry_after: None,
            state,
            last_reload,
            warnings,
            detached_by: None,
            started: Instant::now(),
            messages: channels.messages,
            status: channels.status,
            stats: channels.stats,
            stats_read: (Instant::now(), Duration::ZERO),
            files: channels.files,
            systemd: systemd::Systemd::from_environment(),
            events: events::Events::new(),
            walks: channels.walks,
            reading: channels.reading,
            busy: channels.busy.clone(),
            restoring: None,
            probing: Probing::new(),
            verified: None,
        };
        engine.publish_reading();
        engine.publish();
        drop(starting);
        memory::give_back();
        Ok(engine)
    }

    /// Serves messages until told to stop, then leaves the kernel as `on_exit` says.
    ///
    /// # Errors
    ///
    /// If the program could not be detached.
    pub fn run(mut self) -> anyhow::Result<()> {
        let line = self.status_line();
        self.systemd.ready(&line);
        self.apply_to_open(&Source::Start.into());
        self.consider_probe();
        let mut next_health = Instant::now() + HEALTH_INTERVAL;
        loop {
            let now = Instant::now();
            if now >= next_health {
                self.check_health();
                next_health = now + HEALTH_INTERVAL;
            }
            self.expire();
            self.finish_restore();
            if self.walks.take_again() {
                self.apply_to_open(&Source::File.into());
            }
            self.systemd.watchdog();
            match self.messages.recv_timeout(self.until_next(next_health)) {
                Ok(Message::Stop) | Err(mpsc::RecvTimeoutError::Disconnected) => break,
                Ok(message) => self.handle(message),
                Err(mpsc::RecvTimeoutError::Timeout) => {}
            }
        }
        self.stop()
    }

    fn until_next(&self, next_health: Instant) -> Duration {
        let mut wait = next_health.saturating_duration_since(Instant::now());
        if let Some(end) = self.manual.next_expiry_ms() {
            let due = Duration::from_millis(end.saturating_sub(boottime_ms()));
            let again = self
                .expiry_after
                .map(|after| after.saturating_duration_since(Instant::now()));
            wait = wait.min(due.max(again.unwrap_or_default()));
        }
        if self.restoring.is_some() {
            wait = wait.min(RESTORE_INTERVAL);
        }
        wait.min(self.systemd.watchdog_due())
    }

    fn handle(&mut self, message: Message) {
        let only_reads = matches!(
            message,
            Message::Refresh(_)
                | Message::Probed(..)
                | Message::Apply(..)
                | Message::Verify(_)
                | Message::Watch(..)
                | Message::Unwatched
        );
        if !only_reads {
            self.probing.disturb();
        }
        // A client that went away before its answer is no concern of ours.
        match message {
            Message::Add(request, by, reply) => {
                let answer = self.add(&request, by);
                self.publish_known();
                drop(reply.send(answer));
            }
            Message::Remove(request, by, reply) => {
                let answer = self.remove(&request, by);
                self.publish_known();
                drop(reply.send(answer));
            }
            Message::Reload(by, reply) => {
                let answer = self.reload_and_attach(&Cause::asked(by));
                self.publish_known();
                drop(reply.send(answer));
                memory::give_back();
            }
            Message::Detach(request, by, reply) => self.detach(request, by, reply),
            Message::Apply(request, by, reply) => drop(reply.send(self.apply(&request, by))),
            Message::Probed(verdict, by, reply) => {
                self.probing.tell(verdict, &format!("doctor, {by}"));
                drop(reply.send(Ok(())));
            }
            // Who has gone meanwhile is not waited for by anybody.
            Message::Refresh(reply) if reply.is_closed() => return,
            Message::Verify(reply) if reply.is_closed() => return,
            Message::Refresh(reply) => {
                self.publish();
                drop(reply.send(Ok(())));
                return;
            }
            Message::Verify(reply) => {
                // Reading a million entries takes a second: nine tenths of the time are for other things.
                let due =
                    |(at, took): (Instant, Duration)| at.elapsed() >= VERIFY_INTERVAL.max(9 * took);
                if self.verified.is_none_or(due) {
                    let begin = Instant::now();
                    let _busy = self.busy.begin();
                    self.state.verify();
                    self.verified = Some((Instant::now(), begin.elapsed()));
                }
                self.publish();
                let status = self.status.borrow().clone();
                let ready = status.attachment.attached && status.in_sync;
                let mut problems = status
                    .attachment
                    .problem
                    .iter()
                    .cloned()
                    .collect::<Vec<_>>();
                problems.extend(self.state.problems().cloned());
                if !ready && problems.is_empty() {
                    problems.push("not attached".to_owned());
                }
                drop(reply.send(Ok(if ready { Vec::new() } else { problems })));
                return;
            }
            Message::Watch(policy, reply) => {
                drop(reply.send(self.watch(policy.as_ref())));
                return;
            }
            Message::Unwatched => {
                self.events.end_if_unwatched();
                return;
            }
            Message::Hangup => {
                self.reload_and_attach(&Source::Signal.into())
                    .map_or_else(drop_logged, drop);
                memory::give_back();
            }
            Message::FilesChanged => self.files_changed(),
            Message::Stop => {}
        }
        self.publish();
    }

    fn watch(
        &mut self,
        policy: Option<&PolicyName>,
    ) -> Result<broadcast::Receiver<Arc<StreamItem>>, EngineError> {
        let agent = &self.start.config.agent;
        if !agent.statistics {
            return Err(EngineError::Refused(
                "nothing is told: statistics = false in [agent]".to_owned(),
            ));
        }
        let policies = &self.state.set().policies;
        if let Some(policy) = policy {
            let is_unlisted = agent.count_unmatched && *policy == PolicyName::unmatched();
            if !is_unlisted && !policies.contains_key(policy) {
                let known: Vec<_> = policies.keys().map(PolicyName::as_str).collect();
                return Err(EngineError::Refused(format!(
                    "no policy {policy} is in force; there is: {}",
                    known.join(", ")
                )));
            }
        }
        self.events
            .subscribe(self.state.datapath(), self.state.host())
    }

    fn files_changed(&mut self) {
        let _busy = self.busy.begin();
        let files = Files::read(&self.start.config_path);
        if files.fingerprint() != self.fingerprint {
            self.reload_to(files, &Source::File.into())
                .map_or_else(drop_logged, drop);
        }
        memory::give_back();
    }

    /// Reads the files again; also ends a detachment made on purpose.
    fn reload_and_attach(&mut self, cause: &Cause) -> Result<ChangeAnswer, EngineError> {
        if self.restoring.is_some() {
            return Err(restore_runs());
        }
        let mut answer = self.reload(cause)?;
        if self.detached_by.is_some() {
            let options = self.state.options().clone();
            let reopened = Datapath::open(options)
                .map_err(|e| EngineError::Failed(e.to_string()))
                .and_then(|datapath| self.state.reopen(datapath));
            answer.changed = reopened?;
            self.detached_by = None;
            self.publish_reading();
            if let Some(datapath) = self.state.datapath() {
                self.events.resume(datapath, self.state.host());
            }
            self.probing.look(&self.state.options().cgroup);
            answer.notes.push("attached again".to_owned());
            cause.audit_other("attach");
            self.apply_to_open(cause);
        }
        Ok(answer)
    }

    fn reload(&mut self, cause: &Cause) -> Result<ChangeAnswer, EngineError> {
        let _busy = self.busy.begin();
        let begin = Instant::now();
        let files = Files::read(&self.start.config_path);
        debug!(took = ?begin.elapsed(), "files read");
        self.reload_to(files, cause)
    }

    fn reload_to(&mut self, files: Files, cause: &Cause) -> Result<ChangeAnswer, EngineError> {
        self.systemd.reloading();
        let _busy = self.busy.begin();
        let result = self.reload_inner(files, cause);
        let line = self.status_line();
        self.systemd.ready(&line);
        result
    }

    fn reload_inner(&mut self, files: Files, cause: &Cause) -> Result<ChangeAnswer, EngineError> {
        let begin = Instant::now();
        self.fingerprint = files.fingerprint();
        let config_of = (self.fingerprint, *self.state.host());
        // Who replaces a file and asks for a reload has it read twice otherwise: the file is watched.
        let config = if config_of == self.config_of {
            self.config.clone()
        } else {
            match Config::of(files, self.state.host()) {
                Ok(config) => config,
                Err(e) => {
                    return Err(self.not_reloaded(EngineError::Refused(e.to_string()), cause));
                }
            }
        };
        let parsed = begin.elapsed();
        let mut manual = self.manual.clone();
        let set = manual.over(&config.set);
        let room = self.state.set_room(config.agent.max_entries);
        let mut notes: Vec<String> = config.warnings.iter().map(ToString::to_string).collect();
        notes.extend(restart_notes(&self.start.config.agent, &config.agent));
        if config.agent.max_entries < self.config.agent.max_entries {
            notes.push(
                "[agent] max_entries is smaller: it takes effect with the next start".to_owned(),
            );
        }
        let was_off = !self.config.agent.apply_to_open;
        let put = self.put_in_force(set, "reload", cause, |engine| {
            engine.last_reload = reload_view(cause, Ok(&config));
            engine.warnings = restart_notes(&engine.start.config.agent, &config.agent);
            if manual != engine.manual {
                engine.shelf.save(&manual);
                notes.extend(engine.shelf.problem());
            }
            engine.manual = manual;
            engine.files.send_replace(Arc::new(config.files.clone()));
            engine.config = config;
            engine.config_of = config_of;
            Ok(())
        });
        let changed = match put {
            Ok(changed) => changed,
            Err(e) => {
                self.state.set_room(room);
                return Err(self.not_reloaded(e, cause));
            }
        };
        debug!(?parsed, written = ?begin.elapsed() - parsed, "reload took");
        if was_off && changed.added + changed.changed == 0 {
            self.apply_to_open(cause);
        }
        Ok(ChangeAnswer {
            changed,
            notes,
            effects: Vec::new(),
        })
    }

    /// Remembers that the files were not taken over, and says what is in force instead.
    fn not_reloaded(&mut self, error: EngineError, cause: &Cause) -> EngineError {
        const KEPT: &str = "the last good configuration stays in force";
        let text = error.to_string();
        self.last_reload = reload_view(cause, Err(&text));
        match error {
            EngineError::Refused(_) => {
                error!(%cause, "configuration refused, {KEPT}:\n{text}");
                EngineError::Refused(format!("{text}\n{KEPT}"))
            }
            // Where the kernel could not go back the text says what it holds.
            EngineError::Failed(_) if self.state.in_sync() => {
                error!(%cause, "the configuration could not be put in force, {KEPT}: {text}");
                EngineError::Failed(format!("{text}\n{KEPT}"))
            }
            error => {
                error!(%cause, "the configuration could not be put in force: {text}");
                error
            }
        }
    }

    /// Takes out what is past its time, out of the kernel first: the file has the times in it, so that
    /// nothing of it comes back where that cannot be written.
    fn expire(&mut self) {
        if self
            .expiry_after
            .is_some_and(|after| Instant::now() < after)
        {
            return;
        }
        let mut manual = self.manual.clone();
        let gone = manual.expire(boottime_ms());
        if gone.is_empty() {
            return;
        }
        let set = manual.over(&self.config.set);
        let put = self.put_in_force(set, "expire", &Source::Ttl.into(), |engine| {
            engine.expiry_after = None;
            engine.shelf.save(&manual);
            engine.manual = manual;
            Ok(())
        });
        if let Err(e) = put {
            error!("entries past their time could not be removed, trying again: {e}");
            self.expiry_after = Some(Instant::now() + HEALTH_INTERVAL);
        }
        self.publish();
    }

    fn check_health(&mut self) {
        self.events.end_if_unwatched();
        self.shelf.look(&self.manual);
        if self.detached_by.is_some() {
            self.probing.look(&self.state.options().cgroup);
            return;
        }
        let busy = self.busy.begin();
        self.state.heal();
        drop(busy);
        self.consider_probe();
        match host_facts(&self.start.features) {
            Ok(host) if host != *self.state.host() => {
                info!(?host, "the host's TCP settings changed");
                self.state.set_host(host);
                let set = self.manual.over(&self.config.set);
                let cause = Source::Host.into();
                if let Err(e) = self.put_in_force(set, "compute anew", &cause, |_| Ok(())) {
                    error!("settings could not be computed anew for this host: {e}");
                }
            }
            Ok(_) => {}
            Err(e) => warn!("{e}"),
        }
        self.publish();
    }

    /// Walks over the open sockets, if the configuration says so.
    fn apply_to_open(&mut self, cause: &Cause) {
        if !self.config.agent.apply_to_open || self.detached_by.is_some() {
            return;
        }
        if self.walks.is_running() {
            self.walks.ask_again();
        } else if let Err(e) = self.begin_walk(Mode::ApplyToNew, cause) {
            warn!("open sockets were left alone: {e}");
            self.walks.refused(&cause.to_string(), e.to_string());
        }
    }

    fn apply(&mut self, request: &ApplyRequest, by: Caller) -> Result<WalkView, EngineError> {
        if self.walks.is_running() {
            return Err(EngineError::Refused(
                "a walk over the open sockets runs already; see rto-agent status".to_owned(),
            ));
        }
        let mode = if request.new_only {
            Mode::ApplyToNew
        } else {
            Mode::Apply
        };
        self.begin_walk(mode, &Cause::asked(by))
    }

    fn begin_walk(&mut self, mode: Mode, cause: &Cause) -> Result<WalkView, EngineError> {
        if self.restoring.is_some() {
            return Err(restore_runs());
        }
        let Some(datapath) = self.state.datapath().filter(|_| self.detached_by.is_none()) else {
            return Err(EngineError::Refused(
                "nothing is in force; rto-agent reload attaches again".to_owned(),
            ));
        };
        self.check_can_walk()?;
        let walker = datapath
            .walker(mode)
            .map_err(|e| EngineError::Failed(e.to_string()))?;
        let has_hook = can_set(&self.start.features, "rto-hook-on-open-sockets") != Some(false);
        let mut policies = self.state.set().policies.values();
        let sets_rto_min = policies.any(|policy| policy.settings.rto_min.is_some());
        let notes = walk::notes(sets_rto_min, has_hook);
        cause.audit_other(match mode {
            Mode::Apply => "apply to open sockets",
            Mode::ApplyToNew => "apply to new open sockets",
            Mode::Restore => "give back to open sockets",
        });
        let cause = cause.to_string();
        Ok(self.walks.begin(vec![walker], &cause, notes))
    }

    fn check_can_walk(&self) -> Result<(), EngineError> {
        if can_set(&self.start.features, "iter-tcp") == Some(false) {
            return Err(EngineError::Refused(
                "this kernel does not let a program walk over open sockets (Linux 5.15 and later; \
                 see iter-tcp in rto-agent doctor); nothing was changed"
                    .to_owned(),
            ));
        }
        Ok(())
    }

    fn consider_probe(&mut self) {
        if self.detached_by.is_none() {
            let target = self.state.set().probe_target(self.state.host());
            let target = target.map(|(address, initial_rto_us)| Target {
                address,
                initial_rto_us,
            });
            self.probing.consider(&self.state.options().cgroup, target);
        }
    }

    fn detach(&mut self, request: DetachRequest, by: Caller, reply: Reply<DetachAnswer>) {
        let begun = if self.restoring.is_some() {
            Err(restore_runs())
        } else if request.restore && (self.state.datapath().is_some() || self.state.has_kept_maps())
        {
            self.begin_restore(by)
        } else {
            drop(reply.send(self.detach_now(by)));
            return;
        };
        match begun {
            Ok(()) => {
                self.restoring = Some(Restoring {
                    reply,
                    deadline: Instant::now() + RESTORE_LIMIT,
                });
            }
            Err(e) => drop(reply.send(Err(e))),
        }
    }

    fn detach_now(&mut self, by: Caller) -> Result<DetachAnswer, EngineError> {
        self.walks.stop();
        // Its thread loads a program over the very pins that go.
        self.events.end();
        let removed = self
            .state
            .detach()
            .map_err(|e| EngineError::Failed(e.to_string()))?;
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
        self.publish_reading();
        self.probing.look(&self.state.options().cgroup);
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
        let walkers = self
            .state
            .unlink_for_restoring()
            .map_err(|e| EngineError::Failed(e.to_string()))?;
        self.detached(by);
        self.walks.begin(walkers, walk::RESTORE, Vec::new());
        Ok(())
    }

    /// Ends a detachment once its walk has ended, or has taken too long.
    fn finish_restore(&mut self) {
        let over = |restoring: &Restoring| Instant::now() >= restoring.deadline;
        if self.walks.is_running() && !self.restoring.as_ref().is_some_and(over) {
            return;
        }
        let Some(Restoring { reply, .. }) = self.restoring.take() else {
            return;
        };
        let mut restored = (*self.walks.last()).clone();
        if self.walks.is_running() {
            self.walks.stop();
            restored.problems.push(format!(
                "not done after {} s: a socket that is in use holds it up",
                RESTORE_LIMIT.as_secs()
            ));
        }
        let answer = if restored.is_complete() {
            let removed = self.state.detach();
            removed.map(|removed| (removed, None))
        } else {
            Ok((datapath::Removed::default(), Some(self.state.leave_maps())))
        };
        self.publish_reading();
        info!(
            complete = restored.is_complete(),
            "gave back to open sockets"
        );
        let answer = answer.map(|(removed, kept)| DetachAnswer {
            removed,
            by_daemon: true,
            restored: Some(restored),
            kept,
        });
        drop(reply.send(answer.map_err(|e| EngineError::Failed(e.to_string()))));
        self.publish();
    }

    fn stop(mut self) -> anyhow::Result<()> {
        self.systemd.stopping();
        self.events.end();
        self.probing.finish();
        self.walks.stop();
        if self.restoring.is_some() || self.state.has_kept_maps() {
            let kept = self.state.leave_maps();
            warn!(
                "not every socket was given back what it had: the maps in {} are kept; rto-agent \
                 detach --restore, as root, finishes it",
                kept.display()
            );
            return Ok(());
        }
        match self.config.agent.on_exit {
            OnExit::Keep => {
                info!("stopping; the policies stay in force (on_exit = \"keep\")");
                Ok(())
            }
            OnExit::Detach => {
                let removed = self.state.detach()?;
                info!(links = removed.links, "stopping; detached");
                Ok(())
            }
        }
    }
}

fn restore_runs() -> EngineError {
    EngineError::Refused("sockets are being given back what they had; try again soon".to_owned())
}

fn drop_logged(error: EngineError) {
    warn!("{error}");
}

fn log_start(found: Found, state: &State) {
    info!(
        ?found,
        entries = state.entries(),
        cgroup = %state.options().cgroup.display(),
        "in force"
    );
}

fn reload_view(cause: &Cause, result: Result<&Config, &str>) -> ReloadView {
    ReloadView {
        at_s: now_s(),
        cause: cause.to_string(),
        ok: result.is_ok(),
        errors: result
            .err()
            .map(|text| vec![text.to_owned()])
            .unwrap_or_default(),
        warnings: result
            .map(|config| config.warnings.iter().map(ToString::to_string).collect())
            .unwrap_or_default(),
    }
}

fn statistics_options(agent: &AgentConfig, process: bool) -> StatisticsOptions {
    StatisticsOptions {
        on: agent.statistics,
        unlisted: agent.count_unmatched,
        rtt: agent.rtt_sampling,
        process,
    }
}

/// Reading the kernel's types once more, only to be refused once more, would take a third of the start.
fn without_clone(features: &[Feature]) -> Option<String> {
    let feature = features.iter().find(|f| f.name == "bpf-lsm-cgroup")?;
    let refused = matches!(feature.presence, Presence::Absent | Presence::Refused);
    refused.then(|| feature.evidence.clone())
}

/// What of `[agent]` a reload does not take over.
fn restart_notes(started: &AgentConfig, now: &AgentConfig) -> Vec<String> {
    let differs = [
        ("cgroup", started.cgroup != now.cgroup),
        ("pin_dir", started.pin_dir != now.pin_dir),
        ("socket", started.socket != now.socket),
        ("state_dir", started.state_dir != now.state_dir),
        ("group", started.group != now.group),
        ("metrics", started.metrics != now.metrics),
        ("statistics", started.statistics != now.statistics),
        (
            "count_unmatched",
            started.count_unmatched != now.count_unmatched,
        ),
        ("rtt_sampling", started.rtt_sampling != now.rtt_sampling),
    ];
    differs
        .into_iter()
        .filter(|(_, differs)| *differs)
        .map(|(key, _)| format!("[agent] {key} changed: it takes effect with the next start"))
        .collect()
}

/// For commands that work without a daemon.
pub use datapath::{remove_kept_pins, remove_links, remove_pins, walk::for_restoring};
