//! The effects of one direction of a link on packets: delay, jitter, rate, queue. Losses are rules ([`super::rule`]).

use std::time::{Duration, Instant};

use rand::{Rng, RngExt as _};

/// One direction of a link.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinkConfig {
    /// Propagation delay of each packet.
    pub delay: Duration,
    /// Largest additional delay; it is uniformly distributed.
    pub jitter: Duration,
    /// Bits per second; `None`: no limit.
    pub rate: Option<u64>,
    /// Largest queue at the bottleneck, bytes; packets that do not fit are dropped.
    pub queue: u64,
}

impl Default for LinkConfig {
    /// No delay, and a queue of the usual length.
    fn default() -> Self {
        Self {
            delay: Duration::ZERO,
            jitter: Duration::ZERO,
            rate: None,
            // 1000 full-size packets, the default queue length of a Linux device.
            queue: 1_500_000,
        }
    }
}

/// The state of one direction.
#[derive(Debug, Default)]
pub(super) struct Hop {
    pub(super) config: LinkConfig,
    /// When the bottleneck has sent everything in its queue.
    busy_until: Option<Instant>,
    /// When the last packet leaves.
    last: Option<Instant>,
}

impl Hop {
    /// When a packet of this many bytes leaves; `None` if the queue is full.
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

/// Serialisation time of a number of bytes at a rate in bits per second.
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
    fn bottleneck_serialises_packets_and_drops_when_full() {
        // 1250 bytes take 1 ms at 10 Mbit/s; the queue holds three.
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
        // The queue is empty again.
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
        // The same seed yields the same delays.
        assert!(all == of(1) && all != of(2));
        // A shorter delay must not reorder packets.
        let mut hop = hop(LinkConfig {
            delay: 1000 * US,
            ..LinkConfig::default()
        });
        assert_eq!(after(&mut hop, begin, US, 1), Some(1001 * US));
        hop.config.delay = Duration::ZERO;
        assert_eq!(after(&mut hop, begin, 2 * US, 1), Some(1001 * US));
    }
}
