//! What a daemon would have learnt after hours, as it stores it: tests and experiments have no hours.

use std::{
    fs,
    os::unix::fs::DirBuilderExt as _,
    path::PathBuf,
    time::{Duration, SystemTime},
};

use anyhow::{Context as _, ensure};
use nix::time::{ClockId, clock_gettime};
use rto_model::{
    advice::Distribution,
    tune::{
        acks::{self, AckTuner},
        law,
        tuner::{Growth, Phase, Tuner},
    },
};
use serde_json::{Value, json};

use crate::{
    agent::Agent,
    wait::{TIMEOUT, eventually_seen},
};

/// Past that was simulated, milliseconds: more than an hour, so that one is closed.
const PAST_MS: u64 = 2 * 3_600_000;
const SECOND_MS: u64 = 1000;
const HOUR_MS: u64 = 3_600_000;

/// What was seen for hours.
#[derive(Clone, Copy, Debug)]
pub struct Seen<'a> {
    /// Each second: how long the path took, or by how much an ACK was delayed, microseconds, and how often.
    pub each_second: &'a [(u64, u64)],
    /// Jiffies a second.
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

    /// A tuner that has seen this until `now_ms` of its clock.
    fn tuner(&self, now_ms: u64) -> anyhow::Result<Tuner> {
        let path_times = self.times();
        let mut tuner = Tuner::new(law::Settings::new(self.hz));
        for at_ms in (now_ms - PAST_MS..=now_ms).step_by(1000) {
            let count = path_times.count();
            let growth = Growth {
                epoch: tuner.setting().epoch,
                clean: count,
                attempts: count,
                path_times: path_times.clone(),
                ..Growth::default()
            };
            // What it decides is in force at once.
            let _set = tuner.step(at_ms, &growth);
        }
        ensure!(tuner.phase() == Phase::Steady, "{:?}", tuner.phase());
        Ok(tuner)
    }

    /// The same of `rto_min`.
    fn ack_tuner(&self, now_ms: u64) -> anyhow::Result<AckTuner> {
        let delays = self.times();
        let mut tuner = AckTuner::new(acks::Settings::new(self.hz));
        for at_ms in (now_ms - PAST_MS..=now_ms).step_by(1000) {
            let _set = tuner.step(at_ms, &delays);
        }
        ensure!(tuner.phase() == Phase::Steady, "{:?}", tuner.phase());
        Ok(tuner)
    }
}

/// What a daemon that is started next finds of one policy.
#[derive(Clone, Copy, Debug)]
pub enum Learnt<'a> {
    /// `initial_rto = "auto"`, the same in both directions.
    InitialRto(Seen<'a>),
    /// The same, after alarms: nothing is lowered for another hour, and the next hold is of this level.
    Held(Seen<'a>, u32),
    /// `rto_min = "auto"`.
    RtoMin(Seen<'a>),
}

/// The tuner's clock is the time of day here.
fn unix_ms() -> anyhow::Result<u64> {
    let unix = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?;
    Ok(u64::try_from(unix.as_millis())?)
}

impl Learnt<'_> {
    /// The state as it is stored, and the value, microseconds.
    fn state(&self, now_ms: u64) -> anyhow::Result<(Value, u64)> {
        let hours_hence_ms = now_ms + HOUR_MS;
        let (initial_rto, rto_min, value_us) = match self {
            Self::InitialRto(seen) | Self::Held(seen, _) => {
                let tuner = seen.tuner(now_ms)?;
                let jiffies = tuner.setting().jiffies.context("no value")?;
                let value_us = tuner.settings().micros(jiffies);
                (serde_json::to_value(&tuner)?, Value::Null, value_us)
            }
            Self::RtoMin(seen) => {
                let tuner = seen.ack_tuner(now_ms)?;
                let jiffies = tuner.jiffies().context("no value")?;
                let value_us = jiffies * 1_000_000 / u64::from(seen.hz);
                (Value::Null, serde_json::to_value(&tuner)?, value_us)
            }
        };
        let mut active = initial_rto;
        if let Self::Held(_, level) = self {
            active["phase"] = serde_json::to_value(Phase::Backoff)?;
            active["hold_until_ms"] = hours_hence_ms.into();
            active["hold_level"] = (*level).into();
            active["last_alarm_ms"] = now_ms.into();
        }
        let state = json!({
            "active": active,
            "passive": active,
            "rto_min": rto_min,
            "counts": null,
            "judged": [[0, 0], [0, 0]],
            "transitions": [],
            "totals": [],
        });
        Ok((state, value_us))
    }

    /// Starts a daemon that has it, and waits until `rto-agent tune` says that the value is in force; that value.
    ///
    /// # Errors
    ///
    /// If it does not come to that; the error has what was said last.
    pub fn start(&self, agent: &mut Agent, policy: &str) -> anyhow::Result<Duration> {
        let value = self.store(agent, policy)?;
        agent.start()?;
        let value_us = u64::try_from(value.as_micros())?;
        let is_learnt = |timer: &Value| {
            timer["kind"] != "auto" || (timer["phase"] == "steady" && timer["value_us"] == value_us)
        };
        let has_learnt = |tuned: &Value| {
            let timers = tuned["policies"][policy]["timers"].as_array();
            timers.is_some_and(|timers| !timers.is_empty() && timers.iter().all(is_learnt))
        };
        let tuned = || agent.json(&["tune", policy]);
        eventually_seen("learnt value", TIMEOUT, tuned, has_learnt).with_context(|| agent.log())?;
        Ok(value)
    }

    /// Writes it for a daemon that is started next; the value.
    ///
    /// # Errors
    ///
    /// If it cannot be written.
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

/// The daemon's file.
fn file(agent: &Agent) -> PathBuf {
    agent.persistent_dir().join("tuning.json")
}

/// What the daemon has stored of a policy.
///
/// # Errors
///
/// If it cannot be read.
pub fn stored(agent: &Agent, policy: &str) -> anyhow::Result<Value> {
    let kept: Value = serde_json::from_slice(&fs::read(file(agent))?)?;
    Ok(kept["content"]["policies"][policy].clone())
}
