//! HTTP and JSON on a Unix socket. Routes: `docs/reference/api.md`; types:
//! [`rto_agent_core::wire`].

pub mod body;
pub mod connection;
pub mod peer;
pub mod server;
pub mod socket;

/// Largest request body, bytes: the longest [`MAX_CIDRS`](rto_agent_core::wire::bounded::MAX_CIDRS) CIDRs
/// take 24 MB.
pub const MAX_BODY: usize = 32 << 20;
