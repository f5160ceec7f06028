//! Differences between the kernel's maps and the desired state: entries that other processes added, removed or overwrote.

use std::{
    collections::BTreeMap,
    fmt,
    net::{IpAddr, Ipv6Addr},
};

use serde::{Deserialize, Serialize};

use super::{Cidr, Entries, EntryRef, PolicyName, entries::compare};

/// How many differences are kept individually.
const KEPT: usize = 100;
/// How many differences a sentence names.
const SHOWN: usize = 4;

/// The enum of differences: each kind with its name in JSON and in metrics.
macro_rules! differences {
    ($(#[doc = $doc:literal] $variant:ident = $kind:literal $({ $($fields:tt)+ })?,)+) => {
        /// One difference.
        #[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
        #[cfg_attr(test, derive(schemars::JsonSchema))]
        #[serde(tag = "kind")]
        pub enum Difference {
            $(
                #[doc = $doc]
                #[serde(rename = $kind)]
                $variant $({ $($fields)+ })?,
            )+
        }

        impl Difference {
            /// Every [`Difference::kind`].
            pub const KINDS: &[&str] = &[$($kind),+];

            /// The kind of difference, as in JSON.
            pub const fn kind(&self) -> &'static str {
                match self {
                    $(Self::$variant { .. } => $kind,)+
                }
            }
        }
    };
}

differences! {
    /// An entry is missing.
    EntryMissing = "entry-missing" {
        /// Its CIDR.
        cidr: Cidr,
        /// Its policy.
        policy: PolicyName,
    },
    /// An entry that is not desired.
    EntryExtra = "entry-extra" {
        /// Its CIDR.
        cidr: Cidr,
        /// The policy it refers to; absent: none.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        found: Option<PolicyName>,
    },
    /// An entry refers to another policy.
    EntryPolicy = "entry-policy" {
        /// Its CIDR.
        cidr: Cidr,
        /// Its policy.
        policy: PolicyName,
        /// The policy it refers to; absent: none.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        found: Option<PolicyName>,
    },
    /// A policy has wrong values.
    Policy = "policy" {
        /// Its name.
        policy: PolicyName,
    },
    /// A policy has no statistics.
    Statistics = "statistics" {
        /// Its name.
        policy: PolicyName,
    },
    /// The settings of control arms are not the kernel's own timers.
    ControlArm = "control-arm",
    /// The host's defaults, which the program uses, have wrong values.
    HostDefaults = "host-defaults",
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let at = |found: Option<&PolicyName>| match found {
            Some(name) => format!("policy {name}"),
            None => "no policy".to_owned(),
        };
        match self {
            Self::EntryMissing { cidr, policy } => write!(f, "entry {cidr} {policy} is missing"),
            Self::EntryExtra { cidr, found } => {
                write!(f, "entry {cidr} (of {}) is not desired", at(found.as_ref()))
            }
            Self::EntryPolicy {
                cidr,
                policy,
                found,
            } => write!(
                f,
                "entry {cidr} refers to {} instead of {policy}",
                at(found.as_ref())
            ),
            Self::Policy { policy } => write!(f, "policy {policy} has wrong values"),
            Self::Statistics { policy } => write!(f, "policy {policy} has no statistics"),
            Self::ControlArm => f.write_str("the settings of control arms have wrong values"),
            Self::HostDefaults => f.write_str("the host's defaults have wrong values"),
        }
    }
}

/// The number of differences, and the first of them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Differences {
    /// How many, by kind.
    pub counts: BTreeMap<String, u64>,
    /// The first hundred.
    pub first: Vec<Difference>,
}

impl Differences {
    /// Adds a difference.
    pub fn push(&mut self, difference: Difference) {
        *self.counts.entry(difference.kind().to_owned()).or_default() += 1;
        if self.first.len() < KEPT {
            self.first.push(difference);
        }
    }

    /// Adds all differences of another set.
    pub fn append(&mut self, more: Self) {
        for (kind, count) in more.counts {
            *self.counts.entry(kind).or_default() += count;
        }
        let room = KEPT.saturating_sub(self.first.len());
        self.first.extend(more.first.into_iter().take(room));
    }

    /// Whether there is no difference.
    pub fn is_empty(&self) -> bool {
        self.counts.is_empty()
    }

    /// How many.
    pub fn total(&self) -> u64 {
        self.counts.values().sum()
    }
}

/// The first differences in words, and the number of further ones.
impl fmt::Display for Differences {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown: Vec<String> = self
            .first
            .iter()
            .take(SHOWN)
            .map(ToString::to_string)
            .collect();
        f.write_str(&shown.join("; "))?;
        match self.total().saturating_sub(shown.len() as u64) {
            0 => Ok(()),
            more => write!(f, "; and {more} more"),
        }
    }
}

/// The position of a comparison of the kernel with the desired state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cursor {
    /// The next policy whose statistics are checked, by index.
    pub policy: usize,
    /// IPv4 has been compared.
    pub is_ipv6: bool,
    /// The entry before the next one of this family; `None`: the next is the first.
    pub after: Option<Cidr>,
}

/// Another process changed the trie during the read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("it changed during the read")]
pub struct Disorder;

impl Cursor {
    /// Whether all entries have been compared, or none.
    pub fn is_at_start(&self) -> bool {
        !self.is_ipv6 && self.after.is_none()
    }

    /// Begins with the first entry again if the entry before the cursor is not desired: where it was
    /// removed, the kernel would continue at an arbitrary key.
    #[must_use]
    pub fn resumed(self, desired: &Entries) -> Self {
        match self.after {
            Some(cidr) if !desired.contains_key(&cidr) => Self {
                policy: self.policy,
                ..Self::default()
            },
            _ => self,
        }
    }

    /// Compares the next entries, in the order in which the kernel returns them and each with the
    /// policy that it points at, with the desired ones, and moves the cursor past them.
    ///
    /// # Errors
    ///
    /// If they are not in trie order, as no comparison is possible then.
    pub fn compare(
        &mut self,
        found: &[(Cidr, Option<&PolicyName>)],
        is_last: bool,
        desired: &Entries,
    ) -> Result<Differences, Disorder> {
        let first = self.after.iter().chain(found.iter().map(|(c, _)| c));
        if !first.is_sorted_by(|a, b| trie_order(a) < trie_order(b)) {
            return Err(Disorder);
        }
        let last = found.last().map(|(cidr, _)| *cidr).or(self.after);
        let wanted = self.wanted(desired, (!is_last).then_some(last));
        let wanted = wanted
            .into_iter()
            .map(|(cidr, entry)| (cidr, Some(entry.policy)));
        let mut differences = Differences::default();
        for pair in compare(wanted, found.iter().copied(), trie_order) {
            match pair {
                (Some((cidr, Some(policy))), found) => {
                    let policy = policy.clone();
                    differences.push(match found {
                        None => Difference::EntryMissing { cidr, policy },
                        Some((_, found)) => Difference::EntryPolicy {
                            cidr,
                            policy,
                            found: found.cloned(),
                        },
                    });
                }
                (_, Some((cidr, found))) => differences.push(Difference::EntryExtra {
                    cidr,
                    found: found.cloned(),
                }),
                _ => {}
            }
        }
        (self.is_ipv6, self.after) = match is_last {
            true => (!self.is_ipv6, None),
            false => (self.is_ipv6, last),
        };
        Ok(differences)
    }

    /// The entries that should be between the cursor and `last`, in trie order. `None`: all that
    /// follow; `Some(None)`: none.
    fn wanted<'d>(
        &self,
        desired: &'d Entries,
        last: Option<Option<Cidr>>,
    ) -> Vec<(Cidr, EntryRef<'d>)> {
        let is_ipv4 = !self.is_ipv6;
        let last = last.map(|last| last.map(|last| trie_order(&last)).unwrap_or_default());
        let after = self.after.map(|after| trie_order(&after));
        let is_in = |cidr: &Cidr| {
            let order = trie_order(cidr);
            cidr.is_ipv4() == is_ipv4
                && after.is_none_or(|after| order > after)
                && last.is_none_or(|last| order <= last)
        };
        // Entries that begin after the end of `after`...
        let begin = match self.after {
            Some(after) => Some(host(last_address(&after)).unwrap_or(after)),
            None if is_ipv4 => None,
            None => Cidr::containing(Ipv6Addr::UNSPECIFIED.into(), 0),
        };
        let behind = desired.iter_from(begin.as_ref()).take_while(|(cidr, _)| {
            let begins = address_bits(cidr.network().ip());
            cidr.is_ipv4() == is_ipv4 && last.is_none_or(|last| begins <= last.end)
        });
        let mut wanted: Vec<_> = behind.filter(|(cidr, _)| is_in(cidr)).collect();
        // ... and entries that contain that end: a trie lists longer prefixes first.
        if let Some(after) = self.after {
            let around = desired.covering(last_address(&after)).into_iter();
            let around = around.filter(|cidr| is_in(cidr) && begin.is_none_or(|b| *cidr < b));
            wanted.extend(around.filter_map(|cidr| Some((cidr, desired.get(&cidr)?))));
        }
        if !wanted.is_sorted_by(|(a, _), (b, _)| trie_order(a) < trie_order(b)) {
            wanted.sort_unstable_by_key(|(cidr, _)| trie_order(cidr));
        }
        wanted
    }
}

/// The position of an entry in its trie.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Order {
    /// The entry's last address.
    end: u128,
    /// The number of host bits.
    host_bits: u8,
}

/// Keys are returned in postorder: by last address; of equal last addresses, the longest prefix
/// first (see the comment in `trie_get_next_key()`, Linux 4.16 and later). Any other order is
/// detected, see [`Disorder`].
fn trie_order(cidr: &Cidr) -> Order {
    let length = if cidr.is_ipv4() { 32 } else { 128 };
    Order {
        end: address_bits(last_address(cidr)),
        host_bits: length - cidr.prefix(),
    }
}

fn last_address(cidr: &Cidr) -> IpAddr {
    let prefix = u32::from(cidr.prefix());
    match cidr.network().ip() {
        IpAddr::V4(a) => {
            let host = u32::MAX.checked_shr(prefix).unwrap_or(0);
            IpAddr::V4((a.to_bits() | host).into())
        }
        IpAddr::V6(a) => {
            let host = u128::MAX.checked_shr(prefix).unwrap_or(0);
            IpAddr::V6((a.to_bits() | host).into())
        }
    }
}

fn address_bits(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(a) => a.to_bits().into(),
        IpAddr::V6(a) => a.to_bits(),
    }
}

fn host(address: IpAddr) -> Option<Cidr> {
    Cidr::containing(address, if address.is_ipv4() { 32 } else { 128 })
}

/// Entries in the order in which the kernel's trie returns them.
#[cfg(any(test, feature = "testing"))]
pub fn in_trie_order(entries: &Entries, is_ipv4: bool) -> Vec<(Cidr, PolicyName)> {
    let of_family = entries.iter().filter(|(cidr, _)| cidr.is_ipv4() == is_ipv4);
    let mut all: Vec<_> = of_family
        .map(|(cidr, e)| (cidr, e.policy.clone()))
        .collect();
    all.sort_unstable_by_key(|(cidr, _)| trie_order(cidr));
    all
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::policy::Entry;

    fn cidr(text: &str) -> Cidr {
        text.parse().unwrap()
    }

    fn entries(all: &[(Cidr, PolicyName)]) -> Entries {
        let of = |policy: &PolicyName| Entry {
            policy: policy.clone(),
            location: None,
        };
        all.iter()
            .map(|(cidr, policy)| (*cidr, of(policy)))
            .collect()
    }

    /// Compares all entries, in runs of this length.
    fn in_runs(actual: &Entries, desired: &Entries, length: usize) -> Differences {
        let (mut differences, mut cursor) = (Differences::default(), Cursor::default());
        for is_ipv4 in [true, false] {
            assert_eq!(cursor.is_ipv6, !is_ipv4);
            let all = in_trie_order(actual, is_ipv4);
            let all: Vec<_> = all.iter().map(|(cidr, name)| (*cidr, Some(name))).collect();
            // As in the kernel: after a full last run there is no empty one.
            let runs = all.chunks(length).chain(all.is_empty().then_some(&all[..]));
            let count = all.len().div_ceil(length).max(1);
            for (number, found) in runs.enumerate() {
                let is_last = number + 1 == count;
                differences.append(cursor.compare(found, is_last, desired).unwrap());
            }
        }
        assert!(cursor.is_at_start());
        differences
    }

    #[test]
    fn dump_order_is_that_of_kernel_example() {
        // The example in the comment of trie_get_next_key().
        let names = [
            "192.168.0.0/24",
            "192.168.1.0/24",
            "192.168.128.0/24",
            "192.168.0.0/16",
        ];
        let all: Vec<_> = names
            .map(|name| (cidr(name), "p".parse().unwrap()))
            .to_vec();
        assert_eq!(in_trie_order(&entries(&all), true), all);
        // Of prefixes with the same last address, the longest comes first.
        let ends = |prefixes: [&str; 3], is_ipv4| {
            let all: Vec<_> = prefixes.map(|p| (cidr(p), "p".parse().unwrap())).to_vec();
            assert_eq!(in_trie_order(&entries(&all), is_ipv4), all);
        };
        ends(
            ["192.168.255.255/32", "192.168.255.0/24", "192.168.0.0/16"],
            true,
        );
        ends(["fdff:ffff::/32", "fdff::/16", "fc00::/7"], false);
    }

    #[test]
    fn unordered_run_is_error() {
        let name: PolicyName = "p".parse().unwrap();
        let found = [
            (cidr("10.2.0.0/16"), Some(&name)),
            (cidr("10.1.0.0/16"), Some(&name)),
        ];
        // The same entry twice; and a read that restarts at the first entry, as the entry before it
        // was removed.
        let after = Some(cidr("10.3.0.0/16"));
        for (after, found) in [
            (None, &found[..]),
            (None, &[found[0]; 2]),
            (after, &found[..1]),
        ] {
            let mut cursor = Cursor {
                after,
                ..Cursor::default()
            };
            let compared = cursor.compare(found, true, &Entries::default());
            assert_eq!(compared, Err(Disorder));
        }
    }

    #[test]
    fn differences_keep_count_and_first_hundred() {
        let policy: PolicyName = "p".parse().unwrap();
        let mut pushed = Differences::default();
        assert!(pushed.is_empty());
        for number in 1..=2 * KEPT {
            pushed.push(Difference::ControlArm);
            assert!(!pushed.is_empty());
            assert_eq!(pushed.first.len(), number.min(KEPT));
        }
        assert_eq!(pushed.total(), 2 * KEPT as u64);
        let all = (0..=255).map(|n| (cidr(&format!("10.0.{n}.0/24")), policy.clone()));
        let differences = in_runs(&Entries::default(), &entries(&all.collect::<Vec<_>>()), 8);
        assert_eq!((differences.total(), differences.first.len()), (256, KEPT));
        let text = differences.to_string();
        assert!(
            text.starts_with("entry 10.0.0.0/24 p is missing; "),
            "{text}"
        );
        assert!(text.ends_with("; and 252 more"), "{text}");
    }

    prop_compose! {
        fn table()(
            rows in prop::collection::btree_map((any::<bool>(), 0u8..32, 3u8..9), 0u8..3, 0..40),
        ) -> Entries {
            let cidr = |wide: bool, bits: u8, length: u8| {
                let address: IpAddr = if wide {
                    Ipv6Addr::from(u128::from(bits) << 120).into()
                } else {
                    std::net::Ipv4Addr::from(u32::from(bits) << 24).into()
                };
                Cidr::containing(address, length).unwrap()
            };
            let all = rows.into_iter().map(|((wide, bits, length), policy)| {
                (cidr(wide, bits, length), format!("p{policy}").parse().unwrap())
            });
            entries(&all.collect::<Vec<_>>())
        }
    }

    proptest! {
        /// With runs of any length, every difference is found once, and nothing else.
        #[test]
        fn every_difference_is_found(actual in table(), desired in table(), length in 1usize..12) {
            let found = in_runs(&actual, &desired, length);
            let mut expected = 0;
            for (cidr, entry) in desired.iter() {
                let is = actual.get(&cidr).map(|e| e.policy);
                expected += u64::from(is != Some(entry.policy));
            }
            expected += actual.keys().filter(|c| !desired.contains_key(c)).count() as u64;
            prop_assert_eq!(found.total(), expected, "{:?}", found);
            prop_assert!(in_runs(&desired, &desired, length).is_empty());
        }
    }
}
