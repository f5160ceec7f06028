//! `cargo xtask coverage`: runs the tests of `cargo xtask test` with instrumented programs, and prints the covered
//! lines of each file, including lines that programs run which integration tests start.

use std::{fs, path::Path, process::Command};

use crate::{
    process::{command, run as run_command},
    root, test,
    tools::{self, cargo},
};

/// `cargo xtask coverage`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Run only tests whose name contains this
    filter: Option<String>,
    /// Only install and build what the tests need
    #[arg(long)]
    no_run: bool,
}

const CARGO_LLVM_COV: &str = "0.9.1";

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let why = "cargo xtask coverage";
    let path = tools::ensure("cargo-llvm-cov", CARGO_LLVM_COV, &[], why)?;
    // Reads the profiles. It must come from the toolchain, because each LLVM has its own format.
    run_command(&mut command("rustup --quiet component add llvm-tools"))?;
    let target = root().join("target/coverage");
    // cargo llvm-cov and all programs below it get the build's environment.
    let instrumented = |program: &Path| {
        let mut sh = Command::new("sh");
        sh.current_dir(root())
            .args(["-c", ENVIRONMENT])
            .arg(program)
            .env("PATH", &path)
            .env("CARGO_TARGET_DIR", &target)
            // Thousands of processes share a few files, because each file has megabytes.
            .env("LLVM_PROFILE_FILE_NAME", "rto-agent-%4m.profraw")
            // Coverage does not need debug information.
            .env("CARGO_PROFILE_DEV_DEBUG", "false");
        sh
    };
    let cargo = cargo("");
    let cargo = Path::new(cargo.get_program());
    take_libraries(&root().join("target/debug"), &target.join("debug"))?;
    // Exists from a `--no-run` to the run that uses its programs.
    let built = target.join("built");
    if fs::remove_file(&built).is_err() || args.no_run {
        // Removes programs without counters, and profiles and programs of an earlier run; the libraries stay.
        run_command(instrumented(cargo).args(["llvm-cov", "clean", "--workspace"]))?;
    }
    if args.no_run {
        run_command(instrumented(cargo).args(test::BUILD.split(' ')))?;
        return Ok(fs::write(built, "")?);
    }
    let mut test = instrumented(&std::env::current_exe()?);
    test.arg("test").args(args.filter.as_slice());
    run_command(&mut test)?;
    run_command(instrumented(cargo).args(["llvm-cov", "report"]))
}

/// Runs a program in the environment of an instrumented build. The option disables `cfg(coverage)`, which the lints do
/// not know.
const ENVIRONMENT: &str =
    r#"eval "$(cargo llvm-cov show-env --sh --no-cfg-coverage)" && exec "$0" "$@""#;

/// Copies the build of `cargo xtask test` into a directory without any build. Libraries are not instrumented, so both
/// builds have the same ones; cargo recognises them as fresh by their times.
fn take_libraries(built: &Path, target: &Path) -> anyhow::Result<()> {
    if target.exists() || !built.join("deps").exists() {
        return Ok(());
    }
    fs::create_dir_all(target)?;
    let copy = |options: &[&str], parts: &[&str]| {
        let parts = parts.iter().map(|part| built.join(part));
        run_command(Command::new("cp").args(options).args(parts).arg(target))
    };
    // These may be hard links, because rustc replaces these files. cargo and build scripts write into the files of the
    // other directories.
    copy(&["--archive", "--link"], &["deps"])?;
    copy(&["--archive"], &[".fingerprint", "build"])
}
