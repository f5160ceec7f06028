//! The experiments.

pub mod blackout;
pub mod estimator;
pub mod loss;
pub mod rtt;
pub mod tail;
pub mod tune;
