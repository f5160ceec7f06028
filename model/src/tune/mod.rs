//! Timers that are tuned, and proof that they help.
//!
//! [`experiment`] compares a policy's timers with the kernel's own on a share of the connections, by [`evidence`]
//! (e-values), [`interval`] (the ratio of rates) and [`bootstrap`] (quantiles, shown only). The derivation is in
//! `docs/research/experiments.md`.

pub mod bootstrap;
pub mod evidence;
pub mod experiment;
pub mod interval;
