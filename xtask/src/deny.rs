//! `cargo xtask deny`: finds dependencies that are unused or compiled twice, and checks licences, sources and known
//! vulnerabilities of the others.

use std::{collections::BTreeSet, process::Stdio};

use anyhow::ensure;

use crate::{
    process::{command, output, run as run_command},
    tools::{self, cargo},
};

/// If this is `required`, the command fails if advisories cannot be checked.
const ADVISORIES: &str = "ADVISORIES";

pub(crate) fn run() -> anyhow::Result<()> {
    unused()?;
    compiled_twice()?;
    let path = tools::ensure("cargo-deny", "0.20.2", &[], "licences, sources, advisories")?;
    let deny = |words| {
        let mut deny = cargo(&format!("deny --log-level error {words}"));
        deny.env("PATH", &path);
        deny
    };
    run_command(&mut deny("check bans licenses sources"))?;
    // The database is a git repository, which may be unreachable.
    let fetched = deny("fetch db")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()?;
    if !fetched.success() {
        println!("the advisory database cannot be reached: advisories were NOT checked");
        let is_required = std::env::var_os(ADVISORIES).is_some_and(|text| text == "required");
        ensure!(!is_required, "{ADVISORIES}=required");
        return Ok(());
    }
    run_command(&mut deny("check advisories"))?;
    // A second, equally strict, reader of the same database.
    let path = tools::ensure("cargo-audit", "0.22.2", &[], "advisories")?;
    run_command(cargo("audit --deny warnings").env("PATH", path))
}

/// Fails if a crate's manifest names a dependency that the crate does not use.
fn unused() -> anyhow::Result<()> {
    let path = tools::ensure("cargo-machete", "0.9.1", &[], "unused dependencies")?;
    run_command(command("cargo-machete").env("PATH", path))
}

/// Fails if tests enable additional features of a library that the programs use: cargo would compile it once for the
/// programs, and again for the tests.
fn compiled_twice() -> anyhow::Result<()> {
    let libraries = |edges: &str| {
        let words = "tree --locked --workspace --prefix none --no-dedupe --edges";
        output(cargo(words).args([edges, "--format", "{p} {f}"]))
    };
    let differing = differing(&libraries("normal,build")?, &libraries("normal,build,dev")?);
    ensure!(
        differing.is_empty(),
        "tests switch on features of libraries: {}; name the features in Cargo.toml's workspace.dependencies, or do \
         without them",
        differing.join(", ")
    );
    Ok(())
}

/// Libraries of the programs that have other features with tests, from the lines of `cargo tree`: "NAME VERSION
/// FEATURES".
fn differing(programs: &str, tests: &str) -> Vec<String> {
    let library = |line: &str| line.split(' ').take(2).collect::<Vec<_>>().join(" ");
    let of_programs: BTreeSet<String> = programs.lines().map(library).collect();
    let known: BTreeSet<&str> = programs.lines().collect();
    // Packages of the workspace have a path in brackets.
    let other = tests
        .lines()
        .filter(|line| !known.contains(line) && !line.contains("(/"));
    let differing: BTreeSet<String> = other.map(library).collect();
    differing.intersection(&of_programs).cloned().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn features_enabled_by_tests_are_reported() {
        let programs = "rto-agent v0.1.0 (/w/agent) \nserde v1.0.1 std\nsyn v2.0.1 full";
        let tests = "rto-agent v0.1.0 (/w/agent) test\nserde v1.0.1 alloc,std\nsyn v2.0.1 full\nadded v1.0.1 std";
        assert_eq!(differing(programs, tests), ["serde v1.0.1"]);
        assert_eq!(differing(programs, programs), [""; 0]);
    }
}
