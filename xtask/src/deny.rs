//! `cargo xtask deny`: finds dependencies that are unused or compiled twice, and checks licences, sources and known
//! vulnerabilities of the others.

use std::{
    collections::{BTreeMap, BTreeSet},
    process::{Command, Stdio},
};

use anyhow::ensure;

use crate::{
    process::{output, run as run_command},
    root,
    tools::{self, cargo},
};

/// If this is `required`, the command fails if advisories cannot be checked.
const ADVISORIES: &str = "ADVISORIES";

pub(crate) fn run() -> anyhow::Result<()> {
    unused()?;
    compiled_twice()?;
    let path = tools::ensure("cargo-deny", "0.20.2", &[], "licences, sources, advisories")?;
    let deny = |args: &[&str]| {
        let mut deny = cargo();
        deny.args(["deny", "--log-level", "error"])
            .args(args)
            .env("PATH", &path);
        deny
    };
    run_command(&mut deny(&["check", "bans", "licenses", "sources"]))?;
    // The database is a git repository, which may be unreachable.
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
    // A second, equally strict, reader of the same database.
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

/// Fails if tests enable additional features of a library that the programs use: cargo would compile it once for the
/// programs, and again for the tests.
fn compiled_twice() -> anyhow::Result<()> {
    let libraries = |edges: &str| {
        let tree = output(
            cargo()
                .args(["tree", "--locked", "--workspace", "--edges", edges])
                .args(["--prefix", "none", "--no-dedupe", "--format", "{p} {f}"]),
        )?;
        anyhow::Ok(features(&tree))
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

/// The feature sets of each registry package, from `cargo tree` in the form "NAME VERSION FEATURES".
fn features(tree: &str) -> BTreeMap<String, BTreeSet<String>> {
    let mut packages = BTreeMap::<_, BTreeSet<_>>::new();
    // Packages of the workspace have a path in brackets.
    for line in tree.lines().filter(|line| !line.contains("(/")) {
        let mut words = line.split(' ').filter(|word| *word != "(proc-macro)");
        if let (Some(name), Some(version)) = (words.next(), words.next()) {
            let features = packages.entry(format!("{name} {version}")).or_default();
            features.insert(words.next().unwrap_or_default().to_owned());
        }
    }
    packages
}

/// Packages of the programs that have other features with tests.
fn differing(
    programs: &BTreeMap<String, BTreeSet<String>>,
    tests: &BTreeMap<String, BTreeSet<String>>,
) -> Vec<String> {
    let of_programs = programs
        .iter()
        .filter(|(name, features)| tests.get(*name) != Some(*features));
    of_programs.map(|(name, _)| name.clone()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn features_enabled_by_tests_are_reported() {
        let programs = features("rto-agent v0.1.0 (/w/agent) \nserde v1.0.1 std\nsyn v2.0.1 full");
        let tests = features(
            "rto-agent v0.1.0 (/w/agent) \nserde v1.0.1 alloc,std\nsyn v2.0.1 full\n\
             serde_derive v1.0.1 (proc-macro) default",
        );
        assert_eq!(differing(&programs, &tests), ["serde v1.0.1"]);
        assert_eq!(differing(&programs, &programs), Vec::<String>::new());
        assert_eq!(
            tests["serde_derive v1.0.1"],
            BTreeSet::from(["default".to_owned()])
        );
    }
}
