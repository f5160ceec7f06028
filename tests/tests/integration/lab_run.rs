//! User-defined experiments of the lab: the example runs, and mistakes are reported with their place.

use rto_tests::lab::run;

use crate::prelude::*;

const EXAMPLE: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../lab/examples/near-peers.toml"
);

test!(the_example_runs, || measured(example));
fn example() -> anyhow::Result<()> {
    let out = tempfile::tempdir()?;
    let dir = out.path().to_string_lossy();
    let output = run(&["run", EXAMPLE, "--quick", "--json", "--out", &dir])?;
    let text = stdout_of("run", output)?;
    let report = serde_json::from_str(&text)?;
    let at = |timers: &str, outage: &str| cell(&report, "medians", timers, &[outage]);
    // The kernel's first timer is 200 ms plus the round-trip time; the policy's is 10 ms, and doubles.
    let (kernel, own) = (at("kernel", "50")?, at("rto_min 10 ms", "50")?);
    ensure!((200.0..300.0).contains(&kernel), "{kernel}\n{report:#}");
    ensure!((45.0..150.0).contains(&own), "{own}\n{report:#}");
    for timers in ["kernel", "rto_min 10 ms"] {
        let long = at(timers, "300")?;
        ensure!((295.0..900.0).contains(&long), "{timers}: {long}");
    }
    let page = fs::read_to_string(out.path().join("near-peers.html"))?;
    ensure!(page.contains("<svg") && page.contains("rto_min = &quot;10ms&quot;"));
    Ok(())
}

/// 150 transactions of 2 ms are skipped: an outage that began with the connection would affect only these.
const SKIPPING: &str = r#"
name = "skipping"
question = "When does an outage begin?"
runs = 2
[settings]
workload = "request-response"
skip = 150
count = 5
pause = "2ms"
outage = "60ms"
[[factor]]
name = "timers"
[[factor.level]]
name = "kernel"
"#;

test!(an_outage_begins_after_what_is_skipped, || measured(
    after_skipped
));
fn after_skipped() -> anyhow::Result<()> {
    let out = tempfile::tempdir()?;
    let file = out.path().join("skipping.toml");
    fs::write(&file, SKIPPING)?;
    let (file, dir) = (file.to_string_lossy(), out.path().to_string_lossy());
    stdout_of("run", run(&["run", &file, "--out", &dir])?)?;
    let log = fs::read_to_string(out.path().join("skipping.jsonl"))?;
    for line in log.lines().skip(1) {
        let run: Value = serde_json::from_str(line)?;
        let value = |measure: &str| run["records"][0]["values"][measure][0].as_f64();
        // The kernel's first timer of 200 ms ends it, so it affected one of the measured transactions.
        let (time, lasted) = (value("time"), value("lasted"));
        ensure!(time.is_some_and(|ms| ms > 195.0), "{line}");
        ensure!(lasted.is_some_and(|ms| ms > 55.0), "{line}");
    }
    ensure!(log.lines().count() == 3, "{log}");
    Ok(())
}

test!(mistake_is_reported_with_place_and_correction);
fn mistake_is_reported_with_place_and_correction() -> anyhow::Result<()> {
    let out = tempfile::tempdir()?;
    let file = out.path().join("mistaken.toml");
    let right = fs::read_to_string(EXAMPLE)?;
    for (from, to, expected) in [
        ("delay =", "delai =", &["mistaken.toml", "delai", "`delay`"]),
        // The agent's own error message for a policy, which the lab does not parse.
        (
            "rto_min = \"10ms\"",
            "rto_min = \"10s\"",
            &["policy", "rto_min", "10s"],
        ),
    ] {
        assert!(right.contains(from));
        fs::write(&file, right.replace(from, to))?;
        let (file, dir) = (file.to_string_lossy(), out.path().to_string_lossy());
        let error = refusal(&run(&["run", &file, "--out", &dir])?)?;
        assert!(expected.iter().all(|one| error.contains(one)), "{error}");
    }
    Ok(())
}
