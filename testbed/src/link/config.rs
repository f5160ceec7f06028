//! What one direction of a link does to packets: delay, jitter, rate, queue, chance loss.

use std::time::{Duration, Instant};

use rand::{Rng, RngExt as _};

/// Losses by chance.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Loss {
    /// None.
    #[default]
    None,
    /// Each packet by itself, with this probability.
    Random(f64),
    /// In bursts (Gilbert 1960, Elliott 1963): a good and a bad state, changed with a probability before each
    /// packet.
    GilbertElliott {
        /// From good to bad.
        to_bad: f64,
        /// From bad to good.
        to_good: f64,
        /// Loss in the good state.
        in_good: f64,
        /// Loss in the bad state.
        in_bad: f64,
    },
}

impl Loss {
    /// The share lost in the long run.
    #[must_use]
    pub fn mean(self) -> f64 {
        match self {
            Self::None => 0.0,
            Self::Random(share) => share,
            Self::GilbertElliott {
                to_bad,
                to_good,
                in_good,
                in_bad,
            } => {
                let changes = to_bad + to_good;
                if changes == 0.0 {
                    // It begins in the good state.
                    return in_good;
                }
                (to_good * in_good + to_bad * in_bad) / changes
            }
        }
    }
}

/// One direction of a link.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinkConfig {
    /// How long each packet is under way.
    pub delay: Duration,
    /// Up to so much longer, evenly spread.
    pub jitter: Duration,
    /// Whether jitter may let packets overtake each other.
    pub reorder: bool,
    /// Bits a second; `None`: no limit.
    pub rate: Option<u64>,
    /// Bytes that wait at the bottleneck at most; what comes then is lost.
    pub queue: u64,
    /// Losses by chance.
    pub loss: Loss,
}

impl Default for LinkConfig {
    /// Neither delay nor loss.
    fn default() -> Self {
        Self {
            delay: Duration::ZERO,
            jitter: Duration::ZERO,
            reorder: false,
            rate: None,
            // A thousand full packets, as a device of Linux has by default.
            queue: 1_500_000,
            loss: Loss::None,
        }
    }
}

/// What becomes of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    /// It leaves at this time.
    Leaves(Instant),
    /// By chance.
    Lost,
    /// The queue was full.
    Overflow,
}

/// One direction, as it is at a moment.
#[derive(Debug, Default)]
pub(super) struct Hop {
    pub(super) config: LinkConfig,
    /// When the bottleneck has sent all it has.
    busy_until: Option<Instant>,
    /// When the last packet leaves.
    last: Option<Instant>,
    bad: bool,
}

impl Hop {
    /// For a packet of so many bytes.
    pub(super) fn take(&mut self, now: Instant, bytes: usize, rng: &mut impl Rng) -> Fate {
        if self.loses(rng) {
            return Fate::Lost;
        }
        let mut due = now;
        if let Some(rate) = self.config.rate {
            let begin = self.busy_until.map_or(now, |busy| busy.max(now));
            let waits = begin - now;
            if waits > transmission(self.config.queue, rate) {
                return Fate::Overflow;
            }
            due = begin + transmission(bytes as u64, rate);
            self.busy_until = Some(due);
        }
        due += self.config.delay;
        if !self.config.jitter.is_zero() {
            due += self.config.jitter.mul_f64(rng.random());
        }
        if !self.config.reorder {
            due = self.last.map_or(due, |last| last.max(due));
        }
        self.last = Some(due);
        Fate::Leaves(due)
    }

    fn loses(&mut self, rng: &mut impl Rng) -> bool {
        match self.config.loss {
            Loss::None => false,
            Loss::Random(share) => rng.random::<f64>() < share,
            Loss::GilbertElliott {
                to_bad,
                to_good,
                in_good,
                in_bad,
            } => {
                let change = if self.bad { to_good } else { to_bad };
                self.bad ^= rng.random::<f64>() < change;
                rng.random::<f64>() < if self.bad { in_bad } else { in_good }
            }
        }
    }
}

/// How long so many bytes take at a rate of bits a second.
fn transmission(bytes: u64, rate: u64) -> Duration {
    let nanos = u128::from(bytes) * 8 * 1_000_000_000 / u128::from(rate.max(1));
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use rand::{SeedableRng as _, rngs::ChaCha8Rng};

    use super::*;

    const US: Duration = Duration::from_micros(1);

    fn rng() -> ChaCha8Rng {
        ChaCha8Rng::seed_from_u64(7)
    }

    fn hop(config: LinkConfig) -> Hop {
        Hop {
            config,
            ..Hop::default()
        }
    }

    fn after(hop: &mut Hop, begin: Instant, at: Duration, bytes: usize) -> Option<Duration> {
        match hop.take(begin + at, bytes, &mut rng()) {
            Fate::Leaves(due) => Some(due - begin),
            Fate::Lost | Fate::Overflow => None,
        }
    }

    #[test]
    fn a_bottleneck_sends_one_after_the_other_and_its_queue_is_finite() {
        // 1250 bytes at 10 Mbit/s are 1 ms; three wait.
        let mut hop = hop(LinkConfig {
            delay: 5 * 1000 * US,
            rate: Some(10_000_000),
            queue: 3 * 1250,
            ..LinkConfig::default()
        });
        let begin = Instant::now();
        let all: Vec<_> = (0..6)
            .map(|_| after(&mut hop, begin, Duration::ZERO, 1250))
            .collect();
        let ms = |n: u32| Some(n * 1000 * US);
        assert_eq!(all, [ms(6), ms(7), ms(8), ms(9), None, None]);
        // It has sent them all.
        assert_eq!(
            after(&mut hop, begin, 20 * 1000 * US, 125),
            Some(25_100 * US)
        );
    }

    #[test]
    fn packets_keep_their_order_unless_they_may_not() {
        let begin = Instant::now();
        for reorder in [false, true] {
            let mut hop = hop(LinkConfig {
                jitter: 1000 * US,
                reorder,
                ..LinkConfig::default()
            });
            let mut rng = rng();
            let all: Vec<_> = (0..100)
                .map(|n| hop.take(begin + n * US, 100, &mut rng))
                .collect();
            let due = |fate: &Fate| match fate {
                Fate::Leaves(due) => *due,
                _ => begin,
            };
            assert_eq!(all.is_sorted_by_key(due), !reorder);
            let most = all.iter().map(due).max().unwrap() - begin;
            assert!(most > 900 * US && most < 1100 * US, "{most:?}");
        }
        // A delay that gets shorter.
        let mut hop = hop(LinkConfig {
            delay: 1000 * US,
            ..LinkConfig::default()
        });
        assert_eq!(after(&mut hop, begin, US, 1), Some(1001 * US));
        hop.config.delay = Duration::ZERO;
        assert_eq!(after(&mut hop, begin, 2 * US, 1), Some(1001 * US));
    }

    /// The share lost, and the mean length of a run of losses.
    fn losses(loss: Loss) -> (f64, f64) {
        const COUNT: u32 = 200_000;
        let mut hop = hop(LinkConfig {
            loss,
            ..LinkConfig::default()
        });
        let mut rng = rng();
        let now = Instant::now();
        let (mut lost, mut runs, mut before) = (0, 0, false);
        for _ in 0..COUNT {
            let is_lost = hop.take(now, 100, &mut rng) == Fate::Lost;
            lost += u32::from(is_lost);
            runs += u32::from(is_lost && !before);
            before = is_lost;
        }
        (
            f64::from(lost) / f64::from(COUNT),
            f64::from(lost) / f64::from(runs.max(1)),
        )
    }

    #[test]
    fn losses_are_as_often_and_as_long_as_they_should_be() {
        assert_eq!(losses(Loss::None).0, 0.0);
        let (share, run) = losses(Loss::Random(0.03));
        // Four deviations of 200,000 draws: 0.0015.
        assert!((share - 0.03).abs() < 0.0016, "{share}");
        assert!((run - 1.0 / 0.97).abs() < 0.02, "{run}");
        let bursts = Loss::GilbertElliott {
            to_bad: 0.01,
            to_good: 0.25,
            in_good: 0.0,
            in_bad: 1.0,
        };
        let (share, run) = losses(bursts);
        assert!((bursts.mean() - 0.01 / 0.26).abs() < 1e-12);
        assert!((share - bursts.mean()).abs() < 0.004, "{share}");
        assert!((run - 4.0).abs() < 0.3, "{run}");
    }

    #[test]
    fn a_seed_gives_the_same_losses_again() {
        let of = |seed| -> Vec<bool> {
            let mut rng = ChaCha8Rng::seed_from_u64(seed);
            let mut hop = hop(LinkConfig {
                loss: Loss::Random(0.5),
                ..LinkConfig::default()
            });
            let now = Instant::now();
            (0..64)
                .map(|_| hop.take(now, 1, &mut rng) == Fate::Lost)
                .collect()
        };
        assert_eq!(of(1), of(1));
        assert_ne!(of(1), of(2));
    }
}
