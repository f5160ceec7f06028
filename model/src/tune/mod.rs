//! Self-tuning timers, and experiments that prove their benefit.
//!
//! - [`quantile`], [`history`], [`law`]: derive a value. [`tuner`]: decides what the daemon does
//!   with it. [`budget`]: how much the program may retransmit. See `docs/research/tuning.md`.
//! - [`experiment`]: compares a policy's timers with the kernel's own on a share of the
//!   connections, with [`evidence`] (e-values, and intervals for the ratio of rates). See
//!   `docs/research/experiments.md`.

pub mod budget;
pub mod evidence;
pub mod experiment;
pub mod history;
pub mod law;
pub mod quantile;
pub mod tuner;
