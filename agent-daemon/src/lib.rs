//! The daemon of rto-agent: keeps the kernel equal to the configuration, answers the API, learns
//! timers, and serves metrics.

pub mod api;
pub mod build_info;
pub mod daemon;
pub mod engine;
pub mod lock;
mod problem;
pub mod telemetry;
pub mod tuning;
