//! Generated paths: round-trip times, losses, and events that change them.

use std::{f64::consts::TAU, ops::Range};

use rand::{RngExt as _, rngs::ChaCha8Rng};

/// The distribution of peers, and the variation of a single round trip.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Shape {
    /// Peers and round trips vary by log-normal factors.
    Lognormal {
        /// Standard deviation of the logarithm, for peers.
        peers: f64,
        /// Standard deviation of the logarithm, for round trips.
        trips: f64,
    },
    /// Each round trip is a Pareto variable.
    Pareto {
        /// The tail's exponent.
        alpha: f64,
    },
    /// Some peers are farther away; otherwise as above.
    Bimodal {
        /// Their share, 0 to 1.
        far: f64,
        /// The factor of their distance.
        factor: f64,
    },
    /// A queue whose load varies: exponential waits.
    Queue {
        /// The lowest load, 0 to 1.
        low: f64,
        /// The highest load, 0 to 1.
        high: f64,
        /// Time between peaks, seconds.
        period_s: f64,
    },
    /// A queue each evening from 18 to 23 o'clock.
    Evening {
        /// The largest mean wait, as a multiple of the median RTT.
        wait: f64,
    },
}

impl Shape {
    /// Its name in tables.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Lognormal { .. } => "lognormal",
            Self::Pareto { .. } => "Pareto",
            Self::Bimodal { .. } => "bimodal",
            Self::Queue { .. } | Self::Evening { .. } => "queue",
        }
    }
}

/// A change of a path.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Change {
    /// Round trips take this many times as long.
    Factor(f64),
    /// An additional share of the packets is lost, 0 to 1.
    Loss(f64),
    /// This share of the SYN-ACKs is lost, 0 to 1.
    SynAckLoss(f64),
    /// A firewall or a queue holds each SYN for this time, microseconds.
    SynDelay(f64),
}

/// Its time, seconds, and the change.
pub type Event = (Range<f64>, Change);

/// A prefix's path.
#[derive(Clone, Debug, PartialEq)]
pub struct Path {
    /// Shape of the round-trip times.
    pub shape: Shape,
    /// The median, or the minimum of a Pareto distribution or of a queue, microseconds.
    pub base_us: f64,
    /// Connections per second.
    pub per_s: f64,
    /// Loss of packets in each direction, 0 to 1.
    pub loss: f64,
    /// Its events.
    pub events: Vec<Event>,
}

/// Two independent standard normal variables (Box and Muller 1958).
fn normals(rng: &mut ChaCha8Rng) -> (f64, f64) {
    let radius = (-2.0 * (1.0 - rng.random::<f64>()).ln()).sqrt();
    let (sin, cos) = (TAU * rng.random::<f64>()).sin_cos();
    (radius * sin, radius * cos)
}

/// An exponential variable with mean 1.
pub(super) fn exponential(rng: &mut ChaCha8Rng) -> f64 {
    -(1.0 - rng.random::<f64>()).ln()
}

/// Variation of round trips, for the shapes that do not define one.
const TRIPS: f64 = 0.05;

impl Path {
    /// A path of a metropolitan network: 10 ms, 0.5 % loss.
    pub const fn metro(per_s: f64) -> Self {
        Self {
            shape: Shape::Lognormal {
                peers: 0.2,
                trips: 0.1,
            },
            base_us: 10_000.0,
            per_s,
            loss: 0.005,
            events: Vec::new(),
        }
    }

    /// The n-th path of a fleet: each shape equally often, half of them with events within `seconds`.
    pub fn generated(n: usize, seconds: f64, rng: &mut ChaCha8Rng) -> Self {
        let mut log_uniform = |from: f64, to: f64| from * (to / from).powf(rng.random());
        let base_us = log_uniform(200.0, 100_000.0);
        let per_s = log_uniform(1.0, 40.0);
        let far = log_uniform(0.001, 0.5);
        let mut uniform = |from: f64, to: f64| from + (to - from) * rng.random::<f64>();
        let eventful = n % 8 >= 4;
        let shape = match n % 4 {
            0 => Shape::Lognormal {
                peers: uniform(0.05, 0.6),
                trips: uniform(0.02, 0.3),
            },
            1 => Shape::Pareto {
                alpha: uniform(2.0, 6.0),
            },
            2 => Shape::Bimodal {
                far,
                factor: uniform(2.0, 10.0),
            },
            _ => {
                let high = uniform(0.2, 0.8);
                Shape::Queue {
                    // A varying load counts as an event.
                    low: if eventful { uniform(0.1, 0.5) } else { high },
                    high,
                    period_s: uniform(1_800.0, 7_200.0),
                }
            }
        };
        let loss = uniform(0.0, 0.01);
        let mut events = Vec::new();
        if eventful {
            let at = uniform(0.1, 0.9) * seconds;
            match n / 8 % 3 {
                0 => events.push((at..f64::INFINITY, Change::Factor(uniform(0.3, 8.0)))),
                1 => {
                    for _ in 0..3 {
                        let from_s = uniform(0.1, 0.9) * seconds;
                        let to_s = from_s + uniform(0.5, 20.0);
                        events.push((from_s..to_s, Change::Factor(uniform(2.0, 8.0))));
                    }
                }
                _ => {
                    for _ in 0..5 {
                        let from_s = uniform(0.1, 0.9) * seconds;
                        let to_s = from_s + uniform(0.1, 5.0);
                        events.push((from_s..to_s, Change::Loss(uniform(0.2, 1.0))));
                    }
                }
            }
        }
        Self {
            shape,
            base_us,
            per_s,
            loss,
            events,
        }
    }

    /// The distance of a connection's peer, as a multiple.
    pub(super) fn peer(&self, rng: &mut ChaCha8Rng) -> f64 {
        match self.shape {
            Shape::Lognormal { peers, .. } => (peers * normals(rng).0).exp(),
            Shape::Bimodal { far, factor } if rng.random::<f64>() < far => factor,
            _ => 1.0,
        }
    }

    /// A round trip that begins at this time, microseconds.
    pub(super) fn rtt_us(&self, at_s: f64, peer: f64, rng: &mut ChaCha8Rng) -> f64 {
        let multiple = match self.shape {
            Shape::Lognormal { trips, .. } => peer * (trips * normals(rng).0).exp(),
            Shape::Pareto { alpha } => (1.0 - rng.random::<f64>()).powf(-1.0 / alpha),
            Shape::Bimodal { .. } => peer * (TRIPS * normals(rng).0).exp(),
            Shape::Queue {
                low,
                high,
                period_s,
            } => {
                let load = low + (high - low) * (1.0 - (TAU * at_s / period_s).cos()) / 2.0;
                1.0 + load / (1.0 - load) * exponential(rng)
            }
            Shape::Evening { wait } => {
                let hour = at_s / 3600.0 % 24.0;
                // Rises for one hour, stays constant, and falls for one hour.
                let level = (hour - 18.0).min(23.0 - hour).clamp(0.0, 1.0);
                (TRIPS * normals(rng).0).exp() + wait * level * exponential(rng)
            }
        };
        self.base_us * multiple * self.factor(at_s)
    }

    fn changes(&self, at_s: f64) -> impl Iterator<Item = Change> {
        let now = self
            .events
            .iter()
            .filter(move |(when, _)| when.contains(&at_s));
        now.map(|(_, change)| *change)
    }

    fn factor(&self, at_s: f64) -> f64 {
        let factors = self.changes(at_s).map(|change| match change {
            Change::Factor(factor) => factor,
            _ => 1.0,
        });
        factors.product()
    }

    /// Loss of SYNs and of SYN-ACKs that are sent at this time, 0 to 1.
    pub(super) fn losses_at(&self, at_s: f64) -> [f64; 2] {
        let [mut syns, mut syn_acks] = [self.loss; 2];
        for change in self.changes(at_s) {
            match change {
                Change::Loss(share) => (syns, syn_acks) = (syns.max(share), syn_acks.max(share)),
                Change::SynAckLoss(share) => syn_acks = syn_acks.max(share),
                Change::Factor(_) | Change::SynDelay(_) => {}
            }
        }
        [syns, syn_acks]
    }

    /// How long a SYN that is sent at this time is held, microseconds.
    pub(super) fn syn_delay_us(&self, at_s: f64) -> f64 {
        let delays = self.changes(at_s).map(|change| match change {
            Change::SynDelay(us) => us,
            _ => 0.0,
        });
        delays.sum()
    }

    /// The value that this share of the first round trips of connections in this time does not
    /// exceed, microseconds; estimated from `draws` of them.
    pub fn quantile_us(
        &self,
        share: f64,
        from_s: f64,
        to_s: f64,
        draws: usize,
        rng: &mut ChaCha8Rng,
    ) -> f64 {
        let mut times: Vec<f64> = (0..draws.max(1))
            .map(|_| {
                let at_s = from_s + (to_s - from_s) * rng.random::<f64>();
                let peer = self.peer(rng);
                self.rtt_us(at_s, peer, rng)
            })
            .collect();
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "an index of a list, held within it"
        )]
        let index = ((share * times.len() as f64) as usize).min(times.len() - 1);
        *times.select_nth_unstable_by(index, f64::total_cmp).1
    }
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng as _;

    use super::*;

    #[test]
    fn quantiles_are_those_of_the_distribution() {
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        let pareto = Path {
            shape: Shape::Pareto { alpha: 2.0 },
            ..Path::metro(1.0)
        };
        for (path, share, expected) in [
            // exp(3.0902 * sqrt(0.2^2 + 0.1^2)) and 0.001^(-1/2).
            (Path::metro(1.0), 0.999, 19_957.0),
            (Path::metro(1.0), 0.5, 10_000.0),
            (pareto, 0.999, 316_228.0),
        ] {
            let found = path.quantile_us(share, 0.0, 1.0, 200_000, &mut rng);
            assert!((found / expected - 1.0).abs() < 0.1, "{found} {expected}");
        }
    }

    #[test]
    fn events_change_a_path_while_they_last() {
        let path = Path {
            events: vec![
                (10.0..20.0, Change::Factor(3.0)),
                (15.0..16.0, Change::Loss(0.5)),
            ],
            ..Path::metro(1.0)
        };
        assert_eq!(
            (path.factor(9.9), path.factor(10.0), path.factor(20.0)),
            (1.0, 3.0, 1.0)
        );
        let losses = [15.5, 16.0].map(|at_s| path.losses_at(at_s));
        assert_eq!(losses, [[0.5, 0.5], [0.005, 0.005]]);
    }

    #[test]
    fn evening_lasts_from_18_to_23() {
        let path = Path {
            shape: Shape::Evening { wait: 4.0 },
            ..Path::metro(1.0)
        };
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        let mut at = |hour: f64| {
            let s = hour * 3600.0;
            path.quantile_us(0.9, s, s, 10_000, &mut rng)
        };
        assert!(at(17.9) < 12_000.0 && at(20.0) > 90_000.0 && at(47.0) < 12_000.0);
    }
}
