//! A private agent that tests drive from outside. It has its own files, socket, pins and cgroup, which are removed with
//! it.

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
    json::has,
    names,
    notify::NotifySocket,
    process::{KillOnDrop, beside, refusal, stdout_of},
    wait::{TIMEOUT, eventually, eventually_seen},
};

/// The directories, socket and cgroup of one agent, and its daemon while it runs.
#[derive(Debug)]
pub struct Agent {
    dir: TempDir,
    name: String,
    binary: PathBuf,
    notify: NotifySocket,
    daemon: Option<KillOnDrop>,
    log_format: &'static str,
    /// The number of descriptors that the service manager announces it can keep (`FDSTORE`).
    fd_store: Option<usize>,
    /// The cgroup that the daemon attaches to.
    pub cgroup: Cgroup,
}

impl Agent {
    /// Creates the directories, socket and cgroup for this binary; the daemon is not started yet.
    pub fn new(binary: PathBuf) -> anyhow::Result<Self> {
        Self::new_in(binary, &tempfile::env::temp_dir())
    }

    /// As [`Agent::new`], with the agent's files and state below `parent`.
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

    /// A command that runs the binary as a client of this daemon.
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

    /// The directory of policy files beside it.
    #[must_use]
    pub fn policies_dir(&self) -> PathBuf {
        self.dir.path().join("etc/policies.d")
    }

    /// The agent's private directory.
    #[must_use]
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// The control socket.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("control.sock")
    }

    /// The directory below which the agent pins.
    #[must_use]
    pub fn pin_dir(&self) -> PathBuf {
        Path::new("/sys/fs/bpf").join(&self.name)
    }

    /// The directory that holds the agent's pins.
    pub fn pins(&self) -> anyhow::Result<PathBuf> {
        pins_in(&self.pin_dir())
    }

    /// The text of a configuration file: `[agent]` for this agent, followed by `policies`. Lines of `policies` before
    /// its first table belong to `[agent]`.
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

    /// The directory for state that survives a reboot.
    #[must_use]
    pub fn persistent_dir(&self) -> PathBuf {
        self.dir.path().join("lasting")
    }

    /// Overwrites the configuration file in place.
    pub fn configure(&self, policies: &str) -> anyhow::Result<()> {
        Ok(fs::write(self.config(), self.config_text(policies))?)
    }

    /// Overwrites the configuration file and loads it.
    pub fn load(&self, policies: &str) -> anyhow::Result<()> {
        self.configure(policies)?;
        self.cli(&["reload"]).map(drop)
    }

    /// Starts the daemon and waits until it reports that it is ready.
    pub fn start(&mut self) -> anyhow::Result<()> {
        self.start_under(&[])
    }

    /// As [`Self::start`], with another time limit.
    pub fn start_within(&mut self, limit: Duration) -> anyhow::Result<()> {
        self.spawn_under(&[])?;
        self.notified_within("READY=1", limit).map(drop)
    }

    /// As [`Self::start`], through a wrapper program and its arguments.
    pub fn start_under(&mut self, wrapper: &[String]) -> anyhow::Result<()> {
        self.spawn_under(wrapper)?;
        self.notified("READY=1").map(drop)
    }

    /// Starts a daemon that must fail; returns the error and its log.
    pub fn start_fails(&mut self) -> anyhow::Result<String> {
        let error = self.start().err().context("it started")?;
        Ok(format!("{error:#}"))
    }

    /// Ends the daemon with a signal and starts another.
    pub fn restart(&mut self, signal: Signal) -> anyhow::Result<()> {
        self.end(signal)?;
        self.start()
    }

    /// As [`Self::start_under`], without waiting until the daemon is ready.
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

    /// Waits until the daemon exits by itself, and returns its exit status.
    pub fn ended(&mut self) -> anyhow::Result<std::process::ExitStatus> {
        let daemon = self.daemon.as_mut().context("no daemon runs")?;
        let status = eventually("end of the daemon", TIMEOUT, || Ok(daemon.0.try_wait()?));
        let status = status.with_context(|| self.log())?;
        self.daemon = None;
        Ok(status)
    }

    /// Waits until the daemon sends this message to the service manager.
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

    /// Whether the daemon has sent this message to the service manager since it started. Messages of a daemon that has
    /// exited count as well.
    pub fn has_notified(&self, line: &str) -> anyhow::Result<bool> {
        let messages = self.notify.drain()?;
        let mut lines = messages.iter().flat_map(|message| message.lines());
        Ok(lines.any(|l| l.starts_with(line)))
    }

    /// Makes the service manager keep `keeps` descriptors over a restart, while it announces that it keeps `says`.
    pub fn keep_descriptors(&mut self, says: usize, keeps: usize) {
        self.fd_store = Some(says);
        self.notify.keep(keeps);
    }

    /// The names of the descriptors that the service manager keeps, after it has read every message sent so far.
    pub fn kept_descriptors(&self) -> anyhow::Result<Vec<String>> {
        self.notify.drain()?;
        Ok(self.notify.kept())
    }

    /// Sets the log format of daemons that are started later.
    pub fn log_as(&mut self, format: &'static str) {
        self.log_format = format;
    }

    /// The daemon's log.
    #[must_use]
    pub fn log(&self) -> String {
        fs::read_to_string(self.log_path()).unwrap_or_default()
    }

    /// Asserts that the daemon has logged this text.
    pub fn logs(&self, text: &str) -> anyhow::Result<()> {
        let log = self.log();
        ensure!(log.contains(text), "{text:?} is missing: {log}");
        Ok(())
    }

    /// Waits until the daemon has logged this text.
    pub fn wait_log(&self, text: &str) -> anyhow::Result<String> {
        eventually_seen(text, TIMEOUT, || Ok(self.log()), |log| log.contains(text))
    }

    fn log_path(&self) -> PathBuf {
        self.dir.path().join("log")
    }

    /// The pid of the running daemon.
    pub fn pid(&self) -> anyhow::Result<Pid> {
        let child = self.daemon.as_ref().context("no daemon runs")?;
        Ok(Pid::from_raw(i32::try_from(child.0.id())?))
    }

    /// Sends the daemon a signal.
    pub fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        Ok(kill(self.pid()?, signal)?)
    }

    /// Sends the daemon a signal, waits until it exits, and returns its exit status.
    pub fn end(&mut self, signal: Signal) -> anyhow::Result<std::process::ExitStatus> {
        self.signal(signal)?;
        let mut child = self.daemon.take().context("no daemon runs")?;
        Ok(child.0.wait()?)
    }

    /// Runs a client command of the CLI. A command that fails is not an error.
    pub fn try_cli(&self, args: &[&str]) -> anyhow::Result<Output> {
        Ok(self.command(args).stdin(Stdio::null()).output()?)
    }

    /// Runs a client command that must succeed, and returns what it prints.
    pub fn cli(&self, args: &[&str]) -> anyhow::Result<String> {
        stdout_of(&args.join(" "), self.try_cli(args)?)
            .with_context(|| format!("the daemon's log:\n{}", self.log()))
    }

    /// Runs a client command that must fail with status 1, and returns its stderr.
    pub fn cli_fails(&self, args: &[&str]) -> anyhow::Result<String> {
        refusal(&self.try_cli(args)?).with_context(|| format!("{args:?}"))
    }

    /// The same for a command line, split at blanks.
    pub fn cli_line(&self, line: &str) -> anyhow::Result<String> {
        self.cli(&line.split_whitespace().collect::<Vec<_>>())
    }

    /// Runs a client command for these CIDRs, which must succeed.
    pub fn cli_of(&self, args: &[&str], cidrs: &[String]) -> anyhow::Result<String> {
        let cidrs: Vec<&str> = cidrs.iter().map(String::as_str).collect();
        self.cli(&[args, &cidrs].concat())
    }

    /// Starts another daemon with this configuration, which must be refused; returns its error.
    pub fn second_is_refused(&self, config: &Path) -> anyhow::Result<String> {
        let mut second = self.command(&["run", "--log-format", "text", "--config"]);
        let error = refusal(&second.arg(config).output()?)?;
        ensure!(error.contains("another rto-agent"), "{error}");
        Ok(error)
    }

    /// Runs a client command that must succeed and print this text.
    pub fn cli_says(&self, args: &[&str], text: &str) -> anyhow::Result<()> {
        let stdout = self.cli(args)?;
        ensure!(stdout.contains(text), "{args:?}: {stdout}");
        Ok(())
    }

    /// Runs a client command that must fail with status 1 and this error.
    pub fn cli_refuses(&self, args: &[&str], error: &str) -> anyhow::Result<()> {
        let message = self.cli_fails(args)?;
        ensure!(message.contains(error), "{args:?}: {message}");
        Ok(())
    }

    /// Runs a client command with `--json` and returns what it prints, whatever its exit status.
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

    /// The JSON of `status`.
    pub fn status(&self) -> anyhow::Result<Value> {
        self.json(&["status"])
    }

    /// Asserts that `status` has these values; returns all.
    pub fn status_has(&self, expected: Value) -> anyhow::Result<Value> {
        let status = self.status()?;
        ensure!(has(&status, &expected), "{expected} is not in {status:#}");
        Ok(status)
    }

    /// The counters of a policy as in the JSON of `stats`, and beside its directions each counter
    /// summed over them.
    pub fn counted(&self, policy: &str) -> anyhow::Result<Value> {
        let mut counted = self.json(&["stats"])?["policies"][policy].clone();
        let sum = |a: &Value, b: &Value| a.as_u64().unwrap_or(0) + b.as_u64().unwrap_or(0);
        for direction in ["active", "passive", "unknown"] {
            let counters = counted[direction].as_object().cloned();
            for (name, value) in counters.with_context(|| format!("no policy {policy}"))? {
                let former = counted[&name].take();
                counted[&name] = match value {
                    Value::Number(_) => sum(&former, &value).into(),
                    Value::Array(steps) => {
                        let steps = steps.iter().enumerate();
                        steps.map(|(i, step)| sum(&former[i], step)).collect()
                    }
                    Value::Object(none) if none.is_empty() && !former.is_null() => former,
                    other => other,
                };
            }
        }
        Ok(counted)
    }

    /// As [`Self::wait_status`], for the counters of a policy.
    pub fn wait_counted(
        &self,
        policy: &str,
        what: &str,
        is: impl Fn(&Value) -> bool,
    ) -> anyhow::Result<Value> {
        eventually_seen(what, TIMEOUT, || self.counted(policy), is).with_context(|| self.log())
    }

    /// Waits until `status` satisfies a condition.
    pub fn wait_status(&self, what: &str, is: impl Fn(&Value) -> bool) -> anyhow::Result<Value> {
        eventually_seen(what, TIMEOUT, || self.status(), is).with_context(|| self.log())
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the daemon's log:\n{}", self.log());
        }
        drop(self.daemon.take());
        // Not with `rto-agent detach`: pins of a broken agent must go as well.
        let _gone = fs::remove_dir_all(self.pin_dir());
    }
}

/// The directory that holds the pins, below an agent's pin directory.
pub fn pins_in(pin_dir: &Path) -> anyhow::Result<PathBuf> {
    let mut dirs: Vec<PathBuf> = fs::read_dir(pin_dir)?
        .map(|entry| Ok(entry?.path()))
        .collect::<io::Result<_>>()?;
    // Only complete sets: neither one that is being built nor one that is about to be removed.
    dirs.retain(|dir| {
        let name = dir.file_name().unwrap_or_default().to_string_lossy();
        !name.starts_with("staging-") && !name.starts_with("old-")
    });
    match <[PathBuf; 1]>::try_from(dirs) {
        Ok([dir]) => Ok(dir),
        Err(dirs) => bail!("not one set of pins: {dirs:?}"),
    }
}

/// Sets LISTEN_PID, which must be the pid of the process that receives the descriptors (sd_listen_fds(3)).
const LISTENER: [&str; 4] = ["sh", "-c", "LISTEN_PID=$$ exec \"$@\"", "listener"];
/// The first descriptor of sd_listen_fds(3).
const LISTEN_FDS_START: i32 = 3;
/// Descriptors of this number and above are unused in the child.
const FREE_FDS: i32 = 200;

/// Passes these descriptors to the command as a service manager does.
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

/// The agent's binary: `given`, else RTO_AGENT_BIN, else one beside this program, else one on the path.
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
        .context(
            "rto-agent is neither in the directory of this program nor in PATH: give --agent \
                  PATH",
        )
}
