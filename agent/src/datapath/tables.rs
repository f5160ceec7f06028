//! The maps, typed.

use std::{collections::BTreeMap, net::IpAddr, path::Path, time::Duration};

use aya::maps::{
    Array, LpmTrie, MapData, MapError, PerCpuHashMap, PerCpuValues, RingBuf, SkStorage,
    lpm_trie::Key,
};
use ipnetwork::IpNetwork;
use rto_agent_common::{
    EntryValue, FIRST_SLOT, MAX_POLICIES, Policy, SocketState, Statistics, direction,
    event::EventControl, maps, statistics_key,
};

use super::error::{DatapathError, map as map_error};
use crate::policy::Cidr;

/// Handles of every map the daemon reads or writes.
pub(super) struct Tables {
    v4: LpmTrie<MapData, [u8; 4], EntryValue>,
    v6: LpmTrie<MapData, [u8; 16], EntryValue>,
    policies: Array<MapData, Policy>,
    statistics: PerCpuHashMap<MapData, u32, Statistics>,
    /// How often memory for them may be waited for.
    patience: u32,
    cpus: usize,
    // A second handle of each map: aya's typed ones are consumed by pinning.
    handles: Vec<(&'static str, MapData)>,
}

/// Waits of 2 ms for memory, in one piece of work.
const PATIENCE: u32 = 200;

/// Opens a pinned map as the typed handle `$kind`, checking type and sizes against the kernel's.
macro_rules! open {
    ($dir:expr, $name:expr, $variant:ident) => {{
        let data = MapData::from_pin($dir.join($name)).map_err(|e| DatapathError::Map {
            map: $name,
            reason: describe(&e),
        })?;
        aya::maps::Map::from_map_data(data)
            .and_then(|map| map.try_into())
            .map_err(|e: MapError| DatapathError::Map {
                map: $name,
                reason: describe(&e),
            })?
    }};
}

impl Tables {
    /// Opens the maps pinned in `dir`.
    pub(super) fn open(dir: &Path) -> Result<Self, DatapathError> {
        let _sockets: SkStorage<MapData, SocketState> = open!(dir, maps::SOCKETS, SkStorage);
        let cpus = aya::util::nr_cpus()
            .map_err(|(file, e)| map_error(maps::STATISTICS, format!("{file}: {e}")))?
            .get() as usize;
        let handles = maps::ALL
            .into_iter()
            .map(|name| {
                let map = MapData::from_pin(dir.join(name));
                Ok((name, map.map_err(|e| map_error(name, describe(&e)))?))
            })
            .collect::<Result<_, DatapathError>>()?;
        Ok(Self {
            v4: open!(dir, maps::ENTRIES_V4, LpmTrie),
            v6: open!(dir, maps::ENTRIES_V6, LpmTrie),
            policies: open!(dir, maps::POLICIES, Array),
            statistics: open!(dir, maps::STATISTICS, PerCpuHashMap),
            patience: PATIENCE,
            cpus,
            handles,
        })
    }

    /// Pins the open maps in `dir` as well.
    pub(super) fn pin(&self, dir: &Path) -> Result<(), DatapathError> {
        for (name, map) in &self.handles {
            map.pin(dir.join(name))
                .map_err(|e| map_error(name, describe(&e)))?;
        }
        Ok(())
    }

    /// Every entry of both tries.
    pub(super) fn entries(&self) -> Result<BTreeMap<Cidr, EntryValue>, DatapathError> {
        let mut all = BTreeMap::new();
        for item in self.v4.iter() {
            let (key, value) = item.map_err(|e| map_error(maps::ENTRIES_V4, describe(&e)))?;
            all.insert(
                cidr(maps::ENTRIES_V4, key.data().into(), key.prefix_len())?,
                value,
            );
        }
        for item in self.v6.iter() {
            let (key, value) = item.map_err(|e| map_error(maps::ENTRIES_V6, describe(&e)))?;
            all.insert(
                cidr(maps::ENTRIES_V6, key.data().into(), key.prefix_len())?,
                value,
            );
        }
        Ok(all)
    }

    /// The value of exactly this entry; `None` if there is none. (The kernel's lookup finds the
    /// longest prefix not longer than the key's: the caller must know that the entry exists.)
    pub(super) fn entry(&self, cidr: &Cidr) -> Result<Option<EntryValue>, DatapathError> {
        let value = match cidr.network() {
            IpNetwork::V4(n) => self
                .v4
                .get(&Key::new(n.prefix().into(), n.ip().octets()), 0),
            IpNetwork::V6(n) => self
                .v6
                .get(&Key::new(n.prefix().into(), n.ip().octets()), 0),
        };
        match value {
            Ok(value) => Ok(Some(value)),
            Err(MapError::KeyNotFound) => Ok(None),
            Err(e) => Err(entry_error(cidr, &e)),
        }
    }

    /// Writes an entry.
    pub(super) fn write(&mut self, cidr: &Cidr, value: EntryValue) -> Result<(), DatapathError> {
        match cidr.network() {
            IpNetwork::V4(n) => {
                self.v4
                    .insert(&Key::new(n.prefix().into(), n.ip().octets()), &value, 0)
            }
            IpNetwork::V6(n) => {
                self.v6
                    .insert(&Key::new(n.prefix().into(), n.ip().octets()), &value, 0)
            }
        }
        .map_err(|e| entry_error(cidr, &e))
    }

    /// Removes an entry; one that is not there is as good as removed.
    pub(super) fn remove(&mut self, cidr: &Cidr) -> Result<(), DatapathError> {
        let done = match cidr.network() {
            IpNetwork::V4(n) => self
                .v4
                .remove(&Key::new(n.prefix().into(), n.ip().octets())),
            IpNetwork::V6(n) => self
                .v6
                .remove(&Key::new(n.prefix().into(), n.ip().octets())),
        };
        match done {
            Err(e) if errno(&e) == Some(libc::ENOENT) => Ok(()),
            Err(MapError::KeyNotFound) | Ok(()) => Ok(()),
            Err(e) => Err(entry_error(cidr, &e)),
        }
    }

    /// Every slot of the policy table but the reserved ones.
    pub(super) fn policies(&self) -> Result<Vec<(u32, Policy)>, DatapathError> {
        (FIRST_SLOT..MAX_POLICIES)
            .map(|index| Ok((index, self.policy(index)?)))
            .collect()
    }

    /// One slot of the policy table.
    pub(super) fn policy(&self, index: u32) -> Result<Policy, DatapathError> {
        self.policies
            .get(&index, 0)
            .map_err(|e| map_error(maps::POLICIES, describe(&e)))
    }

    /// Writes one slot of the policy table.
    pub(super) fn set_policy(&mut self, index: u32, policy: &Policy) -> Result<(), DatapathError> {
        self.policies
            .set(index, policy, 0)
            .map_err(|e| map_error(maps::POLICIES, describe(&e)))
    }

    /// A slot's statistics by [`direction::ALL`], summed over the CPUs; where there are none they are 0.
    pub(super) fn statistics(&self, index: u32) -> Result<[Statistics; 3], DatapathError> {
        let mut all = [Statistics::default(); 3];
        for (sum, direction) in all.iter_mut().zip(direction::ALL) {
            match self.statistics.get(&statistics_key(index, direction), 0) {
                Ok(values) => *sum = values.iter().fold(*sum, Statistics::plus),
                Err(MapError::KeyNotFound) => {}
                Err(e) => return Err(map_error(maps::STATISTICS, describe(&e))),
            }
        }
        Ok(all)
    }

    /// Whether a slot has statistics.
    pub(super) fn has_statistics(&self, index: u32) -> bool {
        direction::ALL
            .into_iter()
            .all(|d| self.statistics.get(&statistics_key(index, d), 0).is_ok())
    }

    /// Before a piece of work: waiting for memory must not make all of it take long.
    pub(super) fn be_patient(&mut self) {
        self.patience = PATIENCE;
    }

    /// Gives a slot statistics that begin at 0.
    pub(super) fn clear_statistics(&mut self, index: u32) -> Result<(), DatapathError> {
        for direction in direction::ALL {
            let key = statistics_key(index, direction);
            self.insert_statistics(key)
                .map_err(|e| map_error(maps::STATISTICS, describe(&e)))?;
        }
        Ok(())
    }

    /// The kernel allocates what it needs for every CPU from a small reserve, which it fills again a
    /// moment later.
    fn insert_statistics(&mut self, key: u32) -> Result<(), MapError> {
        const PAUSE: Duration = Duration::from_millis(2);
        loop {
            let zero = PerCpuValues::try_from(vec![Statistics::default(); self.cpus])?;
            match self.statistics.insert(&key, zero, 0) {
                Err(e) if errno(&e) == Some(libc::ENOMEM) && self.patience > 0 => {
                    self.patience -= 1;
                    std::thread::sleep(PAUSE);
                }
                result => return result,
            }
        }
    }

    /// Takes a slot's statistics away; where there are none nothing is done.
    pub(super) fn remove_statistics(&mut self, index: u32) -> Result<(), DatapathError> {
        for direction in direction::ALL {
            match self.statistics.remove(&statistics_key(index, direction)) {
                Ok(()) | Err(MapError::KeyNotFound) => {}
                Err(e) if errno(&e) == Some(libc::ENOENT) => {}
                Err(e) => return Err(map_error(maps::STATISTICS, describe(&e))),
            }
        }
        Ok(())
    }
}

/// The maps that events come by, pinned in `dir`.
pub(super) fn open_events(
    dir: &Path,
) -> Result<(RingBuf<MapData>, Array<MapData, EventControl>), DatapathError> {
    Ok((
        open!(dir, maps::EVENTS, RingBuf),
        open!(dir, maps::EVENT_CONTROL, Array),
    ))
}

fn cidr(map: &'static str, address: IpAddr, prefix: u32) -> Result<Cidr, DatapathError> {
    u8::try_from(prefix)
        .ok()
        .and_then(|prefix| IpNetwork::new(address, prefix).ok())
        .and_then(|network| Cidr::try_from(network).ok())
        .ok_or_else(|| {
            map_error(
                map,
                format!("holds {address}/{prefix}, which is no CIDR of ours"),
            )
        })
}

fn entry_error(cidr: &Cidr, error: &MapError) -> DatapathError {
    let reason = match errno(error) {
        Some(libc::ENOSPC) => "the kernel's table is full; raise max_entries".to_owned(),
        Some(libc::ENOMEM) => "the kernel has no memory for it".to_owned(),
        _ => describe(error),
    };
    DatapathError::Entry {
        cidr: *cidr,
        reason,
    }
}

/// The errno of the system call behind a map error.
fn errno(error: &MapError) -> Option<i32> {
    match error {
        MapError::SyscallError(e) => e.io_error.raw_os_error(),
        MapError::CreateError { io_error, .. } => io_error.raw_os_error(),
        _ => None,
    }
}

/// An error with all its causes on one line; aya's own texts often leave the errno to the cause.
pub(super) fn describe(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.contains(&more) {
            text.push_str(": ");
            text.push_str(&more);
        }
        cause = error.source();
    }
    // What aya says where a verifier's log would follow.
    if let Some(short) = text.trim_end().strip_suffix(". Verifier output:") {
        text.truncate(short.len());
    }
    text
}
