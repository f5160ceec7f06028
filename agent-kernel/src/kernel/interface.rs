//! Configures network interfaces of this network namespace, by index (rtnetlink(7)).

use std::net::IpAddr;

use netlink_packet_core::DefaultNla;
use netlink_sys::protocols::NETLINK_ROUTE;

use super::netlink::{self, Message};

/// Index of the loopback interface in a new namespace.
pub const LOOPBACK: u32 = 1;

/// Sets an interface up.
pub fn set_up(index: u32) -> anyhow::Result<()> {
    // struct ifinfomsg: family and type, both unused here; index, flags, and a mask of flags to
    // change.
    let up = u32::try_from(libc::IFF_UP)?;
    let words = [0, index, up, up].map(u32::to_ne_bytes);
    let request = Message::new(libc::RTM_SETLINK, words.as_flattened(), &[]);
    Ok(netlink::set(NETLINK_ROUTE, request)?)
}

/// Adds an address to an interface, with a prefix that contains only this address.
pub fn add_address(index: u32, address: IpAddr) -> anyhow::Result<()> {
    let (family, octets) = netlink::octets(address);
    // struct ifaddrmsg: family, prefix length, flags, scope; index.
    let first = [family, u8::try_from(octets.len() * 8)?, 0, 0];
    let header = [first, index.to_ne_bytes()];
    let local = DefaultNla::new(libc::IFA_LOCAL, octets);
    let request = Message::new(libc::RTM_NEWADDR, header.as_flattened(), &[local]);
    Ok(netlink::set(NETLINK_ROUTE, request)?)
}

/// Adds a route through the interface of this index to the main table.
pub(super) fn add_route(destination: IpAddr, interface: u32) -> anyhow::Result<()> {
    let (family, octets) = netlink::octets(destination);
    let prefix = u8::try_from(octets.len() * 8)?;
    let (table, protocol) = (libc::RT_TABLE_MAIN, libc::RTPROT_STATIC);
    // `struct rtmsg` (rtnetlink(7)).
    let kind = libc::RTN_UNICAST;
    let header = [family, prefix, 0, 0, table, protocol, 0, kind, 0, 0, 0, 0];
    let attributes = [
        DefaultNla::new(libc::RTA_DST, octets),
        DefaultNla::new(libc::RTA_OIF, interface.to_ne_bytes().to_vec()),
    ];
    let request = Message::new(libc::RTM_NEWROUTE, &header, &attributes);
    Ok(netlink::set(NETLINK_ROUTE, request)?)
}
