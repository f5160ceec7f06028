//! Simulated counts of bad attempts, and what the e-values make of them.

use std::collections::HashMap;

use rto_model::tune::evidence::{Direction, Probability, Tally};

use crate::random::Random;

fn tally(share: f64, treated: u64, control: u64) -> Tally {
    Tally {
        share: Probability::try_from(share).unwrap(),
        treated: treated as f64,
        control: control as f64,
    }
}

/// Whether the next bad attempt is treated.
fn is_treated(random: &mut Random, share: f64, ratio: f64) -> bool {
    random.happens(share * ratio / (share * ratio + 1.0 - share))
}

/// How many attempts until an e-value is reached, the median of 1,001 runs, rounded to hundreds: a base rate of bad
/// attempts, and the treatment's, relative to it.
pub(crate) fn attempts(share: f64, base: f64, ratio: f64, direction: Direction, e: f64) -> u64 {
    let rate = base * (share * ratio + 1.0 - share);
    let mut all: Vec<u64> = (0..1001)
        .map(|run| {
            let mut random = Random(run << 20);
            let (mut treated, mut control, mut attempts) = (0, 0, 0);
            loop {
                let tally = tally(share, treated, control);
                if tally.at_most(direction) >= e.ln() && tally.ln_e(direction) >= e.ln() {
                    return attempts;
                }
                attempts += random.geometric(rate);
                match is_treated(&mut random, share, ratio) {
                    true => treated += 1,
                    false => control += 1,
                }
            }
        })
        .collect();
    all.sort_unstable();
    (all[500] + 50) / 100 * 100
}

/// The share of 1,000 runs in which a ratio is in the 95 % intervals after each of 300 bad attempts.
pub(crate) fn coverage(share: f64, ratio: f64) -> f64 {
    let mut known = HashMap::new();
    let covered = (0..1000_u64).filter(|run| {
        let mut random = Random(run << 20);
        let mut treated = 0;
        (1..=300).all(|bad| {
            treated += u64::from(is_treated(&mut random, share, ratio));
            *known.entry((treated, bad)).or_insert_with(|| {
                let interval = tally(share, treated, bad - treated).ratio();
                interval.low <= ratio && interval.high.is_none_or(|high| ratio <= high)
            })
        })
    });
    covered.count() as f64 / 1000.0
}
