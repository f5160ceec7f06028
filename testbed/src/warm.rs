//! Writes the state that a daemon would have learnt and stored after hours, which tests and experiments do not have.

use std::{
    fs,
    os::unix::fs::DirBuilderExt as _,
    path::PathBuf,
    time::{Duration, SystemTime},
};

use anyhow::{Context as _, ensure};
use nix::time::{ClockId, clock_gettime};
use rto_model::{
    distribution::Distribution,
    tune::{
        law,
        tuner::{Counts, Growth, State, Tuner},
    },
};
use serde_json::{Value, json};

use crate::{
    agent::Agent,
    wait::{TIMEOUT, eventually_seen},
};

/// Length of the simulated past, milliseconds: more than an hour, so that one hour is complete.
const PAST_MS: u64 = 2 * 3_600_000;
const SECOND_MS: u64 = 1000;

/// Observations of several hours.
#[derive(Clone, Copy, Debug)]
pub struct Seen<'a> {
    /// The observations of each second: a path RTT or an ACK delay in microseconds, and how often it occurs.
    pub each_second: &'a [(u64, u64)],
    /// Jiffies per second.
    pub hz: u32,
}

impl Seen<'_> {
    fn times(&self) -> Distribution {
        let mut times = Distribution::default();
        for (us, count) in self.each_second {
            times.add(*us, *count);
        }
        times
    }

    /// A tuner that has seen these observations until `now_ms` of its clock.
    fn tuner(&self, now_ms: u64, law: law::Settings) -> anyhow::Result<Tuner> {
        let samples = self.times();
        let count = samples.count();
        let growth = Growth {
            counts: Counts {
                connections: count,
                ..Counts::default()
            },
            samples,
            ..Growth::default()
        };
        let mut tuner = Tuner::new(law, None);
        for at_ms in (now_ms - PAST_MS..=now_ms).step_by(1000) {
            // The tuner's decisions take effect at once.
            let _set = tuner.step(at_ms, &growth);
        }
        ensure!(tuner.state() == State::Active, "{:?}", tuner.state());
        Ok(tuner)
    }
}

/// The tuner's clock, which is the time of day here.
fn unix_ms() -> anyhow::Result<u64> {
    let unix = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?;
    Ok(u64::try_from(unix.as_millis())?)
}

/// As the learnt state of one policy with `initial_rto = "auto"` that the next daemon finds: the same observations in
/// both directions.
impl Seen<'_> {
    /// The state in its stored form, and the value in microseconds.
    fn state(&self, now_ms: u64) -> anyhow::Result<(Value, u64)> {
        let law = law::Settings::new(self.hz);
        let timers = [("active", law), ("passive", law)];
        let mut stored = serde_json::Map::new();
        let mut value_us = None;
        for (name, law) in timers {
            let tuner = self.tuner(now_ms, law)?;
            value_us = value_us.or(tuner.value_us());
            let timer = json!({ "tuner": tuner, "reading": null, "totals": [], "alarm": null });
            stored.insert(name.to_owned(), timer);
        }
        let state = json!({ "since_ms": null, "timers": stored, "transitions": [] });
        let value_us = value_us.context("no value")?;
        Ok((state, value_us))
    }

    /// Starts a daemon with this state, and waits until `rto-agent tune` shows that the value is active. Returns the
    /// value.
    pub fn start(&self, agent: &mut Agent, policy: &str) -> anyhow::Result<Duration> {
        let value = self.store(agent, policy)?;
        agent.start()?;
        let value_us = u64::try_from(value.as_micros())?;
        let is_learnt = |timer: &Value| {
            timer["kind"] != "auto" || (timer["state"] == "active" && timer["value_us"] == value_us)
        };
        let has_learnt = |tuned: &Value| {
            let timers = tuned["policies"][policy]["timers"].as_array();
            timers.is_some_and(|timers| !timers.is_empty() && timers.iter().all(is_learnt))
        };
        let tuned = || agent.json(&["tune", policy]);
        eventually_seen("learnt value", TIMEOUT, tuned, has_learnt).with_context(|| agent.log())?;
        Ok(value)
    }

    /// Writes the state for the daemon that is started next; returns the value.
    pub fn store(&self, agent: &Agent, policy: &str) -> anyhow::Result<Duration> {
        let unix_ms = unix_ms()?;
        let boottime = Duration::from(clock_gettime(ClockId::CLOCK_BOOTTIME)?);
        let (state, value_us) = self.state(unix_ms - SECOND_MS)?;
        let boot_id = fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
        let kept = json!({
            "format": 1,
            "owner": agent.pin_dir(),
            "content": {
                "boot_id": boot_id.trim(),
                "at": {
                    "tuner_ms": unix_ms,
                    "boottime_ms": u64::try_from(boottime.as_millis())?,
                    "unix_ms": unix_ms,
                },
                "policies": { policy: state },
            },
        });
        let dir = agent.persistent_dir();
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&dir)?;
        fs::write(file(agent), serde_json::to_vec(&kept)?)?;
        Ok(Duration::from_micros(value_us))
    }
}

/// The file in which the daemon stores what it has learnt.
fn file(agent: &Agent) -> PathBuf {
    agent.persistent_dir().join("tuning.json")
}

/// The state that the daemon has stored for a policy.
pub fn stored(agent: &Agent, policy: &str) -> anyhow::Result<Value> {
    let kept: Value = serde_json::from_slice(&fs::read(file(agent))?)?;
    Ok(kept["content"]["policies"][policy].clone())
}
