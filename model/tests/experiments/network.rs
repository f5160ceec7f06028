//! Whole experiments in a simulated network.

use rto_model::{
    advice::Distribution,
    tune::{
        evidence::Probability,
        experiment::{Design, Event, Experiment, Increments, Ramp, Unit, Verdict},
    },
};

use crate::random::{Bursts, Random};

/// What is simulated of a network with an experiment.
#[derive(Clone, Copy)]
pub(crate) struct Network {
    /// The treatment's rate of connections beyond 500 ms, relative to the control arm's.
    pub(crate) ratio: f64,
    /// By how much losses rise in both arms from the second share on.
    pub(crate) spill_over: f64,
    /// By how much the RTT does.
    pub(crate) rtt_rise: f64,
    /// The share of treated connections with a spurious copy.
    pub(crate) spurious: f64,
}

pub(crate) const CALM: Network = Network {
    ratio: 1.0,
    spill_over: 1.0,
    rtt_rise: 1.0,
    spurious: 0.0,
};

#[derive(Default)]
pub(crate) struct Ended {
    pub(crate) gain: u32,
    pub(crate) harm: u32,
    pub(crate) invalid: u32,
    pub(crate) inconclusive: u32,
    /// Runs that saw the spill-over warning.
    pub(crate) suspected: u32,
    /// Hours until the end, summed up.
    pub(crate) hours: f64,
}

pub(crate) fn design(shares: &[f64], duration_s: u64) -> Design {
    let shares: Vec<_> = shares
        .iter()
        .map(|s| Probability::try_from(*s).unwrap())
        .collect();
    Design {
        policy: "same-region".to_owned(),
        settings: "f00d".to_owned(),
        identity: "a".to_owned(),
        seed: 1,
        unit: Unit::Connection,
        ramp: Ramp::try_from(shares).unwrap(),
        duration_s,
        promote: true,
    }
}

/// Whole experiments of 7 hours with 20 attempts a second, 5 -> 50 -> 95 %, observed every minute.
pub(crate) fn experiments(network: Network, runs: u64) -> Ended {
    let mut ended = Ended::default();
    for run in 0..runs {
        let mut random = Random(run << 20 | 7);
        let mut bursts = Bursts::default();
        let design = design(&[0.05, 0.5, 0.95], 7 * 3600);
        let mut experiment = Experiment::start(design, "a".to_owned(), 0).unwrap();
        let mut suspected = false;
        for now_s in (60..).step_by(60) {
            let share = experiment.share();
            let risen = share > 0.05;
            let mut increments = Increments::default();
            let counts = &mut increments.counts;
            counts.treated.attempts = random.binomial(1200.0, share);
            counts.control.attempts = 1200 - counts.treated.attempts;
            counts.treated.spurious =
                random.poisson(counts.treated.attempts as f64 * network.spurious);
            let factor = if risen { network.spill_over } else { 1.0 };
            for _ in 0..60 {
                for _ in 0..bursts.second(&mut random, 20.0, factor) {
                    if !random.happens(share) {
                        counts.control.beyond_500_ms += 1;
                    } else if random.happens(network.ratio) {
                        counts.treated.beyond_500_ms += 1;
                    }
                }
            }
            // Queues of minutes, 20 samples in each, as the upper ends of buckets a quarter wide.
            let queue = 1.0 + random.uniform().powi(4);
            let rise = if risen { network.rtt_rise } else { 1.0 };
            increments.control_rtt = (0..20)
                .map(|_| {
                    let us = 10_000.0 * rise * queue * (1.0 + 0.3 * random.uniform());
                    2_f64.powf((us.log2() * 4.0).ceil() / 4.0) as u64
                })
                .collect::<Distribution>();
            let event = experiment.observe(&increments, now_s);
            if now_s % 600 == 0 {
                suspected |= experiment.spill_over().is_suspected();
            }
            if let Some(Event::Ended(verdict)) = event {
                match verdict {
                    Verdict::GainProven { .. } => ended.gain += 1,
                    Verdict::Harm { .. } => ended.harm += 1,
                    Verdict::Invalid => ended.invalid += 1,
                    Verdict::Inconclusive | Verdict::Stopped => ended.inconclusive += 1,
                }
                ended.suspected += u32::from(suspected);
                ended.hours += now_s as f64 / 3600.0;
                break;
            }
        }
    }
    ended
}
