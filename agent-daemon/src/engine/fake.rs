//! A kernel for tests: maps in memory, whose writes fail on demand.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    sync::{Arc, Barrier, Mutex, MutexGuard},
    time::SystemTime,
};

use rto_agent_common::{
    FIRST_SLOT, HostDefaults, Policy, SLOTS, Statistics,
    discovery::{Discovered, Prefix},
    fallback::Fallback,
};
use rto_agent_core::{
    config::RttSampling,
    policy::{
        Cidr, Entry, PolicyName,
        differences::{Cursor, Difference, Differences, in_trie_order},
        plan::{MapState, Plan},
    },
    progress::{self, Progress},
    wire::{
        kernel::{Attachment, Found, Removed},
        stats::ArmStatistics,
    },
};
use rto_agent_kernel::datapath::{
    DatapathError, Kernel, KernelReader, Options, StatisticsOptions, events, fallbacks_begin, walk,
};

/// The contents of the maps, and the failures to inject.
#[derive(Clone, Debug, Default)]
pub(crate) struct State {
    pub(crate) maps: MapState,
    pub(crate) attached: bool,
    /// Writes so far.
    pub(crate) writes: usize,
    /// Numbers of the writes that fail.
    pub(crate) failing: BTreeSet<usize>,
    /// Whether reads fail.
    pub(crate) unreadable: bool,
    /// How often statistics of a policy were read.
    pub(crate) statistics_read: usize,
    /// Number of readers created.
    pub(crate) readers: usize,
    /// Number of entries read for comparisons.
    pub(crate) compared: usize,
    /// Policies whose statistics another process removed.
    pub(crate) without_statistics: BTreeSet<PolicyName>,
    /// Another process changed the settings of control arms.
    pub(crate) control_arm_differs: bool,
    pub(crate) host: Option<HostDefaults>,
    /// Statistics by policy; absent policies have counted nothing.
    pub(crate) statistics: BTreeMap<PolicyName, ArmStatistics>,
    /// Fallbacks by policy, likewise.
    pub(crate) fallbacks: BTreeMap<PolicyName, [Fallback; 2]>,
    /// Peers without an entry.
    pub(crate) discovered: Vec<(Prefix, Discovered)>,
    /// Start of these counts.
    pub(crate) discovered_since: Option<SystemTime>,
    /// The next attachment waits here at its start, and again at its end.
    pub(crate) gate: Option<Arc<Barrier>>,
    /// During this write, the operation with this progress is cancelled.
    pub(crate) stopping: Option<(usize, Progress)>,
}

impl State {
    fn counted(&self, name: &PolicyName, policy: &Policy) -> ArmStatistics {
        let none = [Statistics::default(); 3];
        let counted = self.statistics.get(name);
        ArmStatistics {
            treated: counted.map_or(none, |counted| counted.treated),
            control: (policy.control_below != 0)
                .then(|| counted.and_then(|counted| counted.control).unwrap_or(none)),
        }
    }

    fn has_slot_for(&self, name: &PolicyName) -> bool {
        let policies = &self.maps.policies;
        policies.contains_key(name) || policies.len() < (SLOTS - FIRST_SLOT) as usize
    }
}

/// Controls and inspects a fake kernel.
#[derive(Clone, Default)]
pub(crate) struct FakeHost(Arc<Mutex<State>>);

struct FakeKernel {
    host: FakeHost,
    options: Options,
    found: Found,
}

struct FakeReader {
    host: FakeHost,
    options: Options,
    missing_stats: BTreeSet<PolicyName>,
}

impl FakeReader {
    fn readable(&self) -> Result<MutexGuard<'_, State>, DatapathError> {
        let state = self.host.state();
        if state.unreadable {
            return Err(refused());
        }
        Ok(state)
    }
}

impl FakeHost {
    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }

    /// Opens it as [`rto_agent_kernel::datapath::open`] does.
    pub(crate) fn open(&self, options: Options) -> Box<dyn Kernel> {
        let found = if self.state().attached {
            Found::Adopted
        } else {
            Found::Nothing
        };
        Box::new(FakeKernel {
            host: self.clone(),
            options,
            found,
        })
    }

    /// Makes the `n`th write from now fail, counted from 1.
    pub(crate) fn fail(&self, n: usize) {
        let mut state = self.state();
        let at = state.writes + n;
        state.failing.insert(at);
    }

    /// Cancels the operation during the `n`th write from now, counted from 1.
    pub(crate) fn stop_at(&self, n: usize, progress: Progress) {
        let mut state = self.state();
        state.stopping = Some((state.writes + n, progress));
    }

    fn write(&self, change: impl FnOnce(&mut State)) -> Result<(), DatapathError> {
        progress::checkpoint()?;
        let mut state = self.state();
        state.writes += 1;
        let write = state.writes;
        if state.stopping.as_ref().is_some_and(|(at, _)| *at == write)
            && let Some((_, progress)) = state.stopping.take()
        {
            progress.stop();
        }
        if state.failing.contains(&write) {
            return Err(refused());
        }
        change(&mut state);
        Ok(())
    }
}

/// Options for a kernel without a pin directory.
pub(crate) fn options() -> Options {
    Options {
        cgroup: "/nowhere".into(),
        pin_dir: "/nowhere/pins".into(),
        max_entries: 16,
        statistics: StatisticsOptions {
            on: true,
            unmatched: false,
            sampling: 1,
            rtt: RttSampling::Off,
            process: false,
        },
        features: 0,
        without_clone: None,
        shapes_syns: false,
        hz: 250,
        host_defaults: rto_agent_core::testing::HOST.defaults(),
    }
}

fn refused() -> DatapathError {
    DatapathError::PinDir {
        path: "/nowhere".into(),
        cause: io::Error::from_raw_os_error(libc::EPERM),
    }
}

impl Kernel for FakeKernel {
    fn options(&self) -> &Options {
        &self.options
    }

    fn found(&self) -> Found {
        self.found
    }

    fn read(&self) -> Result<MapState, DatapathError> {
        let state = self.host.state();
        if state.unreadable {
            return Err(refused());
        }
        Ok(state.maps.clone())
    }

    fn apply(
        &mut self,
        room: u32,
        _current: &MapState,
        plan: &Plan,
        desired: &MapState,
    ) -> Result<bool, DatapathError> {
        let grows = room > self.options.max_entries;
        for (name, policy) in &plan.policies_write {
            if !self.host.state().has_slot_for(name) {
                return Err(DatapathError::PolicyTableFull(name.clone()));
            }
            let write = |state: &mut State| {
                let begins = fallbacks_begin(state.maps.policies.get(name), policy);
                if let Some(fallbacks) = state.fallbacks.get_mut(name) {
                    let reset = fallbacks.iter_mut().zip(begins);
                    for (fallback, _) in reset.filter(|(_, begins)| *begins) {
                        *fallback = Fallback::default();
                    }
                }
                state.maps.policies.insert(name.clone(), *policy);
            };
            self.host.write(write)?;
        }
        if grows {
            let replace = |state: &mut State| {
                state.maps.entries = desired.entries.clone();
                state.maps.ends = desired.ends.clone();
            };
            self.host.write(replace)?;
            self.options.max_entries = room;
        } else {
            for (cidr, name) in plan.entries_write.iter().chain(&plan.entries_end) {
                let policy = name.clone();
                let location = None;
                let entry = Entry { policy, location };
                let write = |state: &mut State| {
                    state.maps.entries.insert(*cidr, entry);
                    state.maps.set_end(*cidr, desired.end_of(cidr));
                };
                self.host.write(write)?;
            }
            for cidr in &plan.entries_remove {
                // Removing an entry that another process has removed is not an error.
                let remove = |state: &mut State| {
                    state.maps.entries.remove(cidr);
                    state.maps.set_end(*cidr, 0);
                };
                self.host.write(remove)?;
            }
        }
        for name in &plan.policies_remove {
            let free = |state: &mut State| {
                state.maps.policies.remove(name);
            };
            self.host.write(free)?;
        }
        Ok(grows)
    }

    fn attach(&mut self) -> Result<(), DatapathError> {
        let gate = self.host.state().gate.take();
        if let Some(gate) = gate {
            gate.wait();
            gate.wait();
        }
        self.host.write(|state| state.attached = true)
    }

    fn reader(&self) -> Arc<dyn KernelReader> {
        self.host.state().readers += 1;
        Arc::new(FakeReader {
            host: self.host.clone(),
            options: self.options.clone(),
            missing_stats: BTreeSet::new(),
        })
    }

    fn set_host_defaults(&mut self, host: HostDefaults) -> Result<(), DatapathError> {
        self.host.write(|state| state.host = Some(host))
    }

    fn retry_statistics(&mut self) {}

    fn restore_tables(&mut self) -> Result<(), DatapathError> {
        {
            let state = self.host.state();
            if state.without_statistics.is_empty() && !state.control_arm_differs {
                return Ok(());
            }
        }
        self.host.write(|state| {
            state.without_statistics.clear();
            state.control_arm_differs = false;
        })
    }

    fn events(&self) -> Result<(events::Reader, events::SynAcks), DatapathError> {
        Err(refused())
    }

    fn walker(&self, _mode: walk::Mode) -> Result<walk::Walker, DatapathError> {
        Err(refused())
    }

    fn unlink(&mut self) -> Result<(), DatapathError> {
        self.host.write(|state| state.attached = false)
    }

    fn detach(self: Box<Self>) -> Result<Removed, DatapathError> {
        let mut state = self.host.state();
        state.attached = false;
        state.maps = MapState::default();
        Ok(Removed {
            links: 1,
            ..Removed::default()
        })
    }
}

impl KernelReader for FakeReader {
    fn attachment(&self) -> Attachment {
        let attached = self.host.state().attached;
        Attachment {
            attached,
            problem: (!attached).then(|| "the program is not attached".to_owned()),
            cgroup: self.options.cgroup.clone(),
            is_root: false,
            program_id: None,
            accepted: None,
        }
    }

    fn attachment_during_change(&self) -> Attachment {
        self.attachment()
    }

    fn compare_tables(
        &self,
        desired: &MapState,
        cursor: &mut Cursor,
        _count: usize,
    ) -> Result<Differences, DatapathError> {
        let state = self.readable()?;
        let mut differences = Differences::default();
        for (name, policy) in &desired.policies {
            let policy_name = name.clone();
            if state.maps.policies.get(name) != Some(policy) {
                differences.push(Difference::Policy {
                    policy: policy_name,
                });
            } else if state.without_statistics.contains(name) {
                differences.push(Difference::Statistics {
                    policy: policy_name,
                });
            }
        }
        if state.control_arm_differs {
            differences.push(Difference::ControlArm);
        }
        cursor.policy = 0;
        Ok(differences)
    }

    fn compare_entries(
        &self,
        desired: &MapState,
        cursor: &mut Cursor,
        count: usize,
    ) -> Result<Differences, DatapathError> {
        let mut state = self.readable()?;
        let all = in_trie_order(&state.maps.entries, !cursor.is_ipv6);
        let begin = cursor
            .after
            .and_then(|after| all.iter().position(|(cidr, _)| *cidr == after));
        let rest = &all[begin.map_or(0, |begin| begin + 1)..];
        let found = &rest[..rest.len().min(count)];
        let found: Vec<_> = found
            .iter()
            .map(|(cidr, name)| (*cidr, Some(name)))
            .collect();
        let is_last = found.len() == rest.len();
        state.compared += found.len();
        let compared = cursor.compare(&found, is_last, &desired.entries);
        compared.map_err(|_| refused())
    }

    fn finds(
        &self,
        desired: &MapState,
        cidrs: &[Cidr],
        policy: &PolicyName,
    ) -> Result<bool, DatapathError> {
        let state = self.readable()?;
        let same = |cidr: &Cidr| {
            let wanted = desired.entries.get(cidr).map(|entry| entry.policy);
            wanted.is_none() || wanted == state.maps.entries.get(cidr).map(|entry| entry.policy)
        };
        let wanted = desired.policies.get(policy);
        let is_there = wanted.is_none() || wanted == state.maps.policies.get(policy);
        Ok(is_there && cidrs.iter().all(same))
    }

    fn hits(&self) -> Result<Vec<(Cidr, u32)>, DatapathError> {
        Ok(Vec::new())
    }

    fn hits_of(&self, _cidr: &Cidr) -> Result<u32, DatapathError> {
        Ok(0)
    }

    fn statistics(
        &self,
        each: &mut dyn FnMut(&PolicyName, &ArmStatistics),
    ) -> Result<(), DatapathError> {
        let mut state = self.readable()?;
        state.statistics_read += state.maps.policies.len();
        for (name, policy) in &state.maps.policies {
            each(name, &state.counted(name, policy));
        }
        Ok(())
    }

    fn statistics_of(&self, policy: &PolicyName) -> Result<Option<ArmStatistics>, DatapathError> {
        let mut state = self.readable()?;
        state.statistics_read += 1;
        let found = state.maps.policies.get(policy);
        Ok(found.map(|found| state.counted(policy, found)))
    }

    fn fallbacks(&self, policy: &PolicyName) -> Result<[Fallback; 2], DatapathError> {
        let state = self.readable()?;
        Ok(state.fallbacks.get(policy).copied().unwrap_or_default())
    }

    fn discovered(&self) -> Result<Vec<(Prefix, Discovered)>, DatapathError> {
        Ok(self.readable()?.discovered.clone())
    }

    fn discovered_since(&self) -> Option<SystemTime> {
        self.host.state().discovered_since
    }

    fn owners(&self) -> BTreeMap<(u32, u32), PolicyName> {
        BTreeMap::new()
    }

    fn missing_stats(&self) -> &BTreeSet<PolicyName> {
        &self.missing_stats
    }

    fn limited(&self) -> Option<&str> {
        None
    }
}
