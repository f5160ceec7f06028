//! Who attacks the daemon by its socket and its files. After each attack it is healthy, has no more descriptors open than
//! before, and what was in force or acknowledged is in force.

use std::time::Duration;

use anyhow::ensure;
use rto_testbed::{
    env::TestEnv,
    wait::{TIMEOUT, eventually_seen},
};
use serde_json::Value;

use super::{faults::descriptors, near};

mod clients;
mod files;
mod limits;

/// Clients that are silent are let go within this, with the look of a busy machine.
const PATIENCE: Duration = Duration::from_secs(30);

/// A daemon that is attacked.
struct Victim {
    env: TestEnv,
    descriptors: usize,
}

impl Victim {
    /// One with a single entry.
    fn new() -> anyhow::Result<Self> {
        Self::of(TestEnv::with(&near("\"10.88.0.0/24\""))?)
    }

    /// One that runs.
    fn of(env: TestEnv) -> anyhow::Result<Self> {
        env.wait_status("the probe", |status| status["probe"].is_object())?;
        let descriptors = descriptors(&env)?;
        Ok(Self { env, descriptors })
    }

    /// Has it been left as it was, with so many entries?
    fn is_well(&self, entries: usize) -> anyhow::Result<()> {
        let status = self
            .env
            .wait_status("health", |status| status["healthy"] == true)?;
        ensure!(status["entries"] == entries, "{status:#}");
        ensure!(status["in_sync"] == true, "{status:#}");
        // A probe or a look at the files may have one open.
        let few = |now: &usize| *now <= self.descriptors + 4;
        let what = format!("return to {} descriptors", self.descriptors);
        eventually_seen(&what, PATIENCE, || descriptors(&self.env), few)?;
        let log = self.env.log();
        ensure!(!log.contains("panicked"), "{log}");
        Ok(())
    }

    /// The CIDRs in force.
    fn cidrs(&self) -> anyhow::Result<Vec<String>> {
        let list = self.env.json(&["list"])?;
        let entries = list["entries"].as_array().cloned().unwrap_or_default();
        let cidr = |entry: &Value| entry["cidr"].as_str().unwrap_or_default().to_owned();
        Ok(entries.iter().map(cidr).collect())
    }

    /// Whether the files are refused, and what for.
    fn refuses_its_files(&self, why: &str) -> anyhow::Result<()> {
        let begin = std::time::Instant::now();
        let said = self.env.cli_fails(&["reload"])?;
        ensure!(said.contains(why), "wanted {why:?}: {said}");
        ensure!(said.contains("stays in force"), "{said}");
        ensure!(begin.elapsed() < TIMEOUT, "{:?}", begin.elapsed());
        let said = self.env.cli_fails(&["check"])?;
        ensure!(said.contains(why), "wanted {why:?}: {said}");
        let status = self.env.json(&["status"])?;
        ensure!(status["last_reload"]["ok"] == false, "{status:#}");
        ensure!(status["entries"] == 1, "{status:#}");
        Ok(())
    }
}
