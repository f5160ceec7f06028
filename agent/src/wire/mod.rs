//! What goes over the control socket, and what `--json` prints: the engine makes it, and the CLI reads it.

pub mod bounded;
pub mod discover;
pub mod events;
pub mod experiments;
pub mod histogram;
#[cfg(test)]
mod schema;
pub mod stats;
pub mod ttl;
pub mod tune;
pub mod types;
