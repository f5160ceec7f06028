//! `syn_retries`: when connect() gives up.

use rto_agent_common::syn::Timeouts;
use rto_model::syn::SynTimers;

use super::*;

fn with(syn_retries: SynRetries) -> Compiled {
    compiled(&Settings {
        initial_rto: timer(100),
        syn_retries,
        ..Settings::default()
    })
}

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
    let compiled = with(SynRetries::Auto);
    let by_timer = compiled.kernel.flags & policy_flags::GIVES_UP_BY_TIMER;
    assert_eq!((compiled.kernel.syn_retries, by_timer), (0, 0));
    let effect = compiled.effects.last().unwrap().describe(250);
    assert_eq!(
        effect,
        "auto (connect() gives up after 131s, as without the agent)"
    );
}

#[test]
fn auto_says_nothing_where_no_timer_is_shorter() {
    for settings in ["initial_rto = '1s'", "rto_min = '52ms'"] {
        let compiled = compiled(&toml::from_str(settings).unwrap());
        let named = |e: &EffectiveSetting| e.setting == "syn_retries";
        assert!(!compiled.effects.iter().any(named), "{settings}");
    }
}

#[test]
fn keep_and_a_number_give_up_by_the_policys_timer() {
    for (setting, retries, effect, gives_up) in [
        (SynRetries::Keep, 0, "keep -> the socket's own", "13s"),
        (SynRetries::Fixed(3), 3, "3", "1s"),
    ] {
        let compiled = with(setting);
        assert_eq!(compiled.kernel.syn_retries, retries);
        assert_ne!(compiled.kernel.flags & policy_flags::GIVES_UP_BY_TIMER, 0);
        let described = compiled.effects.last().unwrap().describe(250);
        let expected =
            format!("{effect} (connect() gives up after {gives_up}; without the agent after 131s)");
        assert_eq!(described, expected);
        let warned = |w: &String| w.contains(&format!("after {gives_up} instead of 131s"));
        assert!(compiled.warnings.iter().any(warned), "{compiled:?}");
    }
    assert!(
        !with(SynRetries::Fixed(12))
            .warnings
            .iter()
            .any(|w| w.contains("gives up"))
    );
}
