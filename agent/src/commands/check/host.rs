//! Checks `[agent]` on this host for what would prevent the daemon from starting.

use std::{fs, io, path::Path};

use nix::sys::statfs::{BPF_FS_MAGIC, statfs};
use rto_agent_core::{
    config::{AgentConfig, CgroupSetting, MetricsSetting},
    path_security, printable,
};
use rto_agent_daemon::{api::peer, telemetry::http};
use rto_agent_kernel::kernel::{cgroup, mounts};

/// Where systemd and most distributions mount the BPF file system.
const BPF_FS: &str = "/sys/fs/bpf";

/// The results of the checks.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Found {
    /// Errors that prevent the daemon from starting.
    pub(super) errors: Vec<String>,
    /// Conditions that cannot be checked from here.
    pub(super) notes: Vec<String>,
}

pub(super) fn look(agent: &AgentConfig) -> Found {
    let mut found = Found::default();
    if let Err(e) = peer::group_id(&agent.group) {
        found.errors.push(e.to_string());
    }
    found.look_at_cgroup(&agent.cgroup);
    found.look_at_pin_dir(&agent.pin_dir);
    found.look_at_dir_of("socket", &agent.socket);
    found.look_at_dir("state_dir", &agent.state_dir);
    found.look_at_dir("persistent_dir", &agent.persistent_dir);
    found.look_at_metrics(&agent.metrics);
    found
}

impl Found {
    fn look_at_cgroup(&mut self, setting: &CgroupSetting) {
        match setting {
            // Only a note, because the file may be meant for another host.
            CgroupSetting::Auto => self.notes.extend(
                cgroup::resolve(None)
                    .err()
                    .map(|e| format!("[agent] cgroup = \"auto\" finds no cgroup2 hierarchy: {e}")),
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

    /// Checks a socket's directory; the daemon creates a missing one.
    fn look_at_dir_of(&mut self, key: &str, socket: &Path) {
        let dir = socket.parent().unwrap_or(Path::new("/"));
        self.refused(key, dir, path_security::check_shared(dir));
    }

    fn look_at_dir(&mut self, key: &str, path: &Path) {
        self.refused(key, path, path_security::check_source_dir(path));
    }

    fn refused(&mut self, key: &str, path: &Path, checked: io::Result<()>) {
        match checked {
            Ok(()) => {}
            Err(e) if e.kind() == io::ErrorKind::PermissionDenied => {
                self.notes.push(hidden(key, path));
            }
            Err(e) => self.errors.push(format!("[agent] {key}: {e}")),
        }
    }

    /// Does not bind the port, because a running daemon uses it.
    fn look_at_metrics(&mut self, setting: &MetricsSetting) {
        self.notes
            .extend(metrics_behind_unit(setting, Path::new("/")));
        if let MetricsSetting::Tcp(address) = setting
            && !http::is_of_host(address.ip())
        {
            self.notes.push(format!(
                "[agent] metrics: {} is not an address of this host; metrics are served once it is",
                address.ip()
            ));
        }
    }

    /// Checks the pin directory; the daemon creates a missing one. At the usual place, the BPF file
    /// system may not be mounted yet.
    fn look_at_pin_dir(&mut self, path: &Path) {
        if is_hidden(path) {
            self.notes.push(hidden("pin_dir", path));
            return;
        }
        if !path.exists() && path.starts_with(BPF_FS) {
            return;
        }
        let existing = path.ancestors().find(|dir| dir.exists());
        let existing = existing.unwrap_or(Path::new("/"));
        let Ok(file_system) = statfs(existing) else {
            return;
        };
        if file_system.filesystem_type() == BPF_FS_MAGIC {
            return;
        }
        let kind = kind_of(existing).unwrap_or_else(|| "another file system".to_owned());
        self.errors.push(format!(
            "[agent] pin_dir: {} is on {kind}, but pins need a BPF file system; mount -t bpf bpf \
             /sys/fs/bpf, and set a directory below it",
            printable::path(path)
        ));
    }
}

/// The packaged unit lets only the loopback interface reach the metrics. `root`: of the file system.
pub(crate) fn metrics_behind_unit(setting: &MetricsSetting, root: &Path) -> Option<String> {
    let MetricsSetting::Tcp(address) = setting else {
        return None;
    };
    let has_unit = [
        "usr/lib/systemd/system",
        "lib/systemd/system",
        "etc/systemd/system",
    ]
    .iter()
    .any(|dir| root.join(dir).join("rto-agent.service").exists());
    let drop_ins = fs::read_dir(root.join("etc/systemd/system/rto-agent.service.d"));
    let allows = |entry: io::Result<fs::DirEntry>| {
        let text = fs::read_to_string(entry.ok()?.path()).ok()?;
        text.contains("IPAddressAllow").then_some(())
    };
    let is_allowed = drop_ins.is_ok_and(|mut dir| dir.any(|entry| allows(entry).is_some()));
    (has_unit && !address.ip().is_loopback() && !is_allowed).then(|| {
        format!(
            "[agent] metrics: {address} cannot be reached from other hosts, because the unit allows \
             loopback only; allow your collector: systemctl edit rto-agent, [Service], \
             IPAddressAllow=ADDRESS"
        )
    })
}

/// Whether this user lacks the permission to read it.
fn is_hidden(path: &Path) -> bool {
    let looked = fs::metadata(path).map_err(|e| e.kind());
    matches!(looked, Err(io::ErrorKind::PermissionDenied))
}

fn hidden(key: &str, path: &Path) -> String {
    format!(
        "[agent] {key}: not checked, because this user may not read {}; run check as root",
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
    use std::os::unix::fs::PermissionsExt as _;

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
    fn metrics_beyond_loopback_name_drop_in() {
        let root = tempfile::tempdir().unwrap();
        let note = |address: &str| metrics_behind_unit(&address.parse().unwrap(), root.path());
        assert_eq!(note("0.0.0.0:9464"), None);
        let units = root.path().join("etc/systemd/system");
        let drop_ins = units.join("rto-agent.service.d");
        fs::create_dir_all(&drop_ins).unwrap();
        fs::write(units.join("rto-agent.service"), "").unwrap();
        let message = note("0.0.0.0:9464").unwrap();
        assert!(message.contains("IPAddressAllow=ADDRESS"), "{message}");
        assert_eq!(note("127.0.0.1:9464"), None);
        assert_eq!(note("off"), None);
        let text = "[Service]\nIPAddressAllow=198.51.100.7\n";
        fs::write(drop_ins.join("override.conf"), text).unwrap();
        assert_eq!(note("0.0.0.0:9464"), None);
    }

    #[test]
    fn check_refuses_what_a_start_refuses() {
        assert_eq!(errors(|_| {}), Vec::<String>::new());
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().to_owned();
        let own = path.clone();
        let group = errors(|agent| "no-such-group-at-all".clone_into(&mut agent.group));
        let cgroup = errors(|agent| agent.cgroup = CgroupSetting::Path(own));
        let below = path.join("not/yet");
        let pins = errors(|agent| agent.pin_dir = path);
        let new_pins = errors(|agent| agent.pin_dir = below);
        let open = dir.path().join("open");
        fs::create_dir(&open).unwrap();
        fs::set_permissions(&open, fs::Permissions::from_mode(0o777)).unwrap();
        let socket = errors(|agent| agent.socket = open.join("control.sock"));
        let state = errors(|agent| agent.state_dir.clone_from(&open));
        let metrics = |text: &str| {
            let setting = text.parse().unwrap();
            errors(|agent| agent.metrics = setting)
        };
        // A host may get an address later. (TEST-NET-1, RFC 5737)
        for address in ["127.0.0.1:9464", "192.0.2.1:9464"] {
            assert_eq!(metrics(address), Vec::<String>::new());
        }
        for (errors, message) in [
            (group, "there is no such group; create it (groupadd"),
            (cgroup, "is not on cgroup2"),
            (pins, "pins need a BPF file system"),
            (new_pins, "pins need a BPF file system"),
            (socket, "[agent] socket: "),
            (state, "all users can write to it; chmod go-w"),
        ] {
            assert_eq!(errors.len(), 1, "{errors:?}");
            assert!(errors[0].contains(message), "{errors:?}");
        }
    }
}
