//! `cargo xtask miri`: runs the tests of agent-common, which has unsafe code and needs no kernel, in an interpreter
//! that detects undefined behaviour.

use std::fs;

use crate::{
    process::{command, run as run_command},
    root, tools,
};

/// A nightly with Miri; some do not have it.
const TOOLCHAIN: &str = "nightly-2026-10-01";
const FLAGS: &str = "-Zmiri-strict-provenance -Zmiri-symbolic-alignment-check";

pub(crate) fn run() -> anyhow::Result<()> {
    tools::toolchain(TOOLCHAIN, &["miri", "rust-src"], "Miri is in no stable one")?;
    let test = "cargo miri test --locked --package rto-agent-common --lib --";
    let mut miri = command(&format!("rustup run {TOOLCHAIN} {test}"));
    // Files without unsafe code have tests that take minutes in an interpreter, and nothing for it to find.
    for file in fs::read_dir(root().join("agent-common/src"))? {
        let path = file?.path();
        let name = path.file_stem().unwrap_or_default().to_string_lossy();
        if !fs::read_to_string(&path)?.contains("unsafe ") {
            miri.arg(format!("--skip={name}::tests"));
        }
    }
    run_command(
        miri.env_remove("CARGO")
            .env("CARGO_TARGET_DIR", root().join("target/miri"))
            .env("MIRIFLAGS", FLAGS),
    )
}
