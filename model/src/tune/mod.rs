//! Timers that tune themselves, and proof that they help.
//!
//! - [`quantile`], [`history`], [`law`]: what a new value is derived from. [`cusum`], [`brake`]: when to retreat.
//!   [`tuner`]: what a daemon does about it; [`acks`]: the same of `rto_min`. The derivation is in `docs/research/tuning.md`.
//! - [`experiment`] compares a policy's timers with the kernel's own on a share of the connections, by [`evidence`]
//!   (e-values), [`interval`] (the ratio of rates) and [`bootstrap`] (quantiles, shown only). The derivation is in
//!   `docs/research/experiments.md`.

pub mod acks;
pub mod bootstrap;
pub mod brake;
pub mod cusum;
pub mod evidence;
pub mod experiment;
pub mod history;
pub mod interval;
pub mod law;
pub mod quantile;
pub mod tuner;
