use std::{
    fs,
    path::{Path, PathBuf},
    sync::{
        Arc, Barrier, Mutex, MutexGuard,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
};

use rto_agent_core::{
    config::{Files, FilesReader},
    policy::{PolicyName, differences::Cursor},
    wire::types::{
        AddRequest, Caller, ChangeAnswer, DetachAnswer, DetachRequest, ListAnswer, RemoveRequest,
        StatusAnswer, VerifyAnswer,
    },
};

use rto_agent_kernel::kernel::facts::host_facts;
use tempfile::TempDir;

use super::*;
use crate::engine::{
    comparison::Part,
    desired::tests::NEAR,
    fake::FakeHost,
    handle::{Handle, channels},
    listing::{self, lookup},
    snapshot::{Readiness, Snapshot},
    status::status,
    store::StartConfig,
};

mod detach;
mod discover;
mod holdout;
mod last_good;
mod overrides;
mod reading;
mod stopping;
mod tuning;

/// A CIDR with host bits.
const BAD: &str = "[policy.near]\ncidrs = [\"10.1.0.1/16\"]\n";
const BY: Caller = Caller { uid: 0, pid: 1 };

fn near() -> PolicyName {
    "near".parse().unwrap()
}

/// A running engine over a kernel in memory.
struct Bed {
    engine: Handle,
    kernel: FakeHost,
    thread: Option<JoinHandle<anyhow::Result<()>>>,
    dir: Arc<TempDir>,
}

impl Drop for Bed {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take()
            && !std::thread::panicking()
        {
            self.engine.stop();
            thread.join().unwrap().unwrap();
        }
    }
}

/// Files on a file system that hangs while this is locked.
#[derive(Default)]
struct SlowFiles {
    hang: Mutex<()>,
    /// A reader waits, or has read since.
    reading: AtomicBool,
}

impl SlowFiles {
    fn reader(self: &Arc<Self>, limit: Duration) -> FilesReader {
        let slow = self.clone();
        let read = move |path: &Path, _: &dyn Fn(&Path)| {
            slow.reading.store(true, Ordering::Relaxed);
            let _hung = slow.hang.lock();
            Files::read(path)
        };
        FilesReader::new(read, limit)
    }

    fn hang(&self) -> MutexGuard<'_, ()> {
        let hang = self.hang.lock().unwrap();
        self.reading.store(false, Ordering::Relaxed);
        hang
    }

    fn await_reader(&self) {
        while !self.reading.load(Ordering::Relaxed) {
            std::thread::yield_now();
        }
    }
}

impl Bed {
    /// Once the engine has started.
    fn ready() -> Self {
        Self::with("")
    }

    /// As [`Self::ready`], with health checks, which could interfere with other tests.
    fn checking_health() -> Self {
        let often = |actor: &mut Actor| actor.health_interval = Duration::from_millis(500);
        Self::start(FakeHost::default(), Self::configured(""), None, often).started()
    }

    fn reading(reader: FilesReader) -> Self {
        let prepare = |actor: &mut Actor| actor.engine.files.read_by(reader);
        Self::start(FakeHost::default(), Self::configured(""), None, prepare).started()
    }

    /// With these lines in `[agent]`.
    fn with(agent: &str) -> Self {
        Self::restarted(FakeHost::default(), Self::configured(agent))
    }

    /// Over what another engine has left.
    fn restarted(kernel: FakeHost, dir: impl Into<Arc<TempDir>>) -> Self {
        Self::start(kernel, dir, None, |_| {}).started()
    }

    /// Stops the engine and starts another.
    fn restart(self) -> Self {
        self.engine.stop();
        let (kernel, dir) = self.ended();
        Self::restarted(kernel, dir)
    }

    fn started(self) -> Self {
        self.verify();
        self
    }

    fn configured(agent: &str) -> TempDir {
        let dir = tempfile::tempdir().unwrap();
        let state_dir = dir.path().join("state");
        let lasting = dir.path().join("lasting");
        let agent =
            format!("[agent]\nstate_dir = {state_dir:?}\npersistent_dir = {lasting:?}\n{agent}");
        fs::write(dir.path().join("config.toml"), format!("{agent}{NEAR}")).unwrap();
        dir
    }

    /// Over this kernel; the engine is stopped during the write `stop_at`.
    fn start(
        kernel: FakeHost,
        dir: impl Into<Arc<TempDir>>,
        stop_at: Option<usize>,
        prepare: impl FnOnce(&mut Actor) + Send + 'static,
    ) -> Self {
        let dir = dir.into();
        let (config, last_good) = read(dir.path().join("config.toml"));
        let opened = kernel.clone();
        let open: Open = Arc::new(move |options| Ok(opened.open(options)));
        let (ends, engine) = channels(&config);
        if let Some(write) = stop_at {
            kernel.stop_at(write, engine.progress().clone());
        }
        let run = move || {
            let mut actor = Actor::start_with(open, config, last_good, ends)?;
            actor.health_interval = Duration::from_secs(3600);
            prepare(&mut actor);
            actor.run()
        };
        Self {
            engine,
            kernel,
            thread: Some(std::thread::spawn(run)),
            dir,
        }
    }

    fn call<T>(&self, message: impl FnOnce(Reply<T>) -> Message) -> Result<T, EngineError> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .build()
            .unwrap();
        runtime.block_on(async {
            self.engine.started().await?;
            self.engine.call(message).await
        })
    }

    fn add(&self, request: AddRequest) -> Result<ChangeAnswer, EngineError> {
        self.call(|reply| Message::Add(Box::new(request), BY, reply))
    }

    fn save(&self, cidr: &str) -> Result<ChangeAnswer, EngineError> {
        self.add(AddRequest {
            save: true,
            ..request(cidr)
        })
    }

    fn remove(&self, cidrs: &[&str]) -> Result<ChangeAnswer, EngineError> {
        let request = RemoveRequest {
            cidrs: cidrs.iter().map(|cidr| (*cidr).to_owned()).collect(),
            ..RemoveRequest::default()
        };
        self.call(|reply| Message::Remove(request, BY, reply))
    }

    fn reload(&self) -> Result<ChangeAnswer, EngineError> {
        self.reload_with(ReloadRequest::default())
    }

    fn reload_with(&self, request: ReloadRequest) -> Result<ChangeAnswer, EngineError> {
        self.call(|reply| Message::Reload(request, BY, reply))
    }

    fn detach(&self) -> Result<DetachAnswer, EngineError> {
        self.call(|reply| Message::Detach(DetachRequest::default(), BY, reply))
    }

    fn attach(&self) -> Result<ChangeAnswer, EngineError> {
        self.call(|reply| Message::Attach(BY, reply))
    }

    fn verify(&self) -> VerifyAnswer {
        self.call(Message::Verify).unwrap()
    }

    fn status(&self) -> StatusAnswer {
        status(&self.engine.snapshot())
    }

    fn entries(&self) -> usize {
        self.kernel.state().maps.entries.len()
    }

    /// The configuration file.
    fn path(&self) -> PathBuf {
        self.dir.path().join("config.toml")
    }

    fn text(&self) -> String {
        fs::read_to_string(self.path()).unwrap()
    }

    fn write(&self, text: impl AsRef<str>) {
        fs::write(self.path(), text.as_ref()).unwrap();
    }

    /// Writes the configuration file, and reloads it.
    fn load(&self, text: impl AsRef<str>) -> Result<ChangeAnswer, EngineError> {
        self.write(text);
        self.reload()
    }

    /// Waits until a job or a tick leads to a condition.
    fn until(&self, what: &str, is_so: impl Fn(&Self) -> bool) {
        let end = Instant::now() + Duration::from_secs(60);
        while !is_so(self) {
            assert!(Instant::now() < end, "not {what}: {:?}", self.status());
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Waits until a stopped engine has ended, and returns what it leaves.
    fn ended(mut self) -> (FakeHost, Arc<TempDir>) {
        let thread = self.thread.take().unwrap();
        thread.join().unwrap().unwrap();
        (self.kernel.clone(), self.dir.clone())
    }
}

/// What an engine with this configuration starts with.
fn read(config_path: PathBuf) -> (EngineConfig, LastGood) {
    // As in the health check.
    let host = host_facts(&[]).unwrap();
    let StartConfig {
        config,
        files,
        refused,
    } = StartConfig::read(&config_path, &host).unwrap();
    let mut last_good = LastGood::open(&config.agent.persistent_dir, &config_path);
    last_good.stage(&files);
    let config = EngineConfig {
        fingerprint: files.fingerprint(),
        config,
        refused,
        host,
        config_path,
        ..EngineConfig::for_tests()
    };
    (config, last_good)
}

fn request(cidr: &str) -> AddRequest {
    AddRequest {
        cidrs: vec![cidr.to_owned()],
        policy: Some("near".to_owned()),
        ..AddRequest::default()
    }
}

#[test]
fn answered_change_is_visible_to_readers() {
    let bed = Bed::ready();
    bed.add(request("10.9.0.0/16")).unwrap();
    let snapshot = bed.engine.snapshot();
    let found = lookup(&snapshot, "10.9.1.1".parse().unwrap()).unwrap();
    assert_eq!(found.entry.unwrap().entry.policy.as_str(), "near");
    let status = status(&snapshot);
    assert_eq!((status.entries, status.runtime_entries), (3, 1));
    assert!(status.healthy, "{:?}", status.problems);
    assert_eq!(snapshot.readiness(), Readiness::Ready);
    assert_eq!(bed.entries(), 3);
    bed.remove(&["10.9.0.0/16"]).unwrap();
    assert_eq!((bed.status().entries, bed.entries()), (2, 2));
    let kernel = bed.kernel.clone();
    drop(bed);
    assert!(!kernel.state().attached);
}

/// Whether `list` and `lookup` show an entry.
fn is_shown(bed: &Bed, cidr: &str, address: &str) -> bool {
    let snapshot = bed.engine.snapshot();
    let mut list = Vec::new();
    let take = |piece| {
        list.extend(piece);
        true
    };
    listing::list(&snapshot, &[], take).unwrap();
    let listed: ListAnswer = serde_json::from_slice(&list).unwrap();
    let is_listed = listed
        .entries
        .iter()
        .any(|entry| entry.cidr.to_string() == cidr);
    let found = lookup(&snapshot, address.parse().unwrap()).unwrap();
    assert_eq!(found.entry.is_some(), is_listed);
    is_listed
}

/// The health check, which would find it later, is off.
#[test]
fn entry_is_removed_as_soon_as_it_expires() {
    const LATENESS: Duration = Duration::from_millis(500);
    let bed = Bed::ready();
    for ms in [100, 300] {
        let begin = Instant::now();
        bed.add(AddRequest {
            ttl: Some(format!("{ms}ms")),
            ..request("10.9.0.0/16")
        })
        .unwrap();
        bed.until("expired", |bed| bed.entries() == 2);
        let (took, ttl) = (begin.elapsed(), Duration::from_millis(ms));
        assert!(took >= ttl && took < ttl + LATENESS, "{took:?} of {ttl:?}");
    }
}

#[test]
fn unremovable_expired_entry_is_hidden_and_retried() {
    let bed = Bed::ready();
    let ttl = Some("1s".to_owned());
    let begin = Instant::now();
    bed.add(AddRequest {
        ttl,
        ..request("10.9.0.0/16")
    })
    .unwrap();
    (1..100).for_each(|write| bed.kernel.fail(write));
    assert!(is_shown(&bed, "10.9.0.0/16", "10.9.0.1"));
    bed.until("reported", |bed| !bed.status().healthy);
    assert!(begin.elapsed() >= Duration::from_secs(1));
    let problems = bed.status().problems.concat();
    assert!(
        problems.contains("expired entries could not be removed"),
        "{problems}"
    );
    assert_eq!(bed.entries(), 3);
    assert!(!is_shown(&bed, "10.9.0.0/16", "10.9.0.1"));
    bed.kernel.state().failing.clear();
    bed.until("removed", |bed| bed.entries() == 2);
    bed.until("healthy", |bed| bed.status().healthy);
    assert!(begin.elapsed() < Duration::from_secs(5));
}

#[test]
fn answer_lists_the_changes() {
    let bed = Bed::ready();
    let add = |request: AddRequest| bed.add(request).unwrap();
    let answer = add(AddRequest {
        ttl: Some("90s".to_owned()),
        ..request("10.9.0.0/16")
    });
    assert_eq!((answer.changed.added, answer.lifetimes_changed), (1, 0));
    assert_eq!(answer.expires_in_s, Some(90));
    let answer = add(request("10.9.0.0/16"));
    assert_eq!((answer.changed.added, answer.lifetimes_changed), (0, 1));
    assert_eq!((answer.expires_in_s, answer.notes.len()), (None, 0));
    // An entry of a file.
    let answer = add(request("10.1.0.0/16"));
    let path = bed.path();
    let expected = format!("10.1.0.0/16 overrides the entry of {}:", path.display());
    assert_eq!(answer.notes.len(), 1);
    assert!(answer.notes[0].starts_with(&expected), "{answer:?}");
    let remove = |cidr: &str| {
        let answer = bed.remove(&[cidr]);
        answer.map(|answer| answer.notes).map_err(|e| e.to_string())
    };
    assert!(remove("10.1.0.0/16").unwrap()[0].contains("is switched off"));
    assert_eq!(
        remove("10.1.0.0/16").unwrap_err(),
        "10.1.0.0/16 is already switched off"
    );
    assert_eq!(
        remove("10.9.1.0/24").unwrap_err(),
        "there is no entry 10.9.1.0/24; it lies within 10.9.0.0/16"
    );
    assert_eq!(remove("10.9.0.0/16").unwrap(), [""; 0]);
}

/// Nothing must happen by itself.
#[test]
fn idle_engine_does_not_wake() {
    let next_tick = |text: &str| {
        let dir = Bed::configured("");
        let path = dir.path().join("config.toml");
        let near = fs::read_to_string(&path).unwrap();
        fs::write(&path, near.replace("initial_rto = \"100ms\"", text)).unwrap();
        let (config, last_good) = read(path);
        let open: Open = Arc::new(|options| Ok(FakeHost::default().open(options)));
        let (ends, _engine) = channels(&config);
        let mut engine = Actor::start_with(open, config, last_good, ends)
            .unwrap()
            .engine;
        let due = until_tick(&engine);
        if due.is_some() {
            tuner::tick(&mut engine);
        }
        (due, until_tick(&engine))
    };
    let unguarded = "guard = \"off\"\ninitial_rto = \"100ms\"";
    assert_eq!(next_tick(unguarded), (None, None));
    let (first, second) = next_tick("initial_rto = \"auto\"");
    assert_eq!(first, Some(Duration::ZERO));
    assert!(
        second.is_some_and(|second| second > Duration::ZERO),
        "{second:?}"
    );
}

#[test]
fn change_is_published_once() {
    let bed = Bed::ready();
    let readers = |n| {
        let before = bed.kernel.state().readers;
        bed.add(request(&format!("10.9.{n}.0/24"))).unwrap();
        bed.kernel.state().readers - before
    };
    // One reader compares the entries first, one is for the snapshot.
    assert!((0..5).map(readers).all(|readers| readers == 2));
}

#[test]
fn bad_file_changes_nothing_and_is_reported() {
    let bed = Bed::ready();
    let good = bed.text();
    let error = bed.load(BAD).unwrap_err();
    assert!(error.is_refusal());
    assert!(error.to_string().contains("last good configuration"));
    let status = bed.status();
    assert!(!status.last_reload.ok && !status.healthy);
    assert_eq!((status.entries, bed.entries()), (2, 2));
    let error = bed.save("10.9.0.0/16").unwrap_err().to_string();
    assert!(
        error.starts_with("nothing was saved, because the files already have errors:\n"),
        "{error}"
    );
    bed.load(good).unwrap();
    assert!(bed.status().last_reload.ok);
    bed.save("10.9.0.0/16").unwrap();
    assert_eq!(bed.entries(), 3);
}

#[test]
fn saved_entry_is_in_its_file_or_nowhere() {
    let bed = Bed::ready();
    let path = bed.dir.path().join("policies.d/50-cli.toml");
    bed.kernel.fail(1);
    let error = bed.save("10.9.0.0/16").unwrap_err();
    assert!(matches!(error, EngineError::Undone(_)), "{error:?}");
    assert_eq!(error.errno(), Some(libc::EPERM));
    assert!(!path.exists());
    assert!(bed.status().last_reload.ok);
    bed.save("10.9.0.0/16").unwrap();
    assert!(path.exists());
    assert_eq!(bed.entries(), 3);
    // The watcher's message finds the files already loaded.
    bed.engine.notify(Message::FilesChanged);
    bed.verify();
    let cause = bed.status().last_reload.cause;
    assert_eq!(cause, format!("add --save, {BY}"));
}

#[test]
fn foreign_deletion_is_noticed_by_a_reader() {
    let bed = Bed::ready();
    // The engine's own comparison must not repair anything.
    (1..1000).for_each(|n| bed.kernel.fail(n));
    delete(&bed);
    let is_noticed = |bed: &Bed| bed.engine.snapshot().readiness() != Readiness::Ready;
    bed.until("noticed", is_noticed);
    bed.verify();
    let snapshot = bed.engine.snapshot();
    assert!(matches!(snapshot.readiness(), Readiness::Unready(_)));
    assert!(!status(&snapshot).in_sync);
}

/// Another process deletes an entry that another entry covers.
fn delete(bed: &Bed) {
    let gone = "10.1.0.0/16".parse().unwrap();
    assert!(bed.kernel.state().maps.entries.remove(&gone));
}

#[test]
fn add_or_reload_restores_foreign_deletion() {
    let bed = Bed::ready();
    delete(&bed);
    bed.add(request("10.1.0.0/16")).unwrap();
    assert_eq!(bed.entries(), 2);
    delete(&bed);
    let answer = bed.reload().unwrap();
    assert_eq!(bed.entries(), 2);
    let is_told = |note: &String| note.contains("entry 10.1.0.0/16 near is missing");
    assert!(answer.notes.iter().any(is_told), "{:?}", answer.notes);
    let status = bed.status();
    assert_eq!(status.map_differences["entry-missing"], 2);
    assert!(status.healthy, "{:?}", status.problems);
}

#[test]
fn verify_reports_differences_and_their_repair() {
    let bed = Bed::ready();
    let good = bed.verify();
    assert!(good.ok && good.differences.is_empty(), "{good:?}");
    assert_eq!((good.entries, good.policies), (2, 1));
    assert_eq!(bed.engine.snapshot().verify(), Some(good));
    delete(&bed);
    let seen = bed.engine.snapshot().verify().unwrap();
    let found = bed.verify();
    assert!(!found.ok && found.repaired, "{found:?}");
    assert_eq!(found.differences, seen.differences);
    assert_eq!(bed.entries(), 2);
    assert!(bed.verify().ok);
    bed.detach().unwrap();
    let detached = bed.verify();
    assert!(!detached.ok && detached.problems.len() == 1, "{detached:?}");
}

#[test]
fn health_check_finds_and_repairs_foreign_deletion() {
    let bed = Bed::checking_health();
    delete(&bed);
    bed.until("repaired", |bed| bed.entries() == 2);
    bed.verify();
    assert_eq!(bed.status().map_differences["entry-missing"], 1);
}

#[test]
fn concurrent_engine_change_is_not_a_difference() {
    let bed = Bed::ready();
    let snapshot = bed.engine.snapshot();
    let compared = || snapshot.compare_in_turn(Part::ALL);
    let differs = || !compared().unwrap().unwrap().differences.is_empty();
    assert!(!differs());
    delete(&bed);
    assert!(differs());
    // As if the engine were changing the kernel.
    snapshot.shared.begin();
    assert!(compared().is_none() && snapshot.verify().is_none());
}

#[test]
fn readers_do_not_wait_for_a_change() {
    let slow = Arc::new(SlowFiles::default());
    let bed = Bed::reading(slow.reader(Duration::from_secs(600)));
    bed.add(request("10.9.0.0/16")).unwrap();
    let hang = slow.hang();
    bed.engine.notify(Message::FilesChanged);
    slow.await_reader();
    let snapshot = bed.engine.snapshot();
    let status = status(&snapshot);
    assert!(status.attachment.attached && status.healthy);
    assert_eq!(snapshot.readiness(), Readiness::Ready);
    assert!(snapshot.stats().is_ok());
    drop(hang);
    bed.verify();
    assert_eq!(bed.status().entries, 3);
}

#[test]
fn status_is_unhealthy_during_reattachment() {
    let bed = Bed::checking_health();
    let gate = Arc::new(Barrier::new(2));
    {
        let mut state = bed.kernel.state();
        state.gate = Some(gate.clone());
        state.attached = false;
    }
    gate.wait();
    let status = bed.status();
    assert!(!status.healthy && !status.attachment.attached);
    gate.wait();
    bed.verify();
    assert!(bed.status().healthy);
}

#[test]
fn repaired_attachment_scans_open_sockets() {
    let bed = Bed::with("apply_to_open = true\n");
    let cause = || bed.engine.snapshot().walk().cause.clone();
    assert_eq!(cause(), "start");
    bed.kernel.state().attached = false;
    bed.verify();
    assert!(bed.kernel.state().attached);
    assert_eq!(cause(), "repair");
}

#[test]
fn reload_of_hanging_files_fails_and_keeps_last_good() {
    let slow = Arc::new(SlowFiles::default());
    let bed = Bed::reading(slow.reader(Duration::from_millis(200)));
    let hang = slow.hang();
    let error = bed.reload().unwrap_err();
    assert!(error.is_refusal(), "{error:?}");
    let text = error.to_string();
    assert!(text.contains("did not answer within 0.2 s"), "{text}");
    assert!(text.contains("last good configuration"), "{text}");
    let saved = bed.save("10.8.0.0/16");
    assert!(matches!(saved, Err(EngineError::Config(_))));
    // A change that needs no file still works.
    bed.add(request("10.9.0.0/16")).unwrap();
    let status = bed.status();
    assert!(!status.last_reload.ok && !status.healthy);
    assert_eq!((status.entries, bed.entries()), (3, 3));
    // Unchanged files are accepted again once they can be read.
    drop(hang);
    bed.until("read again", |bed| bed.reload().is_ok());
    assert!(bed.status().healthy);
    let hang = slow.hang();
    bed.engine.notify(Message::FilesChanged);
    bed.until("noticed", |bed| !bed.status().last_reload.ok);
    drop(hang);
    bed.until("read again", |bed| {
        bed.engine.notify(Message::FilesChanged);
        bed.verify();
        bed.status().last_reload.ok
    });
}
