//! Entries by CIDR, millions if needed: a sorted table, shared by all its users, with an overlay of
//! changes.
//!
//! A row takes 28 bytes. The files, the set in force and the content of the kernel's maps share
//! rows; adding or removing a runtime entry changes only the overlay.

use std::{
    cmp::Ordering,
    collections::{BTreeMap, BTreeSet, HashMap, btree_map},
    iter::Peekable,
    net::IpAddr,
    path::Path,
    slice,
    sync::Arc,
};

use serde::{Deserialize, Serialize};

use super::{Cidr, Entry, Location, PolicyName};

/// Entries in the order of their CIDRs. Cheap to clone.
#[derive(Clone, Default)]
pub struct Entries {
    table: Arc<Table>,
    /// Changes over the table: `None` removes an entry.
    over: Arc<BTreeMap<Cidr, Option<Entry>>>,
    families: FamilyCounts,
}

/// Entries by address family.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema), schemars(rename = "FamiliesView"))]
pub struct FamilyCounts {
    /// IPv4.
    pub ipv4: usize,
    /// IPv6.
    pub ipv6: usize,
}

/// A borrowed entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EntryRef<'a> {
    /// Name of its policy.
    pub policy: &'a PolicyName,
    /// Where the CIDR is listed: file, and line (from 1).
    pub location: Option<(&'a Arc<Path>, usize)>,
}

#[derive(Default)]
struct Table {
    rows: Vec<Row>,
    policies: Vec<PolicyName>,
    files: Vec<Arc<Path>>,
    lengths: Lengths,
}

#[derive(Clone, Copy)]
struct Row {
    cidr: Cidr,
    file: u16,
    line: u32,
    policy: u32,
}

/// Marks an entry without a file.
const NO_FILE: u16 = u16::MAX;

/// The prefix lengths in use.
#[derive(Clone, Copy, Default)]
struct Lengths {
    ipv4: u64,
    ipv6: [u64; 3],
}

impl Lengths {
    fn insert(&mut self, cidr: &Cidr) {
        let length = usize::from(cidr.prefix());
        if cidr.is_ipv4() {
            self.ipv4 |= 1 << length;
        } else {
            self.ipv6[length / 64] |= 1 << (length % 64);
        }
    }

    fn contains(&self, is_ipv4: bool, length: u8) -> bool {
        let length = usize::from(length);
        if is_ipv4 {
            self.ipv4 & 1 << length != 0
        } else {
            self.ipv6[length / 64] & 1 << (length % 64) != 0
        }
    }
}

impl FamilyCounts {
    /// The count of this CIDR's family.
    pub fn of(&mut self, cidr: &Cidr) -> &mut usize {
        if cidr.is_ipv4() {
            &mut self.ipv4
        } else {
            &mut self.ipv6
        }
    }

    /// The number of entries of both families.
    pub fn sum(&self) -> usize {
        self.ipv4 + self.ipv6
    }
}

impl EntryRef<'_> {
    /// Where the CIDR is listed; `None` for a runtime entry.
    pub fn location(&self) -> Option<Location> {
        self.location.map(|(path, line)| Location {
            path: path.clone(),
            line,
        })
    }
}

impl Entries {
    /// The number of entries.
    pub fn len(&self) -> usize {
        self.families.sum()
    }

    /// Whether there are no entries.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The number of entries, by address family.
    pub fn families(&self) -> FamilyCounts {
        self.families
    }

    /// The entry of exactly this CIDR.
    pub fn get(&self, cidr: &Cidr) -> Option<EntryRef<'_>> {
        match self.over.get(cidr) {
            Some(over) => over.as_ref().map(of_entry),
            None => self.table.get(cidr),
        }
    }

    /// Whether there is an entry of exactly this CIDR.
    pub fn contains_key(&self, cidr: &Cidr) -> bool {
        self.get(cidr).is_some()
    }

    /// Adds or replaces an entry.
    pub fn insert(&mut self, cidr: Cidr, entry: Entry) {
        if !self.contains_key(&cidr) {
            *self.families.of(&cidr) += 1;
        }
        Arc::make_mut(&mut self.over).insert(cidr, Some(entry));
    }

    /// Removes an entry; returns whether there was one.
    pub fn remove(&mut self, cidr: &Cidr) -> bool {
        if !self.contains_key(cidr) {
            return false;
        }
        *self.families.of(cidr) -= 1;
        let over = Arc::make_mut(&mut self.over);
        if self.table.get(cidr).is_some() {
            over.insert(*cidr, None);
        } else {
            over.remove(cidr);
        }
        true
    }

    /// All entries, in order.
    pub fn iter(&self) -> Iter<'_> {
        self.iter_from(None)
    }

    /// The entries in order, beginning with the first that is not before this CIDR.
    pub fn iter_from(&self, first: Option<&Cidr>) -> Iter<'_> {
        let rows = &self.table.rows;
        let begin = first.map_or(0, |first| rows.partition_point(|row| row.cidr < *first));
        let over = match first {
            Some(first) => self.over.range(*first..),
            None => self.over.range::<Cidr, _>(..),
        };
        Iter {
            table: &self.table,
            rows: rows[begin..].iter().peekable(),
            over: over.peekable(),
        }
    }

    /// The CIDRs, in order.
    pub fn keys(&self) -> impl Iterator<Item = Cidr> {
        self.iter().map(|(cidr, _)| cidr)
    }

    /// The CIDRs that contain an address, longest first: a connection takes the first.
    pub fn covering(&self, address: IpAddr) -> Vec<Cidr> {
        let address = address.to_canonical();
        let longest = if address.is_ipv4() { 32 } else { 128 };
        self.within(address, longest)
    }

    /// The longest CIDR that contains this one, other than itself.
    pub fn covering_cidr(&self, cidr: &Cidr) -> Option<Cidr> {
        let shorter = cidr.prefix().checked_sub(1)?;
        self.within(cidr.network().ip(), shorter).first().copied()
    }

    fn within(&self, address: IpAddr, longest: u8) -> Vec<Cidr> {
        let mut found: Vec<Cidr> = (0..=longest)
            .filter(|length| self.table.lengths.contains(address.is_ipv4(), *length))
            .filter_map(|length| Cidr::containing(address, length))
            .filter(|cidr| !self.over.contains_key(cidr) && self.table.get(cidr).is_some())
            .collect();
        let over = self.over.iter().filter(|(cidr, entry)| {
            entry.is_some() && cidr.prefix() <= longest && cidr.contains(address)
        });
        found.extend(over.map(|(cidr, _)| *cidr));
        found.sort_unstable_by_key(|cidr| std::cmp::Reverse(cidr.prefix()));
        found
    }

    /// Calls `each` with every CIDR whose policy differs: its policy before and after.
    pub fn differences<'a>(
        &'a self,
        after: &'a Self,
        mut each: impl FnMut(Cidr, Option<&'a PolicyName>, Option<&'a PolicyName>),
    ) {
        // Overlays of the same table.
        if Arc::ptr_eq(&self.table, &after.table) {
            if Arc::ptr_eq(&self.over, &after.over) {
                return;
            }
            let policy = |entries: &'a Self, cidr: &Cidr| entries.get(cidr).map(|e| e.policy);
            let changed: BTreeSet<&Cidr> = self.over.keys().chain(after.over.keys()).collect();
            for cidr in changed {
                let (before, now) = (policy(self, cidr), policy(after, cidr));
                if before != now {
                    each(*cidr, before, now);
                }
            }
        } else if self.over.is_empty() && after.over.is_empty() {
            self.table.differences(&after.table, each);
        } else {
            let pointers = |entries: &'a Self| entries.iter().map(|(c, e)| (c, Some(e.policy)));
            for (before, now) in compare(pointers(self), pointers(after), |cidr| *cidr) {
                if let Some((cidr, _)) = before.or(now) {
                    each(cidr, before.and_then(|e| e.1), now.and_then(|e| e.1));
                }
            }
        }
    }
}

/// An entry and the policy that it points at; in the kernel's maps it may point at none.
pub(super) type Pointer<'a> = (Cidr, Option<&'a PolicyName>);

/// Compares two sequences of entries that are in the same order: returns each entry that only one of
/// them has, or that points at another policy, as both have it. Plans, reloads, `verify` and the
/// rolling comparison with the kernel's maps compare entries by it.
pub(super) fn compare<'a, K: Ord>(
    before: impl Iterator<Item = Pointer<'a>>,
    after: impl Iterator<Item = Pointer<'a>>,
    order: impl Fn(&Cidr) -> K,
) -> impl Iterator<Item = (Option<Pointer<'a>>, Option<Pointer<'a>>)> {
    let (mut before, mut after) = (before.peekable(), after.peekable());
    let pairs = std::iter::from_fn(move || {
        let next = match (before.peek(), after.peek()) {
            (None, None) => return None,
            (Some(_), None) => Ordering::Less,
            (None, Some(_)) => Ordering::Greater,
            (Some((a, _)), Some((b, _))) => order(a).cmp(&order(b)),
        };
        Some((
            before.next_if(|_| next.is_le()),
            after.next_if(|_| next.is_ge()),
        ))
    });
    pairs.filter(|(before, after)| before != after)
}

/// Equal CIDRs with equal policies. Locations are not compared.
impl PartialEq for Entries {
    fn eq(&self, other: &Self) -> bool {
        let mut same = self.len() == other.len();
        if same {
            self.differences(other, |_, _, _| same = false);
        }
        same
    }
}

impl Eq for Entries {}

impl std::fmt::Debug for Entries {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_map()
            .entries(self.iter().map(|(cidr, entry)| (cidr, entry.policy)))
            .finish()
    }
}

impl FromIterator<(Cidr, Entry)> for Entries {
    fn from_iter<I: IntoIterator<Item = (Cidr, Entry)>>(entries: I) -> Self {
        let mut all = Self::default();
        for (cidr, entry) in entries {
            all.insert(cidr, entry);
        }
        all
    }
}

impl Table {
    fn get(&self, cidr: &Cidr) -> Option<EntryRef<'_>> {
        let index = self.rows.binary_search_by(|row| row.cidr.cmp(cidr)).ok()?;
        Some(self.entry(&self.rows[index]))
    }

    /// As [`compare`] for two tables: equal rows, usually nearly all, only cost a comparison of
    /// numbers.
    fn differences<'a>(
        &'a self,
        after: &'a Self,
        mut differ: impl FnMut(Cidr, Option<&'a PolicyName>, Option<&'a PolicyName>),
    ) {
        // Each table numbers policies on its own: maps each number to the other table's.
        let numbers: HashMap<&PolicyName, usize> = after.policies.iter().zip(0..).collect();
        let same: Vec<Option<usize>> = self
            .policies
            .iter()
            .map(|name| numbers.get(name).copied())
            .collect();
        let (mut old, mut new) = (0, 0);
        loop {
            let order = match (self.rows.get(old), after.rows.get(new)) {
                (None, None) => return,
                (Some(_), None) => Ordering::Less,
                (None, Some(_)) => Ordering::Greater,
                (Some(a), Some(b)) => {
                    if a.cidr == b.cidr {
                        if same[a.policy as usize] != Some(b.policy as usize) {
                            let (before, now) = (self.policy(old), after.policy(new));
                            differ(a.cidr, Some(before), Some(now));
                        }
                        old += 1;
                        new += 1;
                        continue;
                    }
                    a.cidr.cmp(&b.cidr)
                }
            };
            if order == Ordering::Less {
                differ(self.rows[old].cidr, Some(self.policy(old)), None);
                old += 1;
            } else {
                differ(after.rows[new].cidr, None, Some(after.policy(new)));
                new += 1;
            }
        }
    }

    fn policy(&self, row: usize) -> &PolicyName {
        &self.policies[self.rows[row].policy as usize]
    }

    fn entry(&self, row: &Row) -> EntryRef<'_> {
        EntryRef {
            policy: &self.policies[row.policy as usize],
            location: self
                .files
                .get(usize::from(row.file))
                .map(|file| (file, row.line as usize)),
        }
    }
}

fn of_entry(entry: &Entry) -> EntryRef<'_> {
    EntryRef {
        policy: &entry.policy,
        location: entry.location.as_ref().map(|at| (&at.path, at.line)),
    }
}

/// See [`Entries::iter`].
pub struct Iter<'a> {
    table: &'a Table,
    rows: Peekable<slice::Iter<'a, Row>>,
    over: Peekable<btree_map::Range<'a, Cidr, Option<Entry>>>,
}

impl<'a> Iterator for Iter<'a> {
    type Item = (Cidr, EntryRef<'a>);

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            let takes_over = match (self.rows.peek(), self.over.peek()) {
                (None, None) => return None,
                (Some(_), None) => false,
                (None, Some(_)) => true,
                (Some(row), Some((cidr, _))) => match row.cidr.cmp(cidr) {
                    Ordering::Less => false,
                    Ordering::Greater => true,
                    Ordering::Equal => {
                        self.rows.next();
                        true
                    }
                },
            };
            if !takes_over {
                let row = self.rows.next()?;
                return Some((row.cidr, self.table.entry(row)));
            }
            if let (cidr, Some(entry)) = self.over.next()? {
                return Some((*cidr, of_entry(entry)));
            }
        }
    }
}

/// CIDRs that are listed more than once.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Duplicates {
    /// CIDRs listed by several policies: the first `MOST_CONFLICTS`.
    pub conflicting: Vec<Duplicate>,
    /// CIDRs listed repeatedly by one policy, as published lists of cloud providers do: one for each
    /// policy.
    pub repeated: Vec<Duplicate>,
}

/// A CIDR that is listed twice.
#[derive(Debug, PartialEq, Eq)]
pub struct Duplicate {
    /// The policy of its first location.
    pub policy: PolicyName,
    /// The number of superfluous CIDRs of the policy.
    pub count: usize,
    /// The CIDR.
    pub cidr: Cidr,
    /// Two locations.
    pub places: [Option<Location>; 2],
}

/// Conflicts that are reported.
const MOST_CONFLICTS: usize = 200;

/// Builds a table from entries in any order.
#[derive(Default)]
pub struct Builder {
    table: Table,
    policies: HashMap<PolicyName, u32>,
}

impl Builder {
    /// Reserves capacity for more entries.
    pub fn reserve(&mut self, more: usize) {
        self.table.rows.reserve_exact(more);
    }

    /// The number of a policy.
    pub fn policy(&mut self, name: &PolicyName) -> u32 {
        if let Some(number) = self.policies.get(name) {
            return *number;
        }
        let number = u32::try_from(self.table.policies.len()).unwrap_or(u32::MAX);
        self.table.policies.push(name.clone());
        self.policies.insert(name.clone(), number);
        number
    }

    /// The number of a file. Locations in further files than 65,535 are not kept.
    pub fn file(&mut self, path: &Arc<Path>) -> u16 {
        match u16::try_from(self.table.files.len()) {
            Ok(number) if number != NO_FILE => {
                self.table.files.push(path.clone());
                number
            }
            _ => NO_FILE,
        }
    }

    /// Adds an entry, with the numbers of its policy and its file.
    pub fn push(&mut self, cidr: Cidr, policy: u32, place: Option<(u16, u32)>) {
        let (file, line) = place.unwrap_or((NO_FILE, 0));
        self.table.rows.push(Row {
            cidr,
            file,
            line,
            policy,
        });
    }

    /// Builds the entries, and reports duplicates. Of entries with the same CIDR the first is used.
    pub fn build(mut self) -> (Entries, Duplicates) {
        let rows = &mut self.table.rows;
        // Files usually list CIDRs in order.
        if !rows.is_sorted_by(|a, b| a.cidr < b.cidr) {
            // Files are numbered in the order in which they are read.
            let place = |row: &Row| (row.file, row.line);
            rows.sort_unstable_by(|a, b| a.cidr.cmp(&b.cidr).then_with(|| place(a).cmp(&place(b))));
        }
        let mut conflicting = Vec::new();
        let mut repeated: BTreeMap<u32, (usize, Row, Row)> = BTreeMap::new();
        rows.dedup_by(|later, first| {
            let same = later.cidr == first.cidr;
            if same && later.policy == first.policy {
                let (count, ..) = repeated.entry(first.policy).or_insert((0, *first, *later));
                *count += 1;
            } else if same && conflicting.len() < MOST_CONFLICTS {
                conflicting.push((1, *first, *later));
            }
            same
        });
        let duplicate = |(count, first, again): (usize, Row, Row)| Duplicate {
            policy: self.table.policies[first.policy as usize].clone(),
            count,
            cidr: first.cidr,
            places: [first, again].map(|row| self.table.entry(&row).location()),
        };
        let duplicates = Duplicates {
            conflicting: conflicting.into_iter().map(duplicate).collect(),
            repeated: repeated.into_values().map(duplicate).collect(),
        };
        let rows = &self.table.rows;
        let mut families = FamilyCounts::default();
        for row in rows.iter() {
            *families.of(&row.cidr) += 1;
            self.table.lengths.insert(&row.cidr);
        }
        let entries = Entries {
            table: Arc::new(self.table),
            over: Arc::default(),
            families,
        };
        (entries, duplicates)
    }
}

#[cfg(test)]
mod tests;
