//! Peers that no entry covers, by prefix, to show which of them deserve an entry.

use crate::{address::Peer, histogram::Histogram};

/// A /24 of IPv4, or a /48 of IPv6 (key of `DISCOVERED`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Prefix {
    /// AF_INET or AF_INET6.
    pub family: u32,
    /// The address, network byte order, as four words; 0 beyond the prefix.
    pub address: [u32; 4],
}

impl Prefix {
    /// Length of an IPv4 prefix.
    pub const V4_LEN: u8 = 24;
    /// Length of an IPv6 prefix.
    pub const V6_LEN: u8 = 48;

    /// The prefix of a peer.
    #[inline(always)]
    #[must_use]
    pub const fn of(peer: &Peer) -> Self {
        match peer {
            Peer::V4(a) => Self {
                family: crate::address::AF_INET,
                address: [u32::from_ne_bytes([a[0], a[1], a[2], 0]), 0, 0, 0],
            },
            Peer::V6(a) => Self {
                family: crate::address::AF_INET6,
                address: [
                    u32::from_ne_bytes([a[0], a[1], a[2], a[3]]),
                    u32::from_ne_bytes([a[4], a[5], 0, 0]),
                    0,
                    0,
                ],
            },
        }
    }
}

/// Statistics of the sampled connections to a prefix: one in [`Discovered::ONE_IN`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Discovered {
    /// Connections established.
    pub connections: u64,
    /// Of these, connections whose SYN or SYN-ACK was retransmitted.
    pub recovered: u64,
    /// Round-trip times of handshakes without a loss.
    pub times: Histogram,
}

impl Discovered {
    /// One connection in this many is sampled; a power of two.
    pub const ONE_IN: u32 = 16;
    /// Maximum number of prefixes; when the map is full, the least recently used one is evicted.
    pub const ROOM: u32 = 2048;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::address::peer_v6;

    #[test]
    fn peers_of_a_prefix_are_one() {
        let of = |last| Prefix::of(&Peer::V4([192, 0, 2, last]));
        assert_eq!(of(1), of(255));
        assert_eq!(of(1).address[0].to_ne_bytes(), [192, 0, 2, 0]);
        assert_ne!(of(1), Prefix::of(&Peer::V4([192, 0, 3, 1])));
        let v6 = |second: u32, last: u32| {
            Prefix::of(&peer_v6([
                0x2001_0db8_u32.to_be(),
                second.to_be(),
                7,
                last.to_be(),
            ]))
        };
        assert_eq!(v6(0x0001_0002, 1), v6(0x0001_ffff, 2));
        assert_ne!(v6(0x0001_0002, 1), v6(0x0002_0002, 1));
    }
}
