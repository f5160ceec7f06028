//! HTTP and JSON on a Unix socket; the client half serves the CLI. Routes and fields: `docs/reference/api.md`.

pub(crate) mod body;
pub mod bounded;
pub mod client;
pub mod events;
pub mod limit;
pub mod peer;
pub mod server;
pub mod settings;
pub mod socket;
pub mod stats;
pub mod ttl;
pub mod types;

/// Largest request body, bytes: some 300,000 CIDRs in one `add`.
pub const MAX_BODY: usize = 16 << 20;
