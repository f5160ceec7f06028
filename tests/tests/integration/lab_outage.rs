//! The lab's outages: with and without the agent, connect() takes as long as the model predicts in each cell.

use rto_tests::features::version;

use crate::prelude::*;

/// From the packet to the return of connect(), in another process, milliseconds.
const PROCESS_MS: f64 = 4.0;
const ARMS: [&str; 4] = ["none", "client", "server", "both"];

/// Asserts that the median of each cell is within two jiffies and the latency of a process of the model, which includes
/// the lateness of the timer wheel.
fn assert_near_the_model(report: &Value) -> anyhow::Result<()> {
    let tolerance = 2.0 * jiffy().as_secs_f64() * 1e3 + PROCESS_MS;
    let (_, rows) = rto_tests::lab::table(report, "model-cells")?;
    let syn_acks_double = lacks("syn-ack-retransmission-timeout")?;
    for row in rows {
        let outage = row[0].as_f64().context("no outage")?.to_string();
        for lost in ["SYNs", "SYN-ACKs"] {
            for agent in ARMS {
                // Before Linux 5.17 only the first timer of a SYN-ACK is the policy's.
                if syn_acks_double && lost == "SYN-ACKs" && matches!(agent, "server" | "both") {
                    continue;
                }
                let column = format!("{lost}, {agent}");
                let distance = cell(report, "model-cells", &column, &[&outage])?;
                ensure!(
                    distance <= tolerance,
                    "{column}, outage {outage} ms: connect() is {distance} ms from the model"
                );
            }
        }
    }
    Ok(())
}

test!(connect_time_in_outages_matches_model, || measured(
    matches_model
));
fn matches_model() -> anyhow::Result<()> {
    let out = tempfile::tempdir()?;
    let report = quick("outage", out.path(), &[])?;
    assert_near_the_model(&report)?;
    // The control has the kernel's 1 s, and a covered client the policy's 100 ms.
    let at = |column: &str| cell(&report, "times", column, &["50"]);
    let (control, client) = (at("SYNs, none")?, at("SYNs, client")?);
    ensure!(control >= 1000.0 && client < 200.0, "{control} {client}");
    Ok(())
}

test!(connect_time_differs_from_another_kernels_model);
/// The control of the comparison itself: an outage of 1.4 s ends at the SYN of 2 s with linear timeouts, and at 3 s
/// without.
fn connect_time_differs_from_another_kernels_model() -> anyhow::Result<()> {
    let out = tempfile::tempdir()?;
    let other = if version()? < (6, 5) { "6.14" } else { "6.4" };
    let args = ["--linux", other, "--outage", "1400ms", "--runs", "1"];
    let report = quick("outage", out.path(), &args)?;
    let error = assert_near_the_model(&report).err();
    let error = error
        .context("the model of another kernel fits")?
        .to_string();
    ensure!(error.contains("SYNs, none, outage 1400 ms"), "{error}");
    Ok(())
}
