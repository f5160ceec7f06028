//! `syn_retries`: when connect() gives up.

use rto_agent_common::syn::Timeouts;
use rto_model::syn::SynTimers;

/// The program computes deadlines in milliseconds, the model in jiffies.
#[test]
fn program_gives_up_when_the_model_does() {
    for initial_rto_ms in [4, 20, 100, 500, 1000] {
        for retries in 1..=40 {
            for (linear, rto_max_ms) in [(0, 120_000), (1, 120_000), (4, 120_000), (4, 20_000)] {
                let program = Timeouts {
                    initial_rto_ms,
                    retries,
                    linear,
                    rto_max_ms,
                };
                let model = SynTimers {
                    initial_rto: initial_rto_ms.into(),
                    rto_max: rto_max_ms.into(),
                    syn_retries: u8::try_from(retries).unwrap(),
                    linear_timeouts: u8::try_from(linear).unwrap(),
                };
                assert_eq!(program.gives_up(0), model.gives_up(), "{program:?}");
            }
        }
    }
}
