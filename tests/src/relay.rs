//! A second link between the two namespaces, that delays packets and drops chosen ones.

pub use rto_lab::link::{
    relay::{Relay, Relayed},
    rule::Matching,
};

use crate::netns::Pair;

/// Address of the server's end.
pub const RELAY_SERVER_V4: &str = "10.89.0.2";
/// Its IPv6 address.
pub const RELAY_SERVER_V6: &str = "fd89::2";

/// The link, without delay and loss.
///
/// # Errors
///
/// If it cannot be made.
pub fn relay(pair: &Pair) -> anyhow::Result<Relay> {
    Relay::new(pair, 0, 0)
}
