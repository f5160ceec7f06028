//! `cargo xtask miri`: runs the tests of agent-common, which has unsafe code and needs no kernel, in an interpreter
//! that detects undefined behaviour.

use crate::{
    process::{command, run as run_command},
    root, tools,
};

/// A nightly with Miri; some do not have it.
const TOOLCHAIN: &str = "nightly-2026-10-01";
const FLAGS: &str = "-Zmiri-strict-provenance -Zmiri-symbolic-alignment-check";

pub(crate) fn run() -> anyhow::Result<()> {
    tools::toolchain(TOOLCHAIN, &["miri", "rust-src"], "Miri is in no stable one")?;
    let test = "cargo miri test --locked --package rto-agent-common";
    run_command(
        command(&format!("rustup run {TOOLCHAIN} {test}"))
            .env_remove("CARGO")
            .env("CARGO_TARGET_DIR", root().join("target/miri"))
            .env("MIRIFLAGS", FLAGS),
    )
}
