//! Draining: what must end before the program is unloaded.
//!
//! A socket that is connecting with a short initial RTO has doubled it at each timeout. Without the program its next
//! SYN would come late, or it would give up early. So the program stays until no such socket is connecting, and leaves
//! new connections to the kernel's own timers ([`Policy::draining`]).

use std::{
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use aya::maps::{Array, MapData, MapError};
use rto_agent_common::{
    LAYOUT_VERSION, maps, policy_flags,
    schedules::{DRAINING_SINCE_S, LEFT_SET, SOCKETS, STOPPED},
};
use rto_agent_core::progress;

use super::{
    pins,
    pins::open,
    tables::{Tables, schedules_error, wait_for_programs},
};
use crate::{
    datapath::{
        DatapathError,
        error::{map as map_error, pin_error},
    },
    kernel::clock::boottime_ms,
};

/// Interval between reads of the number of schedules.
const POLL: Duration = Duration::from_millis(20);
/// How long a program drains at most: much longer than connect() takes to give up by default. (Where another program
/// clears the callbacks, the end of an attempt is not counted.)
const MOST: Duration = Duration::from_secs(300);
/// How long a timer that is being armed when the shaping stops takes to get the socket's own options back. (1,102
/// detachments over 4,339 such timers: none late, none failed.)
const ARMED: Duration = Duration::from_millis(5);

/// A set of pins with its number of schedules.
struct Scheduling {
    dir: PathBuf,
    layout: Option<u32>,
    schedules: Array<MapData, u64>,
}

impl Scheduling {
    /// The pin sets below `pin_dir`. A set whose map cannot be opened is logged and skipped.
    fn all(pin_dir: &Path) -> Result<Vec<Self>, DatapathError> {
        let sets = pins::pin_sets(pin_dir).map_err(|e| pin_error(pin_dir, e))?;
        // A version without schedules has no such map.
        let with = sets
            .into_iter()
            .filter(|set| set.path.join(maps::SCHEDULES).exists());
        let open = |set: pins::PinSet| -> Result<Self, DatapathError> {
            Ok(Self {
                schedules: open!(set.path, maps::SCHEDULES, Array),
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

    /// Sockets with a schedule, for which the program must stay.
    fn sockets(&self) -> Result<u64, DatapathError> {
        let since_s = self.get(DRAINING_SINCE_S)?;
        if since_s != 0 && boottime_s().saturating_sub(since_s) > MOST.as_secs() {
            return Ok(0);
        }
        self.get(SOCKETS)
    }

    fn get(&self, index: u32) -> Result<u64, DatapathError> {
        self.schedules.get(&index, 0).map_err(schedules_error)
    }

    /// Notes when draining began.
    fn begin_draining(&mut self) -> Result<(), DatapathError> {
        if self.get(DRAINING_SINCE_S)? != 0 {
            return Ok(());
        }
        let now_s = boottime_s().max(1);
        self.schedules
            .set(DRAINING_SINCE_S, &now_s, 0)
            .map_err(schedules_error)
    }

    fn stop(&mut self) -> Result<(), DatapathError> {
        self.schedules.set(STOPPED, &1, 0).map_err(schedules_error)
    }
}

/// The number of connecting sockets with a schedule, in all pin sets below `pin_dir`.
pub fn connecting(pin_dir: &Path) -> Result<u64, DatapathError> {
    sum(&Scheduling::all(pin_dir)?, Scheduling::sockets)
}

/// How often a program below `pin_dir` has found the options of a moment still on a socket, so that it shapes no timer
/// any more.
pub fn left_set(pin_dir: &Path) -> Result<u64, DatapathError> {
    sum(&Scheduling::all(pin_dir)?, |one| one.get(LEFT_SET))
}

fn sum(
    all: &[Scheduling],
    of: impl Fn(&Scheduling) -> Result<u64, DatapathError>,
) -> Result<u64, DatapathError> {
    all.iter()
        .try_fold(0u64, |sum, one| Ok(sum.saturating_add(of(one)?)))
}

/// Makes the programs pinned below `pin_dir` leave new connections alone, and waits until the connections that have
/// begun are established or have lost their first SYN. Then waits up to `limit` until no socket with a schedule is
/// connecting. Returns the number of those that still are.
///
/// # Errors
///
/// If a map cannot be read or written. Policies may be draining then; the next change or start writes them again.
pub fn drain(pin_dir: &Path, limit: Duration) -> Result<u64, DatapathError> {
    let mut longest = Duration::ZERO;
    for mut one in Scheduling::all(pin_dir)? {
        if one.layout == Some(LAYOUT_VERSION) {
            one.begin_draining()?;
            longest = longest.max(leave_alone(&one.dir)?);
        }
    }
    // After this, programs that had not seen the change yet have ended.
    wait_for_programs();
    wait(longest);
    until_connected(pin_dir, limit)
}

/// Waits up to `limit` until no socket with a schedule is connecting; returns the number of those that still are.
pub fn until_connected(pin_dir: &Path, limit: Duration) -> Result<u64, DatapathError> {
    let deadline = Instant::now() + limit;
    let all = Scheduling::all(pin_dir)?;
    loop {
        progress::step();
        let left = sum(&all, Scheduling::sockets)?;
        if left == 0 || Instant::now() >= deadline {
            return Ok(left);
        }
        thread::sleep(POLL);
    }
}

fn boottime_s() -> u64 {
    boottime_ms() / 1000
}

fn wait(mut time: Duration) {
    while !time.is_zero() {
        progress::step();
        let step = time.min(POLL);
        thread::sleep(step);
        time -= step;
    }
}

/// Makes the programs pinned below `pin_dir` shape no timer any more, and waits until those being armed have the
/// sockets' own options again. The programs can then be detached at any moment. Attaching allows shaping again.
pub(super) fn stop_shaping(pin_dir: &Path) -> Result<(), DatapathError> {
    let mut all = Scheduling::all(pin_dir)?;
    all.iter_mut().try_for_each(Scheduling::stop)?;
    if !all.is_empty() {
        wait_for_programs();
        thread::sleep(ARMED);
    }
    Ok(())
}

/// Leaves only what connections under way need of each policy. Returns the longest of their shortened initial RTOs,
/// after which each of these connections is established or has a schedule.
fn leave_alone(dir: &Path) -> Result<Duration, DatapathError> {
    let mut longest = Duration::ZERO;
    let mut tables = Tables::open(dir)?;
    for (slot, policy) in tables.read.policies()? {
        if policy.flags & policy_flags::DRAINING != 0 {
            continue;
        }
        let initial_rto = Duration::from_micros(policy.initial_rto_us.into());
        if policy.initial_rto_jiffies != 0 && initial_rto < Duration::from_secs(1) {
            // A timer fires up to an eighth late.
            longest = longest.max(initial_rto * 9 / 8 + POLL);
        }
        tables.set_policy(slot, &policy.draining())?;
    }
    Ok(longest)
}
