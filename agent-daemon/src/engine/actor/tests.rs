use std::{
    fs,
    path::{Path, PathBuf},
    sync::{
        Arc, Barrier,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
};

use rto_agent_core::{
    config::Files,
    policy::differences::Cursor,
    wire::types::{AddRequest, DetachRequest, ListAnswer, ReloadRequest, RemoveRequest},
};

use super::*;
use crate::engine::{
    Handle, Readiness, StartConfig, channels, desired::tests::NEAR, fake::FakeHost,
};

mod discover;
mod experiments;
mod holdout;
mod last_good;
mod reading;
mod stopping;
mod tuning;

const BY: Caller = Caller { uid: 0, pid: 1 };

fn near() -> PolicyName {
    "near".parse().unwrap()
}

/// A running engine over a kernel in memory.
struct Bed {
    engine: Handle,
    kernel: FakeHost,
    thread: JoinHandle<anyhow::Result<()>>,
    dir: tempfile::TempDir,
}

/// Files on a file system that hangs from time to time.
#[derive(Default)]
struct SlowFiles {
    hangs: AtomicBool,
    /// A test waits for the file system to hang.
    awaited: AtomicBool,
}

impl SlowFiles {
    fn reader(self: &Arc<Self>, limit: Duration) -> FilesReader {
        let slow = self.clone();
        let read = move |path: &Path, _: &dyn Fn(&Path)| {
            while slow.hangs.load(Ordering::Relaxed) {
                slow.awaited.store(true, Ordering::Relaxed);
                std::thread::sleep(Duration::from_millis(1));
            }
            Files::read(path)
        };
        FilesReader::new(read, limit)
    }

    fn hang(&self) {
        self.awaited.store(false, Ordering::Relaxed);
        self.hangs.store(true, Ordering::Relaxed);
    }

    fn answer(&self) {
        self.hangs.store(false, Ordering::Relaxed);
    }

    fn await_reader(&self) {
        while !self.awaited.load(Ordering::Relaxed) {
            std::thread::yield_now();
        }
    }
}

impl Bed {
    fn new() -> Self {
        Self::reading(FilesReader::default())
    }

    /// As [`Self::new`], once the engine has started.
    fn ready() -> Self {
        let bed = Self::new();
        bed.call(Message::Verify).unwrap();
        bed
    }

    /// As [`Self::ready`], with health checks, which could interfere with other tests.
    fn checking_health() -> Self {
        let often = |engine: &mut Engine| engine.health_interval = Duration::from_millis(500);
        let bed = Self::start(FakeHost::default(), Self::configured(""), None, often);
        bed.call(Message::Verify).unwrap();
        bed
    }

    fn reading(reader: FilesReader) -> Self {
        let prepare = |engine: &mut Engine| engine.files = reader;
        Self::start(FakeHost::default(), Self::configured(""), None, prepare)
    }

    /// With these lines in `[agent]`.
    fn with(agent: &str) -> Self {
        Self::restarted(FakeHost::default(), Self::configured(agent))
    }

    /// Over what another engine has left.
    fn restarted(kernel: FakeHost, dir: tempfile::TempDir) -> Self {
        Self::start(kernel, dir, None, |_| {})
    }

    fn configured(agent: &str) -> tempfile::TempDir {
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
        dir: tempfile::TempDir,
        stop_at: Option<usize>,
        prepare: impl FnOnce(&mut Engine) + Send + 'static,
    ) -> Self {
        let (config, last_good) = read(dir.path().join("config.toml"));
        let opened = kernel.clone();
        let open: Open = Arc::new(move |options| Ok(opened.open(options)));
        let (ends, engine) = channels(&config);
        if let Some(write) = stop_at {
            kernel.stop_at(write, engine.progress().clone());
        }
        let run = move || {
            let mut engine = Engine::start_with(open, config, last_good, ends)?;
            engine.health_interval = Duration::from_secs(3600);
            prepare(&mut engine);
            engine.run()
        };
        Self {
            engine,
            kernel,
            thread: std::thread::spawn(run),
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

    fn add(&self, request: AddRequest) -> Result<(), EngineError> {
        let request = Box::new(request);
        self.call(|reply| Message::Add(request, BY, reply))
            .map(drop)
    }

    fn entries(&self) -> usize {
        self.kernel.state().maps.entries.len()
    }

    fn stop(self) {
        self.engine.stop();
        self.ended();
    }

    /// Waits until a stopped engine has ended, and returns what it leaves.
    fn ended(self) -> (FakeHost, tempfile::TempDir) {
        self.thread.join().unwrap().unwrap();
        (self.kernel, self.dir)
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
    let bed = Bed::new();
    bed.add(request("10.9.0.0/16")).unwrap();
    let snapshot = bed.engine.snapshot();
    let found = snapshot.lookup("10.9.1.1".parse().unwrap()).unwrap();
    assert_eq!(found.entry.unwrap().entry.policy.as_str(), "near");
    let status = snapshot.status();
    assert_eq!((status.entries, status.runtime_entries), (3, 1));
    assert!(status.healthy, "{:?}", status.problems);
    assert_eq!(snapshot.readiness(), Readiness::Ready);
    assert_eq!(bed.entries(), 3);
    let cidrs = vec!["10.9.0.0/16".to_owned()];
    let remove = RemoveRequest {
        cidrs,
        ..RemoveRequest::default()
    };
    bed.call(|reply| Message::Remove(remove, BY, reply))
        .unwrap();
    assert_eq!(
        (bed.engine.snapshot().status().entries, bed.entries()),
        (2, 2)
    );
    let kernel = bed.kernel.clone();
    bed.stop();
    assert!(!kernel.state().attached);
}

#[test]
fn answer_lists_the_changes() {
    let bed = Bed::ready();
    let add = |request: AddRequest| {
        let request = Box::new(request);
        bed.call(|reply| Message::Add(request, BY, reply)).unwrap()
    };
    let with_ttl = |cidr: &str, ttl: &str| AddRequest {
        ttl: Some(ttl.to_owned()),
        ..request(cidr)
    };
    let answer = add(with_ttl("10.9.0.0/16", "90s"));
    assert_eq!((answer.changed.added, answer.lifetimes_changed), (1, 0));
    assert_eq!(answer.expires_in_s, Some(90));
    let answer = add(request("10.9.0.0/16"));
    assert_eq!((answer.changed.added, answer.lifetimes_changed), (0, 1));
    assert_eq!((answer.expires_in_s, answer.notes.len()), (None, 0));
    // An entry of a file.
    let answer = add(request("10.1.0.0/16"));
    let path = bed.dir.path().join("config.toml");
    let [note] = &answer.notes[..] else {
        panic!("{answer:?}")
    };
    let said = format!("10.1.0.0/16 overrides the entry of {}:", path.display());
    assert!(note.starts_with(&said), "{note}");
    let remove = |cidr: &str| {
        let remove = RemoveRequest {
            cidrs: vec![cidr.to_owned()],
            ..RemoveRequest::default()
        };
        let answer = bed.call(|reply| Message::Remove(remove, BY, reply));
        answer.map(|answer| answer.notes).map_err(|e| e.to_string())
    };
    assert!(remove("10.1.0.0/16").unwrap()[0].contains("is active again"));
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
    bed.stop();
}

#[test]
fn nothing_is_saved_while_the_files_are_refused() {
    let bed = Bed::ready();
    let path = bed.dir.path().join("config.toml");
    let good = fs::read_to_string(&path).unwrap();
    fs::write(&path, "[policy.near]\ncidrs = [\"10.1.0.1/16\"]\n").unwrap();
    let save = || AddRequest {
        save: true,
        ..request("10.9.0.0/16")
    };
    let error = bed.add(save()).unwrap_err().to_string();
    assert!(
        error.starts_with("nothing was saved, because the files already have errors:\n"),
        "{error}"
    );
    fs::write(&path, good).unwrap();
    bed.add(save()).unwrap();
    assert_eq!(bed.entries(), 3);
    bed.stop();
}

/// Nothing must happen by itself.
#[test]
fn an_idle_engine_does_not_wake() {
    let next_tick = |text: &str| {
        let dir = tempfile::tempdir().unwrap();
        let config_path = dir.path().join("config.toml");
        let [state, lasting] = ["state", "lasting"].map(|name| dir.path().join(name));
        let agent = format!("[agent]\nstate_dir = {state:?}\npersistent_dir = {lasting:?}\n");
        fs::write(&config_path, format!("{agent}{text}")).unwrap();
        let (config, last_good) = read(config_path);
        let open: Open = Arc::new(|options| Ok(FakeHost::default().open(options)));
        let (ends, _engine) = channels(&config);
        let mut engine = Engine::start_with(open, config, last_good, ends).unwrap();
        let due = engine.until_tick();
        engine.tick_if_due();
        (due, engine.until_tick())
    };
    let unguarded = NEAR.replacen("initial_rto", "guard = \"off\"\ninitial_rto", 1);
    assert_eq!(next_tick(&unguarded), (None, None));
    let learning = NEAR.replace("\"100ms\"", "\"auto\"");
    let (first, second) = next_tick(&learning);
    assert_eq!(first, Some(Duration::ZERO));
    assert!(
        second.is_some_and(|second| second > Duration::ZERO),
        "{second:?}"
    );
}

#[test]
fn a_change_is_published_once() {
    let bed = Bed::ready();
    let readers = |n| {
        let before = bed.kernel.state().readers;
        bed.add(request(&format!("10.9.{n}.0/24"))).unwrap();
        bed.kernel.state().readers - before
    };
    // One reader compares the entries first, one is for the snapshot.
    assert!((0..5).map(readers).all(|readers| readers == 2));
    bed.stop();
}

#[test]
fn a_bad_file_changes_nothing_and_is_told() {
    let bed = Bed::new();
    let path = bed.dir.path().join("config.toml");
    fs::write(&path, "[policy.near]\ncidrs = [\"10.1.0.1/16\"]\n").unwrap();
    let error = bed
        .call(|reply| Message::Reload(ReloadRequest::default(), BY, reply))
        .unwrap_err();
    assert!(error.is_refusal());
    assert!(error.to_string().contains("last good configuration"));
    let status = bed.engine.snapshot().status();
    assert!(!status.last_reload.ok && !status.healthy);
    assert_eq!((status.entries, bed.entries()), (2, 2));
    fs::write(&path, NEAR).unwrap();
    bed.call(|reply| Message::Reload(ReloadRequest::default(), BY, reply))
        .unwrap();
    assert!(bed.engine.snapshot().status().last_reload.ok);
    bed.stop();
}

#[test]
fn a_saved_entry_is_in_its_file_or_nowhere() {
    let bed = Bed::new();
    let path = bed.dir.path().join("policies.d/50-cli.toml");
    let save = || AddRequest {
        save: true,
        ..request("10.9.0.0/16")
    };
    bed.call(Message::Verify).unwrap();
    bed.kernel.fail(1);
    let error = bed.add(save()).unwrap_err();
    assert!(matches!(error, EngineError::Undone(_)), "{error:?}");
    assert_eq!(error.errno(), Some(libc::EPERM));
    assert!(!path.exists());
    assert!(bed.engine.snapshot().status().last_reload.ok);
    bed.add(save()).unwrap();
    assert!(path.exists());
    assert_eq!(bed.entries(), 3);
    // The watcher's message finds the files already loaded.
    bed.engine.notify(Message::FilesChanged);
    bed.call(Message::Verify).unwrap();
    assert_eq!(
        bed.engine.snapshot().status().last_reload.cause,
        format!("add --save, {BY}")
    );
    bed.stop();
}

#[test]
fn foreign_deletion_is_noticed_by_a_reader() {
    let bed = Bed::ready();
    let gone = "10.1.0.0/16".parse().unwrap();
    // The engine's own comparison must not repair anything.
    (1..1000).for_each(|n| bed.kernel.fail(n));
    bed.kernel.state().maps.entries.remove(&gone);
    // The maps are compared once the engine has processed its previous message.
    let limit = Instant::now() + Duration::from_secs(60);
    while bed.engine.snapshot().readiness() == Readiness::Ready {
        assert!(Instant::now() < limit, "it was not noticed");
        std::thread::yield_now();
    }
    bed.call(Message::Verify).unwrap();
    let snapshot = bed.engine.snapshot();
    assert!(matches!(snapshot.readiness(), Readiness::Unready(_)));
    assert!(!snapshot.status().in_sync);
    bed.stop();
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
    let answer = bed
        .call(|reply| Message::Reload(ReloadRequest::default(), BY, reply))
        .unwrap();
    assert_eq!(bed.entries(), 2);
    let is_told = |note: &String| note.contains("entry 10.1.0.0/16 near is missing");
    assert!(answer.notes.iter().any(is_told), "{:?}", answer.notes);
    let status = bed.engine.snapshot().status();
    assert_eq!(status.map_differences["entry-missing"], 2);
    assert!(status.healthy, "{:?}", status.problems);
    bed.stop();
}

#[test]
fn verify_reports_differences_and_their_repair() {
    let bed = Bed::new();
    let good = bed.call(Message::Verify).unwrap();
    assert!(good.ok && good.differences.is_empty(), "{good:?}");
    assert_eq!((good.entries, good.policies), (2, 1));
    assert_eq!(bed.engine.snapshot().verify(), Some(good));
    delete(&bed);
    let seen = bed.engine.snapshot().verify().unwrap();
    let found = bed.call(Message::Verify).unwrap();
    assert!(!found.ok && found.repaired, "{found:?}");
    assert_eq!(found.differences, seen.differences);
    assert_eq!(bed.entries(), 2);
    assert!(bed.call(Message::Verify).unwrap().ok);
    bed.call(|reply| Message::Detach(DetachRequest::default(), BY, reply))
        .unwrap();
    let detached = bed.call(Message::Verify).unwrap();
    assert!(!detached.ok && detached.problems.len() == 1, "{detached:?}");
    bed.stop();
}

#[test]
fn a_health_check_finds_and_repairs_by_itself() {
    let bed = Bed::checking_health();
    delete(&bed);
    let limit = Instant::now() + Duration::from_secs(60);
    while bed.entries() != 2 {
        assert!(Instant::now() < limit, "it was not noticed");
        std::thread::sleep(Duration::from_millis(20));
    }
    bed.call(Message::Verify).unwrap();
    let status = bed.engine.snapshot().status();
    assert_eq!(status.map_differences["entry-missing"], 1);
    bed.stop();
}

#[test]
fn concurrent_engine_change_is_not_a_difference() {
    let bed = Bed::ready();
    let snapshot = bed.engine.snapshot();
    let compared = || snapshot.compare_part(Cursor::default(), 1 << 20);
    assert!(!compared().unwrap().differs);
    delete(&bed);
    assert!(compared().unwrap().differs);
    // As if the engine were changing the kernel.
    snapshot.shared.begin();
    assert!(compared().is_none() && snapshot.verify().is_none());
    bed.stop();
}

#[test]
fn detached_until_attach_over_reloads_and_restarts() {
    let mut bed = Bed::new();
    let request = DetachRequest::default();
    let answer = bed
        .call(|reply| Message::Detach(request, BY, reply))
        .unwrap();
    assert_eq!((answer.removed.links, answer.notes), (1, Vec::new()));
    let is_detached = |bed: &Bed| {
        let snapshot = bed.engine.snapshot();
        let (mut list, status) = (String::new(), snapshot.status());
        snapshot
            .list(&[], |piece| {
                list.push_str(std::str::from_utf8(&piece).unwrap());
                true
            })
            .unwrap();
        let listed: ListAnswer = serde_json::from_str(&list).unwrap();
        assert_eq!(
            (status.detached_by, listed.detached_by),
            (Some(BY), Some(BY))
        );
        assert!(!status.healthy && !status.attachment.attached);
        assert!(matches!(snapshot.readiness(), Readiness::Unready(_)));
        assert!(!bed.kernel.state().attached);
    };
    is_detached(&bed);
    // The maps stay, with their counters, and follow changes.
    assert_eq!(bed.engine.snapshot().status().policies.len(), 1);
    bed.add(self::request("10.9.0.0/16")).unwrap();
    assert_eq!(bed.entries(), 3);
    let reload = |bed: &Bed, request| {
        bed.call(|reply| Message::Reload(request, BY, reply))
            .unwrap()
    };
    let answer = reload(&bed, ReloadRequest::default());
    assert!(
        answer.notes[0].contains("no policy is active: detached by"),
        "{answer:?}"
    );
    is_detached(&bed);
    bed.engine.stop();
    let (kernel, dir) = bed.ended();
    bed = Bed::restarted(kernel, dir);
    bed.call(Message::Verify).unwrap();
    is_detached(&bed);
    let attach = ReloadRequest {
        attach: true,
        ..ReloadRequest::default()
    };
    reload(&bed, attach);
    assert_eq!(bed.engine.snapshot().readiness(), Readiness::Ready);
    bed.engine.stop();
    let (kernel, dir) = bed.ended();
    bed = Bed::restarted(kernel, dir);
    bed.call(Message::Verify).unwrap();
    assert_eq!(bed.engine.snapshot().readiness(), Readiness::Ready);
    bed.stop();
}

#[test]
fn attach_of_the_configuration_detaches_its_hosts() {
    let bed = Bed::ready();
    let path = bed.dir.path().join("config.toml");
    let text = fs::read_to_string(&path).unwrap();
    let reload = || {
        bed.call(|reply| Message::Reload(ReloadRequest::default(), BY, reply))
            .unwrap()
    };
    let off = text.replacen("[agent]\n", "[agent]\nattach = false\n", 1);
    fs::write(&path, &off).unwrap();
    reload();
    let by = || bed.engine.snapshot().status().detached_by;
    assert_eq!(
        (by(), bed.kernel.state().attached),
        (Some(Caller::CONFIGURATION), false)
    );
    let error = bed.call(|reply| Message::Attach(BY, reply)).unwrap_err();
    assert!(
        error.to_string().contains("attach = false in [agent]"),
        "{error}"
    );
    fs::write(&path, &text).unwrap();
    reload();
    assert_eq!((by(), bed.kernel.state().attached), (None, true));
    // A detachment by a user of this host is not undone by the files.
    bed.call(|reply| Message::Detach(DetachRequest::default(), BY, reply))
        .unwrap();
    fs::write(&path, format!("{off}#")).unwrap();
    reload();
    fs::write(&path, format!("{text}#")).unwrap();
    reload();
    assert_eq!((by(), bed.kernel.state().attached), (Some(BY), false));
    bed.stop();
}

#[test]
fn detachment_that_cannot_be_kept_is_made_and_reported() {
    let bed = Bed::ready();
    let lasting = bed.dir.path().join("lasting");
    fs::remove_dir_all(&lasting).unwrap();
    fs::write(&lasting, "not a directory").unwrap();
    let request = DetachRequest::default();
    let answer = bed
        .call(|reply| Message::Detach(request, BY, reply))
        .unwrap();
    assert!(answer.notes[0].contains("detached.json"), "{answer:?}");
    assert!(!bed.kernel.state().attached);
    assert_eq!(bed.engine.snapshot().status().warnings, answer.notes);
    // Attaching is refused as well, as the next start would detach again.
    let error = bed.call(|reply| Message::Attach(BY, reply)).unwrap_err();
    assert!(
        error.to_string().ends_with("nothing was changed"),
        "{error}"
    );
    fs::remove_file(&lasting).unwrap();
    bed.call(|reply| Message::Attach(BY, reply)).unwrap();
    assert!(bed.kernel.state().attached);
    bed.stop();
}

#[test]
fn readers_do_not_wait_for_a_change() {
    let slow = Arc::new(SlowFiles::default());
    let bed = Bed::reading(slow.reader(Duration::from_secs(600)));
    bed.add(request("10.9.0.0/16")).unwrap();
    slow.hang();
    bed.engine.notify(Message::FilesChanged);
    slow.await_reader();
    let snapshot = bed.engine.snapshot();
    let status = snapshot.status();
    assert!(status.attachment.attached && status.healthy);
    assert_eq!(snapshot.readiness(), Readiness::Ready);
    assert!(snapshot.stats().is_ok());
    slow.answer();
    bed.call(Message::Verify).unwrap();
    assert_eq!(bed.engine.snapshot().status().entries, 3);
    bed.stop();
}

#[test]
fn while_it_is_attached_again_it_is_told_that_it_is_not() {
    let bed = Bed::checking_health();
    let gate = Arc::new(Barrier::new(2));
    {
        let mut state = bed.kernel.state();
        state.gate = Some(gate.clone());
        state.attached = false;
    }
    gate.wait();
    let status = bed.engine.snapshot().status();
    assert!(!status.healthy && !status.attachment.attached);
    gate.wait();
    bed.call(Message::Verify).unwrap();
    assert!(bed.engine.snapshot().status().healthy);
    bed.stop();
}

#[test]
fn once_attached_again_it_walks_over_open_sockets() {
    let bed = Bed::with("apply_to_open = true\n");
    bed.call(Message::Verify).unwrap();
    let cause = || bed.engine.snapshot().walk.get().cause.clone();
    assert_eq!(cause(), "start");
    bed.kernel.state().attached = false;
    bed.call(Message::Verify).unwrap();
    assert!(bed.kernel.state().attached);
    assert_eq!(cause(), "repair");
    bed.stop();
}

#[test]
fn files_that_hang_are_an_error_and_the_last_good_ones_stay() {
    let slow = Arc::new(SlowFiles::default());
    let bed = Bed::reading(slow.reader(Duration::from_millis(200)));
    bed.call(Message::Verify).unwrap();
    slow.hang();
    let reload = || bed.call(|reply| Message::Reload(ReloadRequest::default(), BY, reply));
    let error = reload().unwrap_err();
    assert!(error.is_refusal(), "{error:?}");
    let text = error.to_string();
    assert!(text.contains("did not answer within 0.2 s"), "{text}");
    assert!(text.contains("last good configuration"), "{text}");
    let save = AddRequest {
        save: true,
        ..request("10.8.0.0/16")
    };
    assert!(matches!(bed.add(save), Err(EngineError::Config(_))));
    // A change that needs no file still works.
    bed.add(request("10.9.0.0/16")).unwrap();
    let status = bed.engine.snapshot().status();
    assert!(!status.last_reload.ok && !status.healthy);
    assert_eq!((status.entries, bed.entries()), (3, 3));
    // Unchanged files are accepted again once they can be read.
    slow.answer();
    let limit = Instant::now() + Duration::from_secs(60);
    while reload().is_err() {
        assert!(Instant::now() < limit, "they are not read again");
    }
    assert!(bed.engine.snapshot().status().healthy);
    slow.hang();
    bed.engine.notify(Message::FilesChanged);
    let refused = |bed: &Bed| !bed.engine.snapshot().status().last_reload.ok;
    while !refused(&bed) {
        assert!(Instant::now() < limit, "it was not noticed");
        std::thread::yield_now();
    }
    slow.answer();
    while refused(&bed) {
        assert!(Instant::now() < limit, "they are not read again");
        bed.engine.notify(Message::FilesChanged);
        bed.call(Message::Verify).unwrap();
    }
    bed.stop();
}
