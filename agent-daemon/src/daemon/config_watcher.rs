//! Detects changes of the configuration files, however they are changed.
//!
//! Directories are watched, not files: editors write a new file and rename it over the old one, and
//! a Kubernetes ConfigMap swaps a symbolic link (`..data`) two hops away. Every directory on the
//! path from a name to its file is watched. After any event in them the engine compares the files
//! with those that are active. Because inotify reports nothing on some file systems and can run out
//! of watches, it does so every half minute as well.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use notify::{RecommendedWatcher, RecursiveMode, Watcher as _};
use rto_agent_core::config;
use tokio::{sync::mpsc, task::spawn_blocking, time::Instant};
use tracing::{debug, warn};

use crate::engine::{Handle, Message};

/// Several events belong to one change: two to a rename, up to five to an editor's save.
const SETTLE: Duration = Duration::from_millis(100);
/// The shortest time between two reads, as other files in these directories may change often.
const PAUSE: Duration = Duration::from_secs(1);
/// How often the files are checked without an event.
const POLL: Duration = Duration::from_secs(30);
/// The longest chain of symbolic links; the kernel's limit.
const MAX_HOPS: usize = 40;

/// Watches until the engine stops, and notifies it when the configuration's files may have changed.
pub(super) async fn watch(config_path: PathBuf, engine: Handle) {
    let (sender, mut events) = mpsc::channel(1);
    let watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
        // The engine's own reads are accesses.
        if event.map_or(true, |event| !event.kind.is_access()) {
            // A full channel already holds a notification.
            let _is_full = sender.try_send(());
        }
    });
    let watcher = watcher
        .inspect_err(|e| warn!("inotify: {e}; configuration files are checked every 30 s instead"))
        .ok();
    let mut watches = watcher.map(|watcher| Watches {
        watcher,
        watched: BTreeSet::new(),
    });
    let mut snapshots = engine.snapshots();
    let mut files = Vec::new();
    let mut poll = tokio::time::interval_at(Instant::now() + POLL, POLL);
    let mut something_changed = true;
    let mut next_read = Instant::now();
    loop {
        let former = std::mem::replace(&mut files, snapshots.borrow_and_update().files().to_vec());
        if something_changed || files != former {
            let (config_path, files) = (config_path.clone(), files.clone());
            watches = match watches {
                Some(watches) => {
                    let follow = move || watches.follow(directories(&config_path, &files));
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
                tokio::time::sleep_until(next_read.max(Instant::now() + SETTLE)).await;
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
        next_read = Instant::now() + PAUSE;
        engine.notify(Message::FilesChanged);
    }
}

/// The inotify watches.
struct Watches {
    watcher: RecommendedWatcher,
    watched: BTreeSet<PathBuf>,
}

impl Watches {
    fn follow(mut self, directories: BTreeSet<PathBuf>) -> Self {
        for gone in self.watched.difference(&directories) {
            // The watch may be gone with its directory.
            let _ = self.watcher.unwatch(gone);
        }
        self.watched = BTreeSet::new();
        for directory in directories {
            // Watching a directory again repairs the watch if the directory was replaced.
            match self.watcher.watch(&directory, RecursiveMode::NonRecursive) {
                Ok(()) => {
                    self.watched.insert(directory);
                }
                Err(e) => debug!("{}: {e}", directory.display()),
            }
        }
        self
    }
}

/// The directories on the ways to the configuration's files, and that of the policies: a new file in
/// it counts as well.
fn directories(config_path: &Path, files: &[PathBuf]) -> BTreeSet<PathBuf> {
    let mut all = BTreeSet::new();
    let policies = config::policies_dir(config_path);
    add_way(&mut all, &policies);
    all.insert(policies);
    add_way(&mut all, config_path);
    for file in files {
        add_way(&mut all, file);
    }
    all.retain(|directory| directory.is_dir());
    all
}

/// Adds the directory of a name, and of every link that it leads through.
fn add_way(all: &mut BTreeSet<PathBuf>, name: &Path) {
    let mut name = name.to_owned();
    for _ in 0..MAX_HOPS {
        let parent = match name.parent() {
            Some(p) if p != Path::new("") => p.to_owned(),
            _ => PathBuf::from("."),
        };
        if let Ok(real) = parent.canonicalize() {
            // A link among the parents (`..data/`) is a name in a separate directory.
            if real != parent && all.insert(parent.clone()) {
                add_way(all, &parent);
            }
            all.insert(real);
        }
        match fs::read_link(&name) {
            Ok(target) => name = parent.join(target),
            Err(_) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn config_map_is_watched_at_each_hop() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap();
        let (mount, etc) = (root.join("mount"), root.join("etc"));
        fs::create_dir_all(mount.join("..2026_01")).unwrap();
        fs::create_dir_all(etc.join("policies.d")).unwrap();
        fs::write(mount.join("..2026_01/config.toml"), "").unwrap();
        symlink("..2026_01", mount.join("..data")).unwrap();
        symlink("..data/config.toml", mount.join("config.toml")).unwrap();
        symlink(mount.join("config.toml"), etc.join("config.toml")).unwrap();
        let link = root.join("link");
        symlink(&etc, &link).unwrap();
        let found = directories(&link.join("config.toml"), &[]);
        for wanted in [
            // The link's own.
            &root,
            &etc,
            &link.join("policies.d"),
            &mount,
            &mount.join("..2026_01"),
        ] {
            assert!(
                found.contains(wanted),
                "{} not in {found:?}",
                wanted.display()
            );
        }
    }

    #[test]
    fn symlink_loop_ends() {
        let dir = tempfile::tempdir().unwrap();
        symlink(dir.path().join("b"), dir.path().join("a")).unwrap();
        symlink(dir.path().join("a"), dir.path().join("b")).unwrap();
        directories(&dir.path().join("a"), &[]);
    }
}
