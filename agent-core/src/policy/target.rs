//! The address to probe, to check that a policy's initial RTO reaches the kernel.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnetwork::IpNetwork;

use super::{
    HostFacts, PolicyName, PolicySet,
    units::{jiffies_to_usecs, quantise},
};

/// How many entries are tried; any will do.
const TRIES: usize = 64;
/// Addresses for documentation (RFC 5737, RFC 3849), for prefixes whose first address is
/// unsuitable.
const ELSEWHERE: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)),
    IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1)),
];

/// The target of a probe: an address that an entry covers, and its policy's initial RTO.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProbeTarget {
    /// The address.
    pub address: IpAddr,
    /// The initial RTO, microseconds.
    pub initial_rto_us: u64,
}

impl ProbeTarget {
    /// An address whose policy has an initial RTO other than the kernel's own; `None` if no policy
    /// has one. (The program never draws the probe's connection into a control arm.)
    pub fn configured(set: &PolicySet, host: &HostFacts) -> Option<Self> {
        Self::by(set, host, |name| {
            let settings = &set.policies.get(name)?.settings;
            Some(quantise(settings.fixed_initial_rto()?, host.hz).jiffies)
        })
    }

    /// As [`Self::configured`] for the values in force, jiffies: learnt values and fallbacks differ
    /// from the configured ones.
    pub fn by(
        set: &PolicySet,
        host: &HostFacts,
        in_force: impl Fn(&PolicyName) -> Option<u64>,
    ) -> Option<Self> {
        let kernels_own = u64::from(host.hz);
        let target = |address: IpAddr| {
            let (entry, _) = set.entry_for(address)?;
            let jiffies = in_force(entry.policy).filter(|jiffies| *jiffies != kernels_own)?;
            Some(Self {
                address,
                initial_rto_us: jiffies_to_usecs(jiffies, host.hz),
            })
        };
        let mut keys = set.entries.keys().take(TRIES);
        keys.find_map(|cidr| target(candidate(cidr.network())?))
    }
}

/// An ordinary unicast address in the prefix.
fn candidate(network: IpNetwork) -> Option<IpAddr> {
    let first = match network {
        IpNetwork::V4(n) => IpAddr::V4(n.nth(1).unwrap_or(n.network())),
        IpNetwork::V6(n) => IpAddr::V6(n.nth(1).unwrap_or(n.network())),
    };
    [first]
        .into_iter()
        .chain(ELSEWHERE)
        .find(|address| network.contains(*address) && is_ordinary(*address))
}

fn is_ordinary(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(a) => {
            !(a.octets()[0] == 0 || a.octets()[0] >= 224 || a.is_loopback() || a.is_link_local())
        }
        IpAddr::V6(a) => {
            !(a.is_unspecified()
                || a.is_loopback()
                || a.is_multicast()
                || a.is_unicast_link_local()
                || a.to_ipv4_mapped().is_some())
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{
        policy::{Entry, Settings},
        testing::HOST,
    };

    fn set(entries: &[(&str, Option<u64>)]) -> PolicySet {
        let mut set = PolicySet::default();
        for (i, (cidr, rto)) in entries.iter().enumerate() {
            let name: PolicyName = format!("p{i}").parse().unwrap();
            let settings = Settings {
                initial_rto: rto.map(|ms| Duration::from_millis(ms).into()),
                ..Settings::default()
            };
            set.policies.insert(name.clone(), settings.into());
            let entry = Entry {
                policy: name,
                location: None,
            };
            set.entries.insert(cidr.parse().unwrap(), entry);
        }
        set
    }

    fn target(entries: &[(&str, Option<u64>)]) -> Option<(String, u64)> {
        let target = ProbeTarget::configured(&set(entries), &HOST)?;
        Some((target.address.to_string(), target.initial_rto_us))
    }

    #[test]
    fn probe_target_is_an_address_whose_policy_has_an_initial_rto() {
        for (entries, address, us) in [
            (&[("10.0.0.0/8", Some(99))][..], "10.0.0.1", 100_000),
            (&[("fd00::/64", Some(5))], "fd00::1", 8_000),
            (&[("10.0.0.7/32", Some(5))], "10.0.0.7", 8_000),
            (&[("0.0.0.0/0", Some(5))], "192.0.2.1", 8_000),
            (&[("::/0", Some(5))], "2001:db8::1", 8_000),
            // The longest prefix decides.
            (
                &[("10.0.0.0/8", Some(100)), ("10.0.0.0/24", Some(20))],
                "10.0.0.1",
                20_000,
            ),
        ] {
            assert_eq!(target(entries), Some((address.to_owned(), us)));
        }
    }

    #[test]
    fn probe_target_follows_values_in_force() {
        let set = set(&[("10.0.0.0/8", Some(100)), ("10.1.0.0/16", None)]);
        let by = |in_force: &[(&str, u64)]| {
            let of = |name: &PolicyName| {
                let found = in_force.iter().find(|(policy, _)| *policy == name.as_str());
                found.map(|(_, jiffies)| *jiffies)
            };
            let target = ProbeTarget::by(&set, &HOST, of)?;
            Some((target.address.to_string(), target.initial_rto_us))
        };
        let found = |address: &str, us| Some((address.to_owned(), us));
        assert_eq!(by(&[("p0", 50)]), found("10.0.0.1", 200_000));
        assert_eq!(by(&[("p1", 6)]), found("10.1.0.1", 24_000));
        assert_eq!(by(&[("p0", 250)]), None);
        assert_eq!(by(&[]), None);
    }

    #[test]
    fn probe_target_is_absent_without_initial_rto() {
        assert_eq!(target(&[]), None);
        assert_eq!(target(&[("10.0.0.0/8", None)]), None);
        // The kernel's own value is not distinguishable from no policy.
        assert_eq!(target(&[("10.0.0.0/8", Some(1000))]), None);
        assert_eq!(target(&[("127.0.0.0/8", Some(5))]), None);
        for nobodys in [
            "0.0.0.1/32",
            "169.254.0.0/16",
            "224.0.0.0/4",
            "255.255.255.0/24",
            "::1/128",
            "::/128",
            "fe80::/64",
            "ff02::/64",
        ] {
            assert_eq!(target(&[(nobodys, Some(5))]), None, "{nobodys}");
        }
    }
}
