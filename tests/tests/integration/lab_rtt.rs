//! The lab's round-trip times: a quick run shows how pauses grow the server's estimate, and what bounds it.

use rto_tests::lab::is;

use crate::prelude::*;

/// Longest time of a round trip without the pause on an idle machine: half of the shortest pause, so that the two
/// cannot be confused. (Measured: 0.02 to 0.3 ms.)
const NETWORK_MS: f64 = 4.0;
/// Least percentage of the responses that are sent twice. (Measured: 458 of 460; the first are acknowledged at once.)
const TWICE: f64 = 90.0;
/// Largest percentage of them if both ends have the same rto_min.
const BOTH: f64 = 3.0;

test!(low_rto_min_at_one_end_sends_responses_twice);
/// A low rto_min at the server alone expires before the client's ACK each time, and the estimator does not adapt:
/// nearly every response is sent twice. The controls: without it none is, and with it at both ends almost none.
fn low_rto_min_at_one_end_sends_responses_twice() -> anyhow::Result<()> {
    // If a busy machine fires the timer after the ACK has arrived, there is a sample, and the RTO then stays above the
    // pause. So each pause must show the harm, but not all in the same run.
    let mut harmful = [(20.0, 0.0), (28.0, 0.0)];
    measured(|| {
        let out = tempfile::tempdir()?;
        let report = quick("rtt", out.path(), &[])?;
        let again = |setting, pause| cell(&report, "retransmissions", setting, pause);
        for (pause, most) in &mut harmful {
            let twice = again("rto_min (server)", *pause)?;
            ensure!(twice <= 100.0, "{pause}: {twice} %");
            *most = twice.max(*most);
            let control = again("kernel", *pause)?;
            ensure!(control == 0.0, "{pause}: {control} % without the agent");
            let both = again("rto_min", *pause)?;
            ensure!(both <= BOTH, "{pause}: {both} % at both ends");
        }
        for (pause, most) in harmful {
            ensure!(
                most >= TWICE,
                "{pause}: {most} % were sent twice\n{report:#}"
            );
        }
        Ok(())
    })
}

test!(pauses_grow_the_servers_rtt_up_to_delack_max, || measured(
    grows
));
fn grows() -> anyhow::Result<()> {
    let out = tempfile::tempdir()?;
    let report = quick("rtt", out.path(), &[])?;
    let jiffy_ms = 1000.0 / report["machine"]["hz"].as_f64().context("no HZ")?;
    let server = |setting, pause| cell(&report, "srtt-server", setting, pause);
    let client = |setting, pause| cell(&report, "srtt-client", setting, pause);

    // Without the agent it is the pause, and never less; the client's is that of the network.
    for pause in [8.0, 20.0, 28.0] {
        let srtt = server("kernel", pause)?;
        ensure!(
            (pause..pause + NETWORK_MS).contains(&srtt),
            "{pause}: {srtt}"
        );
        let srtt = client("kernel", pause)?;
        ensure!(srtt < NETWORK_MS, "{pause}: {srtt}");
    }
    // The estimate does not include a pause that is longer than the delayed-ACK timer (40 ms).
    for pause in [0.0, 60.0] {
        let srtt = server("kernel", pause)?;
        ensure!(srtt < NETWORK_MS, "{pause}: {srtt}");
    }

    // The timer is at most the bound (or the kernel's minimum), and may expire two jiffies later.
    let bound = (2.0 * jiffy_ms).max(8.0);
    for pause in [20.0, 28.0] {
        let srtt = server("delack_max", pause)?;
        let range = bound..bound + 2.0 * jiffy_ms;
        ensure!(range.contains(&srtt), "{pause}: {srtt} is not in {range:?}");
    }
    // The RTO grows by the same amount as the smoothed RTT: it is the smoothed RTT plus 200 ms.
    for setting in ["kernel", "delack_max"] {
        let (rto, srtt) = (
            cell(&report, "rto-server", setting, 28.0)?,
            server(setting, 28.0)?,
        );
        let range = srtt + 200.0..=srtt + 200.0 + 2.0 * jiffy_ms;
        ensure!(range.contains(&rto), "{setting}: {rto} is not in {range:?}");
    }

    let page = fs::read_to_string(out.path().join("rtt.html"))?;
    ensure!(page.matches("<svg").count() == 3, "{page}");
    let latencies = fs::read_to_string(out.path().join("rtt-latency.csv"))?;
    assert_says(&latencies, &["\n8,published,0.093,0.16,0.15,0.21,0.3\n"]);
    Ok(())
}

/// A cell of a table: in the column of a setting, whatever its value, and in the row of a pause.
fn cell(report: &Value, table: &str, column: &str, pause: f64) -> anyhow::Result<f64> {
    const SERVER: &str = " (server)";
    // "rto_min 8ms (server)" and "rto_min 8ms" are different settings; the value is at least two jiffies.
    let (kind, is_server) = column
        .strip_suffix(SERVER)
        .map_or((column, false), |kind| (kind, true));
    let begins = |name: &Value| {
        let name = name.as_str().unwrap_or_default();
        name.split(' ').next() == Some(kind) && name.ends_with(SERVER) == is_server
    };
    let (columns, rows) = rto_tests::lab::table(report, table)?;
    let index = columns.iter().position(begins);
    let index = index.with_context(|| format!("no column {column}"))?;
    let row = rows.iter().find(|row| is(&row[0], &pause.to_string()));
    let cell = row.context("no such line")?[index].as_f64();
    cell.with_context(|| format!("{rows:#?}"))
}
