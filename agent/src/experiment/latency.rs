//! How long handshakes took by arm, in blocks of time, for the bootstrap: shown, never tested.

use rto_model::advice::Distribution;
use rto_model::tune::{
    bootstrap::{self, Minute, Quantiles},
    experiment::Arms,
};
use serde::{Deserialize, Serialize};

/// A block's least length, seconds.
const BLOCK_S: u64 = 60;
/// Blocks kept. Where there are more, two become one: of a week a block is 64 minutes.
const BLOCKS: usize = 256;
/// Draws of the bootstrap.
const DRAWS: u32 = 200;

/// Handshakes by arm, in blocks of equal length.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Latency {
    /// When the first block began, seconds.
    since_s: u64,
    /// Length of a block, seconds.
    block_s: u64,
    blocks: Vec<Arms<Distribution>>,
}

impl Latency {
    pub(super) const fn new(since_s: u64) -> Self {
        Self {
            since_s,
            block_s: BLOCK_S,
            blocks: Vec::new(),
        }
    }

    /// Adds what was counted up to now. What comes from before the first block, by a clock that was set, is of the
    /// first one.
    pub(super) fn add(&mut self, times: &Arms<Distribution>, now_s: u64) {
        let mut index = self.index(now_s);
        while index >= BLOCKS {
            self.halve();
            index = self.index(now_s);
        }
        if self.blocks.len() <= index {
            self.blocks.resize_with(index + 1, Arms::default);
        }
        if let Some(block) = self.blocks.get_mut(index) {
            block.treated.extend(&times.treated);
            block.control.extend(&times.control);
        }
    }

    fn index(&self, now_s: u64) -> usize {
        let blocks = now_s.saturating_sub(self.since_s) / self.block_s;
        usize::try_from(blocks).unwrap_or(usize::MAX)
    }

    /// Makes so many blocks of them at most, one at least.
    pub(super) fn coarsen(&mut self, most: usize) {
        while self.blocks.len() > most.max(1) {
            self.halve();
        }
    }

    fn halve(&mut self) {
        let halved = self.blocks.chunks(2).map(|pair| {
            let mut sum = Arms::default();
            for block in pair {
                extend(&mut sum, block);
            }
            sum
        });
        self.blocks = halved.collect();
        self.block_s *= 2;
    }

    /// All blocks together.
    pub(super) fn total(&self) -> Arms<Distribution> {
        let mut sum = Arms::default();
        for block in &self.blocks {
            extend(&mut sum, block);
        }
        sum
    }

    /// A quantile of both arms with its bounds; `None` of fewer than 20 blocks.
    pub(super) fn quantiles(&self, quantile: f64) -> Option<Quantiles> {
        let minutes = self.blocks.iter().map(|block| Minute {
            treated: block.treated.clone(),
            control: block.control.clone(),
        });
        bootstrap::quantiles(&minutes.collect::<Vec<_>>(), quantile, DRAWS)
    }
}

fn extend(sum: &mut Arms<Distribution>, block: &Arms<Distribution>) {
    sum.treated.extend(&block.treated);
    sum.control.extend(&block.control);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(us: u64) -> Arms<Distribution> {
        Arms {
            treated: [us].into_iter().collect(),
            control: [2 * us].into_iter().collect(),
        }
    }

    #[test]
    fn a_week_is_in_as_many_blocks_as_there_may_be() {
        let mut latency = Latency::new(1000);
        for minute in 0..7 * 24 * 60 {
            latency.add(&one(10_000), 1000 + minute * 60);
        }
        assert_eq!(latency.block_s, 64 * 60);
        assert_eq!(latency.blocks.len(), 158);
        let total = latency.total();
        assert_eq!(
            (total.treated.count(), total.control.count()),
            (10_080, 10_080)
        );
        let median = latency.quantiles(0.5).unwrap();
        assert_eq!(
            (median.treated.value_us, median.control.value_us),
            (10_000, 20_000)
        );
    }

    #[test]
    fn a_clock_that_jumps_loses_nothing() {
        let mut latency = Latency::new(1000);
        for now_s in [1000, 10, 1 << 40, 2000] {
            latency.add(&one(5), now_s);
        }
        assert_eq!(latency.total().treated.count(), 4);
        assert!(latency.blocks.len() <= BLOCKS);
    }
}
