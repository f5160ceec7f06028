//! HTTP and JSON on a Unix socket; the client is used by the CLI. Routes: `docs/reference/api.md`;
//! types: [`crate::wire`].

pub(crate) mod body;
pub mod client;
pub mod connection;
pub mod peer;
pub mod server;
pub mod socket;
pub mod stream;

/// Largest request body, bytes: the longest [`MAX_CIDRS`](crate::wire::bounded::MAX_CIDRS) CIDRs
/// take 24 MB.
pub const MAX_BODY: usize = 32 << 20;
