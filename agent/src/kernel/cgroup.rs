//! The cgroup2 hierarchy.

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
    /// No cgroup2 mount.
    #[error(
        "no cgroup2 hierarchy is mounted; mount -t cgroup2 none /sys/fs/cgroup/unified (or boot \
         with systemd.unified_cgroup_hierarchy=1), or name one with --cgroup"
    )]
    NotMounted,
    /// The path given is not one.
    #[error("{path}: {reason}; name a directory of a cgroup2 mount (see: findmnt -t cgroup2)")]
    NotCgroup2 {
        /// The path.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// mountinfo cannot be read.
    #[error("/proc/self/mountinfo: {0}")]
    Mountinfo(io::Error),
}

/// The directory to attach to: the one given, or the root of the host's hierarchy.
pub fn resolve(given: Option<&Path>) -> Result<PathBuf, CgroupError> {
    let path = match given {
        Some(path) => path.to_owned(),
        None => {
            let mounts = mounts::read().map_err(CgroupError::Mountinfo)?;
            root_of(&mounts)
                .ok_or(CgroupError::NotMounted)?
                .point
                .clone()
        }
    };
    let not = |reason: String| CgroupError::NotCgroup2 {
        path: path.clone(),
        reason,
    };
    let meta = fs::metadata(&path).map_err(|e| not(e.to_string()))?;
    if !meta.is_dir() {
        return Err(not("is no directory".to_owned()));
    }
    let kind = statfs(&path)
        .map_err(|e| not(e.to_string()))?
        .filesystem_type();
    if kind != CGROUP2_SUPER_MAGIC {
        return Err(not("is not on cgroup2".to_owned()));
    }
    Ok(path)
}

/// Whether this is the root of the hierarchy: the one cgroup that says nothing of its kind.
pub fn is_root(path: &Path) -> bool {
    path.is_dir() && !path.join("cgroup.type").exists()
}

/// The directory of this process's own cgroup; `None` if no cgroup2 mount shows it.
pub fn own() -> Option<PathBuf> {
    let text = fs::read_to_string("/proc/self/cgroup").ok()?;
    let mounts = mounts::read().ok()?;
    own_of(&text, root_of(&mounts)?)
}

/// From the line "0::/path" of `/proc/self/cgroup`, where the path is below the mount's root.
fn own_of(text: &str, mount: &Mount) -> Option<PathBuf> {
    let path = text.lines().find_map(|line| line.strip_prefix("0::"))?;
    let below = Path::new(path).strip_prefix(&mount.root).ok()?;
    let plain = below
        .components()
        .all(|part| matches!(part, std::path::Component::Normal(_)));
    plain.then(|| mount.point.join(below))
}

/// The cgroup2 mount that shows most of the hierarchy: its root, for unified and hybrid hosts.
pub fn root_of(mounts: &[Mount]) -> Option<&Mount> {
    let of_kind = || mounts.iter().filter(|mount| mount.kind == "cgroup2");
    of_kind()
        .find(|mount| mount.root == Path::new("/"))
        .or_else(|| of_kind().next())
}

/// cgroup v1 network controllers that are mounted: net_cls, net_prio.
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

/// Whether a cgroup namespace hides the hierarchy's root from this process: PID 1 of its
/// namespace then seems to live above or the mount's root is not "/".
pub fn is_partial(mount: &Mount) -> bool {
    mount.root != Path::new("/")
}

#[cfg(test)]
mod tests {
    use super::{
        super::mounts::{
            parse,
            tests::{CONTAINER, HYBRID, UNIFIED},
        },
        *,
    };

    fn point(text: &str) -> Option<PathBuf> {
        root_of(&parse(text)).map(|mount| mount.point.clone())
    }

    #[test]
    fn unified_hybrid_container_and_none() {
        assert_eq!(point(UNIFIED), Some("/sys/fs/cgroup".into()));
        assert_eq!(point(HYBRID), Some("/sys/fs/cgroup/unified".into()));
        assert_eq!(point(CONTAINER), Some("/sys/fs/cgroup".into()));
        assert!(is_partial(root_of(&parse(CONTAINER)).unwrap()));
        assert_eq!(point("24 1 254:0 / / rw - ext4 /dev/vda rw\n"), None);
    }

    #[test]
    fn the_own_cgroup() {
        let mounts = parse(UNIFIED);
        let root = root_of(&mounts).unwrap();
        let own = |text| own_of(text, root);
        assert_eq!(own("0::/a/b\n"), Some(PathBuf::from("/sys/fs/cgroup/a/b")));
        assert_eq!(own("5:cpu:/x\n0::/\n"), Some("/sys/fs/cgroup/".into()));
        // Above the root of a cgroup namespace, and no cgroup2 at all.
        assert_eq!(own("0::/../x\n"), None);
        assert_eq!(own("5:cpu:/x\n"), None);
    }

    #[test]
    fn v1_controllers() {
        assert_eq!(
            v1_network_controllers(&parse(HYBRID)),
            ["net_cls", "net_prio"]
        );
        assert!(v1_network_controllers(&parse(UNIFIED)).is_empty());
    }

    #[test]
    fn a_path_elsewhere_is_refused() {
        let error = resolve(Some(Path::new("/proc"))).unwrap_err().to_string();
        assert!(error.contains("/proc: is not on cgroup2"), "{error}");
        let error = resolve(Some(Path::new("/nonexistent")))
            .unwrap_err()
            .to_string();
        assert!(error.contains("/nonexistent"), "{error}");
    }
}
