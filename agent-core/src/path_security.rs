//! Refuses directories that another user could replace.
//!
//! A directory's content (state, socket, pins) belongs to the daemon only if no other user can
//! replace the directory or any component of its path. So each component is checked, and each
//! target of a symbolic link.

use std::{
    collections::VecDeque,
    ffi::OsString,
    fs::{self, Metadata},
    io,
    os::unix::fs::{MetadataExt as _, PermissionsExt as _},
    path::{Component, Path, PathBuf},
};

use nix::{
    libc::S_ISVTX,
    unistd::{getegid, geteuid},
};

/// The longest chain of symbolic links; the kernel's limit.
const MAX_LINKS: usize = 40;
/// The most directories that are created for one path.
const MAX_DEPTH: usize = 64;

/// Checks a private directory of the daemon, as far as it exists: no other user may create files in it.
pub fn check_private(path: &Path) -> io::Result<()> {
    let Resolved {
        place,
        meta,
        missing,
    } = resolve(path)?;
    if !missing.is_empty() {
        return Ok(());
    }
    // The daemon writes to this directory, so root as its owner is not enough, unlike on the way to
    // it.
    if meta.uid() != geteuid().as_raw() {
        return Err(refused(&place, &belongs(&meta)));
    }
    match writers(&meta) {
        Some(writers) => Err(refused(&place, &fix(writers, &place))),
        None => Ok(()),
    }
}

/// Checks the directory of a file that no other user may replace, as far as it exists. In a
/// directory with the sticky bit, like `/tmp`, other users may have files beside it.
pub fn check_shared(path: &Path) -> io::Result<()> {
    resolve(path).map(drop)
}

/// Checks a directory from which files are read, as far as it exists: only root and this user may
/// add files.
pub fn check_source_dir(path: &Path) -> io::Result<()> {
    let Resolved {
        place,
        meta,
        missing,
    } = resolve(path)?;
    match writers(&meta).filter(|_| missing.is_empty()) {
        Some(writers) => Err(refused(&place, &fix(writers, &place))),
        None => Ok(()),
    }
}

/// Checks a file that is read: only root and this user may write to it or replace it. Links are
/// followed.
pub(crate) fn check_source_file(path: &Path) -> io::Result<()> {
    let target = fs::canonicalize(path)?;
    for place in [path, &target] {
        check_shared(place.parent().unwrap_or(Path::new("/")))?;
    }
    let meta = fs::metadata(&target)?;
    if !is_trusted(&meta) {
        let why = format!(
            "it belongs to uid {uid}, who can write to it; chown root {place}",
            uid = meta.uid(),
            place = target.display()
        );
        return Err(refused(&target, &why));
    }
    match writers(&meta) {
        Some(writers) => Err(refused(&target, &fix(writers, &target))),
        None => Ok(()),
    }
}

/// Creates a directory and its missing parents, one at a time, and each only where no other user
/// can redirect it. The new directories have exactly this mode, whatever the umask.
pub fn make(path: &Path, mode: u32) -> io::Result<()> {
    // Another user who creates and removes files in a shared directory could keep this busy for ever.
    for _ in 0..MAX_DEPTH {
        let Resolved { place, missing, .. } = resolve(path)?;
        let Some(name) = missing.front() else {
            return Ok(());
        };
        let next = place.join(name);
        match fs::create_dir(&next) {
            // A concurrently created file is checked in the next round.
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
            Err(e) => return Err(refused(&next, &e.to_string())),
            Ok(()) => fs::set_permissions(&next, fs::Permissions::from_mode(mode))?,
        }
    }
    Err(refused(path, "it cannot be created"))
}

/// Creates a directory of the daemon that all users may read, if it does not exist, and checks it.
pub fn make_private(path: &Path) -> io::Result<()> {
    make(path, 0o755)?;
    check_private(path)
}

/// A path with its links, `.` and `..` resolved, also where it does not exist.
pub fn resolved(path: &Path) -> PathBuf {
    let mut place = PathBuf::from("/");
    let mut ahead = components(&std::path::absolute(path).unwrap_or_else(|_| path.to_owned()));
    let mut links = 0;
    while let Some(name) = ahead.pop_front() {
        if name == ".." {
            place.pop();
            continue;
        }
        let next = place.join(&name);
        match fs::read_link(&next) {
            Ok(target) if links < MAX_LINKS => {
                links += 1;
                if target.is_absolute() {
                    place = PathBuf::from("/");
                }
                for name in components(&target).into_iter().rev() {
                    ahead.push_front(name);
                }
            }
            _ => place = next,
        }
    }
    place
}

/// A path with its links followed, as far as it exists.
struct Resolved {
    /// The last component that exists.
    place: PathBuf,
    meta: Metadata,
    /// The components that do not exist yet.
    missing: VecDeque<OsString>,
}

/// Follows all links of a path.
fn resolve(path: &Path) -> io::Result<Resolved> {
    if !path.is_absolute() {
        return Err(io::Error::other("it is not an absolute path"));
    }
    let mut place = PathBuf::from("/");
    let mut meta = fs::symlink_metadata(&place)?;
    check_dir(&place, &meta)?;
    let mut ahead = components(path);
    let mut links = 0;
    while let Some(name) = ahead.pop_front() {
        if name == ".." {
            place.pop();
            meta = fs::symlink_metadata(&place)?;
            continue;
        }
        let next = place.join(&name);
        let found = match fs::symlink_metadata(&next) {
            Ok(found) => found,
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                ahead.push_front(name);
                break;
            }
            Err(e) => return Err(e),
        };
        if found.is_symlink() {
            links += 1;
            if links > MAX_LINKS {
                return Err(refused(&next, "too many symbolic links"));
            }
            if !is_trusted(&found) {
                return Err(refused(
                    &next,
                    &format!("it is a symbolic link and {}", belongs(&found)),
                ));
            }
            let target = fs::read_link(&next)?;
            if target.is_absolute() {
                place = PathBuf::from("/");
            }
            for name in components(&target).into_iter().rev() {
                ahead.push_front(name);
            }
            continue;
        }
        if !found.is_dir() {
            return Err(refused(&next, "it is not a directory"));
        }
        check_dir(&next, &found)?;
        (place, meta) = (next, found);
    }
    Ok(Resolved {
        place,
        meta,
        missing: ahead,
    })
}

/// The components of a path. `..` is kept, because its meaning depends on the links before it.
fn components(path: &Path) -> VecDeque<OsString> {
    path.components()
        .filter(|c| matches!(c, Component::Normal(_) | Component::ParentDir))
        .map(|c| c.as_os_str().to_owned())
        .collect()
}

/// Refuses a directory in which other users can replace files that they do not own.
fn check_dir(place: &Path, meta: &Metadata) -> io::Result<()> {
    if !is_trusted(meta) {
        return Err(refused(place, &belongs(meta)));
    }
    match writers(meta) {
        Some(writers) if meta.mode() & S_ISVTX == 0 => Err(refused(place, &fix(writers, place))),
        _ => Ok(()),
    }
}

fn is_trusted(meta: &Metadata) -> bool {
    meta.uid() == 0 || meta.uid() == geteuid().as_raw()
}

/// Which other users may write to a directory.
fn writers(meta: &Metadata) -> Option<&'static str> {
    let is_ours = meta.gid() == 0 || meta.gid() == getegid().as_raw();
    match meta.mode() {
        mode if mode & 0o002 != 0 => Some("all users"),
        mode if mode & 0o020 != 0 && !is_ours => Some("its group"),
        _ => None,
    }
}

fn belongs(meta: &Metadata) -> String {
    format!(
        "it belongs to uid {}, who could replace it; use a directory that belongs to root",
        meta.uid()
    )
}

fn fix(writers: &str, place: &Path) -> String {
    format!("{writers} can write to it; chmod go-w {}", place.display())
}

fn refused(place: &Path, why: &str) -> io::Error {
    io::Error::other(format!("{}: {why}", place.display()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn chmod(path: &Path, mode: u32) {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }

    fn why(checked: io::Result<()>) -> String {
        checked.unwrap_err().to_string()
    }

    #[test]
    fn path_writable_by_others_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let (middle, end) = (dir.path().join("a"), dir.path().join("a/b"));
        fs::create_dir_all(&end).unwrap();
        check_private(&end).unwrap();
        check_private(&end.join("not/yet")).unwrap();
        for (mode, good) in [
            (0o777, false),
            (0o757, false),
            (0o1777, true),
            (0o755, true),
        ] {
            chmod(&middle, mode);
            assert_eq!(check_private(&end).is_ok(), good, "{mode:o}");
            assert_eq!(check_shared(&middle).is_ok(), good, "{mode:o}");
            // A missing directory would be created there.
            assert_eq!(
                check_private(&end.join("not/yet")).is_ok(),
                good,
                "{mode:o}"
            );
        }
        chmod(&middle, 0o1777);
        assert!(why(check_private(&middle)).contains("all users can write to it; chmod go-w"));
    }

    #[test]
    fn directories_are_safe_from_other_users() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        make(&at("a/b/c"), 0o750).unwrap();
        for name in ["a", "a/b", "a/b/c"] {
            assert_eq!(fs::metadata(at(name)).unwrap().mode() & 0o777, 0o750);
        }
        make(&at("a/b/c"), 0o755).unwrap();
        assert_eq!(fs::metadata(at("a/b/c")).unwrap().mode() & 0o777, 0o750);
        // Through a link of this user to a path that does not exist yet.
        symlink("a/new", at("link")).unwrap();
        make(&at("link/in"), 0o755).unwrap();
        assert!(at("a/new/in").is_dir());
        // In a sticky directory this user can create directories, and a link of another user is not
        // followed.
        fs::create_dir(at("tmp")).unwrap();
        chmod(&at("tmp"), 0o1777);
        make(&at("tmp/run"), 0o755).unwrap();
        symlink(at("a"), at("tmp/planted")).unwrap();
        if geteuid().is_root() {
            std::os::unix::fs::lchown(at("tmp/planted"), Some(65534), None).unwrap();
            assert!(why(make(&at("tmp/planted/x"), 0o755)).contains("symbolic link"));
            assert!(!at("a/x").exists());
        }
        chmod(&at("a"), 0o777);
        assert!(why(make(&at("a/y"), 0o755)).contains("all users can write"));
        assert!(!at("a/y").exists());
    }

    #[test]
    fn files_that_others_can_change_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::create_dir_all(at("etc/in")).unwrap();
        fs::write(at("etc/in/file"), "").unwrap();
        symlink("etc/in/file", at("link")).unwrap();
        check_source_file(&at("link")).unwrap();
        check_source_dir(&at("etc/in")).unwrap();
        check_source_dir(&at("etc/not/yet")).unwrap();
        chmod(&at("etc/in/file"), 0o666);
        assert!(why(check_source_file(&at("link"))).contains("file: all users can write to it"));
        chmod(&at("etc/in/file"), 0o644);
        // With the sticky bit other users cannot replace a file, but can add files.
        chmod(&at("etc/in"), 0o1777);
        check_source_file(&at("link")).unwrap();
        assert!(why(check_source_dir(&at("etc/in"))).contains("in: all users can write to it"));
        chmod(&at("etc/in"), 0o777);
        assert!(why(check_source_file(&at("link"))).contains("in: all users can write to it"));
        chmod(&at("etc/in"), 0o755);
        if geteuid().is_root() {
            std::os::unix::fs::chown(at("etc/in/file"), Some(65534), None).unwrap();
            let message = why(check_source_file(&at("link")));
            assert!(message.contains("it belongs to uid 65534"), "{message}");
        }
        let missing = check_source_file(&at("none")).unwrap_err();
        assert_eq!(missing.kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn symlink_targets_are_checked() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::create_dir_all(at("open/in")).unwrap();
        fs::create_dir(at("good")).unwrap();
        chmod(&at("open"), 0o777);
        symlink("good", at("one")).unwrap();
        symlink(at("one"), at("two")).unwrap();
        symlink("open/in/../in", at("three")).unwrap();
        symlink("loop", at("loop")).unwrap();
        check_private(&at("two")).unwrap();
        check_private(&at("good/../two")).unwrap();
        assert!(why(check_private(&at("three"))).contains("open: all users can write"));
        assert!(why(check_private(&at("loop"))).contains("too many symbolic links"));
        fs::write(at("file"), "").unwrap();
        assert!(why(check_private(&at("file"))).contains("it is not a directory"));
    }
}
