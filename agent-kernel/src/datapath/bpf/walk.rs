//! Walks over open sockets, with the iterator over the TCP sockets of one network namespace.

use std::{collections::BTreeMap, io::Read as _, os::unix::fs::MetadataExt as _, path::Path};

use aya::{
    Btf, Ebpf,
    maps::{Array, MapData},
    programs::Iter,
};
use rto_agent_common::{
    MAX_KEPT, NO_POLICY, PROGRAM_WALK, SLOTS, SockOpt, WalkControl, WalkCounts, maps, walk_mode,
};
use rto_agent_core::policy::PolicyName;

use super::{
    object,
    object::{LoadParams, program},
    pins,
    slots::Slots,
    tables::Tables,
};
use crate::{
    datapath::{
        Cause, DatapathError, Options, error,
        error::{attach_error, pin_error},
    },
    kernel::{btf, cgroup},
};

/// The type of iterator; its function in the kernel's BTF is `bpf_iter_<type>`.
const ITERATOR: &str = "tcp";

/// What a walk does to the sockets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Sets the options of its policy on each socket that an entry covers.
    Apply,
    /// The same, but only for sockets without a policy.
    ApplyToNew,
    /// Restores the options that the agent had changed.
    Restore,
}

/// A network namespace's defaults, which [`Mode::Restore`] sets on sockets whose former value the
/// kernel did not report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Defaults {
    /// `net.ipv4.tcp_rto_min_us`, microseconds; always 200,000 before Linux 6.11. The socket option
    /// takes at most 200,000.
    pub rto_min_us: u32,
    /// `net.ipv4.tcp_rto_max_ms`, milliseconds; always 120,000 before Linux 6.15.
    pub rto_max_ms: u32,
}

impl Defaults {
    fn by_option(self) -> [u32; MAX_KEPT] {
        std::array::from_fn(|index| match SockOpt::at(index) {
            SockOpt::RtoMin => self.rto_min_us,
            SockOpt::RtoMax => self.rto_max_ms,
            other => other.row().kept.map_or(0, |kept| kept.former),
        })
    }
}

/// The result of a walk in one network namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Walked {
    /// Counts by policy.
    pub policies: BTreeMap<PolicyName, WalkCounts>,
    /// Counts of sockets without a policy: no entry covers them, or when restoring, their policy is
    /// gone.
    pub others: WalkCounts,
}

/// The loaded program and its maps.
pub struct Walker {
    ebpf: Ebpf,
    control: Array<MapData, WalkControl>,
    counts: Array<MapData, WalkCounts>,
    names: BTreeMap<u32, PolicyName>,
    cgroup: u64,
    mode: Mode,
}

impl Walker {
    /// Loads the program over the maps pinned in `dir`, for sockets of a cgroup (its id, or
    /// [`WalkControl::ANY`]) and its descendants. Counts as the options say; without options it
    /// counts nothing. (When restoring, sockets with storage are included in any cgroup.)
    pub(super) fn load(
        dir: &Path,
        options: Option<&Options>,
        cgroup: u64,
        mode: Mode,
    ) -> Result<Self, DatapathError> {
        let types = btf::Btf::vmlinux().map_err(|e| DatapathError::Load(Cause::new(e)))?;
        let mut ebpf = object::load(
            Some(dir),
            &LoadParams {
                offsets: types
                    .offsets()
                    .map_err(|e| DatapathError::Load(Cause::new(e)))?,
                socket_types: types.socket_types(),
                trie_entries: Some(pinned_entries(dir)?),
                ..options.map(Options::load_params).unwrap_or_default()
            },
        )?;
        try_load(&mut ebpf, &object::kernel_types()?)?;
        let names = Slots::read(Tables::open(dir)?.read.policies()?.into_iter());
        let names = names
            .by_index()
            .into_iter()
            .map(|(index, name)| (index, name.clone()))
            .collect();
        Ok(Self {
            control: take(&mut ebpf, maps::WALK_CONTROL)?,
            counts: take(&mut ebpf, maps::WALK_COUNTS)?,
            ebpf,
            names,
            cgroup,
            mode,
        })
    }

    /// What the walk does.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Walks over the sockets of this thread's network namespace.
    ///
    /// # Errors
    ///
    /// If the kernel fails to run the iterator; changes so far stay.
    pub fn walk(&mut self, defaults: Defaults) -> Result<Walked, DatapathError> {
        let control = WalkControl {
            cgroup: self.cgroup,
            mode: match self.mode {
                Mode::Apply => walk_mode::APPLY,
                Mode::ApplyToNew => walk_mode::APPLY_TO_NEW,
                Mode::Restore => walk_mode::RESTORE,
            },
            reserved: 0,
            defaults: defaults.by_option(),
        };
        set(&mut self.control, maps::WALK_CONTROL, 0, control)?;
        for index in 0..SLOTS {
            if index == NO_POLICY || self.names.contains_key(&index) {
                set(
                    &mut self.counts,
                    maps::WALK_COUNTS,
                    index,
                    WalkCounts::default(),
                )?;
            }
        }
        self.run()?;
        let counts = |index: u32| {
            self.counts
                .get(&index, 0)
                .map_err(|e| error::map(maps::WALK_COUNTS, e))
        };
        let mut walked = Walked {
            others: counts(NO_POLICY)?,
            ..Walked::default()
        };
        for (index, name) in &self.names {
            let counts = counts(*index)?;
            if counts != WalkCounts::default() {
                walked.policies.insert(name.clone(), counts);
            }
        }
        Ok(walked)
    }

    fn run(&mut self) -> Result<(), DatapathError> {
        let program = program!(self.ebpf, PROGRAM_WALK, Iter)?;
        let id = program.attach().map_err(iterate_error)?;
        let link = program.take_link(id).map_err(iterate_error)?;
        let mut file = link.into_file().map_err(iterate_error)?;
        // The program writes no output; reading runs it.
        let mut nothing = [0u8; 64];
        loop {
            match file.read(&mut nothing) {
                Ok(0) => return Ok(()),
                Ok(_) => {}
                // The kernel's iterator returns after about a million sockets, and must be called
                // again.
                Err(e)
                    if matches!(
                        e.kind(),
                        std::io::ErrorKind::WouldBlock | std::io::ErrorKind::Interrupted
                    ) => {}
                Err(e) => return Err(iterate_error(e)),
            }
        }
    }
}

/// Walkers that restore options, one for each pin set that this version can read. Sockets without
/// storage belong to the agent only in `cgroup` and its descendants; without a cgroup they are left
/// alone.
pub fn for_restoring(
    pin_dir: &Path,
    cgroup: Option<&Path>,
    mode: Mode,
) -> Result<Vec<Walker>, DatapathError> {
    let cgroup = cgroup.and_then(|path| filter(path).ok());
    let cgroup = cgroup.unwrap_or(WalkControl::NONE);
    let sets = pins::pin_sets(pin_dir).map_err(|e| pin_error(pin_dir, e))?;
    sets.iter()
        .filter(|g| g.layout == Some(rto_agent_common::LAYOUT_VERSION))
        .map(|g| Walker::load(&g.path, None, cgroup, mode))
        .collect()
}

/// Lets the verifier check the program.
pub(super) fn try_load(ebpf: &mut Ebpf, types: &Btf) -> Result<(), DatapathError> {
    program!(ebpf, PROGRAM_WALK, Iter)?
        .load(ITERATOR, types)
        .map_err(object::load_error)
}

/// Capacity of the tries pinned in `dir`.
fn pinned_entries(dir: &Path) -> Result<u32, DatapathError> {
    let name = maps::ENTRIES_V4;
    MapData::from_pin(dir.join(name))
        .and_then(|map| Ok(map.info()?.max_entries()))
        .map_err(|e| error::map(name, e))
}

/// The cgroup id to compare with; [`WalkControl::ANY`] for the hierarchy's root, which contains
/// every socket.
pub(super) fn filter(path: &Path) -> Result<u64, DatapathError> {
    if cgroup::is_root(path) {
        return Ok(WalkControl::ANY);
    }
    std::fs::metadata(path)
        .map(|meta| meta.ino())
        .map_err(|e| attach_error(path, e))
}

fn take<T: aya::Pod>(
    ebpf: &mut Ebpf,
    name: &'static str,
) -> Result<Array<MapData, T>, DatapathError> {
    ebpf.take_map(name)
        .ok_or_else(|| error::map(name, "is not in the object"))?
        .try_into()
        .map_err(|e: aya::maps::MapError| error::map(name, e))
}

fn set<T: aya::Pod>(
    map: &mut Array<MapData, T>,
    name: &'static str,
    index: u32,
    value: T,
) -> Result<(), DatapathError> {
    map.set(index, &value, 0).map_err(|e| error::map(name, e))
}

fn iterate_error(cause: impl std::error::Error + Send + Sync + 'static) -> DatapathError {
    DatapathError::Iterate(Cause::new(cause))
}
