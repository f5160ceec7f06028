//! Values that are published for, or read by, several threads.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use nix::time::{ClockId, clock_gettime};
use rto_agent_core::wire::stats::StatsAnswer;
use rto_agent_kernel::datapath::DatapathError;
use tokio::sync::watch;

/// A value that the engine or one of its jobs publishes for any reader.
pub(in crate::engine) type Published<T> = watch::Sender<Arc<T>>;

/// Statistics, or why they cannot be read.
pub(super) type Counted = Result<Arc<StatsAnswer>, Arc<DatapathError>>;

/// A holder that panicked has left the previous value.
pub(in crate::engine) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A value that is read for many clients, by one at a time. A slow reading is reused for nine times
/// its duration, so that unprivileged clients in a loop take at most a tenth of a processor.
pub(in crate::engine) struct Reused<T>(Mutex<Option<Read<T>>>);

struct Read<T> {
    at: Instant,
    /// Processor time: waiting for a processor does not count.
    took: Duration,
    value: T,
}

impl<T> Default for Reused<T> {
    fn default() -> Self {
        Self(Mutex::new(None))
    }
}

impl<T: Clone> Reused<T> {
    /// The last value if it `serves`, or a new reading.
    pub(super) fn get(&self, serves: impl Fn(&T) -> bool, read: impl FnOnce() -> T) -> T {
        const QUICK: Duration = Duration::from_millis(5);
        let mut last = locked(&self.0);
        if let Some(last) = &*last
            && last.took > QUICK
            && last.at.elapsed() < 9 * last.took
            && serves(&last.value)
        {
            return last.value.clone();
        }
        let begin = processor_time();
        let value = read();
        *last = Some(Read {
            at: Instant::now(),
            took: processor_time().saturating_sub(begin),
            value: value.clone(),
        });
        value
    }

    /// The next reading is a new one.
    #[cfg(test)]
    pub(in crate::engine) fn forget(&self) {
        *locked(&self.0) = None;
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
    fn waiting_reader_gets_fresh_value() {
        let reused = Reused::default();
        let waiting = || {
            std::thread::sleep(Duration::from_millis(20));
            1
        };
        assert_eq!(reused.get(|_| true, waiting), 1);
        assert_eq!(reused.get(|_| true, || 2), 2);
    }

    #[test]
    fn fast_reading_is_repeated() {
        let reused = Reused::default();
        let read_in = |ms| {
            *locked(&reused.0) = Some(Read {
                at: Instant::now() + Duration::from_secs(3600),
                took: Duration::from_millis(ms),
                value: 1,
            });
            reused.get(|_| true, || 2)
        };
        assert_eq!((read_in(5), read_in(6)), (2, 1));
    }
}
