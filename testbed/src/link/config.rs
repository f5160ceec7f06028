//! What one direction of a link does to packets: delay, jitter, rate, queue. Losses are rules.

use std::time::{Duration, Instant};

use rand::{Rng, RngExt as _};

/// One direction of a link.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinkConfig {
    /// How long each packet is under way.
    pub delay: Duration,
    /// Up to so much longer, evenly spread.
    pub jitter: Duration,
    /// Bits a second; `None`: no limit.
    pub rate: Option<u64>,
    /// Bytes that wait at the bottleneck at most; what comes then is lost.
    pub queue: u64,
}

impl Default for LinkConfig {
    /// Neither delay nor loss.
    fn default() -> Self {
        Self {
            delay: Duration::ZERO,
            jitter: Duration::ZERO,
            rate: None,
            // A thousand full packets, as a device of Linux has by default.
            queue: 1_500_000,
        }
    }
}

/// One direction, as it is at a moment.
#[derive(Debug, Default)]
pub(super) struct Hop {
    pub(super) config: LinkConfig,
    /// When the bottleneck has sent all it has.
    busy_until: Option<Instant>,
    /// When the last packet leaves.
    last: Option<Instant>,
}

impl Hop {
    /// When a packet of so many bytes leaves; `None` if the queue is full.
    pub(super) fn take(
        &mut self,
        now: Instant,
        bytes: usize,
        rng: &mut impl Rng,
    ) -> Option<Instant> {
        let mut due = now;
        if let Some(rate) = self.config.rate {
            let begin = self.busy_until.map_or(now, |busy| busy.max(now));
            let waits = begin - now;
            if waits > transmission(self.config.queue, rate) {
                return None;
            }
            due = begin + transmission(bytes as u64, rate);
            self.busy_until = Some(due);
        }
        due += self.config.delay;
        if !self.config.jitter.is_zero() {
            due += self.config.jitter.mul_f64(rng.random());
        }
        // Packets keep their order.
        due = self.last.map_or(due, |last| last.max(due));
        self.last = Some(due);
        Some(due)
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
        let due = hop.take(begin + at, bytes, &mut rng())?;
        Some(due - begin)
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
    fn packets_keep_their_order() {
        let begin = Instant::now();
        let of = |seed| -> Vec<Instant> {
            let mut hop = hop(LinkConfig {
                jitter: 1000 * US,
                ..LinkConfig::default()
            });
            let mut rng = ChaCha8Rng::seed_from_u64(seed);
            (0..100)
                .filter_map(|n| hop.take(begin + n * US, 100, &mut rng))
                .collect()
        };
        let all = of(1);
        assert!(all.is_sorted());
        let most = all[99] - begin;
        assert!(most > 900 * US && most < 1100 * US, "{most:?}");
        // A seed gives the same again.
        assert!(all == of(1) && all != of(2));
        // A delay that gets shorter.
        let mut hop = hop(LinkConfig {
            delay: 1000 * US,
            ..LinkConfig::default()
        });
        assert_eq!(after(&mut hop, begin, US, 1), Some(1001 * US));
        hop.config.delay = Duration::ZERO;
        assert_eq!(after(&mut hop, begin, 2 * US, 1), Some(1001 * US));
    }
}
