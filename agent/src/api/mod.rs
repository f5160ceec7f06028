//! HTTP and JSON on a Unix socket; the client half serves the CLI. Routes: `docs/reference/api.md`; what goes over it:
//! [`crate::wire`].

pub(crate) mod body;
pub mod client;
pub mod connection;
mod experiments;
pub mod limit;
pub mod peer;
pub mod server;
pub mod socket;
pub mod stream;
mod tune;

/// Largest request body, bytes: [`MAX_CIDRS`](crate::wire::bounded::MAX_CIDRS) of the longest, which take 24 MB.
pub const MAX_BODY: usize = 32 << 20;
