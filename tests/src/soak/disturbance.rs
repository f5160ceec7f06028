//! The disturbances of the agent. Each restores the original state.

use std::{
    fmt, fs,
    io::Write as _,
    path::PathBuf,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use nix::{
    sys::signal::Signal,
    time::{ClockId, clock_gettime, clock_settime},
};
use rand::{SeedableRng as _, rngs::ChaCha8Rng, seq::SliceRandom as _};
use rto_testbed::{agent::Agent, foreign::Foreign, wait::eventually_seen};
use serde::Serialize;
use serde_json::Value;

use super::{
    config::{Config, Entries, listed},
    look::Shared,
    network::LOST,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Disturbance {
    /// Loads another configuration with `reload`.
    Reload,
    /// Loads another configuration with SIGHUP.
    Sighup,
    /// Loads a configuration that is rejected.
    InvalidConfig,
    /// Adds and removes runtime entries.
    RuntimeEntries,
    /// Fills the file system of the state directory.
    FullDisk,
    /// Sets the wall clock forwards.
    ClockForwards,
    /// Sets the wall clock backwards.
    ClockBackwards,
    /// Attaches a foreign sock_ops program.
    ForeignProgram,
    /// Kills the daemon and starts another.
    Kill,
    /// Stops the daemon with SIGTERM and starts another.
    Restart,
}

use Disturbance as D;

/// Disturbances after which the same daemon runs.
const LASTING: [Disturbance; 8] = [
    D::Reload,
    D::Sighup,
    D::InvalidConfig,
    D::RuntimeEntries,
    D::FullDisk,
    D::ClockForwards,
    D::ClockBackwards,
    D::ForeignProgram,
];
/// Disturbances that end the daemon.
const ENDING: [Disturbance; 2] = [D::Kill, D::Restart];

/// Chooses the order of disturbances; each occurs once per round.
pub(super) struct Plan(ChaCha8Rng);

impl Plan {
    pub(super) fn new(seed: u64) -> Self {
        Self(ChaCha8Rng::seed_from_u64(seed))
    }

    /// The next round. With `keeps_daemon` it has no disturbance that ends the daemon.
    pub(super) fn round(&mut self, keeps_daemon: bool) -> Vec<Disturbance> {
        let mut round = LASTING.to_vec();
        if !keeps_daemon {
            round.extend(ENDING);
        }
        round.shuffle(&mut self.0);
        round
    }
}

/// Longest wait for a state: an emulated processor on a busy host is slow.
const PATIENCE: Duration = Duration::from_secs(150);
/// Shortest duration of a disturbance, so that connections are made during it.
const LASTS: Duration = Duration::from_secs(2);
/// How far the clock is set.
const DAYS: Duration = Duration::from_secs(3 * 24 * 3600);
/// The initial RTO that the foreign program sets, jiffies: 300 ms at HZ 250.
const FOREIGN_JIFFIES: i32 = 75;
/// More entries than fit into the free part of the last page of a full disk.
const TOO_MANY: u16 = 500;

/// The agent that is disturbed.
pub(super) struct Disturbed<'a> {
    pub(super) agent: Agent,
    pub(super) shared: &'a Shared,
}

impl Disturbed<'_> {
    /// Applies a disturbance, checks the agent's reaction, and undoes it.
    pub(super) fn disturb(&mut self, disturbance: Disturbance) -> anyhow::Result<()> {
        match disturbance {
            D::Reload => self.reload(|agent| agent.cli(&["reload"]).map(drop)),
            D::Sighup => self.reload(|agent| agent.signal(Signal::SIGHUP)),
            D::InvalidConfig => self.invalid_config(),
            D::RuntimeEntries => self.runtime_entries(),
            D::FullDisk => self.full_disk(),
            D::ClockForwards => self.clock(|now| now + DAYS),
            D::ClockBackwards => self.clock(|now| now.saturating_sub(DAYS)),
            D::ForeignProgram => self.foreign_program(),
            D::Kill => {
                self.end(Signal::SIGKILL)?;
                thread::sleep(LASTS);
                self.start()
            }
            D::Restart => {
                self.end(Signal::SIGTERM)?;
                self.start()
            }
        }
    }

    /// Starts the daemon and waits until the usual entries are active.
    pub(super) fn start(&mut self) -> anyhow::Result<()> {
        self.agent.start_within(PATIENCE)?;
        self.shared.now().pid = self.agent.pid()?.as_raw();
        self.expect(&Config::Usual.entries())
    }

    /// Undoes what a failed disturbance has left, as far as possible.
    pub(super) fn recover(&mut self) -> anyhow::Result<()> {
        let _none_runs = self.end(Signal::SIGKILL);
        let _not_there = fs::remove_file(self.stuffing());
        let list = self.state_dir().join("manual.json");
        if list.exists() {
            fs::remove_file(list)?;
        }
        self.agent.configure(&Config::Usual.policies())?;
        self.start().context("after a failure")
    }

    fn end(&mut self, signal: Signal) -> anyhow::Result<()> {
        self.shared.now().pid = 0;
        self.agent.end(signal).map(drop)
    }

    pub(super) fn state_dir(&self) -> PathBuf {
        self.agent.dir().join("state")
    }

    fn stuffing(&self) -> PathBuf {
        self.state_dir().join("stuffing")
    }

    /// Waits until exactly these entries are active and the agent is healthy.
    fn expect(&self, entries: &Entries) -> anyhow::Result<()> {
        let list = || Ok(listed(&self.agent.json(&["list"])?));
        eventually_seen("entries", PATIENCE, list, |seen| seen == entries)?;
        self.wait_status("health", |status| {
            status["healthy"] == true && status["in_sync"] == true
        })
    }

    fn wait_status(&self, what: &str, is: impl Fn(&Value) -> bool) -> anyhow::Result<()> {
        let status = || self.agent.json(&["status"]);
        eventually_seen(what, PATIENCE, status, is).map(drop)
    }

    fn reload(&self, reload: impl Fn(&Agent) -> anyhow::Result<()>) -> anyhow::Result<()> {
        for (config, lasts) in [(Config::Other, LASTS), (Config::Usual, Duration::ZERO)] {
            self.agent.configure(&config.policies())?;
            reload(&self.agent)?;
            self.expect(&config.entries())?;
            thread::sleep(lasts);
        }
        Ok(())
    }

    fn invalid_config(&self) -> anyhow::Result<()> {
        self.agent
            .configure("[policy.near]\ncidrs = [\"10.90.0.0/24\"]\ninitial_rto = \"soon\"\n")?;
        let error = self.agent.cli_fails(&["reload"])?;
        ensure!(error.contains("initial_rto"), "{error}");
        let is_told = |status: &Value| status["healthy"] == false;
        self.wait_status("refusal", is_told)?;
        thread::sleep(LASTS);
        let list = listed(&self.agent.json(&["list"])?);
        ensure!(list == Config::Usual.entries(), "in force: {list:?}");
        self.agent.configure(&Config::Usual.policies())?;
        self.agent.cli(&["reload"])?;
        self.expect(&Config::Usual.entries())
    }

    /// One runtime entry overrides a CIDR of the files that has connections; another one expires.
    fn runtime_entries(&self) -> anyhow::Result<()> {
        let mut entries = Config::Usual.entries();
        let overridden = format!("{}/32", LOST[0]);
        let own = "10.92.0.0/24";
        // Removing it would also switch the files' entry off.
        let add = ["add", &overridden, "--policy", "near", "--ttl", "20s"];
        self.agent.cli(&add)?;
        let settings = ["--initial-rto", "400ms", "--ttl", "1h"];
        self.agent.cli(&[&["add", own][..], &settings].concat())?;
        self.agent
            .cli(&["add", "10.93.0.0/24", "--policy", "near", "--ttl", "1s"])?;
        thread::sleep(LASTS);
        entries.insert(overridden, "near".to_owned());
        let list = || Ok(listed(&self.agent.json(&["list"])?));
        let seen = eventually_seen("runtime entries", PATIENCE, list, |seen| {
            seen.len() == entries.len() + 1 && entries.iter().all(|(k, v)| seen.get(k) == Some(v))
        })?;
        ensure!(seen.contains_key(own), "{seen:?}");
        self.agent.cli(&["remove", own])?;
        self.expect(&Config::Usual.entries())
    }

    fn full_disk(&self) -> anyhow::Result<()> {
        let stuffing = self.stuffing();
        fill(&stuffing)?;
        let cidrs: Vec<String> = (0..TOO_MANY)
            .map(|i| format!("10.94.{}.{}/32", i / 256, i % 256))
            .collect();
        let cidrs: Vec<&str> = cidrs.iter().map(String::as_str).collect();
        let add = [&["add", "--policy", "near"][..], &cidrs].concat();
        let error = self.agent.cli_fails(&add)?;
        ensure!(error.contains("No space left on device"), "{error}");
        self.expect(&Config::Usual.entries())?;
        // Policies from files need no space there.
        self.reload(|agent| agent.cli(&["reload"]).map(drop))?;
        fs::remove_file(stuffing)?;
        self.agent.cli(&add)?;
        self.agent.cli(&[&["remove"][..], &cidrs].concat())?;
        self.expect(&Config::Usual.entries())
    }

    fn clock(&self, set: impl Fn(Duration) -> Duration) -> anyhow::Result<()> {
        let before = Duration::from(clock_gettime(ClockId::CLOCK_REALTIME)?);
        let begin = Instant::now();
        clock_settime(ClockId::CLOCK_REALTIME, set(before).into())?;
        thread::sleep(LASTS);
        let result = self.expect(&Config::Usual.entries());
        let right = before + begin.elapsed();
        clock_settime(ClockId::CLOCK_REALTIME, right.into())?;
        result?;
        self.expect(&Config::Usual.entries())
    }

    fn foreign_program(&self) -> anyhow::Result<()> {
        let foreign = Foreign::attach(self.agent.cgroup.path(), FOREIGN_JIFFIES)?;
        let is_seen = |count| move |status: &Value| status["foreign_programs"] == count;
        self.wait_status("foreign program", is_seen(1))?;
        thread::sleep(LASTS);
        drop(foreign);
        self.wait_status("its end", is_seen(0))?;
        self.expect(&Config::Usual.entries())
    }
}

/// Writes until the file system is full.
fn fill(stuffing: &std::path::Path) -> anyhow::Result<()> {
    let mut file = fs::File::create(stuffing)?;
    let page = [0; 4096];
    let full = (0..10_000).find(|_| file.write_all(&page).is_err());
    full.context("it has no end").map(drop)
}

impl fmt::Display for Disturbance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self:?}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_has_each_disturbance_once_in_seeded_order() {
        let (mut one, mut other) = (Plan::new(7), Plan::new(7));
        let mut rounds = Vec::new();
        for keeps_daemon in [false, false, true] {
            let round = one.round(keeps_daemon);
            assert_eq!(round, other.round(keeps_daemon));
            let mut sorted = round.clone();
            sorted.sort_unstable();
            let mut all = LASTING.to_vec();
            if !keeps_daemon {
                all.extend(ENDING);
            }
            assert_eq!(sorted, all);
            rounds.push(round);
        }
        assert_ne!(rounds[0], rounds[1]);
        assert_ne!(rounds[0], Plan::new(8).round(false));
    }
}
