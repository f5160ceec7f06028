//! Tools that cargo builds for this repository alone, and other toolchains.

use std::{
    path::PathBuf,
    process::{Command, Stdio},
};

use anyhow::{Context as _, bail};

use crate::{process::run, root};

/// Where they are: nothing is installed for the user.
fn tools() -> PathBuf {
    root().join("target/tools")
}

/// Makes sure that a tool of this version is there, after saying so; the PATH with it.
///
/// # Errors
///
/// If it cannot be built.
pub(crate) fn ensure(tool: &str, version: &str, why: &str) -> anyhow::Result<std::ffi::OsString> {
    let bin = tools().join("bin");
    let have = Command::new(bin.join(tool)).arg("--version").output();
    let is_there = have.is_ok_and(|output| {
        let said = String::from_utf8_lossy(&output.stdout);
        said.split_whitespace().any(|word| word == version)
    });
    if !is_there {
        println!(
            "building {tool} {version} into {} ({why})",
            tools().display()
        );
        // Without optimisation: it does little itself.
        run(cargo()
            .args(["install", "--quiet", "--locked", "--debug", "--root"])
            .arg(tools())
            .arg(format!("{tool}@{version}"))
            .env("CARGO_TARGET_DIR", root().join("target").join(tool)))?;
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let all = std::iter::once(bin).chain(std::env::split_paths(&path));
    Ok(std::env::join_paths(all)?)
}

/// Makes sure that a toolchain with these components is there, after saying so.
///
/// # Errors
///
/// If rustup cannot install it.
pub(crate) fn toolchain(name: &str, components: &[&str], why: &str) -> anyhow::Result<()> {
    let installed = Command::new("rustup")
        .args(["component", "list", "--installed", "--toolchain", name])
        .stderr(Stdio::null())
        .output();
    let is_there = installed.is_ok_and(|output| {
        let said = String::from_utf8_lossy(&output.stdout);
        let has = |component: &&str| said.lines().any(|line| line.starts_with(*component));
        output.status.success() && components.iter().all(has)
    });
    if is_there {
        return Ok(());
    }
    println!(
        "installing Rust {name} with {} ({why})",
        components.join(" and ")
    );
    run(Command::new("rustup")
        .args(["toolchain", "install", name, "--profile", "minimal"])
        .args(["--component", &components.join(",")]))
}

/// This cargo, in the workspace.
pub(crate) fn cargo() -> Command {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.current_dir(root());
    cargo
}

/// Builds with this cargo command; the executable of the target of this name.
///
/// # Errors
///
/// If it does not build, or there is no such target among what was built.
pub(crate) fn built(cargo: &mut Command, target: &str) -> anyhow::Result<PathBuf> {
    let output = cargo
        .arg("--message-format=json-render-diagnostics")
        .stderr(Stdio::inherit())
        .output()?;
    if !output.status.success() {
        bail!("cargo: {}", output.status);
    }
    let messages = String::from_utf8(output.stdout)?;
    messages
        .lines()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
        .filter(|message| message["target"]["name"] == target)
        .find_map(|message| message["executable"].as_str().map(PathBuf::from))
        .with_context(|| format!("{target} was not built"))
}
