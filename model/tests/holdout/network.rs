//! Whole comparisons in a simulated network.

use rto_model::tune::{
    evidence::{Direction, Moments, Probability, Tally},
    holdout::{Arms, Comparison, Counts, GAIN, Increments, Verdict},
};

use crate::random::{Bursts, Random};

/// What is simulated of a network with two arms that do not differ.
#[derive(Clone, Copy)]
pub(crate) struct Network {
    /// Attempts a second.
    pub(crate) rate: f64,
    /// How long a good attempt takes, seconds.
    pub(crate) connect_s: f64,
    /// How long an attempt takes that lost a packet, seconds.
    pub(crate) lossy_s: f64,
    /// Attempts a second to hosts that are down.
    pub(crate) dead: f64,
}

pub(crate) const CALM: Network = Network {
    rate: 20.0,
    connect_s: 0.01,
    lossy_s: 1.0,
    dead: 0.0,
};

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Ended {
    pub(crate) gain: u32,
    pub(crate) harm: u32,
    pub(crate) invalid: u32,
    /// Runs in which the interval of the mean connect times ever excluded 0.
    pub(crate) times: u32,
    /// Runs in which the e-value of a gain was ever reached by the plain counts.
    pub(crate) plain: u32,
}

fn comparison(treated: f64) -> Comparison {
    Comparison::new(Probability::try_from(treated).unwrap())
}

/// The first verdict of each run, looked at every second.
pub(crate) fn runs(network: Network, treated: f64, duration_s: u32, runs: u64) -> Ended {
    let mut ended = Ended::default();
    for run in 0..runs {
        let mut random = Random(run << 20 | 7);
        let mut bursts = Bursts::default();
        let mut comparison = comparison(treated);
        let shares = arms(treated);
        // Those under way when counting begins.
        let mut under_way =
            shares.map(|part| random.poisson(network.rate * part * network.connect_s));
        let mut plain = Arms::<Counts>::default();
        let mut times = Arms::<Times>::default();
        let (mut is_plain_gain, mut is_apart) = (false, false);
        let mut first = None;
        for _ in 0..duration_s {
            let next = second(
                &mut random,
                &mut bursts,
                network,
                shares,
                &mut under_way,
                &mut times,
            );
            plain += next.counts;
            is_plain_gain |= is_gain_by_plain_counts(treated, &plain);
            is_apart |= are_apart(&times);
            first = first.or(comparison.observe(&next, 1000));
        }
        match first {
            Some(Verdict::Gain) => ended.gain += 1,
            Some(Verdict::Harm) => ended.harm += 1,
            Some(Verdict::Invalid) => ended.invalid += 1,
            Some(Verdict::NotYet) | None => {}
        }
        ended.plain += u32::from(is_plain_gain);
        ended.times += u32::from(is_apart);
    }
    ended
}

fn arms(treated: f64) -> Arms<f64> {
    Arms {
        treated,
        control: 1.0 - treated,
    }
}

/// The connect times of established attempts: how many, their sum and the sum of their squares.
#[derive(Clone, Copy, Default)]
struct Times {
    count: f64,
    sum: f64,
    squares: f64,
}

impl Times {
    fn add(&mut self, seconds: f64, count: u64) {
        self.count += count as f64;
        self.sum += count as f64 * seconds;
        self.squares += count as f64 * seconds * seconds;
    }

    fn moments(&self) -> Moments {
        let mean = self.sum / self.count;
        Moments {
            count: self.count,
            mean,
            variance: self.squares / self.count - mean * mean,
        }
    }
}

/// Whether the interval of the difference excludes 0.
fn are_apart(times: &Arms<Times>) -> bool {
    let difference = times.treated.moments().minus(times.control.moments());
    difference.is_some_and(|difference| {
        let [low, high] = difference.interval;
        low > 1e-9 || high < -1e-9
    })
}

/// What a second brings.
fn second(
    random: &mut Random,
    bursts: &mut Bursts,
    network: Network,
    shares: Arms<f64>,
    under_way: &mut Arms<u64>,
    times: &mut Arms<Times>,
) -> Increments {
    let mut lossy = Arms::<u64>::default();
    for _ in 0..bursts.second(random, network.rate) {
        *arm(&mut lossy, random.happens(shares.treated)) += 1;
    }
    let mut dead = Arms::<u64>::default();
    for _ in 0..random.poisson(network.dead) {
        *arm(&mut dead, random.happens(shares.treated)) += 1;
    }
    let mut next = Increments::default();
    for is_treated in [true, false] {
        let part = if is_treated {
            shares.treated
        } else {
            shares.control
        };
        let done = random.poisson(network.rate * part * (1.0 - network.connect_s));
        let now = random.poisson(network.rate * part * network.connect_s);
        let lossy = *arm(&mut lossy, is_treated);
        let bad = lossy + *arm(&mut dead, is_treated);
        let counts = arm(&mut next.counts, is_treated);
        counts.attempts = done + now + bad;
        counts.good = done + std::mem::replace(arm(under_way, is_treated), now);
        let good = counts.good;
        *arm(&mut next.under_way, is_treated) = good as f64 * network.connect_s;
        let times = arm(times, is_treated);
        times.add(network.connect_s, good);
        times.add(network.lossy_s, lossy);
    }
    next
}

/// Without an allowance for attempts under way, and at once.
fn is_gain_by_plain_counts(treated: f64, counts: &Arms<Counts>) -> bool {
    let bad = counts.map(|counts| counts.bad() as f64);
    let tally = Tally {
        share: Probability::try_from(treated).unwrap(),
        treated: bad.treated,
        control: bad.control,
    };
    tally.reaches(Direction::Gain, GAIN)
}

/// 60 clients that connect once a second and give up after 0.3, 0.9, 1 or 3 s, on a path of 5 ms; one in twenty first
/// SYNs is lost. The kernel's own timer sends it again after 1 s. Returns what is proven within two hours, and when.
pub(crate) fn impatient_clients(policy_s: f64, run: u64) -> (Option<Verdict>, u32) {
    const CLIENTS: usize = 60;
    const PATH_S: f64 = 0.005;
    let mut random = Random(run << 20);
    let mut comparison = comparison(0.5);
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
        if let Some(verdict) = comparison.observe(&increments, 1000) {
            return (Some(verdict), second);
        }
    }
    (None, 7200)
}

/// 800 attempts, half of them with 100 ms, on a path of 3 ms on which SYN-ACKs are lost for one second in twelve. A
/// server answers a duplicate SYN 500 ms after its last answer at the earliest, and retransmits a SYN-ACK after 1 s.
pub(crate) fn syn_ack_outages(run: u64) -> Verdict {
    let mut random = Random(run << 20 | 3);
    let mut comparison = comparison(0.5);
    for second in 0..400_u32 {
        let mut increments = Increments::default();
        for _ in 0..2 {
            let is_treated = random.happens(0.5);
            let begins_s = random.uniform();
            let left_s = if second % 12 == 0 {
                1.0 - begins_s
            } else {
                0.0
            };
            let answers_s = match is_treated {
                true => [0.0, 0.5, 1.0],
                false => [0.0, 1.0, 1.0],
            };
            let established_s = answers_s.into_iter().find(|at_s| *at_s >= left_s);
            let counts = arm(&mut increments.counts, is_treated);
            counts.attempts += 1;
            counts.good += u64::from(established_s.is_some_and(|at_s| at_s + 0.003 <= 0.5));
        }
        comparison.observe(&increments, 1000);
    }
    comparison.verdict()
}

fn arm<T>(arms: &mut Arms<T>, is_treated: bool) -> &mut T {
    match is_treated {
        true => &mut arms.treated,
        false => &mut arms.control,
    }
}
