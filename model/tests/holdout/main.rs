//! How often a holdout concludes wrongly, and how soon it concludes: simulated counts, compared with
//! `docs/research/holdout.md`.
//!
//! `UPDATE=1 cargo test -p rto-model --test holdout` rewrites the page's tables.
#![expect(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a test may fail, and its counts are small"
)]

mod counts;
mod network;
mod random;

use std::{fmt::Write as _, fs};

use rto_model::tune::{
    evidence::Direction,
    holdout::{GAIN, HARM, Verdict},
};

use crate::{
    counts::{attempts, coverage},
    network::{CALM, Network, impatient_clients, runs, syn_ack_outages},
};

const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/research/holdout.md");
const SHARES: [f64; 3] = [0.1, 0.5, 0.95];

fn percent(share: f64) -> String {
    format!("{:.1}", share * 100.0)
}

/// 2,000 runs each, looked at every second.
#[test]
fn equal_arms_rarely_prove_anything() {
    const RUNS: u32 = 2000;
    let mut table =
        "| | treated | gain | harm | invalid | connect times | gain by plain counts |\n\
         |--|--:|--:|--:|--:|--:|--:|\n"
            .to_owned();
    let busy = Network {
        rate: 200.0,
        connect_s: 0.1,
        dead: 0.2,
        ..CALM
    };
    for (name, network, treated) in [
        ("20/s of 10 ms", CALM, 0.5),
        ("200/s of 100 ms, 0.2/s dead", busy, 0.05),
        ("the same", busy, 0.5),
        ("the same", busy, 0.95),
    ] {
        let ended = runs(network, treated, 600, RUNS.into());
        let of = |count: u32| f64::from(count) / f64::from(RUNS);
        let wrong = [
            ended.gain,
            ended.harm,
            ended.invalid,
            ended.times,
            ended.plain,
        ]
        .map(of);
        println!("A/A, {name}, {treated}: {wrong:?}");
        let cells = wrong.map(percent).join(" | ");
        writeln!(table, "| {name} | {} % | {cells} |", treated * 100.0).unwrap();
        assert!(wrong[0] + wrong[1] + wrong[2] <= 0.05, "{ended:?}");
        assert!(wrong[3] <= 0.05, "{ended:?}");
        // The control: what the plain counts say is wrong.
        assert!(network.connect_s < 0.1 || wrong[4] >= 0.1, "{ended:?}");
    }
    assert_table("false conclusions", &table);
}

#[test]
fn documented_durations_hold() {
    let mut table = "| | 10 % treated | 50 % | 95 % |\n|--|--:|--:|--:|\n".to_owned();
    let (gain, harm) = (Direction::Gain, Direction::Harm);
    for (name, base, ratio, direction, e) in [
        ("gain of 90 %, base 1 %", 0.01, 0.1, gain, GAIN),
        ("gain of 90 %, base 0.1 %", 0.001, 0.1, gain, GAIN),
        ("harm x3 of 0.5 %", 0.005, 3.0, harm, HARM),
    ] {
        let attempts = SHARES.map(|share| attempts(share, base, ratio, direction, e));
        println!("{name}: {attempts:?}");
        let cells = attempts.map(thousands);
        writeln!(table, "| {name} | {} |", cells.join(" | ")).unwrap();
        // Half is decided soonest.
        assert!(attempts[1] < attempts[0] && attempts[1] < attempts[2]);
    }
    assert_table("conclusions", &table);
}

#[test]
fn intervals_cover_the_ratio_at_every_look() {
    let mut table = "| treated | ratio 0.3 | 1 | 3 |\n|--:|--:|--:|--:|\n".to_owned();
    for share in SHARES {
        let covered = [0.3, 1.0, 3.0].map(|ratio| coverage(share, ratio));
        println!("coverage at {share}: {covered:?}");
        let cells = covered.map(percent).join(" | ");
        writeln!(table, "| {} % | {cells} |", share * 100.0).unwrap();
        assert!(covered.iter().all(|c| *c >= 0.95), "{covered:?}");
    }
    assert_table("coverage", &table);
}

#[test]
fn impatient_clients_prove_the_gain() {
    for policy_s in [0.04, 0.1, 0.3] {
        let all: Vec<_> = (0..100)
            .map(|run| impatient_clients(policy_s, run))
            .collect();
        let latest_s = all.iter().map(|(_, second)| *second).max();
        println!("policy of {policy_s} s: gain proven after {latest_s:?} s at most");
        // The first verdict of all: neither harm nor a mismatch.
        assert!(
            all.iter()
                .all(|(verdict, _)| *verdict == Some(Verdict::Gain)),
            "{all:?}"
        );
    }
}

/// Retransmissions of the treated arm are mostly spurious there, but as many connects are bad.
#[test]
fn outages_of_syn_acks_never_prove_harm() {
    let verdicts: Vec<_> = (0..200).map(syn_ack_outages).collect();
    assert!(
        verdicts.iter().all(|verdict| *verdict != Verdict::Harm),
        "{verdicts:?}"
    );
}

fn thousands(count: u64) -> String {
    if count < 1000 {
        return count.to_string();
    }
    format!("{},{:03}", count / 1000, count % 1000)
}

/// Compares a table of the page with this one; `UPDATE` rewrites it.
fn assert_table(name: &str, table: &str) {
    static PAGE_IN_USE: std::sync::Mutex<()> = std::sync::Mutex::new(());
    let _in_use = PAGE_IN_USE.lock();
    let page = fs::read_to_string(PAGE).unwrap();
    let (begin, end) = (
        format!("<!-- table of {name} -->\n"),
        format!("<!-- end of {name} -->\n"),
    );
    let (before, rest) = page.split_once(&begin).unwrap();
    let (_, after) = rest.split_once(&end).unwrap();
    let wanted = format!("{before}{begin}\n{table}\n{end}{after}");
    if std::env::var_os("UPDATE").is_some() {
        fs::write(PAGE, &wanted).unwrap();
    }
    assert!(
        fs::read_to_string(PAGE).unwrap() == wanted,
        "UPDATE=1 cargo test -p rto-model --test holdout; {name}:\n{table}"
    );
}
