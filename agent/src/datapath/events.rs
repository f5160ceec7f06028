//! Events of the program: read while somebody listens.

use std::{os::fd::AsFd as _, path::Path, time::Duration};

use aya::maps::{Array, MapData, RingBuf};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rto_agent_common::{
    event::{Event, EventControl},
    maps,
};

use super::{
    DatapathError,
    error::map as map_error,
    tables::{describe, open_events},
};

/// Reads events. The program tells them as long as one of these exists.
pub struct Reader {
    ring: RingBuf<MapData>,
    control: Array<MapData, EventControl>,
    /// Lost before this reader began.
    lost_before: u64,
}

impl Reader {
    /// Opens the maps pinned in `dir` and has the program tell. What an earlier reader left is thrown
    /// away.
    pub(super) fn open(dir: &Path) -> Result<Self, DatapathError> {
        let (ring, control) = open_events(dir)?;
        let mut reader = Self {
            ring,
            control,
            lost_before: 0,
        };
        while reader.ring.next().is_some() {}
        reader.lost_before = reader.control()?.lost;
        reader.switch(true)?;
        Ok(reader)
    }

    /// Waits for events, so long at the most.
    pub fn wait(&self, limit: Duration) {
        let limit = PollTimeout::try_from(limit).unwrap_or(PollTimeout::MAX);
        let mut fds = [PollFd::new(self.ring.as_fd(), PollFlags::POLLIN)];
        // A signal only makes the wait shorter.
        let _woken = poll(&mut fds, limit);
    }

    /// The next event, if there is one. (`next` would be an iterator's, which this cannot be.)
    pub fn take(&mut self) -> Option<Event> {
        let item = self.ring.next()?;
        let bytes: &[u8; size_of::<Event>()] = (*item).try_into().ok()?;
        Some(decode(bytes))
    }

    /// Events for which there was no room since it was opened.
    ///
    /// # Errors
    ///
    /// If the map cannot be read.
    pub fn lost(&self) -> Result<u64, DatapathError> {
        Ok(self.control()?.lost.saturating_sub(self.lost_before))
    }

    fn control(&self) -> Result<EventControl, DatapathError> {
        self.control
            .get(&0, 0)
            .map_err(|e| map_error(maps::EVENT_CONTROL, describe(&e)))
    }

    fn switch(&mut self, on: bool) -> Result<(), DatapathError> {
        let control = EventControl {
            on: on.into(),
            ..self.control()?
        };
        self.control
            .set(0, &control, 0)
            .map_err(|e| map_error(maps::EVENT_CONTROL, describe(&e)))
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        // Without a reader events only fill the ring: no harm, and the next reader throws them away.
        let _off = self.switch(false);
    }
}

/// An event as the ring buffer has it.
fn decode(bytes: &[u8; size_of::<Event>()]) -> Event {
    // SAFETY: repr(C) of integers and bytes alone, every bit pattern is one; the copy need not be
    // aligned.
    unsafe { std::ptr::read_unaligned(bytes.as_ptr().cast()) }
}
