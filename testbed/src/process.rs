//! Runs programs.
//!
//! They are started without fork() where possible: without `pre_exec`, `uid` and `gid` the standard library uses
//! posix_spawn(3). fork() would copy the page tables of a large process and hold its `mmap_lock` during that time.
//! Threads that take a page fault, as all do after a fork, would wait for the lock while the forking thread waits for a
//! processor, whatever their priority.

use std::{
    fs,
    io::Write as _,
    marker::PhantomData,
    path::PathBuf,
    process::{Child, Command, Output, Stdio},
};

use anyhow::{Context as _, bail, ensure};

/// While it exists the calling thread runs at real-time priority, as in [`run_in_real_time`]; its children do not.
#[derive(Debug)]
pub struct RealTime(PhantomData<*const ()>);

impl RealTime {
    /// Raises the calling thread.
    #[must_use]
    pub fn begin() -> Self {
        schedule(libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK, 1);
        Self(PhantomData)
    }
}

impl Drop for RealTime {
    fn drop(&mut self) {
        schedule(libc::SCHED_OTHER, 0);
    }
}

/// Runs the calling thread, and those it starts later, before all ordinary programs (SCHED_FIFO, sched(7)), so that
/// other work on the machine does not delay the measurement. Best effort: this requires CAP_SYS_NICE.
pub fn run_in_real_time() {
    schedule(libc::SCHED_FIFO, 1);
}

fn schedule(policy: libc::c_int, sched_priority: libc::c_int) {
    // SAFETY: the structure is made of integers. Its other fields depend on the C library.
    let mut parameters: libc::sched_param = unsafe { std::mem::zeroed() };
    parameters.sched_priority = sched_priority;
    // Not sched_setscheduler(), which musl answers with ENOSYS.
    // SAFETY: the thread runs, and `parameters` outlives the call.
    let _set =
        unsafe { libc::pthread_setschedparam(libc::pthread_self(), policy, &raw const parameters) };
}

/// Gives the calling thread, and those it starts later, the lowest niceness (setpriority(2)). They run before most
/// other programs without starving them, which suits work that never pauses. Best effort: this requires CAP_SYS_NICE.
pub fn run_before_ordinary() {
    // SAFETY: the call takes only numbers; 0 is the calling thread.
    let _raised = unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, -20) };
}

/// A child process; killed by its pid and reaped when dropped.
#[derive(Debug)]
pub struct KillOnDrop(pub Child);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        let _ended = self.0.kill();
        let _reaped = self.0.wait();
    }
}

/// The path of another binary of this workspace: in this binary's directory, or the one above (tests are one below).
pub fn beside(name: &str) -> anyhow::Result<PathBuf> {
    let own = std::env::current_exe()?;
    let found = own
        .ancestors()
        .skip(1)
        .take(2)
        .map(|dir| dir.join(name))
        .find(|path| path.is_file());
    found.with_context(|| {
        let dir = own.parent().unwrap_or(&own).display();
        format!("{name} is neither in {dir} nor above it: cargo build --workspace --bins builds it")
    })
}

/// Runs a command line, split at blanks, and returns what it prints.
pub fn run(line: &str) -> anyhow::Result<String> {
    let mut words = line.split_whitespace();
    let output = Command::new(words.next().unwrap_or_default())
        .args(words)
        .output()
        .with_context(|| line.to_owned())?;
    stdout_of(line, output)
}

/// Runs a program with this text on its stdin, and returns what it prints. Before it has read the text it must not
/// print more than fits into a pipe.
pub fn run_with_input(command: &mut Command, text: &str) -> anyhow::Result<String> {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("{command:?}"))?;
    let mut stdin = child.stdin.take().context("no stdin")?;
    // If the program exits before it has read everything, its own error shows why.
    let _read = stdin.write_all(text.as_bytes());
    drop(stdin);
    stdout_of(&format!("{command:?}: {text}"), child.wait_with_output()?)
}

/// What a finished program has printed.
pub fn stdout_of(what: &str, output: Output) -> anyhow::Result<String> {
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    if !output.status.success() {
        bail!(
            "{what}: {}\n{text}{}",
            output.status,
            String::from_utf8_lossy(&output.stderr)
        );
    }
    Ok(text)
}

/// The error of a program that has refused what it was asked, with exit status 1.
pub fn refusal(output: &Output) -> anyhow::Result<String> {
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(
        output.status.code() == Some(1),
        "{}: {message}",
        output.status
    );
    Ok(message)
}

/// Checks that all these programs are installed; the error names missing ones.
pub fn require(programs: &[&str]) -> anyhow::Result<()> {
    let dirs = std::env::var_os("PATH").unwrap_or_default();
    let dirs: Vec<_> = std::env::split_paths(&dirs)
        .chain(["/usr/sbin".into()])
        .collect();
    let missing: Vec<_> = programs
        .iter()
        .filter(|program| !dirs.iter().any(|dir| dir.join(program).exists()))
        .collect();
    ensure!(
        missing.is_empty(),
        "missing {missing:?}: install them (Debian: iproute2, nftables, tcpdump, bpftool); in a checkout \
         cargo xtask test does"
    );
    Ok(())
}

/// Whether a process with this id exists.
#[must_use]
pub fn alive(pid: u32) -> bool {
    fs::exists(format!("/proc/{pid}")).unwrap_or(true)
}
