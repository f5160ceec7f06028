//! Whether the engine is at a change, for how long, and whether it gets on with it.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use crate::progress::Progress;

/// Seen by who asks; it guards nothing, so that relaxed ordering will do.
#[derive(Clone)]
pub(super) struct Busy {
    epoch: Instant,
    /// Microseconds from the epoch to its beginning, and one; 0 if it is at none.
    since: Arc<AtomicU64>,
    progress: Progress,
}

/// One change; it ends when this is dropped, which must be before it is answered. One within another is a part
/// of that.
pub(super) struct Change(Option<Arc<AtomicU64>>);

impl Default for Busy {
    fn default() -> Self {
        Self {
            epoch: Instant::now(),
            since: Arc::default(),
            progress: Progress::default(),
        }
    }
}

impl Busy {
    /// What this thread does from now on is the engine's work.
    pub(super) fn work_here(&self) {
        self.progress.count_this_thread();
    }

    /// How many steps there were, of which a new change is one.
    pub(super) fn steps(&self) -> u64 {
        self.progress.steps()
    }

    pub(super) fn begin(&self) -> Change {
        self.progress.step();
        let begin =
            self.since
                .compare_exchange(0, self.now() + 1, Ordering::Relaxed, Ordering::Relaxed);
        Change(begin.is_ok().then(|| self.since.clone()))
    }

    /// How long it has been at it.
    pub(super) fn time(&self) -> Duration {
        match self.since.load(Ordering::Relaxed).checked_sub(1) {
            Some(since) => Duration::from_micros(self.now().saturating_sub(since)),
            None => Duration::ZERO,
        }
    }

    fn now(&self) -> u64 {
        u64::try_from(self.epoch.elapsed().as_micros()).unwrap_or(u64::MAX - 1)
    }
}

impl Drop for Change {
    fn drop(&mut self) {
        if let Some(since) = &self.0 {
            since.store(0, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_has_an_end() {
        let busy = Busy::default();
        assert_eq!(busy.time(), Duration::ZERO);
        let change = busy.begin();
        assert_eq!(busy.steps(), 1);
        std::thread::sleep(Duration::from_millis(2));
        drop(busy.begin());
        assert!(busy.clone().time() >= Duration::from_millis(2));
        drop(change);
        assert_eq!(busy.time(), Duration::ZERO);
    }
}
