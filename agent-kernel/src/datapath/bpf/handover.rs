//! Restarts without a gap, even if the daemon is configured to remove its pins when it stops:
//! pinned objects pass to the service manager's file-descriptor store as open descriptors, and the
//! next start pins them again. After that they are adopted like any other pins.

use std::{
    fs, io,
    os::fd::OwnedFd,
    path::Path,
    time::{Duration, UNIX_EPOCH},
};

use super::{link::Link, open::new_staging, pins};
use crate::kernel::{bpf::pin_fd, pinned::Pinned};

/// An object, and the name under which the service manager keeps it: `<pin set>/<pin>/<seconds>`,
/// where the seconds are the Unix time of its pin.
#[derive(Debug)]
pub struct Handed {
    /// Contains no ':', which separates names (sd_listen_fds(3)).
    pub name: String,
    /// The open map, program or link.
    pub fd: OwnedFd,
}

/// Every object of the pin set below `pin_dir` whose program is attached; empty if there is no such
/// set.
pub fn pinned_objects(pin_dir: &Path) -> io::Result<Vec<Handed>> {
    let is_in_force = |set: &pins::PinSet| {
        !set.is_staging()
            && Link::at(&set.path).is_some_and(|link| link.is_attached().unwrap_or(false))
    };
    let Some(set) = pins::pin_sets(pin_dir)?.into_iter().find(is_in_force) else {
        return Ok(Vec::new());
    };
    let set_name = set.path.file_name().unwrap_or_default().to_string_lossy();
    let mut all = Vec::new();
    for entry in fs::read_dir(&set.path)? {
        let path = entry?.path();
        let pin = path.file_name().unwrap_or_default().to_string_lossy();
        let made = pins::made(&path).and_then(|at| at.duration_since(UNIX_EPOCH).ok());
        let made_s = made.unwrap_or_default().as_secs();
        all.push(Handed {
            name: format!("{set_name}/{pin}/{made_s}"),
            fd: Pinned::open(&path)?.into_fd(),
        });
    }
    Ok(all)
}

/// Pins the objects that an earlier run handed over; returns whether it did. Existing pins take
/// precedence, as after a daemon was killed.
///
/// # Errors
///
/// If an object cannot be pinned; then none is.
pub fn pin_again(pin_dir: &Path, handed: &[Handed]) -> io::Result<bool> {
    let has_link = |set: &pins::PinSet| set.path.join(pins::LINK).exists();
    if handed.is_empty() || pins::pin_sets(pin_dir)?.iter().any(has_link) {
        return Ok(false);
    }
    let parsed: Option<Vec<_>> = handed.iter().map(|one| parse(&one.name)).collect();
    let parsed = parsed.ok_or_else(|| {
        io::Error::other(
            "a descriptor has a name that is not the \
                                                        agent's",
        )
    })?;
    let set = parsed[0].0;
    if parsed.iter().any(|(other, ..)| *other != set) {
        return Err(io::Error::other(
            "the descriptors belong to several sets of pins",
        ));
    }
    let staging = new_staging(pin_dir).map_err(io::Error::other)?;
    let pinned = handed
        .iter()
        .zip(&parsed)
        .try_for_each(|(one, (_, pin, made))| {
            let path = staging.join(pin);
            pin_fd(&one.fd, &path)?;
            pins::set_made(&path, UNIX_EPOCH + *made);
            Ok(())
        });
    let promoted = pinned.and_then(|()| pins::promote(pin_dir, &staging, &pin_dir.join(set)));
    if promoted.is_err() {
        let _ = pins::remove_pin_set(&staging); // The next start removes it.
    }
    promoted.map(|()| true)
}

/// Removes every pin set below `pin_dir` without detaching programs: they stay attached as long as
/// another process holds the links open.
pub fn unpin(pin_dir: &Path) -> io::Result<()> {
    for set in pins::pin_sets(pin_dir)? {
        pins::remove_pin_set(&set.path)?;
    }
    match fs::remove_dir(pin_dir) {
        // The directory stays if it contains foreign files.
        Err(e) if e.kind() == io::ErrorKind::DirectoryNotEmpty => Ok(()),
        removed => removed,
    }
}

/// Parses the set, the pin, and the time of the pin.
fn parse(name: &str) -> Option<(&str, &str, Duration)> {
    let mut parts = name.split('/');
    let (set, pin, made_s) = (parts.next()?, parts.next()?, parts.next()?);
    let is_word = |pin: &str| pin.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
    let ours = pins::is_set_name(set) && !pin.is_empty() && is_word(pin) && parts.next().is_none();
    ours.then_some((set, pin, Duration::from_secs(made_s.parse().ok()?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_pins() {
        let set = pins::pin_set_name(b"object", b"", 16384);
        let name = format!("{set}/ENTRIES_V4/1700000000");
        let expected = (
            set.as_str(),
            "ENTRIES_V4",
            Duration::from_secs(1_700_000_000),
        );
        assert_eq!(parse(&name), Some(expected));
        for wrong in [
            "",
            "link",
            "a/link/1",
            "../link/1",
            &format!("{set}/../1"),
            &format!("{set}/link/x"),
        ] {
            assert_eq!(parse(wrong), None, "{wrong}");
        }
        for wrong in ["staging-1/link/1", &format!("old-3-{set}/link/1")] {
            assert_eq!(parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn empty_handover_pins_nothing() {
        let dir = tempfile::tempdir().unwrap();
        assert!(!pin_again(dir.path(), &[]).unwrap());
        assert!(pinned_objects(dir.path()).unwrap().is_empty());
    }
}
