//! `cargo xtask host --packages`: checks of the packages, partly outside the machine.

use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, ensure};

use super::{Checks, arm64};
use crate::{
    arch::Arch,
    dist::{Release, VERSION, lint, stage::Stage},
    process::{apt_install, find},
    root,
};

/// A version older than any release.
const OLDER: &str = "0.0.1";
/// Added to the configuration file of the older version.
const DIFFERENCE: &str = "# The older version's.\n";
const QEMU: &str = "qemu-aarch64-static";

/// Puts packages into a directory for the machine: packages of this version, and below `older` packages of an older one.
///
/// Before that it runs the checks that need no machine.
pub(super) fn prepare(
    archs: &[Arch],
    limit: Duration,
    dir: &Path,
    checks: &mut Checks,
) -> anyhow::Result<()> {
    let release = Release::of(root())?;
    let older = dir.join("older");
    fs::create_dir_all(&older)?;
    for arch in archs {
        let stage = Stage::prepare(&release, *arch)?;
        let name = arch.deb();
        let into = tempfile::tempdir()?;
        let deb = stage.package("deb", VERSION, into.path())?;
        let rpm = stage.package("rpm", VERSION, into.path())?;
        checks.host(
            &format!("{name}: lintian has no error and no warning"),
            lint::lintian(&deb),
        );
        checks.host(
            &format!("{name}: rpmlint has no error"),
            lint::rpmlint(&rpm),
        );
        checks.host(
            &format!("{name}: the binary is static and validates the configuration"),
            validates(*arch, stage.dir()),
        );
        if *arch == Arch::Arm64 && *arch != Arch::host() {
            checks.host(
                &format!("{name}: all checks in a separate virtual machine"),
                arm64::run(stage.dir(), limit),
            );
        }
        if *arch != Arch::host() {
            continue;
        }
        for package in [deb, rpm] {
            let to = dir.join(package.file_name().context("no name")?);
            fs::copy(package, to)?;
        }
        let changed = stage.copy_to(into.path().join("older"))?;
        let config = changed.dir().join("config.toml");
        let text = fs::read_to_string(&config)?;
        fs::write(&config, format!("{text}{DIFFERENCE}"))?;
        for packager in ["deb", "rpm"] {
            changed.package(packager, OLDER, &older)?;
        }
    }
    Ok(())
}

/// Runs `rto-agent check` on the packages' configuration file with the packages' binary. For another architecture it
/// uses a user-mode emulator, whose system calls go to this kernel.
fn validates(arch: Arch, stage: &Path) -> anyhow::Result<()> {
    let agent = stage.join("rto-agent");
    let mut command = if arch == Arch::host() {
        Command::new(&agent)
    } else {
        if find(QEMU).is_none() {
            apt_install(
                &["qemu-user-static"],
                "to run another architecture's binary",
            )?;
        }
        let mut qemu = Command::new(QEMU);
        qemu.arg(&agent);
        qemu
    };
    let output = command
        .args(["check", "--config"])
        .arg(stage.join("config.toml"))
        .stderr(Stdio::inherit())
        .output()?;
    let said = String::from_utf8_lossy(&output.stdout);
    ensure!(output.status.success(), "check: {}: {said}", output.status);
    ensure!(said.contains("good: "), "check said {said}");
    // No program header names a dynamic loader.
    let headers = Command::new("readelf").arg("-lW").arg(&agent).output()?;
    let headers = String::from_utf8_lossy(&headers.stdout);
    ensure!(headers.contains("LOAD"), "readelf said {headers}");
    ensure!(!headers.contains("INTERP"), "it is not static");
    Ok(())
}
