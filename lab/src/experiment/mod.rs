//! The experiments.

pub mod blackout;
pub mod definition;
pub mod estimator;
pub mod file;
pub mod outage;
pub(crate) mod samples;
pub mod tune;
