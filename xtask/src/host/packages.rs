//! `cargo xtask host --packages`: checks of the packages, partly outside the machine.

use std::{fs, path::Path, process::Command};

use anyhow::{Context as _, ensure};

use super::{Checks, arm64};
use crate::{
    arch::Arch,
    dist::{
        Release,
        stage::{PROGRAMS, Stage},
    },
    process::{command, need, output, run as run_command},
    root,
};

/// Added to the configuration file of the older version.
const DIFFERENCE: &str = "# The older version's.\n";
const QEMU: &str = "qemu-aarch64-static";

/// Puts packages into a directory for the machine: of this version, and below `older` the packages of the commit
/// before it.
///
/// Before that it runs the checks that need no machine.
pub(super) fn prepare(archs: &[Arch], dir: &Path, checks: &mut Checks) -> anyhow::Result<()> {
    let release = Release::of(root())?;
    let older = dir.join("older");
    fs::create_dir_all(&older)?;
    for arch in archs {
        let stage = Stage::prepare(&release, *arch)?;
        let name = arch.deb();
        let into = tempfile::tempdir()?;
        let mut check = |what: &str, result| checks.host(&format!("{name}: {what}"), result);
        let mut packages = Vec::new();
        for (program, list) in PROGRAMS {
            let package = |packager| stage.package(list, packager, &release.version, into.path());
            let (deb, rpm) = (package("deb")?, package("rpm")?);
            check(
                &format!("{program}: lintian has no error and no warning"),
                lintian(&deb),
            );
            check(&format!("{program}: rpmlint has no error"), rpmlint(&rpm));
            packages.extend([deb, rpm]);
        }
        check(
            "the binary is static and validates the configuration",
            validates(*arch, &stage.dir),
        );
        if *arch != Arch::host() {
            if *arch == Arch::Arm64 {
                let all = "all of its checks in a machine of its own";
                check(all, arm64::run(&stage.dir));
            }
            continue;
        }
        for package in packages {
            let to = dir.join(package.file_name().context("no name")?);
            fs::copy(package, to)?;
        }
        let changed = stage.copy_to(into.path().join("older"))?;
        let config = changed.dir.join("config.toml");
        let text = fs::read_to_string(&config)?;
        fs::write(&config, format!("{text}{DIFFERENCE}"))?;
        let before = release.before()?;
        for packager in ["deb", "rpm"] {
            changed.package("nfpm.yaml", packager, &before, &older)?;
        }
    }
    Ok(())
}

/// Fails if lintian reports an error or a warning.
fn lintian(deb: &Path) -> anyhow::Result<()> {
    need(&[("lintian", "lintian")], "to check the deb")?;
    let options = "--fail-on=error,warning --tag-display-limit=0 --allow-root --no-cfg";
    run_command(command(&format!("lintian {options}")).arg(deb))
}

/// Fails if rpmlint reports an error.
fn rpmlint(rpm: &Path) -> anyhow::Result<()> {
    // rpmlint calls rpm.
    need(
        &[("rpm", "rpm"), ("rpmlint", "rpmlint")],
        "to check the rpm",
    )?;
    run_command(command("rpmlint --config packaging/rpm/rpmlint.toml").arg(rpm))
}

/// Runs `rto-agent check` on the packages' configuration file with the packages' binary. For another architecture it
/// uses a user-mode emulator, whose system calls go to this kernel.
fn validates(arch: Arch, stage: &Path) -> anyhow::Result<()> {
    let agent = stage.join("rto-agent");
    let mut check = if arch == Arch::host() {
        Command::new(&agent)
    } else {
        let why = "to run another architecture's binary";
        need(&[(QEMU, "qemu-user-static")], why)?;
        let mut qemu = Command::new(QEMU);
        qemu.arg(&agent);
        qemu
    };
    check.args(["check", "--config"]);
    let message = output(check.arg(stage.join("config.toml")))?;
    ensure!(message.contains("good: "), "check said {message}");
    // No program header names a dynamic loader.
    let headers = output(command("readelf -lW").arg(&agent))?;
    ensure!(!headers.contains("INTERP"), "it is not static");
    Ok(())
}
