//! Network interfaces of this network namespace, by their index (rtnetlink(7)).

use std::net::IpAddr;

use netlink_packet_core::DefaultNla;
use netlink_sys::protocols::NETLINK_ROUTE;

use super::netlink::{self, Message};

/// Sets an interface up.
pub(super) fn set_up(index: u32) -> anyhow::Result<()> {
    // struct ifinfomsg: family and type, which mean nothing here; index, flags, and which flags change.
    let up = u32::try_from(libc::IFF_UP)?;
    let words = [0, index, up, up].map(u32::to_ne_bytes);
    let request = Message::new(libc::RTM_SETLINK, words.as_flattened(), &[]);
    Ok(netlink::set(NETLINK_ROUTE, request)?)
}

/// Gives an interface an address, whose network is the address alone.
pub(super) fn add_address(index: u32, address: IpAddr) -> anyhow::Result<()> {
    let (family, octets) = netlink::octets(address);
    // struct ifaddrmsg: family, length of the prefix, flags, scope; index.
    let first = [family, u8::try_from(octets.len() * 8)?, 0, 0];
    let header = [first, index.to_ne_bytes()];
    let local = DefaultNla::new(libc::IFA_LOCAL, octets);
    let request = Message::new(libc::RTM_NEWADDR, header.as_flattened(), &[local]);
    Ok(netlink::set(NETLINK_ROUTE, request)?)
}
