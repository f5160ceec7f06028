//! Facts about one host that latencies to another host depend on: kernel, route, device, offloads, sysctls.

use std::{collections::BTreeMap, fs, net::IpAddr};

use anyhow::Context as _;
use serde::{Deserialize, Serialize};

use crate::{machine::Machine, process::run};

/// Sysctls that TCP's timers, ACKs and windows depend on, below `net.ipv4`.
const SYSCTLS: [&str; 20] = [
    "tcp_congestion_control",
    "tcp_early_retrans",
    "tcp_ecn",
    "tcp_fastopen",
    "tcp_mtu_probing",
    "tcp_no_metrics_save",
    "tcp_recovery",
    "tcp_retries2",
    "tcp_rmem",
    "tcp_rto_max_ms",
    "tcp_rto_min_us",
    "tcp_sack",
    "tcp_slow_start_after_idle",
    "tcp_syn_linear_timeouts",
    "tcp_syn_retries",
    "tcp_synack_retries",
    "tcp_syncookies",
    "tcp_thin_linear_timeouts",
    "tcp_timestamps",
    "tcp_wmem",
];
/// Features of a device that delay or merge packets (ethtool -k).
const OFFLOADS: [&str; 5] = [
    "tcp-segmentation-offload",
    "generic-segmentation-offload",
    "generic-receive-offload",
    "large-receive-offload",
    "rx-gro-hw",
];
/// How long a device waits before it interrupts (ethtool -c).
const COALESCING: [&str; 4] = ["Adaptive RX", "rx-usecs", "rx-frames", "tx-usecs"];

/// The facts about a host that matter for connections to one peer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostFacts {
    /// Kernel and processors.
    pub machine: Machine,
    /// The route to the other host, as ip-route(8) prints it.
    pub route: String,
    /// The device of the route.
    pub device: String,
    /// MTU of the device, bytes.
    pub mtu: Option<u32>,
    /// Driver of the device.
    pub driver: Option<String>,
    /// Offloads and interrupt coalescing of the device.
    pub features: BTreeMap<String, String>,
    /// The sysctls of TCP, below `net.ipv4`, that this kernel has.
    pub sysctls: BTreeMap<String, String>,
    /// Facts that could not be obtained, and why.
    pub missing: Vec<String>,
}

impl HostFacts {
    /// The facts about this host, in the namespace of the calling thread.
    pub fn towards(peer: IpAddr) -> anyhow::Result<Self> {
        let peer = peer.to_canonical().to_string();
        let route = run(&format!("ip route get {peer}"))?;
        let route = route.lines().next().unwrap_or_default().trim().to_owned();
        let mut words = route.split_whitespace().skip_while(|word| *word != "dev");
        let device = words.nth(1).context("a route without a device")?.to_owned();
        let mut missing = Vec::new();
        let offloads = run(&format!("ethtool -k {device}"))
            .map_err(|error| missing.push(format!("{error:#}")))
            .unwrap_or_default();
        // Virtual devices may have neither a driver nor coalescing, so a failure is not reported as missing.
        let [driver, coalescing] = ["-i", "-c"]
            .map(|option| run(&format!("ethtool {option} {device}")).unwrap_or_default());
        let mut features = chosen(&offloads, &OFFLOADS);
        features.extend(chosen(&coalescing, &COALESCING));
        let mtu = fs::read_to_string(format!("/sys/class/net/{device}/mtu"));
        let sysctls = SYSCTLS.iter().filter_map(|&name| {
            let value = fs::read_to_string(format!("/proc/sys/net/ipv4/{name}")).ok()?;
            Some((name.to_owned(), value.trim().replace('\t', " ")))
        });
        Ok(Self {
            machine: Machine::here()?,
            mtu: mtu.ok().and_then(|mtu| mtu.trim().parse().ok()),
            driver: chosen(&driver, &["driver"]).remove("driver"),
            features,
            sysctls: sysctls.collect(),
            missing,
            route,
            device,
        })
    }

    /// One line for each fact: its name and its value.
    #[must_use]
    pub fn lines(&self) -> Vec<(&'static str, String)> {
        let listed = |all: &BTreeMap<String, String>| {
            let all: Vec<String> = all
                .iter()
                .map(|(name, is)| format!("{name} {is}"))
                .collect();
            all.join(", ")
        };
        let mtu = self.mtu.map(|mtu| format!(", MTU {mtu}"));
        let driver = self.driver.as_ref().map(|driver| format!(", {driver}"));
        let device = [Some(self.device.clone()), driver, mtu];
        let mut lines = vec![
            ("machine", self.machine.describe()),
            ("route", self.route.clone()),
            ("device", device.into_iter().flatten().collect()),
        ];
        if !self.features.is_empty() {
            lines.push(("offloads", listed(&self.features)));
        }
        lines.push(("sysctls", listed(&self.sysctls)));
        lines.extend(self.missing.iter().map(|why| ("missing", why.clone())));
        lines
    }
}

/// The lines "name: value" with these names. Of "Adaptive RX: off  TX: off" only the first value is taken.
fn chosen(text: &str, names: &[&str]) -> BTreeMap<String, String> {
    let lines = text.lines().filter_map(|line| line.trim().split_once(':'));
    let chosen = lines.filter_map(|(name, value)| {
        let value = value.split_whitespace().next()?;
        let is_known = value != "n/a" && names.contains(&name);
        is_known.then(|| (name.to_owned(), value.to_owned()))
    });
    chosen.collect()
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, Ipv6Addr};

    use super::*;

    #[test]
    fn host_facts_name_device_and_sysctls() {
        // The second form is how a dual-stack listener sees an IPv4 peer.
        let mapped: Ipv6Addr = Ipv4Addr::LOCALHOST.to_ipv6_mapped();
        for peer in [Ipv4Addr::LOCALHOST.into(), mapped.into()] {
            let facts = HostFacts::towards(peer).unwrap();
            assert_eq!(
                (&*facts.device, facts.mtu),
                ("lo", Some(65536)),
                "{facts:?}"
            );
            assert!(facts.route.contains("127.0.0.1"), "{facts:?}");
            assert!(facts.sysctls["tcp_syn_retries"].parse::<u8>().is_ok());
            let text = serde_json::to_string(&facts).unwrap();
            assert_eq!(serde_json::from_str::<HostFacts>(&text).unwrap(), facts);
            let lines = facts.lines();
            assert!(lines.iter().any(|(name, _)| *name == "sysctls"));
            // Without ethtool the offloads are listed as missing.
            assert!(
                facts.features.is_empty() != facts.missing.is_empty(),
                "{facts:?}"
            );
        }
    }

    #[test]
    fn ethtool_output_is_parsed() {
        let text = "Coalesce parameters for eth0:\nAdaptive RX: on  TX: n/a\nrx-usecs: 8\nrx-frames: n/a\n\
                    tcp-segmentation-offload: on\n\ttx-tcp-segmentation: on\nlarge-receive-offload: off [fixed]\n";
        let coalescing = chosen(text, &COALESCING);
        let expected = [("Adaptive RX", "on"), ("rx-usecs", "8")];
        let own = |(name, value): (&str, &str)| (name.to_owned(), value.to_owned());
        assert_eq!(coalescing, expected.map(own).into());
        let offloads = chosen(text, &OFFLOADS);
        let expected = [
            ("large-receive-offload", "off"),
            ("tcp-segmentation-offload", "on"),
        ];
        assert_eq!(offloads, expected.map(own).into());
    }
}
