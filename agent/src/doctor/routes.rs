//! Reads routes of this network namespace: their destinations, and locked rto_min values. The
//! kernel prefers a locked value to the socket's (`tcp_rto_min()`, net/ipv4/tcp_output.c, Linux
//! 6.12), so a policy's rto_min has no effect there.

use std::{
    collections::BTreeSet,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    time::Duration,
};

use ipnetwork::IpNetwork;
use nix::libc;
use rto_agent_kernel::kernel::netlink::{self, AF_INET, AF_INET6, Message, NETLINK_ROUTE, find};

/// In `RTA_METRICS` (include/uapi/linux/rtnetlink.h): a bit for each locked metric.
const RTAX_LOCK: u16 = 1;
/// Milliseconds.
const RTAX_RTO_MIN: u16 = 13;

/// A route with a locked rto_min.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LockedRoute {
    /// The route's destination.
    pub(crate) destination: IpNetwork,
    /// The number of its routing table.
    pub(crate) table: u32,
    /// The locked rto_min.
    pub(crate) rto_min: Duration,
}

/// The routes with a locked rto_min.
pub(crate) fn locked() -> anyhow::Result<Vec<LockedRoute>> {
    dump(locked_route)
}

/// Destinations of unicast routes, without default routes.
pub(crate) fn destinations() -> anyhow::Result<Vec<IpNetwork>> {
    dump(unicast)
}

/// Destinations of all routes of any type.
pub(crate) fn all_destinations() -> anyhow::Result<Vec<IpNetwork>> {
    dump(|route| {
        let (header, attributes) = RouteHeader::parse(route)?;
        destination(header, attributes)
    })
}

/// Whether the route that the kernel uses to some address of a prefix has a locked rto_min. `all` are the destinations
/// of all routes.
pub(crate) fn has_locked(prefix: IpNetwork, all: &[IpNetwork]) -> bool {
    /// Of the addresses at which the route may change.
    const MOST: usize = 64;
    let addresses = changes(prefix, all);
    let mut routes = addresses.into_iter().take(MOST).map(netlink::route_to);
    routes.any(|route| route.is_ok_and(|route| locked_route(&route).is_some()))
}

/// The addresses of a prefix from which on a route to the whole prefix may be used: its first one, and those after a
/// longer route.
fn changes(prefix: IpNetwork, all: &[IpNetwork]) -> BTreeSet<IpAddr> {
    let within = all
        .iter()
        .filter(|route| route.prefix() > prefix.prefix() && prefix.contains(route.network()));
    let after = within.filter_map(|route| next(route.broadcast()));
    let after = after.filter(|address| prefix.contains(*address));
    after.chain([prefix.network()]).collect()
}

fn next(address: IpAddr) -> Option<IpAddr> {
    Some(match address {
        IpAddr::V4(address) => Ipv4Addr::from(u32::from(address).checked_add(1)?).into(),
        IpAddr::V6(address) => Ipv6Addr::from(u128::from(address).checked_add(1)?).into(),
    })
}

/// Dumps all tables, IPv4 and IPv6.
fn dump<T>(pick: impl Fn(&[u8]) -> Option<T>) -> anyhow::Result<Vec<T>> {
    let mut found = Vec::new();
    for family in [AF_INET, AF_INET6] {
        let mut header = [0; HEADER];
        header[0] = family;
        let request = Message::new(libc::RTM_GETROUTE, &header, &[]);
        netlink::dump(NETLINK_ROUTE, request, |route| found.extend(pick(route)))?;
    }
    Ok(found)
}

/// `sizeof(struct rtmsg)` (rtnetlink(7)).
const HEADER: usize = 12;

/// The fields of `struct rtmsg` that are used.
#[derive(Clone, Copy, Debug)]
struct RouteHeader {
    family: u8,
    prefix: u8,
    table: u8,
    kind: u8,
}

impl RouteHeader {
    /// Parses the header; returns it with the attributes.
    fn parse(route: &[u8]) -> Option<(Self, &[u8])> {
        let (header, attributes) = route.split_first_chunk::<HEADER>()?;
        let &[family, prefix, _, _, table, _, _, kind, ..] = header;
        let header = Self {
            family,
            prefix,
            table,
            kind,
        };
        Some((header, attributes))
    }
}

fn find_u32(attributes: &[u8], kind: u16) -> Option<u32> {
    let value = find(attributes, kind)?.try_into().ok()?;
    Some(u32::from_ne_bytes(value))
}

fn locked_route(route: &[u8]) -> Option<LockedRoute> {
    let (header, attributes) = RouteHeader::parse(route)?;
    let metrics = find(attributes, libc::RTA_METRICS)?;
    if find_u32(metrics, RTAX_LOCK)? & (1 << RTAX_RTO_MIN) == 0 {
        return None;
    }
    let millis = find_u32(metrics, RTAX_RTO_MIN)?;
    Some(LockedRoute {
        destination: destination(header, attributes)?,
        table: find_u32(attributes, libc::RTA_TABLE).unwrap_or(header.table.into()),
        rto_min: Duration::from_millis(millis.into()),
    })
}

fn unicast(route: &[u8]) -> Option<IpNetwork> {
    let (header, attributes) = RouteHeader::parse(route)?;
    let leads_on = header.kind == libc::RTN_UNICAST;
    let is_default = header.prefix == 0;
    (leads_on && !is_default).then(|| destination(header, attributes))?
}

fn destination(header: RouteHeader, attributes: &[u8]) -> Option<IpNetwork> {
    let octets = find(attributes, libc::RTA_DST);
    let address = if header.family == AF_INET6 {
        let octets: [u8; 16] = octets.unwrap_or(&[0; 16]).try_into().ok()?;
        IpAddr::from(octets)
    } else {
        let octets: [u8; 4] = octets.unwrap_or(&[0; 4]).try_into().ok()?;
        IpAddr::from(octets)
    };
    IpNetwork::new(address, header.prefix).ok()
}

/// Whether two prefixes share an address.
pub(crate) fn overlap(a: IpNetwork, b: IpNetwork) -> bool {
    a.contains(b.network()) || b.contains(a.network())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
        let length = u16::try_from(4 + value.len()).unwrap();
        let head = [length.to_ne_bytes(), kind.to_ne_bytes()].concat();
        [&head, value].concat()
    }

    /// A route to 10.0.0.0/8 of this kind with these metrics.
    fn route(kind: u8, prefix: u8, metrics: &[(u16, u32)]) -> Vec<u8> {
        let header = [AF_INET, prefix, 0, 0, 254, 0, 0, kind, 0, 0, 0, 0];
        let metrics = metrics.iter();
        let metrics = metrics.flat_map(|(kind, value)| attribute(*kind, &value.to_ne_bytes()));
        let metrics = attribute(libc::RTA_METRICS, &metrics.collect::<Vec<_>>());
        let destination = attribute(libc::RTA_DST, &[10, 0, 0, 0]);
        [&header[..], &destination, &metrics].concat()
    }

    #[test]
    fn locked_routes_are_parsed() {
        const MTU: u16 = 2;
        let locked = |metrics: &[(u16, u32)]| locked_route(&route(libc::RTN_UNICAST, 8, metrics));
        assert_eq!(
            locked(&[(RTAX_LOCK, 1 << 13), (RTAX_RTO_MIN, 50)]),
            Some(LockedRoute {
                destination: "10.0.0.0/8".parse().unwrap(),
                table: 254,
                rto_min: Duration::from_millis(50)
            })
        );
        assert_eq!(locked(&[(RTAX_RTO_MIN, 50)]), None);
        assert_eq!(locked(&[(RTAX_LOCK, 1 << MTU), (MTU, 1400)]), None);
        assert_eq!(locked(&[(RTAX_LOCK, 1 << MTU), (RTAX_RTO_MIN, 50)]), None);
    }

    #[test]
    fn unreachable_and_blackhole_routes_are_skipped() {
        for (kind, prefix, leads) in [
            (libc::RTN_UNICAST, 8, true),
            (libc::RTN_UNICAST, 0, false),
            (libc::RTN_BLACKHOLE, 8, false),
            (libc::RTN_LOCAL, 8, false),
        ] {
            let found = unicast(&route(kind, prefix, &[])).map(|net| net.to_string());
            assert_eq!(found.as_deref(), leads.then_some("10.0.0.0/8"), "{kind}");
        }
    }

    #[test]
    fn truncated_route_is_ignored() {
        let whole = route(
            libc::RTN_UNICAST,
            8,
            &[(RTAX_LOCK, 1 << 13), (RTAX_RTO_MIN, 50)],
        );
        for end in 0..whole.len() {
            assert_eq!(locked_route(&whole[..end]), None, "{end}");
        }
    }

    #[test]
    fn route_changes_after_each_longer_route() {
        let net = |s: &str| s.parse().unwrap();
        let all = [
            "0.0.0.0/0",
            "10.0.0.0/24",
            "10.0.0.0/32",
            "10.0.255.0/24",
            "11.0.0.0/8",
        ]
        .map(net);
        let found: Vec<String> = changes(net("10.0.0.0/16"), &all)
            .iter()
            .map(ToString::to_string)
            .collect();
        assert_eq!(found, ["10.0.0.0", "10.0.0.1", "10.0.1.0"]);
        let last = changes(net("ffff::/16"), &[net("ffff:ffff::/32")]);
        assert_eq!(
            last.into_iter().collect::<Vec<_>>(),
            [net("ffff::/16").network()]
        );
    }

    #[test]
    fn prefix_overlap_is_found() {
        let net = |s: &str| s.parse().unwrap();
        assert!(overlap(net("10.0.0.0/8"), net("10.1.0.0/16")));
        assert!(overlap(net("10.1.0.0/16"), net("10.0.0.0/8")));
        assert!(!overlap(net("10.1.0.0/16"), net("10.2.0.0/16")));
        assert!(!overlap(net("0.0.0.0/0"), net("::/0")));
    }

    #[test]
    fn routes_of_this_namespace_are_read() {
        locked().unwrap();
        destinations().unwrap();
    }
}
