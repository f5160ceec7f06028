//! Runs other programs, such as cargo, and stops on a signal.

use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::atomic::{AtomicBool, Ordering},
};

use anyhow::{Context as _, bail};
use nix::{
    libc,
    sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction},
};
use rto_testbed::env::TestEnv;

pub(crate) fn root() -> &'static Path {
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    own.parent().unwrap_or(own)
}

pub(crate) fn is_root() -> bool {
    nix::unistd::geteuid().is_root()
}

/// Runs a command; the error of a failed one names it.
pub(crate) fn run(command: &mut Command) -> anyhow::Result<()> {
    let name = command.get_program().to_string_lossy().into_owned();
    let status = command
        .status()
        .with_context(|| format!("cannot run {name}"))?;
    if !status.success() {
        bail!("{name}: {status}");
    }
    Ok(())
}

/// The current cargo, in the workspace.
pub(crate) fn cargo() -> Command {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.current_dir(root());
    cargo
}

/// The program that makes connections.
const HELPER: &str = "rto-workload";

/// The program that makes connections, in the directory of the programs.
pub(crate) fn helper(programs: &Path) -> PathBuf {
    programs.join(HELPER)
}

/// An agent with this configuration, started.
pub(crate) fn agent(programs: &Path, configuration: &str) -> anyhow::Result<TestEnv> {
    let mut env = TestEnv::of(programs.join("rto-agent"))?;
    env.configure(configuration)?;
    env.start()?;
    Ok(env)
}

/// An agent for each of these configurations, not started.
pub(crate) fn configured(
    programs: &Path,
    configurations: &[String],
) -> anyhow::Result<Vec<TestEnv>> {
    let env = |configuration: &String| {
        let env = TestEnv::of(programs.join("rto-agent"))?;
        env.configure(configuration)?;
        Ok(env)
    };
    configurations.iter().map(env).collect()
}

/// Builds the agent and the helper as for a release, with the features that they themselves select; returns their
/// directory.
pub(crate) fn build_programs() -> anyhow::Result<PathBuf> {
    let build = "build --locked --bins --release --package rto-agent --package rto-testbed \
                 --message-format=json-render-diagnostics";
    let output = cargo()
        .args(build.split(' '))
        .stderr(Stdio::inherit())
        .output()?;
    if !output.status.success() {
        bail!("cargo build: {}", output.status);
    }
    let agent = String::from_utf8(output.stdout)?
        .lines()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
        .filter(|message| message["target"]["name"] == "rto-agent")
        .find_map(|message| message["executable"].as_str().map(PathBuf::from))
        .context("cargo built no rto-agent")?;
    Ok(agent.parent().context("a directory")?.to_owned())
}

static STOPPED: AtomicBool = AtomicBool::new(false);

/// After this call, SIGINT, SIGTERM and SIGHUP end a benchmark like a failure, so that it cleans up.
pub(crate) fn catch_signals() -> anyhow::Result<()> {
    extern "C" fn stop(_: libc::c_int) {
        STOPPED.store(true, Ordering::Relaxed);
    }
    let action = SigAction::new(
        SigHandler::Handler(stop),
        SaFlags::SA_RESTART,
        SigSet::empty(),
    );
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        // SAFETY: the handler stores to an atomic and does nothing else.
        unsafe { sigaction(signal, &action) }?;
    }
    Ok(())
}

/// An error after one of these signals.
pub(crate) fn check_signals() -> anyhow::Result<()> {
    if STOPPED.load(Ordering::Relaxed) {
        bail!("interrupted");
    }
    Ok(())
}
