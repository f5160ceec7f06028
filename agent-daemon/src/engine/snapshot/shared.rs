//! State shared by all snapshots of an engine: the kernel's epoch, and what was last read from it.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, RwLock, TryLockError, Weak,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use nix::time::{ClockId, clock_gettime};
use rto_agent_core::wire::stats::StatsAnswer;
use rto_agent_kernel::datapath::DatapathError;

use super::Snapshot;
use crate::engine::harm::Harms;

/// A value that the engine or one of its jobs publishes for any reader.
#[derive(Clone, Debug, Default)]
pub(in crate::engine) struct Published<T>(Arc<RwLock<Arc<T>>>);

impl<T: Clone> Published<T> {
    pub(in crate::engine) fn get(&self) -> Arc<T> {
        // A writer that panicked has left a complete value.
        let value = self.0.read().unwrap_or_else(PoisonError::into_inner);
        value.clone()
    }

    pub(in crate::engine) fn set(&self, value: T) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(value);
    }

    pub(in crate::engine) fn change(&self, change: impl FnOnce(&mut T)) {
        let mut value = self.0.write().unwrap_or_else(PoisonError::into_inner);
        // Copied only while a reader holds it.
        change(Arc::make_mut(&mut value));
    }
}

/// State shared by all snapshots of an engine.
#[derive(Default)]
pub(in crate::engine) struct Shared {
    /// Odd from the first write of a change until its snapshot is published; each change gets a new
    /// value.
    epoch: AtomicU64,
    newest: Mutex<Weak<Snapshot>>,
    pub(in crate::engine) statistics: Reused<(u64, Counted)>,
    /// The last statistics read while the engine was not changing the kernel.
    pub(super) counted: Mutex<Option<Arc<StatsAnswer>>>,
    /// What the counters showed when they were last read.
    pub(in crate::engine) harms: Mutex<Harms>,
    pub(super) holds: Reused<(u64, Option<bool>)>,
}

/// Statistics, or why they cannot be read.
pub(in crate::engine) type Counted = Result<Arc<StatsAnswer>, Arc<DatapathError>>;

impl Shared {
    pub(super) fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::SeqCst)
    }

    pub(super) fn newest(&self) -> Option<Arc<Snapshot>> {
        locked(&self.newest).upgrade()
    }

    /// Marks the beginning of a change, unless one has begun. Publishing the next snapshot ends it.
    pub(in crate::engine) fn begin(&self) {
        self.epoch.fetch_or(1, Ordering::SeqCst);
    }

    /// The epoch of the next snapshot: that after the change, if one has begun.
    pub(in crate::engine) fn next_epoch(&self) -> u64 {
        let epoch = self.epoch();
        epoch + (epoch & 1)
    }

    /// Ends a change, if one has begun, as its snapshot is published.
    pub(in crate::engine) fn published(&self, snapshot: &Arc<Snapshot>) {
        *locked(&self.newest) = Arc::downgrade(snapshot);
        self.epoch.store(snapshot.epoch, Ordering::SeqCst);
        if snapshot.reader.is_none() {
            // The next maps count from 0.
            *locked(&self.counted) = None;
            *locked(&self.harms) = Harms::default();
        } else if locked(&self.counted).is_none() {
            // Serves readers during the next change. An error is returned to the next client.
            let _kept = snapshot.stats();
        }
    }
}

/// A holder that panicked has left the previous value.
pub(in crate::engine) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A value that is read for many clients. A slow reading is reused for nine times its duration, so
/// that unprivileged clients in a loop take at most a tenth of a processor. During a reading, other
/// callers get the last value, or wait if it does not `serve`.
pub(in crate::engine) struct Reused<T> {
    reading: Mutex<()>,
    last: Mutex<Option<Read<T>>>,
}

#[derive(Clone)]
struct Read<T> {
    at: Instant,
    /// Processor time: waiting for a processor does not count.
    took: Duration,
    value: T,
}

impl<T> Default for Reused<T> {
    fn default() -> Self {
        Self {
            reading: Mutex::default(),
            last: Mutex::new(None),
        }
    }
}

impl<T: Clone> Reused<T> {
    /// The last value if it `serves`, or a new reading.
    pub(super) fn get(&self, serves: impl Fn(&T) -> bool, read: impl FnOnce() -> T) -> T {
        const QUICK: Duration = Duration::from_millis(5);
        let last = || {
            let last = locked(&self.last).clone();
            last.filter(|last| last.took > QUICK && serves(&last.value))
        };
        let _reading = match self.reading.try_lock() {
            Ok(reading) => reading,
            Err(TryLockError::Poisoned(e)) => e.into_inner(),
            Err(TryLockError::WouldBlock) => match last() {
                Some(last) => return last.value,
                None => locked(&self.reading),
            },
        };
        if let Some(last) = last()
            && last.at.elapsed() < 9 * last.took
        {
            return last.value;
        }
        let begin = processor_time();
        let value = read();
        *locked(&self.last) = Some(Read {
            at: Instant::now(),
            took: processor_time().saturating_sub(begin),
            value: value.clone(),
        });
        value
    }

    /// The next reading is a new one.
    #[cfg(test)]
    pub(in crate::engine) fn forget(&self) {
        *locked(&self.last) = None;
    }
}

/// Processor time used by this thread.
fn processor_time() -> Duration {
    // This clock always exists.
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map_or(Duration::ZERO, Duration::from)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::EngineConfig;

    #[test]
    fn slow_reading_is_reused() {
        let reused = Reused::default();
        let slow = |value| {
            move || {
                let end = processor_time() + Duration::from_millis(20);
                while processor_time() < end {}
                value
            }
        };
        let any = |_: &i32| true;
        assert_eq!(reused.get(any, slow(1)), 1);
        assert_eq!(reused.get(any, slow(2)), 1);
        // A value that does not serve is read again.
        assert_eq!(reused.get(|last| *last != 1, slow(3)), 3);
        assert_eq!(reused.get(|last| *last != 3, || 4), 4);
        assert_eq!(reused.get(any, || 5), 5);
    }

    #[test]
    fn reading_after_a_wait_is_fresh() {
        let reused = Reused::default();
        let waiting = || {
            std::thread::sleep(Duration::from_millis(20));
            1
        };
        assert_eq!(reused.get(|_| true, waiting), 1);
        assert_eq!(reused.get(|_| true, || 2), 2);
    }

    #[test]
    fn concurrent_reader_gets_the_last_reading() {
        let reused = Reused::default();
        let took = Duration::from_millis(20);
        let value = 1;
        *locked(&reused.last) = Some(Read {
            at: Instant::now().checked_sub(20 * took).unwrap(),
            took,
            value,
        });
        let reading = locked(&reused.reading);
        assert_eq!(reused.get(|_| true, || 2), 1);
        drop(reading);
        assert_eq!(reused.get(|_| true, || 2), 2);
    }

    #[test]
    fn reading_of_5_ms_is_repeated() {
        let reused = Reused::default();
        let read_in = |ms| {
            *locked(&reused.last) = Some(Read {
                at: Instant::now() + Duration::from_secs(3600),
                took: Duration::from_millis(ms),
                value: 1,
            });
            reused.get(|_| true, || 2)
        };
        assert_eq!((read_in(5), read_in(6)), (2, 1));
    }

    #[test]
    fn kernel_is_read_while_no_change_runs() {
        let shared = Arc::new(Shared::default());
        let publish = || {
            let snapshot = Arc::new(Snapshot {
                epoch: shared.next_epoch(),
                shared: shared.clone(),
                ..Snapshot::starting(&EngineConfig::for_tests())
            });
            shared.published(&snapshot);
            snapshot
        };
        let first = publish();
        assert!(first.is_current() && publish().is_current());
        // Without a write the epoch is unchanged.
        assert!(first.is_current());
        shared.begin();
        shared.begin();
        assert!(!first.is_current());
        let second = publish();
        assert!(!first.is_current() && second.is_current());
    }
}
