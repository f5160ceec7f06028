//! Finds the network namespaces of the host.

use std::{
    collections::BTreeMap,
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::{MetadataExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
};

use nix::{
    libc,
    sys::statfs::{NSFS_MAGIC, fstatfs},
};

use super::mounts;

/// A network namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Netns {
    /// Its inode number, as `readlink /proc/self/ns/net` shows it.
    pub inode: u64,
    /// Where it was found: bind mounts, links of threads, descriptors. Each may be gone by now.
    pub places: Vec<PathBuf>,
}

impl Netns {
    /// Opens it for setns(2); `None` if it is no longer at any of its places.
    pub fn open(&self) -> io::Result<Option<File>> {
        let mut failed = None;
        for place in &self.places {
            match open(place, self.inode) {
                Ok(Some(handle)) => return Ok(Some(handle)),
                Ok(None) => {}
                Err(e) if is_gone(&e) => {}
                Err(e) => failed = Some(e),
            }
        }
        failed.map_or(Ok(None), Err)
    }
}

/// The result of [`all`].
#[derive(Debug, Default)]
pub struct Found {
    /// The namespaces, by inode number.
    pub namespaces: Vec<Netns>,
    /// The inode number of this thread's namespace.
    pub own: u64,
    /// Number of processes that this process may not inspect, whose namespaces may be missing.
    pub hidden_processes: usize,
}

/// Places remembered for each namespace: all of them are rarely gone when it is opened.
const PLACES: usize = 8;

/// Finds every network namespace that contains a process or thread, is bind-mounted (`ip netns`),
/// or is held open by a descriptor. Keeps none of them open, because there may be more than the
/// limit of descriptors.
pub fn all() -> io::Result<Found> {
    let own = Path::new("/proc/thread-self/ns/net");
    let mut found = Found {
        own: fs::metadata(own)?.ino(),
        ..Found::default()
    };
    let mut places: BTreeMap<u64, Vec<PathBuf>> = BTreeMap::new();
    // Mounts come first, because they last longest.
    for mount in mounts::read().unwrap_or_default() {
        if mount.kind == "nsfs" {
            note(&mut places, &mount.root, &mount.point);
        }
    }
    for process in numbered(Path::new("/proc"))? {
        let mut denied = false;
        for thread in numbered(&process.join("task")).unwrap_or_default() {
            let place = thread.join("ns/net");
            match fs::read_link(&place) {
                Ok(link) => note(&mut places, &link, &place),
                Err(e) => denied |= e.kind() == io::ErrorKind::PermissionDenied,
            }
        }
        match numbered(&process.join("fd")) {
            Ok(descriptors) => {
                for place in descriptors {
                    if let Ok(link) = fs::read_link(&place) {
                        note(&mut places, &link, &place);
                    }
                }
            }
            Err(e) => denied |= e.kind() == io::ErrorKind::PermissionDenied,
        }
        // For a process that has just ended, the access is denied as well.
        found.hidden_processes += usize::from(denied && process.exists());
    }
    let namespaces = places.into_iter();
    found.namespaces = namespaces
        .map(|(inode, places)| Netns { inode, places })
        .collect();
    Ok(found)
}

fn note(places: &mut BTreeMap<u64, Vec<PathBuf>>, link: &Path, place: &Path) {
    if let Some(inode) = parse(link) {
        let known = places.entry(inode).or_default();
        if known.len() < PLACES {
            known.push(place.to_owned());
        }
    }
}

fn is_gone(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        // The process has ended; a link without a process returns EACCES.
        Some(libc::ENOENT | libc::ESRCH | libc::EACCES)
    )
}

/// Opens the namespace at a place; `None` if the place holds something else by now.
fn open(place: &Path, inode: u64) -> io::Result<Option<File>> {
    // A descriptor's link may now lead to a file whose opening blocks, or to a terminal that would
    // become this process's controlling terminal.
    let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
    let handle = OpenOptions::new()
        .read(true)
        .custom_flags(flags)
        .open(place)?;
    let is_namespace = fstatfs(&handle)?.filesystem_type() == NSFS_MAGIC;
    let is_it = is_namespace && handle.metadata()?.ino() == inode;
    Ok(is_it.then_some(handle))
}

/// Entries of a directory with numeric names.
fn numbered(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = fs::read_dir(dir)?.flatten();
    Ok(entries
        .filter(|entry| {
            let name = entry.file_name();
            name.as_encoded_bytes().iter().all(u8::is_ascii_digit)
        })
        .map(|entry| entry.path())
        .collect())
}

/// Parses the number in "net:[4026531840]".
fn parse(link: &Path) -> Option<u64> {
    let text = link.to_str()?.strip_prefix("net:[")?;
    text.strip_suffix(']')?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn namespace_links_are_parsed() {
        assert_eq!(parse(Path::new("net:[4026531840]")), Some(4_026_531_840));
        for other in ["mnt:[4026531841]", "net:[x]", "socket:[17]", "/dev/null"] {
            assert_eq!(parse(Path::new(other)), None, "{other}");
        }
    }

    #[test]
    fn own_namespace_is_found_and_opened() {
        let found = all().unwrap();
        let own = fs::metadata("/proc/self/ns/net").unwrap().ino();
        assert_eq!(found.own, own);
        let this = found.namespaces.iter().find(|n| n.inode == own).unwrap();
        assert!(this.open().unwrap().is_some());
        let gone = Netns {
            inode: own,
            places: vec!["/proc/0/ns/net".into(), "/dev/null".into()],
        };
        assert!(gone.open().unwrap().is_none());
    }
}
