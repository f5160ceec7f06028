//! `initial_rto = "auto"`, `guard` and `mode`: the timers after the daemon's decisions, and the
//! program's settings for them.

use std::{ops::RangeInclusive, time::Duration};

use rto_agent_common::{direction, fallback::Fallback, policy_flags};
use rto_model::tune::{law::LEAST_SAMPLES, tuner::HOLD_MS};

use super::compiler::{Compiler, KERNEL_INITIAL_RTO};
use crate::policy::{
    Adjustment, AutoInitialRto, Guard, InitialRtoSetting, Mode, Remark, Settings, Share, Timer,
    units::{format_duration, quantise},
};

/// Range of the accepted share of spurious retransmissions: less would need more connections than a
/// policy has in an hour.
const SPURIOUS: RangeInclusive<Share> = Share::of_ten_thousand(1)..=Share::of_ten_thousand(500);

pub(super) fn auto_initial_rto(
    compiler: &mut Compiler<'_>,
    auto: &AutoInitialRto,
    settings: &Settings,
) {
    check_initial_rto(compiler, auto);
    let Adjustment {
        active, passive, ..
    } = compiler.adjustment;
    let learnt = |timer| match (settings.mode, timer) {
        (Mode::Apply, Timer::Value(_)) => compiler.adjusted(timer, None),
        _ => None,
    };
    (compiler.active, compiler.passive) = (learnt(active.timer), learnt(passive.timer));
    let text = |duration| format_duration(quantise(duration, compiler.host.hz).effective);
    let range = format!(
        "until {LEAST_SAMPLES} connections are counted, then {} to {}",
        text(auto.least()),
        text(auto.largest())
    );
    let note = match (settings.mode, active.timer) {
        (Mode::Advise, _) => Some(ADVISED.to_owned()),
        (Mode::Apply, Timer::Configured) => Some(range),
        (Mode::Apply, Timer::Kernel | Timer::Value(_)) => None,
    };
    let (active, hz) = (compiler.active, compiler.host.hz);
    let effect = compiler.effect("initial_rto", InitialRtoSetting::Auto(*auto));
    effect.set_jiffies(active, hz);
    effect.note = note;
}

fn check_initial_rto(compiler: &mut Compiler<'_>, auto: &AutoInitialRto) {
    let (least, largest) = (auto.least(), auto.largest());
    let mut refuse = |value: String, reason: String| compiler.refuse("initial_rto", value, reason);
    if largest > KERNEL_INITIAL_RTO {
        refuse(
            format!("auto,max={}", format_duration(largest)),
            "a learnt value must be at most the kernel's own 1s; lower max".to_owned(),
        );
    }
    if least.is_zero() || least > largest {
        refuse(
            format!("auto,min={}", format_duration(least)),
            format!(
                "min must be above 0 and at most max, here {}",
                format_duration(largest)
            ),
        );
    }
    if let Some(share) = auto.spurious.filter(|share| !SPURIOUS.contains(share)) {
        let (least, most) = (SPURIOUS.start(), SPURIOUS.end());
        refuse(
            format!("auto,spurious={share}"),
            format!("the share must be {least} to {most}"),
        );
    }
}

/// Compiles `guard` and `mode`.
pub(super) fn guard(compiler: &mut Compiler<'_>, settings: &Settings) {
    let Adjustment {
        active, passive, ..
    } = compiler.adjustment;
    for (direction, of) in [(direction::ACTIVE, active), (direction::PASSIVE, passive)] {
        compiler.kernel.epochs[direction as usize] = of.epoch;
    }
    if compiler.kernel.epochs != [0; 2] {
        compiler.kernel.flags |= policy_flags::GUARDED;
    }
    let has_timer = settings.initial_rto.is_some() || settings.syn_ack_rto.fixed().is_some();
    if settings.guard == Some(Guard::On) && !has_timer {
        let reason = Remark::new(|terms| {
            format!(
                "it guards timers of SYNs and SYN-ACKs, but the policy sets none; add {} or {}",
                terms.name("initial_rto"),
                terms.name("syn_ack_rto")
            )
        });
        compiler.refuse("guard", Guard::On, reason);
    }
    if settings.mode == Mode::Advise && !settings.is_automatic() {
        let reason = Remark::new(|terms| {
            format!(
                "it applies to learnt values, but the policy has none; set {} to \"auto\", or \
                 use rto-agent advise",
                terms.name("initial_rto")
            )
        });
        compiler.refuse("mode", settings.mode, reason);
    }
    if let Some(guard) = settings.guard {
        let on = format!(
            "the kernel's own timers for {} after {} connections with a spurious \
             retransmission, and in outages",
            format_duration(Duration::from_millis(HOLD_MS)),
            Fallback::SPURIOUS
        );
        compiler.effect("guard", guard).note = (guard == Guard::On).then_some(on);
    }
    if settings.mode == Mode::Advise {
        compiler.effect("mode", settings.mode);
    }
}

const ADVISED: &str = "mode = advise: computed and shown, not applied";

#[cfg(test)]
mod tests {
    use super::{
        super::{
            Compiled,
            tests::{compiled, described, errors, on},
        },
        *,
    };
    use crate::{policy::InitialRto, testing::HOST};

    /// An adjustment with these timers for the two directions.
    fn adjustment(active: Timer, passive: Timer) -> Adjustment {
        let of = |timer| InitialRto { timer, epoch: 3 };
        Adjustment {
            active: of(active),
            passive: of(passive),
            ..Adjustment::default()
        }
    }

    /// What the program gets, and what users are shown.
    fn shown(compiled: &Compiled) -> String {
        let kernel = &compiled.kernel;
        let is_guarded = kernel.flags & policy_flags::GUARDED != 0;
        let effects = compiled.effects.iter();
        let effects = effects.map(|e| format!("\n  {}: {}", e.setting, e.describe(HOST.hz)));
        format!(
            "initial_rto {}, syn_ack_rto {:?}, epochs {:?}, guarded {is_guarded}{}",
            kernel.initial_rto_jiffies,
            kernel.syn_ack_rto_jiffies,
            kernel.epochs,
            effects.collect::<String>()
        )
    }

    #[test]
    fn advise_mode_is_shown() {
        for (mode, shown) in [
            ("", false),
            ("mode = 'apply'", false),
            ("mode = 'advise'", true),
        ] {
            let compiled = compiled(&format!("initial_rto = 'auto'\n{mode}"));
            assert_eq!(described(&compiled, "mode").is_some(), shown, "{mode}");
        }
    }

    #[test]
    fn repath_time_does_not_depend_on_the_value() {
        let learnt = Adjustment {
            repath_jiffies: 15,
            ..Adjustment::default()
        };
        for toml in ["initial_rto = 'auto'", "initial_rto = '200ms'"] {
            let compiled = on(&HOST, toml, &learnt);
            assert_eq!(compiled.kernel.repath_jiffies, 15, "{toml}");
        }
    }

    #[test]
    fn adjusted_timers_are_those_of_the_table() {
        use Timer::{Configured, Kernel};
        let ms = |ms| Timer::Value(Duration::from_millis(ms));
        let auto = "initial_rto = 'auto'";
        let advice = &format!("{auto}\nmode = 'advise'");
        let fixed = "initial_rto = '100ms'\nguard = 'on'";
        let own_syn_ack = "initial_rto = 'auto'\nsyn_ack_rto = '300ms'";
        let rows = [
            (auto, Configured, Configured),
            (auto, ms(24), ms(500)),
            (auto, Kernel, ms(500)),
            (auto, Kernel, Kernel),
            (advice, Configured, Configured),
            (advice, ms(24), ms(500)),
            // A fixed value is raised and never lowered.
            (fixed, ms(400), ms(600)),
            (fixed, ms(20), ms(20)),
            (fixed, Kernel, Configured),
            (fixed, Kernel, Kernel),
            // A SYN-ACK timer of its own is not learnt.
            (own_syn_ack, Configured, Configured),
            (own_syn_ack, Configured, ms(400)),
            (own_syn_ack, Configured, Kernel),
            (
                "initial_rto = 'auto'\nsyn_ack_rto = 'keep'",
                Configured,
                ms(24),
            ),
        ];
        let rows = rows.map(|(toml, active, passive)| {
            let adjusted = adjustment(active, passive);
            let compiled = on(&HOST, toml, &adjusted);
            let toml = toml.replace('\n', "; ");
            format!("{toml}: {active:?} {passive:?}\n  {}", shown(&compiled))
        });
        insta::assert_snapshot!(rows.join("\n"));
    }

    #[test]
    fn invalid_auto_settings_are_refused() {
        let mut all = Vec::new();
        for toml in [
            "initial_rto = { auto = true, max = '2s' }",
            "initial_rto = { auto = true, min = '0s' }",
            "initial_rto = { auto = true, min = '100ms', max = '50ms' }",
            "initial_rto = { auto = true, spurious = '0.009%' }",
            "initial_rto = { auto = true, spurious = '5.1%' }",
            "rto_min = '100ms'\nguard = 'on'",
            "initial_rto = '100ms'\nmode = 'advise'",
            "mode = 'advise'",
        ] {
            let errors = errors(&HOST, toml).join("\n  ");
            all.push(format!("{}\n  {errors}", toml.replace('\n', "; ")));
        }
        insta::assert_snapshot!(all.join("\n"));
        for toml in [
            "initial_rto = { auto = true, min = '1ms', max = '1s', spurious = '0.01%' }",
            "initial_rto = { auto = true, min = '1s', spurious = '5%' }",
            "initial_rto = 'auto'\nrto_max = '1s'",
            "syn_ack_rto = '500ms'\nguard = 'on'",
            "initial_rto = '100ms'\nguard = 'off'\nmode = 'apply'",
            "initial_rto = 'auto'\nguard = 'off'",
            "initial_rto = 'auto'\nholdout = '95%'\nmode = 'advise'",
        ] {
            compiled(toml);
        }
    }
}
