//! What of a policy's settings is tuned or guarded.

use rto_model::{
    syn::syn_ack_rto_auto,
    tune::{acks, law, tuner::Tuner},
};

use crate::policy::{
    ControlArm, Guard, HostFacts, Mode, PolicyName, Settings, Share, SynAckRto,
    compile::outlives_connections, units::quantise,
};

/// Of one policy.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Spec {
    pub(super) active: Option<TimerSpec>,
    pub(super) passive: Option<TimerSpec>,
    /// The SYN-ACK's timer goes by the host's number of retransmissions, too.
    pub(super) passive_follows_host: bool,
    pub(super) rto_min: Option<acks::Settings>,
    /// Values that are learnt are shown, and not set.
    pub(super) advises: bool,
    pub(super) hz: u32,
    pub(super) seed: u32,
    by_peer: bool,
}

/// Of the initial RTO of one direction.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum TimerSpec {
    /// It is learnt.
    Auto(law::Settings),
    /// It is configured, and guarded.
    Guard {
        law: law::Settings,
        /// The configured value.
        jiffies: u64,
        /// Alarms raise it.
        acts: bool,
    },
}

impl Spec {
    /// That of a policy; `None` if there is nothing to watch.
    pub(super) fn of(name: &PolicyName, settings: &Settings, host: &HostFacts) -> Option<Self> {
        let hz = host.hz;
        let guard = settings.guard();
        let auto = settings
            .auto_initial_rto()
            .map(|auto| TimerSpec::Auto(auto.to_law(hz, &guard)));
        let active = auto.or_else(|| {
            let jiffies = quantise(settings.fixed_initial_rto()?, hz).jiffies;
            guarded(&guard, jiffies, hz)
        });
        let passive = match settings.auto_syn_ack_rto() {
            Some(_) => auto,
            None => {
                syn_ack_jiffies(settings, host).and_then(|jiffies| guarded(&guard, jiffies, hz))
            }
        };
        let rto_min = settings.auto_rto_min().map(|auto| acks::Settings {
            floor_us: u64::try_from(auto.floor(hz).as_micros()).unwrap_or(u64::MAX),
            ..acks::Settings::new(hz)
        });
        let spec = Self {
            active,
            passive,
            passive_follows_host: settings.syn_ack_rto == SynAckRto::Auto,
            rto_min,
            advises: settings.mode() == Mode::Advise,
            hz,
            seed: name.control_seed(),
            by_peer: outlives_connections(settings),
        };
        let is_empty = spec.active.is_none() && spec.passive.is_none() && spec.rto_min.is_none();
        (!is_empty).then_some(spec)
    }

    /// Whether anything follows from what is counted, so that it must be looked at each second.
    pub(super) fn acts(&self) -> bool {
        let acts = |timer: &TimerSpec| {
            matches!(
                timer,
                TimerSpec::Auto(_) | TimerSpec::Guard { acts: true, .. }
            )
        };
        self.rto_min.is_some()
            || [&self.active, &self.passive]
                .into_iter()
                .flatten()
                .any(acts)
    }

    /// A control arm of all but so many percent.
    pub(super) fn all_but(&self, percent: u8) -> ControlArm {
        ControlArm {
            share: Share::of_ten_thousand(100 * u16::from(100 - percent.min(100))),
            seed: self.seed,
            by_peer: self.by_peer,
        }
    }
}

impl TimerSpec {
    /// As [`Tuner::guarded`].
    pub(super) const fn guarded(&self) -> Option<(u64, bool)> {
        match *self {
            Self::Auto(_) => None,
            Self::Guard { jiffies, acts, .. } => Some((jiffies, acts)),
        }
    }

    /// One that begins.
    pub(super) fn tuner(&self) -> Tuner {
        match *self {
            Self::Auto(law) => Tuner::new(law),
            Self::Guard { law, jiffies, acts } => match acts {
                true => Tuner::guarding(law, jiffies),
                false => Tuner::warning(law, jiffies),
            },
        }
    }
}

/// A value that is not shorter than the kernel's own needs no guard.
fn guarded(guard: &Guard, jiffies: u64, hz: u32) -> Option<TimerSpec> {
    let acts = match guard {
        Guard::Off => return None,
        Guard::Warn => false,
        Guard::On(_) => true,
    };
    let law = law::Settings {
        hold_ms: u64::try_from(guard.hold().as_millis()).unwrap_or(u64::MAX),
        guard: guard.rates(),
        ..law::Settings::new(hz)
    };
    (jiffies < law.largest()).then_some(TimerSpec::Guard { law, jiffies, acts })
}

/// The SYN-ACK's timer by the host's own number of retransmissions, where it is configured.
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

    use super::*;
    use crate::policy::{
        AutoInitialRto, AutoRtoMin, GuardLimits, InitialRtoSetting, RtoMinSetting,
        compile::tests::HOST,
    };

    fn of(settings: Settings) -> Option<Spec> {
        Spec::of(&"near".parse().unwrap(), &settings, &HOST)
    }

    fn fixed(ms: u64) -> Settings {
        Settings {
            initial_rto: Some(Duration::from_millis(ms).into()),
            ..Settings::default()
        }
    }

    #[test]
    fn a_configured_value_is_watched_and_guarded_where_that_is_asked_for() {
        let watched = of(fixed(24)).unwrap();
        assert!(!watched.acts());
        let Some(TimerSpec::Guard { jiffies, acts, .. }) = watched.active else {
            panic!("{watched:?}");
        };
        assert_eq!((jiffies, acts), (6, false));
        // A SYN-ACK's timer is as long as keeps the request: 492 ms.
        let Some(TimerSpec::Guard { jiffies, .. }) = watched.passive else {
            panic!("{watched:?}");
        };
        assert_eq!(jiffies, 124);
        let on = Settings {
            guard: Some(Guard::On(GuardLimits::default())),
            ..fixed(24)
        };
        assert!(of(on).unwrap().acts());
        let off = Settings {
            guard: Some(Guard::Off),
            ..fixed(24)
        };
        assert_eq!(of(off), None);
        // As long as the kernel's own: nothing to go back to.
        assert_eq!(of(fixed(1000)), None);
        assert_eq!(of(Settings::default()), None);
    }

    #[test]
    fn what_is_learnt() {
        let auto = Settings {
            initial_rto: Some(InitialRtoSetting::Auto(AutoInitialRto::default())),
            rto_min: Some(RtoMinSetting::Auto(AutoRtoMin::default())),
            ..Settings::default()
        };
        let spec = of(auto.clone()).unwrap();
        assert!(spec.acts() && !spec.advises);
        assert_eq!(spec.active, spec.passive);
        assert_eq!(spec.rto_min, Some(acks::Settings::new(250)));
        let kept = Settings {
            syn_ack_rto: SynAckRto::Keep,
            mode: Mode::Advise,
            ..auto
        };
        let spec = of(kept).unwrap();
        assert_eq!(spec.passive, None);
        assert!(spec.advises);
    }

    #[test]
    fn the_rest_is_the_control_arm_of_the_same_seed() {
        let spec = of(fixed(24)).unwrap();
        let name: PolicyName = "near".parse().unwrap();
        let control = spec.all_but(5);
        assert_eq!(control.share.to_string(), "95%");
        assert_eq!(
            (control.seed, control.by_peer),
            (name.control_seed(), false)
        );
    }
}
