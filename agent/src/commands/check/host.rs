//! `[agent]` on this host: what the daemon would refuse when it starts.

use std::{fs, io, path::Path};

use nix::sys::statfs::{BPF_FS_MAGIC, statfs};

use crate::{
    api::peer,
    config::{AgentConfig, CgroupSetting},
    kernel::{cgroup, mounts},
    printable,
};

/// What is found.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Found {
    /// With it the daemon does not start.
    pub(super) errors: Vec<String>,
    /// What cannot be known from here.
    pub(super) notes: Vec<String>,
}

pub(super) fn look(agent: &AgentConfig) -> Found {
    let mut found = Found::default();
    if let Err(e) = peer::group_id(&agent.group) {
        found.errors.push(e.to_string());
    }
    found.look_at_cgroup(&agent.cgroup);
    found.look_at_pin_dir(&agent.pin_dir);
    found
}

impl Found {
    fn look_at_cgroup(&mut self, setting: &CgroupSetting) {
        match setting {
            // Of a file that is written for another host.
            CgroupSetting::Auto => self.notes.extend(
                cgroup::resolve(None)
                    .err()
                    .map(|e| format!("[agent] cgroup = \"auto\" finds nothing here: {e}")),
            ),
            CgroupSetting::Path(path) => {
                let Err(e) = cgroup::resolve(Some(path)) else {
                    return;
                };
                if is_hidden(path) {
                    self.notes.push(hidden("cgroup", path));
                } else {
                    self.errors.push(format!("[agent] cgroup: {e}"));
                }
            }
        }
    }

    /// Where there is none, it is made.
    fn look_at_pin_dir(&mut self, path: &Path) {
        if is_hidden(path) {
            self.notes.push(hidden("pin_dir", path));
            return;
        }
        let Ok(file_system) = statfs(path) else {
            return;
        };
        if file_system.filesystem_type() == BPF_FS_MAGIC {
            return;
        }
        let kind = kind_of(path).unwrap_or_else(|| "another file system".to_owned());
        self.errors.push(format!(
            "[agent] pin_dir: {} is on {kind}, and link and maps can be pinned on a BPF file system only; mount -t bpf \
             bpf /sys/fs/bpf, and name a directory below it",
            printable::path(path)
        ));
    }
}

/// Whether this user may not look.
fn is_hidden(path: &Path) -> bool {
    let looked = fs::metadata(path).map_err(|e| e.kind());
    matches!(looked, Err(io::ErrorKind::PermissionDenied))
}

fn hidden(key: &str, path: &Path) -> String {
    format!(
        "[agent] {key}: this user may not look at {}; as root, check does",
        printable::path(path)
    )
}

fn kind_of(path: &Path) -> Option<String> {
    let mounts = mounts::read().ok()?;
    let mount = mounts::mount_of(&mounts, &path.canonicalize().ok()?)?;
    Some(mount.kind.clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn errors(change: impl FnOnce(&mut AgentConfig)) -> Vec<String> {
        let mut agent = AgentConfig {
            pin_dir: "/sys/fs/bpf/rto-agent-there-is-none".into(),
            ..AgentConfig::default()
        };
        change(&mut agent);
        look(&agent).errors
    }

    #[test]
    fn what_a_start_would_refuse_is_refused() {
        assert_eq!(errors(|_| {}), Vec::<String>::new());
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().to_owned();
        let own = path.clone();
        let group = errors(|agent| "no-such-group-at-all".clone_into(&mut agent.group));
        let cgroup = errors(|agent| agent.cgroup = CgroupSetting::Path(own));
        let pins = errors(|agent| agent.pin_dir = path);
        for (errors, said) in [
            (group, "there is no such group; groupadd"),
            (cgroup, "is not on cgroup2"),
            (pins, "can be pinned on a BPF file system only"),
        ] {
            assert_eq!(errors.len(), 1, "{errors:?}");
            assert!(errors[0].contains(said), "{errors:?}");
        }
    }
}
