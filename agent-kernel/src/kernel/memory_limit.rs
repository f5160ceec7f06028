//! How much memory the memory cgroups of this process leave for it.
//!
//! The kernel kills a process that exceeds its limit (`mem_cgroup_out_of_memory()`, Linux 6.18). It
//! charges a map's elements to the cgroup of the process that created the map
//! (`bpf_map_kmalloc_node()`, since Linux 5.11).

use std::{
    fs,
    path::{Component, Path, PathBuf},
};

use super::mounts::{self, Mount};

/// The cgroup that leaves the least memory, of this process's own and its ancestors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryLimit {
    /// The cgroup's directory.
    pub cgroup: PathBuf,
    /// Its limit, bytes.
    pub max: u64,
    /// Memory below the limit, bytes: reclaimable memory counts as free.
    pub left: u64,
}

/// The file names of one version of the controller.
struct Names {
    max: &'static str,
    current: &'static str,
    /// Lines of `memory.stat` that count memory reclaimed under pressure.
    reclaimable: &'static [&'static str],
}

static V2: Names = Names {
    max: "memory.max",
    current: "memory.current",
    reclaimable: &["inactive_file", "active_file", "slab_reclaimable"],
};
static V1: Names = Names {
    max: "memory.limit_in_bytes",
    current: "memory.usage_in_bytes",
    reclaimable: &["total_inactive_file", "total_active_file"],
};

/// The tightest limit of this process; `None` if it has no limit, or none can be read.
pub fn read() -> Option<MemoryLimit> {
    let own = fs::read_to_string("/proc/self/cgroup").ok()?;
    let (names, mount, dir) = find(&own, &mounts::read().ok()?)?;
    let above = dir.ancestors().take_while(|dir| dir.starts_with(&mount));
    let limits = above.filter_map(|dir| {
        let file = |name| fs::read_to_string(dir.join(name)).ok();
        let stat = file("memory.stat").unwrap_or_default();
        limit_of(dir, names, &file(names.max)?, &file(names.current)?, &stat)
    });
    limits.min_by_key(|limit| limit.left)
}

/// The controller's files, mount point and directory of the process. The controller is in cgroup
/// v1's hierarchy if that is mounted, because it is then not in the other.
fn find(own: &str, mounts: &[Mount]) -> Option<(&'static Names, PathBuf, PathBuf)> {
    let has_memory = |list: &str| list.split(',').any(|name| name == "memory");
    let v1 = mounts.iter().filter(|mount| mount.kind == "cgroup");
    let v1 = v1.filter(|mount| has_memory(&mount.super_options));
    let v2 = mounts.iter().filter(|mount| mount.kind == "cgroup2");
    let hierarchies = v1
        .map(|mount| (&V1, mount))
        .chain(v2.map(|mount| (&V2, mount)));
    for (names, mount) in hierarchies {
        // Version 1 has lines like "4:memory:/path", version 2 has "0::/path".
        let path = own.lines().find_map(|line| {
            let mut parts = line.splitn(3, ':').skip(1);
            let (controllers, path) = (parts.next()?, parts.next()?);
            let is_this = if mount.kind == "cgroup2" {
                controllers.is_empty()
            } else {
                has_memory(controllers)
            };
            is_this.then_some(path)
        });
        let below = path.and_then(|path| Path::new(path).strip_prefix(&mount.root).ok());
        if let Some(below) = below
            && below
                .components()
                .all(|part| matches!(part, Component::Normal(_)))
        {
            return Some((names, mount.point.clone(), mount.point.join(below)));
        }
    }
    None
}

/// The limit of one cgroup, from the contents of its files; `None` if it has no limit.
fn limit_of(
    cgroup: &Path,
    names: &Names,
    max: &str,
    current: &str,
    stat: &str,
) -> Option<MemoryLimit> {
    /// Version 1 reports "no limit" as the largest possible number of pages.
    const NO_LIMIT: u64 = 1 << 60;
    // For no limit the file contains "max", which is not a number.
    let max: u64 = max.trim().parse().ok()?;
    if max >= NO_LIMIT {
        return None;
    }
    let current: u64 = current.trim().parse().ok()?;
    let reclaimable = stat.lines().filter_map(|line| {
        let (name, bytes) = line.split_once(' ')?;
        let counts = names.reclaimable.contains(&name);
        counts.then(|| bytes.trim().parse::<u64>().ok())?
    });
    let in_use = current.saturating_sub(reclaimable.sum::<u64>());
    Some(MemoryLimit {
        cgroup: cgroup.to_owned(),
        max,
        left: max.saturating_sub(in_use),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn free_memory_of_cgroup_v1_and_v2() {
        let dir = Path::new("/c");
        let left = |names, max: &str, stat: &str| {
            let current = (100 * MIB).to_string() + "\n";
            limit_of(dir, names, max, &current, stat).map(|limit| limit.left / MIB)
        };
        let max = format!("{}\n", 256 * MIB);
        assert_eq!(left(&V2, &max, ""), Some(156));
        // File cache is reclaimed under memory pressure; tmpfs, which "file" also counts, is not.
        let stat = "anon 1\nfile 60000000\ninactive_file 10485760\nactive_file 20971520\n";
        assert_eq!(left(&V2, &max, stat), Some(186));
        assert_eq!(left(&V1, &max, &stat.replace("\n", "\ntotal_")), Some(186));
        assert_eq!(left(&V2, "max\n", ""), None);
        assert_eq!(left(&V1, "9223372036854771712\n", ""), None);
        assert_eq!(left(&V2, "1048576\n", ""), Some(0));
    }

    #[test]
    fn memory_cgroup_path_is_found_in_v1_and_v2() {
        let unified = mounts::parse(mounts::tests::UNIFIED);
        let (_, mount, dir) = find("0::/system.slice/rto-agent.service\n", &unified).unwrap();
        assert_eq!(mount, Path::new("/sys/fs/cgroup"));
        let expected = "/sys/fs/cgroup/system.slice/rto-agent.service";
        assert_eq!(dir, Path::new(expected));
        let line = "34 30 0:30 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n";
        let hybrid = mounts::parse(&format!("{}{line}", mounts::tests::HYBRID));
        let own = "5:cpu:/x\n4:memory:/a/b\n0::/\n";
        let (names, _, dir) = find(own, &hybrid).unwrap();
        assert_eq!(names.max, V1.max);
        assert_eq!(dir, Path::new("/sys/fs/cgroup/memory/a/b"));
        assert!(find("0::/../x\n", &unified).is_none());
    }
}
