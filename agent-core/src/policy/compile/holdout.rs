//! The `holdout` setting: the share of a policy's connections, or peers, in its control arm.

use rto_agent_common::policy_flags;

use super::Compiler;
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
            let reason = "a control arm must be more than 0% and at most 50%; set, for example, \
                          \"5%\", or remove holdout for a policy without a control arm";
            self.refuse("holdout", share, reason);
            return;
        }
        if settings.auto_rto_min().is_some() && share < AutoRtoMin::LEAST_CONTROL {
            let reason = format!(
                "rto_min = \"auto\" learns from the control arm, which must be at least {}; \
                 remove holdout to use {}",
                AutoRtoMin::LEAST_CONTROL,
                AutoRtoMin::CONTROL
            );
            self.refuse("holdout", share, reason);
            return;
        }
        self.kernel.control_below = share.below();
        self.kernel.control_seed = name.control_seed();
        let unit = match settings.outlives_connections() {
            true => {
                self.kernel.flags |= policy_flags::CONTROL_BY_PEER;
                "peers"
            }
            false => "connections",
        };
        let note = format!("of {unit}: the control arm, with the kernel's own timers");
        self.effect("holdout", share).note = Some(note);
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::tests::{compiled, described, on},
        *,
    };
    use crate::{
        policy::{Adjustment, ControlArm},
        testing::HOST,
    };

    const BY_PEER: u32 = policy_flags::CONTROL_BY_PEER;

    #[test]
    fn experiment_has_a_control_arm_of_its_own() {
        for toml in [
            "initial_rto = '100ms'\nrto_min = '100ms'\nholdout = '5%'",
            "initial_rto = '100ms'\nholdout = '5%'",
            "initial_rto = '100ms'",
        ] {
            let without = compiled(toml).kernel.flags;
            for by_peer in [false, true] {
                let adjustment = Adjustment {
                    control: Some(ControlArm {
                        share: Share::HALF,
                        seed: 7,
                        by_peer,
                    }),
                    ..Adjustment::default()
                };
                let kernel = on(&HOST, toml, &adjustment).kernel;
                assert_eq!((kernel.control_below, kernel.control_seed), (1 << 31, 7));
                let expected = without & !BY_PEER | if by_peer { BY_PEER } else { 0 };
                assert_eq!(kernel.flags, expected, "{toml}");
            }
        }
    }

    #[test]
    fn handshake_timers_draw_connections_others_peers() {
        for (toml, unit) in [
            ("initial_rto = '100ms'", "connections"),
            (
                "initial_rto = '100ms'\nsyn_retries = 9\nmptcp = 'apply'\nrto_restart = false",
                "connections",
            ),
            ("rto_min = '100ms'", "peers"),
            ("delack_max = '100ms'", "peers"),
            ("rto_max = '1s'", "peers"),
            ("user_timeout = '1s'", "peers"),
            ("thin_linear = false", "peers"),
            ("initial_rto = '100ms'\nrto_min = '100ms'", "peers"),
        ] {
            let compiled = compiled(&format!("{toml}\nholdout = '5%'"));
            let kernel = compiled.kernel;
            assert_eq!(kernel.control_below, 214_748_365, "5 % of 2^32");
            let name: PolicyName = "p".parse().unwrap();
            assert_eq!(kernel.control_seed, name.control_seed());
            assert_eq!(kernel.flags & BY_PEER != 0, unit == "peers", "{toml}");
            let effect = format!("5% (of {unit}: the control arm, with the kernel's own timers)");
            assert_eq!(described(&compiled, "holdout"), Some(effect));
        }
    }
}
