//! Sockets and pipes that no process reads, files that are removed, and signals that arrive early.

use std::{
    fs::File,
    os::unix::{fs::OpenOptionsExt as _, net::UnixDatagram},
};

use nix::{libc, sys::stat::Mode, unistd::mkfifo};

use crate::prelude::*;

fn env() -> anyhow::Result<TestEnv> {
    configured(&near("\"10.88.0.0/24\""))
}

/// Asserts that the daemon accepts changes, answers, and stops with status 0.
fn serves_and_stops(env: &mut TestEnv) -> anyhow::Result<()> {
    for _ in 0..20 {
        env.cli(&["add", "10.1.0.0/24", "--policy", "near"])?;
        env.cli(&["remove", "10.1.0.0/24"])?;
    }
    env.wait_status("health", |status| status["healthy"] == true)?;
    env.signal(Signal::SIGTERM)?;
    ensure!(env.ended()?.code() == Some(0));
    Ok(())
}

test!(log_that_is_not_read_holds_nothing_up);
fn log_that_is_not_read_holds_nothing_up() -> anyhow::Result<()> {
    let mut env = env()?;
    let pipe = env.dir().join("pipe");
    mkfifo(&pipe, Mode::S_IRWXU)?;
    let mut held = File::options();
    let held = held.read(true).write(true).custom_flags(libc::O_NONBLOCK);
    let mut held = held.open(&pipe)?;
    for piece in [4096, 1] {
        while held.write(&vec![b'x'; piece]).is_ok() {}
    }
    let script = format!("exec \"$@\" 2>{}", pipe.display());
    env.start_under(&["sh", "-c", &script, "sh"].map(str::to_owned))?;
    serves_and_stops(&mut env)
}

test!(service_manager_that_does_not_read_holds_nothing_up);
fn service_manager_that_does_not_read_holds_nothing_up() -> anyhow::Result<()> {
    let mut env = env()?;
    let path = env.dir().join("unread");
    let _unread = UnixDatagram::bind(&path)?;
    let sender = UnixDatagram::unbound()?;
    sender.set_nonblocking(true)?;
    while sender.send_to(b"STATUS=x", &path).is_ok() {}
    let variable = format!("NOTIFY_SOCKET={}", path.display());
    // The service manager also announces that it keeps descriptors, which the daemon sends it at the end.
    let keeps = "FDSTORE=64".to_owned();
    env.spawn_under(&["env".to_owned(), variable, keeps])?;
    let is_bound = || Ok(env.socket().exists().then_some(()));
    eventually("socket", TIMEOUT, is_bound)?;
    env.wait_status("count of dropped lines", |status| {
        status["warnings"]
            .to_string()
            .contains("to the service manager")
    })?;
    serves_and_stops(&mut env)
}

test!(start_without_threads_names_the_limit);
/// No thread can be started with a stack of 64 TiB.
fn start_without_threads_names_the_limit() -> anyhow::Result<()> {
    let env = env()?;
    let config = env.dir().join("etc/config.toml");
    let mut run = env.command(&["run", "--config", &config.display().to_string()]);
    let error = refusal(
        &run.env("RUST_MIN_STACK", (1_u64 << 46).to_string())
            .output()?,
    )?;
    ensure!(error.contains("raise pids.max"), "{error}");
    Ok(())
}

test!(removed_lock_and_last_good_files_are_made_again);
fn removed_lock_and_last_good_files_are_made_again() -> anyhow::Result<()> {
    let mut env = env()?;
    env.start()?;
    let lock = env.dir().join("state/lock");
    fs::remove_dir_all(env.persistent_dir())?;
    fs::remove_file(&lock)?;
    let kept = env.persistent_dir().join("last-good.json");
    let both = || Ok((lock.exists(), kept.exists()));
    eventually_seen("both files", TIMEOUT, both, |both| *both == (true, true))?;
    // The new lock is held: a second daemon is refused.
    let text = env.config_text(&near("\"10.88.0.0/24\""));
    let other = env.dir().join("etc/other.toml");
    let text = text
        .replace("control.sock", "other.sock")
        .replace("/bpf/", "/bpf/other-");
    fs::write(&other, text)?;
    env.second_is_refused(&other).map(drop)
}

test!(sighup_during_a_start_does_not_end_it);
fn sighup_during_a_start_does_not_end_it() -> anyhow::Result<()> {
    let mut env = env()?;
    env.spawn_under(&[])?;
    let path = format!("/proc/{}/status", env.pid()?);
    // The first bit is SIGHUP's (proc(5)).
    let does_not_end = || {
        let text = fs::read_to_string(&path)?;
        let masks = text.lines().filter_map(|line| {
            line.strip_prefix("SigIgn:")
                .or(line.strip_prefix("SigCgt:"))
        });
        let masks = masks.map(|bits| u64::from_str_radix(bits.trim(), 16));
        let both = masks.sum::<Result<u64, _>>().context("no mask")?;
        Ok((both & 1 != 0).then_some(()))
    };
    eventually("start", TIMEOUT, does_not_end)?;
    env.signal(Signal::SIGHUP)?;
    env.notified("READY=1")?;
    Ok(())
}

test!(write_beyond_the_limit_of_a_file_is_an_error);
fn write_beyond_the_limit_of_a_file_is_an_error() -> anyhow::Result<()> {
    let mut env = env()?;
    env.start_under(&["prlimit", "--fsize=8192"].map(str::to_owned))?;
    let cidrs: Vec<_> = (0..200).map(|n| format!("10.1.{n}.0/24")).collect();
    let cidrs: Vec<&str> = cidrs.iter().map(String::as_str).collect();
    let add = [&["add", "--policy", "near"][..], &cidrs].concat();
    env.cli_refuses(&add, "File too large")?;
    serves_and_stops(&mut env)
}
