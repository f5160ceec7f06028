//! The `holdout` setting: the share of a policy's connections, or peers, in its control arm.

use rto_agent_common::policy_flags;

use super::{Compiler, SettingError};
use crate::policy::{AutoRtoMin, PolicyName, Settings, Share};

impl Compiler<'_> {
    /// Compiles the control arm. An experiment's replaces that of `holdout`.
    pub(super) fn control_arm(&mut self, name: &PolicyName, settings: &Settings) {
        self.holdout(name, settings);
        if let Some(control) = self.adjustment.control {
            self.kernel.control_below = control.share.below();
            self.kernel.control_seed = control.seed;
            self.kernel.flags &= !policy_flags::CONTROL_BY_PEER;
            // rto_min is learnt from a control arm of peers, which no setting of the policy affects.
            if control.by_peer || settings.auto_rto_min().is_some() {
                self.kernel.flags |= policy_flags::CONTROL_BY_PEER;
            }
        }
    }

    fn holdout(&mut self, name: &PolicyName, settings: &Settings) {
        let Some(share) = settings.control_share() else {
            return;
        };
        if share == Share::ZERO || share > Share::HALF {
            self.errors.push(SettingError {
                setting: "holdout",
                value: share.to_string(),
                reason: "a control arm must be more than 0% and at most 50%; set, for example, \
                         \"5%\", or remove holdout for a policy without a control arm"
                    .to_owned(),
            });
            return;
        }
        if settings.auto_rto_min().is_some() && share < AutoRtoMin::LEAST_CONTROL {
            self.errors.push(SettingError {
                setting: "holdout",
                value: share.to_string(),
                reason: format!(
                    "rto_min = \"auto\" learns from the control arm, which must be at least {}; \
                     remove holdout to use {}",
                    AutoRtoMin::LEAST_CONTROL,
                    AutoRtoMin::CONTROL
                ),
            });
            return;
        }
        self.kernel.control_below = share.below();
        self.kernel.control_seed = name.control_seed();
        let unit = match outlives_connections(settings) {
            true => {
                self.kernel.flags |= policy_flags::CONTROL_BY_PEER;
                "peers"
            }
            false => "connections",
        };
        let share = share.to_string();
        let note = format!("of {unit}: the control arm, with the kernel's own timers");
        self.effect("holdout", &share, share.clone(), None, Some(&note));
    }
}

/// Whether a connection with these settings affects later ones with the same peer, in either arm.
///
/// When an established connection ends, it writes its path metrics into the kernel's cache:
/// smoothed RTT (unless it is in backoff), congestion window, slow start threshold, reordering. The
/// next connection to that peer starts with them (`tcp_update_metrics()` and `tcp_init_metrics()`,
/// net/ipv4/tcp_metrics.c, Linux 3.14).
///
/// `rto_min` and `rto_restart` decide which RTT samples a retransmission spoils (Karn's algorithm)
/// and how often the window is cut; `thin_linear` and `linear_retries` whether a connection is in
/// backoff; `rto_max` and `user_timeout` how long it lasts; `delack_max` is part of the RTT that
/// the peer caches. Handshake timers have no effect after the connection is established, except on
/// a first RTT sample that a spurious copy spoils.
pub fn outlives_connections(settings: &Settings) -> bool {
    let Settings {
        initial_rto: _,
        syn_ack_rto: _,
        rto_min,
        rto_restart,
        delack_max,
        thin_linear,
        linear_retries,
        rto_max,
        user_timeout,
        syn_retries: _,
        mptcp: _,
        holdout: _,
        guard: _,
        mode: _,
        force: _,
    } = settings;
    let durations = [delack_max, rto_max, user_timeout];
    rto_min.is_some()
        || durations.into_iter().any(Option::is_some)
        || rto_restart.is_some_and(|on| on)
        || thin_linear.is_some()
        || linear_retries.is_some()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{
        super::{compile, compile_adjusted, uncounted_holdout},
        *,
    };
    use crate::{
        policy::{Adjustment, ControlArm},
        testing::HOST,
    };

    fn near() -> PolicyName {
        "near".parse().unwrap()
    }

    fn with(holdout: &str, settings: Settings) -> Settings {
        Settings {
            holdout: Some(holdout.parse().unwrap()),
            ..settings
        }
    }

    fn handshake() -> Settings {
        Settings {
            initial_rto: Some(Duration::from_millis(100).into()),
            ..Settings::default()
        }
    }

    #[test]
    fn a_policy_without_one_has_no_control_arm() {
        let kernel = compile(&near(), &handshake(), &HOST).unwrap().kernel;
        assert_eq!((kernel.control_below, kernel.control_seed), (0, 0));
        assert_eq!(kernel.flags & policy_flags::CONTROL_BY_PEER, 0);
    }

    #[test]
    fn an_experiment_has_a_control_arm_of_its_own() {
        let by_peers = with(
            "5%",
            Settings {
                rto_min: Some(Duration::from_millis(100).into()),
                ..handshake()
            },
        );
        let kernel = |settings: &Settings, by_peer| {
            let adjustment = Adjustment {
                control: Some(ControlArm {
                    share: "50%".parse().unwrap(),
                    seed: 7,
                    by_peer,
                }),
                ..Adjustment::default()
            };
            let compiled = compile_adjusted(&near(), settings, &adjustment, &HOST);
            let kernel = compiled.unwrap().kernel;
            assert_eq!((kernel.control_below, kernel.control_seed), (1 << 31, 7));
            kernel
        };
        for settings in [&by_peers, &with("5%", handshake()), &handshake()] {
            let without = compile(&near(), settings, &HOST).unwrap().kernel.flags;
            for by_peer in [false, true] {
                let unit = policy_flags::CONTROL_BY_PEER;
                let expected = without & !unit | if by_peer { unit } else { 0 };
                assert_eq!(kernel(settings, by_peer).flags, expected);
            }
        }
    }

    #[test]
    fn handshake_timers_draw_connections_others_peers() {
        let second = Some(Duration::from_secs(1));
        let timer = Some(Duration::from_millis(100));
        let of_connections = [
            handshake(),
            Settings {
                syn_retries: crate::policy::SynRetries::Fixed(9),
                mptcp: crate::policy::Mptcp::Apply,
                rto_restart: Some(false),
                ..handshake()
            },
        ];
        let of_peers = [
            Settings {
                rto_min: timer.map(Into::into),
                ..Settings::default()
            },
            Settings {
                delack_max: timer,
                ..Settings::default()
            },
            Settings {
                rto_max: second,
                ..Settings::default()
            },
            Settings {
                user_timeout: second,
                ..Settings::default()
            },
            Settings {
                thin_linear: Some(false),
                ..Settings::default()
            },
            Settings {
                rto_min: timer.map(Into::into),
                ..handshake()
            },
        ];
        for (all, unit) in [
            (&of_connections[..], "connections"),
            (&of_peers[..], "peers"),
        ] {
            for settings in all {
                let compiled = compile(&near(), &with("5%", settings.clone()), &HOST).unwrap();
                let kernel = compiled.kernel;
                assert_eq!(kernel.control_below, 214_748_365, "5 % of 2^32");
                assert_eq!(kernel.control_seed, near().control_seed());
                let by_peer = kernel.flags & policy_flags::CONTROL_BY_PEER != 0;
                assert_eq!(by_peer, unit == "peers", "{settings:?}");
                let effect = compiled
                    .effects
                    .iter()
                    .find(|e| e.setting == "holdout")
                    .unwrap();
                assert_eq!(
                    effect.describe(250),
                    format!("5% (of {unit}: the control arm, with the kernel's own timers)")
                );
            }
        }
    }

    #[test]
    fn a_control_arm_that_is_not_counted_is_told_of() {
        assert_eq!(uncounted_holdout(&handshake()), None);
        let told = uncounted_holdout(&with("5%", handshake())).unwrap();
        assert!(
            told.contains("holdout = 5% ") && told.contains("statistics = false"),
            "{told}"
        );
    }

    #[test]
    fn holdout_outside_its_range_is_refused() {
        for (share, is_good) in [
            ("0%", false),
            ("0.000001%", true),
            ("50%", true),
            ("50.000001%", false),
            ("100%", false),
        ] {
            let compiled = compile(&near(), &with(share, handshake()), &HOST);
            assert_eq!(compiled.is_ok(), is_good, "{share}");
            let errors = compiled.err().unwrap_or_default();
            for error in errors {
                let text = error.to_string();
                assert!(
                    text.starts_with(&format!("holdout = {share}: a control arm must be")),
                    "{text}"
                );
            }
        }
        let alone = compile(&near(), &with("5%", Settings::default()), &HOST).unwrap_err();
        assert!(
            alone[0].to_string().starts_with("the policy sets nothing"),
            "{alone:?}"
        );
    }
}
