//! rto-agent.
fn main() {}
