//! `rto-agent advise`: its advice for a link with a known delay, and the inputs that it rejects.

use rto_tests::{lab::run as lab, relay::BothEnds};

use crate::prelude::*;

const ONE_WAY: Duration = Duration::from_millis(10);
/// The histogram's buckets are a quarter wide.
const BUCKET: f64 = 1.25;
/// Fewer than the law needs, enough for an rto_min with `--spurious 50%`.
const CONNECTIONS: usize = 8;
const ROUNDS: usize = 5;
const POLICY: &str = "sampling = 1\n[policy.near]\ninitial_rto = \"400ms\"\ncidrs = [\"10.88.0.0/24\", \"10.89.0.0/24\"]\n";

fn converse(env: &TestEnv) -> anyhow::Result<()> {
    let _server = env.echo_server(to(RELAY_SERVER_V4, PORT))?;
    for _ in 0..CONNECTIONS {
        let mut conversation = env.converse(to(RELAY_SERVER_V4, PORT))?;
        conversation.rounds(ROUNDS)?;
    }
    Ok(())
}

test!(of_a_link_with_a_delay);
fn of_a_link_with_a_delay() -> anyhow::Result<()> {
    let env = TestEnv::with(POLICY)?;
    let relay = relay(&env.net)?;
    relay.set_delay(ONE_WAY);
    let captures = BothEnds::of(&env.net, &relay)?;
    converse(&env)?;
    let ask = |target: &[&str]| env.json(&[&["advise", "--spurious", "50%"], target].concat());
    let by_entry = ask(&["10.89.0.0/24"])?;
    for target in [&[RELAY_SERVER_V4][..], &["--policy", "near"]] {
        let same = ask(target)?;
        assert_eq!(same["source"]["policy"], "near");
        assert_eq!(same["initial_rto"], by_entry["initial_rto"]);
    }
    let initial_rto = &by_entry["initial_rto"];
    assert_eq!(initial_rto["present"]["value_us"], 400_000, "{by_entry:#}");
    let evidence = by_entry["evidence"].as_array().context("no evidence")?;
    let handshakes = |direction: &str| {
        let is = |e: &&Value| e["what"] == "path_rtt" && e["direction"] == direction;
        evidence.iter().find(is).context("no path RTTs")
    };
    // The evidence agrees with the wires, within a jiffy and the width of a bucket.
    let wires = captures.round_trips(CONNECTIONS, ROUNDS)?;
    for (direction, wire) in ["active", "passive"].into_iter().zip(wires) {
        let of = handshakes(direction)?;
        assert_eq!(of["samples"], CONNECTIONS, "{by_entry:#}");
        let mut wire: Vec<Duration> = wire.iter().map(|round_trips| round_trips[0]).collect();
        wire.sort_unstable();
        ensure!(wire[0] >= 2 * ONE_WAY, "{wire:?}");
        for (name, at) in [("p50_us", CONNECTIONS / 2), ("longest_us", CONNECTIONS - 1)] {
            let counted = Duration::from_micros(of[name].as_u64().context("no time")?);
            // With an even number of samples, the median may be either of the two in the middle.
            let low = wire[at - usize::from(name == "p50_us")];
            let range = low - jiffy()..=(wire[at] + jiffy()).mul_f64(BUCKET);
            ensure!(
                range.contains(&counted),
                "{direction} {name}: {counted:?}, on the wire {wire:?}: {by_entry:#}"
            );
        }
    }
    // The law needs more.
    assert_eq!(initial_rto["needed"], 300, "{by_entry:#}");
    ensure!(initial_rto["suggestion"].is_null(), "{by_entry:#}");
    // The advice has changed nothing.
    let listed = env.json(&["lookup", RELAY_SERVER_V4])?;
    assert_eq!(listed["entry"]["settings"]["initial_rto"], "400ms");
    let text = env.cli(&["advise", "--policy", "near"])?;
    assert_says(&text, &["no suggestion", "needs 300"]);
    ensure!(text.contains("all 2 CIDRs of near"), "{text}");
    Ok(())
}

test!(of_a_capture);
/// The evidence of `rto-lab advise` has each handshake, with the link's round-trip time.
fn of_a_capture() -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    let file = dir.path().join("client.pcap");
    let env = TestEnv::with(POLICY)?;
    let relay = relay(&env.net)?;
    relay.set_delay(ONE_WAY);
    relay.capture(&file)?;
    converse(&env)?;
    relay.end_capture()?;
    let file = file.to_string_lossy();
    let advise = ["advise", "--pcap", &file, "--spurious", "50%"];
    let run = |more: &[&str]| lab(&[&advise[..], more].concat());
    let output = run(&["--cidr", "10.89.0.0/24", "--json"])?;
    ensure!(output.status.success(), "{output:?}");
    let answer: Value = serde_json::from_slice(&output.stdout)?;
    assert_eq!(answer["source"]["file"], *file, "{answer:#}");
    let evidence = answer["evidence"].as_array().context("no evidence")?;
    let handshakes = evidence.iter().find(|e| e["what"] == "handshake");
    let handshakes = handshakes.context("no handshakes")?;
    assert_eq!(handshakes["direction"], "active", "{answer:#}");
    assert_eq!(handshakes["samples"], CONNECTIONS, "{answer:#}");
    let shortest_us = u64::try_from((2 * ONE_WAY).as_micros())?;
    ensure!(
        handshakes["p50_us"].as_u64() >= Some(shortest_us),
        "{answer:#}"
    );
    let error = refusal(&run(&["--cidr", "192.0.2.0/24"])?)?;
    ensure!(error.contains("has a peer in 192.0.2.0/24"), "{error}");
    Ok(())
}

test!(impossible_advice_is_refused);
fn impossible_advice_is_refused() -> anyhow::Result<()> {
    let mut env = TestEnv::with(POLICY)?;
    for (args, expected) in [
        (&["10.88.0.0/25"][..], "rto-agent advise 10.88.0.0/24"),
        (&["192.0.2.1"], "no entry covers 192.0.2.1"),
        (
            &["--policy", "far"],
            "no active policy far; active policies: near",
        ),
    ] {
        let args = [&["advise"], args].concat();
        env.cli_refuses(&args, expected)?;
    }
    env.configure(&format!("statistics = false\n{POLICY}"))?;
    env.restart(Signal::SIGTERM)?;
    env.cli_refuses(&["advise", "--policy", "near"], "statistics = true")
}
