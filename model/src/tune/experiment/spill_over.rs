//! Whether the control arm fares worse the more connections are treated.
//!
//! Both arms share queues. A treatment that fills them harms the control arm too, and then looks like a gain against
//! it (Spang et al., "Unbiased experiments in congested networks", IMC 2021). No comparison of the arms can see that.
//! What can be compared is the control arm with itself, before and after a step of the ramp. Nothing there is drawn at
//! random: another hour, or an outage, changes it as well. So this is a warning. It holds the ramp and the conclusion
//! of a gain, and concludes nothing.

use serde::{Deserialize, Serialize};

use super::{Counts, Outcome};
use crate::advice::Distribution;

/// Standard errors by which a rise is above chance.
///
/// The blocks of both steps are taken for independent draws, and are looked at many times;
/// `docs/research/experiments.md` has how often that warns without cause.
const ERRORS: f64 = 3.0;
/// Blocks that a step needs to be compared.
const BLOCKS: usize = 12;
/// Of a step that lasts longer than it has to only the last blocks are kept.
const MOST_BLOCKS: usize = 128;
/// A rise of the median RTT that is less than half a bucket of the agent's histograms is none.
const RTT_RISE: f64 = 1.125;

/// A stretch of one step, of the control arm.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Block {
    attempts: u64,
    slow: u64,
    median_rtt_us: Option<u64>,
}

/// The control arm during one step, in blocks of time.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Blocks {
    closed: Vec<Block>,
    /// Lost in a restart, and then begun anew.
    #[serde(skip)]
    open: Option<Open>,
}

/// The block that is being counted.
#[derive(Clone, Debug, PartialEq)]
struct Open {
    since_s: u64,
    control: Counts,
    rtt: Distribution,
}

impl Blocks {
    /// Adds what was counted up to `now_s`; a block that is `block_s` old is closed before.
    pub(super) fn add(&mut self, control: Counts, rtt: &Distribution, now_s: u64, block_s: u64) {
        if let Some(open) = self
            .open
            .take_if(|open| now_s >= open.since_s.saturating_add(block_s))
        {
            if self.closed.len() >= MOST_BLOCKS {
                self.closed.remove(0);
            }
            self.closed.push(Block {
                attempts: open.control.attempts,
                slow: open.control.of(Outcome::Beyond500Ms),
                median_rtt_us: open.rtt.quantile_us(0.5),
            });
        }
        let open = self.open.get_or_insert_with(|| Open {
            since_s: now_s,
            control: Counts::default(),
            rtt: Distribution::default(),
        });
        open.control = open.control + control;
        open.rtt.extend(rtt);
    }

    /// Adds those of another host.
    pub(super) fn extend(&mut self, other: &Self) {
        self.closed.extend(&other.closed);
    }

    /// The share of slow connections, and its standard error by blocks.
    fn slow(&self) -> Option<Estimate> {
        if self.closed.len() < BLOCKS {
            return None;
        }
        let sum = |of: fn(&Block) -> u64| self.closed.iter().map(of).sum::<u64>() as f64;
        let attempts = sum(|block| block.attempts);
        if attempts == 0.0 {
            return None;
        }
        let share = sum(|block| block.slow) / attempts;
        let residual = |block: &Block| block.slow as f64 - share * block.attempts as f64;
        let squares: f64 = self.closed.iter().map(|b| residual(b).powi(2)).sum();
        let blocks = self.closed.len() as f64;
        // With nothing slow in a step the error is that of the one that may come next.
        let variance = (squares * blocks / (blocks - 1.0)).max(1.0);
        Some(Estimate {
            value: share,
            variance: variance / (attempts * attempts),
        })
    }

    /// The mean of the blocks' median RTTs, microseconds.
    fn rtt(&self) -> Option<Estimate> {
        let medians = || self.closed.iter().filter_map(|block| block.median_rtt_us);
        let blocks = medians().count();
        if blocks < BLOCKS {
            return None;
        }
        let blocks = blocks as f64;
        let value = medians().sum::<u64>() as f64 / blocks;
        let squares: f64 = medians().map(|us| (us as f64 - value).powi(2)).sum();
        Some(Estimate {
            value,
            variance: squares / (blocks - 1.0) / blocks,
        })
    }
}

/// A mean and the square of its standard error.
#[derive(Clone, Copy, Debug)]
struct Estimate {
    value: f64,
    variance: f64,
}

/// A value of the control arm at the ramp's first share and at the present one.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Change {
    /// At the first share.
    pub first: f64,
    /// At the present one.
    pub present: f64,
    /// The least rise that would be seen: three standard errors between blocks of time.
    pub visible: f64,
}

impl Change {
    fn between(first: Estimate, present: Estimate) -> Self {
        Self {
            first: first.value,
            present: present.value,
            visible: ERRORS * (first.variance + present.variance).sqrt(),
        }
    }

    /// Whether it has risen visibly, and by a factor.
    fn is_rise(self, factor: f64) -> bool {
        self.present - self.first >= self.visible && self.present > self.first * factor
    }
}

/// How the control arm has changed with the share.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SpillOver {
    /// The share of connections beyond 500 ms, 0 to 1; `None` until both steps have twelve blocks.
    pub beyond_500_ms: Option<Change>,
    /// The median RTT, microseconds; `None` until both steps have twelve blocks with RTTs.
    pub median_rtt_us: Option<Change>,
}

impl SpillOver {
    /// From the first step to a later one.
    pub(super) fn between(first: &Blocks, present: &Blocks) -> Self {
        let change =
            |of: fn(&Blocks) -> Option<Estimate>| Some(Change::between(of(first)?, of(present)?));
        Self {
            beyond_500_ms: change(Blocks::slow),
            median_rtt_us: change(Blocks::rtt),
        }
    }

    /// Whether the control arm fares so much worse that it is not chance: the treatment may be the cause.
    pub fn is_suspected(&self) -> bool {
        self.beyond_500_ms.is_some_and(|change| change.is_rise(1.0))
            || self
                .median_rtt_us
                .is_some_and(|change| change.is_rise(RTT_RISE))
    }
}
