//! SYN schedules of connecting sockets. These must end before the program is detached: an
//! established connection with their TCP_RTO_MAX_MS would give up after 15 s.

use std::{
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use aya::maps::{Array, MapData, MapError};
use rto_agent_common::{LAYOUT_VERSION, Policy, maps, policy_flags, retrying::SOCKETS};
use rto_agent_core::progress;

use super::{
    pins,
    pins::open,
    tables::{Tables, retrying_error, set_stopped, wait_for_programs},
};
use crate::datapath::{
    DatapathError,
    error::{map as map_error, pin_error},
};

/// Whether new connections still get the policies' timers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NewConnections {
    /// Yes: the program stays during a restart of the daemon.
    Treated,
    /// No: the program will be detached.
    LeftAlone,
}

/// Interval between reads of the number of schedules.
const POLL: Duration = Duration::from_millis(20);

/// A set of pins with its number of schedules.
struct Scheduling {
    dir: PathBuf,
    layout: Option<u32>,
    retrying: Array<MapData, u64>,
}

impl Scheduling {
    /// The pin sets below `pin_dir`. A set whose map cannot be opened is logged and skipped.
    fn all(pin_dir: &Path) -> Result<Vec<Self>, DatapathError> {
        let sets = pins::pin_sets(pin_dir).map_err(|e| pin_error(pin_dir, e))?;
        // A version without schedules has no such map.
        let with = sets
            .into_iter()
            .filter(|set| set.path.join(maps::RETRYING).exists());
        let open = |set: pins::PinSet| -> Result<Self, DatapathError> {
            Ok(Self {
                retrying: open!(set.path, maps::RETRYING, Array),
                layout: set.layout,
                dir: set.path,
            })
        };
        let opened = with.filter_map(|set| {
            let path = set.path.clone();
            open(set)
                .inspect_err(|e| tracing::warn!("{}: {e}", path.display()))
                .ok()
        });
        Ok(opened.collect())
    }

    fn sockets(&self) -> Result<u64, DatapathError> {
        self.retrying.get(&SOCKETS, 0).map_err(retrying_error)
    }
}

/// The number of connecting sockets with a schedule, in all pin sets below `pin_dir`.
pub fn schedules(pin_dir: &Path) -> Result<u64, DatapathError> {
    let all = Scheduling::all(pin_dir)?;
    all.iter()
        .try_fold(0u64, |sum, one| Ok(sum.saturating_add(one.sockets()?)))
}

/// Stops new schedules in the programs pinned below `pin_dir`, and waits up to `limit` until the
/// running schedules have ended. Returns the number of sockets that still have one.
pub fn stop_schedules(
    pin_dir: &Path,
    new: NewConnections,
    limit: Duration,
) -> Result<u64, DatapathError> {
    let mut all = Scheduling::all(pin_dir)?;
    for one in &mut all {
        set_stopped(&mut one.retrying, true)?;
    }
    // After this, programs that had not seen the change yet have counted their schedules.
    wait_for_programs();
    if new == NewConnections::LeftAlone {
        for one in &all {
            if one.layout == Some(LAYOUT_VERSION) && one.sockets()? != 0 {
                leave_alone(&one.dir)?;
            }
        }
    }
    let deadline = Instant::now() + limit;
    loop {
        progress::step();
        let left = schedules(pin_dir)?;
        if left == 0 || Instant::now() >= deadline {
            return Ok(left);
        }
        thread::sleep(POLL);
    }
}

/// Allows schedules again after [`stop_schedules`], if the programs stay attached.
pub fn resume_schedules(pin_dir: &Path) -> Result<(), DatapathError> {
    Scheduling::all(pin_dir)?
        .iter_mut()
        .try_for_each(|one| set_stopped(&mut one.retrying, false))
}

/// Resets the number of schedules after a walk over all sockets, which ended them all.
pub fn forget_schedules(pin_dir: &Path) -> Result<(), DatapathError> {
    Scheduling::all(pin_dir)?
        .iter_mut()
        .try_for_each(|one| one.retrying.set(SOCKETS, &0, 0).map_err(retrying_error))
}

/// Makes all entries point to unused policies.
fn leave_alone(dir: &Path) -> Result<(), DatapathError> {
    let mut tables = Tables::open(dir)?;
    for (slot, policy) in tables.read.policies()? {
        let flags = policy.flags & !policy_flags::IN_USE;
        tables.set_policy(slot, &Policy { flags, ..policy })?;
    }
    Ok(())
}
