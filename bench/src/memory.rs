//! Kernel memory of open connections: without a program, with the agent, and with the agent when every connection has
//! socket storage, in turns.

use std::{fs, path::Path, thread, time::Duration};

use rto_testbed::{cgroup::Cgroup, wait::eventually, workload::hold::Hold};

use crate::{
    process::{agent, check_signals, helper},
    result::{BenchResult, table},
    sample::Sample,
    scale::slab_mb,
    suite::SampleSizes,
    traffic::POLICY,
};

const ROUNDS: usize = 3;
/// The port before the first listener's.
const PORT: u16 = 7300;

const NAMES: [&str; 3] = [
    "no program",
    "agent, default settings",
    "agent, `sampling = 1`: every connection has storage",
];
const N: usize = NAMES.len();
const NONE: usize = 0;

/// Maximum wait until the memory of closed connections is free.
const FREED: Duration = Duration::from_secs(10);
/// Interval between two readings; the second confirms the first.
const INTERVAL: Duration = Duration::from_millis(100);
/// Maximum difference between the two: 3 bytes for each of 100,000 connections.
const STEADY: f64 = 256.0 * 1024.0;

pub(crate) fn run(sizes: SampleSizes, programs: &Path) -> anyhow::Result<BenchResult> {
    let bare = Cgroup::new()?;
    let mut worlds = Vec::new();
    for configuration in [POLICY.to_owned(), format!("sampling = 1\n{POLICY}")] {
        worlds.push(agent(programs, &configuration)?);
    }
    let netns = &worlds[0].net.client;
    let program = helper(programs);
    let cgroups = worlds.iter().map(|env| env.cgroup.path());
    let mut holders = [bare.path()]
        .into_iter()
        .chain(cgroups)
        .zip(PORT + 1..)
        .map(|(cgroup, port)| Hold::start(&program, netns, cgroup, port, sizes.open))
        .collect::<anyhow::Result<Vec<_>>>()?;
    let mut rounds = Vec::new();
    for round in 0..ROUNDS {
        let mut slab = [Slab::default(); N];
        for turn in 0..N {
            check_signals()?;
            // A different one starts in each round.
            let i = (round + turn) % N;
            slab[i] = slab_of(&mut holders[i])?;
        }
        rounds.push(slab);
    }
    Ok(BenchResult {
        text: format!(
            "{} open connections, both ends of each on this host; median of {ROUNDS} rounds, interquartile range in \
             brackets.\n\n{}",
            sizes.open,
            report(&rounds, f64::from(sizes.open))
        ),
        goals: Vec::new(),
    })
}

fn report(rounds: &[[Slab; N]], connections: f64) -> String {
    let sample = |of: &dyn Fn(&[Slab; N]) -> f64| Sample::of(rounds.iter().map(of));
    let megabytes = |of: &dyn Fn(&[Slab; N]) -> f64| format!("{:.1}", sample(of).median() / 1e6);
    let rows = NAMES.iter().enumerate().map(|(i, name)| {
        [
            (*name).to_owned(),
            megabytes(&|r| r[i].before),
            megabytes(&|r| r[i].open),
            sample(&|r| r[i].grown() / connections).with_quartiles(0),
            sample(&|r| (r[i].grown() - r[NONE].grown()) / connections).with_quartiles(0),
        ]
    });
    let head = [
        "",
        "slab before, MB",
        "with the connections, MB",
        "bytes per connection, both ends",
        "more than without a program",
    ];
    table(head, rows)
}

/// Bytes of slab that the kernel cannot reclaim.
#[derive(Clone, Copy, Default)]
struct Slab {
    before: f64,
    open: f64,
}

impl Slab {
    fn grown(self) -> f64 {
        self.open - self.before
    }
}

/// Opens the connections and ends them.
fn slab_of(holder: &mut Hold) -> anyhow::Result<Slab> {
    let before = steady_slab()?;
    holder.open()?;
    let slab = Slab {
        before,
        open: steady_slab()?,
    };
    holder.close()?;
    // Sockets and their storage are freed after RCU grace periods, and a few slabs stay for later use. If other
    // programs have allocated as much in the meantime, the next measurement starts from there.
    let enough = before + slab.grown() / 10.0;
    let _freed = eventually("end of the connections' memory", FREED, || {
        Ok((unreclaimable_slab()? < enough).then_some(()))
    });
    Ok(slab)
}

/// The slab's size when it is steady. If it never is, the last value; the median over the rounds must compensate for
/// that.
fn steady_slab() -> anyhow::Result<f64> {
    let mut last = unreclaimable_slab()?;
    let steady = eventually("slab of a steady size", FREED, || {
        thread::sleep(INTERVAL);
        let now = unreclaimable_slab()?;
        let is_steady = (now - last).abs() < STEADY;
        last = now;
        Ok(is_steady.then_some(()))
    });
    let _best_effort = steady;
    Ok(last)
}

/// `SUnreclaim` of /proc/meminfo. It includes sockets and their storage, but not files and inodes, which file systems
/// share.
fn unreclaimable_slab() -> anyhow::Result<f64> {
    // Each CPU batches changes of up to about a hundred pages; reading this file flushes them.
    let _added = fs::read("/proc/sys/vm/stat_refresh");
    Ok(slab_mb()? * 1024.0 * 1024.0)
}
