//! The network namespaces of the host.

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
    /// Where it was found: bind mounts, links of threads, descriptors. Any may be gone by now.
    pub places: Vec<PathBuf>,
}

impl Netns {
    /// Opens it for setns(2); `None` if it is nowhere any more.
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

/// What [`all`] found.
#[derive(Debug, Default)]
pub struct Found {
    /// The namespaces, by number.
    pub namespaces: Vec<Netns>,
    /// This thread's own.
    pub own: u64,
    /// Processes that may be in a namespace that was not found, because this process may not look.
    pub hidden_processes: usize,
}

/// How many places of a namespace are remembered: rarely are all gone when it is opened.
const PLACES: usize = 8;

/// Every network namespace that has a process or thread in it, is bind-mounted (`ip netns`), or
/// is held open by a descriptor. Nothing is held open, as there may be more than descriptors.
pub fn all() -> io::Result<Found> {
    let own = Path::new("/proc/thread-self/ns/net");
    let mut found = Found {
        own: fs::metadata(own)?.ino(),
        ..Found::default()
    };
    let mut places: BTreeMap<u64, Vec<PathBuf>> = BTreeMap::new();
    // These stay longest, so they come first.
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
        // A process that has ended in between is "denied" as well.
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
        // A process that has ended; a link without a process says EACCES.
        Some(libc::ENOENT | libc::ESRCH | libc::EACCES)
    )
}

/// The namespace at a place; `None` if there is something else by now.
fn open(place: &Path, inode: u64) -> io::Result<Option<File>> {
    // A descriptor's link may by now lead to something that opening waits for, or that becomes the
    // terminal of this process.
    let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
    let handle = OpenOptions::new()
        .read(true)
        .custom_flags(flags)
        .open(place)?;
    let is_namespace = fstatfs(&handle)?.filesystem_type() == NSFS_MAGIC;
    let is_it = is_namespace && handle.metadata()?.ino() == inode;
    Ok(is_it.then_some(handle))
}

/// Entries of a directory whose names are numbers.
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

/// The number in "net:[4026531840]".
fn parse(link: &Path) -> Option<u64> {
    let text = link.to_str()?.strip_prefix("net:[")?;
    text.strip_suffix(']')?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links() {
        assert_eq!(parse(Path::new("net:[4026531840]")), Some(4_026_531_840));
        for other in ["mnt:[4026531841]", "net:[x]", "socket:[17]", "/dev/null"] {
            assert_eq!(parse(Path::new(other)), None, "{other}");
        }
    }

    #[test]
    fn this_one_is_found_and_can_be_opened() {
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
