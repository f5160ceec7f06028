//! The kernel's cache of what TCP connections learned of their destinations (`ip tcp_metrics`), by
//! generic netlink (include/uapi/linux/tcp_metrics.h, Linux 6.12).

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    time::Duration,
};

use futures_util::StreamExt as _;
use netlink_packet_core::{
    DecodeError, Emitable, NLM_F_DUMP, NLM_F_REQUEST, NetlinkMessage, NetlinkPayload, NlasIterator,
    ParseableParametrized,
};
use netlink_packet_generic::{GenlFamily, GenlHeader, GenlMessage};

const ADDR_IPV4: u16 = 1;
const ADDR_IPV6: u16 = 2;
const VALS: u16 = 6;
/// Within `VALS` an attribute is one more than its metric: here TCP_METRIC_RTT_US.
const RTT_US: u16 = 5 + 1;
/// As in `tcp_sock.srtt_us`.
const RTT_UNIT: u32 = 8;

/// What is cached of one destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Metric {
    /// The destination.
    pub address: IpAddr,
    /// Its smoothed round trip time; zero if that is not cached.
    pub rtt: Duration,
}

/// Everything cached in this network namespace.
pub fn all() -> anyhow::Result<Vec<Metric>> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let (connection, mut handle, _) = genetlink::new_connection()?;
        let driver = tokio::spawn(connection);
        let mut request = NetlinkMessage::from(GenlMessage::from_payload(Payload(Vec::new())));
        request.header.flags = NLM_F_REQUEST | NLM_F_DUMP;
        let mut answers = handle.request(request).await?;
        let mut found = Vec::new();
        while let Some(answer) = answers.next().await {
            match answer?.payload {
                NetlinkPayload::InnerMessage(message) => found.extend(metric(&message.payload.0)),
                NetlinkPayload::Error(e) => return Err(e.to_io().into()),
                _ => {}
            }
        }
        driver.abort();
        Ok(found)
    })
}

/// The attributes of one message, as they came.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Payload(Vec<u8>);

impl GenlFamily for Payload {
    fn family_name() -> &'static str {
        "tcp_metrics"
    }

    fn command(&self) -> u8 {
        const GET: u8 = 1;
        GET
    }

    fn version(&self) -> u8 {
        1
    }
}

impl Emitable for Payload {
    fn buffer_len(&self) -> usize {
        self.0.len()
    }

    fn emit(&self, buffer: &mut [u8]) {
        buffer.copy_from_slice(&self.0);
    }
}

impl ParseableParametrized<[u8], GenlHeader> for Payload {
    fn parse_with_param(buffer: &[u8], _: GenlHeader) -> Result<Self, DecodeError> {
        Ok(Self(buffer.to_vec()))
    }
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
    fn one_message() {
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
                rtt: Duration::from_millis(80)
            })
        );
        assert_eq!(metric(&attribute(VALS, &vals)), None);
        assert_eq!(metric(&attribute(ADDR_IPV4, &[1])), None);
    }

    #[test]
    fn this_namespace_can_be_dumped() {
        all().unwrap();
    }
}
