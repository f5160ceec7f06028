//! The longest prefix wins: lookups in the kernel's maps are compared with a scan of all entries.

use std::{
    fmt::Write as _,
    hash::{BuildHasher as _, Hasher as _, RandomState},
    net::IpAddr,
};

use rand::{Rng as _, RngExt as _, SeedableRng as _, rngs::ChaCha8Rng};
use rto_agent_common::{
    EntryValue,
    address::{Peer, peer_v6},
};
use rto_tests::pinned::{self, map, read, trie_key};

use crate::prelude::*;

/// Entries of each family.
const ENTRIES: usize = 1000;
const POLICIES: usize = 32;
/// Lookups in each of two rounds.
const LOOKUPS: usize = 50_000;

/// A prefix: the leading bits of an address, and their number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Prefix {
    is_v4: bool,
    bits: u128,
    length: u32,
}

impl Prefix {
    fn new(is_v4: bool, bits: u128, length: u32) -> Self {
        let mask = u128::MAX.checked_shl(128 - length).unwrap_or(0);
        Self {
            is_v4,
            bits: bits & mask,
            length,
        }
    }

    fn longest(is_v4: bool) -> u32 {
        if is_v4 { 32 } else { 128 }
    }

    fn address(&self) -> IpAddr {
        if self.is_v4 {
            let [a, b, c, d, ..] = self.bits.to_be_bytes();
            [a, b, c, d].into()
        } else {
            self.bits.to_be_bytes().into()
        }
    }

    fn contains(&self, host: &Self) -> bool {
        self.is_v4 == host.is_v4 && Self::new(self.is_v4, host.bits, self.length) == *self
    }

    /// An IPv4-mapped prefix is refused as an entry.
    fn can_be_an_entry(&self) -> bool {
        self.is_v4 || self.bits >> 32 != 0xffff || self.length < 96
    }
}

type Entries = BTreeMap<Prefix, usize>;

/// Prefixes of all lengths, half of them within others.
fn entries(rng: &mut ChaCha8Rng) -> Entries {
    let mut entries = Entries::new();
    for is_v4 in [true, false] {
        let longest = Prefix::longest(is_v4);
        let mut made: Vec<Prefix> = Vec::new();
        while made.len() < ENTRIES {
            let mut bits: u128 = rng.random();
            let mut length = rng.random_range(4..=longest);
            if let Some(outer) = made.get(rng.random_range(0..=2 * made.len())) {
                length = rng.random_range(outer.length..=longest);
                bits = outer.bits | bits.checked_shr(outer.length).unwrap_or(0);
            } else if !is_v4 && rng.random_range(0..20) == 0 {
                // An IPv6 prefix that contains IPv4-mapped addresses, which must not be looked up as IPv6.
                bits = 0xffff << 32 | u128::from(rng.next_u32());
                length = rng.random_range(64..96);
            }
            let prefix = Prefix::new(is_v4, bits, length);
            if prefix.can_be_an_entry() && !entries.contains_key(&prefix) {
                entries.insert(prefix, rng.random_range(0..POLICIES));
                made.push(prefix);
            }
        }
    }
    entries
}

/// The entries as a configuration file.
fn text(entries: &Entries) -> anyhow::Result<String> {
    let mut text = String::new();
    for policy in 0..POLICIES {
        writeln!(text, "[policy.p{policy}]\nrto_min = \"40ms\"\ncidrs = [")?;
        for (prefix, _) in entries.iter().filter(|(_, p)| **p == policy) {
            writeln!(text, "  \"{}/{}\",", prefix.address(), prefix.length)?;
        }
        writeln!(text, "]")?;
    }
    Ok(text)
}

/// The maps of the active program.
struct Kernel {
    v4: Map,
    v6: Map,
    /// Names by slot.
    policies: BTreeMap<u32, String>,
}

impl Kernel {
    fn open(env: &TestEnv) -> anyhow::Result<Self> {
        let policies = pinned::policies(env)?.into_iter();
        let names = policies.map(|(slot, policy)| {
            let name = policy.name().context("no name")?;
            Ok((slot, name.to_owned()))
        });
        Ok(Self {
            v4: map(env, maps::ENTRIES_V4)?,
            v6: map(env, maps::ENTRIES_V6)?,
            policies: names.collect::<anyhow::Result<_>>()?,
        })
    }

    /// The policy that the program finds for a peer, in the trie that it chooses itself.
    fn look_up(&self, peer: Peer) -> anyhow::Result<Option<String>> {
        let found = match peer {
            Peer::V4(octets) => self.v4.get(&trie_key(octets.into(), 32))?,
            Peer::V6(octets) => self.v6.get(&trie_key(octets.into(), 128))?,
        };
        let Some(value) = found else { return Ok(None) };
        let slot = read::<EntryValue>(&value)?.slot();
        let policy = self.policies.get(&slot).context("a free slot")?;
        Ok(Some(policy.clone()))
    }
}

/// A peer as the program sees it.
fn peer(host: &Prefix, mapped: bool) -> Peer {
    match host.address() {
        IpAddr::V4(address) if !mapped => Peer::V4(address.octets()),
        address => {
            let octets = match address {
                IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
                IpAddr::V6(address) => address.octets(),
            };
            let mut words = [0; 4];
            for (word, bytes) in words.iter_mut().zip(octets.as_chunks::<4>().0) {
                *word = u32::from_ne_bytes(*bytes);
            }
            peer_v6(words)
        }
    }
}

/// A random address; half of them are within an entry or just beside it.
fn host(rng: &mut ChaCha8Rng, is_v4: bool, known: &[Prefix]) -> Prefix {
    let longest = Prefix::longest(is_v4);
    let random: u128 = rng.random();
    let near = known[rng.random_range(0..known.len())];
    if near.is_v4 != is_v4 || rng.random() {
        return Prefix::new(is_v4, random, longest);
    }
    let mut bits = near.bits | random.checked_shr(near.length).unwrap_or(0);
    if rng.random() {
        bits ^= 1 << (127 - rng.random_range(0..longest));
    }
    Prefix::new(is_v4, bits, longest)
}

#[derive(Debug, Default)]
struct Counts {
    hits: usize,
    /// Hosts that more than one entry contains.
    nested: usize,
    misses: usize,
    mapped: usize,
    /// Hosts that cannot be entries.
    skipped: usize,
}

impl Counts {
    /// Asserts that every host was looked up, and that each case occurred often enough.
    fn check(&self) -> anyhow::Result<()> {
        let sum = self.hits + self.misses + self.skipped;
        ensure!(sum == LOOKUPS, "{sum} lookups: {self:?}");
        let often = [self.nested, self.misses, self.mapped];
        ensure!(often.iter().all(|n| *n > 1000), "{self:?}");
        // One in twenty IPv6 entries contains or borders IPv4-mapped addresses, and few hosts fall there.
        ensure!(self.skipped < LOOKUPS / 100, "{self:?}");
        Ok(())
    }
}

fn compare(env: &TestEnv, entries: &Entries, rng: &mut ChaCha8Rng) -> anyhow::Result<Counts> {
    let kernel = Kernel::open(env)?;
    let known: Vec<Prefix> = entries.keys().copied().collect();
    let mut counts = Counts::default();
    for n in 0..LOOKUPS {
        let (is_v4, mapped) = (n % 3 != 0, n % 3 == 2);
        let host = host(rng, is_v4, &known);
        if !host.can_be_an_entry() {
            counts.skipped += 1;
            continue;
        }
        let mut containing: Vec<&Prefix> = known.iter().filter(|p| p.contains(&host)).collect();
        containing.sort_by_key(|p| p.length);
        let wanted = containing.last().map(|p| format!("p{}", entries[*p]));
        let found = kernel.look_up(peer(&host, mapped))?;
        ensure!(
            found == wanted,
            "{} (mapped: {mapped}): {found:?} instead of {wanted:?}, of {containing:?}",
            host.address()
        );
        counts.hits += usize::from(wanted.is_some());
        counts.misses += usize::from(wanted.is_none());
        counts.nested += usize::from(containing.len() > 1);
        counts.mapped += usize::from(wanted.is_some() && mapped);
    }
    Ok(counts)
}

test!(lookup_matches_scan_of_all_entries);
fn lookup_matches_scan_of_all_entries() -> anyhow::Result<()> {
    // A new seed each time; a failure prints it.
    let seed = RandomState::new().build_hasher().finish();
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut entries = entries(&mut rng);
    let env = TestEnv::with(&text(&entries)?)?;
    // Removing some entries must not affect the others.
    for round in 0..2 {
        if round > 0 {
            entries.retain(|_, _| rng.random());
            env.load(&text(&entries)?)?;
        }
        compare(&env, &entries, &mut rng)
            .and_then(|counts| counts.check())
            .with_context(|| format!("round {round}, seed {seed}"))?;
    }
    Ok(())
}
