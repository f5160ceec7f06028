//! What a daemon would have learnt after hours, as it stores it: a test has no hours.

use std::{fs, os::unix::fs::DirBuilderExt as _, time::SystemTime};

use anyhow::Context as _;
use nix::time::{ClockId, clock_gettime};
use rto_model::{
    advice::Distribution,
    tune::{
        law::Settings,
        tuner::{Growth, Phase, Tuner},
    },
};
use rto_testbed::env::TestEnv;
use serde_json::{Value, json};

/// Past that was simulated, milliseconds: more than an hour, so that one is closed.
const PAST_MS: u64 = 2 * 3_600_000;
const SECOND_MS: u64 = 1000;

/// What was seen for hours.
#[derive(Clone, Copy, Debug)]
pub struct Seen<'a> {
    /// Connections of each second: how long the path took, microseconds, and how many.
    pub each_second: &'a [(u64, u64)],
    /// Jiffies a second.
    pub hz: u32,
}

impl Seen<'_> {
    /// A tuner that has seen this until `now_ms` of its clock.
    ///
    /// # Errors
    ///
    /// If it has not settled by then.
    fn tuner(&self, now_ms: u64) -> anyhow::Result<Tuner> {
        let mut path_times = Distribution::default();
        for (us, count) in self.each_second {
            path_times.add(*us, *count);
        }
        let mut tuner = Tuner::new(Settings::new(self.hz));
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
        anyhow::ensure!(tuner.phase() == Phase::Steady, "{:?}", tuner.phase());
        Ok(tuner)
    }
}

/// Writes the state of a policy whose `initial_rto` is "auto", for a daemon that is started next; the value of both
/// directions, microseconds.
///
/// # Errors
///
/// If it cannot be written.
pub fn store(env: &TestEnv, policy: &str, seen: &Seen<'_>) -> anyhow::Result<u64> {
    let unix = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?;
    let unix_ms = u64::try_from(unix.as_millis())?;
    let boottime = std::time::Duration::from(clock_gettime(ClockId::CLOCK_BOOTTIME)?);
    let tuner = seen.tuner(unix_ms - SECOND_MS)?;
    let jiffies = tuner.setting().jiffies.context("no value")?;
    let value_us = tuner.settings().micros(jiffies);
    let tuner: Value = serde_json::to_value(&tuner)?;
    let boot_id = fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    let kept = json!({
        "format": 1,
        "owner": env.pin_dir(),
        "boot_id": boot_id.trim(),
        "at": {
            "tuner_ms": unix_ms,
            "boottime_ms": u64::try_from(boottime.as_millis())?,
            "unix_ms": unix_ms,
        },
        "policies": { policy: {
            "active": tuner,
            "passive": tuner,
            "rto_min": null,
            "counts": null,
            "judged": [[0, 0], [0, 0]],
            "transitions": [],
            "totals": [],
        }},
    });
    let dir = env.persistent_dir();
    fs::DirBuilder::new().recursive(true).mode(0o700).create(&dir)?;
    fs::write(dir.join("tuning.json"), serde_json::to_vec(&kept)?)?;
    Ok(value_us)
}
