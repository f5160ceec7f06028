//! Simulated counts of bad connections, and what the e-values make of them.

use std::collections::HashMap;

use rto_model::tune::{
    evidence::{Direction, Evidence, Probability, Tally},
    experiment::{GAIN, HARM},
    interval::Interval,
};

use crate::random::{Bursts, Random};

/// Bad connections of both arms, at each of up to three shares.
type Counted = [(u64, u64); 3];

/// Something of the evidence of counts, computed once.
struct ByCounts<T, F> {
    ramp: Vec<Probability>,
    known: HashMap<Counted, T>,
    compute: F,
}

impl<T: Copy, F: Fn(&Evidence) -> T> ByCounts<T, F> {
    fn new(ramp: &[f64], compute: F) -> Self {
        Self {
            ramp: ramp
                .iter()
                .map(|s| Probability::try_from(*s).unwrap())
                .collect(),
            known: HashMap::new(),
            compute,
        }
    }

    /// At the first share alone.
    fn get(&mut self, treated: u64, control: u64) -> T {
        self.through([(treated, control), (0, 0), (0, 0)])
    }

    fn through(&mut self, counted: Counted) -> T {
        let Self {
            ramp,
            known,
            compute,
        } = self;
        let tally = |(share, (treated, control)): (&Probability, (u64, u64))| Tally {
            share: *share,
            treated,
            control,
        };
        *known.entry(counted).or_insert_with(|| {
            let tallies: Vec<_> = ramp.iter().zip(counted).map(tally).collect();
            compute(&Evidence::of(&tallies))
        })
    }
}

/// Shares of experiments in which something was concluded that is not so.
#[derive(Default)]
pub(crate) struct Wrong {
    pub(crate) either: f64,
    pub(crate) gain: f64,
    pub(crate) harm: f64,
    pub(crate) z: f64,
}

/// Nothing differs: 2,000 experiments of an hour with 20 attempts a second, looked at every second; by the z-test of
/// two proportions, every minute. Each share of the ramp has its part of the hour.
pub(crate) fn nothing_differs(ramp: &[f64]) -> Wrong {
    const RUNS: u64 = 2000;
    const RATE: f64 = 20.0;
    let mut reached = ByCounts::new(ramp, |evidence| {
        [
            evidence.reaches(Direction::Either, GAIN),
            evidence.reaches(Direction::Gain, GAIN),
            evidence.reaches(Direction::Harm, HARM),
        ]
    });
    let mut wrong = [0.0; 4];
    for run in 0..RUNS {
        let mut random = Random(run << 20);
        let mut bursts = Bursts::default();
        let mut counted = Counted::default();
        let mut attempts = (0.0, 0.0);
        let mut any = [false; 4];
        for second in 0..3600 {
            let step = second * ramp.len() / 3600;
            let share = ramp[step];
            attempts.0 += RATE * share;
            attempts.1 += RATE * (1.0 - share);
            let bad = bursts.second(&mut random, RATE, 1.0);
            for _ in 0..bad {
                if random.happens(share) {
                    counted[step].0 += 1;
                } else {
                    counted[step].1 += 1;
                }
            }
            // Without a new one the e-values are as they were.
            if bad > 0 {
                let now = reached.through(counted);
                (0..3).for_each(|n| any[n] |= now[n]);
            }
            if second % 60 == 59 {
                any[3] |= z(attempts, &counted).abs() > 1.96;
            }
        }
        (0..4).for_each(|n| wrong[n] += f64::from(u8::from(any[n])) / RUNS as f64);
    }
    let [either, gain, harm, z] = wrong;
    Wrong {
        either,
        gain,
        harm,
        z,
    }
}

/// The z-test of two proportions, of sums over shares.
fn z(attempts: (f64, f64), counted: &Counted) -> f64 {
    let treated = counted.iter().map(|arms| arms.0).sum::<u64>() as f64;
    let control = counted.iter().map(|arms| arms.1).sum::<u64>() as f64;
    let both = (treated + control) / (attempts.0 + attempts.1);
    let error = (both * (1.0 - both) * (1.0 / attempts.0 + 1.0 / attempts.1)).sqrt();
    if treated + control < 10.0 {
        0.0
    } else {
        (treated / attempts.0 - control / attempts.1) / error
    }
}

/// How many attempts until an e-value is reached, the median of 1,001 runs, rounded to hundreds: a base rate of bad
/// connections, and the treatment's, relative to it.
pub(crate) fn attempts(share: f64, base: f64, ratio: f64, direction: Direction, e: f64) -> u64 {
    let mut reached = ByCounts::new(&[share], |evidence| evidence.reaches(direction, e));
    let weight = share * ratio + 1.0 - share;
    let mut all: Vec<u64> = (0..1001)
        .map(|run| {
            let mut random = Random(run << 20);
            let (mut treated, mut control, mut attempts) = (0, 0, 0);
            while !reached.get(treated, control) {
                attempts += random.geometric(base * weight);
                if random.happens(share * ratio / weight) {
                    treated += 1;
                } else {
                    control += 1;
                }
            }
            attempts
        })
        .collect();
    all.sort_unstable();
    (all[500] + 50) / 100 * 100
}

/// The share of 1,000 runs in which a ratio is in the 95 % intervals after each of 300 bad connections.
pub(crate) fn coverage(share: f64, ratio: f64) -> f64 {
    let mut contains = ByCounts::new(&[share], |evidence| {
        Interval::of(evidence, 0.95).contains(ratio)
    });
    let covered = (0..1000_u64).filter(|run| {
        let mut random = Random(run << 20);
        let mut treated = 0;
        (1..=300).all(|bad| {
            let weight = share * ratio + 1.0 - share;
            treated += u64::from(random.happens(share * ratio / weight));
            contains.get(treated, bad - treated)
        })
    });
    covered.count() as f64 / 1000.0
}

/// Connections are drawn by peer: 100 peers, with losses that differ a hundredfold. The share of 500 runs in which
/// a difference is concluded from 300 bad connections, or from the first bad one of each peer.
pub(crate) fn peers(each_once: bool) -> f64 {
    let mut reached = ByCounts::new(&[0.5], |evidence| evidence.reaches(Direction::Either, GAIN));
    let concluded = (0..500_u64).filter(|run| {
        let mut random = Random(run << 20);
        let peers: Vec<(bool, f64)> = (0..100)
            .map(|_| (random.happens(0.5), 100_f64.powf(random.uniform())))
            .collect();
        let all: f64 = peers.iter().map(|peer| peer.1).sum();
        let mut seen = [false; 100];
        let (mut treated, mut control) = (0, 0);
        (0..300).any(|_| {
            let mut at = random.uniform() * all;
            let peer = peers.iter().position(|peer| {
                at -= peer.1;
                at < 0.0
            });
            let peer = peer.unwrap_or(99);
            if !(each_once && std::mem::replace(&mut seen[peer], true)) {
                if peers[peer].0 {
                    treated += 1;
                } else {
                    control += 1;
                }
            }
            reached.get(treated, control)
        })
    });
    concluded.count() as f64 / 500.0
}
