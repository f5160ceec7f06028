//! `cargo xtask miri`: runs the tests of agent-common, which has unsafe code and needs no kernel, in an interpreter
//! that detects undefined behaviour.

use std::process::Command;

use crate::{process::run as run_command, root, tools};

/// A nightly with Miri; some do not have it.
const TOOLCHAIN: &str = "nightly-2026-10-01";

pub(crate) fn run() -> anyhow::Result<()> {
    tools::toolchain(TOOLCHAIN, &["miri", "rust-src"], "Miri is in no stable one")?;
    run_command(
        Command::new("rustup")
            .current_dir(root())
            .args(["run", TOOLCHAIN, "cargo", "miri", "test", "--locked"])
            .args(["--package", "rto-agent-common"])
            .env_remove("CARGO")
            .env("CARGO_TARGET_DIR", root().join("target/miri"))
            .env(
                "MIRIFLAGS",
                "-Zmiri-strict-provenance -Zmiri-symbolic-alignment-check",
            ),
    )
}
