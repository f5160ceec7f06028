//! Routes of this network namespace: their destinations, and which have a locked rto_min. The kernel prefers that to any
//! socket's (`tcp_rto_min()`, net/ipv4/tcp_output.c, Linux 6.12), so that a policy's rto_min does nothing there.

use std::{net::IpAddr, time::Duration};

use futures_util::TryStreamExt as _;
use ipnetwork::IpNetwork;
use netlink_packet_route::{
    AddressFamily,
    route::{RouteAddress, RouteAttribute, RouteMessage, RouteMetric, RouteType},
};

const RTAX_RTO_MIN: u32 = 13;

/// A route with a locked rto_min.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LockedRoute {
    /// Its destination.
    pub destination: IpNetwork,
    /// Routing table.
    pub table: u32,
    /// The locked value.
    pub rto_min: Duration,
}

/// The routes with a locked rto_min.
pub fn locked() -> anyhow::Result<Vec<LockedRoute>> {
    dump(locked_route)
}

/// Where unicast routes lead to, default routes left out.
pub fn destinations() -> anyhow::Result<Vec<IpNetwork>> {
    dump(unicast)
}

/// Dumps all tables, IPv4 and IPv6.
fn dump<T>(pick: impl Fn(&RouteMessage) -> Option<T>) -> anyhow::Result<Vec<T>> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let (connection, handle, _) = rtnetlink::new_connection()?;
        let driver = tokio::spawn(connection);
        let mut found = Vec::new();
        for family in [AddressFamily::Inet, AddressFamily::Inet6] {
            let mut message = RouteMessage::default();
            message.header.address_family = family;
            let mut routes = handle.route().get(message).execute();
            while let Some(route) = routes.try_next().await? {
                found.extend(pick(&route));
            }
        }
        driver.abort();
        Ok(found)
    })
}

fn locked_route(route: &RouteMessage) -> Option<LockedRoute> {
    let metrics = route
        .attributes
        .iter()
        .find_map(|attribute| match attribute {
            RouteAttribute::Metrics(metrics) => Some(metrics),
            _ => None,
        })?;
    let lock = metrics.iter().find_map(|m| {
        if let RouteMetric::Lock(bits) = m {
            Some(*bits)
        } else {
            None
        }
    });
    if lock? & (1 << RTAX_RTO_MIN) == 0 {
        return None;
    }
    let millis = metrics.iter().find_map(|m| {
        if let RouteMetric::RtoMin(ms) = m {
            Some(*ms)
        } else {
            None
        }
    })?;
    let table = route
        .attributes
        .iter()
        .find_map(|attribute| match attribute {
            RouteAttribute::Table(table) => Some(*table),
            _ => None,
        });
    Some(LockedRoute {
        destination: destination(route)?,
        table: table.unwrap_or(u32::from(route.header.table)),
        rto_min: Duration::from_millis(millis.into()),
    })
}

fn unicast(route: &RouteMessage) -> Option<IpNetwork> {
    let leads_on = route.header.kind == RouteType::Unicast;
    let is_default = route.header.destination_prefix_length == 0;
    (leads_on && !is_default).then(|| destination(route))?
}

fn destination(route: &RouteMessage) -> Option<IpNetwork> {
    let destination = route
        .attributes
        .iter()
        .find_map(|attribute| match attribute {
            RouteAttribute::Destination(RouteAddress::Inet(a)) => Some(IpAddr::V4(*a)),
            RouteAttribute::Destination(RouteAddress::Inet6(a)) => Some(IpAddr::V6(*a)),
            _ => None,
        });
    let any = match route.header.address_family {
        AddressFamily::Inet6 => IpAddr::V6(std::net::Ipv6Addr::UNSPECIFIED),
        _ => IpAddr::V4(std::net::Ipv4Addr::UNSPECIFIED),
    };
    let prefix = route.header.destination_prefix_length;
    IpNetwork::new(destination.unwrap_or(any), prefix).ok()
}

/// Whether two prefixes share an address.
pub fn overlap(a: IpNetwork, b: IpNetwork) -> bool {
    a.contains(b.network()) || b.contains(a.network())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn route(metrics: Vec<RouteMetric>) -> RouteMessage {
        let mut route = RouteMessage::default();
        route.header.address_family = AddressFamily::Inet;
        route.header.destination_prefix_length = 8;
        route.header.table = 254;
        route.attributes = vec![
            RouteAttribute::Destination(RouteAddress::Inet([10, 0, 0, 0].into())),
            RouteAttribute::Metrics(metrics),
        ];
        route
    }

    #[test]
    fn only_locked_ones() {
        let found = locked_route(&route(vec![
            RouteMetric::Lock(1 << 13),
            RouteMetric::RtoMin(50),
        ]));
        assert_eq!(
            found,
            Some(LockedRoute {
                destination: "10.0.0.0/8".parse().unwrap(),
                table: 254,
                rto_min: Duration::from_millis(50)
            })
        );
        assert_eq!(locked_route(&route(vec![RouteMetric::RtoMin(50)])), None);
        assert_eq!(
            locked_route(&route(vec![RouteMetric::Lock(2), RouteMetric::Mtu(1400)])),
            None
        );
    }

    #[test]
    fn only_those_that_lead_somewhere() {
        let mut one = route(Vec::new());
        for (kind, length, leads) in [
            (RouteType::Unicast, 8, true),
            (RouteType::Unicast, 0, false),
            (RouteType::BlackHole, 8, false),
            (RouteType::Local, 8, false),
        ] {
            one.header.kind = kind;
            one.header.destination_prefix_length = length;
            let found = unicast(&one).map(|net| net.to_string());
            assert_eq!(found.as_deref(), leads.then_some("10.0.0.0/8"), "{kind:?}");
        }
    }

    #[test]
    fn overlaps() {
        let net = |s: &str| s.parse().unwrap();
        assert!(overlap(net("10.0.0.0/8"), net("10.1.0.0/16")));
        assert!(overlap(net("10.1.0.0/16"), net("10.0.0.0/8")));
        assert!(!overlap(net("10.1.0.0/16"), net("10.2.0.0/16")));
        assert!(!overlap(net("0.0.0.0/0"), net("::/0")));
    }

    #[test]
    fn this_namespace_can_be_dumped() {
        locked().unwrap();
        destinations().unwrap();
    }
}
