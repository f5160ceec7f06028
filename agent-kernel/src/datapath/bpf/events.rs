//! Events of the program, which are read while a client watches.

use std::{
    os::fd::AsFd as _,
    path::{Path, PathBuf},
    time::Duration,
};

use aya::{
    Ebpf,
    maps::{Array, MapData, RingBuf},
    programs::BtfTracePoint,
};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rto_agent_common::{
    PROGRAM_SYN_ACK,
    event::{CONTROL, Event, EventControl, LIVE, LOST, ON},
    maps,
};

use super::{
    accepted, object,
    object::{LoadParams, program},
    tables::open_events,
    walk,
};
use crate::datapath::{DatapathError, Options, error::map as map_error};

/// The tracepoint; its type in the kernel's BTF is `btf_trace_<name>`.
const TRACEPOINT: &str = "tcp_retransmit_synack";

/// Reads events. The program reports events as long as a reader exists.
pub struct Reader {
    ring: RingBuf<MapData>,
    control: Array<MapData, EventControl>,
    /// Events lost before this reader started.
    lost_before: u64,
    /// The program at the tracepoint; detached when dropped.
    syn_acks: Option<Ebpf>,
}

/// What attaching the program at the tracepoint needs. Separate from the reader, because reading
/// the kernel's types takes long.
#[derive(Clone, Debug)]
pub struct SynAcks {
    dir: PathBuf,
    options: Options,
}

impl Reader {
    /// Opens the maps pinned in `dir` and enables events. Discards events that an earlier reader
    /// left.
    pub(super) fn open(dir: &Path) -> Result<Self, DatapathError> {
        let (ring, control) = open_events(dir)?;
        let mut reader = Self {
            ring,
            control,
            lost_before: 0,
            syn_acks: None,
        };
        while reader.ring.next().is_some() {}
        reader.lost_before = reader.counted()?;
        reader.switch(ON, 0)?;
        Ok(reader)
    }

    /// Also reports SYN-ACKs when they are retransmitted, rather than only once their connection is
    /// established.
    ///
    /// # Errors
    ///
    /// If this kernel refuses the program; all other events are still reported.
    pub fn tell_syn_acks(&mut self, with: &SynAcks) -> Result<(), DatapathError> {
        let mut ebpf = object::load(
            Some(&with.dir),
            &LoadParams {
                offsets: accepted::request_offsets()?,
                ..with.options.load_params()
            },
        )?;
        let program = program!(ebpf, PROGRAM_SYN_ACK, BtfTracePoint)?;
        program
            .load(TRACEPOINT, &object::kernel_types()?)
            .map_err(object::load_error)?;
        program.attach().map_err(object::load_error)?;
        self.switch(LIVE, walk::filter(&with.options.cgroup)?)?;
        self.syn_acks = Some(ebpf);
        Ok(())
    }

    /// Waits for events, at most this long.
    pub fn wait(&self, limit: Duration) {
        let limit = PollTimeout::try_from(limit).unwrap_or(PollTimeout::MAX);
        let mut fds = [PollFd::new(self.ring.as_fd(), PollFlags::POLLIN)];
        // A signal only shortens the wait.
        let _ = poll(&mut fds, limit);
    }

    /// The next event, if there is one. (Not named `next`, because this cannot be an iterator.)
    pub fn take(&mut self) -> Option<Event> {
        Event::from_bytes(&self.ring.next()?)
    }

    /// Events lost for lack of room since this reader was opened.
    pub fn lost(&self) -> Result<u64, DatapathError> {
        Ok(self.counted()?.saturating_sub(self.lost_before))
    }

    fn counted(&self) -> Result<u64, DatapathError> {
        let counts = self.control.get(&LOST, 0);
        counts
            .map(|counts| counts.lost)
            .map_err(|e| map_error(maps::EVENT_CONTROL, e))
    }

    fn switch(&mut self, on: u32, cgroup: u64) -> Result<(), DatapathError> {
        set(&mut self.control, on, cgroup)
    }
}

impl SynAcks {
    pub(super) fn new(dir: &Path, options: &Options) -> Self {
        Self {
            dir: dir.to_owned(),
            options: options.clone(),
        }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        // If this fails, events only fill the ring without a reader, and the next reader discards
        // them.
        let _ = self.switch(0, 0);
    }
}

/// Disables events in the program of the maps pinned in `dir`: a killed daemon may have left them
/// enabled.
pub(super) fn silence(dir: &Path) -> Result<(), DatapathError> {
    set(&mut open_events(dir)?.1, 0, 0)
}

fn set(
    control: &mut Array<MapData, EventControl>,
    on: u32,
    cgroup: u64,
) -> Result<(), DatapathError> {
    let value = EventControl {
        on,
        cgroup,
        ..EventControl::default()
    };
    control
        .set(CONTROL, &value, 0)
        .map_err(|e| map_error(maps::EVENT_CONTROL, e))
}
