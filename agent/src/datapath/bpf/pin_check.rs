//! Whether every pin is the map, program or link that it should be: whoever may write the directory may have removed
//! one, or put another in its place.

use std::path::Path;

use aya::{maps::MapData, programs::ProgramInfo};
use rto_agent_common::{PROGRAM, maps};

use super::{link::Link, pins, tables::Tables};
use crate::kernel::{bpf::program_info, link};

/// The kernel's ids of what should be pinned.
#[derive(Clone, Debug, Default)]
pub(super) struct Pins {
    pub(super) maps: Vec<(&'static str, u32)>,
    pub(super) program: Option<u32>,
    /// By pin.
    pub(super) links: Vec<(&'static str, u32)>,
}

impl Pins {
    pub(super) fn of(tables: &Tables, link: Option<&Link>, clone_link: Option<u32>) -> Self {
        let links = [
            link.map(|link| (pins::LINK, link.id)),
            clone_link.map(|id| (pins::CLONE_LINK, id)),
        ];
        Self {
            maps: tables.ids().to_vec(),
            program: link.map(|link| link.program_id),
            links: links.into_iter().flatten().collect(),
        }
    }

    /// What is wrong with the first that is not as it should be.
    pub(super) fn problem(&self, dir: &Path) -> Option<String> {
        let maps = self.maps.iter().map(|(name, id)| {
            let map = MapData::from_pin(dir.join(name)).and_then(|map| map.info());
            (*name, *id, map.ok().map(|info| info.id()))
        });
        let program = self.program.map(|id| {
            let info = ProgramInfo::from_pin(dir.join(pins::PROGRAM));
            (pins::PROGRAM, id, info.ok().map(|info| info.id()))
        });
        let links = self.links.iter().map(|(name, id)| {
            let link = link::Link::from_pin(&dir.join(name)).and_then(|link| link.id());
            (*name, *id, link.ok())
        });
        let mut all = maps.chain(program).chain(links);
        let wrong = all.find(|(_, id, found)| *found != Some(*id));
        let (name, id, found) = wrong?;
        let path = dir.join(name);
        let path = path.display();
        Some(match found {
            Some(found) => format!("the pin {path} is of another object (id {found}, not {id})"),
            None => format!("the pin {path} is gone, or no longer a pin of its kind"),
        })
    }
}

/// The maps that a program uses, by their names. What is pinned beside it may be another's.
pub(super) struct OwnMaps(Vec<u32>);

impl OwnMaps {
    /// Of the program pinned in `dir`; `None` if there is none, or it is none of ours.
    pub(super) fn pinned(dir: &Path) -> Option<Self> {
        let program = ProgramInfo::from_pin(dir.join(pins::PROGRAM)).ok()?;
        let is_ours = program.name() == PROGRAM.as_bytes();
        let ids = program.map_ids().ok()??;
        is_ours.then_some(Self(ids))
    }

    /// The first pin in `dir` that is none of them.
    pub(super) fn foreign_pin(&self, dir: &Path) -> Option<&'static str> {
        maps::ALL
            .into_iter()
            .find(|name| self.open_pin(dir, name).is_none())
    }

    /// The map pinned there, if it is one of them.
    pub(super) fn open_pin(&self, dir: &Path, name: &str) -> Option<MapData> {
        let map = MapData::from_pin(dir.join(name)).ok()?;
        let info = map.info().ok()?;
        self.0.contains(&info.id()).then_some(map)
    }

    /// The one of this name, pinned or not (CAP_SYS_ADMIN).
    pub(super) fn open(&self, name: &str) -> Option<MapData> {
        let mut maps = self.0.iter().filter_map(|id| MapData::from_id(*id).ok());
        maps.find(|map| {
            let info = map.info();
            info.is_ok_and(|info| info.name() == name.as_bytes())
        })
    }
}

/// Whether a program may be the agent's, of whatever version: without CAP_SYS_ADMIN the kernel does not say. Another
/// one's link, pinned in the place of ours, is left alone.
pub(super) fn is_agents(program_id: u32) -> bool {
    let info = program_info(program_id);
    info.is_err() || info.is_ok_and(|info| info.name == PROGRAM)
}
