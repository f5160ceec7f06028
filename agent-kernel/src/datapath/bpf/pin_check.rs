//! Checks that every pin is the expected map, program or link: another process with write access to the directory may
//! have removed or replaced a pin.

use std::path::Path;

use aya::maps::MapData;
use rto_agent_common::{PROGRAM, maps};

use super::{accepted::Hook, link::Link, pins, tables::Tables};
use crate::kernel::pinned::{ObjectId, Pinned};

/// The expected objects by the names of their pins.
#[derive(Clone, Debug, Default)]
pub(super) struct Pins(Vec<(&'static str, ObjectId)>);

impl Pins {
    pub(super) fn of(tables: &Tables, link: Option<&Link>, hook: Option<&Hook>) -> Self {
        let maps = tables.ids().iter();
        let maps = maps.map(|(name, id)| (*name, ObjectId::Map(*id)));
        let program = link.map(|link| (pins::PROGRAM, ObjectId::Program(link.program_id)));
        let link = link.map(|link| (pins::LINK, ObjectId::Link(link.id)));
        let hook = hook.into_iter().flat_map(Hook::pins);
        Self(maps.chain(program).chain(link).chain(hook).collect())
    }

    /// The first pin that is missing or wrong.
    pub(super) fn problem(&self, dir: &Path) -> Option<String> {
        self.0.iter().find_map(|(name, wanted)| {
            let path = dir.join(name);
            match Pinned::open(&path) {
                Ok(found) if found.is_frozen() => Some(frozen(&path)),
                Ok(found) if found.id() == *wanted => None,
                Ok(found) => Some(format!(
                    "the pin {} refers to another object ({}, not {wanted})",
                    path.display(),
                    found.id()
                )),
                Err(e) => Some(format!("the pin {} is missing: {e}", path.display())),
            }
        })
    }
}

/// Why the maps must be created again.
fn frozen(path: &Path) -> String {
    format!(
        "the map {} is frozen: another process has made it read-only (BPF_MAP_FREEZE)",
        path.display()
    )
}

/// Whether a map pinned in `dir` under one of the agent's names is frozen.
pub(super) fn has_frozen(dir: &Path) -> bool {
    let mut names = maps::ALL.into_iter();
    names.any(|name| Pinned::open(&dir.join(name)).is_ok_and(|map| map.is_frozen()))
}

/// The maps that a program uses. Other maps may be pinned beside it.
pub(super) struct OwnMaps(Vec<u32>);

impl OwnMaps {
    /// The maps of the program pinned in `dir`; `None` if no program of the agent is pinned there.
    pub(super) fn pinned(dir: &Path) -> Option<Self> {
        let program = Pinned::open(&dir.join(pins::PROGRAM)).ok()?;
        let (name, ids) = program.program().ok()?;
        (name == PROGRAM).then_some(Self(ids))
    }

    /// The first pin in `dir` that is not one of these maps.
    pub(super) fn foreign_pin(&self, dir: &Path) -> Option<&'static str> {
        maps::ALL
            .into_iter()
            .find(|name| self.open_pin(dir, name).is_none())
    }

    /// Opens a pinned map, if it is one of these maps.
    pub(super) fn open_pin(&self, dir: &Path, name: &str) -> Option<MapData> {
        let pinned = Pinned::open(&dir.join(name)).ok()?;
        match pinned.id() {
            ObjectId::Map(id) if self.0.contains(&id) => MapData::from_fd(pinned.into_fd()).ok(),
            _ => None,
        }
    }

    /// Opens the map of this name, pinned or not (CAP_SYS_ADMIN).
    pub(super) fn open(&self, name: &str) -> Option<MapData> {
        let mut maps = self.0.iter().filter_map(|id| MapData::from_id(*id).ok());
        maps.find(|map| {
            let info = map.info();
            info.is_ok_and(|info| info.name() == name.as_bytes())
        })
    }
}
