//! The lab's losses in small HTTP transfers: results of a quick run over both links.

use std::ops::Range;

use rto_testbed::timing::{quantised, range};

use crate::prelude::*;

/// Time that processes add to a median because they wait for a processor of an idle machine, milliseconds. The time
/// that they add without loss is measured in the same run, and is not included.
const PROCESSES_MS: f64 = 6.0;
/// Round-trip time of the emulated link.
const RTT_MS: f64 = 3.0;
/// The policy's `rto_min = "10ms"`.
const RTO_MIN: Duration = Duration::from_millis(10);
/// Percentage of the requests that a busy machine may delay beyond 20 ms.
const DELAYED_SHARE: f64 = 10.0;

fn run(link: &str) -> anyhow::Result<Value> {
    let out = tempfile::tempdir()?;
    let report = quick("loss", out.path(), &["--link", link])?;
    let page = fs::read_to_string(out.path().join("loss.html"))?;
    ensure!(page.contains("<svg") && page.contains("published"));
    Ok(report)
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

test!(a_lost_syn_costs_what_the_policy_says, || measured(emulated));
fn emulated() -> anyhow::Result<()> {
    let report = run("relay")?;
    check(&report, RTT_MS)?;
    // One segment after the lost one is enough, with and without the agent: no request waits for a timer, unlike
    // requests that lose their last segment and are not pipelined.
    let pipelined = "every second last data segment at its first copy, kept alive and pipelined";
    let kept = "every second last data segment, kept alive";
    for timers in ["kernel", "agent"] {
        let at = |dropped: &str, column: &str| cell(&report, "times", column, &[dropped, timers]);
        let lost = at(pipelined, "packets dropped")? / at(pipelined, "requests")?;
        ensure!(lost > 0.3, "{timers}: {lost} of the segments were dropped");
        let delayed = at(pipelined, "above 20 ms, %")?;
        ensure!(delayed <= DELAYED_SHARE, "{timers}: {delayed} %");
        let control = at(kept, "above 20 ms, %")?;
        ensure!(control >= 100.0 - DELAYED_SHARE, "{timers}: {control} %");
    }
    Ok(())
}

test!(a_veth_agrees, || measured(veth));
fn veth() -> anyhow::Result<()> {
    check(&run("nft")?, 0.0)
}

/// Asserts, over either link, that each loss costs its timer: never less, and at most the delays of the timer wheel and
/// of the machine (as without loss) more.
fn check(report: &Value, rtt: f64) -> anyhow::Result<()> {
    let at = |dropped: &str, timers: &str, column: &str| {
        cell(report, "times", column, &[dropped, timers])
    };
    let median_in = |dropped: &str, timers: &str, expected: Range<f64>| -> anyhow::Result<f64> {
        let p50 = at(dropped, timers, "p50")?;
        ensure!(
            expected.contains(&p50),
            "{dropped}, {timers}: {p50} is not in {expected:?}\n{report:#}"
        );
        Ok(p50)
    };
    // The control: connect and request, or only the request.
    let undisturbed = |timers: &str, is_kept: bool| -> anyhow::Result<f64> {
        let (dropped, round_trips) = if is_kept {
            ("nothing, kept alive", 1.0)
        } else {
            ("nothing", 2.0)
        };
        let least = round_trips * rtt;
        median_in(dropped, timers, least..least + PROCESSES_MS)
    };
    let second = Duration::from_secs(1);
    let near = Duration::from_millis(100);
    let by_default = quantised(Duration::from_secs(31) / 63);
    for (dropped, timers, timer) in [
        ("every second SYN", "kernel", second),
        ("every second SYN", "agent", near),
        // The shortest that keeps half-open requests for 31 s with 5 retransmissions, and the published value.
        ("every second SYN-ACK", "agent at the server", by_default),
        (
            "every second SYN-ACK",
            "agent at the server, syn_ack_rto 100ms",
            near,
        ),
    ] {
        let is_client = !timers.starts_with("agent at the server");
        let undisturbed = undisturbed(if is_client { timers } else { "kernel" }, false)?;
        let expected = ms(*range(timer).start())..ms(latest(timer)) + undisturbed + PROCESSES_MS;
        median_in(dropped, timers, expected)?;
    }
    // A tail loss probe is sent after rto_min and two round-trip times.
    for (dropped, is_kept) in [
        ("every second last data segment, new connections", false),
        ("every second last data segment, kept alive", true),
    ] {
        for (timers, rto_min) in [("kernel", KERNEL_RTO_MIN), ("agent", RTO_MIN)] {
            let undisturbed = undisturbed(timers, is_kept)?;
            let probe = rto_min + Duration::from_secs_f64(2.0 * undisturbed / 1e3);
            let expected =
                ms(*range(rto_min).start())..ms(latest(probe)) + undisturbed + PROCESSES_MS;
            median_in(dropped, timers, expected)?;
        }
    }
    // The FIN of a server that closes reveals the loss: nothing waits for a timer, with and without the agent.
    for timers in ["kernel", "agent"] {
        let closes = "every second last data segment, server closes";
        let undisturbed = undisturbed(timers, false)?;
        let dropped = at(closes, timers, "packets dropped")?;
        ensure!(dropped == at(closes, timers, "requests")?);
        let recovered = undisturbed + 2.0 * rtt + ms(2 * jiffy()) + PROCESSES_MS;
        median_in(closes, timers, 0.0..recovered)?;
    }
    // One SYN in two is the first of each connection, one in three that of every second connection.
    for timers in ["kernel", "agent"] {
        ensure!(at("every second SYN", timers, "above 20 ms, %")? == 100.0);
        let dropped = at("every second SYN", timers, "packets dropped")?;
        ensure!(dropped == at("every second SYN", timers, "requests")?);
    }
    ensure!(at("every third SYN", "kernel", "packets dropped")? == 10.0);
    let third = at("every third SYN", "kernel", "mean")?;
    let mean = at("nothing", "kernel", "mean")?;
    let expected = 500.0..ms(latest(second)) / 2.0 + mean + PROCESSES_MS;
    ensure!(expected.contains(&third), "{third} is not in {expected:?}");
    Ok(())
}
