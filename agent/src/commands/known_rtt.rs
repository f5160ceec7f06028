//! Warns of fixed timers that are shorter than the path RTTs that a running daemon has counted.

use std::time::Duration;

use rto_agent_core::{
    policy::{HostFacts, PolicyName, PolicySet, Settings, units::format_duration},
    printable::counted,
    wire::stats::{PolicyStats, StatsAnswer},
};

use crate::client::Client;
use rto_agent_core::figures::short_us;

/// Fewer handshakes say little about the slowest of a hundred.
const FEWEST: u64 = 100;
/// `check` and `doctor` are useful without the answer.
const PATIENCE: Duration = Duration::from_secs(2);

/// The statistics of the daemon at this socket, if one answers.
pub(super) fn ask(client: Client) -> Option<StatsAnswer> {
    client.within(PATIENCE).get("/v1/stats").ok()
}

/// A warning for each timer of the set that is too short for its path.
pub(super) fn warnings(set: &PolicySet, counted: &StatsAnswer, host: &HostFacts) -> Vec<String> {
    let mut all = Vec::new();
    for (name, policy) in &set.policies {
        let Some(stats) = counted.policies.get(name) else {
            continue;
        };
        let short = of_policy(name, &policy.settings, stats);
        let covers_ipv6 = || {
            let mut entries = set.entries.iter();
            entries.any(|(cidr, entry)| entry.policy == name && !cidr.is_ipv4())
        };
        // Programs can set SO_TXREHASH since the same version.
        let changes_path = !short.is_empty() && !host.has_bpf_thin_linear && covers_ipv6();
        all.extend(short);
        if changes_path {
            all.push(format!(
                "policy {name}: before Linux 6.1 such a SYN takes another IPv6 path, where another \
                 server of an anycast address resets the connection"
            ));
        }
    }
    all
}

/// The warnings about one policy's timers.
pub(super) fn of_policy(
    name: &PolicyName,
    settings: &Settings,
    stats: &PolicyStats,
) -> Vec<String> {
    let timers = settings.fixed_timers().filter_map(|(setting, rto)| {
        let direction = match setting {
            "initial_rto" => &stats.treated.active,
            "syn_ack_rto" => &stats.treated.passive,
            _ => return None,
        };
        let p99_us = direction.path_rtt.quantile_us(0.99)?;
        let is_short = direction.path_rtt.count >= FEWEST && rto.as_secs_f64() * 1e6 < p99_us;
        is_short.then(|| {
            format!(
                "policy {name}: {setting} = {} is below the path RTT of this host's own \
                 connections, {} (p99 of {}): connections send a second SYN in vain; raise it, or \
                 set it to \"auto\"",
                format_duration(rto),
                short_us(p99_us),
                counted(direction.path_rtt.count, "handshake", "handshakes")
            )
        })
    });
    timers.collect()
}

#[cfg(test)]
mod tests {
    use rto_agent_core::{
        config::Config,
        testing::HOST,
        wire::{
            histogram::{BucketView, HistogramView},
            stats::{ArmStats, DirectionStats},
        },
    };

    use super::*;

    /// Connections of 50 ms.
    fn stats(count: u64) -> PolicyStats {
        let path_rtt = HistogramView {
            count,
            sum_us: count * 50_000,
            buckets: vec![BucketView {
                from_us: 49_000,
                below_us: Some(51_000),
                count,
            }],
        };
        let active = DirectionStats {
            path_rtt,
            ..DirectionStats::default()
        };
        PolicyStats::from(ArmStats {
            active,
            ..ArmStats::default()
        })
    }

    #[test]
    fn short_timer_warns_of_ipv6_path_before_linux_6_1() {
        let old = HostFacts {
            has_bpf_thin_linear: false,
            ..HOST
        };
        for (cidr, host, count) in [
            ("fd00::/64", &old, 2),
            ("fd00::/64", &HOST, 1),
            ("10.0.0.0/24", &old, 1),
        ] {
            let text = format!("[policy.near]\ncidrs = [\"{cidr}\"]\ninitial_rto = \"40ms\"\n");
            let config = Config::from_text("config.toml".as_ref(), text, host).unwrap();
            let counted = StatsAnswer {
                policies: [("near".parse().unwrap(), stats(100))].into(),
                ..StatsAnswer::default()
            };
            let warnings = warnings(&config.set, &counted, host);
            assert_eq!(warnings.len(), count, "{warnings:?}");
        }
    }

    #[test]
    fn timer_below_path_rtt_warns() {
        let warnings = |toml: &str, count| {
            let settings: Settings = toml::from_str(toml).unwrap();
            of_policy(&"near".parse().unwrap(), &settings, &stats(count))
        };
        let short = warnings("initial_rto = '40ms'", 100);
        assert!(
            short[0].starts_with("policy near: initial_rto = 40ms is below the path RTT"),
            "{short:?}"
        );
        for (toml, count) in [
            ("initial_rto = '40ms'", 99),
            ("initial_rto = '60ms'", 100),
            ("initial_rto = 'auto'", 100),
            ("syn_ack_rto = '40ms'", 100),
            ("rto_min = '40ms'", 100),
        ] {
            assert!(warnings(toml, count).is_empty(), "{toml}");
        }
    }
}
