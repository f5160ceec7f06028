//! Fixtures for the tests of every crate.

use rto_model::tune::{
    evidence::Ratio,
    holdout::{Arms, Assessment, Verdict},
    tuner::{Counts, Evidence, Next, State},
};

use crate::{
    policy::{HostFacts, Share},
    wire::{
        holdout::{ArmConnects, Difference, HoldoutView},
        tune::{TimerKind, TunedTimer},
    },
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
    is_bbr_default: false,
    reads_timers: true,
};

/// A learnt timer of 48 ms, at time 1,000 s.
pub fn timer(direction: &str, state: State) -> TunedTimer {
    TunedTimer {
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
            },
            ..Evidence::default()
        },
        alarm: None,
        next: Next::Lower {
            to_us: 24_000,
            at_ms: 1_040_000,
        },
        transitions: Vec::new(),
    }
}

/// A comparison with this verdict, in which a twentieth of 10,000 attempts is in the control arm.
pub fn holdout(verdict: Verdict) -> HoldoutView {
    HoldoutView {
        verdict,
        text: verdict.name().to_owned(),
        fallback: verdict == Verdict::Harm,
        share: Share::of_ten_thousand(500),
        since_ms: Some(1_700_000_000_000),
        at_ms: None,
        arms: Arms {
            treated: ArmConnects {
                attempts: 9500,
                bad: 25,
                mean_connect_time_us: Some(1500.0),
            },
            control: ArmConnects {
                attempts: 500,
                bad: 6,
                mean_connect_time_us: Some(3000.0),
            },
        },
        evidence: Assessment {
            ratio: Ratio {
                likeliest: Some(0.22),
                low: 0.1,
                high: None,
            },
            gain_e: 2.5,
            harm_e: 0.5,
            mismatch_e: 1.0,
            attempts_needed: Some(12_000),
        },
        connect_time_difference: Some(Difference {
            mean_us: -1500.0,
            interval_us: [-2000.0, -1000.0],
        }),
    }
}
