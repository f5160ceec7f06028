//! `discover`: statistics of peers that no entry covers.

use std::{
    net::{Ipv4Addr, Ipv6Addr},
    time::UNIX_EPOCH,
};

use rto_agent_common::{
    address::AF_INET,
    discovery::{Discovered, Prefix},
};
use rto_agent_core::{
    policy::Cidr,
    wire::{
        discover::{DiscoverAnswer, PrefixStats},
        types::now_ms,
    },
};

use super::{
    error::{EngineError, refused},
    snapshot::Snapshot,
};

/// Statistics of connections that no entry covers, by prefix.
///
/// # Errors
///
/// [`EngineError::Refused`] if they are not counted; another error if the map cannot be read.
pub fn discovered(snapshot: &Snapshot) -> Result<DiscoverAnswer, EngineError> {
    if !snapshot.agent().statistics {
        return refused(
            "no statistics: set statistics = true and count_unmatched = true in [agent], and \
             restart the daemon",
        );
    }
    if !snapshot.agent().count_unmatched {
        return refused(
            "connections that no entry covers are not counted: set count_unmatched = true in \
             [agent], and restart the daemon",
        );
    }
    if let Some(by) = &snapshot.health.detached_by {
        return refused(by.detached());
    }
    let resolved = snapshot.resolved()?;
    let mut answer = DiscoverAnswer {
        at_ms: now_ms(),
        one_in: Discovered::ONE_IN,
        ..DiscoverAnswer::default()
    };
    answer.since_ms = counting_since_ms(snapshot, answer.at_ms);
    let reader = snapshot.reader.as_ref();
    let found = reader.map_or_else(|| Ok(Vec::new()), |reader| reader.discovered())?;
    let entries = &resolved.set.entries;
    for (prefix, discovered) in &found {
        let Some(prefix) = cidr_of(prefix) else {
            continue;
        };
        let covering = entries.covering(prefix.network().ip());
        if covering.iter().any(|cidr| cidr.prefix() <= prefix.prefix()) {
            answer.covered += 1;
            continue;
        }
        answer.prefixes.push(PrefixStats {
            prefix,
            connections: discovered.connections,
            recovered: discovered.recovered,
            handshake: (&discovered.times).into(),
        });
    }
    answer.prefixes.sort_unstable_by_key(|stats| stats.prefix);
    Ok(answer)
}

/// When the map was created; if that is not known, when the daemon started.
fn counting_since_ms(snapshot: &Snapshot, now_ms: u64) -> u64 {
    let made = snapshot.reader.as_ref().and_then(|r| r.discovered_since());
    let made = made.and_then(|made| made.duration_since(UNIX_EPOCH).ok());
    let made = made.and_then(|made| u64::try_from(made.as_millis()).ok());
    let runs = u64::try_from(snapshot.started.elapsed().as_millis()).unwrap_or(u64::MAX);
    made.unwrap_or_else(|| now_ms.saturating_sub(runs))
        .min(now_ms)
}

/// `None` if the prefix is not one of a peer.
fn cidr_of(prefix: &Prefix) -> Option<Cidr> {
    if prefix.family == AF_INET {
        let address = Ipv4Addr::from(prefix.address[0].to_ne_bytes());
        return Cidr::containing(address.into(), Prefix::V4_LEN);
    }
    let words = prefix.address.map(u32::from_be);
    let bits = words
        .into_iter()
        .fold(0, |bits, word| bits << 32 | u128::from(word));
    Cidr::containing(Ipv6Addr::from_bits(bits).into(), Prefix::V6_LEN)
}

#[cfg(test)]
mod tests {
    use rto_agent_common::address::{Peer, peer_v6};

    use super::*;

    #[test]
    fn discovered_prefixes_are_cidrs() {
        let v4 = Prefix::of(&Peer::V4([192, 0, 2, 7]));
        assert_eq!(cidr_of(&v4), "192.0.2.0/24".parse().ok());
        let address = [0x2001_0db8_u32, 0x0001_0002, 3, 4].map(u32::to_be);
        let v6 = Prefix::of(&peer_v6(address));
        assert_eq!(cidr_of(&v6), "2001:db8:1::/48".parse().ok());
    }
}
