//! Configurations and traffic of several benchmarks.

use std::fs;

use anyhow::{Context as _, ensure};
use rto_testbed::{env::TestEnv, foreign::Runs, workload::rate::Rate};

use crate::{process::check_signals, sample::Sample};

/// A policy that covers the peers of a test environment.
pub(crate) const NEAR: &str =
    "[policy.near]\ncidrs = [\"10.88.0.0/24\"]\ninitial_rto = \"100ms\"\n";
/// A policy that covers the loopback addresses.
pub(crate) const POLICY: &str =
    "[policy.all]\ncidrs = [\"127.0.0.0/8\"]\ninitial_rto = \"100ms\"\nforce = true\n";
/// The same with the timers of established connections.
pub(crate) const TIMERS: &str = "rto_min = \"8ms\"\ndelack_max = \"8ms\"\n";
/// A policy that does not cover them.
pub(crate) const ELSEWHERE: &str =
    "[policy.other]\ncidrs = [\"10.0.0.0/24\"]\ninitial_rto = \"100ms\"\n";
/// Settings of `[agent]` that count everything.
pub(crate) const COUNT_ALL: &str =
    "statistics = true\ncount_unmatched = true\nsampling = 1\nrtt_sampling = \"1ms\"\n";
/// Settings of `[agent]` that count nothing.
pub(crate) const COUNT_NOTHING: &str = "statistics = false\n";

/// Consecutive connections on one side: few, so that other load of the host lasts longer than a batch.
const BATCH: u32 = 100;

/// Fails if the kernel measures the time of every BPF program.
pub(crate) fn ensure_untimed() -> anyhow::Result<()> {
    let counted = fs::read_to_string("/proc/sys/kernel/bpf_stats_enabled")?;
    ensure!(
        counted.trim() == "0",
        "the kernel times every BPF program, which distorts the measurement: sysctl kernel.bpf_stats_enabled=0"
    );
    Ok(())
}

pub(crate) fn program_id(env: &TestEnv) -> anyhow::Result<u64> {
    let status = env.json(&["status"])?;
    let id = status["attachment"]["program_id"].as_u64();
    id.context("`status` does not name the agent's program")
}

/// The callbacks of some connections.
#[derive(Clone, Copy)]
pub(crate) struct Callbacks {
    pub(crate) count: f64,
    pub(crate) nanos: f64,
}

impl Callbacks {
    pub(crate) fn between(before: Runs, after: Runs) -> Self {
        Self {
            count: (after.count - before.count) as f64,
            nanos: (after.time - before.time).as_secs_f64() * 1e9,
        }
    }

    pub(crate) fn mean(self) -> f64 {
        self.nanos / self.count
    }
}

/// Makes this many connections on each side, in batches that alternate between the sides; returns the connections per
/// second of each side. This is the median of the batches, so that a batch during which another process had the CPU
/// does not count.
pub(crate) fn interleaved(connections: u32, traffic: &mut [Rate]) -> anyhow::Result<Vec<f64>> {
    let mut rates = vec![Vec::new(); traffic.len()];
    let mut order: Vec<usize> = (0..traffic.len()).collect();
    let mut left = connections;
    while left > 0 {
        check_signals()?;
        let count = left.min(BATCH);
        for i in &order {
            let took = traffic[*i].connections(count)?;
            rates[*i].push(f64::from(count) / took.as_secs_f64());
        }
        order.reverse();
        left -= count;
    }
    let medians = rates.into_iter().map(|rates| Sample::of(rates).median());
    Ok(medians.collect())
}
