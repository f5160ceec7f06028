//! A policy of the agent's configuration, with its effective values on this host as `rto-agent check` reports them.

use std::{collections::BTreeMap, fs, path::Path, process::Command};

use anyhow::{Context as _, bail};
use rto_model::retransmit::{LinuxTimers, RTO_MAX_US, THIN_LINEAR_RETRIES};
use rto_testbed::machine::Machine;
use serde::{Deserialize, Serialize};

use crate::handshake::Handshake;

/// The effective value of a setting.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EffectiveSetting {
    /// Its name in the configuration.
    pub setting: String,
    /// The configured value.
    pub asked: String,
    /// The effective value in the kernel.
    pub effective: String,
    /// The value in jiffies, if the kernel counts it in jiffies.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub jiffies: Option<u64>,
}

/// A policy on a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    /// The host.
    pub host: Host,
    /// Its settings.
    pub effects: Vec<EffectiveSetting>,
}

#[derive(Deserialize)]
struct Checked {
    ok: bool,
    errors: Vec<Refusal>,
    host: Host,
    policies: BTreeMap<String, Effects>,
}

#[derive(Deserialize)]
struct Refusal {
    path: String,
    line: Option<u64>,
    message: String,
}

/// Settings of a host that its timers depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub struct Host {
    /// Jiffies per second.
    pub hz: u64,
    /// `net.ipv4.tcp_syn_retries`.
    pub tcp_syn_retries: u8,
    /// `net.ipv4.tcp_syn_linear_timeouts`; 0 before Linux 6.5.
    pub tcp_syn_linear_timeouts: u8,
    /// `net.ipv4.tcp_synack_retries`.
    pub tcp_synack_retries: u8,
}

impl Host {
    /// Linux 6.12's defaults.
    pub const fn with_defaults(hz: u64) -> Self {
        Self {
            hz,
            tcp_syn_retries: 6,
            tcp_syn_linear_timeouts: 4,
            tcp_synack_retries: 5,
        }
    }

    /// The settings of this host.
    pub fn here() -> anyhow::Result<Self> {
        let sysctl = |name: &str| -> Option<u8> {
            let text = fs::read_to_string(format!("/proc/sys/net/ipv4/{name}")).ok()?;
            text.trim().parse().ok()
        };
        let defaults = Self::with_defaults(Machine::here()?.hz);
        Ok(Self {
            hz: defaults.hz,
            tcp_syn_retries: sysctl("tcp_syn_retries").unwrap_or(defaults.tcp_syn_retries),
            tcp_syn_linear_timeouts: sysctl("tcp_syn_linear_timeouts").unwrap_or(0),
            tcp_synack_retries: sysctl("tcp_synack_retries").unwrap_or(defaults.tcp_synack_retries),
        })
    }

    /// Its handshakes with the kernel's own timers.
    pub fn handshake(&self) -> Handshake {
        Handshake::kernel(
            self.hz,
            self.tcp_syn_retries,
            self.tcp_syn_linear_timeouts,
            self.tcp_synack_retries,
        )
    }
}

#[derive(Deserialize)]
struct Effects {
    effects: Vec<EffectiveSetting>,
}

impl Policy {
    /// Reads a policy with the agent's binary; no daemon is needed.
    /// Fails if the configuration is rejected or has no such policy.
    pub fn read(agent: &Path, config: &Path, name: &str) -> anyhow::Result<Self> {
        let mut command = Command::new(agent);
        command.args(["check", "--json", "--config"]).arg(config);
        let output = command
            .output()
            .with_context(|| agent.display().to_string())?;
        let checked: Checked = serde_json::from_slice(&output.stdout)
            .with_context(|| String::from_utf8_lossy(&output.stderr).into_owned())?;
        Self::of(checked, name)
    }

    fn of(mut checked: Checked, name: &str) -> anyhow::Result<Self> {
        if !checked.ok {
            let lines = checked.errors.iter().map(|error| {
                let line = error.line.map(|line| format!(":{line}"));
                format!(
                    "{}{}: {}",
                    error.path,
                    line.unwrap_or_default(),
                    error.message
                )
            });
            bail!(lines.collect::<Vec<_>>().join("\n"));
        }
        let Some(policy) = checked.policies.remove(name) else {
            let known: Vec<_> = checked.policies.into_keys().collect();
            bail!(
                "unknown policy {name}; the configuration has: {}",
                known.join(", ")
            );
        };
        Ok(Self {
            host: checked.host,
            effects: policy.effects,
        })
    }

    fn effect(&self, setting: &str) -> Option<&EffectiveSetting> {
        self.effects.iter().find(|e| e.setting == setting)
    }

    /// A kernel's timers with this policy, for a connection of one request at a time.
    pub fn applied_to(&self, kernel: LinuxTimers) -> LinuxTimers {
        let is = |setting, value| self.effect(setting).is_some_and(|e| e.effective == value);
        // TCP_BPF_RTO_MIN has whole jiffies, rounded down to microseconds.
        let us = |setting| Some(self.effect(setting)?.jiffies? * 1_000_000 / self.host.hz.max(1));
        let mut own = kernel;
        if let Some(rto_min_us) = us("rto_min") {
            own = own.with_rto_min(rto_min_us);
            if is("rto_restart", "on") {
                own = own.with_restart();
            }
        }
        if let Some(rto_max_us) = us("rto_max") {
            own.rto_max_us = rto_max_us.min(RTO_MAX_US);
        }
        if is("thin_linear", "true") {
            let retries = self
                .effect("linear_retries")
                .and_then(|e| e.effective.parse().ok());
            own.linear_retries = retries.unwrap_or(THIN_LINEAR_RETRIES);
        }
        own
    }

    /// The host's handshakes with this policy; `None` if it does not affect them.
    pub fn handshake(&self) -> Option<Handshake> {
        let jiffies = |setting: &str| self.effect(setting)?.jiffies;
        let kernel = self.host.handshake();
        let (initial_rto, syn_ack_rto) = (jiffies("initial_rto"), jiffies("syn_ack_rto"));
        let rto_max = jiffies("rto_max");
        if initial_rto.is_none() && syn_ack_rto.is_none() && rto_max.is_none() {
            return None;
        }
        let mut own = kernel;
        own.syn.initial_rto = initial_rto.unwrap_or(kernel.syn.initial_rto);
        own.syn.rto_max = rto_max.unwrap_or(kernel.syn.rto_max);
        own.syn_ack_rto = syn_ack_rto.unwrap_or(kernel.syn_ack_rto);
        let retries = self
            .effect("syn_retries")
            .and_then(|e| e.effective.parse().ok());
        if let Some(retries) = retries {
            own.syn.syn_retries = retries;
            own.gives_up = own.syn.gives_up();
        }
        Some(own)
    }

    /// Each setting in a line: "rto_min  50ms -> 52ms, 13 jiffies at HZ=250".
    pub fn text(&self) -> String {
        let width = self.effects.iter().map(|e| e.setting.len()).max();
        let width = width.unwrap_or(0);
        let line = |e: &EffectiveSetting| {
            let becomes = match e.effective == e.asked {
                true => String::new(),
                false => format!(" -> {}", e.effective),
            };
            let jiffies = e.jiffies.map(|n| {
                let unit = if n == 1 { "jiffy" } else { "jiffies" };
                format!(", {n} {unit} at HZ={}", self.host.hz)
            });
            let (asked, jiffies) = (&e.asked, jiffies.unwrap_or_default());
            format!("{:width$}  {asked}{becomes}{jiffies}\n", e.setting)
        };
        self.effects.iter().map(line).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHECKED: &str = r#"{"ok": true, "errors": [], "warnings": [],
        "host": {"hz": 250, "tcp_syn_retries": 6, "tcp_syn_linear_timeouts": 4, "tcp_synack_retries": 5}, "policies": {
        "near": {"entries": 1, "effects": [
            {"setting": "initial_rto", "asked": "100ms", "effective": "100ms", "jiffies": 25},
            {"setting": "syn_ack_rto", "asked": "auto", "effective": "496ms", "jiffies": 124},
            {"setting": "syn_retries", "asked": "auto", "effective": "auto"}]},
        "low": {"entries": 0, "effects": [
            {"setting": "rto_min", "asked": "50ms", "effective": "52ms", "jiffies": 13},
            {"setting": "rto_restart", "asked": "on", "effective": "on", "note": "x"},
            {"setting": "thin_linear", "asked": "true", "effective": "true"},
            {"setting": "linear_retries", "asked": "3", "effective": "3"},
            {"setting": "rto_max", "asked": "10s", "effective": "10s", "jiffies": 2500}]}}}"#;

    fn policy(name: &str) -> anyhow::Result<Policy> {
        Policy::of(serde_json::from_str(CHECKED)?, name)
    }

    #[test]
    fn policy_settings_give_kernel_timers() {
        let kernel = LinuxTimers::near(250, 20_000);
        let low = policy("low").unwrap().applied_to(kernel);
        let expected = LinuxTimers {
            linear_retries: 3,
            rto_max_us: 10_000_000,
            ..kernel.with_rto_min(32_000)
        };
        assert_eq!(low, expected);
        // A policy for handshakes does not affect established connections.
        let near = policy("near").unwrap();
        assert_eq!(near.applied_to(kernel), kernel);
        let handshake = near.handshake().unwrap();
        assert_eq!(
            (handshake.syn.initial_rto, handshake.gives_up),
            (25, 131 * 250)
        );
        assert_eq!(handshake.syn_ack_rto, 124);
    }

    #[test]
    fn settings_are_shown_with_effective_values() {
        let text = policy("low").unwrap().text();
        assert!(
            text.starts_with("rto_min         50ms -> 52ms, 13 jiffies at HZ=250\n"),
            "{text}"
        );
    }

    #[test]
    fn unknown_policy_is_refused() {
        let error = policy("unknown").unwrap_err().to_string();
        assert!(
            error.contains("the configuration has: low, near"),
            "{error}"
        );
        let refused = r#"{"ok": false, "errors": [{"path": "/c", "line": 3, "column": 1, "message": "no"}],
            "host": {"hz": 250, "tcp_syn_retries": 6, "tcp_syn_linear_timeouts": 4, "tcp_synack_retries": 5},
            "policies": {}}"#;
        let refused = Policy::of(serde_json::from_str(refused).unwrap(), "near");
        assert_eq!(refused.unwrap_err().to_string(), "/c:3: no");
    }
}
