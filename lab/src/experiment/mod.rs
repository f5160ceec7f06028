//! The experiments.

pub mod blackout;
pub mod definition;
pub mod estimator;
pub mod tune;
