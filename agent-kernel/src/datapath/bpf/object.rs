//! Loads the compiled object.

use std::path::Path;

use aya::{Btf, Ebpf, EbpfLoader, include_bytes_aligned};
use rto_agent_common::{Offsets, SocketTypes, discovery::Discovered, globals, maps};

use crate::{
    datapath::{Cause, DatapathError},
    kernel::kfuncs,
};

/// The compiled eBPF programs, built by `cargo xtask ebpf`.
pub static OBJECT: &[u8] = include_bytes_aligned!("../rto-agent.bpf.o");

/// Values that are written into the object before the kernel loads it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct LoadParams {
    /// Capacity of each trie; `None` keeps the object's, for existing maps.
    pub(super) trie_entries: Option<u32>,
    /// Whether peers without an entry are recorded.
    pub(super) discovers: bool,
    /// [`globals::HZ`].
    pub(super) hz: u32,
    /// [`globals::STATISTICS_MODE`].
    pub(super) statistics_mode: u8,
    /// [`globals::FEATURES`].
    pub(super) features: u8,
    /// [`globals::SAMPLING`].
    pub(super) sampling: u32,
    /// [`globals::RTT_INTERVAL_NS`].
    pub(super) rtt_interval_ns: u64,
    /// [`globals::SHAPES_SYNS`].
    pub(super) shapes_syns: u8,
    /// [`globals::PROBE_COOKIE`].
    pub(super) probe_cookie: u64,
    /// [`globals::OFFSETS`]; only the programs at LSM hooks and iterators read them.
    pub(super) offsets: Offsets,
    /// [`globals::SOCKET_TYPES`]; the sock_ops program reads them, and some of them the iterator.
    pub(super) socket_types: SocketTypes,
    /// BTF ids of the functions of [`kfunc`], in the same order; `None` if programs must do
    /// without.
    pub(super) kfuncs: Option<[u32; 2]>,
    /// Whether no policy will be used, so that small maps are enough.
    pub(super) without_policies: bool,
}

impl LoadParams {
    /// Capacity of a map, if it differs from the object's.
    pub(super) fn max_entries(&self, map: &str) -> Option<u32> {
        match map {
            maps::ENTRIES_V4 | maps::ENTRIES_V6 => self.trie_entries,
            maps::DISCOVERED if !self.discovers => Some(1),
            maps::DISCOVERED => Some(Discovered::ROOM),
            maps::POLICIES | maps::STATISTICS | maps::WALK_COUNTS if self.without_policies => {
                Some(1)
            }
            _ => None,
        }
    }
}

/// Creates the maps and relocates the programs; nothing is verified or attached yet. With `pins`,
/// uses the maps pinned there; creates and pins missing maps.
pub(super) fn load(pins: Option<&Path>, values: &LoadParams) -> Result<Ebpf, DatapathError> {
    let (offsets, socket_types) = (values.offsets.values(), values.socket_types.values());
    let mut loader = EbpfLoader::new();
    loader
        .override_global(globals::HZ, &values.hz, true)
        .override_global(globals::STATISTICS_MODE, &values.statistics_mode, true)
        .override_global(globals::FEATURES, &values.features, true)
        .override_global(globals::SAMPLING, &values.sampling, true)
        .override_global(globals::RTT_INTERVAL_NS, &values.rtt_interval_ns, true)
        .override_global(globals::SHAPES_SYNS, &values.shapes_syns, true)
        .override_global(globals::PROBE_COOKIE, &values.probe_cookie, true);
    for (name, offset) in globals::OFFSETS.into_iter().zip(&offsets) {
        loader.override_global(name, offset, true);
    }
    for (name, value) in globals::SOCKET_TYPES.into_iter().zip(&socket_types) {
        loader.override_global(name, value, true);
    }
    for name in maps::ALL.into_iter().chain([maps::WALK_COUNTS]) {
        if let Some(entries) = values.max_entries(name) {
            loader.map_max_entries(name, entries);
        }
    }
    if let Some(dir) = pins {
        for name in maps::ALL {
            loader.map_pin_path(name, dir.join(name));
        }
    }
    loader
        .load(&kfuncs::resolved(OBJECT, values.kfuncs))
        .map_err(load_error)
}

/// The kernel's BTF, for programs that attach by type.
pub(super) fn kernel_types() -> Result<Btf, DatapathError> {
    Btf::from_sys_fs().map_err(|e| DatapathError::Types(Cause::new(e)))
}

/// The program of this name, as the given type.
macro_rules! program {
    ($ebpf:expr, $name:expr, $kind:ty) => {
        $ebpf
            .program_mut($name)
            .ok_or_else(|| object::missing_program($name))
            .and_then(|program| <&mut $kind>::try_from(program).map_err(object::load_error))
    };
}
pub(super) use program;

/// The error for a refused object.
pub(super) fn load_error(error: impl std::error::Error + Send + Sync + 'static) -> DatapathError {
    DatapathError::Load(Cause::new(error))
}

pub(super) fn missing_program(name: &str) -> DatapathError {
    DatapathError::Load(Cause::new(format!("the object has no program {name}")))
}
