//! `cargo xtask host`: tests the systemd unit, or the packages, in a virtual machine.
//!
//! systemd is PID 1 of a minimal Debian. To test the unit, the agent, its unit and a configuration are installed from
//! the sources, and the service is enabled; `checks.sh` runs after the boot. Then the machine reboots, and later loses
//! power; `reboot.sh` checks the state that is kept on a disk. To test the packages, `packages.sh` installs, replaces
//! and removes them.

use std::{fs, path::Path};

use anyhow::ensure;

use self::debian::Debian;
use crate::{
    arch::Arch,
    root, test,
    vm::{
        self,
        image::{self, write},
        kernels,
        machine::Machine,
    },
};

mod arm64;
pub(crate) mod debian;
pub(crate) mod disk;
mod packages;

/// `cargo xtask host`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Test the packages instead: build and lint the packages of these architectures; install, replace and remove those
    /// of this host's architecture in the machine
    #[arg(long, value_enum, value_delimiter = ',', value_name = "ARCH", num_args = 0..=1, default_missing_value = "amd64,arm64")]
    packages: Option<Vec<Arch>>,
}

/// Packages in addition to the minimal base.
const PACKAGES: &str = "systemd,systemd-sysv,iproute2,rpm";

const CHECKS: &str = concat!(include_str!("reboot.sh"), "\n", include_str!("checks.sh"));
const PACKAGE_CHECKS: &str = include_str!("packages.sh");
const CONFIG: &str = "[policy.same-region]
cidrs = [\"192.0.2.0/24\"]
initial_rto = \"100ms\"
";
/// What survives a reboot.
const MOUNT: &str = "mkdir -p /kept /etc/rto-agent /var/lib/rto-agent
mount -t ext4 /dev/vda /kept
mount --bind /kept/etc /etc/rto-agent
mount --bind /kept/lib /var/lib/rto-agent
";

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    vm::install()?;
    let debian = Debian::new(PACKAGES)?;
    let mut checks = Checks::default();
    let (script, disk) = if let Some(archs) = &args.packages {
        packages::prepare(archs, &debian.dir().join("srv"), &mut checks)?;
        (PACKAGE_CHECKS, None)
    } else {
        test::build_programs()?;
        (CHECKS, Some(agent(debian.dir())?))
    };
    let kernel = kernels::named(debian::KERNEL, false)?;
    let image = debian.image(&kernel, script)?;
    let machine = Machine {
        disk: disk.as_deref(),
        ..debian::machine(&kernel, &image)
    };
    checks.boot(&machine)
}

/// Results of the checks, as the machine prints them.
#[derive(Debug, Default)]
pub(crate) struct Checks {
    passed: usize,
    failed: Vec<String>,
    /// Number of checks that ran.
    total: usize,
    has_ended: bool,
}

impl Checks {
    fn take(&mut self, line: &str) {
        if line.starts_with("ok ") {
            self.passed += 1;
        } else if let Some(what) = line.strip_prefix("not ok ") {
            self.failed.push(what.to_owned());
        } else if let Some(count) = line.strip_prefix("checks end ") {
            self.total += count.trim().parse().unwrap_or(0);
            self.has_ended = true;
        }
    }

    /// Boots a machine that prints results, and fails unless all checks passed.
    pub(crate) fn boot(&mut self, machine: &Machine<'_>) -> anyhow::Result<()> {
        machine.boot(|line| {
            println!("{line}");
            self.take(line);
        })?;
        self.conclude()
    }

    /// Adds the result of a check that needs no machine.
    fn host(&mut self, name: &str, result: anyhow::Result<()>) {
        self.total += 1;
        let line = match result {
            Ok(()) => format!("ok {name}"),
            Err(e) => format!("not ok {name}: {e:#}"),
        };
        println!("{line}");
        self.take(&line);
    }

    fn conclude(&self) -> anyhow::Result<()> {
        let (passed, failed) = (self.passed, self.failed.len());
        println!("{passed} checks passed, {failed} failed");
        ensure!(self.has_ended, "the machine ended before its checks did");
        ensure!(failed == 0, "failed:\n{}", self.failed.join("\n"));
        let total = self.total;
        ensure!(
            total == passed && total > 0,
            "{total} checks ran, and {passed} results were printed"
        );
        Ok(())
    }
}

/// Adds the agent, installed from the sources, and its enabled service. Returns a disk with the configuration and the
/// state.
fn agent(top: &Path) -> anyhow::Result<tempfile::TempPath> {
    let agent = top.join("usr/local/bin/rto-agent");
    image::copy(&root().join("target/debug/rto-agent"), &agent)?;
    image::strip(&agent)?;
    let unit = "rto-agent.service";
    image::copy(
        &root().join("systemd").join(unit),
        &top.join(debian::UNITS).join(unit),
    )?;
    debian::enable(top, "multi-user.target", unit)?;
    let kept = image::directory()?;
    write(&kept.path().join("etc/config.toml"), CONFIG)?;
    fs::create_dir(kept.path().join("lib"))?;
    disk::add(top, kept.path(), 64 << 20, MOUNT)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node;

    fn is_success(lines: &[&str]) -> bool {
        let mut checks = Checks::default();
        lines.iter().for_each(|line| checks.take(line));
        checks.conclude().is_ok()
    }

    #[test]
    fn missing_or_failed_check_is_failure() {
        assert!(is_success(&["ok a", "ok b", "checks end 2"]));
        for lines in [
            &["ok a", "not ok b: why", "checks end 2"][..],
            &["ok a", "checks end 2"],
            &["ok a", "ok b"],
            &["checks end 0"],
        ] {
            assert!(!is_success(lines), "{lines:?}");
        }
    }

    #[test]
    fn check_scripts_are_valid_bash() {
        let of_nodes = [node::PODMAN_CHECKS, node::KUBERNETES_CHECKS];
        for script in [CHECKS, PACKAGE_CHECKS].into_iter().chain(of_nodes) {
            let status = std::process::Command::new("bash")
                .args(["-n", "-c", &debian::script(script)])
                .status();
            assert!(status.unwrap().success());
        }
    }
}
