//! Operations without an open kernel: creating, reading and removing pins, also if no daemon runs.

use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use rto_agent_common::{LAYOUT_VERSION, Policy};
use rto_agent_core::{
    policy::{Cidr, PolicyName},
    wire::kernel::Removed,
};

use super::{
    link, link::Link, pin_check::OwnMaps, pins, schedules::stop_shaping, slots::Slots,
    tables::Tables,
};
use crate::{
    datapath::{DatapathError, error::pin_error},
    kernel::{
        bpf::{ProgramInfo, program_info},
        clock::boottime_ms,
    },
};

/// Creates the pin directory if it does not exist.
///
/// # Errors
///
/// If it cannot be created, is not on a BPF file system, or users other than root can write to it.
pub fn make_pin_dir(path: &Path) -> io::Result<()> {
    pins::create_pin_dir(path)
}

/// Removes every pin of the agent below `pin_dir`, of any version, and the directory itself if it
/// is then empty. Works without a daemon; a running daemon must be asked instead.
///
/// # Errors
///
/// If a pin cannot be removed: the first such error. All other pins are still removed.
pub fn remove_pins(pin_dir: &Path) -> Result<Removed, DatapathError> {
    // Otherwise a socket whose timer is being armed would keep a TCP_USER_TIMEOUT.
    stop_shaping(pin_dir).unwrap_or_else(|e| tracing::warn!("{e}"));
    let mut removed = Removed::default();
    let mut failed = None;
    let sets = pins::pin_sets(pin_dir).map_err(|e| pin_error(pin_dir, e))?;
    // All links first: a link is recognised by its program, which may be pinned in another set.
    for set in &sets {
        let had_link = pins::is_own(&set.path, pins::LINK);
        match link::remove(&set.path) {
            Ok(()) => removed.links += usize::from(had_link),
            Err(e) => failed = failed.or(Some(pin_error(&set.path, e))),
        }
    }
    for set in sets {
        match pins::remove_pin_set(&set.path) {
            Ok(()) if set.path.exists() => removed.left.extend(entries(&set.path)),
            Ok(()) => removed.generations.push(set.path),
            Err(e) => failed = failed.or(Some(pin_error(&set.path, e))),
        }
    }
    let is_set = |path: &PathBuf| removed.left.iter().any(|left| left.starts_with(path));
    let others: Vec<_> = entries(pin_dir)
        .into_iter()
        .filter(|path| !is_set(path))
        .collect();
    removed.left.extend(others);
    if removed.left.is_empty()
        && let Err(e) = std::fs::remove_dir(pin_dir)
        && e.kind() != io::ErrorKind::NotFound
    {
        failed = failed.or(Some(pin_error(pin_dir, e)));
    }
    failed.map_or(Ok(removed), Err)
}

fn entries(dir: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir).into_iter().flatten();
    entries.flatten().map(|entry| entry.path()).collect()
}

/// Detaches the programs of every pin set below `pin_dir`; the maps stay. Returns the number of
/// sets that had a link.
pub fn remove_links(pin_dir: &Path) -> Result<usize, DatapathError> {
    stop_shaping(pin_dir)?;
    let mut count = 0;
    let programs = pinned_program_ids(pin_dir);
    for set in pins::pin_sets(pin_dir).map_err(|e| pin_error(pin_dir, e))? {
        count += usize::from(pins::is_own(&set.path, pins::LINK));
        link::remove(&set.path).map_err(|e| pin_error(&set.path, e))?;
    }
    // Where links cannot be detached (before Linux 5.9), they end some time after their last pin.
    // Without CAP_SYS_ADMIN, which only Linux 5.8 and later do not require, the kernel does not
    // report when.
    let _ = wait_until(|| programs.iter().all(|id| program_info(*id).is_err()));
    Ok(count)
}

/// Waits until a program has ended. If the kernel does not report that (CAP_SYS_ADMIN), waits until
/// it is no longer attached to the cgroup. Returns false after the timeout.
pub(super) fn wait_for_end(cgroup: &Path, program_id: Option<u32>) -> bool {
    let has_ended = |id| {
        let is_attached = || link::attached(cgroup, id).unwrap_or(false);
        has_ended(&program_info(id), is_attached)
    };
    wait_until(|| program_id.is_none_or(has_ended))
}

/// Whether a program has ended, according to the kernel's answer.
fn has_ended(info: &io::Result<ProgramInfo>, is_attached: impl FnOnce() -> bool) -> bool {
    match info {
        Ok(_) => false,
        Err(e) if e.kind() == io::ErrorKind::PermissionDenied => !is_attached(),
        Err(_) => true,
    }
}

/// Waits at most one second until the condition holds; returns whether it does.
pub(super) fn wait_until(done: impl Fn() -> bool) -> bool {
    const STEP: Duration = Duration::from_millis(2);
    for _ in 0..500 {
        if done() {
            return true;
        }
        std::thread::sleep(STEP);
    }
    false
}

/// The policy of the entry that covers an address, in the maps of the attached program; `None` if
/// there is no such entry, or no program.
pub fn pinned_policy(pin_dir: &Path, address: std::net::IpAddr) -> Option<Policy> {
    let tables = in_force(pin_dir).ok()??;
    let host: Cidr = address.to_string().parse().ok()?;
    let entry = tables.read.tries.get(&host).ok()??;
    if entry.is_over(boottime_ns) {
        return None;
    }
    tables.read.policy(entry.slot()).ok()
}

fn boottime_ns() -> u64 {
    boottime_ms().saturating_mul(1_000_000)
}

/// The contents of the active maps.
#[derive(Clone, Debug, Default)]
pub struct PinnedMaps {
    /// Policies, as the kernel stores them.
    pub policies: BTreeMap<PolicyName, Policy>,
    /// Entries, sorted by address.
    pub entries: Vec<PinnedEntry>,
}

/// An entry in a map.
#[derive(Clone, Debug)]
pub struct PinnedEntry {
    /// The CIDR.
    pub cidr: Cidr,
    /// Its policy.
    pub policy: PolicyName,
    /// Connections that it has covered.
    pub hits: u32,
}

/// The active policies and entries, from the pins below `pin_dir`; `None` if no program is
/// attached.
pub fn pinned_maps(pin_dir: &Path) -> Result<Option<PinnedMaps>, DatapathError> {
    let Some(tables) = in_force(pin_dir)? else {
        return Ok(None);
    };
    let policies = tables.read.policies()?;
    let slots = Slots::read(policies.iter().copied());
    let names = slots.by_index();
    let named = policies.into_iter();
    let named = named.filter_map(|(index, policy)| Some(((*names.get(&index)?).clone(), policy)));
    let mut entries = Vec::new();
    for (cidr, value) in tables.read.tries.all()? {
        if let Some(policy) = names.get(&value.slot())
            && !value.is_over(boottime_ns)
        {
            entries.push(PinnedEntry {
                cidr,
                policy: (*policy).clone(),
                hits: value.hits,
            });
        }
    }
    entries.sort_unstable_by_key(|entry| entry.cidr);
    Ok(Some(PinnedMaps {
        policies: named.collect(),
        entries,
    }))
}

/// The maps that the attached program uses, if there is one.
fn in_force(pin_dir: &Path) -> Result<Option<Tables>, DatapathError> {
    for set in pins::pin_sets(pin_dir).map_err(|e| pin_error(pin_dir, e))? {
        let is_readable = set.layout == Some(LAYOUT_VERSION);
        if is_readable && is_in_force(&set.path).map_err(|e| pin_error(&set.path, e))? {
            return Tables::open(&set.path).map(Some);
        }
    }
    Ok(None)
}

/// Whether the program pinned in `dir` is attached and uses every map pinned there: a foreign pin
/// must not be mistaken for one of its maps.
fn is_in_force(dir: &Path) -> io::Result<bool> {
    let link = match Link::open(dir) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(false),
        link => link?,
    };
    Ok(link.is_attached()?
        && link.is_of(dir)
        && OwnMaps::pinned(dir).is_some_and(|own| own.foreign_pin(dir).is_none()))
}

/// Like [`remove_pins`], but only if no program is attached: another daemon may have started.
/// Returns `None` if the pins were kept.
pub fn remove_kept_pins(pin_dir: &Path) -> Result<Option<Removed>, DatapathError> {
    let sets = pins::pin_sets(pin_dir).map_err(|e| pin_error(pin_dir, e))?;
    if sets.iter().any(|g| pins::is_own(&g.path, pins::LINK)) {
        return Ok(None);
    }
    remove_pins(pin_dir).map(Some)
}

/// Ids of the programs behind the links pinned below `pin_dir`: all other programs are foreign.
pub fn pinned_program_ids(pin_dir: &Path) -> Vec<u32> {
    let sets = pins::pin_sets(pin_dir).unwrap_or_default();
    sets.iter()
        .filter_map(|g| Link::at(&g.path))
        .map(|link| link.program_id)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_privilege_program_end_is_seen_at_its_cgroup() {
        let refused = || io::Error::from_raw_os_error(libc::EPERM);
        let gone = io::Error::from_raw_os_error(libc::ENOENT);
        let never = || unreachable!("the kernel has said it");
        assert!(!has_ended(&Ok(ProgramInfo::default()), never));
        assert!(has_ended(&Err(gone), never));
        assert!(!has_ended(&Err(refused()), || true));
        assert!(has_ended(&Err(refused()), || false));
    }
}
