//! A CIDR: network address and prefix length, without host bits.

use std::{
    cmp::Ordering,
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    str::FromStr,
};

use ipnetwork::IpNetwork;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

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
    /// A number has a leading zero, which some programs read as octal.
    #[error("{text} has a leading zero, which some programs read as octal; did you mean {meant}?")]
    LeadingZero {
        /// The text.
        text: String,
        /// The text without leading zeros.
        meant: String,
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
        // Fast path for valid CIDRs: a start parses up to a million.
        parse_fast(text.as_bytes()).map_or_else(|| Self::parse_full(text), Ok)
    }
}

impl Cidr {
    fn parse_full(text: &str) -> Result<Self, CidrError> {
        let malformed = || CidrError::Malformed {
            text: text.to_owned(),
        };
        // Not parsed by ipnetwork, which also accepts netmasks ("10.0.0.0/255.0.0.0").
        let (address, length) = match text.split_once('/') {
            Some((address, length)) => (address, Some(length)),
            None => (text, None),
        };
        if let Some(meant) = without_leading_zeros(text) {
            let text = text.to_owned();
            return Err(CidrError::LeadingZero { text, meant });
        }
        let address: IpAddr = address.parse().map_err(|_| malformed())?;
        let most = if address.is_ipv4() { 32 } else { 128 };
        let length = match length {
            None => most,
            Some(digits) if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) => {
                return Err(malformed());
            }
            Some(digits) => {
                let length = digits.parse().ok().filter(|length| *length <= most);
                let text = text.to_owned();
                length.ok_or(CidrError::Length { text, most })?
            }
        };
        let network = IpNetwork::new(address, length).map_err(|_| malformed())?;
        Self::try_from(network).map_err(|error| match error {
            CidrError::HostBits { meant, .. } => CidrError::HostBits {
                text: text.to_owned(),
                meant,
            },
            CidrError::Mapped { meant, .. } => CidrError::Mapped {
                text: text.to_owned(),
                meant,
            },
            other => other,
        })
    }
}

impl TryFrom<IpNetwork> for Cidr {
    type Error = CidrError;

    fn try_from(network: IpNetwork) -> Result<Self, CidrError> {
        let text = || network.to_string();
        if let Some(meant) = mapped(network) {
            return Err(CidrError::Mapped {
                text: text(),
                meant,
            });
        }
        let base = network.network();
        if base != network.ip() {
            let meant = IpNetwork::new(base, network.prefix());
            let meant = meant.map_err(|_| CidrError::Malformed { text: text() })?;
            return Err(CidrError::HostBits {
                text: text(),
                meant,
            });
        }
        Ok(Self(network))
    }
}

/// Parses the usual form of a CIDR; `None` for any other text, which may still be valid.
fn parse_fast(text: &[u8]) -> Option<Cidr> {
    let slash = text.iter().rposition(|b| *b == b'/')?;
    let (address, digits) = (&text[..slash], &text[slash + 1..]);
    if is_octal(digits) {
        return None;
    }
    let length = u8::try_from(number(digits, 3)?).ok()?;
    let address = match ipv4(address) {
        Some(address) => IpAddr::V4(address),
        None => IpAddr::V6(ipv6(address)?),
    };
    Cidr::containing(address, length).filter(|cidr| cidr.0.ip() == address)
}

/// Whether some programs read a number as octal, like 010.
fn is_octal(digits: &[u8]) -> bool {
    digits.len() > 1 && digits[0] == b'0'
}

/// The CIDR without leading zeros in its octets or length, if that is valid.
fn without_leading_zeros(text: &str) -> Option<String> {
    let plain = |number: &str| match number.trim_start_matches('0') {
        "" if !number.is_empty() => "0".to_owned(),
        number => number.to_owned(),
    };
    let (address, length) = match text.split_once('/') {
        Some((address, length)) => (address, Some(length)),
        None => (text, None),
    };
    // Groups of an IPv6 address are always hexadecimal.
    let mut meant = match address.contains(':') {
        true => address.to_owned(),
        false => address.split('.').map(plain).collect::<Vec<_>>().join("."),
    };
    if let Some(length) = length {
        meant = format!("{meant}/{}", plain(length));
    }
    (meant != text && IpNetwork::from_str(&meant).is_ok()).then_some(meant)
}

/// A decimal number of up to `most` digits.
fn number(digits: &[u8], most: usize) -> Option<u32> {
    if digits.is_empty() || digits.len() > most {
        return None;
    }
    digits.iter().try_fold(0, |number, digit| {
        let digit = digit.is_ascii_digit().then(|| digit - b'0')?;
        Some(number * 10 + u32::from(digit))
    })
}

fn ipv4(text: &[u8]) -> Option<Ipv4Addr> {
    let mut parts = text.split(|b| *b == b'.');
    let mut octets = [0; 4];
    for octet in &mut octets {
        let digits = parts.next()?;
        if is_octal(digits) {
            return None;
        }
        *octet = u8::try_from(number(digits, 3)?).ok()?;
    }
    parts.next().is_none().then(|| octets.into())
}

/// Parses an IPv6 address without an embedded IPv4 address.
fn ipv6(text: &[u8]) -> Option<Ipv6Addr> {
    let mut groups = [0u16; 8];
    let (mut count, mut gap, mut at) = (0, None, 0);
    if text.starts_with(b"::") {
        (gap, at) = (Some(0), 2);
    }
    while at < text.len() {
        let rest = &text[at..];
        let end = rest.iter().position(|b| *b == b':').unwrap_or(rest.len());
        let group = groups.get_mut(count)?;
        *group = hexadecimal(&rest[..end])?;
        count += 1;
        at += end;
        if at == text.len() {
            break;
        }
        at += 1;
        match text.get(at)? {
            b':' if gap.is_some() => return None,
            b':' => {
                gap = Some(count);
                at += 1;
            }
            _ => {}
        }
    }
    match gap {
        None if count == groups.len() => {}
        Some(gap) if count < groups.len() => {
            let more = groups.len() - count;
            groups[gap..].rotate_right(more);
        }
        _ => return None,
    }
    Some(groups.into())
}

fn hexadecimal(digits: &[u8]) -> Option<u16> {
    const MOST: usize = 4;
    if digits.is_empty() || digits.len() > MOST {
        return None;
    }
    digits.iter().try_fold(0, |number, digit| {
        let digit = match digit {
            b'0'..=b'9' => digit - b'0',
            b'a'..=b'f' => digit - b'a' + 10,
            b'A'..=b'F' => digit - b'A' + 10,
            _ => return None,
        };
        Some(number << 4 | u16::from(digit))
    })
}

/// The IPv4 prefix of an IPv4-mapped prefix (`::ffff:0:0/96` and longer).
fn mapped(network: IpNetwork) -> Option<IpNetwork> {
    const MAPPED: Ipv6Addr = Ipv6Addr::new(0, 0, 0, 0, 0, 0xffff, 0, 0);
    let IpNetwork::V6(v6) = network else {
        return None;
    };
    let v4 = v6.ip().to_ipv4_mapped()?;
    let prefix = v6.prefix().checked_sub(96)?;
    debug_assert!(v6.ip().segments()[..6] == MAPPED.segments()[..6]);
    let network = ipnetwork::Ipv4Network::new(v4, prefix).ok()?;
    ipnetwork::Ipv4Network::new(network.network(), prefix)
        .ok()
        .map(IpNetwork::V4)
}

impl fmt::Display for Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Serialize for Cidr {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Cidr {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?
            .parse()
            .map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn error(text: &str) -> String {
        text.parse::<Cidr>().unwrap_err().to_string()
    }

    #[test]
    fn reads_and_prints() {
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
    fn refusals_name_the_fix() {
        assert_eq!(
            error("10.1.2.3/24"),
            "10.1.2.3/24 has host bits set; did you mean 10.1.2.0/24?"
        );
        assert_eq!(
            error("fd00::1/64"),
            "fd00::1/64 has host bits set; did you mean fd00::/64?"
        );
        for (text, meant) in [
            ("10.0.0.0/08", "10.0.0.0/8"),
            ("10.0.0.0/00", "10.0.0.0/0"),
            ("010.0.0.0/8", "10.0.0.0/8"),
            ("10.1.02.0/024", "10.1.2.0/24"),
            ("192.0.2.01", "192.0.2.1"),
            ("fd00::/064", "fd00::/64"),
        ] {
            let said = format!(
                "{text} has a leading zero, which some programs read as octal; did you mean {meant}?"
            );
            assert_eq!(error(text), said);
        }
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
            "10.0.0.0/",
            "10.0.0/8",
            "host/8",
            "10.0.0.0/255.0.0.0",
            "10.0.0.0/+8",
        ] {
            assert!(error(bad).contains("invalid CIDR"), "{bad}");
        }
    }

    /// Texts that the fast path must reject, as they are invalid, and unusual ones that it accepts.
    #[test]
    fn nearly_right_is_not_read_the_fast_way() {
        for text in [
            "0.0.0.0/",
            "10..0.0/8",
            "0.0.0.0.0/0",
            "1:2:3:4:5:6:7/128",
            "1:2:3:4:5:6:7:8:9/128",
            "1:2:3:4::5:6:7:8/128",
            "1::2::3/128",
            "12345::/20",
            "1:2:3:4:5:6:7:8:/128",
        ] {
            assert_eq!(parse_fast(text.as_bytes()), None, "{text}");
            assert!(text.parse::<Cidr>().is_err(), "{text}");
        }
        for text in ["ABCD:EF09::/32", "abcd:ef09::/32", "1:2:3::5:6:7:8/128"] {
            let read = parse_fast(text.as_bytes());
            assert!(read.is_some(), "{text}");
            assert_eq!(read, Cidr::parse_full(text).ok());
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
        /// The fast path accepts no more than the full parser, with the same result.
        #[test]
        fn both_ways_are_one(text in "[0-9]{1,3}(\\.[0-9]{1,3}){2,4}/[0-9]{1,3}|[0-9a-fA-F:]{0,12}::?[0-9a-f:.]{0,12}/[0-9]{1,4}|[0-9a-f.:/]{0,12}") {
            let slowly = Cidr::parse_full(&text);
            if let Some(cidr) = parse_fast(text.as_bytes()) {
                prop_assert_eq!(slowly.clone(), Ok(cidr));
            }
            prop_assert_eq!(text.parse(), slowly);
        }

        /// The same for texts that are one character away from a valid CIDR.
        #[test]
        fn both_ways_are_one_nearby(
            v4: u32,
            v6: u128,
            length in 0..=128u8,
            at: prop::sample::Index,
            insert in "[0-9a-fA-F:./]?",
            remove: bool,
        ) {
            for cidr in [
                Cidr::containing(Ipv4Addr::from_bits(v4).into(), length.min(32)),
                Cidr::containing(Ipv6Addr::from_bits(v6).into(), length),
            ] {
                let Some(cidr) = cidr else { continue };
                let mut text = cidr.to_string();
                let at = at.index(text.len());
                text.replace_range(at..at + usize::from(remove), &insert);
                if let Some(cidr) = parse_fast(text.as_bytes()) {
                    prop_assert_eq!(Cidr::parse_full(&text), Ok(cidr), "{}", text);
                }
            }
        }

        /// Nearly all CIDRs take the fast path.
        #[test]
        fn usual_cidrs_are_plain(v4: u32, v6: u128, holes: u8, length in 0..=128u8) {
            let v6 = (0..8).filter(|i| holes >> i & 1 == 1).fold(v6, |v6, i| v6 & !(0xffff << (16 * i)));
            for cidr in [
                Cidr::containing(Ipv4Addr::from_bits(v4).into(), length.min(32)),
                Cidr::containing(Ipv6Addr::from_bits(v6).into(), length),
            ] {
                let Some(cidr) = cidr else { continue };
                let text = cidr.to_string();
                // Addresses that are zero except at the end are written with an embedded IPv4
                // address.
                if !(text.contains(':') && text.contains('.')) {
                    prop_assert_eq!(parse_fast(text.as_bytes()), Some(cidr));
                }
            }
        }
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused(text in ".{0,40}") {
            let _either = text.parse::<Cidr>();
        }

        #[test]
        fn the_order_is_the_networks(a: (IpAddr, u8), b: (IpAddr, u8)) {
            let around = |(address, length): (IpAddr, u8)| Cidr::containing(address, length % 33);
            if let (Some(a), Some(b)) = (around(a), around(b)) {
                prop_assert_eq!(a.cmp(&b), a.0.cmp(&b.0));
            }
        }

        #[test]
        fn printed_cidr_is_parsed_again(address: IpAddr, prefix in 0u8..=128) {
            if let Ok(network) = IpNetwork::new(address, prefix)
                && let Ok(network) = IpNetwork::new(network.network(), prefix)
                && let Ok(cidr) = Cidr::try_from(network)
            {
                prop_assert_eq!(cidr.to_string().parse::<Cidr>(), Ok(cidr));
            }
        }
    }
}
