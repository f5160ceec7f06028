//! The lab's losses in small HTTP transfers: what a quick run measures, over both links.

use anyhow::ensure;
use rto_tests::lab::{cell, measured, quick};
use serde_json::Value;

use super::Test;

pub(super) const TESTS: &[Test] = &[
    ("a_lost_syn_costs_what_the_policy_says", || {
        measured(emulated)
    }),
    ("a_veth_agrees", || measured(veth)),
];

/// By how much medians may be beside each other on a machine that runs other tests as well, milliseconds.
const TOLERANCE_MS: f64 = 60.0;

fn run(link: &str) -> anyhow::Result<Value> {
    let out = tempfile::tempdir()?;
    let report = quick("loss", out.path(), &["--link", link])?;
    let page = std::fs::read_to_string(out.path().join("loss.html"))?;
    ensure!(page.contains("<svg") && page.contains("published"));
    Ok(report)
}

fn emulated() -> anyhow::Result<()> {
    let report = run("relay")?;
    check(&report)?;
    // One segment after the lost one is enough, without the agent as with it.
    let pipelined = "every second last data segment at its first copy, kept alive and pipelined";
    for timers in ["kernel", "agent"] {
        let ms = cell(&report, "times", "p50", &[pipelined, timers])?;
        ensure!(ms < TOLERANCE_MS, "{timers}: {ms}");
    }
    Ok(())
}

fn veth() -> anyhow::Result<()> {
    check(&run("nft")?)
}

/// What holds over either link; a round trip is little beside the tolerance.
fn check(report: &Value) -> anyhow::Result<()> {
    let at = |dropped: &str, timers: &str, column: &str| {
        cell(report, "times", column, &[dropped, timers])
    };
    for (dropped, timers, expected) in [
        ("nothing", "kernel", 5.0),
        ("nothing", "agent", 5.0),
        ("every second SYN", "kernel", 1030.0),
        ("every second SYN", "agent", 110.0),
        // As short as keeps half-open requests for 31 s by 5 retransmissions, and as was published.
        ("every second SYN-ACK", "agent at the server", 510.0),
        (
            "every second SYN-ACK",
            "agent at the server, syn_ack_rto 100ms",
            110.0,
        ),
        ("every second last data segment", "kernel", 215.0),
        ("every second last data segment", "agent", 30.0),
        (
            "every second last data segment, kept alive",
            "kernel",
            210.0,
        ),
        ("every second last data segment, kept alive", "agent", 25.0),
    ] {
        let ms = at(dropped, timers, "p50")?;
        ensure!(
            (ms - expected).abs() < TOLERANCE_MS,
            "{dropped}, {timers}: {ms}, not {expected}\n{report:#}"
        );
    }
    // A SYN in two is each connection's first one, in three every second connection's.
    for timers in ["kernel", "agent"] {
        ensure!(at("every second SYN", timers, "disturbed, %")? == 100.0);
        let dropped = at("every second SYN", timers, "packets dropped")?;
        ensure!(dropped == at("every second SYN", timers, "requests")?);
    }
    ensure!(at("every third SYN", "kernel", "packets dropped")? == 10.0);
    let third = at("every third SYN", "kernel", "mean")?;
    ensure!((third - 520.0).abs() < TOLERANCE_MS, "{third}");
    Ok(())
}
