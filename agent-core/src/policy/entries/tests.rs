//! Entries, compared with a plain map.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

fn entry(policy: u8) -> Entry {
    Entry {
        policy: format!("p{policy}").parse().unwrap(),
        location: None,
    }
}

fn build(rows: &BTreeMap<Cidr, u8>) -> Entries {
    let mut builder = Builder::default();
    // Not in order.
    for (cidr, policy) in rows.iter().rev() {
        let policy = builder.policy(&entry(*policy).policy);
        builder.push(*cidr, policy, None);
    }
    let (entries, duplicates) = builder.build();
    assert_eq!(duplicates, Duplicates::default());
    entries
}

fn shown(entries: &Entries) -> BTreeMap<Cidr, PolicyName> {
    let all: Vec<_> = entries.iter().map(|(c, e)| (c, e.policy.clone())).collect();
    assert!(all.is_sorted_by(|a, b| a.0 < b.0));
    all.into_iter().collect()
}

prop_compose! {
    fn cidr()(wide: bool, bits in 0u8..16, length in 4u8..9) -> Cidr {
        let address: IpAddr = if wide {
            std::net::Ipv6Addr::from(u128::from(bits) << 120).into()
        } else {
            std::net::Ipv4Addr::from(u32::from(bits) << 24).into()
        };
        Cidr::containing(address, length).unwrap()
    }
}

proptest! {
    #[test]
    fn entries_behave_like_map(
        rows in prop::collection::btree_map(cidr(), 0u8..3, 0..20),
        others in prop::collection::btree_map(cidr(), 0u8..3, 0..20),
        changes in prop::collection::vec((cidr(), prop::option::of(0u8..3)), 0..12),
        address: IpAddr,
    ) {
        let name = |policy: u8| entry(policy).policy;
        let mut oracle: BTreeMap<Cidr, PolicyName> =
            rows.iter().map(|(c, p)| (*c, name(*p))).collect();
        let before = build(&rows);
        let mut entries = before.clone();
        for (cidr, policy) in &changes {
            match policy {
                Some(policy) => {
                    entries.insert(*cidr, entry(*policy));
                    oracle.insert(*cidr, name(*policy));
                }
                None => {
                    prop_assert_eq!(entries.remove(cidr), oracle.remove(cidr).is_some());
                }
            }
        }
        prop_assert_eq!(&shown(&entries), &oracle);
        prop_assert_eq!(entries.is_empty(), oracle.is_empty());
        prop_assert_eq!(format!("{entries:?}"), format!("{oracle:?}"));
        // Starting at an entry, and at a prefix that is not an entry.
        for first in oracle.keys().chain(changes.iter().map(|(cidr, _)| cidr)) {
            let from: Vec<Cidr> = entries.iter_from(Some(first)).map(|(cidr, _)| cidr).collect();
            prop_assert!(from.iter().eq(oracle.range(*first..).map(|(cidr, _)| cidr)));
        }
        let ipv4 = oracle.keys().filter(|c| c.is_ipv4()).count();
        let families = FamilyCounts { ipv4, ipv6: oracle.len() - ipv4 };
        prop_assert_eq!(entries.families(), families);
        for (cidr, _) in &changes {
            prop_assert_eq!(entries.get(cidr).map(|e| e.policy), oracle.get(cidr));
            let around = oracle.keys().filter(|c| c.contains_cidr(cidr));
            let longest = around.max_by_key(|c| c.prefix()).copied();
            prop_assert_eq!(entries.covering_cidr(cidr), longest);
        }
        // Overlays of the same table, and of another one.
        for other in [before, build(&others)] {
            let mut map = shown(&other);
            other.differences(&entries, |cidr, before, after| {
                assert_ne!(before, after);
                assert_eq!(map.get(&cidr), before);
                match after {
                    Some(after) => map.insert(cidr, after.clone()),
                    None => map.remove(&cidr),
                };
            });
            prop_assert_eq!(&map, &oracle);
            prop_assert_eq!(other == entries, shown(&other) == oracle);
        }
        for address in oracle.keys().map(|c| c.network().ip()).chain([address]) {
            let mut naive: Vec<Cidr> =
                oracle.keys().filter(|c| c.contains(address)).copied().collect();
            naive.sort_by_key(|c| std::cmp::Reverse(c.prefix()));
            prop_assert_eq!(entries.covering(address), naive);
        }
    }
}

#[test]
fn duplicates_conflict_or_repeat_by_policy() {
    let mut builder = Builder::default();
    let path: Arc<Path> = Path::new("/etc/list").into();
    let file = builder.file(&path);
    let policies = [0, 1].map(|n| builder.policy(&entry(n).policy));
    for (line, (text, policy)) in [
        ("10.0.0.0/8", 0),
        ("fd00::/8", 1),
        ("10.0.0.0/8", 0),
        ("fd00::/8", 0),
        ("10.0.0.0/8", 0),
    ]
    .into_iter()
    .enumerate()
    {
        let place = Some((file, u32::try_from(line).unwrap()));
        builder.push(text.parse().unwrap(), policies[policy], place);
    }
    let (entries, duplicates) = builder.build();
    assert_eq!(entries.len(), 2);
    assert!(!entries.is_empty() && Entries::default().is_empty());
    let described = |all: &[Duplicate]| {
        let of = |one: &Duplicate| {
            let lines = one.places.each_ref().map(|at| at.as_ref().unwrap().line);
            (
                one.policy.to_string(),
                one.count,
                one.cidr.to_string(),
                lines,
            )
        };
        all.iter().map(of).collect::<Vec<_>>()
    };
    let conflicting = ("p1".to_owned(), 1, "fd00::/8".to_owned(), [1, 3]);
    let repeated = ("p0".to_owned(), 2, "10.0.0.0/8".to_owned(), [0, 2]);
    assert_eq!(described(&duplicates.conflicting), [conflicting]);
    assert_eq!(described(&duplicates.repeated), [repeated]);
}

#[test]
fn entry_without_location_has_none() {
    let mut builder = Builder::default();
    let policy = builder.policy(&entry(0).policy);
    let path: Arc<Path> = Path::new("/etc/list").into();
    let numbers: Vec<u16> = (0..=NO_FILE).map(|_| builder.file(&path)).collect();
    let (last, kept) = numbers.split_last().unwrap();
    assert!(kept.iter().copied().eq(0..NO_FILE) && *last == NO_FILE);
    let cidrs = ["10.0.0.0/8", "11.0.0.0/8", "12.0.0.0/8"].map(|text| text.parse().unwrap());
    for (cidr, place) in cidrs.iter().zip([None, Some((*last, 1)), Some((0, 2))]) {
        builder.push(*cidr, policy, place);
    }
    let (entries, _) = builder.build();
    let lines = cidrs.map(|cidr| {
        let location = entries.get(&cidr).unwrap().location();
        location.map(|location| location.line)
    });
    assert_eq!(lines, [None, None, Some(2)]);
}

#[test]
fn unsorted_entries_are_sorted() {
    let mut builder = Builder::default();
    let policy = builder.policy(&entry(0).policy);
    // 7919 is coprime to 2^17: each address once, in no order.
    for i in 0..1u32 << 17 {
        let address = (i.wrapping_mul(7919) & 0x1_ffff) << 8;
        let address = std::net::Ipv4Addr::from_bits(address).into();
        builder.push(Cidr::containing(address, 24).unwrap(), policy, None);
    }
    let (entries, duplicates) = builder.build();
    assert_eq!(duplicates, Duplicates::default());
    assert!(entries.keys().is_sorted_by(|a, b| a < b));
    assert_eq!(entries.len(), 1 << 17);
}

#[test]
fn entry_row_is_28_bytes() {
    assert_eq!(size_of::<Row>(), 28);
}
