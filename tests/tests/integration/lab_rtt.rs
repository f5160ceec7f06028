//! The lab's round-trip times: a quick run shows how pauses grow the server's estimate, and what bounds it.

use anyhow::{Context as _, ensure};
use rto_tests::lab::{measured, quick};
use serde_json::Value;

use super::Test;

pub(super) const TESTS: &[Test] = &[("pauses_grow_the_servers_rtt_up_to_delack_max", || {
    measured(grows)
})];

fn grows() -> anyhow::Result<()> {
    let out = tempfile::tempdir()?;
    let report = quick("rtt", out.path(), &[])?;
    let jiffy_ms = 1000.0 / report["machine"]["hz"].as_f64().context("no HZ")?;
    let server = |setting, pause| cell(&report, "srtt-server", setting, pause);
    let client = |setting, pause| cell(&report, "srtt-client", setting, pause);

    // Without the agent it is the pause; the client's is the network's.
    for pause in [8.0, 20.0, 30.0] {
        let srtt = server("kernel", pause)?;
        ensure!(
            (0.5 * pause..2.0 * pause).contains(&srtt),
            "{pause}: {srtt}"
        );
        let srtt = client("kernel", pause)?;
        ensure!(srtt < 10.0, "{pause}: {srtt}");
    }
    ensure!(server("kernel", 0.0)? < 5.0);
    // Above the delayed-ACK timer (40 ms) it is not the pause any more.
    ensure!(server("kernel", 60.0)? < 50.0);

    // The timer is at most the bound (or the least the kernel takes), a jiffy later where it runs out late.
    let bound = (2.0 * jiffy_ms).max(8.0) + 2.0 * jiffy_ms;
    for pause in [20.0, 30.0] {
        let srtt = server("delack_max", pause)?;
        ensure!(srtt < bound, "{pause}: {srtt}, not below {bound}");
    }
    // The RTO grows as well.
    let rto = |setting| cell(&report, "rto-server", setting, 30.0);
    ensure!(rto("kernel")? > rto("delack_max")?);

    let page = std::fs::read_to_string(out.path().join("rtt.html"))?;
    ensure!(page.matches("<svg").count() == 3, "{page}");
    let latencies = std::fs::read_to_string(out.path().join("rtt-latency.csv"))?;
    ensure!(
        latencies.contains("\n8,published,93,159,149,209,300,"),
        "{latencies}"
    );
    Ok(())
}

/// Of a table: the column whose name begins so, and the line of a pause.
fn cell(report: &Value, table: &str, column: &str, pause: f64) -> anyhow::Result<f64> {
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let begins = |name: &Value| name.as_str().is_some_and(|name| name.starts_with(column));
    let tables = list(&report["tables"]);
    let table = tables.iter().find(|t| t["name"] == table);
    let table = table.context("no such table")?;
    let index = list(&table["columns"]).iter().position(begins);
    let index = index.with_context(|| format!("no column {column}"))?;
    let rows = list(&table["rows"]);
    let pause = pause.to_string();
    let row = rows.iter().find(|row| row[0] == pause);
    let text = row.context("no such line")?[index].as_str().unwrap_or("");
    text.parse().with_context(|| format!("{table:#}"))
}
