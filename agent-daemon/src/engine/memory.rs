//! Whether there is enough memory for a large change, including what is needed only while it is
//! made.

use rto_agent_kernel::kernel::memory_limit::{self, MemoryLimit};

use super::error::EngineError;

/// An upper bound of the memory that an operation needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Need {
    /// The operation, in words.
    what: String,
    bytes: u64,
}

/// Per CIDR of the files: a row, its place in the text, and sorting. Measured: 110 bytes (VmHWM of
/// a start with a million entries).
const OF_FILES: u64 = 128;
/// The same for a CIDR in TOML, with its value in the parser's tree.
const OF_TOML: u64 = 400;
/// Per added runtime entry: nodes in the map of runtime entries, in the copy that a change is tried
/// on and in the merged entries; a line of the plan and one of the state file, held in memory.
/// Measured: 374 bytes (VmHWM of an `add` of 200,000).
const OF_RUNTIME: u64 = 400;
/// Per existing runtime entry: the copy that a change is tried on, and a line of the state file.
/// Measured: 218 bytes (VmHWM of an `add` of one CIDR to 200,000).
const OF_COPY: u64 = 220;
/// Per byte of the state file: its text, and the parsed entries.
const OF_STORE: u64 = 4;
/// Per byte of a request: its buffer, and a string per CIDR of a dozen bytes.
const OF_BODY: u64 = 6;
/// Per map entry: two nodes of the kernel's trie, 64 bytes each plus accounting
/// (`lpm_trie_node_alloc()`, Linux 6.18).
const OF_MAPS: u64 = 144;
/// Smaller needs are not checked.
const SMALL: u64 = 4 << 20;

impl Need {
    /// To read these numbers of CIDRs in TOML and in lists.
    #[must_use]
    pub fn of_files([in_toml, in_lists]: [usize; 2]) -> Self {
        let cidrs = in_toml.saturating_add(in_lists);
        let lists = Self::of(format!("{cidrs} entries of files"), in_lists, OF_FILES);
        let toml = Self::of(String::new(), in_toml, OF_TOML);
        Self {
            bytes: lists.bytes.saturating_add(toml.bytes),
            ..lists
        }
    }

    /// To add runtime entries to the existing ones.
    #[must_use]
    pub fn of_runtime(added: usize, known: usize) -> Self {
        let what = match known {
            0 => format!("{added} runtime entries"),
            _ => format!("{added} more runtime entries in addition to {known}"),
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

    /// Checks the need against the memory left; the error is the refusal's text.
    fn check(&self, limit: &MemoryLimit) -> Result<(), String> {
        const MIB: u64 = 1 << 20;
        if self.bytes <= limit.left {
            return Ok(());
        }
        Err(format!(
            "{} need about {} MiB of memory, and the memory cgroup {} has {} of its {} MiB left; \
             raise its limit (MemoryMax= of the unit: systemctl edit rto-agent), or give fewer; \
             nothing was changed",
            self.what,
            self.bytes.div_ceil(MIB),
            limit.cgroup.display(),
            limit.left / MIB,
            limit.max / MIB,
        ))
    }
}

/// Refuses an operation during which the kernel's OOM killer would end the daemon.
///
/// # Errors
///
/// [`EngineError::Refused`] with the numbers, if the memory cgroup has less left.
pub fn check(need: &Need) -> Result<(), EngineError> {
    if need.bytes < SMALL {
        return Ok(());
    }
    match memory_limit::read() {
        Some(limit) => need.check(&limit).map_err(EngineError::Refused),
        None => Ok(()),
    }
}

/// Returns memory that the allocator caches to the kernel. After reading a million entries, the
/// cache is as large as the memory in use.
pub(super) fn trim_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: `malloc_trim()` can be called at any time, on any thread.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Makes large allocations come from the kernel and return to it at once. Otherwise the allocator
/// raises its threshold to the size of the first large block that is freed (mallopt(3),
/// M_MMAP_THRESHOLD), and a reload's temporary memory fragments the heap.
pub fn set_mmap_threshold() {
    #[cfg(target_env = "gnu")]
    {
        const LARGE: libc::c_int = 1 << 20;
        // SAFETY: `mallopt()` can be called on any thread.
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
        assert_eq!(Need::of_files([0, 800_000]).check(&limit), Ok(()));
        // CIDRs that are added again need no more memory.
        assert_eq!(Need::of_runtime(0, 400_000).check(&limit), Ok(()));
        let more = Need::of_runtime(200_000, 300_000).check(&limit);
        let more = more.unwrap_err();
        assert!(
            more.starts_with("200000 more runtime entries in addition to 300000 need"),
            "{more}"
        );
        let refusal = Need::of_runtime(524_288, 0).check(&limit).unwrap_err();
        for part in [
            "524288 runtime entries need about 200 MiB",
            "/sys/fs/cgroup/system.slice/rto-agent.service has 100 of its 256 MiB left",
            "MemoryMax=",
            "nothing was changed",
        ] {
            assert!(refusal.contains(part), "{refusal}");
        }
        let none = MemoryLimit { left: 0, ..limit };
        assert!(Need::of_store(1 << 20).check(&none).is_err());
        assert!(Need::of_body(usize::MAX).check(&none).is_err());
        // Too small to be checked.
        assert!(check(&Need::of_maps(1)).is_ok());
    }
}
