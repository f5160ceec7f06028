//! Time from exec to READY=1, and from SIGTERM to exit.

use std::{
    path::Path,
    process::{Command, Stdio},
};

use nix::sys::signal::Signal;
use rto_testbed::env::TestEnv;

use crate::{
    idle::cpu,
    process::{self, check_signals},
    result::{BenchResult, Goal, elapsed_ms, millis, times_table},
    sample::Sample,
    suite::SampleSizes,
    traffic::NEAR,
};

/// Maximum time of a start.
const GOAL_MS: f64 = 70.0;

pub(crate) fn run(sizes: SampleSizes, programs: &Path) -> anyhow::Result<BenchResult> {
    let binary = programs.join("rto-agent");
    let mut fresh = TestEnv::of(binary.clone())?;
    fresh.configure(NEAR)?;
    let mut kept = TestEnv::of(binary.clone())?;
    kept.configure(&format!("on_exit = \"keep\"\n{NEAR}"))?;
    // Leaves the pins that the later starts adopt.
    kept.start()?;
    kept.end(Signal::SIGTERM)?;
    let (mut begun, mut ended, mut adopted, mut version) = (vec![], vec![], vec![], vec![]);
    let mut busy = vec![];
    for _ in 0..sizes.starts {
        check_signals()?;
        version.push(elapsed_ms(|| no_op(&binary))?);
        begun.push(elapsed_ms(|| fresh.start())?);
        busy.push(millis(cpu(&fresh)?.run));
        ended.push(elapsed_ms(|| fresh.end(Signal::SIGTERM).map(drop))?);
        adopted.push(elapsed_ms(|| kept.start())?);
        kept.end(Signal::SIGTERM)?;
    }
    let samples = [
        ("`--version`, from exec to exit", version),
        ("start to ready, without pins", begun),
        ("CPU time of that, with the verifier's", busy),
        ("start to ready, pins of an earlier run adopted", adopted),
        ("SIGTERM to exit, detached", ended),
    ];
    let samples = samples.map(|(name, times)| (name, Sample::of(times)));
    let ready = samples[1].1.median();
    Ok(BenchResult {
        text: times_table(&samples),
        goals: vec![Goal::at_most(GOAL_MS, " ms", "start to ready", ready, 0)],
    })
}

/// Runs the binary without any work: the cost of a process.
pub(crate) fn no_op(binary: &Path) -> anyhow::Result<()> {
    let mut command = Command::new(binary);
    command.arg("--version").stdout(Stdio::null());
    process::run(&mut command)
}
