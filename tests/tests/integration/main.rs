//! Integration tests: the agent driven from outside, on a real kernel, in namespaces and a cgroup
//! of its own. Run by `cargo xtask test`, as root; without root they are reported as ignored.

use std::{
    fs::{self, Permissions},
    io,
    os::unix::fs::PermissionsExt as _,
    path::PathBuf,
    process::ExitCode,
    sync::mpsc,
    thread,
    time::Duration,
};

use anyhow::{Context as _, anyhow, ensure};
use libtest_mimic::{Arguments, Failed};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use rto_testbed::{emulated::is_emulated, leftovers, names, process::require};
use tempfile::TempDir;

#[macro_use]
mod registry;

mod adversary;
mod advise;
mod arms;
mod brakes;
mod changes;
mod cli;
mod coexistence;
mod completion;
mod config;
mod containers;
mod dashboards;
mod discover;
mod doctor;
mod established;
mod experiment;
mod faults;
mod harness;
mod http_clients;
mod kernel;
mod lab_blackout;
mod lab_estimator;
mod lab_loss;
mod lab_page;
mod lab_rtt;
mod lab_run;
mod lab_tail;
mod lab_workloads;
mod lifecycle;
mod light;
mod lookup;
mod maps;
mod metrics;
mod needs;
mod never_worse;
mod open_sockets;
mod prometheus;
mod relay;
mod rto_restart;
mod scale;
mod screencast;
mod security;
mod statistics;
mod syn;
mod syn_ack;
mod syn_retries;
mod top;
mod tuning;
mod watch;

/// A test that takes longer hangs. The longest waits for the kernel's own ETIMEDOUT (134 s), and one
/// kills a daemon 100 times, which takes minutes on a busy machine.
const LIMIT: Duration = Duration::from_secs(900);
/// The same with RTO_TESTS_LONG.
const LIMIT_LONG: Duration = Duration::from_secs(1800);
/// The same on an emulated processor.
const LIMIT_EMULATED: Duration = Duration::from_secs(1200);
/// They mostly wait for timers, so that more run at once than there are cores: so many keep two of them busy.
const THREADS: usize = 10;
/// Set to have what the kernel has printed at the end, after this word; `cargo xtask vm` reads it.
const REPORT: &str = "RTO_TESTS_REPORT";

/// Set where they are run by another command, so that this one, of all the workspace's tests, has the others.
const ELSEWHERE: &str = "RTO_TESTS_ELSEWHERE";

fn main() -> ExitCode {
    if std::env::var_os(ELSEWHERE).is_some() {
        return ExitCode::SUCCESS;
    }
    run().unwrap_or_else(|e| {
        eprintln!("{e:#}");
        ExitCode::FAILURE
    })
}

fn run() -> anyhow::Result<ExitCode> {
    // Tests that hold many sockets do so beside others.
    if let Ok((_, hard)) = getrlimit(Resource::RLIMIT_NOFILE) {
        let _as_it_is = setrlimit(Resource::RLIMIT_NOFILE, hard, hard);
    }
    let mut arguments = Arguments::from_args();
    arguments.test_threads.get_or_insert(THREADS);
    let refusal = refusal();
    if let Some(reason) = &refusal {
        eprintln!("ignored: {reason}");
        ensure!(
            std::env::var_os("RTO_TESTS_REQUIRE_ROOT").is_none(),
            "RTO_TESTS_REQUIRE_ROOT is set, so that this is a failure"
        );
    }
    let can_run = refusal.is_none() && !arguments.list;
    let files = can_run.then(own_temp_dir).transpose()?;
    let trials = registry::trials(&arguments, refusal.as_deref());
    let conclusion = libtest_mimic::run(&arguments, trials);
    registry::print_slowest();
    if std::env::var_os(REPORT).is_some() {
        eprintln!("{REPORT} {}", kernel::report().context("no report")?);
    }
    let left = files.map(left).transpose()?.unwrap_or_default();
    if left.is_empty() {
        return Ok(conclusion.exit_code());
    }
    eprintln!("tests have left behind {left:#?}");
    Ok(ExitCode::FAILURE)
}

/// Has the tests' files in a directory of its own, so that it is seen which of them are left.
fn own_temp_dir() -> anyhow::Result<TempDir> {
    leftovers::sweep();
    let name = names::unique();
    let dir = tempfile::Builder::new()
        .prefix(&format!("{name}-"))
        // Clients in tests have other users.
        .permissions(Permissions::from_mode(0o755))
        .tempdir()
        .context("no directory for files")?;
    tempfile::env::override_temp_dir(dir.path())
        .map_err(|other| anyhow!("files are in {} already", other.display()))?;
    Ok(dir)
}

/// What this process has made and not removed. A test that is not done in time still has what it made.
fn left(files: TempDir) -> anyhow::Result<Vec<PathBuf>> {
    let entries = fs::read_dir(files.path())?;
    let entries: io::Result<Vec<_>> = entries.map(|entry| Ok(entry?.path())).collect();
    let mut left = entries?;
    drop(files);
    left.extend(leftovers::of(std::process::id())?);
    Ok(left)
}

/// Why the tests cannot run here.
fn refusal() -> Option<String> {
    if !nix::unistd::geteuid().is_root() {
        return Some("these tests need root (network namespaces, eBPF)".to_owned());
    }
    require(&["ip", "ss", "nft", "tcpdump", "bpftool"])
        .err()
        .map(|e| e.to_string())
}

/// Runs a test on a thread of its own, which has its name, so that one that hangs is a failure and not a standstill.
fn limited(
    name: &str,
    test: impl FnOnce() -> anyhow::Result<()> + Send + 'static,
) -> Result<(), Failed> {
    let (sender, receiver) = mpsc::channel();
    let runner = thread::Builder::new().name(name.to_owned());
    let runner = runner.spawn(move || {
        let result = test();
        // Nobody listens any more if it took too long.
        let _late = sender.send(());
        result
    })?;
    let limit = match (faults::is_long(), is_emulated()) {
        (true, _) => LIMIT_LONG,
        (_, true) => LIMIT_EMULATED,
        _ => LIMIT,
    };
    match receiver.recv_timeout(limit) {
        Err(mpsc::RecvTimeoutError::Timeout) => Err(format!("not done after {limit:?}").into()),
        // Also when it panicked: then joining says with what.
        Ok(()) | Err(mpsc::RecvTimeoutError::Disconnected) => match runner.join() {
            Ok(Ok(())) => Ok(()),
            Ok(Err(e)) => Err(format!("{e:?}").into()),
            Err(panic) => {
                let text = panic.downcast_ref::<String>().map(String::as_str);
                let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
                Err(text.unwrap_or("panicked").to_owned().into())
            }
        },
    }
}

/// An address of the server's.
fn to(address: &str, port: u16) -> std::net::SocketAddr {
    std::net::SocketAddr::new(address.parse().unwrap_or([0, 0, 0, 0].into()), port)
}

/// The kernel's own initial RTO (RFC 6298 section 2.1).
const KERNEL_RTO: Duration = Duration::from_secs(1);

/// A policy of 100 ms.
const POLICY_RTO: Duration = Duration::from_millis(100);

/// The configuration of policy "near" for these CIDRs.
fn near(cidrs: &str) -> String {
    format!("[policy.near]\ninitial_rto = \"100ms\"\nforce = true\ncidrs = [{cidrs}]\n")
}
