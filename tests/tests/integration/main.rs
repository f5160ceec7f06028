//! Integration tests. They drive the agent from outside, on a real kernel, in private namespaces and a private cgroup.
//! `cargo xtask test` runs them as root; without root they are reported as ignored.

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
use rto_testbed::{emulated::is_emulated, env::TestEnv, leftovers, names, netns, process::require};
use tempfile::TempDir;

#[macro_use]
mod registry;

mod adversary;
mod advise;
mod arms;
mod changes;
mod cli;
mod coexistence;
mod columns;
mod completion;
mod config;
mod connect_times;
mod containers;
mod dashboards;
mod discover;
mod doctor;
mod ecmp;
mod established;
mod fallback;
mod faults;
mod harness;
mod holdout;
mod http_clients;
mod kernel;
mod lab_blackout;
mod lab_estimator;
mod lab_file;
mod lab_loss;
mod lab_outage;
mod lab_page;
mod lab_rtt;
mod lab_run;
mod lab_sampler;
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
mod ownership;
mod prelude;
mod prometheus;
mod relay;
mod rto_restart;
mod scale;
mod screencast;
mod security;
mod short_timer;
mod socket_options;
mod statistics;
mod syn;
mod syn_ack;
mod syn_retries;
mod syn_schedule;
mod top;
mod tuning;
mod watch;

/// A test that takes longer hangs. The longest waits for the kernel's ETIMEDOUT (134 s), and one kills a daemon 100
/// times, which takes minutes on a busy machine.
const LIMIT: Duration = Duration::from_secs(900);
/// The limit with RTO_TESTS_LONG.
const LIMIT_LONG: Duration = Duration::from_secs(1800);
/// The limit on an emulated processor.
const LIMIT_EMULATED: Duration = Duration::from_secs(1200);
/// Tests mostly wait for timers, so more run at once than there are cores: this many keep two cores busy.
const THREADS: usize = 10;
/// If set, the findings about the kernel are printed last, after this word; `cargo xtask vm` reads them.
const REPORT: &str = "RTO_TESTS_REPORT";

/// Set if another command runs these tests, so that `cargo test --workspace` runs only the others.
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
    // Some tests hold many sockets while others run.
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

/// Puts the tests' files into a private directory, so that leftovers can be found.
fn own_temp_dir() -> anyhow::Result<TempDir> {
    leftovers::sweep();
    let name = names::unique();
    let dir = tempfile::Builder::new()
        .prefix(&format!("{name}-"))
        // Clients in tests run as other users.
        .permissions(Permissions::from_mode(0o755))
        .tempdir()
        .context("no directory for files")?;
    tempfile::env::override_temp_dir(dir.path())
        .map_err(|other| anyhow!("files are in {} already", other.display()))?;
    Ok(dir)
}

/// The objects that this process has created and not removed. A test that is still running has not removed its objects.
fn left(files: TempDir) -> anyhow::Result<Vec<PathBuf>> {
    let entries = fs::read_dir(files.path())?;
    let entries: io::Result<Vec<_>> = entries.map(|entry| Ok(entry?.path())).collect();
    let mut left = entries?;
    drop(files);
    left.extend(leftovers::of(std::process::id())?);
    Ok(left)
}

/// The reason why the tests cannot run here.
fn refusal() -> Option<String> {
    if !nix::unistd::geteuid().is_root() {
        return Some("these tests need root (network namespaces, eBPF)".to_owned());
    }
    require(&["ip", "ss", "nft", "tcpdump", "bpftool"])
        .err()
        .map(|e| e.to_string())
}

/// Runs a test in a thread with its name and a time limit, so that a test that hangs fails.
fn limited(
    name: &str,
    test: impl FnOnce() -> anyhow::Result<()> + Send + 'static,
) -> Result<(), Failed> {
    let (sender, receiver) = mpsc::channel();
    let runner = thread::Builder::new().name(name.to_owned());
    let runner = runner.spawn(move || {
        let result = test();
        // The receiver is gone if the test took too long.
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
        // Also after a panic: join() then returns its message.
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

/// An environment with these policies, whose daemon is not started yet.
fn configured(policies: &str) -> anyhow::Result<TestEnv> {
    let env = TestEnv::new()?;
    env.configure(policies)?;
    Ok(env)
}

/// An environment with a daemon and these policies, whose server answers nothing at [`PORT`].
fn silent(policies: &str) -> anyhow::Result<TestEnv> {
    let env = TestEnv::with(policies)?;
    env.net.black_hole(PORT)?;
    Ok(env)
}

/// Asserts the time between the first SYNs to the server, which answers nothing at [`PORT`].
fn expect(env: &TestEnv, timer: Duration) -> anyhow::Result<()> {
    env.assert_syn_gap(to(netns::SERVER_V4, PORT), timer)
}

/// An address of the server.
fn to(address: &str, port: u16) -> std::net::SocketAddr {
    std::net::SocketAddr::new(address.parse().unwrap_or([0, 0, 0, 0].into()), port)
}

/// A port of the server. Each test has its own network namespaces.
const PORT: u16 = 4000;

/// A user without privileges.
const NOBODY: u32 = 65_534;

/// The kernel's minimum of an RTO (`TCP_RTO_MIN`).
const KERNEL_RTO_MIN: Duration = Duration::from_millis(200);

/// The kernel's initial RTO (RFC 6298 section 2.1).
const KERNEL_RTO: Duration = Duration::from_secs(1);

/// The initial RTO of the usual policy.
const POLICY_RTO: Duration = Duration::from_millis(100);

/// A configuration with the policy "near" for these CIDRs.
fn near(cidrs: &str) -> String {
    format!("[policy.near]\ninitial_rto = \"100ms\"\nforce = true\ncidrs = [{cidrs}]\n")
}
