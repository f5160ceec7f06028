//! Commands to a child process and its replies, as lines of JSON.

use std::{
    io::{BufRead as _, BufReader, Write as _},
    os::fd::AsFd as _,
    process::{ChildStdin, ChildStdout, Command, Stdio},
};

use anyhow::{Context as _, bail, ensure};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use serde::{Serialize, de::DeserializeOwned};

use crate::process::KillOnDrop;

/// A child process that reads commands on stdin, a line each, and writes a reply for each on stdout:
/// `{"Ok": VALUE}` or `{"Err": "REASON"}`.
#[derive(Debug)]
pub struct ControlChannel {
    _child: KillOnDrop,
    commands: ChildStdin,
    replies: BufReader<ChildStdout>,
}

impl ControlChannel {
    /// Starts the child.
    pub fn start(command: &mut Command) -> anyhow::Result<Self> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = KillOnDrop(command.spawn()?);
        let commands = child.0.stdin.take().context("no stdin")?;
        let replies = BufReader::new(child.0.stdout.take().context("no stdout")?);
        Ok(Self {
            _child: child,
            commands,
            replies,
        })
    }

    /// Sends a command and waits for its reply.
    pub fn request<T: DeserializeOwned>(&mut self, command: &impl Serialize) -> anyhow::Result<T> {
        self.send(command)?;
        let text = || serde_json::to_string(command).unwrap_or_default();
        self.recv().with_context(text)
    }

    /// Sends a command whose reply is read later.
    pub fn send(&mut self, command: &impl Serialize) -> anyhow::Result<()> {
        let line = serde_json::to_string(command)?;
        writeln!(self.commands, "{line}").context(line)
    }

    /// Reads the next reply. The first one reports that the child is ready.
    pub fn recv<T: DeserializeOwned>(&mut self) -> anyhow::Result<T> {
        let mut line = String::new();
        self.replies.read_line(&mut line)?;
        ensure!(!line.is_empty(), "the child ended");
        match serde_json::from_str(&line).with_context(|| line.trim().to_owned())? {
            Ok(value) => Ok(value),
            Err::<_, String>(reason) => bail!(reason),
        }
    }

    /// Whether [`Self::recv`] would return at once.
    pub fn has_reply(&self) -> anyhow::Result<bool> {
        if !self.replies.buffer().is_empty() {
            return Ok(true);
        }
        let mut fds = [PollFd::new(
            self.replies.get_ref().as_fd(),
            PollFlags::POLLIN,
        )];
        Ok(poll(&mut fds, PollTimeout::ZERO)? > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn channel_receives_replies_errors_and_end() {
        let script = r#"echo '{"Ok": 1}'; read line; echo "{\"Err\": $line}"; read line; echo no"#;
        let mut channel = ControlChannel::start(Command::new("sh").args(["-c", script])).unwrap();
        assert_eq!(channel.recv::<u32>().unwrap(), 1);
        let error = channel.request::<()>(&"why").unwrap_err();
        assert_eq!(format!("{error:#}"), "\"why\": why");
        assert!(!channel.has_reply().unwrap());
        let error = channel.request::<()>(&0).unwrap_err();
        assert!(format!("{error:#}").starts_with("0: no: "), "{error:#}");
        let error = channel.recv::<()>().unwrap_err();
        assert_eq!(error.to_string(), "the child ended");
    }
}
