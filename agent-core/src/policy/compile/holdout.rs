//! The `holdout` setting: the share of a policy's connections in its control arm.

use super::compiler::Compiler;
use crate::policy::{PolicyName, Settings, Share};

/// The largest control arm.
const LARGEST: Share = Share::of_ten_thousand(9500);

/// Compiles the control arm. After proven harm it has all connections.
pub(super) fn control_arm(compiler: &mut Compiler<'_>, name: &PolicyName, settings: &Settings) {
    if let Some(share) = settings.holdout {
        holdout(compiler, name, share);
    }
    if compiler.adjustment.harm {
        compiler.kernel.control_below = Share::ALL.below();
        compiler.kernel.control_seed = name.control_seed();
    }
}

fn holdout(compiler: &mut Compiler<'_>, name: &PolicyName, share: Share) {
    if share == Share::ZERO || share > LARGEST {
        let reason = format!(
            "a control arm must be more than 0% and at most {LARGEST}; set, for example, \
             \"5%\", or remove holdout for a policy without a control arm"
        );
        compiler.refuse("holdout", share, reason);
        return;
    }
    compiler.kernel.control_below = share.below();
    compiler.kernel.control_seed = name.control_seed();
    let note = match compiler.adjustment.harm {
        true => "of connections; now all of them: fallback (harm)",
        false => "of connections: the control arm, with the kernel's own timers",
    };
    compiler.effect("holdout", share).note = Some(note.to_owned());
}

#[cfg(test)]
mod tests {
    use super::{
        super::tests::{compiled, described, on},
        *,
    };
    use crate::{policy::Adjustment, testing::HOST};

    #[test]
    fn holdout_draws_its_share_of_connections() {
        for (toml, below) in [
            ("initial_rto = '100ms'\nholdout = '5%'", 214_748_365),
            ("rto_min = '100ms'\nholdout = '95%'", 4_080_218_931),
        ] {
            let compiled = compiled(toml);
            let kernel = compiled.kernel;
            let name: PolicyName = "p".parse().unwrap();
            assert_eq!(kernel.control_below, below, "{toml}");
            assert_eq!(kernel.control_seed, name.control_seed());
            let effect = described(&compiled, "holdout").unwrap();
            assert!(
                effect
                    .ends_with("% (of connections: the control arm, with the kernel's own timers)"),
                "{effect}"
            );
        }
    }

    #[test]
    fn proven_harm_puts_all_connections_into_the_control_arm() {
        let harm = Adjustment {
            harm: true,
            ..Adjustment::default()
        };
        for toml in [
            "initial_rto = '100ms'\nholdout = '5%'",
            "initial_rto = '100ms'",
        ] {
            let kernel = on(&HOST, toml, &harm).kernel;
            assert_eq!(kernel.control_below, u32::MAX, "{toml}");
        }
    }
}
