//! Fixtures for the tests of every crate.

use rto_model::tune::tuner::{Counts, Evidence, Next, State};

use crate::{
    policy::HostFacts,
    wire::tune::{BrakesView, TimerKind, TunedTimer},
};

/// A host with all features, at HZ 250.
pub const HOST: HostFacts = HostFacts {
    hz: 250,
    tcp_syn_retries: 6,
    tcp_syn_linear_timeouts: 4,
    tcp_synack_retries: 5,
    reads_listener: true,
    has_rto_max: true,
    shapes_syns: true,
    has_bpf_thin_linear: true,
    reads_timers: true,
    lacks_rtt_samples: false,
};

/// A learnt timer of 48 ms, at time 1,000 s.
pub fn timer(direction: &str, state: State) -> TunedTimer {
    TunedTimer {
        setting: "initial_rto".to_owned(),
        direction: direction.to_owned(),
        kind: TimerKind::Auto,
        value_us: Some(48_000),
        configured_us: None,
        state,
        evidence: Evidence {
            samples: 5000,
            want_us: Some(24_000),
            counts: Counts {
                connections: 1200,
                spurious: 1,
                ..Counts::default()
            },
            ..Evidence::default()
        },
        alarm: None,
        brakes: Some(BrakesView {
            spurious: 1,
            fuse_spent: 0.05,
            blown: false,
            budget_left: 1.0,
            budget: 256,
            throttled: false,
        }),
        next: Next::Lower {
            to_us: 24_000,
            at_ms: 1_040_000,
        },
        transitions: Vec::new(),
    }
}
