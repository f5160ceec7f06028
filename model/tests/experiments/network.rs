//! Whole experiments in a simulated network.

use rto_model::tune::{
    evidence::{Direction, Probability, Tally},
    experiment::{Arms, Design, Event, Experiment, GAIN, Increments, Outcome, Ramp, Unit, Verdict},
};

use crate::random::{Bursts, Random};

/// What is simulated of a network with an experiment.
#[derive(Clone, Copy)]
pub(crate) struct Network {
    /// Attempts a second.
    pub(crate) rate: f64,
    /// How long a good attempt takes, seconds.
    pub(crate) connect_s: f64,
    /// Attempts a second to hosts that are down.
    pub(crate) dead: f64,
    /// The treatment's rate of bad attempts, relative to the control arm's.
    pub(crate) ratio: f64,
    /// The same at shares of 95 % and more.
    pub(crate) ratio_at_last: f64,
    /// The share of treated connections with a spurious copy.
    pub(crate) spurious: f64,
}

pub(crate) const CALM: Network = Network {
    rate: 20.0,
    connect_s: 0.01,
    dead: 0.0,
    ratio: 1.0,
    ratio_at_last: 1.0,
    spurious: 0.0,
};

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Ended {
    pub(crate) gain: u32,
    pub(crate) promoted: u32,
    pub(crate) harm: u32,
    pub(crate) invalid: u32,
    pub(crate) inconclusive: u32,
    /// Runs in which the e-value of a gain was ever reached by the plain counts.
    pub(crate) plain: u32,
    /// Hours until the end, summed up.
    pub(crate) hours: f64,
}

pub(crate) fn design(shares: &[f64], duration_s: u64) -> Design {
    Design {
        policy: "same-region".to_owned(),
        settings: "f00d".to_owned(),
        identity: "a".to_owned(),
        seed: 1,
        unit: Unit::Connection,
        ramp: Ramp::try_from(shares.to_vec()).unwrap(),
        duration_s,
        promote: true,
    }
}

/// Whole experiments, looked at every second.
pub(crate) fn experiments(network: Network, shares: &[f64], duration_s: u64, runs: u64) -> Ended {
    let mut ended = Ended::default();
    for run in 0..runs {
        let mut random = Random(run << 20 | 7);
        let mut bursts = Bursts::default();
        let mut experiment = Experiment::start(design(shares, duration_s), "a".to_owned()).unwrap();
        // Those under way when counting begins.
        let mut under_way = arms(experiment.share())
            .map(|part| random.poisson(network.rate * part * network.connect_s));
        let mut plain: Vec<_> = shares
            .iter()
            .map(|share| (*share, Increments::default()))
            .collect();
        let mut is_plain_gain = false;
        for second in 1.. {
            let share = experiment.share();
            let next = look(&mut random, &mut bursts, network, share, &mut under_way);
            plain[experiment.step()].1.counts += next.counts;
            let event = experiment.observe(&next, 1000);
            is_plain_gain |= is_gain_by_plain_counts(&plain);
            if let Some(Event::Ended(verdict)) = event {
                match verdict {
                    Verdict::GainProven { promoted } => {
                        ended.gain += 1;
                        ended.promoted += u32::from(promoted);
                    }
                    Verdict::Harm { .. } => ended.harm += 1,
                    Verdict::Invalid => ended.invalid += 1,
                    Verdict::Inconclusive | Verdict::Stopped => ended.inconclusive += 1,
                }
                ended.plain += u32::from(is_plain_gain);
                ended.hours += f64::from(second) / 3600.0;
                break;
            }
        }
    }
    ended
}

fn arms(share: f64) -> Arms<f64> {
    Arms {
        treated: share,
        control: 1.0 - share,
    }
}

/// What a second brings.
fn look(
    random: &mut Random,
    bursts: &mut Bursts,
    network: Network,
    share: f64,
    under_way: &mut Arms<u64>,
) -> Increments {
    let ratio = match share >= 0.95 {
        true => network.ratio_at_last,
        false => network.ratio,
    };
    // Of as many as the arm with more bad attempts has.
    let worst = ratio.max(1.0);
    let mut bad = Arms::<u64>::default();
    for _ in 0..bursts.second(random, network.rate, worst) {
        match random.happens(share) {
            true => bad.treated += u64::from(random.happens(ratio / worst)),
            false => bad.control += u64::from(random.happens(1.0 / worst)),
        }
    }
    for _ in 0..random.poisson(network.dead) {
        match random.happens(share) {
            true => bad.treated += 1,
            false => bad.control += 1,
        }
    }
    let mut next = Increments::default();
    let parts = arms(share);
    for (part, bad, before, counts, average) in [
        (
            parts.treated,
            bad.treated,
            &mut under_way.treated,
            &mut next.counts.treated,
            &mut next.under_way.treated,
        ),
        (
            parts.control,
            bad.control,
            &mut under_way.control,
            &mut next.counts.control,
            &mut next.under_way.control,
        ),
    ] {
        let done = random.poisson(network.rate * part * (1.0 - network.connect_s));
        let now = random.poisson(network.rate * part * network.connect_s);
        counts.attempts = done + now + bad;
        counts.good = done + std::mem::replace(before, now);
        *average = counts.good as f64 * network.connect_s;
    }
    let treated = &mut next.counts.treated;
    treated.spurious = random.poisson(treated.attempts as f64 * network.spurious);
    next
}

/// Without an allowance for attempts under way, and at once: what was counted at each share.
fn is_gain_by_plain_counts(counted: &[(f64, Increments)]) -> bool {
    let ln_e = counted.iter().map(|(share, counted)| {
        let bad = counted.counts.map(|counts| counts.of(Outcome::Bad) as f64);
        let tally = Tally {
            share: Probability::try_from(*share).unwrap(),
            treated: bad.treated,
            control: bad.control,
        };
        match tally.at_most(Direction::Gain) >= GAIN.ln() {
            true => tally.ln_e(Direction::Gain),
            false => 0.0,
        }
    });
    ln_e.sum::<f64>() >= GAIN.ln()
}

/// 60 clients that connect once a second and give up after 0.3, 0.9, 1 or 3 s, on a path of 5 ms; one in twenty first
/// SYNs is lost. The kernel's own timer sends it again after 1 s. Returns what is proven within two hours, and when.
pub(crate) fn impatient_clients(policy_s: f64, run: u64) -> (Option<Event>, u32) {
    const CLIENTS: usize = 60;
    const PATH_S: f64 = 0.005;
    let mut random = Random(run << 20);
    let mut experiment = Experiment::start(design(&[0.5], 14_400), "a".to_owned()).unwrap();
    let mut next: Vec<f64> = (0..CLIENTS).map(|_| random.uniform()).collect();
    // Good ones that are not established yet: when, and for how long.
    let mut under_way: Vec<(bool, f64, f64)> = Vec::new();
    for second in 1..7200_u32 {
        let now_s = f64::from(second);
        let mut increments = Increments::default();
        for (client, begins) in next.iter_mut().enumerate() {
            while *begins < now_s {
                let gives_up_s = [0.3, 0.9, 1.0, 3.0][client % 4];
                let is_treated = random.happens(0.5);
                let again_s = if is_treated { policy_s } else { 1.0 };
                let lost = random.happens(0.05);
                let connect_s = if lost { again_s + PATH_S } else { PATH_S };
                arm(&mut increments.counts, is_treated).attempts += 1;
                if connect_s < gives_up_s && connect_s <= 0.5 {
                    under_way.push((is_treated, *begins + connect_s, connect_s));
                }
                // A second after the last one ended.
                *begins += 1.0 + connect_s.min(gives_up_s);
            }
        }
        under_way.retain(|(is_treated, at_s, connect_s)| {
            if *at_s < now_s {
                arm(&mut increments.counts, *is_treated).good += 1;
                *arm(&mut increments.under_way, *is_treated) += connect_s;
            }
            *at_s >= now_s
        });
        if let Some(event) = experiment.observe(&increments, 1000) {
            return (Some(event), second);
        }
    }
    (None, 7200)
}

fn arm<T>(arms: &mut Arms<T>, is_treated: bool) -> &mut T {
    match is_treated {
        true => &mut arms.treated,
        false => &mut arms.control,
    }
}
