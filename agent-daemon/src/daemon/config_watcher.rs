//! Detects changes of the configuration files, however they are changed.
//!
//! Directories are watched, not files: editors write a new file and rename it over the old one, and
//! a Kubernetes ConfigMap swaps a symbolic link (`..data`) two hops away. Every directory on the
//! path from a name to its file is watched. Only events for one of the configuration's own names
//! count, so writing a log beside them has no effect. Because inotify reports nothing on some file
//! systems and can run out of watches, the engine also checks the files every half minute.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use notify::{RecommendedWatcher, RecursiveMode, Watcher as _};
use rto_agent_core::config;
use tokio::{sync::mpsc, task::spawn_blocking, time::Instant};
use tracing::{debug, warn};

use crate::engine::{Handle, Message};

/// Several events belong to one change: two to a rename, up to five to an editor's save.
const SETTLE: Duration = Duration::from_millis(100);
/// How often the files are checked without an event.
const POLL: Duration = Duration::from_secs(30);
/// The longest chain of symbolic links; the kernel's limit.
const MAX_HOPS: usize = 40;

/// Watches until the engine stops, and notifies it when the configuration's files may have changed.
pub(super) async fn watch(config_path: PathBuf, engine: Handle) {
    let (sender, mut events) = mpsc::channel(1);
    let names = Arc::new(Mutex::new(Names::default()));
    let watched = names.clone();
    let watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
        let names = watched.lock().unwrap_or_else(PoisonError::into_inner);
        if event.map_or(true, |event| names.concern(&event)) {
            // A full channel already holds a notification.
            let _already_told = sender.try_send(());
        }
    });
    let watcher = watcher
        .inspect_err(|e| warn!("inotify: {e}; configuration files are checked every 30 s instead"))
        .ok();
    let mut watches = watcher.map(|watcher| Watches {
        watcher,
        watched: BTreeSet::new(),
        names,
    });
    let mut snapshots = engine.snapshots();
    let mut files = Vec::new();
    let mut poll = tokio::time::interval_at(Instant::now() + POLL, POLL);
    let mut something_changed = true;
    loop {
        let former = std::mem::replace(&mut files, snapshots.borrow_and_update().files().to_vec());
        if something_changed || files != former {
            let (config_path, files) = (config_path.clone(), files.clone());
            watches = match watches {
                Some(watches) => {
                    let follow = move || watches.follow(Names::of(&config_path, &files));
                    // A file system that hangs must not block signals and clients. During the change
                    // nothing is watched.
                    spawn_blocking(follow).await.ok()
                }
                None => None,
            };
        }
        something_changed = true;
        tokio::select! {
            Some(()) = events.recv() => {
                tokio::time::sleep(SETTLE).await;
                while events.try_recv().is_ok() {}
            }
            changed = snapshots.changed() => {
                if changed.is_err() {
                    return;
                }
                something_changed = false;
                continue;
            }
            _ = poll.tick() => {}
        }
        engine.notify(Message::FilesChanged);
    }
}

/// The inotify watches.
struct Watches {
    watcher: RecommendedWatcher,
    watched: BTreeSet<PathBuf>,
    /// The names whose events count.
    names: Arc<Mutex<Names>>,
}

impl Watches {
    fn follow(mut self, names: Names) -> Self {
        let wanted = names.directories.clone();
        *self.names.lock().unwrap_or_else(PoisonError::into_inner) = names;
        for gone in self.watched.difference(&wanted) {
            // The watch may be gone with its directory.
            let _unwatched = self.watcher.unwatch(gone);
        }
        let mut now = BTreeSet::new();
        for directory in wanted {
            // Watching a directory again repairs the watch if the directory was replaced.
            match self.watcher.watch(&directory, RecursiveMode::NonRecursive) {
                Ok(()) => {
                    now.insert(directory);
                }
                Err(e) => debug!("{}: {e}", directory.display()),
            }
        }
        self.watched = now;
        self
    }
}

/// The names through which the configuration's files are found, as inotify reports them: every link
/// on the way, and its target.
#[derive(Debug, Default)]
struct Names {
    /// The directories that contain these names.
    directories: BTreeSet<PathBuf>,
    /// Files, links and directories in these directories.
    files: BTreeSet<PathBuf>,
    /// `policies.d`: a new `*.toml` in it counts as well.
    policies: BTreeSet<PathBuf>,
}

impl Names {
    fn of(config_path: &Path, files: &[PathBuf]) -> Self {
        let mut all = Self::default();
        let policies = config::policies_dir(config_path);
        all.add(&policies);
        all.policies.extend(policies.canonicalize());
        all.directories.extend(all.policies.iter().cloned());
        all.directories.insert(policies.clone());
        all.policies.insert(policies);
        all.add(config_path);
        for file in files {
            all.add(file);
        }
        all.directories.retain(|d| d.is_dir());
        all
    }

    /// Adds a name, and every link that it leads through.
    fn add(&mut self, name: &Path) {
        let mut name = name.to_owned();
        for _ in 0..MAX_HOPS {
            let parent = match name.parent() {
                Some(p) if p != Path::new("") => p.to_owned(),
                _ => PathBuf::from("."),
            };
            if let Some(file) = name.file_name() {
                self.files.insert(parent.join(file));
            }
            if let Ok(real) = parent.canonicalize() {
                if let Some(file) = name.file_name() {
                    self.files.insert(real.join(file));
                }
                // A link among the parents (`..data/`) is a name in a separate directory.
                if real != parent && !self.directories.contains(&parent) {
                    self.directories.insert(parent.clone());
                    self.add(&parent);
                }
                self.directories.insert(real);
            }
            match fs::read_link(&name) {
                Ok(target) => name = parent.join(target),
                Err(_) => return,
            }
        }
    }

    /// Whether the event may have changed the configuration.
    fn concern(&self, event: &notify::Event) -> bool {
        let is_ours = |path: &PathBuf| {
            let is_in_policies = || path.parent().is_some_and(|dir| self.policies.contains(dir));
            self.files.contains(path)
                || self.directories.contains(path)
                || config::is_policy_file(path) && is_in_policies()
        };
        // An event without a path means that events were lost.
        !event.kind.is_access() && (event.paths.is_empty() || event.paths.iter().any(is_ours))
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use notify::{
        EventKind,
        event::{AccessKind, ModifyKind},
    };

    use super::*;

    #[test]
    fn a_config_map_is_watched_at_each_hop() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap();
        let (mount, etc) = (root.join("mount"), root.join("etc"));
        fs::create_dir_all(mount.join("..2026_01")).unwrap();
        fs::create_dir(&etc).unwrap();
        fs::write(mount.join("..2026_01/config.toml"), "").unwrap();
        symlink("..2026_01", mount.join("..data")).unwrap();
        symlink("..data/config.toml", mount.join("config.toml")).unwrap();
        symlink(mount.join("config.toml"), etc.join("config.toml")).unwrap();

        let found = Names::of(&etc.join("config.toml"), &[]).directories;
        for wanted in [&etc, &mount, &mount.join("..2026_01")] {
            assert!(
                found.contains(wanted),
                "{} not in {found:?}",
                wanted.display()
            );
        }
    }

    #[test]
    fn a_loop_of_links_ends() {
        let dir = tempfile::tempdir().unwrap();
        symlink(dir.path().join("b"), dir.path().join("a")).unwrap();
        symlink(dir.path().join("a"), dir.path().join("b")).unwrap();
        Names::of(&dir.path().join("a"), &[]);
    }

    #[test]
    fn log_beside_config_is_no_change() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap();
        let (etc, mount) = (root.join("etc"), root.join("mount"));
        fs::create_dir_all(mount.join("..2026_01")).unwrap();
        fs::create_dir_all(etc.join("policies.d")).unwrap();
        fs::write(etc.join("config.toml"), "").unwrap();
        fs::write(mount.join("..2026_01/b.toml"), "").unwrap();
        symlink("..2026_01", mount.join("..data")).unwrap();
        symlink("..data/b.toml", mount.join("b.toml")).unwrap();
        symlink(mount.join("b.toml"), etc.join("policies.d/b.toml")).unwrap();
        let link = root.join("link");
        symlink(&etc, &link).unwrap();
        let files = [link.join("config.toml"), link.join("policies.d/b.toml")];
        let names = Names::of(&link.join("config.toml"), &files);
        let concern = |path: PathBuf, kind: EventKind| {
            names.concern(&notify::Event::new(kind).add_path(path))
        };
        let changed = EventKind::Modify(ModifyKind::Any);
        for ours in [
            etc.join("config.toml"),
            link.join("config.toml"),
            etc.join("policies.d"),
            etc.join("policies.d/new.toml"),
            mount.join("b.toml"),
            mount.join("..data"),
            mount.join("..2026_01/b.toml"),
            // The directory was moved or removed.
            etc.clone(),
            link.clone(),
        ] {
            assert!(concern(ours.clone(), changed), "{}", ours.display());
            assert!(!concern(ours, EventKind::Access(AccessKind::Any)));
        }
        for other in [
            etc.join("agent.log"),
            etc.join(".config.toml.swp"),
            etc.join("other.toml"),
            etc.join("policies.d/b.toml~"),
            etc.join("policies.d/.b.toml.swp"),
            mount.join("c.toml"),
            root.join("x"),
        ] {
            assert!(!concern(other.clone(), changed), "{}", other.display());
        }
        assert!(names.concern(&notify::Event::new(EventKind::Other)));
    }
}
