//! The running kernel: which features it lacks, and what the programs cost its verifier. Tests that need a missing
//! feature assert here that the agent refuses it.

use rto_tests::{
    features::{FEATURES, assert_declared, found, version},
    verifier::{LIMITS, Verified, verified},
};
use serde_json::Map;

use super::{established::policy, scale};
use crate::prelude::*;

test!(features_are_those_of_its_version, assert_declared);

/// Asserts what the agent does without a feature.
pub(super) fn assert_absent(feature: Need) -> anyhow::Result<()> {
    match feature {
        THIN_LINEAR => assert_refused("thin_linear = true", "(Linux 6.1 and later)"),
        RTO_MAX => assert_refused("rto_max = \"1s\"", "(Linux 6.15 and later)"),
        TCP_ITERATOR => {
            let env = TestEnv::with(&policy("rto_min = \"8ms\""))?;
            env.cli_refuses(&["apply"], "Linux 5.15")?;
            Ok(())
        }
        // The agent assumes the default of a new namespace, and doctor reports that.
        LISTENER => {
            let env = configured(&policy("initial_rto = \"100ms\""))?;
            let checked = env.json(&["check"])?;
            ensure!(checked["host"]["reads_listener"] == false, "{checked:#}");
            let text = env.try_cli(&["doctor"])?.stdout;
            let text = String::from_utf8_lossy(&text).into_owned();
            ensure!(text.contains("Linux 6.2 or later with BTF"), "{text}");
            Ok(())
        }
        MPTCP_BLACKHOLE => {
            let is_old = version()? < (6, 12);
            ensure!(is_old, "{:?} without MPTCP's blackhole_timeout", version()?);
            Ok(())
        }
        MPTCP => {
            let is_old = version()? < (5, 14);
            ensure!(is_old, "{:?} without MPTCP: is it loaded?", version()?);
            Ok(())
        }
        LINEAR_SYNS => {
            let is_old = version()? < (6, 5);
            ensure!(is_old, "{:?} without tcp_syn_linear_timeouts", version()?);
            Ok(())
        }
        TXREHASH => {
            let version = version()?;
            ensure!(version < (5, 18), "{version:?} without SO_TXREHASH");
            Ok(())
        }
        DATA_TIMERS => {
            let version = version()?;
            ensure!(version < (6, 11), "{version:?} without tcp_rto_min_us");
            Ok(())
        }
        BBR => {
            let checked = configured(&policy("thin_linear = true"))?.try_cli(&["check"])?;
            let text = String::from_utf8_lossy(&checked.stdout).into_owned();
            ensure!(!text.contains("BBR"), "{text}");
            Ok(())
        }
        TOTAL_RTO_TIME => {
            let version = version()?;
            ensure!(version < (6, 7), "{version:?} without total_rto_time");
            Ok(())
        }
        RTO_MIN_OPTION => {
            let version = version()?;
            ensure!(version < (6, 15), "{version:?} without TCP_RTO_MIN_US");
            Ok(())
        }
        LPM_BATCHES => scale::assert_no_batches(),
        other => anyhow::bail!("nothing is declared for {other:?}"),
    }
}

fn assert_refused(setting: &str, why: &str) -> anyhow::Result<()> {
    let env = configured(&policy(setting))?;
    env.cli_refuses(&["check"], why)
}

test!(the_verifier_has_little_to_do);
fn the_verifier_has_little_to_do() -> anyhow::Result<()> {
    for (name, verified) in verified()? {
        let limit = LIMITS.iter().find(|(known, _)| *known == name);
        let limit = limit.map_or(0, |(_, limit)| *limit);
        eprintln!("verifier: {name}: {verified:?}, limit {limit}");
        match verified {
            Verified::Instructions(n) => ensure!(n <= limit, "{name}: {n} of {limit}"),
            Verified::Uncounted => {}
            Verified::Refused(why) => {
                let feature = match name {
                    "rto_clone" => Need::Feature("bpf-lsm-cgroup"),
                    "rto_walk" => TCP_ITERATOR,
                    _ => anyhow::bail!("{name}: {why}"),
                };
                ensure!(feature.is_missing(), "{name}: {why}");
            }
        }
    }
    Ok(())
}

/// The findings as one line of JSON, for the matrix of kernels.
pub(super) fn report() -> anyhow::Result<Value> {
    let found = found()?;
    let features: Map<String, Value> = FEATURES
        .iter()
        .map(|(name, _)| ((*name).to_owned(), json!(found[name].presence)))
        .collect();
    let verifier: Map<String, Value> = verified()?
        .into_iter()
        .map(|(name, verified)| {
            let value = match verified {
                Verified::Instructions(n) => json!(n),
                Verified::Uncounted => json!("loads"),
                Verified::Refused(_) => json!("absent"),
            };
            (name.to_owned(), value)
        })
        .collect();
    Ok(json!({"features": features, "verifier": verifier}))
}
