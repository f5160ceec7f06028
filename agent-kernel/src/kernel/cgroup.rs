//! Finds the cgroup2 hierarchy.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use nix::sys::statfs::{CGROUP2_SUPER_MAGIC, statfs};

use super::mounts::{self, Mount};

/// Why there is no cgroup to attach to. The text names the fix.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CgroupError {
    /// No cgroup2 hierarchy is mounted.
    #[error(
        "no cgroup2 hierarchy is mounted; mount -t cgroup2 none /sys/fs/cgroup/unified (or boot \
         with systemd.unified_cgroup_hierarchy=1), or give a cgroup2 directory with --cgroup"
    )]
    NotMounted,
    /// The mounts show only part of the hierarchy: in a container, or a cgroup namespace
    /// (cgroup_namespaces(7)).
    #[error(
        "{shown} is not the root of the cgroup2 hierarchy, but only the part of this container: \
         policies would apply to this container only; mount the host's /sys/fs/cgroup into the \
         container, for example at /host/cgroup, where it is found automatically (podman run \
         --volume /sys/fs/cgroup:/host/cgroup:ro; in a pod: a hostPath volume), or run with the \
         host's cgroup namespace (--cgroupns=host); to use only this part, set --cgroup or [agent] \
         cgroup"
    )]
    NotTheRoot {
        /// Mount point of the first such mount.
        shown: PathBuf,
    },
    /// The given path is not a cgroup2 directory.
    #[error("{path}: {reason}; give a directory of a cgroup2 mount (see: findmnt -t cgroup2)")]
    NotCgroup2 {
        /// The given path.
        path: PathBuf,
        /// The reason.
        reason: String,
    },
    /// mountinfo cannot be read.
    #[error("/proc/self/mountinfo: {0}")]
    Mountinfo(io::Error),
}

/// The directory to attach to: the given one, or the root of the host's hierarchy.
pub fn resolve(given: Option<&Path>) -> Result<PathBuf, CgroupError> {
    let path = match given {
        Some(path) => path.to_owned(),
        None => {
            let mounts = mounts::read().map_err(CgroupError::Mountinfo)?;
            root_of(&mounts, is_root)?
        }
    };
    let not = |reason: String| CgroupError::NotCgroup2 {
        path: path.clone(),
        reason,
    };
    let meta = fs::metadata(&path).map_err(|e| not(e.to_string()))?;
    if !meta.is_dir() {
        return Err(not("is not a directory".to_owned()));
    }
    match is_on_cgroup2(&path) {
        Ok(true) => Ok(path),
        Ok(false) => Err(not("is not on cgroup2".to_owned())),
        Err(e) => Err(not(e.to_string())),
    }
}

fn is_on_cgroup2(path: &Path) -> nix::Result<bool> {
    statfs(path).map(|fs| fs.filesystem_type() == CGROUP2_SUPER_MAGIC)
}

/// Whether this is the root of the hierarchy: the only cgroup without `cgroup.type`. (`cgroup.type`
/// has CFTYPE_NOT_ON_ROOT in Linux 6.12, which depends on the hierarchy and not on the cgroup
/// namespace.)
pub fn is_root(path: &Path) -> bool {
    is_on_cgroup2(path) == Ok(true) && !path.join("cgroup.type").exists()
}

/// The highest ancestor of a cgroup that the same mounts show, or the cgroup itself.
pub fn top_of(cgroup: &Path) -> &Path {
    let above = cgroup.ancestors();
    let above = above.take_while(|dir| is_on_cgroup2(dir) == Ok(true));
    above.last().unwrap_or(cgroup)
}

/// The directory of this process's own cgroup. If no mount shows it, the hierarchy's root, which
/// contains it; `None` if no mount shows that either.
pub fn own() -> Option<PathBuf> {
    let text = fs::read_to_string("/proc/self/cgroup").ok()?;
    let mounts = mounts::read().ok()?;
    let own = of_kind(&mounts).find_map(|mount| own_of(&text, mount));
    own.or_else(|| root_of(&mounts, is_root).ok())
}

/// Parses the line "0::/path" of `/proc/self/cgroup`, if the path is below the mount's root.
fn own_of(text: &str, mount: &Mount) -> Option<PathBuf> {
    let path = text.lines().find_map(|line| line.strip_prefix("0::"))?;
    let below = Path::new(path).strip_prefix(&mount.root).ok()?;
    let plain = below
        .components()
        .all(|part| matches!(part, std::path::Component::Normal(_)));
    plain.then(|| mount.point.join(below))
}

fn of_kind(mounts: &[Mount]) -> impl Iterator<Item = &Mount> {
    mounts.iter().filter(|mount| mount.kind == "cgroup2")
}

/// Where the hierarchy's root is mounted. In a cgroup namespace the mount's "/" is the root of the
/// namespace, so the directory itself must show whether it is the root.
fn root_of(mounts: &[Mount], is_root: impl Fn(&Path) -> bool) -> Result<PathBuf, CgroupError> {
    let mut points = of_kind(mounts).map(|mount| &mount.point).peekable();
    let first = points.peek().copied().ok_or(CgroupError::NotMounted)?;
    match points.find(|point| is_root(point)) {
        Some(root) => Ok(root.clone()),
        None => Err(CgroupError::NotTheRoot {
            shown: first.clone(),
        }),
    }
}

/// Mounted network controllers of cgroup v1: net_cls, net_prio.
pub fn v1_network_controllers(mounts: &[Mount]) -> Vec<&'static str> {
    let mounted = |name: &str| {
        mounts
            .iter()
            .any(|m| m.kind == "cgroup" && m.super_options.split(',').any(|o| o == name))
    };
    ["net_cls", "net_prio"]
        .into_iter()
        .filter(|name| mounted(name))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::{
        super::mounts::{
            parse,
            tests::{CONTAINER, HYBRID, PRIVATE, UNIFIED},
        },
        *,
    };

    /// Where "auto" attaches with these mounts, if `root` is the hierarchy's root.
    fn auto(text: &str, root: &str) -> Result<PathBuf, String> {
        root_of(&parse(text), |point| point == Path::new(root)).map_err(|e| e.to_string())
    }

    #[test]
    fn cgroup2_mount_is_found_in_hybrid_mode() {
        let root = "/sys/fs/cgroup";
        assert_eq!(auto(UNIFIED, root), Ok(root.into()));
        let root = "/sys/fs/cgroup/unified";
        assert_eq!(auto(HYBRID, root), Ok(root.into()));
        let error = auto("24 1 254:0 / / rw - ext4 /dev/vda rw\n", "/").unwrap_err();
        assert!(
            error.starts_with("no cgroup2 hierarchy is mounted"),
            "{error}"
        );
    }

    /// In a cgroup namespace, a container's part is "/" too, like the host's root outside.
    #[test]
    fn container_cgroup_is_not_host_root() {
        for own in [CONTAINER, PRIVATE] {
            let error = auto(own, "/none").unwrap_err();
            assert!(
                error.starts_with("/sys/fs/cgroup is not the root")
                    && error.contains("/host/cgroup"),
                "{error}"
            );
        }
        let both = format!(
            "{PRIVATE}41 24 0:27 /../../.. /host/cgroup ro - cgroup2 cgroup rw,nsdelegate\n"
        );
        assert_eq!(auto(&both, "/host/cgroup"), Ok("/host/cgroup".into()));
    }

    #[test]
    fn path_outside_cgroup2_has_no_root() {
        assert!(!is_root(Path::new("/proc")) && !is_root(Path::new("/nonexistent")));
        assert_eq!(top_of(Path::new("/proc/self")), Path::new("/proc/self"));
    }

    #[test]
    fn own_cgroup_is_found() {
        let mounts = parse(UNIFIED);
        let own = |text| own_of(text, &mounts[1]);
        assert_eq!(own("0::/a/b\n"), Some(PathBuf::from("/sys/fs/cgroup/a/b")));
        assert_eq!(own("5:cpu:/x\n0::/\n"), Some("/sys/fs/cgroup/".into()));
        // Above the root of a cgroup namespace, and without cgroup2.
        assert_eq!(own("0::/../x\n"), None);
        assert_eq!(own("5:cpu:/x\n"), None);
    }

    #[test]
    fn v1_controllers_are_listed() {
        assert_eq!(
            v1_network_controllers(&parse(HYBRID)),
            ["net_cls", "net_prio"]
        );
        assert!(v1_network_controllers(&parse(UNIFIED)).is_empty());
    }

    #[test]
    fn path_outside_cgroup2_is_refused() {
        let error = resolve(Some(Path::new("/proc"))).unwrap_err().to_string();
        assert!(error.contains("/proc: is not on cgroup2"), "{error}");
        let error = resolve(Some(Path::new("/nonexistent")))
            .unwrap_err()
            .to_string();
        assert!(error.contains("/nonexistent"), "{error}");
    }
}
