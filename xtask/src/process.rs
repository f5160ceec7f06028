//! Running other programs, loudly.

use std::{
    path::PathBuf,
    process::{Command, Stdio},
};

use anyhow::{Context as _, bail};

/// Runs a command; its failure is an error that names it.
pub(crate) fn run(command: &mut Command) -> anyhow::Result<()> {
    let status = command
        .status()
        .with_context(|| format!("cannot run {}", said(command)))?;
    if !status.success() {
        bail!("{}: {status}", said(command));
    }
    Ok(())
}

/// What a command prints on stdout.
pub(crate) fn output(command: &mut Command) -> anyhow::Result<String> {
    let output = command
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("cannot run {}", said(command)))?;
    if !output.status.success() {
        bail!("{}: {}", said(command), output.status);
    }
    Ok(String::from_utf8(output.stdout)?.trim().to_owned())
}

/// Whether a program can be found.
pub(crate) fn have(program: &str) -> bool {
    find(program).is_some()
}

/// Where a program is: in PATH, or where administrators' programs are.
pub(crate) fn find(program: &str) -> Option<PathBuf> {
    let paths = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&paths)
        .chain(["/usr/sbin".into(), "/sbin".into()])
        .map(|dir| dir.join(program))
        .find(|path| path.is_file())
}

/// Whether this process is root.
pub(crate) fn is_root() -> bool {
    nix::unistd::geteuid().is_root()
}

/// A command run as root: as it is, or by sudo with the environment kept.
pub(crate) fn as_root(program: &str) -> Command {
    if is_root() {
        Command::new(program)
    } else {
        let mut sudo = Command::new("sudo");
        sudo.arg("--preserve-env=PATH,CI,RTO_TESTS_REQUIRE_ROOT,RTO_TESTS_LONG,RTO_TESTS_SEED,DEBIAN_FRONTEND")
            .arg(program);
        sudo
    }
}

/// Installs Debian packages, after saying so.
pub(crate) fn apt_install(packages: &[&str], why: &str) -> anyhow::Result<()> {
    if !have("apt-get") {
        bail!(
            "{why} needs {}; this is no Debian or Ubuntu: install them by hand",
            packages.join(", ")
        );
    }
    println!("installing {} ({why})", packages.join(" "));
    let apt = || {
        let mut apt = as_root("apt-get");
        apt.env("DEBIAN_FRONTEND", "noninteractive");
        apt
    };
    run(apt().args(["update", "-qq"]))?;
    run(apt()
        .args(["install", "-y", "-qq", "--no-install-recommends"])
        .args(packages))
}

fn said(command: &Command) -> String {
    let mut words = vec![command.get_program().to_string_lossy()];
    words.extend(command.get_args().map(|arg| arg.to_string_lossy()));
    words.join(" ")
}
