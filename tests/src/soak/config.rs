//! The configurations that the soak alternates between, and the entries that each creates.

use std::collections::BTreeMap;

use serde_json::Value;

use super::network::{LOST, PEER};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Config {
    /// The active configuration while there is no disturbance.
    Usual,
    /// Other timers, more entries, and an additional policy.
    Other,
}

/// Number of entries of the additional policy.
const MORE: u8 = 100;

/// CIDRs by policy.
pub(super) type Entries = BTreeMap<String, String>;

impl Config {
    /// The policies. A policy with connections is in both configurations, because removing it would end its counters.
    pub(super) fn policies(self) -> String {
        let [near_timers, lost_timer, guarded_timer] = match self {
            Self::Usual => [
                "initial_rto = \"100ms\"\nrto_min = \"20ms\"\ndelack_max = \"10ms\"",
                "initial_rto = \"100ms\"",
                "initial_rto = \"200ms\"",
            ],
            Self::Other => [
                "initial_rto = \"200ms\"\nrto_min = \"40ms\"\nthin_linear = true",
                "initial_rto = \"150ms\"",
                "initial_rto = \"300ms\"",
            ],
        };
        let mut text = "on_exit = \"keep\"\ncount_unmatched = true\n".to_owned();
        // Connections that are never answered set TCP_SYNCNT themselves.
        let keep = "syn_retries = \"keep\"";
        for (policy, settings) in [
            ("near", &*format!("{near_timers}\n{keep}")),
            ("lost", &format!("{lost_timer}\n{keep}")),
            ("guarded", &format!("{guarded_timer}\nguard = \"on\"")),
            ("learnt", "initial_rto = \"auto\"\nholdout = \"5%\""),
            ("more", "initial_rto = \"500ms\""),
        ] {
            let entries = self.entries();
            let of_it = entries.iter().filter(|(_, of)| *of == policy);
            let cidrs: Vec<_> = of_it.map(|(cidr, _)| format!("{cidr:?}")).collect();
            if !cidrs.is_empty() {
                let cidrs = cidrs.join(", ");
                text += &format!("[policy.{policy}]\ncidrs = [{cidrs}]\n{settings}\n");
            }
        }
        text
    }

    /// The entries that it creates.
    pub(super) fn entries(self) -> Entries {
        let [peer, peer_learnt, peer_v6] = PEER;
        let [lost, lost_v6] = LOST;
        let mut entries: Entries = [
            (peer, "near", 32),
            (peer_learnt, "learnt", 32),
            (peer_v6, "guarded", 128),
            (lost, "lost", 32),
            (lost_v6, "lost", 128),
        ]
        .map(|(address, policy, length)| (format!("{address}/{length}"), policy.to_owned()))
        .into();
        if self == Self::Other {
            let more = (0..MORE).map(|i| (format!("10.91.{i}.0/24"), "more".to_owned()));
            entries.extend(more);
        }
        entries
    }
}

/// The entries in the output of `list --json`.
pub(super) fn listed(list: &Value) -> Entries {
    let entries = list["entries"].as_array().into_iter().flatten();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    entries
        .map(|entry| (text(&entry["cidr"]), text(&entry["policy"])))
        .collect()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use rto_agent_core::{config::Config as Files, policy::HostFacts};

    use super::*;

    const HOST_FACTS: HostFacts = HostFacts {
        hz: 250,
        tcp_syn_retries: 6,
        tcp_syn_linear_timeouts: 4,
        tcp_synack_retries: 5,
        reads_listener: true,
        reads_timers: false,
        has_rto_max: false,
        shapes_syns: true,
        has_bpf_thin_linear: true,
        is_bbr_default: false,
    };

    #[test]
    fn agent_accepts_both_configs() {
        for config in [Config::Usual, Config::Other] {
            let text = format!("[agent]\n{}", config.policies());
            let path = Path::new("/etc/rto-agent/config.toml");
            let taken = Files::from_text(path, text, &HOST_FACTS).unwrap();
            let entries = taken.set.entries.iter();
            let entries: Entries = entries
                .map(|(cidr, entry)| (cidr.to_string(), entry.policy.to_string()))
                .collect();
            assert_eq!(entries, config.entries());
        }
    }

    #[test]
    fn both_configs_cover_addresses_with_connections() {
        let [usual, other] = [Config::Usual.entries(), Config::Other.entries()];
        assert!(
            usual
                .iter()
                .all(|(cidr, policy)| other.get(cidr) == Some(policy))
        );
        assert!(other.len() > usual.len());
    }
}
