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

use rto_agent_core::policy::HostFacts;

pub mod api;
pub mod config;
pub mod events;
pub mod pcap;

/// A host with all features.
const HOST: HostFacts = HostFacts {
    reads_timers: true,
    lacks_rtt_samples: false,
    hz: 250,
    tcp_syn_retries: 6,
    tcp_syn_linear_timeouts: 4,
    tcp_synack_retries: 5,
    reads_listener: true,
    has_rto_max: true,
    has_bpf_thin_linear: true,
};

/// Values of HZ that kernels are built with.
const HZ: [u32; 4] = [100, 250, 300, 1000];
