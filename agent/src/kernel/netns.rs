//! The network namespaces of the host.

use std::{
    collections::BTreeSet,
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

/// A network namespace, held open.
#[derive(Debug)]
pub struct Netns {
    /// Its inode number, as `readlink /proc/self/ns/net` shows it.
    pub inode: u64,
    /// Where it was found: a process's link, a bind mount or a descriptor.
    pub place: PathBuf,
    /// The handle for setns(2).
    pub handle: File,
}

/// What [`all`] found.
#[derive(Debug, Default)]
pub struct Found {
    /// The namespaces, this thread's own first.
    pub namespaces: Vec<Netns>,
    /// Processes that may be in a namespace that was not found, because this process may not look.
    pub hidden_processes: usize,
}

/// Every network namespace that has a process or thread in it, is bind-mounted (`ip netns`), or
/// is held open by a descriptor.
///
/// # Errors
///
/// If this thread's own cannot be opened: `/proc` is not mounted.
pub fn all() -> io::Result<Found> {
    let mut found = Found::default();
    let mut seen = Seen::default();
    let own = Path::new("/proc/thread-self/ns/net");
    found.namespaces.push(open(own)?);
    seen.0.extend(found.namespaces.iter().map(|own| own.inode));
    for process in numbered(Path::new("/proc"))? {
        let mut denied = false;
        for thread in numbered(&process.join("task")).unwrap_or_default() {
            let place = thread.join("ns/net");
            match fs::read_link(&place) {
                Ok(link) => found.namespaces.extend(seen.open_new(&link, &place)),
                Err(e) => denied |= e.kind() == io::ErrorKind::PermissionDenied,
            }
        }
        match numbered(&process.join("fd")) {
            Ok(descriptors) => {
                for place in descriptors {
                    if let Ok(link) = fs::read_link(&place) {
                        found.namespaces.extend(seen.open_new(&link, &place));
                    }
                }
            }
            Err(e) => denied |= e.kind() == io::ErrorKind::PermissionDenied,
        }
        // One that has ended meanwhile is "denied" as well.
        found.hidden_processes += usize::from(denied && process.exists());
    }
    for mount in mounts::read().unwrap_or_default() {
        if mount.kind == "nsfs" {
            found
                .namespaces
                .extend(seen.open_new(&mount.root, &mount.point));
        }
    }
    Ok(found)
}

/// The namespaces that are held open already.
#[derive(Default)]
struct Seen(BTreeSet<u64>);

impl Seen {
    /// Opens a namespace that was not seen yet. A place that is gone by now does not count: the
    /// namespace may have others.
    fn open_new(&mut self, link: &Path, place: &Path) -> Option<Netns> {
        let inode = parse(link)?;
        if self.0.contains(&inode) {
            return None;
        }
        let opened = open(place).ok()?;
        self.0.insert(opened.inode).then_some(opened)
    }
}

fn open(place: &Path) -> io::Result<Netns> {
    // A descriptor's link may by now lead to something that opening waits for, or that becomes the
    // terminal of this process.
    let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
    let handle = OpenOptions::new()
        .read(true)
        .custom_flags(flags)
        .open(place)?;
    if fstatfs(&handle)?.filesystem_type() != NSFS_MAGIC {
        return Err(io::Error::other("is no namespace"));
    }
    Ok(Netns {
        inode: handle.metadata()?.ino(),
        place: place.to_owned(),
        handle,
    })
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
    fn this_one_comes_first_and_once() {
        let found = all().unwrap();
        let own = fs::metadata("/proc/self/ns/net").unwrap().ino();
        let numbers: Vec<u64> = found.namespaces.iter().map(|n| n.inode).collect();
        assert_eq!(numbers[0], own);
        assert_eq!(numbers.iter().filter(|n| **n == own).count(), 1);
    }
}
