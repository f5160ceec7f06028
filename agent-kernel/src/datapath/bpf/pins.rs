//! Where the program's link and maps are pinned, and how one pin set replaces another.
//!
//! A pin set is a directory below `pin_dir`: the maps and the link of one object with one capacity.
//! Its name, `l<layout>-<object>-<entries>`, describes its contents, so that a later daemon knows
//! without opening it whether it can adopt the set. A new set is built in `staging-*`, and renamed
//! once its link is attached. Only then are the other sets removed, so that an active policy is
//! never missing.
//!
//! (Names in a BPF file system must not contain dots.)

use std::{
    fs, io,
    os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

use nix::{
    fcntl::AT_FDCWD,
    sys::{
        stat::{UtimensatFlags, utimensat},
        statfs::{BPF_FS_MAGIC, statfs},
        time::TimeSpec,
    },
};
use rto_agent_common::{LAYOUT_VERSION, PROGRAM as PROGRAM_NAME, PROGRAM_CLONE};
use rto_agent_core::{path_security, printable};
use sha2::{Digest as _, Sha256};

use crate::kernel::{
    link,
    pinned::{ObjectId, Pinned, is_agents, is_pinned},
};

/// Name of the link's pin in a set.
pub(super) const LINK: &str = "link";
/// Name of the program's pin: the program that uses these maps, even if the link has a different
/// one.
pub(super) const PROGRAM: &str = "program";
/// Prefix of the name of an unfinished set.
const STAGING: &str = "staging-";
/// Name of the pin of the LSM program's link, if there is one.
pub(super) const CLONE_LINK: &str = "clone_link";
/// Name of the LSM program's pin: the program of the link pinned beside it.
pub(super) const CLONE_PROGRAM: &str = "clone_program";

/// The directory of one set, parsed from its name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PinSet {
    /// The set's path.
    pub(super) path: PathBuf,
    /// Layout version of its maps; `None` if this version cannot parse the name.
    pub(super) layout: Option<u32>,
}

impl PinSet {
    /// Whether it lacks the final name by which a later daemon adopts it.
    pub(super) fn is_staging(&self) -> bool {
        let name = self.path.file_name().and_then(|name| name.to_str());
        name.is_some_and(|name| name.starts_with(STAGING))
    }
}

/// The directory name for an object, the constants written into it, and a capacity.
pub(super) fn pin_set_name(object: &[u8], constants: &[u8], max_entries: u32) -> String {
    format!("{}{max_entries}", pin_set_stem(object, constants))
}

/// The name without the capacity.
fn pin_set_stem(object: &[u8], constants: &[u8]) -> String {
    let digest = Sha256::new().chain_update(object).chain_update(constants);
    let digest = digest.finalize();
    let short: String = digest.iter().take(6).map(|b| format!("{b:02x}")).collect();
    format!("l{LAYOUT_VERSION}-{short}-")
}

/// Sets of this object and constants with at least this capacity, each with its capacity; the
/// smallest first.
pub(super) fn with_capacity<'g>(
    sets: &'g [PinSet],
    object: &[u8],
    constants: &[u8],
    max_entries: u32,
) -> Vec<(u32, &'g Path)> {
    let stem = pin_set_stem(object, constants);
    let capacity = |path: &Path| -> Option<u32> {
        let name = path.file_name()?.to_str()?;
        name.strip_prefix(&stem)?.parse().ok()
    };
    let mut found: Vec<(u32, &Path)> = sets
        .iter()
        .filter_map(|g| Some((capacity(&g.path)?, g.path.as_path())))
        .filter(|(capacity, _)| *capacity >= max_entries)
        .collect();
    found.sort_unstable();
    found
}

/// Every set below `pin_dir`, of any layout and state; empty if `pin_dir` does not exist. Foreign
/// names are skipped (and never removed).
pub(super) fn pin_sets(pin_dir: &Path) -> io::Result<Vec<PinSet>> {
    let mut found = Vec::new();
    let entries = match fs::read_dir(pin_dir) {
        Ok(entries) => entries,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(found),
        Err(e) => return Err(e),
    };
    for entry in entries {
        let entry = entry?;
        if !entry.file_type()?.is_dir() {
            continue;
        }
        let name = entry.file_name();
        if let Some(layout) = name.to_str().and_then(parse_name) {
            found.push(PinSet {
                path: entry.path(),
                layout,
            });
        }
    }
    found.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(found)
}

/// Whether the name belongs to a complete set, of any layout.
pub(super) fn is_set_name(name: &str) -> bool {
    name.starts_with('l') && parse_name(name).is_some()
}

/// `Some(layout)` for a name of ours; `Some(None)` for a name of ours without a layout.
fn parse_name(name: &str) -> Option<Option<u32>> {
    if name.starts_with(STAGING) {
        return Some(None);
    }
    let name = name.strip_prefix("old-").map_or(name, |rest| {
        // `old-<number>-<name>`
        rest.split_once('-').map_or("", |(_, name)| name)
    });
    let mut parts = name.strip_prefix('l')?.split('-');
    let layout = parts.next()?.parse().ok()?;
    let object = parts.next()?;
    let entries = parts.next()?;
    let ours = parts.next().is_none()
        && !object.is_empty()
        && object.bytes().all(|b| b.is_ascii_hexdigit())
        && entries.parse::<u32>().is_ok();
    ours.then_some(Some(layout))
}

/// Creates a directory that only root can enter.
pub(super) fn create_private_dir(path: &Path) -> io::Result<()> {
    fs::DirBuilder::new().mode(0o700).create(path)
}

/// Creates `pin_dir` and its missing parents, for root only. Refuses a symbolic link, a directory
/// of another user, and a directory that is not on a BPF file system.
pub(super) fn create_pin_dir(path: &Path) -> io::Result<()> {
    let existing = path.ancestors().find(|dir| dir.exists()).unwrap_or(path);
    if statfs(existing)?.filesystem_type() != BPF_FS_MAGIC {
        let place = existing.display();
        return Err(io::Error::other(format!(
            "{place} is not on a BPF file system"
        )));
    }
    path_security::make(path, 0o700)?;
    let meta = fs::symlink_metadata(path)?;
    if !meta.is_dir() {
        return Err(io::Error::other("it is not a directory"));
    }
    if meta.uid() != nix::unistd::geteuid().as_raw() {
        return Err(io::Error::other(format!(
            "it belongs to uid {}",
            meta.uid()
        )));
    }
    if meta.mode() & 0o077 != 0 {
        tracing::warn!(
            "{}: other users could open it; it is replaced",
            path.display()
        );
        // Where that is not possible (a mount point), it is at least closed to them from now on.
        replace_exposed(path)
            .or_else(|_| fs::set_permissions(path, fs::Permissions::from_mode(0o700)))?;
    }
    Ok(())
}

/// Moves the pins of a directory that other users may open to one that only root can open: any of
/// them may have the former open, and hold a lock on it.
fn replace_exposed(path: &Path) -> io::Result<()> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push("-private");
    let private = path.with_file_name(name);
    match create_private_dir(&private) {
        // Of a start that was killed.
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
        made => made?,
    }
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        fs::rename(entry.path(), private.join(entry.file_name()))?;
    }
    fs::rename(private, path)
}

/// When a map was created, from the time of its pin; the kernel does not report it. The pin of a
/// kept map gets the time of the former pin.
pub(super) fn made(pin: &Path) -> Option<SystemTime> {
    fs::metadata(pin).and_then(|meta| meta.modified()).ok()
}

/// See [`made`]. Best effort: a later time only makes estimated rates too high.
pub(super) fn set_made(pin: &Path, made: SystemTime) {
    let since = made.duration_since(UNIX_EPOCH).unwrap_or_default();
    let time = TimeSpec::from(since);
    let set = utimensat(AT_FDCWD, pin, &time, &time, UtimensatFlags::NoFollowSymlink);
    if let Err(e) = set {
        tracing::debug!(
            "{}: its modification time cannot be set: {e}",
            pin.display()
        );
    }
}

/// Removes the links of one set, so that its programs stop, and the pins that exist only for a
/// link. Pins of other owners under these names stay.
pub(super) fn remove_links(path: &Path) -> io::Result<()> {
    let own: Vec<_> = [LINK, CLONE_LINK, CLONE_PROGRAM]
        .into_iter()
        .filter(|name| is_own(path, name))
        .collect();
    for name in own {
        match fs::remove_file(path.join(name)) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
    }
    Ok(())
}

/// Removes one set: first its links, so that the programs stop at once, then the maps. The directory
/// stays if it contains pins of other owners.
pub(super) fn remove_pin_set(path: &Path) -> io::Result<()> {
    remove_links(path)?;
    let entries = match fs::read_dir(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    let mut left = Vec::new();
    for entry in entries {
        let entry = entry?;
        let name = entry.file_name();
        match name.to_str().filter(|name| is_own(path, name)) {
            Some(_) => fs::remove_file(entry.path())?,
            None => left.push(entry.path()),
        }
    }
    if left.is_empty() {
        return fs::remove_dir(path);
    }
    for foreign in left {
        let foreign = printable::path(&foreign);
        tracing::warn!("{foreign} was not created by rto-agent, and is left in place");
    }
    Ok(())
}

/// Whether a pin in a set is an object of the agent, by its kind and its name in the kernel.
pub(super) fn is_own(dir: &Path, name: &str) -> bool {
    let path = dir.join(name);
    let Ok(pinned) = Pinned::open(&path) else {
        return false;
    };
    match (pinned.id(), name) {
        (ObjectId::Link(_), LINK) => is_own_link(dir, name, PROGRAM_NAME, PROGRAM),
        (ObjectId::Link(_), CLONE_LINK) => is_own_link(dir, name, PROGRAM_CLONE, CLONE_PROGRAM),
        (ObjectId::Program(id), PROGRAM) => is_pinned(id, PROGRAM_NAME, &path),
        (ObjectId::Program(id), CLONE_PROGRAM) => is_pinned(id, PROGRAM_CLONE, &path),
        // A generation's maps are the agent's, of any layout and name.
        (ObjectId::Map(_), _) => true,
        _ => false,
    }
}

/// Whether the program of a pinned link is the agent's. Without CAP_SYS_ADMIN the kernel reports
/// only the names of open programs: it may be pinned in any of the sets.
fn is_own_link(dir: &Path, link: &str, name: &str, pin: &str) -> bool {
    let program = link::Link::from_pin(&dir.join(link)).and_then(|link| link.program_id());
    let Ok(program) = program else {
        return false;
    };
    let all = pin_sets(dir.parent().unwrap_or(dir)).unwrap_or_default();
    is_agents(program, name, &dir.join(pin))
        || all
            .iter()
            .any(|set| is_pinned(program, name, &set.path.join(pin)))
}

/// Renames `staging` to `target`, and a former `target` to another name. (The caller removes it
/// once the new set is active.)
pub(super) fn promote(pin_dir: &Path, staging: &Path, target: &Path) -> io::Result<()> {
    if target.exists() {
        let name = target
            .file_name()
            .and_then(|n| n.to_str())
            .unwrap_or_default();
        let aside = unique(pin_dir, "old", &format!("-{name}"));
        fs::rename(target, aside)?;
    }
    fs::rename(staging, target)
}

/// An unused name below `pin_dir`: `<prefix>-<number><suffix>`.
pub(super) fn unique(pin_dir: &Path, prefix: &str, suffix: &str) -> PathBuf {
    let pid = u64::from(std::process::id());
    (pid..)
        .map(|n| pin_dir.join(format!("{prefix}-{n}{suffix}")))
        .find(|p| !p.exists())
        .unwrap_or_default()
}

/// Opens a pinned map as the typed handle `$kind`, and checks its type and sizes.
macro_rules! open {
    ($dir:expr, $name:expr, $variant:ident) => {
        MapData::from_pin($dir.join($name))
            .and_then(aya::maps::Map::from_map_data)
            .and_then(|map| map.try_into())
            .map_err(|e: MapError| map_error($name, e))?
    };
}

pub(super) use open;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pin_set_names_round_trip() {
        let name = pin_set_name(b"object", b"", 16384);
        assert_eq!(parse_name(&name), Some(Some(LAYOUT_VERSION)));
        assert_eq!(
            parse_name(&format!("old-17-{name}")),
            Some(Some(LAYOUT_VERSION))
        );
        assert_eq!(parse_name("staging-12"), Some(None));
    }

    #[test]
    fn foreign_names_are_not_ours() {
        for name in [
            "cilium",
            "l1",
            "l1-zz-3",
            "lx-00-3",
            "l1-00-3-4",
            "link",
            "old-3",
            "",
        ] {
            assert_eq!(parse_name(name), None, "{name}");
        }
    }

    #[test]
    fn another_object_or_capacity_is_another_set() {
        let name = pin_set_name(b"object", b"", 16384);
        assert_ne!(name, pin_set_name(b"object", b"", 16385));
        assert_ne!(name, pin_set_name(b"object2", b"", 16384));
        assert_ne!(name, pin_set_name(b"object", b"1", 16384));
    }

    #[test]
    fn pin_sets_with_capacity_are_found_by_name() {
        let named = |name: String| PinSet {
            path: Path::new("/pins").join(name),
            layout: Some(LAYOUT_VERSION),
        };
        let all = [
            named(pin_set_name(b"object", b"", 16384)),
            named(pin_set_name(b"object", b"", 8192)),
            named(pin_set_name(b"object", b"", 4095)),
            named(pin_set_name(b"other", b"", 8192)),
            named(format!("old-17-{}", pin_set_name(b"object", b"", 8192))),
            named("staging-3".to_owned()),
        ];
        let found = with_capacity(&all, b"object", b"", 4096);
        assert_eq!(
            found,
            [
                (8192, all[1].path.as_path()),
                (16384, all[0].path.as_path())
            ]
        );
    }

    #[test]
    fn new_pin_set_gets_modification_time_of_former() {
        let dir = tempfile::tempdir().unwrap();
        let [former, new] = ["former", "new"].map(|name| dir.path().join(name));
        assert_eq!(made(&former), None);
        fs::write(&former, "").unwrap();
        let then = UNIX_EPOCH + std::time::Duration::from_secs(1_700_000_000);
        set_made(&former, then);
        fs::write(&new, "").unwrap();
        assert_ne!(made(&new), Some(then));
        set_made(&new, made(&former).unwrap());
        assert_eq!(made(&new), Some(then));
    }

    #[test]
    fn exposed_directory_is_replaced_with_its_pins() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pins");
        fs::create_dir_all(path.join("l1-ab-3")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        let former = fs::metadata(&path).unwrap().ino();
        replace_exposed(&path).unwrap();
        let now = fs::metadata(&path).unwrap();
        assert_eq!(now.mode() & 0o777, 0o700);
        assert!(now.ino() != former && path.join("l1-ab-3").exists());
        // As after a kill.
        fs::rename(&path, dir.path().join("pins-private")).unwrap();
        fs::create_dir(&path).unwrap();
        replace_exposed(&path).unwrap();
        assert!(path.join("l1-ab-3").exists());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn promote_moves_the_former_aside() {
        let dir = tempfile::tempdir().unwrap();
        let (staging, target) = (dir.path().join("staging-1"), dir.path().join("l1-ab-3"));
        fs::create_dir(&staging).unwrap();
        fs::create_dir(&target).unwrap();
        promote(dir.path(), &staging, &target).unwrap();
        let all = pin_sets(dir.path()).unwrap();
        assert_eq!(all.len(), 2);
        assert!(target.exists() && !staging.exists());
        for g in all {
            remove_pin_set(&g.path).unwrap();
        }
        assert_eq!(pin_sets(dir.path()).unwrap(), vec![]);
    }
}
