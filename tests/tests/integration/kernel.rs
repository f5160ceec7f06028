//! The kernel beneath: what it lacks, by name, and what the programs cost its verifier. And the tests
//! that need something a kernel lacks: there the refusal is asserted in their place.

use anyhow::ensure;
use rto_tests::{
    agent::World,
    features::{self, FEATURES, assert_declared, found, version},
    verifier::{LIMITS, Verified, verified},
};
use serde_json::{Map, Value, json};

use super::{Test, established::policy, scale};

pub(super) const TESTS: &[Test] = &[
    ("features_are_those_of_its_version", assert_declared),
    ("the_verifier_has_little_to_do", little_to_do),
    ("a_setting_it_lacks_is_refused_by_name", refused),
];

/// A test, or the beginning of the names of several, and the feature without which it cannot run.
const NEEDS: &[(&str, &str)] = &[
    ("established::thin_linear_keeps_the_interval", THIN_LINEAR),
    ("established::linear_retries_", THIN_LINEAR),
    ("established::linear_mode_comes_back", THIN_LINEAR),
    ("established::a_thick_stream_doubles", THIN_LINEAR),
    ("config::every_setting_by_file", THIN_LINEAR),
    ("config::predict_by_policy", THIN_LINEAR),
    ("established::rto_max_caps_the_backoff", RTO_MAX),
    ("established::mptcp", MPTCP),
    ("open_sockets::a_sysctl_", LINEAR_SYNS),
    ("open_sockets::", ITERATOR),
    ("never_worse::deferred_", LISTENER),
    ("never_worse::a_listeners_own_", LISTENER),
    ("never_worse::a_namespaces_own_", LISTENER),
    ("never_worse::mptcp_", BLACKHOLE),
    ("never_worse::rto_max_", RTO_MAX),
    ("rto_restart::the_option_", RTO_MIN_OPTION),
    ("rto_restart::a_thick_flow_", RTO_MIN_OPTION),
    ("rto_restart::what_an_application_sets", RTO_MIN_OPTION),
    ("scale::batches_are_", LPM_BATCHES),
];

const THIN_LINEAR: &str = "bpf-thin-linear";
const RTO_MAX: &str = "tcp-rto-max";
const ITERATOR: &str = "iter-tcp";
const LISTENER: &str = "reads-listener";
/// Nothing of the agent's: since Linux 6.12 MPTCP is off for an hour after a fallback.
const BLACKHOLE: &str = "mptcp-blackhole";
/// Nothing of the agent's: Debian's 5.10 is built without it.
const MPTCP: &str = "mptcp";
/// The sysctl that a policy is computed from, and of which there may be another in a network namespace.
const LINEAR_SYNS: &str = "tcp_syn_linear_timeouts";
/// Nothing of the agent's: how an application, and so a test, reads a socket's rto_min.
const RTO_MIN_OPTION: &str = "tcp-rto-min-us";
/// Batches of LPM tries, without which the agent does the same entry by entry.
const LPM_BATCHES: &str = "lpm-batches";

/// What this kernel lacks and a test needs.
pub(super) fn lacked_by(test: &str) -> Option<&'static str> {
    let (_, feature) = NEEDS.iter().find(|(needy, _)| test.starts_with(needy))?;
    lacks(feature).then_some(feature)
}

/// Without an answer of the agent's nothing is lacked: then the tests say what is wrong.
fn lacks(feature: &str) -> bool {
    match feature {
        MPTCP => !std::path::Path::new("/proc/sys/net/mptcp").exists(),
        BLACKHOLE => !std::path::Path::new("/proc/sys/net/mptcp/blackhole_timeout").exists(),
        LINEAR_SYNS => !std::path::Path::new("/proc/sys/net/ipv4/tcp_syn_linear_timeouts").exists(),
        RTO_MIN_OPTION => !features::tells_rto_min(),
        LPM_BATCHES => !scale::has_batches().unwrap_or(true),
        _ => features::lacks(feature).unwrap_or(false),
    }
}

/// What the agent says where a feature is missing.
pub(super) fn assert_absent(feature: &str) -> anyhow::Result<()> {
    match feature {
        THIN_LINEAR => assert_refused("thin_linear = true", "(Linux 6.1 and later)"),
        RTO_MAX => assert_refused("rto_max = \"1s\"", "(Linux 6.15 and later)"),
        ITERATOR => {
            let world = World::with(&policy("rto_min = \"8ms\""))?;
            let said = world.cli_fails(&["apply"])?;
            ensure!(said.contains("Linux 5.15"), "{said}");
            Ok(())
        }
        // The least is reckoned with that a new namespace has, and doctor says so.
        LISTENER => {
            let world = World::new()?;
            world.configure(&policy("initial_rto = \"100ms\""))?;
            let checked = world.json(&["check"])?;
            ensure!(checked["host"]["reads_listener"] == false, "{checked:#}");
            let said = world.try_cli(&["doctor"])?.stdout;
            let said = String::from_utf8_lossy(&said).into_owned();
            ensure!(said.contains("Linux 6.2 or later with BTF"), "{said}");
            Ok(())
        }
        BLACKHOLE => {
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
            ensure!(is_old, "{:?} without {LINEAR_SYNS}", version()?);
            Ok(())
        }
        RTO_MIN_OPTION => {
            let version = version()?;
            ensure!(version < (6, 15), "{version:?} without TCP_RTO_MIN_US");
            Ok(())
        }
        LPM_BATCHES => scale::assert_no_batches(),
        other => anyhow::bail!("nothing is declared for {other}"),
    }
}

fn assert_refused(setting: &str, why: &str) -> anyhow::Result<()> {
    let world = World::new()?;
    world.configure(&policy(setting))?;
    let said = world.cli_fails(&["check"])?;
    ensure!(said.contains(why), "{said}");
    Ok(())
}

fn refused() -> anyhow::Result<()> {
    for (setting, feature) in [
        ("thin_linear = true", THIN_LINEAR),
        ("rto_max = \"1s\"", RTO_MAX),
    ] {
        if lacks(feature) {
            assert_absent(feature)?;
        } else {
            let world = World::new()?;
            world.configure(&policy(setting))?;
            world.cli(&["check"])?;
        }
    }
    Ok(())
}

fn little_to_do() -> anyhow::Result<()> {
    for (name, verified) in verified()? {
        let limit = LIMITS.iter().find(|(known, _)| *known == name);
        let limit = limit.map_or(0, |(_, limit)| *limit);
        eprintln!("verifier: {name}: {verified:?}, limit {limit}");
        match verified {
            Verified::Instructions(n) => ensure!(n <= limit, "{name}: {n} of {limit}"),
            Verified::Untold => {}
            Verified::Refused(why) => {
                let feature = match name {
                    "rto_clone" => "bpf-lsm-cgroup",
                    "rto_walk" => ITERATOR,
                    _ => anyhow::bail!("{name}: {why}"),
                };
                ensure!(lacks(feature), "{name}: {why}");
            }
        }
    }
    Ok(())
}

/// For the matrix of kernels: what was found, as one line of JSON.
pub(super) fn report() -> anyhow::Result<Value> {
    let found = found()?;
    let features: Map<String, Value> = FEATURES
        .iter()
        .map(|(name, _)| ((*name).to_owned(), json!(found[name].presence)))
        .collect();
    let verifier: Map<String, Value> = verified()?
        .into_iter()
        .map(|(name, verified)| {
            let told = match verified {
                Verified::Instructions(n) => json!(n),
                Verified::Untold => json!("loads"),
                Verified::Refused(_) => json!("absent"),
            };
            (name.to_owned(), told)
        })
        .collect();
    Ok(json!({"features": features, "verifier": verifier}))
}
