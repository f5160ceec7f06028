//! How often experiments conclude wrongly, and how soon they conclude: simulated counts, compared with
//! `docs/research/experiments.md`.
//!
//! `UPDATE=1 cargo test -p rto-model --test experiments` rewrites the page's tables.
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
    experiment::{Event, Experiment, GAIN, HARM, Increments, Outcome, Verdict},
};

use crate::{
    counts::{attempts, coverage},
    network::{CALM, Network, design, experiments, impatient_clients},
    random::Random,
};

const PAGE: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../docs/research/experiments.md"
);
const SHARES: [f64; 3] = [0.1, 0.5, 0.95];

fn percent(share: f64) -> String {
    format!("{:.1}", share * 100.0)
}

/// 2,000 experiments each, looked at every second.
#[test]
fn nothing_is_concluded_where_nothing_differs() {
    const RUNS: u32 = 2000;
    let mut table = "| | treated | gain | harm | invalid | gain by plain counts |\n\
                     |--|--:|--:|--:|--:|--:|\n"
        .to_owned();
    let busy = Network {
        rate: 200.0,
        connect_s: 0.1,
        dead: 0.2,
        ..CALM
    };
    for (name, treated, network, shares) in [
        ("20/s of 10 ms", "50 %", CALM, &[0.5][..]),
        ("200/s of 100 ms, 0.2/s dead", "10 %", busy, &[0.1]),
        ("the same", "50 %", busy, &[0.5]),
        ("the same", "95 %", busy, &[0.95]),
        ("the same", "5, 50, 95 %", busy, &[0.05, 0.5, 0.95]),
    ] {
        let ended = experiments(network, shares, 600, RUNS.into());
        let of = |count: u32| f64::from(count) / f64::from(RUNS);
        let wrong = [ended.gain, ended.harm, ended.invalid, ended.plain].map(of);
        println!("A/A, {name}, {treated}: {wrong:?}");
        let cells = wrong.map(percent).join(" | ");
        writeln!(table, "| {name} | {treated} | {cells} |").unwrap();
        assert!(wrong[0] + wrong[1] + wrong[2] <= 0.05, "{ended:?}");
        // The control: what the plain counts say is wrong.
        assert!(network.connect_s < 0.1 || wrong[3] >= 0.1, "{ended:?}");
    }
    assert_table("false conclusions", &table);
}

#[test]
fn conclusions_come_as_soon_as_the_page_says() {
    let mut table = "| | 10 % treated | 50 % | 95 % |\n|--|--:|--:|--:|\n".to_owned();
    let (gain, harm) = (Direction::Gain, Direction::Harm);
    for (name, base, ratio, direction, e) in [
        ("gain of 90 %, base 1 %", 0.01, 0.1, gain, GAIN),
        ("gain of 90 %, base 0.1 %", 0.001, 0.1, gain, GAIN),
        ("harm x3 of 0.5 %, e >= 400", 0.005, 3.0, harm, HARM),
        ("the same, e >= 20", 0.005, 3.0, harm, GAIN),
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
fn intervals_cover_the_ratio_whenever_one_looks() {
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
fn whole_experiments_end_as_the_page_says() {
    const RUNS: u32 = 100;
    let mut table = "| | gain | of these promoted | harm | invalid | inconclusive | hours |\n\
                     |--|--:|--:|--:|--:|--:|--:|\n"
        .to_owned();
    let better = Network {
        ratio: 0.2,
        ratio_at_last: 0.2,
        ..CALM
    };
    let mut rows = Vec::new();
    for (name, network) in [
        ("nothing differs", CALM),
        ("a fifth as many bad", better),
        (
            "the same, 0.1 % spurious",
            Network {
                spurious: 0.001,
                ..better
            },
        ),
        (
            "the same, 2 % spurious",
            Network {
                spurious: 0.02,
                ..better
            },
        ),
        (
            "a fifth as many at 5 and 50 %, 3 times at 95 %",
            Network {
                ratio_at_last: 3.0,
                ..better
            },
        ),
    ] {
        let ended = experiments(network, &[0.05, 0.5, 0.95], 7 * 3600, RUNS.into());
        let cells = [
            ended.gain,
            ended.promoted,
            ended.harm,
            ended.invalid,
            ended.inconclusive,
        ];
        let hours = ended.hours / f64::from(RUNS);
        println!("{name}: {cells:?} {hours:.1} h");
        let cells = cells.map(|count| count.to_string()).join(" | ");
        writeln!(table, "| {name} | {cells} | {hours:.1} |").unwrap();
        rows.push(ended);
    }
    assert!(rows[0].gain + rows[0].harm + rows[0].invalid <= 5);
    assert!(rows[1].promoted >= 85 && rows[2].promoted >= 85);
    assert_eq!(rows[3].harm, RUNS);
    assert_eq!(rows[4].promoted, 0);
    assert_table("experiments", &table);
}

#[test]
fn impatient_clients_gain_from_every_policy() {
    for policy_s in [0.04, 0.1, 0.3] {
        let all: Vec<_> = (0..100)
            .map(|run| impatient_clients(policy_s, run))
            .collect();
        let latest_s = all.iter().map(|(_, second)| *second).max();
        println!("policy of {policy_s} s: gain proven after {latest_s:?} s at most");
        // The first event of all: neither harm nor a mismatch.
        assert!(
            all.iter()
                .all(|(event, _)| *event == Some(Event::GainProven)),
            "{all:?}"
        );
    }
}

/// 8 ms on a path of 40 ms: each treated connection has a spurious copy, no other has.
#[test]
fn timer_below_the_rtt_is_stopped_within_30_treated_connections() {
    for shares in [&[0.1][..], &[0.05, 0.5, 0.95]] {
        let mut most = 0;
        for run in 0..200_u64 {
            let mut random = Random(run << 20);
            let design = design(shares, 7 * 86_400);
            let mut experiment = Experiment::start(design, "a".to_owned()).unwrap();
            while experiment.verdict().is_none() {
                let mut increments = Increments::default();
                let arms = &mut increments.counts;
                let arm = if random.happens(experiment.share()) {
                    arms.treated.spurious = 1;
                    &mut arms.treated
                } else {
                    &mut arms.control
                };
                (arm.attempts, arm.good) = (1, 1);
                experiment.observe(&increments, 1000);
            }
            let outcome = Outcome::Spurious;
            assert_eq!(experiment.verdict(), Some(Verdict::Harm { outcome }));
            assert_eq!(experiment.share(), 0.0);
            most = most.max(experiment.counts().treated.attempts);
        }
        println!("{shares:?}: stopped after {most} treated connections at most");
        assert!(most <= 30, "{most}");
    }
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
        "UPDATE=1 cargo test -p rto-model --test experiments; {name}:\n{table}"
    );
}
