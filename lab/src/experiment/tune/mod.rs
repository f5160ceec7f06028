//! `initial_rto = "auto"`, simulated: what the control law, the budget and the fuse do to connections.

pub mod fleet;
pub mod handshake;
pub mod host;
pub mod overload;
pub mod path;
