//! `cargo xtask deny`: dependencies that nobody uses, and licences, sources and known vulnerabilities of the others.

use std::process::{Command, Stdio};

use anyhow::ensure;

use crate::{
    process::run as run_command,
    root,
    tools::{self, cargo},
};

/// Set to `required` to fail if advisories cannot be checked.
const ADVISORIES: &str = "ADVISORIES";

pub(crate) fn run() -> anyhow::Result<()> {
    unused()?;
    let path = tools::ensure("cargo-deny", "0.20.2", &[], "licences, sources, advisories")?;
    let deny = |args: &[&str]| {
        let mut deny = cargo();
        deny.args(["deny", "--log-level", "error"])
            .args(args)
            .env("PATH", &path);
        deny
    };
    run_command(&mut deny(&["check", "bans", "licenses", "sources"]))?;
    // A git repository, which may be unreachable.
    let fetched = deny(&["fetch", "db"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()?;
    if !fetched.success() {
        println!("the advisory database cannot be reached: advisories were NOT checked");
        let is_required = std::env::var_os(ADVISORIES).is_some_and(|text| text == "required");
        ensure!(!is_required, "{ADVISORIES}=required");
        return Ok(());
    }
    run_command(&mut deny(&["check", "advisories"]))?;
    // A second reader of the same database, as strict as the first.
    let path = tools::ensure("cargo-audit", "0.22.2", &[], "advisories")?;
    run_command(
        cargo()
            .args(["audit", "--deny", "warnings"])
            .env("PATH", path),
    )
}

/// Fails if a crate's manifest names a dependency that the crate does not use.
fn unused() -> anyhow::Result<()> {
    let path = tools::ensure("cargo-machete", "0.9.1", &[], "unused dependencies")?;
    run_command(Command::new("cargo-machete").arg(root()).env("PATH", path))
}
