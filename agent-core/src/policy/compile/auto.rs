//! `initial_rto = "auto"`, `rto_min = "auto"`, `guard` and `mode`: the timers after the daemon's
//! decisions, and the program's settings for them.

use std::{ops::RangeInclusive, time::Duration};

use rto_agent_common::{brake::Brake, direction, policy_flags};
use rto_model::tune::{law::LEAST_SAMPLES, tuner::HOLD_MS};

use super::{BPF_TIMER_MAX, Compiler, EffectiveSetting, KERNEL_INITIAL_RTO, TIMEOUT_MIN};
use crate::policy::{
    Adjustment, AutoInitialRto, AutoRtoMin, Guard, InitialRto, InitialRtoSetting, Mode,
    RtoMinSetting, Settings, Share, Timer,
    units::{format_duration, jiffies_duration, jiffies_to_usecs, quantise},
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
                let jiffies = quantise(value, self.host.hz).jiffies.max(1);
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
            refuse(format!("auto,spurious={share}"), spurious_bounds());
        }
    }

    pub(super) fn auto_rto_min(&mut self, auto: &AutoRtoMin, settings: &Settings) {
        self.kernel.flags |= policy_flags::MEASURES_ACKS;
        let hz = self.host.hz;
        let floor = quantise(auto.floor(hz), hz);
        let asked = RtoMinSetting::Auto(*auto).to_string();
        if auto.peer_delack.is_some_and(|delay| delay.is_zero()) || auto.floor(hz) > BPF_TIMER_MAX {
            let longest = BPF_TIMER_MAX.saturating_sub(jiffies_duration(TIMEOUT_MIN, hz));
            let reason = format!(
                "peer_delack must be above 0 and at most {}, because rto_min is at least \
                 peer_delack plus two jiffies, and at most 200ms",
                format_duration(longest)
            );
            self.refuse("rto_min", asked, reason);
            return;
        }
        if self.host.lacks_rtt_samples {
            self.warnings.push(format!(
                "rto_min = {asked} learns nothing on this kernel, which keeps its own value: it \
                 needs RTT samples in eBPF programs (Linux 6.10 and later)"
            ));
        }
        let learnt = self
            .adjustment
            .rto_min
            .filter(|_| settings.mode == Mode::Apply);
        let Some(value) = learnt else {
            let range = format!(
                "until enough ACK delays are sampled, then {} to {}",
                format_duration(floor.effective),
                format_duration(BPF_TIMER_MAX)
            );
            let effect = self.effect("rto_min", asked);
            effect.set_jiffies(None, hz);
            effect.note = Some(match settings.mode {
                Mode::Advise => ADVISED.to_owned(),
                Mode::Apply => range,
            });
            return;
        };
        let longest = quantise(BPF_TIMER_MAX, hz).jiffies;
        let jiffies = quantise(value, hz).jiffies.max(floor.jiffies).min(longest);
        self.kernel.rto_min_us = u32::try_from(jiffies_to_usecs(jiffies, hz)).unwrap_or(u32::MAX);
        self.effect("rto_min", asked).set_jiffies(Some(jiffies), hz);
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
                "it applies to learnt values, but the policy has none; set initial_rto or rto_min \
                 to \"auto\", or use rto-agent advise",
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
        if settings.auto_initial_rto().is_some() {
            self.lease_learnt();
        }
        if self.kernel.epochs != [0; 2] {
            self.kernel.flags |= policy_flags::BRAKED;
        }
    }

    fn lease_learnt(&mut self) {
        for (direction, learnt, leased) in [
            (direction::ACTIVE, self.active, policy_flags::LEASED_ACTIVE),
            (
                direction::PASSIVE,
                self.passive,
                policy_flags::LEASED_PASSIVE,
            ),
        ] {
            if learnt.is_some() {
                self.kernel.flags |= leased;
                let epoch = &mut self.kernel.epochs[direction as usize];
                *epoch = (*epoch).max(1);
            }
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

fn spurious_bounds() -> String {
    let (least, most) = (SPURIOUS.start(), SPURIOUS.end());
    format!("the share must be {least} to {most}")
}

#[cfg(test)]
mod tests {
    use rto_agent_common::{Policy as KernelPolicy, SYN_ACK_RETRIES_LEN};

    use super::{
        super::{
            Compiled,
            tests::{compiled, described, errors, on, settings},
        },
        *,
    };
    use crate::{
        policy::{ControlArm, HostFacts, SynAckRto},
        testing::HOST,
    };

    const MS: fn(u64) -> Duration = Duration::from_millis;

    fn adjusted(toml: &str, adjustment: &Adjustment) -> Compiled {
        on(&HOST, toml, adjustment)
    }

    fn text(compiled: &Compiled, setting: &str) -> String {
        described(compiled, setting).unwrap()
    }

    /// An adjustment with these timers for the two directions.
    fn timers(active: Timer, passive: Timer) -> Adjustment {
        let of = |timer| InitialRto {
            timer,
            epoch: 3,
            budget: 50,
        };
        Adjustment {
            active: of(active),
            passive: of(passive),
            ..Adjustment::default()
        }
    }

    const LEASED: u32 = policy_flags::LEASED_ACTIVE | policy_flags::LEASED_PASSIVE;

    fn has(kernel: &KernelPolicy, flag: u32) -> bool {
        kernel.flags & flag != 0
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
    fn nothing_is_set_until_something_is_learnt() {
        let compiled = compiled("initial_rto = 'auto'\nrto_min = 'auto'");
        let kernel = &compiled.kernel;
        assert_eq!((kernel.initial_rto_jiffies, kernel.rto_min_us), (0, 0));
        assert_eq!(kernel.initial_rto_us, 1_000_000);
        assert_eq!(kernel.syn_ack_rto_jiffies, [0; SYN_ACK_RETRIES_LEN]);
        assert_eq!(kernel.syn_retries, 0);
        assert_eq!((kernel.epochs, kernel.budgets), ([0; 2], [0; 2]));
        assert!(has(kernel, policy_flags::MEASURES_ACKS));
        assert!(kernel.flags & LEASED == 0);
        let shown = ["initial_rto", "syn_ack_rto", "rto_min", "guard", "holdout"]
            .map(|setting| format!("{setting} {}", text(&compiled, setting)));
        insta::assert_snapshot!(shown.join("\n"));
    }

    #[test]
    fn learnt_values_are_set_by_direction() {
        let adjustment = Adjustment {
            rto_min: Some(MS(70)),
            ..timers(Timer::Value(MS(24)), Timer::Value(MS(500)))
        };
        let compiled = adjusted("initial_rto = 'auto'\nrto_min = 'auto'", &adjustment);
        let kernel = &compiled.kernel;
        let fixed = super::super::tests::compiled("initial_rto = '24ms'\nsyn_ack_rto = 'keep'");
        assert_eq!(kernel.initial_rto_jiffies, 6);
        assert_eq!(kernel.syn_retries, fixed.kernel.syn_retries);
        // As short as learnt if there are many retransmissions, and longer if a request would end
        // too early.
        let passive = kernel.syn_ack_rto_jiffies;
        assert_eq!((passive[5], passive[15], passive[4]), (125, 125, 0));
        assert_eq!(kernel.rto_min_us, 72_000);
        assert_eq!((kernel.epochs, kernel.budgets), ([3; 2], [500; 2]));
        assert!(has(kernel, LEASED) && has(kernel, policy_flags::CONTROL_BY_PEER));
        assert!(has(kernel, policy_flags::BRAKED));
        assert_eq!(
            text(&compiled, "initial_rto"),
            "auto -> 24ms, 6 jiffies at HZ=250"
        );
        assert_eq!(
            text(&compiled, "rto_min"),
            "auto -> 72ms, 18 jiffies at HZ=250"
        );
        assert!(text(&compiled, "syn_ack_rto").starts_with("auto -> 500ms, 125 jiffies"));

        // A lease needs brakes, and a budget of 0 allows no retransmissions.
        let learnt = InitialRto {
            timer: Timer::Value(MS(24)),
            ..InitialRto::default()
        };
        let active = Adjustment {
            active: learnt,
            ..Adjustment::default()
        };
        let kernel = adjusted("initial_rto = 'auto'", &active).kernel;
        assert_eq!((kernel.epochs, kernel.budgets), ([1, 0], [0; 2]));

        // One direction is enough for a lease.
        let passive = adjusted(
            "initial_rto = 'auto'",
            &timers(Timer::Kernel, Timer::Value(MS(500))),
        );
        assert_eq!(passive.kernel.initial_rto_jiffies, 0);
        assert_eq!(passive.kernel.flags & LEASED, policy_flags::LEASED_PASSIVE);
        let neither = adjusted(
            "initial_rto = 'auto'",
            &timers(Timer::Kernel, Timer::Kernel),
        );
        assert!(neither.kernel.flags & LEASED == 0);
        assert_eq!(text(&neither, "initial_rto"), "auto -> the kernel's own");
    }

    #[test]
    fn advice_sets_nothing_and_still_measures() {
        let adjustment = Adjustment {
            rto_min: Some(MS(70)),
            ..timers(Timer::Value(MS(24)), Timer::Value(MS(500)))
        };
        let toml = "initial_rto = 'auto'\nrto_min = 'auto'\nmode = 'advise'";
        for adjustment in [Adjustment::default(), adjustment] {
            let compiled = adjusted(toml, &adjustment);
            let kernel = &compiled.kernel;
            assert_eq!((kernel.initial_rto_jiffies, kernel.rto_min_us), (0, 0));
            assert_eq!(kernel.syn_ack_rto_jiffies, [0; SYN_ACK_RETRIES_LEN]);
            assert!(has(kernel, policy_flags::MEASURES_ACKS));
            assert!(kernel.flags & LEASED == 0);
            assert_eq!(
                text(&compiled, "initial_rto"),
                "auto -> the kernel's own (mode = advise: computed and shown, not applied)"
            );
        }
    }

    #[test]
    fn a_fixed_value_is_raised_and_never_lowered() {
        let with = |active, passive| {
            let toml = "initial_rto = '100ms'\nguard = 'on'";
            adjusted(toml, &timers(active, passive))
        };
        let raised = with(Timer::Value(MS(400)), Timer::Value(MS(600)));
        assert_eq!(raised.kernel.initial_rto_jiffies, 100);
        assert_eq!(raised.kernel.syn_ack_rto_jiffies[8], 150);
        assert!(raised.kernel.flags & LEASED == 0);
        assert_eq!(
            text(&raised, "initial_rto"),
            "100ms -> 400ms, 100 jiffies at HZ=250 (by the guard)"
        );
        let lower = with(Timer::Value(MS(20)), Timer::Value(MS(20)));
        assert_eq!(lower.kernel.initial_rto_jiffies, 25);
        assert_eq!(lower.kernel.syn_ack_rto_jiffies[8], 25);
        let held = with(Timer::Kernel, Timer::Configured);
        assert_eq!(held.kernel.initial_rto_jiffies, 0);
        assert_eq!(held.kernel.syn_ack_rto_jiffies[8], 25);
        assert_eq!(
            text(&held, "initial_rto"),
            "100ms -> the kernel's own (by the guard)"
        );
        let both = with(Timer::Kernel, Timer::Kernel);
        assert_eq!(both.kernel.syn_ack_rto_jiffies, [0; SYN_ACK_RETRIES_LEN]);
    }

    #[test]
    fn a_syn_ack_timer_of_its_own_is_not_learnt() {
        let toml = "initial_rto = 'auto'\nsyn_ack_rto = '300ms'";
        assert!(settings(toml).auto_syn_ack_rto().is_none());
        let with = |passive| adjusted(toml, &timers(Timer::Configured, passive)).kernel;
        assert_eq!(with(Timer::Configured).syn_ack_rto_jiffies[0], 75);
        assert_eq!(with(Timer::Value(MS(400))).syn_ack_rto_jiffies[0], 100);
        assert_eq!(with(Timer::Kernel).syn_ack_rto_jiffies[0], 0);
        assert!(with(Timer::Value(MS(400))).flags & LEASED == 0);
        let keep = "initial_rto = 'auto'\nsyn_ack_rto = 'keep'";
        let kernel = adjusted(keep, &timers(Timer::Configured, Timer::Value(MS(24)))).kernel;
        assert_eq!(kernel.syn_ack_rto_jiffies, [0; SYN_ACK_RETRIES_LEN]);
        assert!(kernel.flags & LEASED == 0);
        assert_eq!(settings(keep).syn_ack_rto, SynAckRto::Keep);
    }

    #[test]
    fn budgets_are_tenths_that_the_program_can_add_up() {
        let mut adjustment = timers(Timer::Configured, Timer::Configured);
        adjustment.active.budget = u32::MAX;
        let kernel = adjusted("initial_rto = '100ms'\nguard = 'on'", &adjustment).kernel;
        assert_eq!(kernel.budgets, [(1 << 30) - 1, 500]);
    }

    #[test]
    fn rto_min_is_within_what_the_kernel_takes() {
        let with = |toml: &str, ms| {
            let adjustment = Adjustment {
                rto_min: Some(MS(ms)),
                ..Adjustment::default()
            };
            adjusted(toml, &adjustment).kernel.rto_min_us
        };
        assert_eq!(with("rto_min = 'auto'", 1), 48_000);
        assert_eq!(with("rto_min = 'auto'", 900), 200_000);
        let own = "rto_min = { auto = true, peer_delack = '5ms' }";
        assert_eq!([1, 14].map(|ms| with(own, ms)), [16_000, 16_000]);
        let arm = Adjustment {
            control: Some(ControlArm {
                share: Share::HALF,
                seed: 7,
                by_peer: false,
            }),
            ..Adjustment::default()
        };
        let kernel = adjusted("rto_min = 'auto'", &arm).kernel;
        assert_eq!((kernel.control_below, kernel.control_seed), (1 << 31, 7));
        assert!(has(&kernel, policy_flags::CONTROL_BY_PEER));
    }

    #[test]
    fn kernel_without_rtt_samples_has_a_warning() {
        let host = HostFacts {
            lacks_rtt_samples: true,
            ..HOST
        };
        for (toml, warned) in [("rto_min = 'auto'", true), ("rto_min = '100ms'", false)] {
            let warnings = on(&host, toml, &Adjustment::default()).warnings.concat();
            assert_eq!(warnings.contains("learns nothing on this kernel"), warned);
        }
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
            "rto_min = 'auto'\nguard = 'warn'",
            "rto_min = '100ms'\nguard = 'on'",
            "initial_rto = '100ms'\nmode = 'advise'",
            "mode = 'advise'",
            "guard = 'off'",
            "rto_min = 'auto'\nholdout = '1.9%'",
            "rto_min = 'auto'\nrto_restart = true",
            "rto_min = 'auto'\ndelack_max = '48ms'",
            "rto_min = { auto = true, peer_delack = '0s' }",
            "rto_min = { auto = true, peer_delack = '193ms' }",
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
            "rto_min = 'auto'\nguard = 'on'\nholdout = '2%'\ndelack_max = '44ms'",
            "initial_rto = '100ms'\nguard = 'off'\nmode = 'apply'",
            "rto_min = { auto = true, peer_delack = '192ms' }\nmode = 'advise'",
        ] {
            compiled(toml);
        }
    }
}
