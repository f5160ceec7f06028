//! The kernel's cache of TCP metrics by destination (`ip tcp_metrics`), read by generic netlink
//! (include/uapi/linux/tcp_metrics.h, Linux 6.12).

use std::{
    ffi::CStr,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    time::Duration,
};

use anyhow::Context as _;
use netlink_packet_core::{DefaultNla, NlasIterator};
use netlink_sys::protocols::NETLINK_GENERIC;

use super::netlink::{self, Message, find};

/// The id of generic netlink's controller (include/uapi/linux/genetlink.h).
const GENL_ID_CTRL: u16 = 16;
const CTRL_CMD_GETFAMILY: u8 = 3;
const CTRL_ATTR_FAMILY_ID: u16 = 1;
const CTRL_ATTR_FAMILY_NAME: u16 = 2;
const HEADER_LEN: usize = 4;

const FAMILY: &CStr = c"tcp_metrics";
const VERSION: u8 = 1;
const CMD_GET: u8 = 1;
const ADDR_IPV4: u16 = 1;
const ADDR_IPV6: u16 = 2;
const VALS: u16 = 6;
/// Within `VALS`, an attribute's number is its metric plus one; this metric is TCP_METRIC_RTT_US.
const RTT_US: u16 = 5 + 1;
/// Units per microsecond, as in `tcp_sock.srtt_us`.
const RTT_UNIT: u32 = 8;

/// The cached metrics of one destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Metric {
    /// The destination's address.
    pub address: IpAddr,
    /// Its smoothed RTT; zero if that is not cached.
    pub rtt: Duration,
}

/// All cached destinations of this network namespace.
pub fn all() -> anyhow::Result<Vec<Metric>> {
    let request = Message::new(family()?, &header(CMD_GET), &[]);
    let mut found = Vec::new();
    netlink::dump(NETLINK_GENERIC, request, |answer| {
        found.extend(attributes(answer).and_then(metric));
    })?;
    Ok(found)
}

/// The id that this kernel assigned to the family.
fn family() -> anyhow::Result<u16> {
    let name = DefaultNla::new(CTRL_ATTR_FAMILY_NAME, FAMILY.to_bytes_with_nul().to_vec());
    let request = Message::new(GENL_ID_CTRL, &header(CTRL_CMD_GETFAMILY), &[name]);
    let mut number = None;
    netlink::get(NETLINK_GENERIC, request, |answer| {
        let found = find(attributes(answer).unwrap_or_default(), CTRL_ATTR_FAMILY_ID);
        number = found.and_then(|value| Some(u16::from_ne_bytes(value.try_into().ok()?)));
    })?;
    number.context("the kernel has no netlink family tcp_metrics")
}

/// `struct genlmsghdr`: command, version, and two reserved bytes.
fn header(command: u8) -> [u8; HEADER_LEN] {
    [command, VERSION, 0, 0]
}

fn attributes(answer: &[u8]) -> Option<&[u8]> {
    answer.get(HEADER_LEN..)
}

fn metric(attributes: &[u8]) -> Option<Metric> {
    let mut address = None;
    let mut rtt = Duration::ZERO;
    for attribute in NlasIterator::new(attributes).flatten() {
        let value = attribute.value();
        match attribute.kind() {
            ADDR_IPV4 => {
                let octets: [u8; 4] = value.try_into().ok()?;
                address = Some(IpAddr::V4(Ipv4Addr::from(octets)));
            }
            ADDR_IPV6 => {
                let octets: [u8; 16] = value.try_into().ok()?;
                address = Some(IpAddr::V6(Ipv6Addr::from(octets)));
            }
            VALS => {
                let nested = NlasIterator::new(value).flatten();
                for metric in nested.filter(|metric| metric.kind() == RTT_US) {
                    let us = u32::from_ne_bytes(metric.value().try_into().ok()?);
                    rtt = Duration::from_micros((us / RTT_UNIT).into());
                }
            }
            _ => {}
        }
    }
    Some(Metric {
        address: address?,
        rtt,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
        let length = u16::try_from(4 + value.len()).unwrap();
        let mut bytes = [length.to_ne_bytes(), kind.to_ne_bytes()].concat();
        bytes.extend_from_slice(value);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    #[test]
    fn tcp_metrics_message_is_parsed() {
        let vals = [
            attribute(1, &1u32.to_ne_bytes()),
            attribute(RTT_US, &(80_000u32 * 8).to_ne_bytes()),
        ]
        .concat();
        let message = [attribute(ADDR_IPV4, &[10, 0, 0, 1]), attribute(VALS, &vals)].concat();
        assert_eq!(
            metric(&message),
            Some(Metric {
                address: "10.0.0.1".parse().unwrap(),
                rtt: Duration::from_millis(80),
            })
        );
        assert_eq!(metric(&attribute(VALS, &vals)), None);
        assert_eq!(metric(&attribute(ADDR_IPV4, &[1])), None);
    }

    #[test]
    fn tcp_metrics_of_this_namespace_are_read() {
        all().unwrap();
    }
}
