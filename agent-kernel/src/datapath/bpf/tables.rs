//! The maps with their types.

use std::{
    collections::BTreeSet,
    os::fd::AsFd as _,
    path::Path,
    sync::{
        Arc,
        atomic::{Ordering, fence},
    },
    time::{Duration, SystemTime},
};

use aya::maps::{
    Array, HashMap, MapData, MapError, PerCpuArray, PerCpuHashMap, PerCpuValues, RingBuf, SkStorage,
};
use rto_agent_common::{
    FAST_COUNTERS, FIRST_SLOT, FastStatistics, HostDefaults, Policy, PolicySlot, SLOTS,
    SOCKET_OPTIONS, SocketState, Statistics, also, direction,
    discovery::{Discovered, Prefix},
    event::EventControl,
    fallback::{self, Fallback},
    lasting, maps,
    schedules::{DRAINING_SINCE_S, STOPPED},
    statistics_key,
};

use super::{pins, pins::open, tries::Tries};
use crate::datapath::{
    DatapathError,
    error::{errno, map as map_error},
};
use crate::kernel::lpm_batch::lookup_per_cpu;

/// Handles of every map the daemon reads or writes.
pub(super) struct Tables {
    /// Shared with readers.
    pub(super) read: Arc<ReadTables>,
    policies: Array<MapData, PolicySlot>,
    /// Slots that were written, and whose former copy a program may still be reading.
    unrested: BTreeSet<u32>,
    host_defaults: Array<MapData, HostDefaults>,
    lasting: Array<MapData, u32>,
    fallbacks: Array<MapData, Fallback>,
    schedules: Array<MapData, u64>,
    counters: PerCpuArray<MapData, FastStatistics>,
    statistics: PerCpuHashMap<MapData, u32, Statistics>,
    /// How often an operation may still wait for memory.
    retry_budget: u32,
    cpus: usize,
    /// A second handle of each map except the tries: pinning consumes aya's typed handles.
    handles: Vec<(&'static str, MapData)>,
    /// The kernel's ids of all pinned maps.
    ids: Vec<(&'static str, u32)>,
}

/// The maps of entries.
pub(super) const TRIES: [&str; 2] = [maps::ENTRIES_V4, maps::ENTRIES_V6];

/// Waits for memory, of 2 ms each, in one operation.
const RETRY_BUDGET: u32 = 200;

impl Tables {
    /// Opens the maps pinned in `dir`.
    pub(super) fn open(dir: &Path) -> Result<Self, DatapathError> {
        let _sockets: SkStorage<MapData, SocketState> = open!(dir, maps::SOCKETS, SkStorage);
        let cpus = aya::util::nr_cpus()
            .map_err(|(file, e)| map_error(maps::STATISTICS, format!("{file}: {e}")))?
            .get() as usize;
        let handles = maps::ALL
            .into_iter()
            .filter(|name| !TRIES.contains(name))
            .map(|name| {
                let map = MapData::from_pin(dir.join(name));
                Ok((name, map.map_err(|e| map_error(name, e))?))
            })
            .collect::<Result<Vec<_>, DatapathError>>()?;
        let read = Arc::new(ReadTables::open(dir, cpus)?);
        let all = handles.iter().map(|(name, map)| (*name, map));
        let ids = all.chain(read.tries.handles()).map(|(name, map)| {
            let info = map.info().map_err(|e| map_error(name, e))?;
            Ok((name, info.id()))
        });
        Ok(Self {
            ids: ids.collect::<Result<_, DatapathError>>()?,
            read,
            policies: open!(dir, maps::POLICIES, Array),
            unrested: BTreeSet::new(),
            host_defaults: open!(dir, maps::HOST_DEFAULTS, Array),
            lasting: open!(dir, maps::LASTING, Array),
            fallbacks: open!(dir, maps::FALLBACKS, Array),
            schedules: open!(dir, maps::SCHEDULES, Array),
            counters: open!(dir, maps::COUNTERS, PerCpuArray),
            statistics: open!(dir, maps::STATISTICS, PerCpuHashMap),
            retry_budget: RETRY_BUDGET,
            cpus,
            handles,
        })
    }

    /// The kernel's ids of the maps, by their names.
    pub(super) fn ids(&self) -> &[(&'static str, u32)] {
        &self.ids
    }

    /// Pins the open maps in `dir` too.
    pub(super) fn pin(&self, dir: &Path) -> Result<(), DatapathError> {
        self.pin_all_but_tries(dir)?;
        for (name, map) in self.read.tries.handles() {
            map.pin(dir.join(name)).map_err(|e| map_error(name, e))?;
        }
        Ok(())
    }

    /// Pins all maps except the tries, which may be replaced.
    pub(super) fn pin_all_but_tries(&self, dir: &Path) -> Result<(), DatapathError> {
        for (name, map) in &self.handles {
            map.pin(dir.join(name)).map_err(|e| map_error(name, e))?;
        }
        if let Some(made) = self.read.discovered_since {
            pins::set_made(&dir.join(maps::DISCOVERED), made);
        }
        Ok(())
    }

    /// Writes one slot of the policy table. A program that runs concurrently reads either the
    /// former policy or the new one: see [`PolicySlot`].
    pub(super) fn set_policy(&mut self, index: u32, policy: &Policy) -> Result<(), DatapathError> {
        if self.unrested.contains(&index) {
            wait_for_programs();
            self.unrested.clear();
        }
        self.note_lasting(policy)?;
        for value in self.read.slot(index)?.replaced(policy) {
            self.policies
                .set(index, &value, 0)
                .map_err(|e| map_error(maps::POLICIES, e))?;
            // A program that sees the second write also sees the first. (It reads the copy at the
            // index it has just read: an address dependency.)
            fence(Ordering::SeqCst);
        }
        self.unrested.insert(index);
        Ok(())
    }

    /// Records which options this policy may set on sockets without storage, so that a later walk
    /// can restore them after the policy has changed or gone.
    fn note_lasting(&mut self, policy: &Policy) -> Result<(), DatapathError> {
        let recognised = SOCKET_OPTIONS.iter().map(|row| row.option);
        for option in recognised.filter(|option| option.is(also::RECOGNISED)) {
            let Some(us) = option.wanted(policy) else {
                continue;
            };
            let option = lasting::bit(option);
            let index = lasting::index(us);
            let failed = |e| map_error(maps::LASTING, e);
            let noted: u32 = self.lasting.get(&index, 0).map_err(failed)?;
            if noted & option == 0 {
                self.lasting
                    .set(index, &(noted | option), 0)
                    .map_err(failed)?;
            }
        }
        Ok(())
    }

    /// Writes the defaults that programs assume if they cannot read a socket's values.
    pub(super) fn set_host_defaults(&mut self, host: HostDefaults) -> Result<(), DatapathError> {
        self.host_defaults
            .set(0, &host, 0)
            .map_err(|e| map_error(maps::HOST_DEFAULTS, e))
    }

    /// Allows the program to shape timers again, after a detachment.
    pub(super) fn resume_shaping(&mut self) -> Result<(), DatapathError> {
        for index in [STOPPED, DRAINING_SINCE_S] {
            self.schedules.set(index, &0, 0).map_err(schedules_error)?;
        }
        Ok(())
    }

    /// Resets the fallbacks of a slot in these directions, active and passive.
    pub(super) fn clear_fallbacks(
        &mut self,
        slot: u32,
        which: [bool; 2],
    ) -> Result<(), DatapathError> {
        [direction::ACTIVE, direction::PASSIVE]
            .into_iter()
            .zip(which)
            .filter(|(_, is_cleared)| *is_cleared)
            .try_for_each(|(direction, _)| {
                self.fallbacks
                    .set(fallback::key(slot, direction), &Fallback::default(), 0)
                    .map_err(|e| map_error(maps::FALLBACKS, e))
            })
    }

    /// Called before an operation: it must not wait for memory too long in total.
    pub(super) fn reset_retry_budget(&mut self) {
        self.retry_budget = RETRY_BUDGET;
    }

    /// Replaces the statistics of an arm by empty ones.
    pub(super) fn clear_statistics(&mut self, arm: u32) -> Result<(), DatapathError> {
        let keys = direction::ALL.map(|direction| statistics_key(arm, direction));
        // All counters first, as memory for the rest may be missing until later.
        keys.into_iter()
            .try_for_each(|key| self.clear_counters(key))?;
        keys.into_iter()
            .try_for_each(|key| self.insert_statistics(key))
    }

    /// Adds missing statistics to an arm; existing statistics continue.
    pub(super) fn add_statistics(&mut self, arm: u32) -> Result<(), DatapathError> {
        for key in direction::ALL.map(|direction| statistics_key(arm, direction)) {
            if !self.read.has_key(key) {
                self.insert_statistics(key)?;
            }
        }
        Ok(())
    }

    /// Resets the counters of a key to 0.
    fn clear_counters(&mut self, key: u32) -> Result<(), DatapathError> {
        if key >= FAST_COUNTERS {
            return Ok(());
        }
        PerCpuValues::try_from(vec![FastStatistics::default(); self.cpus])
            .map_err(MapError::from)
            .and_then(|zero| self.counters.set(key, zero, 0))
            .map_err(|e| map_error(maps::COUNTERS, e))
    }

    /// The kernel allocates per-CPU memory from a small reserve, which it refills a moment later.
    fn insert_statistics(&mut self, key: u32) -> Result<(), DatapathError> {
        const PAUSE: Duration = Duration::from_millis(2);
        loop {
            let zero = PerCpuValues::try_from(vec![Statistics::default(); self.cpus]);
            let zero = zero.map_err(|e| map_error(maps::STATISTICS, e))?;
            match self.statistics.insert(&key, zero, 0) {
                Err(e) if errno(&e) == Some(libc::ENOMEM) && self.retry_budget > 0 => {
                    self.retry_budget -= 1;
                    std::thread::sleep(PAUSE);
                }
                result => return result.map_err(|e| map_error(maps::STATISTICS, e)),
            }
        }
    }

    /// Removes an arm's statistics, if there are any. `COUNTERS` is not read until the arm's next
    /// statistics, which reset it to 0.
    pub(super) fn remove_statistics(&mut self, arm: u32) -> Result<(), DatapathError> {
        for direction in direction::ALL {
            match self.statistics.remove(&statistics_key(arm, direction)) {
                Ok(()) | Err(MapError::KeyNotFound) => {}
                Err(e) if errno(&e) == Some(libc::ENOENT) => {}
                Err(e) => return Err(map_error(maps::STATISTICS, e)),
            }
        }
        Ok(())
    }
}

/// Separate handles of the maps that are read beside the writer.
pub(super) struct ReadTables {
    pub(super) tries: Arc<Tries>,
    policies: Array<MapData, PolicySlot>,
    statistics: MapData,
    counters: MapData,
    cpus: usize,
    host_defaults: Array<MapData, HostDefaults>,
    fallbacks: Array<MapData, Fallback>,
    discovered: HashMap<MapData, Prefix, Discovered>,
    /// When the map `DISCOVERED` was created.
    pub(super) discovered_since: Option<SystemTime>,
}

/// The values of one key, by CPU: buffers for [`ReadTables::statistics`].
#[derive(Default)]
pub(super) struct PerCpu {
    statistics: Vec<Statistics>,
    counters: Vec<FastStatistics>,
}

impl ReadTables {
    fn open(dir: &Path, cpus: usize) -> Result<Self, DatapathError> {
        let map = |name| MapData::from_pin(dir.join(name)).map_err(|e| map_error(name, e));
        let _statistics: PerCpuHashMap<MapData, u32, Statistics> =
            open!(dir, maps::STATISTICS, PerCpuHashMap);
        let _counters: PerCpuArray<MapData, FastStatistics> =
            open!(dir, maps::COUNTERS, PerCpuArray);
        Ok(Self {
            cpus,
            tries: Arc::new(Tries::open(dir)?),
            policies: open!(dir, maps::POLICIES, Array),
            statistics: map(maps::STATISTICS)?,
            counters: map(maps::COUNTERS)?,
            host_defaults: open!(dir, maps::HOST_DEFAULTS, Array),
            fallbacks: open!(dir, maps::FALLBACKS, Array),
            discovered: open!(dir, maps::DISCOVERED, HashMap),
            discovered_since: pins::made(&dir.join(maps::DISCOVERED)),
        })
    }

    /// The fallbacks of a slot, by direction (active, passive).
    pub(super) fn fallbacks(&self, slot: u32) -> Result<[Fallback; 2], DatapathError> {
        let of = |direction| {
            let key = fallback::key(slot, direction);
            self.fallbacks
                .get(&key, 0)
                .map_err(|e| map_error(maps::FALLBACKS, e))
        };
        Ok([of(direction::ACTIVE)?, of(direction::PASSIVE)?])
    }

    /// All elements of `DISCOVERED`; elements evicted during the read may be missing.
    pub(super) fn discovered(&self) -> Result<Vec<(Prefix, Discovered)>, DatapathError> {
        let mut all = Vec::new();
        for prefix in self.discovered.keys() {
            let prefix = prefix.map_err(|e| map_error(maps::DISCOVERED, e))?;
            match self.discovered.get(&prefix, 0) {
                Ok(discovered) => all.push((prefix, discovered)),
                Err(MapError::KeyNotFound) => {}
                Err(e) => return Err(map_error(maps::DISCOVERED, e)),
            }
        }
        Ok(all)
    }

    /// The defaults that programs assume if they cannot read a socket's values.
    pub(super) fn host_defaults(&self) -> Result<HostDefaults, DatapathError> {
        self.host_defaults
            .get(&0, 0)
            .map_err(|e| map_error(maps::HOST_DEFAULTS, e))
    }

    /// Every slot of the policy table except the reserved ones.
    pub(super) fn policies(&self) -> Result<Vec<(u32, Policy)>, DatapathError> {
        (FIRST_SLOT..SLOTS)
            .map(|index| Ok((index, self.policy(index)?)))
            .collect()
    }

    /// One slot of the policy table.
    pub(super) fn policy(&self, index: u32) -> Result<Policy, DatapathError> {
        Ok(*self.slot(index)?.policy())
    }

    pub(super) fn slot(&self, index: u32) -> Result<PolicySlot, DatapathError> {
        self.policies
            .get(&index, 0)
            .map_err(|e| map_error(maps::POLICIES, e))
    }

    /// An arm's statistics indexed by [`direction::ALL`], summed over the CPUs; 0 for an arm
    /// without statistics. Most values are 0, and are not added up.
    pub(super) fn statistics(
        &self,
        arm: u32,
        buffers: &mut PerCpu,
    ) -> Result<[Statistics; 3], DatapathError> {
        let mut all = [Statistics::default(); 3];
        let (none, nothing) = (FastStatistics::default(), Statistics::default());
        for (sum, direction) in all.iter_mut().zip(direction::ALL) {
            let key = statistics_key(arm, direction);
            if self.rare(key, &mut buffers.statistics)? {
                let some = buffers.statistics.iter().filter(|one| **one != nothing);
                *sum = some.fold(*sum, Statistics::plus);
            }
            if key < FAST_COUNTERS {
                buffers.counters.resize(self.cpus, none);
                // SAFETY: the type was checked by `open()`, and consists of u64. Any number is
                // valid.
                unsafe { lookup_per_cpu(self.counters.fd().as_fd(), key, &mut buffers.counters) }
                    .map_err(|e| map_error(maps::COUNTERS, e))?;
                let some = buffers.counters.iter().filter(|fast| **fast != none);
                *sum = some.fold(*sum, |sum, fast| sum.plus(&(*fast).into()));
            }
        }
        Ok(all)
    }

    /// Reads the values of a key of `STATISTICS`; returns whether it exists.
    fn rare(&self, key: u32, values: &mut Vec<Statistics>) -> Result<bool, DatapathError> {
        values.resize(self.cpus, Statistics::default());
        // SAFETY: as in `statistics()`.
        unsafe { lookup_per_cpu(self.statistics.fd().as_fd(), key, values) }
            .map_err(|e| map_error(maps::STATISTICS, e))
    }

    /// Whether an arm has statistics.
    pub(super) fn has_statistics(&self, arm: u32) -> bool {
        direction::ALL
            .into_iter()
            .all(|direction| self.has_key(statistics_key(arm, direction)))
    }

    fn has_key(&self, key: u32) -> bool {
        self.rare(key, &mut Vec::new()).unwrap_or(false)
    }
}

/// An error about the map of schedules.
pub(super) fn schedules_error(e: MapError) -> DatapathError {
    map_error(maps::SCHEDULES, e)
}

/// Waits until every program that runs now has ended. Programs run in RCU read sections, and a
/// global memory barrier is a grace period (`membarrier_global()`, Linux 6.12; not with
/// `nohz_full`, nor on a single processor). Without `membarrier` it sleeps instead: a program takes
/// microseconds.
pub(super) fn wait_for_programs() {
    const MEMBARRIER_CMD_GLOBAL: libc::c_int = 1;
    const PAUSE: Duration = Duration::from_millis(20);
    // SAFETY: the call takes only numbers.
    let done = unsafe { libc::syscall(libc::SYS_membarrier, MEMBARRIER_CMD_GLOBAL, 0, 0) };
    let is_one = std::thread::available_parallelism().is_ok_and(|n| n.get() == 1);
    if done != 0 || is_one {
        std::thread::sleep(PAUSE);
    }
}

/// The maps that carry events, pinned in `dir`.
pub(super) fn open_events(
    dir: &Path,
) -> Result<(RingBuf<MapData>, Array<MapData, EventControl>), DatapathError> {
    Ok((
        open!(dir, maps::EVENTS, RingBuf),
        open!(dir, maps::EVENT_CONTROL, Array),
    ))
}
