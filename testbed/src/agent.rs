//! An agent of one's own, driven from outside: its files, socket, pins and cgroup, all removed with it.

use std::{
    fs, io,
    os::{
        fd::{AsRawFd as _, OwnedFd},
        unix::process::CommandExt as _,
    },
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    time::Duration,
};

use anyhow::{Context as _, bail, ensure};
use nix::{
    fcntl::{FcntlArg, fcntl},
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;
use tempfile::TempDir;

use crate::{
    bpf::made,
    cgroup::Cgroup,
    names,
    notify::NotifySocket,
    process::{KillOnDrop, beside, stdout_of},
    wait::{TIMEOUT, eventually, eventually_seen},
};

/// An agent's surroundings, and the daemon if it runs.
#[derive(Debug)]
pub struct Agent {
    dir: TempDir,
    name: String,
    binary: PathBuf,
    notify: NotifySocket,
    daemon: Option<KillOnDrop>,
    log_format: &'static str,
    /// How many descriptors the service manager says that it keeps.
    fd_store: Option<usize>,
    /// The cgroup it attaches to.
    pub cgroup: Cgroup,
}

impl Agent {
    /// Makes the surroundings for this binary; no daemon runs yet.
    ///
    /// # Errors
    ///
    /// If something cannot be made.
    pub fn new(binary: PathBuf) -> anyhow::Result<Self> {
        Self::new_in(binary, &tempfile::env::temp_dir())
    }

    /// As [`Agent::new`], with its files and state in a directory below this one.
    ///
    /// # Errors
    ///
    /// As [`Agent::new`].
    pub fn new_in(binary: PathBuf, parent: &Path) -> anyhow::Result<Self> {
        let dir = TempDir::new_in(parent)?;
        fs::create_dir_all(dir.path().join("etc/policies.d"))?;
        let notify = NotifySocket::new(dir.path())?;
        Ok(Self {
            name: names::unique(),
            binary,
            notify,
            daemon: None,
            log_format: "text",
            fd_store: None,
            cgroup: Cgroup::new()?,
            dir,
        })
    }

    /// A command of the binary for this daemon.
    #[must_use]
    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(&self.binary);
        command
            .args(args)
            .env("RTO_AGENT_SOCKET", self.socket())
            .env("RTO_AGENT_CONFIG", self.config());
        command
    }

    /// The configuration file.
    #[must_use]
    pub fn config(&self) -> PathBuf {
        self.dir.path().join("etc/config.toml")
    }

    /// The directory beside it.
    #[must_use]
    pub fn policies_dir(&self) -> PathBuf {
        self.dir.path().join("etc/policies.d")
    }

    /// A directory of its own.
    #[must_use]
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// The control socket.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("control.sock")
    }

    /// Where the agent pins.
    #[must_use]
    pub fn pin_dir(&self) -> PathBuf {
        Path::new("/sys/fs/bpf").join(&self.name)
    }

    /// The directory of the one set of pins.
    ///
    /// # Errors
    ///
    /// If there is none, or more than one.
    pub fn pins(&self) -> anyhow::Result<PathBuf> {
        pins_in(&self.pin_dir())
    }

    /// The text of a configuration file with `[agent]` for this agent and these policies.
    /// Lines before the first table belong to `[agent]`.
    #[must_use]
    pub fn config_text(&self, policies: &str) -> String {
        format!(
            "[agent]\ncgroup = \"{}\"\npin_dir = \"{}\"\nsocket = \"{}\"\nstate_dir = \"{}\"\n\
             persistent_dir = \"{}\"\n{policies}",
            self.cgroup.path().display(),
            self.pin_dir().display(),
            self.socket().display(),
            self.dir.path().join("state").display(),
            self.persistent_dir().display(),
        )
    }

    /// Where the agent keeps what outlives a reboot.
    #[must_use]
    pub fn persistent_dir(&self) -> PathBuf {
        self.dir.path().join("lasting")
    }

    /// Writes the configuration file in place.
    ///
    /// # Errors
    ///
    /// If it cannot be written.
    pub fn configure(&self, policies: &str) -> anyhow::Result<()> {
        Ok(fs::write(self.config(), self.config_text(policies))?)
    }

    /// Starts the daemon and waits until it says it is ready.
    ///
    /// # Errors
    ///
    /// If it does not; the error has its log.
    pub fn start(&mut self) -> anyhow::Result<()> {
        self.start_under(&[])
    }

    /// As [`Self::start`], for where that may take longer.
    ///
    /// # Errors
    ///
    /// As [`Self::start`].
    pub fn start_within(&mut self, limit: Duration) -> anyhow::Result<()> {
        self.spawn_under(&[])?;
        self.notified_within("READY=1", limit).map(drop)
    }

    /// As [`Self::start`], by way of another program with these arguments.
    ///
    /// # Errors
    ///
    /// As [`Self::start`].
    pub fn start_under(&mut self, wrapper: &[String]) -> anyhow::Result<()> {
        self.spawn_under(wrapper)?;
        self.notified("READY=1").map(drop)
    }

    /// As [`Self::start_under`], without waiting.
    ///
    /// # Errors
    ///
    /// If it cannot be started.
    pub fn spawn_under(&mut self, wrapper: &[String]) -> anyhow::Result<()> {
        self.notify.drain()?;
        let log = fs::File::options()
            .create(true)
            .append(true)
            .open(self.log_path())?;
        let handed_over = self.notify.handed_over()?;
        let listener = (!handed_over.is_empty()).then_some(LISTENER);
        let words: Vec<_> = listener
            .into_iter()
            .flatten()
            .map(Into::into)
            .chain(wrapper.iter().map(Into::into))
            .chain([self.binary.clone().into_os_string()])
            .collect();
        let mut command = Command::new(&words[0]);
        hand_over(&mut command, handed_over)?;
        if let Some(max) = self.fd_store {
            command.env("FDSTORE", max.to_string());
        }
        let child = command
            .args(&words[1..])
            .arg("run")
            .arg("--config")
            .arg(self.config())
            .args(["--log-format", self.log_format])
            .env("NOTIFY_SOCKET", self.notify.path())
            .env("RTO_AGENT_LOG", "info")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()?;
        self.daemon = Some(KillOnDrop(child));
        Ok(())
    }

    /// Waits for the end of a daemon that ends by itself; its exit status.
    ///
    /// # Errors
    ///
    /// If none runs, or it does not end soon.
    pub fn ended(&mut self) -> anyhow::Result<std::process::ExitStatus> {
        let daemon = self.daemon.as_mut().context("no daemon runs")?;
        let status = eventually("end of the daemon", TIMEOUT, || Ok(daemon.0.try_wait()?));
        let status = status.with_context(|| self.log())?;
        self.daemon = None;
        Ok(status)
    }

    /// Waits for a message of the daemon to the service manager.
    ///
    /// # Errors
    ///
    /// If it does not come; the error has the log.
    pub fn notified(&mut self, line: &str) -> anyhow::Result<Vec<String>> {
        self.notified_within(line, TIMEOUT)
    }

    fn notified_within(&mut self, line: &str, limit: Duration) -> anyhow::Result<Vec<String>> {
        let daemon = &mut self.daemon;
        let gone = || {
            let ended = daemon.as_mut()?.0.try_wait().ok()??;
            Some(ended.to_string())
        };
        let messages = self.notify.wait_for(line, limit, gone);
        messages.with_context(|| format!("the daemon's log:\n{}", self.log()))
    }

    /// Whether the daemon has sent the service manager this message since it was started, also if it has
    /// ended meanwhile.
    ///
    /// # Errors
    ///
    /// If the socket cannot be read.
    pub fn has_notified(&self, line: &str) -> anyhow::Result<bool> {
        let messages = self.notify.drain()?;
        let mut lines = messages.iter().flat_map(|message| message.lines());
        Ok(lines.any(|l| l.starts_with(line)))
    }

    /// Has the service manager keep descriptors over a restart: so many, of as many as it says.
    pub fn keep_descriptors(&mut self, says: usize, keeps: usize) {
        self.fd_store = Some(says);
        self.notify.keep(keeps);
    }

    /// The names of the descriptors that the service manager keeps, once it has read all that was sent until now.
    ///
    /// # Errors
    ///
    /// If the socket cannot be read.
    pub fn kept_descriptors(&self) -> anyhow::Result<Vec<String>> {
        self.notify.drain()?;
        Ok(self.notify.kept())
    }

    /// Has daemons that are started from now on log in this form.
    pub fn log_as(&mut self, format: &'static str) {
        self.log_format = format;
    }

    /// What the daemon logged.
    #[must_use]
    pub fn log(&self) -> String {
        fs::read_to_string(self.log_path()).unwrap_or_default()
    }

    fn log_path(&self) -> PathBuf {
        self.dir.path().join("log")
    }

    /// Pid of the running daemon.
    ///
    /// # Errors
    ///
    /// If none runs.
    pub fn pid(&self) -> anyhow::Result<Pid> {
        let child = self.daemon.as_ref().context("no daemon runs")?;
        Ok(Pid::from_raw(i32::try_from(child.0.id())?))
    }

    /// Sends the daemon a signal.
    ///
    /// # Errors
    ///
    /// If none runs.
    pub fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        Ok(kill(self.pid()?, signal)?)
    }

    /// Sends the daemon a signal and waits for its end; its exit status.
    ///
    /// # Errors
    ///
    /// If none runs.
    pub fn end(&mut self, signal: Signal) -> anyhow::Result<std::process::ExitStatus> {
        self.signal(signal)?;
        let mut child = self.daemon.take().context("no daemon runs")?;
        Ok(child.0.wait()?)
    }

    /// Runs a client verb of the CLI.
    ///
    /// # Errors
    ///
    /// If it cannot be run (not: if it fails).
    pub fn try_cli(&self, args: &[&str]) -> anyhow::Result<Output> {
        Ok(self.command(args).stdin(Stdio::null()).output()?)
    }

    /// Runs a client verb that must succeed; what it printed.
    ///
    /// # Errors
    ///
    /// If it fails.
    pub fn cli(&self, args: &[&str]) -> anyhow::Result<String> {
        stdout_of(&args.join(" "), self.try_cli(args)?)
            .with_context(|| format!("the daemon's log:\n{}", self.log()))
    }

    /// Runs a verb that must fail with status 1; what it said on stderr.
    ///
    /// # Errors
    ///
    /// If it succeeds, or fails otherwise.
    pub fn cli_fails(&self, args: &[&str]) -> anyhow::Result<String> {
        let output = self.try_cli(args)?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(
            output.status.code() == Some(1),
            "{args:?}: {}: {said}",
            output.status
        );
        Ok(said)
    }

    /// Runs a verb with `--json`; what it printed, whatever its exit status.
    ///
    /// # Errors
    ///
    /// If it prints no JSON.
    pub fn json(&self, args: &[&str]) -> anyhow::Result<Value> {
        let output = self.try_cli(&[args, &["--json"]].concat())?;
        serde_json::from_slice(&output.stdout).with_context(|| {
            format!(
                "{args:?}: {}{}",
                String::from_utf8_lossy(&output.stdout),
                String::from_utf8_lossy(&output.stderr)
            )
        })
    }

    /// Waits until `status` shows something.
    ///
    /// # Errors
    ///
    /// If it does not in time.
    pub fn wait_status(&self, what: &str, is: impl Fn(&Value) -> bool) -> anyhow::Result<Value> {
        eventually_seen(what, TIMEOUT, || self.json(&["status"]), is).with_context(|| self.log())
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the daemon's log:\n{}", self.log());
        }
        drop(self.daemon.take());
        // Not by the verb: also what a broken agent has left.
        let _gone = fs::remove_dir_all(self.pin_dir());
    }
}

/// The directory of the one set of pins below a directory of an agent's.
///
/// # Errors
///
/// If there is none, or more than one.
pub fn pins_in(pin_dir: &Path) -> anyhow::Result<PathBuf> {
    let mut dirs: Vec<PathBuf> = fs::read_dir(pin_dir)?
        .map(|entry| Ok(entry?.path()))
        .collect::<io::Result<_>>()?;
    // Complete ones alone, and not what is about to be removed.
    dirs.retain(|dir| {
        let name = dir.file_name().unwrap_or_default().to_string_lossy();
        !name.starts_with("staging-") && !name.starts_with("old-")
    });
    match <[PathBuf; 1]>::try_from(dirs) {
        Ok([dir]) => Ok(dir),
        Err(dirs) => bail!("not one set of pins: {dirs:?}"),
    }
}

/// Says whom the descriptors are for, which is known only to the process itself.
const LISTENER: [&str; 4] = ["sh", "-c", "LISTEN_PID=$$ exec \"$@\"", "listener"];
/// The first descriptor of sd_listen_fds(3).
const LISTEN_FDS_START: i32 = 3;
/// Where there is nothing else.
const FREE_FDS: i32 = 200;

/// Hands these over as a service manager does.
fn hand_over(command: &mut Command, kept: Vec<(String, OwnedFd)>) -> anyhow::Result<()> {
    if kept.is_empty() {
        return Ok(());
    }
    let (names, fds): (Vec<_>, Vec<_>) = kept.into_iter().unzip();
    command
        .env("LISTEN_FDS", fds.len().to_string())
        .env("LISTEN_FDNAMES", names.join(":"));
    let moved = |fd: OwnedFd| fcntl(fd, FcntlArg::F_DUPFD_CLOEXEC(FREE_FDS)).map(made);
    let fds: Vec<_> = fds.into_iter().map(moved).collect::<nix::Result<_>>()?;
    // SAFETY: between fork and exec only system calls are made; nothing is allocated.
    unsafe {
        command.pre_exec(move || {
            for (fd, target) in fds.iter().zip(LISTEN_FDS_START..) {
                if libc::dup2(fd.as_raw_fd(), target) < 0 {
                    return Err(io::Error::last_os_error());
                }
            }
            Ok(())
        });
    }
    Ok(())
}

/// The agent's binary: the one given (or RTO_AGENT_BIN), or beside this program, or on the path.
///
/// # Errors
///
/// If there is none.
pub fn find(given: Option<&Path>) -> anyhow::Result<PathBuf> {
    let named = std::env::var_os("RTO_AGENT_BIN").map(PathBuf::from);
    if let Some(path) = given.map(Path::to_owned).or(named) {
        ensure!(path.is_file(), "{}: no such program", path.display());
        return Ok(path);
    }
    let paths = std::env::var_os("PATH").unwrap_or_default();
    let on_path = std::env::split_paths(&paths).map(|dir| dir.join("rto-agent"));
    beside("rto-agent")
        .ok()
        .or_else(|| on_path.into_iter().find(|path| path.is_file()))
        .context("rto-agent is neither beside this program nor on the path: give --agent PATH")
}
