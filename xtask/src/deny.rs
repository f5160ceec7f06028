//! `cargo xtask deny`: licences, sources and known vulnerabilities of the dependencies.

use std::process::Stdio;

use anyhow::ensure;

use crate::{
    process::run as run_command,
    tools::{self, cargo},
};

/// Set to `required` to fail if advisories cannot be checked.
const ADVISORIES: &str = "ADVISORIES";

pub(crate) fn run() -> anyhow::Result<()> {
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
