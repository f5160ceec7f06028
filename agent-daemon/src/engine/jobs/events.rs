//! Streams retransmissions to watchers: a thread reads the kernel's events while there are any
//! watchers.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};

use nix::time::{ClockId, clock_gettime};
use rto_agent_common::arm;
use rto_agent_core::{
    policy::{HostFacts, PolicyName},
    wire::events::{EventView, StreamItem},
};
use rto_agent_kernel::datapath::{Kernel, KernelReader, events::Reader};
use tokio::sync::{broadcast, watch};
use tracing::{info, warn};

use crate::engine::error::EngineError;

/// Lines kept for a slow watcher.
const BACKLOG: usize = 4096;
/// Longest delay until the thread notices that it must end.
const WAIT: Duration = Duration::from_millis(100);

/// The policies that own the kernel's slots.
pub(in crate::engine) type Owners = BTreeMap<(u32, u32), PolicyName>;

/// The thread, if it is running, and the channel for lines.
pub(in crate::engine) struct Events {
    lines: broadcast::Sender<Arc<StreamItem>>,
    owners: watch::Sender<Arc<Owners>>,
    reader: Option<Running>,
}

struct Running {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl Events {
    pub(in crate::engine) fn new() -> Self {
        Self {
            lines: broadcast::Sender::new(BACKLOG),
            owners: watch::Sender::new(Arc::default()),
            reader: None,
        }
    }

    /// Subscribes to lines from this moment.
    pub(in crate::engine) fn subscribe(
        &mut self,
        kernel: Option<&dyn Kernel>,
        host: &HostFacts,
    ) -> Result<broadcast::Receiver<Arc<StreamItem>>, EngineError> {
        let receiver = self.lines.subscribe();
        if let Some(kernel) = kernel {
            self.begin(kernel, host)?;
        }
        Ok(receiver)
    }

    /// Restarts the thread after the maps were re-created; watchers stay subscribed.
    pub(in crate::engine) fn resume(&mut self, kernel: &dyn Kernel, host: &HostFacts) {
        self.end();
        if self.lines.receiver_count() > 0
            && let Err(e) = self.begin(kernel, host)
        {
            warn!("retransmissions cannot be watched: {e}");
        }
    }

    fn begin(&mut self, kernel: &dyn Kernel, host: &HostFacts) -> Result<(), EngineError> {
        let goes_on = |r: &Running| !r.thread.is_finished() && !r.stop.load(Ordering::Relaxed);
        if self.reader.as_ref().is_some_and(goes_on) {
            return Ok(());
        }
        // The old thread switches the program off as it ends, so it must end before the new one
        // switches it on.
        self.end();
        let (reader, syn_acks) = kernel.events()?;
        self.owners.send_replace(Arc::new(kernel.reader().owners()));
        let stop = Arc::new(AtomicBool::new(false));
        let (lines, owners) = (self.lines.clone(), self.owners.subscribe());
        let (is_stopped, host) = (stop.clone(), *host);
        let thread = std::thread::Builder::new()
            .name("events".to_owned())
            .spawn(move || {
                let mut reader = reader;
                // On this thread, as it takes too long for the engine's.
                if let Err(e) = reader.tell_syn_acks(&syn_acks) {
                    info!(
                        "SYN-ACK retransmissions are reported only when their connection is \
                           established: {e}"
                    );
                }
                read(reader, &lines, &owners, &host, &is_stopped);
            })
            .map_err(EngineError::Thread)?;
        self.reader = Some(Running { stop, thread });
        Ok(())
    }

    /// Sends another kind of item to watchers.
    pub(in crate::engine) fn tell(&self, item: StreamItem) {
        let _ = self.lines.send(Arc::new(item));
    }

    /// Updates the owners of slots, as policies may have changed.
    pub(in crate::engine) fn policies_changed(&self, kernel: Option<&dyn KernelReader>) {
        if let Some(kernel) = kernel.filter(|_| self.reader.is_some()) {
            self.owners.send_replace(Arc::new(kernel.owners()));
        }
    }

    /// Ends the thread if there are no watchers, without waiting for it.
    pub(in crate::engine) fn end_if_unwatched(&mut self) {
        if self.lines.receiver_count() == 0
            && let Some(Running { stop, .. }) = &self.reader
        {
            stop.store(true, Ordering::Relaxed);
        }
    }

    /// Ends the thread, and waits for it.
    pub(in crate::engine) fn end(&mut self) {
        if let Some(Running { stop, thread }) = self.reader.take() {
            stop.store(true, Ordering::Relaxed);
            if thread.join().is_err() {
                warn!("the thread that reads retransmissions panicked");
            }
        }
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        self.end();
    }
}

fn read(
    mut reader: Reader,
    lines: &broadcast::Sender<Arc<StreamItem>>,
    owners: &watch::Receiver<Arc<Owners>>,
    host: &HostFacts,
    stop: &AtomicBool,
) {
    let mut lost_before = 0;
    while !stop.load(Ordering::Relaxed) {
        reader.wait(WAIT);
        let offset_ns = real_minus_monotonic_ns();
        let owners = owners.borrow().clone();
        // Events may arrive as fast as they are read: `stop` and lost events are checked in
        // between.
        for event in std::iter::from_fn(|| reader.take()).take(BACKLOG) {
            let slot = arm::slot(event.arm);
            let policy = owners.get(&(slot, event.generation)).cloned();
            let at_us = event.time_ns.saturating_add_signed(offset_ns) / 1000;
            if let Some(view) = EventView::of(&event, at_us, policy, host) {
                // Without a watcher the event is dropped.
                let _ = lines.send(Arc::new(StreamItem::Event(view)));
            }
        }
        match reader.lost() {
            Ok(lost) if lost > lost_before => {
                let lost_now = lost - lost_before;
                let _ = lines.send(Arc::new(StreamItem::Lost { lost: lost_now }));
                lost_before = lost;
            }
            Ok(_) => {}
            Err(e) => warn!("lost events cannot be counted: {e}"),
        }
    }
}

/// The difference between the time of day and CLOCK_MONOTONIC, nanoseconds.
fn real_minus_monotonic_ns() -> i64 {
    let ns = |clock| {
        clock_gettime(clock).map_or(0, |time| {
            i64::try_from(Duration::from(time).as_nanos()).unwrap_or(i64::MAX)
        })
    };
    ns(ClockId::CLOCK_REALTIME) - ns(ClockId::CLOCK_MONOTONIC)
}
