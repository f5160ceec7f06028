//! Chooses the trie in which the address of a sock_ops context is looked up.

/// `AF_INET`, as `bpf_sock_ops.family` reports it.
pub const AF_INET: u32 = 2;
/// `AF_INET6`.
pub const AF_INET6: u32 = 10;

/// A peer's address in the form of a trie key (network byte order, as in memory).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peer {
    /// Look up in `ENTRIES_V4`.
    V4([u8; 4]),
    /// Look up in `ENTRIES_V6`.
    V6([u8; 16]),
}

/// Chooses the trie for an IPv6 address. An IPv4-mapped one (`::ffff:a.b.c.d`, RFC 4291 section 2.5.5.2) is looked up
/// as IPv4, because that is what dual-stack sockets send on the wire.
#[inline(always)]
#[must_use]
pub fn peer_v6(address: [u32; 4]) -> Peer {
    if is_v4_mapped(address) {
        Peer::V4(address[3].to_ne_bytes())
    } else {
        let mut bytes = [0u8; 16];
        bytes[0..4].copy_from_slice(&address[0].to_ne_bytes());
        bytes[4..8].copy_from_slice(&address[1].to_ne_bytes());
        bytes[8..12].copy_from_slice(&address[2].to_ne_bytes());
        bytes[12..16].copy_from_slice(&address[3].to_ne_bytes());
        Peer::V6(bytes)
    }
}

/// Whether four words in network order are `::ffff:a.b.c.d`.
#[inline(always)]
#[must_use]
pub const fn is_v4_mapped(address: [u32; 4]) -> bool {
    address[0] == 0 && address[1] == 0 && address[2] == 0x0000_ffff_u32.to_be()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(a: core::net::Ipv6Addr) -> [u32; 4] {
        let o = a.octets();
        core::array::from_fn(|i| {
            u32::from_ne_bytes([o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3]])
        })
    }

    #[test]
    fn mapped_addresses_are_v4() {
        let mapped = core::net::Ipv4Addr::new(10, 1, 2, 3).to_ipv6_mapped();
        assert_eq!(peer_v6(words(mapped)), Peer::V4([10, 1, 2, 3]));
    }

    #[test]
    fn others_stay_v6() {
        for a in [
            "::",
            "::1",
            "fd00::1",
            "::ffff:0:1.2.3.4",
            "64:ff9b::1.2.3.4",
            "::1.2.3.4",
        ] {
            let a: core::net::Ipv6Addr = a.parse().unwrap();
            assert_eq!(peer_v6(words(a)), Peer::V6(a.octets()), "{a}");
        }
    }
}
