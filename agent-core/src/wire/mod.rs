//! The types of the control socket and of `--json`: the engine produces them, and the CLI reads
//! them.

pub mod bounded;
pub mod discover;
pub mod events;
pub mod histogram;
pub mod holdout;
pub mod kernel;
#[cfg(test)]
mod schema;
pub mod stats;
pub mod ttl;
pub mod tune;
pub mod types;
