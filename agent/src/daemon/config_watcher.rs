//! Noticing that configuration files changed, however they were changed.
//!
//! Directories are watched, not files: editors write a new file and rename it over the old one,
//! and a Kubernetes ConfigMap swaps a symbolic link (`..data`) two hops away. Every directory on
//! the way from a name to its file is watched. Because inotify sees nothing on some file systems
//! and can run out of watches, the engine is also asked to look every half minute.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use notify::{RecommendedWatcher, RecursiveMode, Watcher as _};
use tokio::{
    sync::{mpsc, oneshot},
    time::Instant,
};
use tracing::{debug, warn};

use crate::engine::{Handle, Message};

/// Several events make one change: a rename is two, an editor's save up to five.
const SETTLE: Duration = Duration::from_millis(100);
/// How often to look without any event.
const POLL: Duration = Duration::from_secs(30);
/// Longest chain of symbolic links, as the kernel's.
const MAX_HOPS: usize = 40;

/// Watches until the engine stops, telling it when anything near the files changed.
pub(super) async fn watch(config_path: PathBuf, engine: Handle) {
    let (sender, mut events) = mpsc::channel(1);
    let watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
        if event.map_or(true, |e| !e.kind.is_access()) {
            // A full channel already holds the news.
            let _already_told = sender.try_send(());
        }
    });
    let watcher = watcher
        .inspect_err(|e| warn!("inotify: {e}; configuration files are looked at every 30 s"))
        .ok();
    let mut watches = watcher.map(|watcher| Watches {
        watcher,
        watched: BTreeSet::new(),
    });
    let mut snapshots = engine.snapshots();
    let mut files = Vec::new();
    let mut poll = tokio::time::interval_at(Instant::now() + POLL, POLL);
    let mut something_changed = true;
    loop {
        let former = std::mem::replace(&mut files, snapshots.borrow_and_update().files().to_vec());
        if something_changed || files != former {
            let (config_path, files) = (config_path.clone(), files.clone());
            watches = elsewhere(watches, move |watches| {
                watches.follow(directories(&config_path, &files));
            })
            .await;
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

/// What is watched.
struct Watches {
    watcher: RecommendedWatcher,
    watched: BTreeSet<PathBuf>,
}

/// Does something with the watches on a thread of its own: a file system that hangs must not keep signals and clients
/// waiting. While it does, nothing is watched.
async fn elsewhere(
    watches: Option<Watches>,
    work: impl FnOnce(&mut Watches) + Send + 'static,
) -> Option<Watches> {
    let mut watches = watches?;
    let (sender, done) = oneshot::channel();
    let thread = std::thread::Builder::new().name("watches".to_owned());
    let spawned = thread.spawn(move || {
        work(&mut watches);
        // Nobody waits any more if the daemon has stopped.
        let _stopped = sender.send(watches);
    });
    if let Err(e) = spawned {
        warn!("no thread: {e}; configuration files are looked at every 30 s");
    }
    done.await.ok()
}

impl Watches {
    fn follow(&mut self, wanted: BTreeSet<PathBuf>) {
        for gone in self.watched.difference(&wanted) {
            // It may be gone because the directory is.
            let _unwatched = self.watcher.unwatch(gone);
        }
        let mut now = BTreeSet::new();
        for directory in wanted {
            // Watching again what is watched already heals a directory that was replaced.
            match self.watcher.watch(&directory, RecursiveMode::NonRecursive) {
                Ok(()) => {
                    now.insert(directory);
                }
                Err(e) => debug!("{}: {e}", directory.display()),
            }
        }
        self.watched = now;
    }
}

/// Every directory whose change can change what the names mean.
fn directories(config_path: &Path, files: &[PathBuf]) -> BTreeSet<PathBuf> {
    let mut all = BTreeSet::new();
    let parent = config_path.parent().unwrap_or(Path::new("."));
    hops(&parent.join("policies.d"), &mut all);
    all.insert(parent.join("policies.d"));
    hops(config_path, &mut all);
    for file in files {
        hops(file, &mut all);
    }
    all.retain(|d| d.is_dir());
    all
}

/// The parent of a name, and of everything it links to on the way.
fn hops(name: &Path, all: &mut BTreeSet<PathBuf>) {
    let mut name = name.to_owned();
    for _ in 0..MAX_HOPS {
        let parent = match name.parent() {
            Some(p) if p != Path::new("") => p.to_owned(),
            _ => PathBuf::from("."),
        };
        if let Ok(real) = parent.canonicalize() {
            // A link among the parents (`..data/`) is a name in a directory of its own.
            if real != parent && !all.contains(&parent) {
                all.insert(parent.clone());
                hops(&parent, all);
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

        let found = directories(&etc.join("config.toml"), &[]);
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
        directories(&dir.path().join("a"), &[]);
    }
}
