//! Timers that tune themselves, and proof that they help.
//!
//! - [`quantile`], [`history`], [`law`]: what a value is derived from. [`tuner`]: what a daemon does about it, and
//!   [`budget`]: how much the program may retransmit. The derivation is in `docs/research/tuning.md`.
//! - [`experiment`] compares a policy's timers with the kernel's own on a share of the connections, by [`evidence`]
//!   (e-values, and intervals of the ratio of rates). The derivation is in `docs/research/experiments.md`.

pub mod budget;
pub mod evidence;
pub mod experiment;
pub mod history;
pub mod law;
pub mod quantile;
pub mod tuner;
