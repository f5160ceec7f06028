//! `cargo xtask host`: tests the systemd unit, or the packages, in a virtual machine.
//!
//! systemd is PID 1 of a minimal Debian. For the unit the agent, its unit and a configuration are installed as from the
//! sources, and the service is enabled; `checks.sh` runs after the boot. For the packages `packages.sh` installs,
//! replaces and removes them.

use std::{
    fs,
    os::unix::fs::{PermissionsExt as _, symlink},
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, bail};

use crate::{
    arch::Arch,
    ebpf::sha256,
    process::{apt_install, as_root, have, is_root},
    root, test,
    vm::{
        self, image, kernels,
        machine::{Clock, Machine},
    },
};

mod arm64;
mod packages;

/// `cargo xtask host`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The kernel: 5.10, 6.1, 6.12 or newest
    #[arg(long, default_value = "6.12")]
    kernel: String,
    /// Seconds after which the machine is stopped
    #[arg(long, default_value_t = 1800)]
    limit: u64,
    /// Take the time from the host instead of counting instructions
    #[arg(long)]
    host_clock: bool,
    /// Test the packages instead: build and lint those of these architectures, and install, replace and remove those of
    /// this host's in the machine
    #[arg(long, value_enum, value_delimiter = ',', value_name = "ARCH", num_args = 0..=1, default_missing_value = "amd64,arm64")]
    packages: Option<Vec<Arch>>,
}

/// Packages beside those of the minimal base.
const PACKAGES: &str = "systemd,systemd-sysv,iproute2,rpm";
/// The release of Debian. Its C library must not be older than the one that the agent is built against.
const SUITE: &str = "bookworm";
const ARCHIVE: &str = "http://deb.debian.org/debian";
/// Where units are.
const UNITS: &str = "etc/systemd/system";
/// Not needed in the machine, whose file system is in memory.
const UNREAD: [&str; 7] = [
    "usr/share/doc",
    "usr/share/man",
    "usr/share/locale",
    "usr/share/i18n",
    "usr/share/zoneinfo",
    "var/cache/apt",
    "var/lib/apt",
];

const CHECKS: &str = concat!(include_str!("lib.sh"), "\n", include_str!("checks.sh"));
const PACKAGE_CHECKS: &str = concat!(include_str!("lib.sh"), "\n", include_str!("packages.sh"));
const CONFIG: &str = "[policy.same-region]
cidrs = [\"192.0.2.0/24\"]
initial_rto = \"100ms\"
";
const CHECK_UNIT: &str = "[Unit]
Description=Checks of the service
[Service]
Type=oneshot
ExecStart=/usr/local/lib/checks.sh
";
/// Starts the checks after the boot, not as a part of it.
const CHECK_TIMER: &str = "[Unit]
Description=Checks after the boot
[Timer]
OnStartupSec=1s
Unit=checks.service
[Install]
WantedBy=timers.target
";

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    vm::install()?;
    fs::create_dir_all(root().join("target/vm"))?;
    let kernel = kernels::named(&args.kernel)?
        .pop()
        .context("which kernel?")?;
    let kernel = kernels::unpacked(kernel, false)?;
    let base = base()?;
    let mut checks = Checks::default();
    let dir = tempfile::tempdir_in(root().join("target/vm"))?;
    let limit = Duration::from_secs(args.limit);
    match &args.packages {
        Some(archs) => {
            packages::prepare(archs, limit, &dir.path().join("srv"), &mut checks)?;
            system(dir.path(), PACKAGE_CHECKS)?;
        }
        None => {
            test::build()?;
            agent(dir.path())?;
            system(dir.path(), CHECKS)?;
        }
    }
    let own = packed(dir.path(), &kernel)?;
    // The kernel unpacks archives that follow each other into one file system.
    let image = tempfile::NamedTempFile::new_in(root().join("target/vm"))?.into_temp_path();
    let mut both = fs::File::create(&image)?;
    for part in [&base, &own.to_path_buf()] {
        std::io::copy(&mut fs::File::open(part)?, &mut both)?;
    }
    let machine = Machine {
        arch: Arch::Amd64,
        kernel: &kernel.image,
        initramfs: &image,
        clock: if args.host_clock {
            Clock::Host
        } else {
            Clock::Instructions
        },
        memory_mib: 2048,
        command_line: "rdinit=/lib/systemd/systemd systemd.show_status=0 \
                       systemd.unified_cgroup_hierarchy=1",
        limit,
    };
    println!("booting Linux {} with systemd", kernel.version);
    checks.boot(&machine)
}

/// Results of the checks, as the machine prints them.
#[derive(Debug, Default)]
struct Checks {
    passed: usize,
    failed: Vec<String>,
    /// Their number in the machine, printed at the end.
    total: Option<usize>,
    /// Their number before it boots.
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

    /// Boots a machine that prints results, and fails unless all of them are good.
    fn boot(&mut self, machine: &Machine<'_>) -> anyhow::Result<()> {
        machine.boot(|line| {
            println!("{line}");
            self.take(line);
        })?;
        self.conclude()
    }

    /// Adds one that needs no machine.
    fn host(&mut self, name: &str, result: anyhow::Result<()>) {
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

/// The minimal Debian as an archive, made once.
fn base() -> anyhow::Result<PathBuf> {
    let hash = sha256(format!("{ARCHIVE} {SUITE} {PACKAGES} {UNREAD:?}").as_bytes());
    let image = root().join(format!("target/vm/{SUITE}-{}.cpio.gz", &hash[..12]));
    if image.exists() {
        return Ok(image);
    }
    if !have("debootstrap") {
        apt_install(&["debootstrap"], "a host with systemd")?;
    }
    kernels::install_keyring()?;
    if !is_root() {
        bail!("debootstrap needs root the first time: sudo env PATH=\"$PATH\" cargo xtask host");
    }
    println!("debootstrap {SUITE} with {PACKAGES}");
    let dir = tempfile::tempdir_in(root().join("target/vm"))?;
    let top = dir.path().join("root");
    let log = dir.path().join("log");
    let status = as_root("debootstrap")
        .args(["--variant=minbase", "--force-check-gpg"])
        .arg(format!("--keyring={}", kernels::KEYRING))
        .args([&format!("--include={PACKAGES}"), SUITE])
        .arg(&top)
        .arg(ARCHIVE)
        .stdout(fs::File::create(&log)?)
        .status()?;
    if !status.success() {
        bail!("debootstrap: {status}\n{}", fs::read_to_string(&log)?);
    }
    for below in UNREAD {
        let path = top.join(below);
        if path.exists() {
            fs::remove_dir_all(&path)?;
        }
    }
    let unfinished = dir.path().join("image");
    image::pack(&top, &unfinished)?;
    fs::rename(&unfinished, &image)?;
    Ok(image)
}

/// Adds the agent, installed as from the sources, and its service, enabled.
fn agent(top: &Path) -> anyhow::Result<()> {
    let agent = top.join("usr/local/bin/rto-agent");
    image::copy(&root().join("target/debug/rto-agent"), &agent)?;
    image::strip(&agent)?;
    let unit = "rto-agent.service";
    image::copy(
        &root().join("systemd").join(unit),
        &top.join(UNITS).join(unit),
    )?;
    enable(top, "multi-user.target", unit)?;
    write(&top.join("etc/rto-agent/config.toml"), CONFIG)
}

/// Adds the checks, and what the system needs to boot into them.
fn system(top: &Path, checks: &str) -> anyhow::Result<()> {
    write(&top.join(UNITS).join("checks.service"), CHECK_UNIT)?;
    write(&top.join(UNITS).join("checks.timer"), CHECK_TIMER)?;
    enable(top, "timers.target", "checks.timer")?;
    write_program(&top.join("usr/local/lib/checks.sh"), checks)?;
    write(&top.join("etc/hostname"), "rto-agent-checks\n")?;
    // Without it systemd takes this for a first boot, and asks questions.
    write(
        &top.join("etc/machine-id"),
        "0123456789abcdef0123456789abcdef\n",
    )?;
    write(&top.join("etc/fstab"), "# The file system is in memory.\n")
}

/// As `systemctl enable` does.
fn enable(top: &Path, target: &str, unit: &str) -> anyhow::Result<()> {
    let dir = top.join(UNITS).join(format!("{target}.wants"));
    fs::create_dir_all(&dir)?;
    Ok(symlink(
        Path::new("/").join(UNITS).join(unit),
        dir.join(unit),
    )?)
}

/// The archive of these files and the kernel's modules.
fn packed(top: &Path, kernel: &kernels::Unpacked) -> anyhow::Result<tempfile::TempPath> {
    // usr/lib: Debian's /lib is a link.
    let modules = top.join("usr/lib/modules");
    symlink("usr/lib", top.join("lib"))?;
    image::modules(kernel, top, &modules)?;
    fs::remove_file(top.join("lib"))?;
    let archive = tempfile::NamedTempFile::new_in(root().join("target/vm"))?.into_temp_path();
    image::pack(top, &archive)?;
    Ok(archive)
}

fn write(path: &Path, text: &str) -> anyhow::Result<()> {
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent)?;
    }
    fs::write(path, text).with_context(|| path.display().to_string())
}

/// Writes a script that can be run.
fn write_program(path: &Path, text: &str) -> anyhow::Result<()> {
    write(path, text)?;
    Ok(fs::set_permissions(
        path,
        fs::Permissions::from_mode(0o755),
    )?)
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
        for script in [CHECKS, PACKAGE_CHECKS] {
            let status = std::process::Command::new("bash")
                .args(["-n", "-c", script])
                .status();
            assert!(status.unwrap().success());
        }
    }
}
