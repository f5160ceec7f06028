//! The TCP connections of this network namespace, by sock_diag(7) (include/uapi/linux/inet_diag.h, Linux 6.12).

use std::{
    ffi::CStr,
    io,
    net::{IpAddr, SocketAddr},
};

use rto_agent_kernel::kernel::netlink::{
    self, AF_INET, AF_INET6, Message, NETLINK_SOCK_DIAG, find,
};
use serde::Serialize;

const SOCK_DIAG_BY_FAMILY: u16 = 20;
const IPPROTO_TCP: u8 = 6;
/// Also the attributes' numbers.
const INET_DIAG_INFO: u8 = 2;
const INET_DIAG_CONG: u8 = 4;
/// `sizeof(struct inet_diag_req_v2)`, `sizeof(struct inet_diag_msg)`.
const REQUEST: usize = 56;
const HEADER: usize = 72;
/// State names indexed by `enum tcp_state`, which starts at 1.
const STATES: [&str; 12] = [
    "ESTABLISHED",
    "SYN-SENT",
    "SYN-RECEIVED",
    "FIN-WAIT-1",
    "FIN-WAIT-2",
    "TIME-WAIT",
    "CLOSED",
    "CLOSE-WAIT",
    "LAST-ACK",
    "LISTEN",
    "CLOSING",
    "SYN-RECEIVED",
];
const LISTEN: u32 = 10;

/// A connection with its current timers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Connection {
    /// The local address.
    pub(super) local: SocketAddr,
    /// The peer's address.
    pub(super) peer: SocketAddr,
    /// Its state, named as in RFC 9293.
    pub(super) state: &'static str,
    /// The socket's inode number, as in `/proc/PID/fd`.
    #[serde(skip)]
    pub(super) inode: u32,
    /// The name of its congestion control; `None` while the kernel has no full socket, as `info`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) congestion_control: Option<String>,
    /// Its timers and window.
    #[serde(flatten)]
    pub(super) info: Option<Info>,
}

/// Fields of `struct tcp_info`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Info {
    /// Consecutive retransmission timeouts without an answer.
    pub(super) timeouts_in_a_row: u8,
    /// The current timeout, microseconds.
    pub(super) rto_us: u32,
    /// The smoothed RTT, microseconds; 0 before the first sample.
    pub(super) rtt_us: u32,
    /// The RTT variation, microseconds.
    pub(super) rtt_variation_us: u32,
    /// The congestion window, segments.
    pub(super) cwnd: u32,
    /// Segments retransmitted so far.
    pub(super) retransmissions: u32,
}

/// All connections of this thread's network namespace. IPv4-mapped addresses are returned as IPv4.
pub(super) fn connections() -> io::Result<Vec<Connection>> {
    let mut found = Vec::new();
    for family in [AF_INET, AF_INET6] {
        let mut request = [0; REQUEST];
        let wanted = 1 << (INET_DIAG_INFO - 1) | 1 << (INET_DIAG_CONG - 1);
        request[..3].copy_from_slice(&[family, IPPROTO_TCP, wanted]);
        request[4..8].copy_from_slice(&(!(1_u32 << LISTEN)).to_ne_bytes());
        let request = Message::new(SOCK_DIAG_BY_FAMILY, &request, &[]);
        netlink::dump(NETLINK_SOCK_DIAG, request, |answer| {
            found.extend(connection(answer));
        })?;
    }
    Ok(found)
}

fn connection(answer: &[u8]) -> Option<Connection> {
    let [family, state, ..] = *answer.get(..HEADER)? else {
        return None;
    };
    let end = |port: usize, address: usize| -> Option<SocketAddr> {
        let port = u16::from_be_bytes(answer[port..port + 2].try_into().ok()?);
        let address = match family {
            AF_INET => IpAddr::from(<[u8; 4]>::try_from(&answer[address..address + 4]).ok()?),
            _ => IpAddr::from(<[u8; 16]>::try_from(&answer[address..address + 16]).ok()?)
                .to_canonical(),
        };
        Some(SocketAddr::new(address, port))
    };
    Some(Connection {
        local: end(4, 8)?,
        peer: end(6, 24)?,
        state: STATES.get(usize::from(state).checked_sub(1)?)?,
        inode: u32::from_ne_bytes(answer[68..72].try_into().ok()?),
        congestion_control: find(&answer[HEADER..], INET_DIAG_CONG.into())
            .and_then(|name| CStr::from_bytes_until_nul(name).ok())
            .and_then(|name| name.to_str().ok())
            .map(str::to_owned),
        info: find(&answer[HEADER..], INET_DIAG_INFO.into()).and_then(info),
    })
}

fn info(tcp_info: &[u8]) -> Option<Info> {
    let number = |at: usize| {
        Some(u32::from_ne_bytes(
            tcp_info.get(at..at + 4)?.try_into().ok()?,
        ))
    };
    Some(Info {
        timeouts_in_a_row: *tcp_info.get(2)?,
        rto_us: number(8)?,
        rtt_us: number(68)?,
        rtt_variation_us: number(72)?,
        cwnd: number(80)?,
        retransmissions: number(100)?,
    })
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, Ipv6Addr, TcpListener, TcpStream};

    use super::*;

    #[test]
    fn both_ends_of_a_connection_are_found_with_their_timers() {
        let addresses = [
            IpAddr::from(Ipv4Addr::LOCALHOST),
            Ipv6Addr::LOCALHOST.into(),
        ];
        for address in addresses {
            let Ok(listener) = TcpListener::bind((address, 0)) else {
                assert!(address.is_ipv6(), "no IPv4");
                continue;
            };
            let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let (_server, _) = listener.accept().unwrap();
            let all = connections().unwrap();
            let (local, peer) = (client.local_addr().unwrap(), client.peer_addr().unwrap());
            for ends in [(local, peer), (peer, local)] {
                let found = all
                    .iter()
                    .find(|one| (one.local, one.peer) == ends)
                    .unwrap();
                let info = found.info.unwrap();
                assert_eq!((found.state, info.retransmissions), ("ESTABLISHED", 0));
                let controls =
                    std::fs::read_to_string("/proc/sys/net/ipv4/tcp_available_congestion_control");
                let name = found.congestion_control.as_deref().unwrap();
                assert!(controls.unwrap().split_whitespace().any(|one| one == name));
                assert!(
                    info.rto_us > 0 && info.cwnd > 0 && found.inode > 0,
                    "{found:?}"
                );
            }
        }
    }
}
