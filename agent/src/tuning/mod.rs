//! Timers that tune themselves and brakes, by policy: what was counted becomes decisions. Pure: no I/O, no clock.

use std::collections::BTreeMap;

use crate::policy::{Adjustments, PolicyName, Settings};

/// What is tuned and guarded, by policy.
#[derive(Debug, Default)]
pub struct Tuning {}

impl Tuning {
    /// Whether any policy needs what was counted each second.
    #[must_use]
    pub fn needs_ticks(&self) -> bool {
        false
    }

    /// Adds what is decided about these policies.
    pub fn adjust(&self, _policies: &BTreeMap<&PolicyName, &Settings>, _all: &mut Adjustments) {}

    /// Goes by these policies from now on.
    pub fn follow(&mut self, _policies: &BTreeMap<&PolicyName, &Settings>) {}
}
