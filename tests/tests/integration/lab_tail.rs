//! The lab's flows that lose their last segments: results of a quick run.

use crate::prelude::*;

/// Time that the link and both ends, which are processes, add to a flow on an idle machine, milliseconds.
const PROCESSES_MS: f64 = 20.0;
/// A delayed ACK: 40 ms, and two jiffies.
const DELAYED_ACK_MS: f64 = 48.0;
/// Number of last segments that are lost.
const LOST: [&str; 3] = ["1", "3", "5"];

test!(a_timer_ends_each_flow, || measured(tails));
fn tails() -> anyhow::Result<()> {
    let out = tempfile::tempdir()?;
    let report = quick("tail", out.path(), &[])?;
    for rtt_ms in ["20", "80", "160"] {
        let of = |column: &str, lost: &str| cell(&report, "times", column, &[rtt_ms, lost]);
        let at = |column: &str| of(column, "1");
        let rtt: f64 = rtt_ms.parse()?;
        // The control: a request, the ACKs, and an RTO of the smoothed RTT plus 200 ms after the last ACK, which may be
        // delayed because the ninth segment is alone. It is never earlier.
        let kernel = at("kernel, no TLP")?;
        let least = 3.0 * rtt + 200.0;
        let rto = Duration::from_secs_f64((rtt + 200.0) / 1e3);
        let most = 2.0 * rtt + latest(rto).as_secs_f64() * 1e3 + DELAYED_ACK_MS + PROCESSES_MS;
        ensure!(
            (least..most).contains(&kernel),
            "{rtt}: {kernel} is not in {least}..{most}\n{report:#}"
        );
        // From connect() on a new connection: the handshake, the request, and the RTO.
        if rtt_ms != "160" {
            let new = cell(&report, "new", "kernel, no TLP", &[rtt_ms, "1"])?;
            ensure!(new > least, "{rtt}: {new}, {least}");
        }
        // About a round-trip time earlier, of which at least half is not caused by the machine. The mean over all
        // losses is used, as a cell is the median of few flows.
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
    // If several segments are lost, a probe is faster than the RTO. If one is lost, the probe waits for rto_min as well
    // (its ACK may be delayed), and only a lower rto_min helps.
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
    let page = fs::read_to_string(out.path().join("tail.html"))?;
    ensure!(page.contains("<svg") && page.contains("published"));
    Ok(())
}
