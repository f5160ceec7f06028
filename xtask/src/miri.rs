//! `cargo xtask miri`: the tests of what has unsafe code and needs no kernel, on an interpreter that sees
//! undefined behaviour.

use std::process::Command;

use crate::{process::run as run_command, root, tools};

/// Miri comes with nightlies only, and not with each.
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
