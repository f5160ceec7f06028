//! `initial_rto = "auto"`, `guard` and `mode`: the timers after the daemon's decisions, and the
//! program's settings for them.

use std::{ops::RangeInclusive, time::Duration};

use rto_agent_common::{brake::Brake, direction, policy_flags};
use rto_model::tune::{law::LEAST_SAMPLES, tuner::HOLD_MS};

use super::{Compiler, EffectiveSetting, KERNEL_INITIAL_RTO};
use crate::policy::{
    Adjustment, AutoInitialRto, Guard, InitialRto, InitialRtoSetting, Mode, Settings, Share, Timer,
    units::{format_duration, jiffies_duration, quantise},
};

/// Range of the accepted share of spurious retransmissions: less would need more connections than a
/// policy has in an hour.
const SPURIOUS: RangeInclusive<Share> = Share::of_ten_thousand(1)..=Share::of_ten_thousand(500);
/// The largest [`rto_agent_common::Policy::budgets`]: the program adds up what is spent in a signed
/// 32-bit number.
const MOST_BUDGET: u32 = i32::MAX.cast_unsigned() / 2;

impl Compiler<'_> {
    /// The timer of a direction, jiffies. The daemon only ever lengthens a configured timer.
    pub(super) fn adjusted(&self, timer: Timer, configured: Option<u64>) -> Option<u64> {
        match timer {
            Timer::Configured => configured,
            Timer::Kernel => None,
            Timer::Value(value) => {
                let jiffies = self.host.initial_rto(value);
                Some(jiffies.max(configured.unwrap_or_default()))
            }
        }
    }

    /// Records the effective timer after a decision of the guard.
    pub(super) fn adjusted_effect(&mut self, setting: &str, asked: &str, jiffies: Option<u64>) {
        let hz = self.host.hz;
        let effect = self.effect(setting, asked);
        effect.set_jiffies(jiffies, hz);
        effect.note = Some("by the guard".to_owned());
    }

    pub(super) fn auto_initial_rto(&mut self, auto: &AutoInitialRto, settings: &Settings) {
        self.check_initial_rto(auto);
        let Adjustment {
            active, passive, ..
        } = self.adjustment;
        let learnt = |timer| match (settings.mode, timer) {
            (Mode::Apply, Timer::Value(_)) => self.adjusted(timer, None),
            _ => None,
        };
        (self.active, self.passive) = (learnt(active.timer), learnt(passive.timer));
        let text = |duration| format_duration(quantise(duration, self.host.hz).effective);
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
        let (active, hz) = (self.active, self.host.hz);
        let effect = self.effect("initial_rto", InitialRtoSetting::Auto(*auto));
        effect.set_jiffies(active, hz);
        effect.note = note;
    }

    fn check_initial_rto(&mut self, auto: &AutoInitialRto) {
        let (least, largest) = (auto.least(), auto.largest());
        let mut refuse = |value: String, reason: String| self.refuse("initial_rto", value, reason);
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

    /// Compiles `guard` and `mode`, and the brakes in the program.
    pub(super) fn guard(&mut self, settings: &Settings) {
        let Adjustment {
            active, passive, ..
        } = self.adjustment;
        for (direction, of) in [(direction::ACTIVE, active), (direction::PASSIVE, passive)] {
            let InitialRto { epoch, budget, .. } = *of;
            self.kernel.epochs[direction as usize] = epoch;
            self.kernel.budgets[direction as usize] = budget
                .saturating_mul(Brake::BUDGET_COST.cast_unsigned())
                .min(MOST_BUDGET);
        }
        let guard = settings.guard();
        let has_timer = settings.initial_rto.is_some() || settings.syn_ack_rto.fixed().is_some();
        match settings.guard {
            Some(Guard::Warn | Guard::Off) if settings.is_automatic() => self.refuse(
                "guard",
                guard,
                "learnt values always have brakes; remove guard, or set guard = \"on\"",
            ),
            Some(Guard::On) if !has_timer && !settings.is_automatic() => self.refuse(
                "guard",
                guard,
                "it guards timers of SYNs and SYN-ACKs, but the policy sets none; add initial_rto \
                 or syn_ack_rto",
            ),
            _ => {}
        }
        if settings.mode == Mode::Advise && !settings.is_automatic() {
            self.refuse(
                "mode",
                settings.mode,
                "it applies to learnt values, but the policy has none; set initial_rto to \"auto\", \
                 or use rto-agent advise",
            );
        }
        let is_on = guard == Guard::On;
        if settings.guard.is_some() || is_on {
            let on = format!(
                "the kernel's own timer for {} after {} spurious SYNs or SYN-ACKs",
                format_duration(Duration::from_millis(HOLD_MS)),
                Brake::SPURIOUS
            );
            self.effect("guard", guard).note = is_on.then_some(on);
        }
        if settings.mode == Mode::Advise {
            self.effect("mode", settings.mode);
        }
    }

    /// Learnt initial RTOs end with the lease. The program checks the lease together with the
    /// brakes.
    pub(super) fn lease(&mut self, settings: &Settings) {
        let is_learnt = settings.auto_initial_rto().is_some();
        let (active, passive) = (policy_flags::LEASED_ACTIVE, policy_flags::LEASED_PASSIVE);
        for (direction, timer, leased) in [
            (direction::ACTIVE, self.active, active),
            (direction::PASSIVE, self.passive, passive),
        ] {
            if is_learnt && timer.is_some() {
                self.kernel.flags |= leased;
                let epoch = &mut self.kernel.epochs[direction as usize];
                *epoch = (*epoch).max(1);
            }
        }
        if self.kernel.epochs != [0; 2] {
            self.kernel.flags |= policy_flags::BRAKED;
        }
    }
}

impl EffectiveSetting {
    /// Sets the effective timer; `None`: the kernel's own.
    pub(super) fn set_jiffies(&mut self, jiffies: Option<u64>, hz: u32) {
        self.jiffies = jiffies;
        self.effective = match jiffies {
            Some(jiffies) => format_duration(jiffies_duration(jiffies, hz)),
            None => "the kernel's own".to_owned(),
        };
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
    use crate::testing::HOST;

    /// An adjustment with these timers for the two directions.
    fn adjustment(active: Timer, passive: Timer) -> Adjustment {
        let of = |timer| InitialRto {
            timer,
            epoch: 3,
            budget: 50,
        };
        Adjustment {
            active: of(active),
            passive: of(passive),
            harm: false,
        }
    }

    /// What the program gets, and what users are shown.
    fn shown(compiled: &Compiled) -> String {
        let kernel = &compiled.kernel;
        let flags = [
            (policy_flags::LEASED_ACTIVE, "leased-active"),
            (policy_flags::LEASED_PASSIVE, "leased-passive"),
            (policy_flags::BRAKED, "braked"),
        ];
        let flags = flags.iter().filter(|(flag, _)| kernel.flags & flag != 0);
        let flags: Vec<_> = flags.map(|(_, name)| *name).collect();
        let effects = compiled.effects.iter();
        let effects = effects.map(|e| format!("\n  {}: {}", e.setting, e.describe(HOST.hz)));
        format!(
            "initial_rto {}, syn_ack_rto {:?}, epochs {:?}, budgets {:?}, {flags:?}{}",
            kernel.initial_rto_jiffies,
            kernel.syn_ack_rto_jiffies,
            kernel.epochs,
            kernel.budgets,
            effects.collect::<String>()
        )
    }

    #[test]
    fn mode_is_shown_where_nothing_is_applied() {
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
            // One direction is enough for a lease.
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

    /// A lease needs brakes, and a budget of 0 allows no retransmissions.
    #[test]
    fn lease_without_an_epoch_gets_one() {
        let adjustment = Adjustment {
            active: InitialRto {
                timer: Timer::Value(Duration::from_millis(24)),
                ..InitialRto::default()
            },
            ..Adjustment::default()
        };
        let kernel = on(&HOST, "initial_rto = 'auto'", &adjustment).kernel;
        assert_eq!((kernel.epochs, kernel.budgets), ([1, 0], [0; 2]));
    }

    #[test]
    fn budgets_are_tenths_that_the_program_can_add_up() {
        let mut adjustment = adjustment(Timer::Configured, Timer::Configured);
        adjustment.active.budget = u32::MAX;
        let kernel = on(&HOST, "initial_rto = '100ms'\nguard = 'on'", &adjustment).kernel;
        assert_eq!(kernel.budgets, [(1 << 30) - 1, 500]);
    }

    #[test]
    fn auto_settings_out_of_range_or_contradicting_are_refused() {
        let mut all = Vec::new();
        for toml in [
            "initial_rto = { auto = true, max = '2s' }",
            "initial_rto = { auto = true, min = '0s' }",
            "initial_rto = { auto = true, min = '100ms', max = '50ms' }",
            "initial_rto = { auto = true, spurious = '0.009%' }",
            "initial_rto = { auto = true, spurious = '5.1%' }",
            "initial_rto = 'auto'\nguard = 'off'",
            "rto_min = '100ms'\nguard = 'on'",
            "initial_rto = '100ms'\nmode = 'advise'",
            "mode = 'advise'",
            "guard = 'off'",
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
            "initial_rto = 'auto'\nholdout = '95%'\nmode = 'advise'",
        ] {
            compiled(toml);
        }
    }
}
