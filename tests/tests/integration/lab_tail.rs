//! The lab's flows that lose their last segments: what a quick run measures.

use std::time::Duration;

use anyhow::ensure;
use rto_testbed::timing::latest;
use rto_tests::lab::{cell, measured, quick};

/// What the link and both ends, which are processes, add to a flow on an idle machine, milliseconds.
const PROCESSES_MS: f64 = 20.0;
/// A delayed ACK: 40 ms, and two jiffies.
const DELAYED_ACK_MS: f64 = 48.0;
/// How many of the last segments are lost.
const LOST: [&str; 3] = ["1", "3", "5"];

test!(a_timer_ends_each_flow, || measured(tails));
fn tails() -> anyhow::Result<()> {
    let out = tempfile::tempdir()?;
    let report = quick("tail", out.path(), &[])?;
    for rtt_ms in ["20", "80", "160"] {
        let of = |column: &str, lost: &str| cell(&report, "times", column, &[rtt_ms, lost]);
        let at = |column: &str| of(column, "1");
        let rtt: f64 = rtt_ms.parse()?;
        // The control: a request, the ACKs, and an RTO of the smoothed RTT and 200 ms after the last of them, which
        // may be delayed as the ninth segment is alone. It is never sooner.
        let kernel = at("kernel, no TLP")?;
        let least = 3.0 * rtt + 200.0;
        let rto = Duration::from_secs_f64((rtt + 200.0) / 1e3);
        let most = 2.0 * rtt + latest(rto).as_secs_f64() * 1e3 + DELAYED_ACK_MS + PROCESSES_MS;
        ensure!(
            (least..most).contains(&kernel),
            "{rtt}: {kernel} is not in {least}..{most}\n{report:#}"
        );
        // About a round trip sooner, of which at least a half is not the machine's: the mean over what is lost, as a
        // cell is the median of few flows.
        let mut sooner = Vec::new();
        for lost in LOST {
            sooner.push(of("kernel, no TLP", lost)? - of("restart, no TLP", lost)?);
        }
        let mean = sooner.iter().sum::<f64>() / 3.0;
        ensure!(
            mean > rtt / 2.0,
            "{rtt}: restart is sooner by {sooner:?} only"
        );
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
            with < without - 100.0,
            "{lost}: {with}, {without}\n{report:#}"
        );
    }
    let page = std::fs::read_to_string(out.path().join("tail.html"))?;
    ensure!(page.contains("<svg") && page.contains("published"));
    Ok(())
}
