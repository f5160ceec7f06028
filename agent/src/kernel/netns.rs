//! The network namespaces of the host.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
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
    let own = Path::new("/proc/thread-self/ns/net");
    let mut places: BTreeMap<u64, PathBuf> = BTreeMap::new();
    let mut found = Found::default();
    for process in numbered(Path::new("/proc"))? {
        let mut denied = false;
        for thread in numbered(&process.join("task")).unwrap_or_default() {
            match fs::read_link(thread.join("ns/net")) {
                Ok(link) => note(&mut places, &link, || thread.join("ns/net")),
                Err(e) => denied |= e.kind() == io::ErrorKind::PermissionDenied,
            }
        }
        match numbered(&process.join("fd")) {
            Ok(descriptors) => {
                for descriptor in descriptors {
                    if let Ok(link) = fs::read_link(&descriptor) {
                        note(&mut places, &link, || descriptor);
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
            note(&mut places, &mount.root, || mount.point.clone());
        }
    }
    let handle = File::open(own)?;
    let inode = handle.metadata()?.ino();
    found.namespaces.push(Netns {
        inode,
        place: own.to_owned(),
        handle,
    });
    for (number, place) in places {
        if number == inode {
            continue;
        }
        // One that ended meanwhile has no sockets left.
        let Ok(handle) = File::open(&place) else {
            continue;
        };
        if handle.metadata().is_ok_and(|meta| meta.ino() == number) {
            found.namespaces.push(Netns {
                inode: number,
                place,
                handle,
            });
        }
    }
    Ok(found)
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

fn note(places: &mut BTreeMap<u64, PathBuf>, link: &Path, place: impl FnOnce() -> PathBuf) {
    if let Some(inode) = parse(link) {
        places.entry(inode).or_insert_with(place);
    }
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
