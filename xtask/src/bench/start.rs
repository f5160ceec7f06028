//! From exec to READY, and from SIGTERM to the end.

use std::{
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use nix::sys::signal::Signal;
use rto_testbed::env::TestEnv;

use super::{
    Sample, go_on,
    idle::cpu,
    page::{Amount, Found, Goal, table},
};

/// Longest start.
const GOAL_MS: f64 = 100.0;

const POLICY: &str = "[policy.near]\ncidrs = [\"10.88.0.0/24\"]\ninitial_rto = \"100ms\"\n";

pub(super) fn run(amount: Amount, programs: &Path) -> anyhow::Result<Found> {
    let binary = programs.join("rto-agent");
    let mut fresh = TestEnv::of(binary.clone())?;
    fresh.configure(POLICY)?;
    let mut kept = TestEnv::of(binary.clone())?;
    kept.configure(&format!("on_exit = \"keep\"\n{POLICY}"))?;
    // What it finds from then on.
    kept.start()?;
    kept.end(Signal::SIGTERM)?;
    let (mut begun, mut ended, mut adopted, mut version) = (vec![], vec![], vec![], vec![]);
    let mut busy = vec![];
    for _ in 0..amount.starts {
        go_on()?;
        version.push(took(|| no_op(&binary))?);
        begun.push(took(|| fresh.start())?);
        busy.push(millis(cpu(&fresh)?.run));
        ended.push(took(|| fresh.end(Signal::SIGTERM).map(drop))?);
        adopted.push(took(|| kept.start())?);
        kept.end(Signal::SIGTERM)?;
    }
    let samples = [
        ("a process that only says its version", version),
        ("start to ready, nothing there", begun),
        ("of that on a CPU (the verifier's time with it)", busy),
        ("start to ready, an earlier run's program adopted", adopted),
        ("SIGTERM to the end, everything detached", ended),
    ];
    let samples = samples.map(|(name, times)| (name, Sample::of(times.into_iter())));
    let ready = samples[1].1.median();
    Ok(Found {
        text: table(
            ["ms", "median", "half of them", "most"],
            samples.iter().map(|(name, sample)| row(name, sample)),
        ),
        goals: vec![Goal {
            what: "start to ready",
            wanted: "at most 100 ms",
            measured: format!("{ready:.0} ms"),
            met: ready <= GOAL_MS,
        }],
    })
}

/// A row of a table of times.
pub(super) fn row(name: &str, sample: &Sample) -> [String; 4] {
    [
        name.to_owned(),
        format!("{:.2}", sample.median()),
        format!("{:.2} to {:.2}", sample.quarter(1), sample.quarter(3)),
        format!("{:.2}", sample.quarter(4)),
    ]
}

/// How long something takes, milliseconds.
pub(super) fn took(what: impl FnOnce() -> anyhow::Result<()>) -> anyhow::Result<f64> {
    let begin = Instant::now();
    what()?;
    Ok(millis(begin.elapsed()))
}

/// Runs the binary for nothing.
pub(super) fn no_op(binary: &Path) -> anyhow::Result<()> {
    let mut command = Command::new(binary);
    command.arg("--version").stdout(Stdio::null());
    crate::process::run(&mut command)
}

pub(super) fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}
