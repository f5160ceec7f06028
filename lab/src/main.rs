//! The `rto-lab` binary.

fn main() {}
