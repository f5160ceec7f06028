//! `rto-agent run`: sets up the parts of the daemon and waits for signals.

use std::{
    io,
    net::SocketAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::Context as _;
use nix::sys::stat::{Mode, umask};
use rto_agent_core::config::{AgentConfig, CgroupSetting, Config, MetricsSetting, OnExit, save};
use rto_agent_kernel::{
    datapath::{connecting, handover, make_pin_dir, probe},
    kernel::{
        self, btf,
        clock::{boottime_ms, monotonic_ms},
        facts::host_facts,
        privileges,
    },
};
use tokio::{
    net::TcpListener,
    runtime::Runtime,
    signal::unix::{Signal, SignalKind, signal},
    sync::oneshot,
    time::timeout,
};
use tracing::{info, warn};

use crate::{
    api::{
        peer, server,
        socket::{RebindingListener, Socket},
    },
    engine::{
        self, Actor, EngineConfig, EngineError, Handle, LastGood, Message, STOP_LIMIT, StartConfig,
        memory,
        systemd::{self, WatchdogKeepalive},
    },
    lock::InstanceLock,
    problem::Problem,
    telemetry::{self, http},
};

mod config_watcher;

/// Threads that read the kernel for clients. Clients that read a list slowly can block two of them.
const READERS: usize = 8;

/// How long clients may take to read the last answers.
const LAST_ANSWERS: Duration = Duration::from_millis(200);
/// The longest interval between two checks of the engine and the lock.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);

/// Longer than any daemon runs.
const ALWAYS: Duration = Duration::from_secs(u32::MAX as u64);

/// Runs the daemon until SIGTERM or SIGINT.
///
/// # Errors
///
/// If it cannot start (each error names the fix), or cannot detach when it ends.
pub fn run(config_path: &Path, cgroup: Option<&Path>) -> anyhow::Result<()> {
    kernel::preflight::check()?;
    prepare_process()?;
    // Shared until the program is loaded.
    let types = btf::Btf::vmlinux();
    let features = probe::features();
    finish_edit(config_path);
    let host = host_facts(&features)?;
    let StartConfig {
        config,
        files,
        refused,
    } = StartConfig::read(config_path, &host)?;
    let agent = config.agent.clone();
    let cgroup = resolve_cgroup(cgroup, &agent.cgroup)?;
    let lock = InstanceLock::of_state(&agent.state_dir)?;
    let _removed_if_empty = NewPinDir::make(&agent.pin_dir);
    let mut lock = lock.and_pins(&agent.pin_dir)?;
    let mut last_good = LastGood::open(&agent.persistent_dir, config_path);
    last_good.stage(&files);
    for warning in &config.warnings {
        warn!("{warning}");
    }
    let engine_config = EngineConfig {
        config_path: config_path.to_owned(),
        kernel: kernel::version::running()?.to_string(),
        cgroup,
        host,
        config,
        fingerprint: files.fingerprint(),
        refused,
        features,
        tells_process: probe::tells_process(),
        dropped_lines: telemetry::dropped_lines,
    };
    drop(files);
    let runtime = runtime()?;
    let entered = runtime.enter();
    let (served, _socket) = Served::bind(config_path, &agent)?;
    // Must run before there is a second thread.
    let mut pinned_again = PinnedAgain::adopt(&agent.pin_dir);
    privileges::keep_for_running().context("capabilities cannot be dropped")?;
    // The first of the readers.
    drop(runtime.spawn_blocking(|| ()));
    let signals = signals()?;
    let (channels, handle) = engine::channels(&engine_config);
    let (ended, end) = oneshot::channel::<()>();
    // The socket answers while a million entries are being loaded.
    let thread = std::thread::Builder::new()
        .name("engine".to_owned())
        .spawn(move || {
            // Dropped when the engine ends, even by a panic.
            let _ended = ended;
            let engine = Actor::start(engine_config, last_good, channels)?;
            drop(types);
            engine.run()
        })
        .context("cannot start the engine's thread")?;
    let overdue = runtime.block_on(served.until_end(signals, &handle, &mut lock, end));
    drop(entered);
    // A thread that is sending a list does not delay the end.
    runtime.shutdown_background();
    let snapshot = handle.snapshot();
    let on_exit = snapshot.on_exit().unwrap_or(agent.on_exit);
    if on_exit == OnExit::Keep || !snapshot.is_starting() {
        pinned_again.stay();
    }
    drop((snapshot, handle));
    if let Some(waited) = overdue {
        // The engine writes nothing more: it checks before each write whether it is to stop.
        let waited = waited.as_secs_f32();
        warn!("the engine did not stop within {waited} s; the daemon exits without waiting for it");
        return leave(on_exit, &agent.pin_dir, &pinned_again);
    }
    match thread.join() {
        Ok(Err(e)) if is_interrupted(&e) => leave(on_exit, &agent.pin_dir, &pinned_again),
        Ok(result) => result,
        Err(_) => anyhow::bail!("the engine thread panicked; the active policies stay active"),
    }
}

/// Sets what the process has for its lifetime, and drops the capabilities that it does not need.
fn prepare_process() -> anyhow::Result<()> {
    memory::set_mmap_threshold();
    // Other users must never be able to write to files and directories that the daemon creates.
    let others = Mode::from_bits_truncate(0o022);
    umask(umask(others) | others);
    privileges::keep_for_start().context("capabilities cannot be dropped")
}

/// Completes an edit of the saved entries that the previous daemon did not finish.
fn finish_edit(config_path: &Path) {
    let path = Config::saved_path(config_path);
    if let Err(e) = save::finish(&path) {
        warn!(
            "{}: an unfinished edit cannot be completed: {e}",
            path.display()
        );
    }
}

fn runtime() -> io::Result<Runtime> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(READERS)
        // If no more threads can be started (pids.max), the existing threads do the work.
        .thread_keep_alive(ALWAYS)
        .build()
}

/// What the daemon serves while the engine runs.
struct Served {
    config_path: PathBuf,
    pin_dir: PathBuf,
    listener: RebindingListener,
    allowed: peer::Allowed,
    metrics: Option<(SocketAddr, io::Result<TcpListener>)>,
}

impl Served {
    /// Listens on the API's socket and for metrics. The socket's file exists as long as its guard.
    fn bind(config_path: &Path, agent: &AgentConfig) -> anyhow::Result<(Self, Socket)> {
        let group = peer::group_id(&agent.group)?;
        let (listener, socket) = RebindingListener::bind(&agent.socket, group)?;
        let metrics = match &agent.metrics {
            MetricsSetting::Off => None,
            // A port below 1024 needs a capability that the daemon is about to drop.
            MetricsSetting::Tcp(address) => Some((*address, http::listen(*address))),
        };
        let served = Self {
            config_path: config_path.to_owned(),
            pin_dir: agent.pin_dir.clone(),
            listener,
            allowed: peer::Allowed { group },
            metrics,
        };
        Ok((served, socket))
    }

    /// Serves until a signal, or until the engine has ended by itself. Returns how long the engine
    /// was waited for in vain, if it did not end in time.
    async fn until_end(
        self,
        mut signals: [Signal; 3],
        handle: &Handle,
        lock: &mut InstanceLock,
        mut end: oneshot::Receiver<()>,
    ) -> Option<Duration> {
        let watcher = tokio::spawn(config_watcher::watch(self.config_path, handle.clone()));
        let (stopped, stop) = oneshot::channel::<()>();
        let serving = server::serve(self.listener, handle.clone(), self.allowed, async move {
            // Both a message and a dropped sender mean the end.
            let _ = stop.await;
        });
        let server = tokio::spawn(serving);
        let metrics = self.metrics.map(|(address, listener)| {
            tokio::spawn(http::serve_at(address, listener, handle.clone()))
        });
        let mut lock_problem = Problem::default();
        let mut keepalive = WatchdogKeepalive::from_environment();
        let interval = keepalive.interval().min(CHECK_INTERVAL);
        let mut suspended = SuspendedTime::default();
        let is_stopped = forward(&mut signals, handle, &mut end, interval, || {
            if suspended.has_grown() {
                handle.notify(Message::Resumed);
            }
            let problem = lock.follow(&self.pin_dir).err().map(|e| e.to_string());
            lock_problem.becomes(problem, |text| warn!("{text}"));
            keepalive.look(handle);
        })
        .await;
        watcher.abort();
        if let Some(serving) = &metrics {
            serving.abort();
        }
        drop(stopped);
        let mut waited = STOP_LIMIT;
        let mut has_ended = !is_stopped || timeout(waited, &mut end).await.is_ok();
        if !has_ended && connecting(&self.pin_dir).is_ok_and(|sockets| sockets != 0) {
            // The engine waits for connecting sockets.
            waited += engine::DRAIN_LIMIT;
            has_ended = timeout(engine::DRAIN_LIMIT, &mut end).await.is_ok();
        }
        // A client that keeps its connection open does not delay the end.
        let _ = timeout(LAST_ANSWERS, server).await;
        (!has_ended).then_some(waited)
    }
}

/// How long the host has been suspended since boot. Waiting threads do not count that time, but
/// entries expire by it.
#[derive(Default)]
struct SuspendedTime(Option<u64>);

impl SuspendedTime {
    /// Whether the host was suspended since the last call.
    fn has_grown(&mut self) -> bool {
        self.is_longer(boottime_ms().saturating_sub(monotonic_ms()))
    }

    fn is_longer(&mut self, now_ms: u64) -> bool {
        /// The two clocks are not read at the same moment.
        const TOLERANCE_MS: u64 = 100;
        let former = self.0.replace(now_ms);
        former.is_some_and(|former| now_ms > former + TOLERANCE_MS)
    }
}

/// The pins that the service manager kept during a restart, and keeps until this start is ready. A
/// start that fails removes them again: the active policies stay for the next start, but only as
/// long as the service manager may start it.
struct PinnedAgain(Option<PathBuf>);

impl PinnedAgain {
    /// The engine adopts these pins like any others.
    fn adopt(pin_dir: &Path) -> Self {
        let handed = systemd::handed_over();
        let pinned = handed.and_then(|handed| handover::pin_again(pin_dir, &handed));
        let is_pinned = pinned.unwrap_or_else(|e| {
            warn!(
                "the descriptors that the service manager kept over the restart cannot be used: \
                   {e}"
            );
            false
        });
        if is_pinned {
            info!("the policies from before the restart are pinned again");
        }
        Self(is_pinned.then(|| pin_dir.to_owned()))
    }

    fn stay(&mut self) {
        self.0 = None;
    }

    const fn goes(&self) -> bool {
        self.0.is_some()
    }
}

impl Drop for PinnedAgain {
    fn drop(&mut self) {
        if let Some(pin_dir) = &self.0
            && let Err(e) = handover::unpin(pin_dir)
        {
            warn!("{}: the pins cannot be removed: {e}", pin_dir.display());
        }
    }
}

fn is_interrupted(error: &anyhow::Error) -> bool {
    let error = error.downcast_ref::<EngineError>();
    error.is_some_and(EngineError::is_interrupted)
}

/// Does what [`Actor::run`] does when it ends, if the engine did not run that far.
fn leave(on_exit: OnExit, pin_dir: &Path, pinned_again: &PinnedAgain) -> anyhow::Result<()> {
    match on_exit {
        OnExit::Detach if pinned_again.goes() => {
            info!("stopped during the start; the service manager keeps the active policies");
        }
        OnExit::Keep => {
            info!(
                "stopped before the engine had finished; the next start reconciles the kernel's \
                   maps"
            );
        }
        OnExit::Detach => {
            if let Ok(left @ 1..) = engine::drain(pin_dir, Duration::ZERO) {
                warn!("{}", engine::left_draining(left));
                return Ok(());
            }
            let removed = engine::remove_pins(pin_dir)?;
            info!(
                links = removed.links,
                "stopped before the engine had finished; detached"
            );
        }
    }
    Ok(())
}

/// The pin directory if this start created it: a start that fails before there are pins removes it
/// again.
struct NewPinDir(Option<PathBuf>);

impl NewPinDir {
    fn make(path: &Path) -> Self {
        let is_new = !path.exists();
        // If the directory cannot be created, starting the engine reports why.
        let made = make_pin_dir(path).is_ok();
        Self((is_new && made).then(|| path.to_owned()))
    }
}

impl Drop for NewPinDir {
    fn drop(&mut self) {
        if let Some(path) = &self.0 {
            // It stays if it contains pins.
            let _ = std::fs::remove_dir(path);
        }
    }
}

/// The cgroup to attach to: from the command line, else the configuration, else the host's root.
///
/// # Errors
///
/// If the directory is not in a cgroup2 file system, or none is mounted.
pub fn resolve_cgroup(flag: Option<&Path>, setting: &CgroupSetting) -> anyhow::Result<PathBuf> {
    let chosen = match (flag, setting) {
        (Some(path), _) => Some(path),
        (None, CgroupSetting::Path(path)) => Some(path.as_path()),
        (None, CgroupSetting::Auto) => None,
    };
    Ok(kernel::cgroup::resolve(chosen)?)
}

/// SIGHUP, SIGTERM and SIGINT.
fn signals() -> io::Result<[Signal; 3]> {
    Ok([
        signal(SignalKind::hangup())?,
        signal(SignalKind::terminate())?,
        signal(SignalKind::interrupt())?,
    ])
}

/// Forwards signals, and calls a function at intervals. Returns once the engine is stopped or has
/// ended by itself, and whether it was stopped.
async fn forward(
    [hangup, terminate, interrupt]: &mut [Signal; 3],
    engine: &Handle,
    ended: &mut oneshot::Receiver<()>,
    interval: Duration,
    mut check: impl FnMut(),
) -> bool {
    let mut checks = tokio::time::interval(interval);
    let name = loop {
        tokio::select! {
            _ = hangup.recv() => engine.notify(Message::Sighup),
            _ = terminate.recv() => break "SIGTERM",
            _ = interrupt.recv() => break "SIGINT",
            _ = &mut *ended => return false,
            _ = checks.tick() => check(),
        }
    };
    info!(signal = name, "stopping");
    systemd::stopping();
    engine.stop();
    true
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn suspended_time_is_noticed_once() {
        let mut suspended = SuspendedTime::default();
        for (now_ms, grown) in [(50, false), (60, false), (5_000, true), (5_001, false)] {
            assert_eq!(suspended.is_longer(now_ms), grown, "{now_ms}");
        }
    }

    #[test]
    fn handed_over_pins_outlive_successful_start_only() {
        let dir = tempfile::tempdir().unwrap();
        let pin_dir = dir.path().join("pins");
        let set = pin_dir.join("l1-ab-3");
        let pinned = || {
            fs::create_dir_all(&set).unwrap();
            PinnedAgain(Some(pin_dir.clone()))
        };
        let mut ready = pinned();
        ready.stay();
        drop(ready);
        assert!(set.exists());
        let failed = pinned();
        leave(OnExit::Detach, &pin_dir, &failed).unwrap();
        assert!(set.exists());
        drop(failed);
        assert!(!pin_dir.exists());
    }
}
