//! Memory that a large change needs: for a moment, and whether there is as much.

use super::EngineError;
use crate::kernel::memory_limit::{self, MemoryLimit};

/// What something takes at most, bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Need {
    /// What takes it, for people.
    what: String,
    bytes: u64,
}

/// A row, its place in the text, and what sorting takes of both: 110 bytes by VmHWM of a start with a million entries.
const OF_FILES: u64 = 128;
/// A node of the map of runtime entries, of the copy that a change is tried on and of the entries over those of the
/// files, a line of the plan, and one of the state file, which is in memory as well: 374 bytes by VmHWM of an `add` of
/// 200,000.
const OF_RUNTIME: u64 = 400;
/// Of one that there is already: the copy that a change is tried on, and its line of the state file. 218 bytes by VmHWM of
/// an `add` of one CIDR to 200,000.
const OF_COPY: u64 = 220;
/// For each byte of the state file: its text, and what is made of it.
const OF_STORE: u64 = 4;
/// For each byte of a request: its buffer, and a string for each CIDR of a dozen bytes.
const OF_BODY: u64 = 6;
/// Two nodes of the kernel's trie, of 64 bytes and what accounting adds (`lpm_trie_node_alloc()`, Linux 6.18).
const OF_MAPS: u64 = 144;
/// What needs less is not asked about.
const SMALL: u64 = 4 << 20;

impl Need {
    /// To read this many CIDRs of files.
    #[must_use]
    pub fn of_files(cidrs: usize) -> Self {
        Self::of(format!("{cidrs} entries of files"), cidrs, OF_FILES)
    }

    /// To add runtime entries to the existing ones.
    #[must_use]
    pub fn of_runtime(added: usize, known: usize) -> Self {
        let what = match known {
            0 => format!("{added} runtime entries"),
            _ => format!("{added} more runtime entries beside {known}"),
        };
        let copies = Self::of(String::new(), known, OF_COPY);
        let added = Self::of(what, added, OF_RUNTIME);
        Self {
            bytes: added.bytes.saturating_add(copies.bytes),
            ..added
        }
    }

    /// To read a state file of this length, bytes.
    #[must_use]
    pub fn of_store(bytes: u64) -> Self {
        Self {
            what: format!("saved runtime entries of {bytes} bytes"),
            bytes: bytes.saturating_mul(OF_STORE),
        }
    }

    /// To read a request of this length, bytes.
    #[must_use]
    pub fn of_body(bytes: usize) -> Self {
        Self::of(format!("a request of {bytes} bytes"), bytes, OF_BODY)
    }

    /// To add entries to the kernel's maps.
    #[must_use]
    pub fn of_maps(entries: usize) -> Self {
        Self::of(
            format!("{entries} entries in the kernel's maps"),
            entries,
            OF_MAPS,
        )
    }

    fn of(what: String, number: usize, each: u64) -> Self {
        let number = u64::try_from(number).unwrap_or(u64::MAX);
        Self {
            what,
            bytes: number.saturating_mul(each),
        }
    }

    /// Whether there is as much, or why not.
    fn check(&self, limit: &MemoryLimit) -> Result<(), String> {
        const MIB: u64 = 1 << 20;
        if self.bytes <= limit.left {
            return Ok(());
        }
        Err(format!(
            "{} need some {} MiB of memory, and the memory cgroup {} has {} of its {} MiB left; raise its limit \
             (MemoryMax= of the unit: systemctl edit rto-agent) or give fewer; nothing was changed",
            self.what,
            self.bytes.div_ceil(MIB),
            limit.cgroup.display(),
            limit.left / MIB,
            limit.max / MIB,
        ))
    }
}

/// Refuses what would have the kernel end the daemon half-way.
///
/// # Errors
///
/// [`EngineError::Refused`] with the numbers, if the memory cgroup has not as much left.
pub fn check(need: &Need) -> Result<(), EngineError> {
    if need.bytes < SMALL {
        return Ok(());
    }
    match memory_limit::read() {
        Some(limit) => need.check(&limit).map_err(EngineError::Refused),
        None => Ok(()),
    }
}

/// Gives the kernel back what the allocator keeps for the next time: after a million entries were read it is
/// as much as is in use.
pub(super) fn trim_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: the allocator's own function, safe at any time and on any thread.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Makes large allocations come from the kernel and return to it at once. Without this, the allocator keeps pieces of
/// the size of the first large one that is freed (mallopt(3), M_MMAP_THRESHOLD), so that what a
/// reload needs for a moment lies beside what is needed for good.
pub fn set_mmap_threshold() {
    #[cfg(target_env = "gnu")]
    {
        const LARGE: libc::c_int = 1 << 20;
        // SAFETY: the allocator's own function, safe on any thread.
        unsafe {
            libc::mallopt(libc::M_MMAP_THRESHOLD, LARGE);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn change_beyond_memory_is_refused_with_numbers() {
        let limit = MemoryLimit {
            cgroup: "/sys/fs/cgroup/system.slice/rto-agent.service".into(),
            max: 256 << 20,
            left: 100 << 20,
        };
        assert_eq!(Need::of_runtime(200_000, 0).check(&limit), Ok(()));
        assert_eq!(Need::of_files(800_000).check(&limit), Ok(()));
        // What is added again takes no room of its own.
        assert_eq!(Need::of_runtime(0, 400_000).check(&limit), Ok(()));
        let more = Need::of_runtime(200_000, 300_000).check(&limit);
        let more = more.unwrap_err();
        assert!(
            more.starts_with("200000 more runtime entries beside 300000 need"),
            "{more}"
        );
        let refusal = Need::of_runtime(524_288, 0).check(&limit).unwrap_err();
        for part in [
            "524288 runtime entries need some 200 MiB",
            "/sys/fs/cgroup/system.slice/rto-agent.service has 100 of its 256 MiB left",
            "MemoryMax=",
            "nothing was changed",
        ] {
            assert!(refusal.contains(part), "{refusal}");
        }
        let none = MemoryLimit { left: 0, ..limit };
        assert!(Need::of_store(1 << 20).check(&none).is_err());
        assert!(Need::of_body(usize::MAX).check(&none).is_err());
        // Not asked about.
        assert!(check(&Need::of_maps(1)).is_ok());
    }
}
