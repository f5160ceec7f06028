//! The experiments.

pub mod blackout;
pub mod definition;
pub mod estimator;
pub(crate) mod samples;
pub mod tune;
