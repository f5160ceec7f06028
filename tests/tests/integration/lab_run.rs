//! The lab's experiments of a user's own: the example runs, and a mistake is told with its place.

use anyhow::ensure;
use rto_tests::lab::{cell, measured, run};

const EXAMPLE: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../lab/examples/near-peers.toml"
);

test!(the_example_runs, || measured(example));
fn example() -> anyhow::Result<()> {
    let out = tempfile::tempdir()?;
    let dir = out.path().to_string_lossy();
    let output = run(&["run", EXAMPLE, "--quick", "--json", "--out", &dir])?;
    let text = rto_testbed::process::stdout_of("run", output)?;
    let report = serde_json::from_str(&text)?;
    let at = |timers: &str, outage: &str| cell(&report, "medians", timers, &[outage]);
    // The kernel's first timer is 200 ms and the round trip; the policy's is 10 ms, and doubles.
    let (kernel, own) = (at("kernel", "50")?, at("rto_min 10 ms", "50")?);
    ensure!((200.0..300.0).contains(&kernel), "{kernel}\n{report:#}");
    ensure!((45.0..150.0).contains(&own), "{own}\n{report:#}");
    for timers in ["kernel", "rto_min 10 ms"] {
        let long = at(timers, "300")?;
        ensure!((295.0..900.0).contains(&long), "{timers}: {long}");
    }
    let page = std::fs::read_to_string(out.path().join("near-peers.html"))?;
    ensure!(page.contains("<svg") && page.contains("rto_min = &quot;10ms&quot;"));
    Ok(())
}

test!(a_mistake_is_told_with_its_place_and_what_is_right);
fn a_mistake_is_told_with_its_place_and_what_is_right() -> anyhow::Result<()> {
    let out = tempfile::tempdir()?;
    let file = out.path().join("mistaken.toml");
    let right = std::fs::read_to_string(EXAMPLE)?;
    for (from, to, said) in [
        ("delay =", "delai =", &["mistaken.toml", "delai", "`delay`"]),
        // The agent's own words, of a policy that the lab knows nothing of.
        (
            "rto_min = \"10ms\"",
            "rto_min = \"10s\"",
            &["policy", "rto_min", "10s"],
        ),
    ] {
        assert!(right.contains(from));
        std::fs::write(&file, right.replace(from, to))?;
        let output = run(&[
            "run",
            &file.to_string_lossy(),
            "--out",
            &out.path().to_string_lossy(),
        ])?;
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{error}");
        assert!(said.iter().all(|one| error.contains(one)), "{error}");
    }
    Ok(())
}
