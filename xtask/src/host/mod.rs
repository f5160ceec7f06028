//! `cargo xtask host`: tests the systemd unit, or the packages, in a virtual machine.
//!
//! systemd is PID 1 of a minimal Debian. To test the unit, the agent, its unit and a configuration are installed from
//! the sources, and the service is enabled; `checks.sh` runs after the boot. Then the machine reboots, and later loses
//! power; `reboot.sh` checks the state that is kept on a disk. To test the packages, `packages.sh` installs, replaces
//! and removes them.

use std::{path::Path, time::Duration};

use anyhow::{Context as _, bail};

use self::debian::{Boot, Debian, write};
use crate::{
    arch::Arch,
    root, test,
    vm::{
        self, image,
        machine::{Clock, Machine},
    },
};

mod arm64;
pub(crate) mod debian;
pub(crate) mod disk;
mod packages;

/// `cargo xtask host`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The kernel: 5.10, 6.1, 6.12 or newest
    #[arg(long, default_value = "6.12")]
    kernel: String,
    /// Seconds after which the machine is stopped
    #[arg(long, default_value_t = 3600)]
    limit: u64,
    /// Use the host's time instead of counting instructions
    #[arg(long)]
    host_clock: bool,
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

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    vm::install()?;
    let debian = Debian::new(PACKAGES)?;
    let mut checks = Checks::default();
    let limit = Duration::from_secs(args.limit);
    let (script, disk) = if let Some(archs) = &args.packages {
        packages::prepare(archs, limit, &debian.dir().join("srv"), &mut checks)?;
        (PACKAGE_CHECKS, None)
    } else {
        test::build_programs()?;
        agent(debian.dir())?;
        (CHECKS, Some(disk::add(debian.dir())?))
    };
    let boot = Boot {
        kernel: &args.kernel,
        init: "/lib/systemd/systemd",
        clock: if args.host_clock {
            Clock::Host
        } else {
            Clock::Instructions
        },
        memory_mib: 2048,
        disk: disk.as_deref(),
        network: None,
        limit,
    };
    debian.run(script, &boot, &mut checks)
}

/// Results of the checks, as the machine prints them.
#[derive(Debug, Default)]
pub(crate) struct Checks {
    passed: usize,
    failed: Vec<String>,
    /// Number of checks in the machine, printed at the end.
    total: Option<usize>,
    /// Number of checks before it boots.
    before: usize,
}

impl Checks {
    fn take(&mut self, line: &str) {
        if line.strip_prefix("ok ").is_some() {
            self.passed += 1;
        } else if let Some(what) = line.strip_prefix("not ok ") {
            self.failed.push(what.to_owned());
        } else if let Some(count) = line.strip_prefix("checks end ") {
            self.total = count.trim().parse().ok();
        }
    }

    /// Boots a machine that prints results, and fails unless all checks passed.
    fn boot(&mut self, machine: &Machine<'_>) -> anyhow::Result<()> {
        machine.boot(|line| {
            println!("{line}");
            self.take(line);
        })?;
        self.conclude()
    }

    /// Adds the result of a check that needs no machine.
    pub(crate) fn host(&mut self, name: &str, result: anyhow::Result<()>) {
        self.before += 1;
        let line = match result {
            Ok(()) => format!("ok {name}"),
            Err(e) => format!("not ok {name}: {e:#}"),
        };
        println!("{line}");
        self.take(&line);
    }

    fn conclude(&self) -> anyhow::Result<()> {
        let total = self
            .total
            .context("the machine ended before its checks did")?;
        println!(
            "{} checks passed, {} failed",
            self.passed,
            self.failed.len()
        );
        if !self.failed.is_empty() {
            bail!("failed:\n{}", self.failed.join("\n"));
        }
        if total + self.before != self.passed || total == 0 {
            bail!(
                "{} checks ran, and {} results were printed",
                total + self.before,
                self.passed
            );
        }
        Ok(())
    }
}

/// Adds the agent, installed from the sources, and its enabled service.
fn agent(top: &Path) -> anyhow::Result<()> {
    let agent = top.join("usr/local/bin/rto-agent");
    image::copy(&root().join("target/debug/rto-agent"), &agent)?;
    image::strip(&agent)?;
    let unit = "rto-agent.service";
    image::copy(
        &root().join("systemd").join(unit),
        &top.join(debian::UNITS).join(unit),
    )?;
    debian::enable(top, "multi-user.target", unit)?;
    write(&top.join("etc/rto-agent/config.toml"), CONFIG)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(lines: &[&str]) -> Checks {
        let mut checks = Checks::default();
        lines.iter().for_each(|line| checks.take(line));
        checks
    }

    #[test]
    fn only_all_checks_are_a_success() {
        assert!(of(&["ok a", "ok b", "checks end 2"]).conclude().is_ok());
        assert!(
            of(&["ok a", "not ok b: why", "checks end 2"])
                .conclude()
                .is_err()
        );
        assert!(of(&["ok a", "checks end 2"]).conclude().is_err());
        assert!(of(&["ok a", "ok b"]).conclude().is_err());
        assert!(of(&["checks end 0"]).conclude().is_err());
    }

    #[test]
    fn checks_before_the_boot_count() {
        let mut checks = of(&["ok a", "checks end 1"]);
        checks.host("b", Ok(()));
        assert!(checks.conclude().is_ok());
        checks.host("c", Err(anyhow::anyhow!("why")));
        assert_eq!(checks.failed, ["c: why"]);
        assert!(checks.conclude().is_err());
    }

    #[test]
    fn the_scripts_are_such_that_bash_reads() {
        for script in [CHECKS, PACKAGE_CHECKS, disk::KEEP] {
            let status = std::process::Command::new("bash")
                .args(["-n", "-c", &debian::script(script)])
                .status();
            assert!(status.unwrap().success());
        }
    }
}
