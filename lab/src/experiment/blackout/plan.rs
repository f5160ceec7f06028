//! What is measured: cells of a table, each some times, in random order.

use std::{fmt, time::Duration};

use clap::ValueEnum;
use rand::{SeedableRng as _, rngs::ChaCha8Rng, seq::SliceRandom as _};
use rto_model::{
    published::Column,
    retransmit::{Ideal, LinuxTimers},
};
use serde::{Deserialize, Serialize};

/// How a setting is made.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, ValueEnum, Serialize, Deserialize,
)]
#[serde(rename_all = "kebab-case")]
pub enum Mechanism {
    /// By the agent, at both ends
    Agent,
    /// By the metric of a route (rto_min) and by the application (thin), at both ends
    Route,
    /// By net.ipv4.tcp_rto_min_us and net.ipv4.tcp_thin_linear_timeouts, at both ends
    Sysctl,
    /// Not at all: the kernel's own timers, 200 ms and thick
    Kernel,
}

impl fmt::Display for Mechanism {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Agent => "agent",
            Self::Route => "route",
            Self::Sysctl => "sysctl",
            Self::Kernel => "kernel",
        })
    }
}

/// A setting of both ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Setting {
    /// Whether timeouts are linear.
    pub thin: bool,
    /// rto_min, microseconds.
    pub rto_min_us: u64,
}

impl Setting {
    /// The kernel's own.
    pub const KERNEL: Self = Self {
        thin: false,
        rto_min_us: 200_000,
    };

    /// "thin 8 ms".
    #[must_use]
    pub fn name(self) -> String {
        format!("{} {} ms", self.kind(), self.rto_min_us / 1000)
    }

    /// "thin" or "thick".
    #[must_use]
    pub const fn kind(self) -> &'static str {
        if self.thin { "thin" } else { "thick" }
    }

    /// Where published tables have it; two jiffies are next to their 5 ms.
    #[must_use]
    pub const fn published(self) -> Column {
        Column {
            thin: self.thin,
            rto_min_us: if self.rto_min_us < 20_000 {
                5_000
            } else {
                self.rto_min_us
            },
        }
    }

    /// Whether published tables have the very same rto_min.
    #[must_use]
    pub const fn is_published(self) -> bool {
        self.published().rto_min_us == self.rto_min_us
    }

    /// By the rule alone, milliseconds.
    #[must_use]
    pub fn theory_ms(self, disruption_us: u64) -> f64 {
        let ideal = if self.thin {
            Ideal::thin(self.rto_min_us)
        } else {
            Ideal::thick(self.rto_min_us)
        };
        ms(ideal.idle_us(disruption_us))
    }

    /// As the kernel's timers make it, milliseconds; the median over when it begins.
    #[must_use]
    pub fn model_ms(self, hz: u64, srtt_us: u64, disruption_us: u64) -> f64 {
        let near = LinuxTimers::near(hz, srtt_us).with_rto_min(self.rto_min_us);
        let kernel = if self.thin { near.thin() } else { near };
        ms(kernel.median_idle_us(disruption_us))
    }
}

/// A cell of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Cell {
    /// How its setting is made.
    #[serde(alias = "way")]
    pub mechanism: Mechanism,
    /// Which.
    pub setting: Setting,
    /// How long everything is lost, microseconds.
    pub disruption_us: u64,
}

/// One of a cell's runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Run {
    /// Of which.
    pub cell: Cell,
    /// From 0.
    pub number: u32,
}

/// What is measured, and how often.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// How settings are made.
    #[serde(alias = "ways")]
    pub mechanisms: Vec<Mechanism>,
    /// The settings.
    pub settings: Vec<Setting>,
    /// The disruptions, microseconds.
    pub disruptions_us: Vec<u64>,
    /// Runs of a cell by the agent.
    pub runs: u32,
    /// Runs of a cell that the agent has no part in.
    pub control_runs: u32,
}

impl Plan {
    /// All runs, in an order that the seed makes.
    #[must_use]
    pub fn order(&self, seed: u64) -> Vec<Run> {
        let mut all: Vec<Run> = self
            .cells()
            .into_iter()
            .flat_map(|cell| {
                let runs = match cell.mechanism {
                    Mechanism::Agent | Mechanism::Kernel => self.runs,
                    Mechanism::Route | Mechanism::Sysctl => self.control_runs,
                };
                (0..runs).map(move |number| Run { cell, number })
            })
            .collect();
        all.shuffle(&mut ChaCha8Rng::seed_from_u64(seed));
        all
    }

    /// All cells.
    #[must_use]
    pub fn cells(&self) -> Vec<Cell> {
        let mut cells = Vec::new();
        for (mechanism, setting) in self.testbeds() {
            for &disruption_us in &self.disruptions_us {
                cells.push(Cell {
                    mechanism,
                    setting,
                    disruption_us,
                });
            }
        }
        cells
    }

    /// All settings, as they are made: each needs surroundings of its own.
    #[must_use]
    pub fn testbeds(&self) -> Vec<(Mechanism, Setting)> {
        let mut testbeds = Vec::new();
        for &mechanism in &self.mechanisms {
            match mechanism {
                Mechanism::Kernel => testbeds.push((mechanism, Setting::KERNEL)),
                _ => testbeds.extend(self.settings.iter().map(|setting| (mechanism, *setting))),
            }
        }
        testbeds
    }
}

/// Milliseconds of microseconds.
#[must_use]
#[expect(clippy::cast_precision_loss, reason = "minutes at most")]
pub(super) fn ms(us: u64) -> f64 {
    us as f64 / 1000.0
}

/// Microseconds of a duration.
#[must_use]
pub(super) fn us(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan() -> Plan {
        let thin = Setting {
            thin: true,
            rto_min_us: 8_000,
        };
        Plan {
            mechanisms: vec![Mechanism::Agent, Mechanism::Route, Mechanism::Kernel],
            settings: vec![thin, Setting::KERNEL],
            disruptions_us: vec![10_000, 20_000, 30_000],
            runs: 5,
            control_runs: 2,
        }
    }

    #[test]
    fn every_run_once_in_an_order_of_the_seed() {
        let plan = plan();
        assert_eq!(plan.cells().len(), (2 + 2 + 1) * 3);
        let order = plan.order(1);
        assert_eq!(order.len(), (2 * 5 + 2 * 2 + 5) * 3);
        assert_eq!(order, plan.order(1));
        let mut other = plan.order(2);
        assert_ne!(order, other);
        let mut sorted = order;
        sorted.sort();
        other.sort();
        assert_eq!(sorted, other);
        other.dedup();
        assert_eq!(sorted, other);
    }

    #[test]
    fn settings_and_their_models() {
        let low = Setting {
            thin: false,
            rto_min_us: 8_000,
        };
        assert_eq!(low.name(), "thick 8 ms");
        assert_eq!(low.published().rto_min_us, 5_000);
        assert_eq!(Setting::KERNEL.published().rto_min_us, 200_000);
        assert_eq!(low.theory_ms(20_000), 24.0);
        assert_eq!(low.model_ms(250, 200, 10_000), 16.0);
    }
}
