//! A CIDR: network address and prefix length, without host bits.

use std::{
    cmp::Ordering,
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    str::FromStr,
};

use ipnetwork::{IpNetwork, Ipv4Network};

/// An IPv4 or IPv6 prefix without host bits. Ordered by family, address, length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Cidr(IpNetwork);

/// The order of a derived `Ord`, computed on numbers: sorting a million CIDRs takes some twenty
/// million comparisons.
impl Ord for Cidr {
    fn cmp(&self, other: &Self) -> Ordering {
        match (self.0, other.0) {
            (IpNetwork::V4(a), IpNetwork::V4(b)) => {
                (a.ip().to_bits(), a.prefix()).cmp(&(b.ip().to_bits(), b.prefix()))
            }
            (IpNetwork::V6(a), IpNetwork::V6(b)) => {
                (a.ip().to_bits(), a.prefix()).cmp(&(b.ip().to_bits(), b.prefix()))
            }
            (IpNetwork::V4(_), IpNetwork::V6(_)) => Ordering::Less,
            (IpNetwork::V6(_), IpNetwork::V4(_)) => Ordering::Greater,
        }
    }
}

impl PartialOrd for Cidr {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// Why a text is not a valid CIDR. The error's text suggests the intended CIDR, if there is a
/// likely one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CidrError {
    /// Not an address with a prefix length.
    #[error(
        "invalid CIDR {text:?}; write it like 10.1.2.0/24, fd00:1::/64, or a bare address for one host"
    )]
    Malformed {
        /// The text.
        text: String,
    },
    /// The prefix length is out of range for its family.
    #[error("{text}: the prefix length of {family} must be 0 to {most}", family = if *most == 32 { "IPv4" } else { "IPv6" })]
    Length {
        /// The text.
        text: String,
        /// The longest prefix length of the family.
        most: u8,
    },
    /// Bits beyond the prefix are set.
    #[error("{text} has host bits set; did you mean {meant}?")]
    HostBits {
        /// The text.
        text: String,
        /// The network that contains the address.
        meant: IpNetwork,
    },
    /// An IPv4-mapped IPv6 prefix; the program looks such peers up as IPv4.
    #[error("{text} is IPv4-mapped; such peers are treated as IPv4, so write {meant}")]
    Mapped {
        /// The text.
        text: String,
        /// The IPv4 prefix.
        meant: IpNetwork,
    },
}

impl Cidr {
    /// The prefix of this length that contains an address; `None` if the family has no such length,
    /// or for an IPv4-mapped prefix.
    pub fn containing(address: IpAddr, length: u8) -> Option<Self> {
        let network = match address {
            IpAddr::V4(a) => {
                let mask = u32::MAX.checked_shl(32 - u32::from(length.min(32)));
                let bits = a.to_bits() & mask.unwrap_or(0);
                IpNetwork::new(Ipv4Addr::from_bits(bits).into(), length)
            }
            IpAddr::V6(a) => {
                let mask = u128::MAX.checked_shl(128 - u32::from(length.min(128)));
                let bits = a.to_bits() & mask.unwrap_or(0);
                IpNetwork::new(Ipv6Addr::from_bits(bits).into(), length)
            }
        };
        network
            .ok()
            .filter(|network| mapped(*network).is_none())
            .map(Self)
    }

    /// The prefix.
    pub const fn network(&self) -> IpNetwork {
        self.0
    }

    /// The prefix length, bits.
    pub fn prefix(&self) -> u8 {
        self.0.prefix()
    }

    /// Whether it is an IPv4 prefix.
    pub fn is_ipv4(&self) -> bool {
        self.0.is_ipv4()
    }

    /// Whether the entry covers an address; an IPv4-mapped address counts as IPv4.
    pub fn contains(&self, address: IpAddr) -> bool {
        self.0.contains(address.to_canonical())
    }

    /// Whether this CIDR contains all addresses of `other`, and `other` is longer.
    pub fn contains_cidr(&self, other: &Self) -> bool {
        self.prefix() < other.prefix() && self.0.contains(other.0.ip())
    }
}

impl FromStr for Cidr {
    type Err = CidrError;

    fn from_str(text: &str) -> Result<Self, CidrError> {
        let own = || text.to_owned();
        let malformed = || CidrError::Malformed { text: own() };
        // Not parsed by ipnetwork, which also accepts netmasks ("10.0.0.0/255.0.0.0").
        let (address, length) = match text.split_once('/') {
            Some((address, length)) => (address.parse::<IpAddr>(), Some(length)),
            None => (text.parse(), None),
        };
        let address = address.map_err(|_| malformed())?;
        let most = if address.is_ipv4() { 32 } else { 128 };
        let length = match length {
            None => most,
            Some(digits) if !is_number(digits) => return Err(malformed()),
            Some(digits) => {
                let length = digits.parse().ok().filter(|length| *length <= most);
                length.ok_or_else(|| CidrError::Length { text: own(), most })?
            }
        };
        if let Some(cidr) = Self::containing(address, length).filter(|c| c.0.ip() == address) {
            return Ok(cidr);
        }
        let network = IpNetwork::new(address, length).map_err(|_| malformed())?;
        if let Some(meant) = mapped(network) {
            return Err(CidrError::Mapped { text: own(), meant });
        }
        let meant = IpNetwork::new(network.network(), length).map_err(|_| malformed())?;
        Err(CidrError::HostBits { text: own(), meant })
    }
}

/// Whether these are the digits of a number. Some programs read a leading zero as octal.
fn is_number(digits: &str) -> bool {
    let is_octal = digits.len() > 1 && digits.starts_with('0');
    !digits.is_empty() && !is_octal && digits.bytes().all(|b| b.is_ascii_digit())
}

/// The IPv4 prefix of an IPv4-mapped prefix (`::ffff:0:0/96` and longer).
fn mapped(network: IpNetwork) -> Option<IpNetwork> {
    let IpNetwork::V6(v6) = network else {
        return None;
    };
    let v4 = v6.ip().to_ipv4_mapped()?;
    let v4 = Ipv4Network::new(v4, v6.prefix().checked_sub(96)?).ok()?;
    let network = Ipv4Network::new(v4.network(), v4.prefix()).ok()?;
    Some(IpNetwork::V4(network))
}

impl fmt::Display for Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

as_text!(Cidr);

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn error(text: &str) -> String {
        text.parse::<Cidr>().unwrap_err().to_string()
    }

    #[test]
    fn cidr_is_parsed_and_printed() {
        for text in [
            "10.1.2.0/24",
            "0.0.0.0/0",
            "::/0",
            "fd00:1::/64",
            "192.0.2.1/32",
        ] {
            assert_eq!(text.parse::<Cidr>().unwrap().to_string(), text);
        }
        assert_eq!(
            "192.0.2.1".parse::<Cidr>().unwrap().to_string(),
            "192.0.2.1/32"
        );
        assert_eq!("::1".parse::<Cidr>().unwrap().to_string(), "::1/128");
    }

    #[test]
    fn invalid_cidr_names_fix() {
        assert_eq!(
            error("10.1.2.3/24"),
            "10.1.2.3/24 has host bits set; did you mean 10.1.2.0/24?"
        );
        assert_eq!(
            error("fd00::1/64"),
            "fd00::1/64 has host bits set; did you mean fd00::/64?"
        );
        for (text, family) in [
            ("10.0.0.0/33", "IPv4 must be 0 to 32"),
            ("10.0.0.0/300", "IPv4 must be 0 to 32"),
            ("fd00::/129", "IPv6 must be 0 to 128"),
        ] {
            assert_eq!(
                error(text),
                format!("{text}: the prefix length of {family}")
            );
        }
        let mapped = "is IPv4-mapped; such peers are treated as IPv4, so write";
        assert_eq!(
            error("::ffff:10.1.2.0/120"),
            format!("::ffff:10.1.2.0/120 {mapped} 10.1.2.0/24")
        );
        for bad in [
            "",
            "10..0.0/8",
            "0.0.0.0.0/0",
            "1:2:3:4:5:6:7/128",
            "1::2::3/128",
            "12345::/20",
            "10.0.0.0/",
            "10.0.0/8",
            "host/8",
            "10.0.0.0/255.0.0.0",
            "10.0.0.0/+8",
            "10.0.0.0/08",
            "10.1.02.0/24",
            "fd00::/064",
        ] {
            assert!(error(bad).contains("invalid CIDR"), "{bad}");
        }
    }

    #[test]
    fn mapped_addresses_are_ipv4() {
        let cidr: Cidr = "10.0.0.0/8".parse().unwrap();
        assert!(cidr.contains("::ffff:10.1.2.3".parse().unwrap()));
        let all6: Cidr = "::/0".parse().unwrap();
        assert!(!all6.contains("::ffff:10.1.2.3".parse().unwrap()));
    }

    proptest! {
        #[test]
        fn arbitrary_cidr_never_panics(text in ".{0,40}") {
            let _ = text.parse::<Cidr>();
        }

        #[test]
        fn cidrs_sort_by_network(a: (IpAddr, u8), b: (IpAddr, u8)) {
            let around = |(address, length): (IpAddr, u8)| Cidr::containing(address, length % 33);
            if let (Some(a), Some(b)) = (around(a), around(b)) {
                prop_assert_eq!(a.cmp(&b), a.0.cmp(&b.0));
            }
        }

        #[test]
        fn printed_cidr_is_parsed_again(address: IpAddr, prefix in 0u8..=128) {
            if let Some(cidr) = Cidr::containing(address, prefix) {
                prop_assert_eq!(cidr.to_string().parse(), Ok(cidr));
            }
        }
    }
}
