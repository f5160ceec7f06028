//! Timers that tune themselves: what a new value is derived from, and when to retreat.

pub mod brake;
pub mod cusum;
pub mod history;
pub mod law;
pub mod quantile;
pub mod tuner;
