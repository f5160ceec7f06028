//! Describes the machine that a measurement ran on.

use std::{fs, time::Duration};

use nix::{
    sys::utsname::uname,
    time::{ClockId, clock_getres},
};
use serde::{Deserialize, Serialize};

/// The machine, for a report.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// Release of the kernel.
    pub kernel: String,
    /// Jiffies per second.
    pub hz: u64,
    /// The machine's architecture.
    pub architecture: String,
    /// Name of the processor.
    pub processor: String,
    /// Number of processors available to this process.
    pub cores: usize,
}

impl Machine {
    /// Describes this machine.
    pub fn here() -> anyhow::Result<Self> {
        let names = uname()?;
        let processors = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let processor = processors
            .lines()
            .find_map(|line| Some(line.strip_prefix("model name")?.split_once(": ")?.1));
        Ok(Self {
            kernel: names.release().to_string_lossy().into_owned(),
            hz: hz(),
            architecture: names.machine().to_string_lossy().into_owned(),
            processor: processor.unwrap_or("unknown").to_owned(),
            cores: std::thread::available_parallelism()?.get(),
        })
    }

    /// "Linux 6.18.5, HZ 250, x86_64, 2 cores (name)".
    #[must_use]
    pub fn describe(&self) -> String {
        let Self {
            kernel,
            hz,
            architecture,
            processor,
            cores,
        } = self;
        format!("Linux {kernel}, HZ {hz}, {architecture}, {cores} cores ({processor})")
    }
}

/// The length of a jiffy: the resolution of the coarse clock (`posix_get_coarse_res()`, Linux 6.12).
#[must_use]
pub fn jiffy() -> Duration {
    clock_getres(ClockId::CLOCK_MONOTONIC_COARSE).map_or(Duration::from_millis(4), Duration::from)
}

fn hz() -> u64 {
    let nanos = u64::try_from(jiffy().as_nanos()).unwrap_or(u64::MAX).max(1);
    (1_000_000_000 + nanos / 2) / nanos
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machine_has_hz_and_cores() {
        let here = Machine::here().unwrap();
        assert!([100, 250, 300, 1000].contains(&here.hz), "{here:?}");
        assert!(here.cores > 0 && here.describe().contains("HZ"));
    }
}
