//! `syn_retries`: when connect() gives up.

use rto_agent_common::syn::Timeouts;
use rto_model::syn::SynTimers;

use super::*;

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

#[test]
fn auto_keeps_the_kernels_deadline() {
    let auto = compiled("initial_rto = '100ms'");
    let by_timer = auto.kernel.flags & policy_flags::GIVES_UP_BY_TIMER;
    assert_eq!((auto.kernel.syn_retries, by_timer), (0, 0));
    let effect = "auto (connect() gives up after 131s, as without the agent)";
    assert_eq!(described(&auto, "syn_retries").as_deref(), Some(effect));
    // Nothing where no timer is shorter.
    for settings in ["initial_rto = '1s'", "rto_min = '52ms'"] {
        assert_eq!(
            described(&compiled(settings), "syn_retries"),
            None,
            "{settings}"
        );
    }
}

#[test]
fn keep_and_a_number_give_up_by_the_policys_timer() {
    let with = |value| compiled(&format!("initial_rto = '100ms'\nsyn_retries = {value}"));
    for (value, retries, effect, gives_up) in [
        ("'keep'", 0, "keep -> the socket's own", "13s"),
        ("3", 3, "3", "1s"),
    ] {
        let compiled = with(value);
        assert_eq!(compiled.kernel.syn_retries, retries);
        assert_ne!(compiled.kernel.flags & policy_flags::GIVES_UP_BY_TIMER, 0);
        let expected =
            format!("{effect} (connect() gives up after {gives_up}; without the agent after 131s)");
        assert_eq!(described(&compiled, "syn_retries"), Some(expected));
        let warned = |w: &String| w.contains(&format!("after {gives_up} instead of 131s"));
        assert!(compiled.warnings.iter().any(warned), "{compiled:?}");
    }
    let later = with("12").warnings;
    assert!(!later.iter().any(|w| w.contains("gives up")), "{later:?}");
}
