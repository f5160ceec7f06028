//! The lab's flows that lose their last segments: what a quick run measures.

use anyhow::ensure;
use rto_tests::lab::{cell, measured, quick};

use super::Test;

pub(super) const TESTS: &[Test] = &[("a_timer_ends_each_flow", || measured(tails))];

/// By how much medians may be beside each other on a machine that runs other tests as well, milliseconds.
const TOLERANCE_MS: f64 = 60.0;

fn tails() -> anyhow::Result<()> {
    let out = tempfile::tempdir()?;
    let report = quick("tail", out.path(), &[])?;
    for rtt_ms in ["20", "80", "160"] {
        let at = |column: &str| cell(&report, "times", column, &[rtt_ms, "1"]);
        let rtt: f64 = rtt_ms.parse()?;
        // The control: a request, the ACKs, and an RTO of the smoothed RTT and 200 ms after the last of them, which
        // may be delayed by 40 ms as the ninth segment is alone, and late by a step of the timer wheel.
        let kernel = at("kernel, no TLP")?;
        let least = 3.0 * rtt + 200.0;
        ensure!(
            (least..least + 80.0 + TOLERANCE_MS).contains(&kernel),
            "{rtt}: {kernel}\n{report:#}"
        );
        // About a round trip sooner, of which at least a half is not the machine's.
        let restart = at("restart, no TLP")?;
        let most = if rtt > 100.0 {
            kernel - rtt / 2.0
        } else {
            kernel + TOLERANCE_MS
        };
        ensure!(restart < most, "{rtt}: {restart}, {kernel}");
        let lower = at("rto_min 20 ms, no TLP")?;
        ensure!(lower < kernel - 100.0, "{rtt}: {lower}, {kernel}");
    }
    // A probe beats the RTO where several are lost. Where one is, it waits for rto_min as well (in case its ACK is
    // delayed), and only a lower one helps.
    for (lost, column) in [
        ("1", "rto_min 20 ms, TLP"),
        ("3", "kernel, TLP"),
        ("5", "kernel, TLP"),
    ] {
        let at = |column: &str| cell(&report, "times", column, &["20", lost]);
        let (without, with) = (at("kernel, no TLP")?, at(column)?);
        ensure!(
            with < without - 50.0,
            "{lost}: {with}, {without}\n{report:#}"
        );
    }
    let page = std::fs::read_to_string(out.path().join("tail.html"))?;
    ensure!(page.contains("<svg") && page.contains("published"));
    Ok(())
}
