//! Runs `rto-agent watch --json`, or another command that prints lines of JSON, beside a test.

use std::{
    io::{BufRead as _, BufReader},
    process::Stdio,
    sync::mpsc::{Receiver, RecvTimeoutError, channel},
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use rto_agent_common::{event::EventControl, maps::EVENT_CONTROL};
use rto_testbed::{env::TestEnv, process::KillOnDrop, wait::eventually_seen};
use serde_json::Value;

use crate::pinned;

/// Longest wait for a line.
const LIMIT: Duration = Duration::from_secs(20);

/// The command; killed by its pid when dropped.
#[derive(Debug)]
pub struct Watcher {
    _child: KillOnDrop,
    lines: Receiver<Value>,
}

impl Watcher {
    /// Starts `watch`, and returns when the program sends all events.
    pub fn start(env: &TestEnv, args: &[&str]) -> anyhow::Result<Self> {
        let watcher = Self::of(env, &[&["watch", "--json"], args].concat())?;
        // SYN-ACK events are switched on last.
        eventually_seen(
            "all events",
            LIMIT,
            || sent(env),
            |sent| *sent == Sent::Live,
        )
        .with_context(|| env.log())?;
        Ok(watcher)
    }

    /// Starts another command.
    pub fn of(env: &TestEnv, args: &[&str]) -> anyhow::Result<Self> {
        let child = env
            .command(args)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn();
        let mut child = KillOnDrop(child?);
        let stdout = BufReader::new(child.0.stdout.take().context("no stdout")?);
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                // A line that is not JSON is passed on as a string. Sending fails after the test has dropped the
                // receiver.
                let value = serde_json::from_str(&line).unwrap_or(Value::String(line));
                let _over = sender.send(value);
            }
        });
        Ok(Self {
            _child: child,
            lines,
        })
    }

    /// The next line that satisfies a condition; other lines are skipped.
    pub fn next(&self, what: &str, is: impl Fn(&Value) -> bool) -> anyhow::Result<Value> {
        let mut others = Vec::new();
        let end = Instant::now() + LIMIT;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            match self.lines.recv_timeout(left) {
                Ok(line) if is(&line) => return Ok(line),
                Ok(line) => others.push(line),
                Err(RecvTimeoutError::Timeout) => bail!("no {what}, but {others:#?}"),
                Err(RecvTimeoutError::Disconnected) => {
                    bail!("it ended; no {what}, but: {others:#?}")
                }
            }
        }
    }

    /// The lines that have already arrived.
    #[must_use]
    pub fn so_far(&self) -> Vec<Value> {
        self.lines.try_iter().collect()
    }
}

/// Which events the program sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sent {
    /// Nothing.
    Nothing,
    /// The events of its own callbacks.
    Callbacks,
    /// Additionally, SYN-ACK retransmissions.
    Live,
}

/// Which events the program sends, according to the map in the kernel.
pub fn sent(env: &TestEnv) -> anyhow::Result<Sent> {
    let control: EventControl = pinned::get(env, EVENT_CONTROL, 0)?;
    match control.on {
        0 => Ok(Sent::Nothing),
        1 => Ok(Sent::Callbacks),
        2 => Ok(Sent::Live),
        other => bail!("{other}"),
    }
}
