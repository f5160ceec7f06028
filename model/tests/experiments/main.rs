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
    experiment::{Arms, Counts, Experiment, GAIN, HARM, Increments, Outcome, Verdict},
};

use crate::{
    counts::{attempts, coverage, nothing_differs, peers},
    network::{CALM, Network, design, experiments},
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

#[test]
fn nothing_is_concluded_where_nothing_differs() {
    let mut table = "| treated | either, e >= 20 | gain, e >= 20 | harm, e >= 400 | z-test |\n\
                     |--:|--:|--:|--:|--:|\n"
        .to_owned();
    for (treated, ramp) in [
        ("10 %", &[0.1][..]),
        ("50 %", &[0.5]),
        ("95 %", &[0.95]),
        ("5, 50, 95 %", &[0.05, 0.5, 0.95]),
    ] {
        let wrong = nothing_differs(ramp);
        let cells = [wrong.either, wrong.gain, wrong.harm, wrong.z].map(percent);
        writeln!(table, "| {treated} | {} |", cells.join(" | ")).unwrap();
        println!("A/A at {treated}: {cells:?} %");
        assert!(wrong.either <= 0.05 && wrong.gain <= 0.05, "{cells:?}");
        assert!(wrong.harm <= 0.0025 + 0.0025, "{cells:?}");
        // The control: a test that does not allow for looking would be seen. With a ramp it is wrong beside that, as
        // bursts at a high share are all the treatment's.
        assert!(wrong.z >= 0.2, "{cells:?}");
        assert!(ramp.len() > 1 || wrong.z <= 0.41, "{cells:?}");
    }
    assert_table("false conclusions", &table);
}

#[test]
fn conclusions_come_as_soon_as_the_page_says() {
    let mut table = "| | 10 % treated | 50 % | 95 % |\n|--|--:|--:|--:|\n".to_owned();
    let (gain, harm) = (Direction::Gain, Direction::Harm);
    let either = Direction::Either;
    for (name, base, ratio, direction, e, designed) in [
        ("gain, base 0.5 %", 0.005, 0.0, gain, GAIN, None),
        (
            "the same, e-value of either",
            0.005,
            0.0,
            either,
            GAIN,
            Some([10_500, 4_800, 14_700]),
        ),
        ("gain, base 0.1 %", 0.001, 0.0, gain, GAIN, None),
        (
            "the same, e-value of either",
            0.001,
            0.0,
            either,
            GAIN,
            Some([51_700, 23_500, 73_200]),
        ),
        ("harm x3 of 0.5 %, e >= 400", 0.005, 3.0, harm, HARM, None),
        ("the same, e >= 20", 0.005, 3.0, harm, GAIN, None),
        (
            "the same, e-value of either",
            0.005,
            3.0,
            either,
            GAIN,
            Some([7_800, 3_200, 15_300]),
        ),
    ] {
        let attempts = SHARES.map(|share| attempts(share, base, ratio, direction, e));
        println!("{name}: {attempts:?}, designed {designed:?}");
        let cells = attempts.map(thousands);
        writeln!(table, "| {name} | {} |", cells.join(" | ")).unwrap();
        for (is, designed) in attempts.iter().zip(designed.iter().flatten()) {
            let off = *is as f64 / f64::from(*designed) - 1.0;
            assert!(off.abs() <= 0.15, "{name}: {is}, {designed}");
        }
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
fn peers_are_counted_once() {
    let (connections, once) = (peers(false), peers(true));
    println!("peers: {connections} by connections, {once} once each");
    assert!(connections > 0.2 && once <= 0.05, "{connections} {once}");
    let table = format!(
        "| counted | concluded, % |\n|--|--:|\n| each bad connection | {} |\n| each peer once | {} |\n",
        percent(connections),
        percent(once)
    );
    assert_table("peers", &table);
}

#[test]
fn whole_experiments_end_as_the_page_says() {
    let mut table = "| | gain | harm | invalid | inconclusive | spill-over suspected | hours |\n\
                     |--|--:|--:|--:|--:|--:|--:|\n"
        .to_owned();
    const RUNS: u32 = 100;
    let mut rows = Vec::new();
    for (name, network) in [
        ("nothing differs", CALM),
        (
            "a fifth as many beyond 500 ms",
            Network { ratio: 0.2, ..CALM },
        ),
        (
            "the same, 0.1 % spurious",
            Network {
                ratio: 0.2,
                spurious: 0.001,
                ..CALM
            },
        ),
        (
            "the same, 2 % spurious",
            Network {
                ratio: 0.2,
                spurious: 0.02,
                ..CALM
            },
        ),
        (
            "the same, losses x3 from 50 % on",
            Network {
                ratio: 0.2,
                spill_over: 3.0,
                ..CALM
            },
        ),
        (
            "the same, RTT x1.5 from 50 % on",
            Network {
                ratio: 0.2,
                rtt_rise: 1.5,
                ..CALM
            },
        ),
    ] {
        let ended = experiments(network, u64::from(RUNS));
        let cells = [
            ended.gain,
            ended.harm,
            ended.invalid,
            ended.inconclusive,
            ended.suspected,
        ];
        let hours = ended.hours / f64::from(RUNS);
        println!("{name}: {cells:?} {hours:.1} h");
        let cells = cells.map(|count| count.to_string()).join(" | ");
        writeln!(table, "| {name} | {cells} | {hours:.1} |").unwrap();
        rows.push(ended);
    }
    assert!(rows[0].gain + rows[0].harm + rows[0].invalid <= 5);
    assert!(rows[0].suspected <= 10);
    assert!(rows[1].gain >= 85 && rows[2].gain >= 85);
    assert_eq!(rows[3].harm, RUNS);
    assert!(rows[4].suspected >= 20 && rows[5].suspected >= 90);
    assert_table("experiments", &table);
}

/// 8 ms on a path of 40 ms: each treated connection has a spurious copy, no other has.
#[test]
fn a_timer_below_the_rtt_is_stopped_within_30_treated_connections() {
    for (shares, at_most) in [(&[0.1][..], 30), (&[0.05, 0.5, 0.95], 30)] {
        let mut most = 0;
        for run in 0..200_u64 {
            let mut random = Random(run << 20);
            let design = design(shares, 7 * 86_400);
            let mut experiment = Experiment::start(design, "a".to_owned(), 0).unwrap();
            let mut second = 0;
            while experiment.verdict().is_none() {
                second += 1;
                let mut increments = Increments::default();
                let arms = &mut increments.counts;
                let arm = if random.happens(experiment.share()) {
                    arms.treated.spurious = 1;
                    &mut arms.treated
                } else {
                    &mut arms.control
                };
                arm.attempts = 1;
                experiment.observe(&increments, second);
            }
            let outcome = Outcome::Spurious;
            assert_eq!(experiment.verdict(), Some(Verdict::Harm { outcome }));
            assert_eq!(experiment.share(), 0.0);
            most = most.max(experiment.counts().treated.attempts);
        }
        println!("{shares:?}: stopped after {most} treated connections at most");
        assert!(most <= at_most, "{most}");
    }
}

/// 1 % of first SYNs are lost, half of the connections treated: those of the control arm take a second.
#[test]
fn a_gain_is_proven_within_6000_connections() {
    let mut all: Vec<u64> = (0..500_u64)
        .map(|run| {
            let mut random = Random(run << 20);
            let design = design(&[0.5], 7 * 86_400);
            let mut experiment = Experiment::start(design, "a".to_owned(), 0).unwrap();
            let mut second = 0;
            while experiment.gain_proven_s().is_none() {
                second += 1;
                let mut counts: Arms<Counts> = Arms::default();
                for _ in 0..10 {
                    // A treated connection is slow if five SYNs are lost.
                    if random.happens(0.5) {
                        counts.treated.attempts += 1;
                    } else {
                        counts.control.attempts += 1;
                        counts.control.beyond_500_ms += u64::from(random.happens(0.01));
                    }
                }
                let increments = Increments {
                    counts,
                    ..Increments::default()
                };
                experiment.observe(&increments, second);
                assert_eq!(experiment.verdict(), None);
            }
            second * 10
        })
        .collect();
    all.sort_unstable();
    println!(
        "gain proven after {} connections, {} at most",
        all[250], all[499]
    );
    assert!(all[499] <= 6000, "{}", all[499]);
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
