//! Features of the running kernel: declared here by mainline version, and compared with those that the agent detects.

use std::{collections::BTreeMap, process::Command, sync::OnceLock, time::Duration};

use anyhow::{Context as _, bail, ensure};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};
use rto_testbed::{
    agent,
    tcp::{get_option, option},
};
use serde_json::Value;

pub use crate::declared::FEATURES;

/// Set on Debian's kernels, which do not backport features to older versions: there the agent must detect exactly what
/// is declared.
pub const DEBIAN: &str = "RTO_TESTS_DEBIAN_KERNEL";

/// Major and minor version of the running kernel.
pub fn version() -> anyhow::Result<(u32, u32)> {
    let name = nix::sys::utsname::uname()?;
    let release = name.release().to_string_lossy().into_owned();
    let mut numbers = release.split('.').map(str::parse);
    match (numbers.next(), numbers.next()) {
        (Some(Ok(major)), Some(Ok(minor))) => Ok((major, minor)),
        _ => bail!("{release} is no kernel version"),
    }
}

/// A feature as `doctor` reports it.
#[derive(Clone, Debug)]
pub struct Found {
    /// "present", "absent" or "refused".
    pub presence: String,
    /// The whole text of the finding.
    pub text: String,
    /// The first kernel version with the feature, if this kernel lacks it.
    pub fix: String,
}

/// The features as `doctor` reports them on this machine; `doctor` runs only once.
pub fn found() -> anyhow::Result<&'static BTreeMap<&'static str, Found>> {
    static FOUND: OnceLock<Result<BTreeMap<&'static str, Found>, String>> = OnceLock::new();
    FOUND
        .get_or_init(|| ask().map_err(|e| format!("{e:#}")))
        .as_ref()
        .map_err(|e| anyhow::anyhow!("{e}"))
}

fn ask() -> anyhow::Result<BTreeMap<&'static str, Found>> {
    let output = Command::new(agent::find(None)?)
        .args(["doctor", "--json"])
        .output()?;
    let report: Value = serde_json::from_slice(&output.stdout)
        .with_context(|| String::from_utf8_lossy(&output.stderr).into_owned())?;
    let findings = report["findings"].as_array().context("no findings")?;
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    FEATURES
        .iter()
        .map(|(name, _)| {
            let finding = findings.iter().find(|f| f["id"] == *name);
            let finding = finding.with_context(|| format!("doctor does not say {name}"))?;
            let printed = text(&finding["found"]);
            let presence = printed
                .split([':', ','])
                .next()
                .unwrap_or_default()
                .to_owned();
            let fix = text(&finding["fix"]);
            Ok((
                *name,
                Found {
                    presence,
                    text: printed,
                    fix,
                },
            ))
        })
        .collect()
}

/// Whether the kernel lacks a feature, or refuses it on this machine.
pub fn lacks(feature: &str) -> anyhow::Result<bool> {
    let found = found()?.get(feature).context(feature.to_owned())?;
    Ok(found.presence != "present")
}

/// Whether a socket's rto_min can be read (TCP_RTO_MIN_US, Linux 6.15).
#[must_use]
pub fn tells_rto_min() -> bool {
    let socket = socket(
        AddressFamily::Inet,
        SockType::Stream,
        SockFlag::SOCK_CLOEXEC,
        None,
    );
    socket.is_ok_and(|socket| get_option(&socket, option::RTO_MIN_US).is_ok())
}

/// The first intervals between the SYNs of a connection with this initial RTO, within its first half-second. Since Linux
/// 6.5 the first five are equal and later ones double; before, they double from the start. They double up to 200 ms.
pub fn syn_timers(initial_rto: Duration, count: u32) -> anyhow::Result<Vec<Duration>> {
    let linear = if lacks("tcp-syn-linear-timeouts")? {
        0
    } else {
        4
    };
    let largest = initial_rto.max(Duration::from_millis(200));
    let timer = |n: u32| largest.min(initial_rto * (1 << n.saturating_sub(linear)));
    Ok((0..count).map(timer).collect())
}

/// Asserts that the agent detects what is declared for this version: every feature that it must have and, on a Debian
/// kernel, none that it cannot have.
pub fn assert_declared() -> anyhow::Result<()> {
    let (version, found) = (version()?, found()?);
    let is_debian = std::env::var_os(DEBIAN).is_some();
    let active = std::fs::read_to_string("/sys/kernel/security/lsm").unwrap_or_default();
    let has_lsm = active.trim_end().split(',').any(|name| name == "bpf");
    let mut wrong = Vec::new();
    for (name, since) in FEATURES {
        // This feature must be in the list of active LSMs, too.
        let expected = version >= since && (name != "bpf-lsm-cgroup" || has_lsm);
        let feature = &found[name];
        match (expected, feature.presence.as_str()) {
            (true, "present") | (false, "absent" | "refused") => {}
            (false, "present") if !is_debian => {}
            _ => wrong.push(format!("{name} (since {since:?}): {}", feature.text)),
        }
        if feature.presence == "absent" && !feature.fix.starts_with("Linux ") {
            wrong.push(format!("{name}: no version is named: {:?}", feature.fix));
        }
    }
    ensure!(wrong.is_empty(), "Linux {version:?}: {wrong:#?}");
    Ok(())
}
