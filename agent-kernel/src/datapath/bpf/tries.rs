//! The two tries of entries, read and written in large chunks.
//!
//! A chunk takes one system call if the kernel has batches (Linux 5.13), else one for each entry.
//! Readers have separate handles, and never wait for the engine's writes.

use std::{
    net::IpAddr,
    os::fd::AsFd as _,
    path::Path,
    sync::{
        Arc, Once,
        atomic::{AtomicBool, Ordering},
    },
};

use aya::maps::{LpmTrie, MapData, MapError};
use ipnetwork::IpNetwork;
use rto_agent_common::{EntryValue, maps};
use rto_agent_core::{
    policy::{Cidr, differences::Cursor},
    progress,
};

use super::pins::open;
use crate::{
    datapath::{DatapathError, error::map as map_error},
    kernel::lpm_batch::{LpmKey, Trie, is_unsupported},
};

/// Elements in one system call: about ten milliseconds of kernel time.
const CHUNK: usize = 4096;
/// `off` disables batches, as on a kernel without them.
const BATCH: &str = "RTO_AGENT_BATCH";

/// Handles of both tries.
pub(super) struct Tries {
    v4: MapData,
    v6: MapData,
    /// Whether batches are used; false once the kernel has refused them.
    batch: AtomicBool,
}

impl Tries {
    /// Opens the tries pinned in `dir`.
    pub(super) fn open(dir: &Path) -> Result<Self, DatapathError> {
        // aya checks the type and the sizes.
        let _v4: LpmTrie<MapData, [u8; 4], EntryValue> = open!(dir, maps::ENTRIES_V4, LpmTrie);
        let _v6: LpmTrie<MapData, [u8; 16], EntryValue> = open!(dir, maps::ENTRIES_V6, LpmTrie);
        let map = |name| MapData::from_pin(dir.join(name)).map_err(|e| map_error(name, e));
        Ok(Self {
            v4: map(maps::ENTRIES_V4)?,
            v6: map(maps::ENTRIES_V6)?,
            batch: AtomicBool::new(std::env::var_os(BATCH).is_none_or(|text| text != "off")),
        })
    }

    /// Handles by name, for pinning.
    pub(super) fn handles(&self) -> [(&'static str, &MapData); 2] {
        [(maps::ENTRIES_V4, &self.v4), (maps::ENTRIES_V6, &self.v6)]
    }

    fn v4(&self) -> Trie<'_, 4, EntryValue> {
        // SAFETY: `open` checked the sizes; the value is two u32.
        unsafe { Trie::new(self.v4.fd().as_fd()) }
    }

    fn v6(&self) -> Trie<'_, 16, EntryValue> {
        // SAFETY: as above.
        unsafe { Trie::new(self.v6.fd().as_fd()) }
    }

    fn can_batch(&self) -> bool {
        self.batch.load(Ordering::Relaxed)
    }

    /// Whether a batch succeeded. After a failure the entries are written one by one, which finds
    /// the faulty entry.
    fn batched(&self, result: &std::io::Result<()>) -> bool {
        if let Err(e) = result
            && is_unsupported(e)
        {
            self.go_one_by_one();
        }
        result.is_ok()
    }

    fn go_one_by_one(&self) {
        static SAID: Once = Once::new();
        self.batch.store(false, Ordering::Relaxed);
        SAID.call_once(|| {
            tracing::info!(
                "this kernel has no batch operations for LPM tries (Linux 5.13 and later): entries \
                 are written one by one"
            );
        });
    }

    /// The value of exactly this entry; `None` if it does not exist. (The kernel's lookup finds the
    /// longest prefix that is not longer than the key's, so the caller must know that the entry
    /// exists.)
    pub(super) fn get(&self, cidr: &Cidr) -> Result<Option<EntryValue>, DatapathError> {
        let value = match key(cidr) {
            Key::V4(key) => self.v4().lookup(&key),
            Key::V6(key) => self.v6().lookup(&key),
        };
        value.map_err(|e| entry_error(cidr, e))
    }

    /// Whether exactly this entry exists, see [`Trie::contains`].
    pub(super) fn contains(&self, cidr: &Cidr) -> Result<bool, DatapathError> {
        let contains = match key(cidr) {
            Key::V4(key) => self.v4().contains(&key),
            Key::V6(key) => self.v6().contains(&key),
        };
        contains.map_err(|e| entry_error(cidr, e))
    }

    /// Every entry, unordered.
    pub(super) fn all(&self) -> Result<Vec<(Cidr, EntryValue)>, DatapathError> {
        let mut all = Vec::new();
        self.each(|cidr, value| all.push((cidr, value)))?;
        Ok(all)
    }

    /// The hits of every entry with at least one, unordered.
    pub(super) fn hits(&self) -> Result<Vec<(Cidr, u32)>, DatapathError> {
        let mut hits = Vec::new();
        self.each(|cidr, value| {
            if value.hits > 0 {
                hits.push((cidr, value.hits));
            }
        })?;
        Ok(hits)
    }

    /// Calls `take` with every entry, unordered.
    pub(super) fn each(&self, mut take: impl FnMut(Cidr, EntryValue)) -> Result<(), DatapathError> {
        self.read(maps::ENTRIES_V4, &self.v4(), &mut take)?;
        self.read(maps::ENTRIES_V6, &self.v6(), &mut take)
    }

    /// The next entries of one family, up to `count`, in the kernel's order (see
    /// [`Cursor::compare`]), and whether they were the last.
    pub(super) fn run(
        &self,
        cursor: Cursor,
        count: usize,
    ) -> Result<(Vec<(Cidr, EntryValue)>, bool), DatapathError> {
        let count = count.min(CHUNK);
        let after = cursor.after.map(|after| key(&after));
        if cursor.is_ipv6 {
            let after = match after {
                Some(Key::V6(key)) => Some(key),
                _ => None,
            };
            let (run, is_last) = self.run_of(maps::ENTRIES_V6, &self.v6(), after, count)?;
            return Ok((cidrs(maps::ENTRIES_V6, run)?, is_last));
        }
        let after = match after {
            Some(Key::V4(key)) => Some(key),
            _ => None,
        };
        let (run, is_last) = self.run_of(maps::ENTRIES_V4, &self.v4(), after, count)?;
        Ok((cidrs(maps::ENTRIES_V4, run)?, is_last))
    }

    fn read<const N: usize>(
        &self,
        name: &'static str,
        trie: &Trie<'_, N, EntryValue>,
        take: &mut impl FnMut(Cidr, EntryValue),
    ) -> Result<(), DatapathError>
    where
        IpAddr: From<[u8; N]>,
    {
        let mut after = None;
        loop {
            let (run, is_last) = self.run_of(name, trie, after, CHUNK)?;
            for (key, value) in &run {
                take(cidr(name, key)?, *value);
            }
            if is_last {
                return Ok(());
            }
            after = run.last().map(|(key, _)| *key).or(after);
        }
    }

    /// Up to `count` elements after a key, in one system call if the kernel has batches, and
    /// whether they were the last.
    fn run_of<const N: usize>(
        &self,
        name: &'static str,
        trie: &Trie<'_, N, EntryValue>,
        after: Option<LpmKey<N>>,
        count: usize,
    ) -> Result<(Run<N>, bool), DatapathError> {
        let failed = |e: std::io::Error| map_error(name, e);
        if self.can_batch() {
            let mut keys = vec![LpmKey::<N>::ZERO; count];
            let mut values = vec![EntryValue::default(); count];
            match trie.lookup_batch(after, &mut keys, &mut values) {
                Err(e) if is_unsupported(&e) => self.go_one_by_one(),
                read => {
                    let (count, next) = read.map_err(failed)?;
                    progress::checkpoint()?;
                    let run = keys.into_iter().zip(values).take(count).collect();
                    return Ok((run, next.is_none()));
                }
            }
        }
        let mut run = Vec::new();
        let mut last = after;
        while run.len() < count {
            let Some(key) = trie.next_key(last.as_ref()).map_err(failed)? else {
                return Ok((run, true));
            };
            if let Some(value) = trie.lookup(&key).map_err(failed)? {
                run.push((key, value));
            }
            last = Some(key);
            progress::checkpoint()?;
        }
        Ok((run, false))
    }

    pub(super) fn write(
        &self,
        entries: impl Iterator<Item = Result<(Cidr, EntryValue), DatapathError>>,
    ) -> Result<(), DatapathError> {
        self.change(Change::Write, entries)
    }

    /// Removes entries; missing entries are not an error.
    pub(super) fn remove(&self, cidrs: &[Cidr]) -> Result<(), DatapathError> {
        let entries = cidrs.iter().map(|cidr| Ok((*cidr, EntryValue::default())));
        self.change(Change::Remove, entries)
    }

    fn change(
        &self,
        change: Change,
        entries: impl Iterator<Item = Result<(Cidr, EntryValue), DatapathError>>,
    ) -> Result<(), DatapathError> {
        let (mut v4, mut v6) = (Chunk::default(), Chunk::default());
        for entry in entries {
            let (cidr, value) = entry?;
            match key(&cidr) {
                Key::V4(key) => v4.push(cidr, key, value),
                Key::V6(key) => v6.push(cidr, key, value),
            }
            if v4.is_full() {
                self.change_chunk(change, &self.v4(), &mut v4)?;
            }
            if v6.is_full() {
                self.change_chunk(change, &self.v6(), &mut v6)?;
            }
        }
        self.change_chunk(change, &self.v4(), &mut v4)?;
        self.change_chunk(change, &self.v6(), &mut v6)
    }

    fn change_chunk<const N: usize>(
        &self,
        change: Change,
        trie: &Trie<'_, N, EntryValue>,
        chunk: &mut Chunk<N>,
    ) -> Result<(), DatapathError> {
        if chunk.keys.is_empty() {
            return Ok(());
        }
        // Checked before the write, because a write cannot be cancelled once it has started.
        progress::checkpoint()?;
        let in_one = self.can_batch()
            && chunk.keys.len() > 1
            && self.batched(&match change {
                Change::Write => trie.update_batch(&chunk.keys, &chunk.values),
                Change::Remove => trie.delete_batch(&chunk.keys),
            });
        if !in_one {
            let keys = chunk.keys.iter().zip(&chunk.values).zip(&chunk.cidrs);
            for ((key, value), cidr) in keys {
                let changed = match change {
                    Change::Write => trie.update(key, value),
                    Change::Remove => trie.delete(key).map(drop),
                };
                changed.map_err(|e| entry_error(cidr, e))?;
            }
        }
        chunk.clear();
        progress::step();
        Ok(())
    }

    fn empty<const N: usize>(&self, trie: &Trie<'_, N, EntryValue>) {
        /// Removing these takes some tenths of a millisecond.
        const FEW: usize = 256;
        let mut keys = vec![LpmKey::<N>::ZERO; FEW];
        let mut values = vec![EntryValue::default(); FEW];
        while self.can_batch() {
            let read = trie.lookup_batch(None, &mut keys, &mut values);
            match read {
                Ok((count, _)) if count > 0 => {
                    if trie.delete_batch(&keys[..count]).is_err() {
                        break;
                    }
                }
                _ => break,
            }
        }
        while let Ok(Some(key)) = trie.next_key(None) {
            if trie.delete(&key).is_err() {
                break;
            }
        }
    }
}

/// Elements in the kernel's format.
type Run<const N: usize> = Vec<(LpmKey<N>, EntryValue)>;

/// A change of entries.
#[derive(Clone, Copy)]
enum Change {
    Write,
    Remove,
}

/// Removes every entry from unused tries in a separate thread, if `is_unused` confirms it there.
/// The kernel would free a full trie without rescheduling, which blocks other work on that
/// processor for up to a second.
pub(super) fn empty_later(tries: Arc<Tries>, is_unused: impl FnOnce() -> bool + Send + 'static) {
    let emptying = std::thread::Builder::new().name("empty".to_owned());
    // If no thread can be started, the kernel frees the trie.
    let _ = emptying.spawn(move || {
        // A trie to which another handle exists may still be in use.
        if is_unused() {
            tries.empty(&tries.v4());
            tries.empty(&tries.v6());
        }
    });
}

/// Entries of one system call.
#[derive(Default)]
struct Chunk<const N: usize> {
    cidrs: Vec<Cidr>,
    keys: Vec<LpmKey<N>>,
    values: Vec<EntryValue>,
}

impl<const N: usize> Chunk<N> {
    fn push(&mut self, cidr: Cidr, key: LpmKey<N>, value: EntryValue) {
        self.cidrs.push(cidr);
        self.keys.push(key);
        self.values.push(value);
    }

    fn is_full(&self) -> bool {
        self.keys.len() >= CHUNK
    }

    fn clear(&mut self) {
        self.cidrs.clear();
        self.keys.clear();
        self.values.clear();
    }
}

enum Key {
    V4(LpmKey<4>),
    V6(LpmKey<16>),
}

fn key(cidr: &Cidr) -> Key {
    match cidr.network() {
        IpNetwork::V4(n) => Key::V4(LpmKey {
            length: n.prefix().into(),
            data: n.ip().octets(),
        }),
        IpNetwork::V6(n) => Key::V6(LpmKey {
            length: n.prefix().into(),
            data: n.ip().octets(),
        }),
    }
}

fn cidrs<const N: usize>(
    map: &'static str,
    run: Run<N>,
) -> Result<Vec<(Cidr, EntryValue)>, DatapathError>
where
    IpAddr: From<[u8; N]>,
{
    run.into_iter()
        .map(|(key, value)| Ok((cidr(map, &key)?, value)))
        .collect()
}

/// The kernel ignores bits beyond the prefix length, which the agent never writes.
fn cidr<const N: usize>(map: &'static str, key: &LpmKey<N>) -> Result<Cidr, DatapathError>
where
    IpAddr: From<[u8; N]>,
{
    let address = IpAddr::from(key.data);
    u8::try_from(key.length)
        .ok()
        .and_then(|length| Cidr::containing(address, length))
        .ok_or_else(|| {
            let length = key.length;
            map_error(
                map,
                format!(
                    "contains {address}/{length}, which is not a CIDR of the agent; remove it with \
                     bpftool"
                ),
            )
        })
}

fn entry_error(cidr: &Cidr, cause: std::io::Error) -> DatapathError {
    DatapathError::Entry { cidr: *cidr, cause }
}
