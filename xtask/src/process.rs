//! Running other programs, loudly.

use std::process::{Command, Stdio};

use anyhow::{Context as _, bail};

/// Runs a command; its failure is an error that names it.
pub(crate) fn run(command: &mut Command) -> anyhow::Result<()> {
    let status = command.status().with_context(|| format!("cannot run {}", said(command)))?;
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
    let paths = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&paths)
        .chain(["/usr/sbin".into(), "/sbin".into()])
        .any(|dir| dir.join(program).is_file())
}

fn said(command: &Command) -> String {
    let mut words = vec![command.get_program().to_string_lossy()];
    words.extend(command.get_args().map(|arg| arg.to_string_lossy()));
    words.join(" ")
}
