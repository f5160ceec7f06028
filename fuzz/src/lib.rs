//! Untrusted inputs of rto-agent, each with the properties that must hold for any input: `check` panics if one does
//! not.
//!
//! The fuzzer calls these functions (`cargo xtask fuzz`), and so does a test with every seed (`tests/seeds.rs`): each
//! input that once failed stays a seed.
#![expect(
    clippy::missing_panics_doc,
    clippy::expect_used,
    reason = "to panic is what they are for: see above"
)]

pub mod api;
pub mod config;
pub mod events;
pub mod pcap;

/// Values of HZ that kernels are built with.
const HZ: [u32; 4] = [100, 250, 300, 1000];
