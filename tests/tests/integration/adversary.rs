//! Attacks on the daemon through its socket and its files. After each attack the daemon is healthy, has no more open
//! descriptors than before, and everything that was active or acknowledged is active.

use super::faults::descriptors;
use crate::prelude::*;

mod clients;
mod files;
mod limits;
mod local_user;

/// Longest time until silent clients are disconnected, on a busy machine too.
const PATIENCE: Duration = Duration::from_secs(30);

/// A daemon under attack.
struct Victim {
    env: TestEnv,
    descriptors: usize,
}

impl Victim {
    /// A daemon with a single entry.
    fn new() -> anyhow::Result<Self> {
        Self::of(TestEnv::with(&near("\"10.88.0.0/24\""))?)
    }

    /// A running daemon.
    fn of(env: TestEnv) -> anyhow::Result<Self> {
        env.wait_status("the probe", |status| status["probe"].is_object())?;
        let descriptors = descriptors(&env)?;
        Ok(Self { env, descriptors })
    }

    /// Asserts that it is as before, with this number of entries.
    fn is_well(&self, entries: usize) -> anyhow::Result<()> {
        let status = self
            .env
            .wait_status("health", |status| status["healthy"] == true)?;
        assert_has(&status, json!({"entries": entries, "in_sync": true}));
        // A probe or a check of the files may hold some open.
        let few = |now: &usize| *now <= self.descriptors + 4;
        let what = format!("return to {} descriptors", self.descriptors);
        eventually_seen(&what, PATIENCE, || descriptors(&self.env), few)?;
        let log = self.env.log();
        ensure!(!log.contains("panicked"), "{log}");
        Ok(())
    }

    /// The active CIDRs.
    fn cidrs(&self) -> anyhow::Result<Vec<String>> {
        let list = self.env.json(&["list"])?;
        let entries = list["entries"].as_array().cloned().unwrap_or_default();
        let cidr = |entry: &Value| entry["cidr"].as_str().unwrap_or_default().to_owned();
        Ok(entries.iter().map(cidr).collect())
    }

    /// Asserts that the files are rejected for this reason.
    fn refuses_its_files(&self, why: &str) -> anyhow::Result<()> {
        let begin = Instant::now();
        let error = self.env.cli_fails(&["reload"])?;
        ensure!(error.contains(why), "wanted {why:?}: {error}");
        ensure!(error.contains("stays active"), "{error}");
        ensure!(begin.elapsed() < TIMEOUT, "{:?}", begin.elapsed());
        self.env.cli_refuses(&["check"], why)?;
        self.env
            .status_has(json!({"last_reload": {"ok": false}, "entries": 1}))?;
        Ok(())
    }
}
