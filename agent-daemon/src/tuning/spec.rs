//! Which of a policy's timers are learnt or guarded, and whether its arms are compared.

use std::collections::BTreeMap;

use rto_agent_core::policy::{HostFacts, Mode, PolicyName, Settings, SynAckRto, units::quantise};
use rto_model::{syn::syn_ack_rto_auto, tune::law};
use serde::{Deserialize, Serialize};

use super::holdout::{Holdout, HoldoutSpec};

/// A timer of a policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum TimerId {
    /// The initial RTO of connections that this host opens.
    Active,
    /// The SYN-ACK RTO of accepted connections.
    Passive,
}

impl TimerId {
    /// The direction of the connections that use the timer.
    pub(super) const fn direction(self) -> &'static str {
        match self {
            Self::Active => "active",
            Self::Passive => "passive",
        }
    }
}

/// The timers of one policy.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Spec {
    pub(super) timers: BTreeMap<TimerId, TimerSpec>,
    /// Whether new connections fall back to the kernel's own timers.
    pub(super) is_guarded: bool,
    /// The comparison of its arms; `None` without a control arm.
    pub(super) holdout: Option<HoldoutSpec>,
    /// What it was made of.
    settings: Settings,
    pub(super) host: HostFacts,
    /// Distributes policies over ticks.
    pub(super) seed: u32,
}

/// The settings of one timer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct TimerSpec {
    pub(super) law: law::Settings,
    /// The configured value, jiffies; `None` if it is learnt.
    pub(super) configured: Option<u64>,
    /// The program uses the value. Otherwise decisions are only shown (`mode = "advise"`).
    pub(super) is_set: bool,
    /// The program decides fallbacks.
    pub(super) is_guarded: bool,
}

impl Spec {
    /// What to watch of a policy.
    pub(super) fn of(name: &PolicyName, settings: &Settings, host: &HostFacts) -> Self {
        let hz = host.hz;
        let is_guarded = settings.is_guarded();
        let learnt = |law| TimerSpec {
            law,
            configured: None,
            is_set: settings.mode == Mode::Apply,
            is_guarded,
        };
        // A value at least as long as the kernel's own needs no guard.
        let guarded = |jiffies: Option<u64>| {
            let jiffies = jiffies.filter(|_| is_guarded)?;
            let law = law::Settings::new(hz);
            (jiffies < law.largest()).then_some(TimerSpec {
                law,
                configured: Some(jiffies),
                is_set: true,
                is_guarded,
            })
        };
        let auto = settings
            .auto_initial_rto()
            .map(|auto| learnt(auto.to_law(hz)));
        let fixed = settings.fixed_initial_rto();
        let active = auto.or_else(|| guarded(Some(host.initial_rto(fixed?))));
        let passive = match settings.auto_syn_ack_rto() {
            Some(_) => auto,
            None => guarded(syn_ack_jiffies(settings, host)),
        };
        let timers = [(TimerId::Active, active), (TimerId::Passive, passive)];
        let timers: BTreeMap<_, _> = timers
            .into_iter()
            .filter_map(|(id, spec)| Some((id, spec?)))
            .collect();
        let holdout = settings
            .holdout
            .map(|share| HoldoutSpec::new(share, settings));
        Self {
            timers,
            is_guarded,
            holdout,
            settings: settings.clone(),
            host: *host,
            seed: name.control_seed(),
        }
    }

    /// Whether it was made of these. This is compared for each policy in each tick.
    pub(super) fn is_of(&self, settings: &Settings, host: &HostFacts) -> bool {
        self.settings == *settings && self.host == *host
    }

    /// Whether there is nothing to watch.
    pub(super) fn is_idle(&self) -> bool {
        self.timers.is_empty() && self.holdout.is_none()
    }

    /// What remains without statistics: proven harm stays in force.
    pub(super) fn without_statistics(&mut self) {
        self.timers.clear();
        self.holdout = None;
    }

    /// A policy whose `holdout` was removed keeps its proven harm.
    pub(super) fn keep(&mut self, known: &Holdout) {
        if self.holdout.is_none() && self.is_guarded && known.is_harm() {
            self.holdout = known.spec_with(&self.settings);
        }
    }
}

/// The configured SYN-ACK RTO for the host's number of retransmissions, jiffies.
fn syn_ack_jiffies(settings: &Settings, host: &HostFacts) -> Option<u64> {
    let jiffies = |value| quantise(value, host.hz).jiffies;
    match settings.syn_ack_rto {
        SynAckRto::Keep => None,
        SynAckRto::Fixed(value) => Some(jiffies(value)),
        SynAckRto::Auto => {
            let initial_rto = jiffies(settings.fixed_initial_rto()?);
            let retries = host.syn_ack_retries();
            Some(syn_ack_rto_auto(initial_rto, host.hz.into(), retries))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rto_agent_core::{
        policy::{AutoInitialRto, Guard, InitialRtoSetting},
        testing::HOST,
    };

    use super::*;

    fn of(settings: Settings) -> Option<Spec> {
        let spec = Spec::of(&"near".parse().unwrap(), &settings, &HOST);
        (!spec.is_idle()).then_some(spec)
    }

    fn fixed(ms: u64, guard: Guard) -> Settings {
        Settings {
            initial_rto: Some(Duration::from_millis(ms).into()),
            guard: Some(guard),
            ..Settings::default()
        }
    }

    #[test]
    fn configured_value_is_guarded() {
        let spec = of(fixed(24, Guard::On)).unwrap();
        let timers: Vec<_> = spec.timers.iter().collect();
        // The SYN-ACK RTO is long enough to keep requests: 492 ms.
        for ((id, timer), expected) in timers.into_iter().zip([6, 124]) {
            assert_eq!(timer.configured, Some(expected), "{id:?}");
            assert!(timer.is_set && timer.is_guarded);
        }
        assert_eq!(of(fixed(24, Guard::Off)), None);
        // As long as the kernel's own, which is what a fallback would return to.
        assert_eq!(of(fixed(1000, Guard::On)), None);
        assert_eq!(of(Settings::default()), None);
        // Its arms are compared.
        let held = of(Settings {
            holdout: "5%".parse().ok(),
            ..Settings::default()
        });
        let held = held.unwrap();
        assert!(held.timers.is_empty() && held.holdout.is_some());
    }

    #[test]
    fn automatic_values_are_learnt() {
        let auto = Settings {
            initial_rto: Some(InitialRtoSetting::Auto(AutoInitialRto::default())),
            ..Settings::default()
        };
        let timers = of(auto.clone()).unwrap().timers;
        let laws = [law::Settings::new(HOST.hz), law::Settings::new(250)];
        assert_eq!(
            timers.values().map(|timer| timer.law).collect::<Vec<_>>(),
            laws
        );
        assert!(
            timers
                .values()
                .all(|timer| timer.is_set && timer.configured.is_none())
        );
        let kept = Settings {
            syn_ack_rto: SynAckRto::Keep,
            mode: Mode::Advise,
            ..auto
        };
        let timers = of(kept).unwrap().timers;
        assert_eq!(
            timers.keys().copied().collect::<Vec<_>>(),
            [TimerId::Active]
        );
        assert!(timers.values().all(|timer| !timer.is_set));
    }
}
