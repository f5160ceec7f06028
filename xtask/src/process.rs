//! Runs other programs.

use std::{
    fs::{self, File},
    path::PathBuf,
    process::{Command, Stdio},
};

use anyhow::{Context as _, bail};

use crate::{root, tools::cache};

/// A command of words, which spaces separate, in the workspace.
pub(crate) fn command(words: &str) -> Command {
    let mut words = words.split_whitespace();
    let mut command = Command::new(words.next().unwrap_or_default());
    command.args(words).current_dir(root());
    command
}

/// A command of the shell, in the workspace.
pub(crate) fn shell(script: &str) -> Command {
    let mut shell = command("sh -c");
    shell.arg(script);
    shell
}

/// Runs a command; the error of a failed one names it.
pub(crate) fn run(command: &mut Command) -> anyhow::Result<()> {
    let status = command
        .status()
        .with_context(|| format!("cannot run {}", command_line(command)))?;
    if !status.success() {
        bail!("{}: {status}", command_line(command));
    }
    Ok(())
}

/// The standard output of a command.
pub(crate) fn output(command: &mut Command) -> anyhow::Result<String> {
    let output = command
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("cannot run {}", command_line(command)))?;
    if !output.status.success() {
        bail!("{}: {}", command_line(command), output.status);
    }
    Ok(String::from_utf8(output.stdout)?.trim().to_owned())
}

/// Whether a program is installed, or a file with an absolute path exists.
pub(crate) fn have(program: &str) -> bool {
    find(program).is_some()
}

/// A program in PATH, /usr/sbin or /sbin.
pub(crate) fn find(program: &str) -> Option<PathBuf> {
    let paths = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&paths)
        .chain(["/usr/sbin".into(), "/sbin".into()])
        .map(|dir| dir.join(program))
        .find(|path| path.is_file())
}

pub(crate) fn is_root() -> bool {
    nix::unistd::geteuid().is_root()
}

/// A command that runs as root: directly, or with sudo and the environment that tests read.
pub(crate) fn as_root(program: &str) -> Command {
    if is_root() {
        Command::new(program)
    } else {
        let mut sudo = Command::new("sudo");
        sudo.arg("--preserve-env=PATH,CI,LLVM_PROFILE_FILE,RTO_TESTS_REQUIRE_ROOT,RTO_TESTS_LONG,RTO_TESTS_SEED,DEBIAN_FRONTEND")
            .arg(program);
        sudo
    }
}

/// Announces and installs the missing ones of these programs, or files, from the Debian packages beside them.
pub(crate) fn need(programs: &[(&str, &str)], why: &str) -> anyhow::Result<()> {
    let missing = programs.iter().filter(|(program, _)| !have(program));
    let packages: Vec<&str> = missing.map(|(_, package)| *package).collect();
    if packages.is_empty() {
        return Ok(());
    }
    apt_install(&packages, why)
}

/// Announces and installs Debian packages.
pub(crate) fn apt_install(packages: &[&str], why: &str) -> anyhow::Result<()> {
    if !have("apt-get") {
        bail!(
            "{why} needs {}; install them: this is neither Debian nor Ubuntu",
            packages.join(", ")
        );
    }
    println!("installing {} ({why})", packages.join(" "));
    // apt has one global lock, and does not wait for the lock of its lists.
    let cache = cache()?;
    fs::create_dir_all(&cache)?;
    let lock = File::create(cache.join("apt.lock"))?;
    lock.lock()?;
    let words = format!(
        "apt-get update -qq && apt-get install -y -qq --no-install-recommends {}",
        packages.join(" ")
    );
    let mut apt = as_root("sh");
    run(apt
        .args(["-c", &words])
        .env("DEBIAN_FRONTEND", "noninteractive"))
}

fn command_line(command: &Command) -> String {
    let mut words = vec![command.get_program().to_string_lossy()];
    words.extend(command.get_args().map(|arg| arg.to_string_lossy()));
    words.join(" ")
}
