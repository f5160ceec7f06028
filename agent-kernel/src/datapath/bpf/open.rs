//! Opening a kernel: maps of an earlier run are adopted or kept, and missing maps are created.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
};

use rto_agent_common::{LAYOUT_VERSION, features, maps};
use rto_agent_core::{policy::Cidr, wire::kernel::Found};

use super::{
    events,
    kernel::BpfKernel,
    link::Link,
    object,
    object::{LoadParams, OBJECT},
    pin_check::{OwnMaps, has_frozen},
    pins,
    slots::Slots,
    statistics::prepare,
    tables::{TRIES, Tables},
    tries::Tries,
};
use crate::{
    datapath::{DatapathError, Options, error::pin_error},
    kernel::pinned::Pinned,
};

/// Finds or creates the maps. Active policies do not change. If the same program is attached
/// with more capacity than requested (the tries had grown), it is adopted.
///
/// # Errors
///
/// If the pin directory cannot be used or a map cannot be created; pins created so far are
/// removed.
pub fn open(mut options: Options) -> Result<BpfKernel, DatapathError> {
    let pin_dir = &options.pin_dir;
    let pin_dir_error = |cause| DatapathError::PinDir {
        path: pin_dir.clone(),
        cause,
    };
    pins::create_pin_dir(pin_dir).map_err(pin_dir_error)?;
    let mut pin_sets = pins::pin_sets(pin_dir).map_err(pin_dir_error)?;
    remove_stale_staging(&mut pin_sets);

    let same = (0..=features::ALL).flat_map(|features| {
        let options = Options {
            features,
            ..options.clone()
        };
        let constants = options.constants();
        let sets = pins::with_capacity(&pin_sets, OBJECT, &constants, options.max_entries);
        sets.into_iter()
            .map(move |(room, dir)| (features, room, dir))
    });
    let in_force = same
        .collect::<Vec<_>>()
        .into_iter()
        .find_map(|(features, room, dir)| {
            let link = Link::in_force(dir, &options.cgroup).filter(|link| link.is_of(dir))?;
            if has_frozen(dir) {
                return None;
            }
            let foreign = OwnMaps::pinned(dir)?.foreign_pin(dir);
            if let Some(name) = foreign {
                let path = dir.join(name);
                tracing::warn!(
                    "the pin {} is not the map that the attached program uses: re-creating the \
                 pins",
                    path.display()
                );
                return None;
            }
            let tables = Tables::open(dir).ok()?;
            Some((features, room, dir.to_owned(), link, tables))
        });
    let (found, dir, mut tables, former_hits, link) = match in_force {
        Some((features, room, dir, link, tables)) => {
            options.max_entries = room;
            options.features = features;
            (Found::Adopted, dir, tables, HashMap::new(), Some(link))
        }
        None => {
            let staging = new_staging(&options.pin_dir)?;
            let staged = stage(&options, &pin_sets, &staging);
            let (found, tables, former_hits) = staged.inspect_err(|_| {
                // The first error is returned; the next start removes a leftover directory.
                let _ = pins::remove_pin_set(&staging); // The next start removes it.
            })?;
            (found, staging, tables, former_hits, None)
        }
    };
    let policies = tables.read.policies()?;
    let mut former_link = None;
    if link.is_none() {
        // Connections keep the policies that they began with.
        for (_, policy) in &policies {
            options.features |= policy.features();
        }
        let mut sets = pin_sets.iter();
        former_link = sets.find_map(|g| Link::in_force(&g.path, &options.cgroup));
    }
    let slots = Slots::read(policies.into_iter());
    events::silence(&dir)?;
    tables.set_host_defaults(options.host_defaults)?;
    Ok(BpfKernel {
        missing_stats: prepare(&mut tables, &slots, options.statistics)?,
        former_hits,
        dir,
        found,
        tables,
        slots,
        was_in_force: link.is_some(),
        link,
        former_link,
        unlinked: false,
        hook: None,
        options,
    })
}

/// Pins in `staging` the maps of the newest usable pin set, and creates the missing ones. If
/// the tries are new, also returns the hits of the former tries.
fn stage(
    options: &Options,
    pin_sets: &[pins::PinSet],
    staging: &Path,
) -> Result<(Found, Tables, HashMap<Cidr, u32>), DatapathError> {
    let mut kept = Kept::Nothing;
    let mut former_hits = HashMap::new();
    // An earlier detach kept a set without a link if it could not restore all sockets, because
    // the set's maps contain their former options. A set that is attached takes precedence.
    let of_layout = pin_sets.iter().filter(|g| g.layout == Some(LAYOUT_VERSION));
    let (in_force, kept_maps): (Vec<_>, Vec<_>) = of_layout.partition(|g| is_in_use(&g.path));
    for set in in_force.into_iter().chain(kept_maps) {
        let former_tries;
        (kept, former_tries) = keep_maps(&set.path, staging, &options.load_params())?;
        if let Some(tries) = former_tries {
            match tries.hits() {
                Ok(hits) => former_hits = hits.into_iter().collect(),
                Err(e) => tracing::warn!("the hits of entries are lost: {e}"),
            }
        }
        if kept != Kept::Nothing {
            break;
        }
    }
    let found = match (kept, pin_sets.is_empty()) {
        (Kept::All | Kept::Some, _) => Found::MapsKept,
        (Kept::Nothing, true) => Found::Nothing,
        (Kept::Nothing, false) => Found::Replaced,
    };
    if kept != Kept::All {
        object::load(Some(staging), &options.load_params())?;
    }
    Ok((found, Tables::open(staging)?, former_hits))
}

/// Which maps [`keep_maps`] kept.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kept {
    All,
    /// Only some: the others have a different size.
    Some,
    Nothing,
}

/// Also pins the maps of `from` in `to`, if each has the layout of this version; otherwise pins
/// none. Uses the maps of the program pinned in `from`, even if other maps are pinned in their
/// places. Maps of a different size are not kept; tries that are not kept are returned.
fn keep_maps(
    from: &Path,
    to: &Path,
    wanted: &LoadParams,
) -> Result<(Kept, Option<Tries>), DatapathError> {
    let unusable = |name: &str, why: &str| {
        let path = from.join(name);
        tracing::warn!(
            "the pin {} is {why}: none of the maps in {} is used",
            path.display(),
            from.display()
        );
        Ok((Kept::Nothing, None))
    };
    let Some(own) = OwnMaps::pinned(from) else {
        return unusable(pins::PROGRAM, "not the agent's program");
    };
    let mut pinned = Vec::new();
    let mut other_sizes = Vec::new();
    for name in maps::ALL {
        let pin = own.open_pin(from, name);
        let is_frozen = Pinned::open(&from.join(name)).is_ok_and(|map| map.is_frozen());
        if is_frozen && !TRIES.contains(&name) {
            unpin(&pinned)?;
            return unusable(name, "frozen (BPF_MAP_FREEZE)");
        }
        if pin.is_none() {
            let path = from.join(name);
            tracing::warn!(
                "the pin {} is not the program's map; re-creating it",
                path.display()
            );
        }
        let Some(map) = pin.or_else(|| own.open(name)) else {
            unpin(&pinned)?;
            return unusable(
                name,
                "not the program's map, and the program's map cannot be opened",
            );
        };
        let path = to.join(name);
        if let Some(wanted) = wanted.max_entries(name)
            && (is_frozen || map.info().is_ok_and(|info| info.max_entries() != wanted))
        {
            other_sizes.push(name);
        }
        map.pin(&path).map_err(|e| pin_error(&path, e))?;
        if let Some(made) = pins::made(&from.join(name)) {
            pins::set_made(&path, made);
        }
        pinned.push(path);
    }
    if Tables::open(to).is_err() {
        unpin(&pinned)?;
        return unusable("", "of another version");
    }
    if other_sizes.is_empty() {
        return Ok((Kept::All, None));
    }
    let mut tries = None;
    if other_sizes.iter().any(|name| TRIES.contains(name)) {
        tries = Some(Tries::open(to)?);
        other_sizes.extend(TRIES);
        other_sizes.sort_unstable();
        other_sizes.dedup();
    }
    let remade: Vec<_> = other_sizes.iter().map(|name| to.join(name)).collect();
    unpin(&remade)?;
    Ok((Kept::Some, tries))
}

fn unpin(pins: &[PathBuf]) -> Result<(), DatapathError> {
    pins.iter()
        .try_for_each(|path| std::fs::remove_file(path).map_err(|e| pin_error(path, e)))
}

/// Removes unfinished sets of a killed start or growth: this start may need the memory of their
/// maps.
fn remove_stale_staging(pin_sets: &mut Vec<pins::PinSet>) {
    // A set with a link only lacks its name; its program may be attached.
    let is_unfinished =
        |set: &mut pins::PinSet| set.is_staging() && !pins::is_own(&set.path, pins::LINK);
    for set in pin_sets.extract_if(.., is_unfinished) {
        let path = set.path.display();
        match pins::remove_pin_set(&set.path) {
            Ok(()) => tracing::info!(%path, "removed unfinished pins of a killed daemon"),
            Err(e) => tracing::warn!(
                "{path}: {e}; an unfinished pin of a killed daemon cannot be \
                                      removed"
            ),
        }
    }
}

pub(super) fn new_staging(pin_dir: &Path) -> Result<PathBuf, DatapathError> {
    let staging = pins::unique(pin_dir, "staging", "");
    pins::create_pin_dir(pin_dir)
        .and_then(|()| pins::create_private_dir(&staging))
        .map_err(|e| pin_error(&staging, e))?;
    Ok(staging)
}

/// Whether the attached program uses the maps pinned in `dir`.
fn is_in_use(dir: &Path) -> bool {
    Link::at(dir).is_some_and(|link| link.is_of(dir))
}
