//! Progress of the current operation, for the watchdog, and its cancellation flag.
//!
//! Long operations count each step on the thread they run on. Only registered threads count,
//! because reads for clients on other threads do not show that the engine makes progress.

use std::{
    cell::RefCell,
    io::{self, Read, Write},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

thread_local! {
    static COUNTED: RefCell<Option<Progress>> = const { RefCell::new(None) };
}

/// The number of steps, and when the operation was cancelled. They guard no other data, so relaxed
/// ordering is enough.
#[derive(Clone, Debug, Default)]
pub struct Progress(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    steps: AtomicU64,
    stopped_at: OnceLock<Instant>,
}

/// The operation is unfinished, because the daemon is stopping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stopped;

impl Progress {
    /// Registers this thread: its steps count after this call.
    pub fn count_this_thread(&self) {
        COUNTED.set(Some(self.clone()));
    }

    /// The number of steps so far.
    pub fn steps(&self) -> u64 {
        self.0.steps.load(Ordering::Relaxed)
    }

    /// Counts one step.
    pub fn step(&self) {
        self.0.steps.fetch_add(1, Ordering::Relaxed);
    }

    /// Cancels the operation at its next [`checkpoint`].
    pub fn stop(&self) {
        let _ = self.0.stopped_at.set(Instant::now()); // The first stop counts.
    }

    /// When the operation was cancelled.
    pub fn stopped_at(&self) -> Option<Instant> {
        self.0.stopped_at.get().copied()
    }

    /// Whether the operation was cancelled.
    pub fn is_stopping(&self) -> bool {
        self.stopped_at().is_some()
    }
}

/// Counts a step of this thread. Long operations call it at least once a second.
pub fn step() {
    COUNTED.with_borrow(|counted| {
        if let Some(progress) = counted {
            progress.step();
        }
    });
}

/// A step between two parts of a change where the change may be interrupted: the next start
/// completes or undoes it.
pub fn checkpoint() -> Result<(), Stopped> {
    step();
    let is_stopping =
        |counted: &Option<Progress>| counted.as_ref().is_some_and(Progress::is_stopping);
    if COUNTED.with_borrow(is_stopping) {
        Err(Stopped)
    } else {
        Ok(())
    }
}

/// Iterates over `all`, and counts a step from time to time.
pub fn stepping<T>(all: impl IntoIterator<Item = T>) -> impl Iterator<Item = T> {
    /// One or two milliseconds of work.
    const EVERY: usize = 1 << 12;
    all.into_iter().enumerate().map(|(i, one)| {
        if i % EVERY == 0 {
            step();
        }
        one
    })
}

/// A reader or writer that counts a step for each piece.
pub struct Stepwise<R>(pub R);

impl<R: Read> Read for Stepwise<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.0.read(buffer);
        step();
        read
    }
}

impl<W: Write> Write for Stepwise<W> {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        let written = self.0.write(buffer);
        step();
        written
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_counts_steps_of_its_thread() {
        let progress = Progress::default();
        step();
        assert_eq!(progress.steps(), 0);
        let counted = progress.clone();
        let counting = std::thread::spawn(move || {
            counted.count_this_thread();
            step();
            let mut text = String::new();
            Stepwise(&b"text"[..]).read_to_string(&mut text).unwrap();
            assert_eq!(text, "text");
        });
        counting.join().unwrap();
        let steps = progress.steps();
        assert!(steps >= 2, "{steps}");
        step();
        assert_eq!(progress.steps(), steps);
    }

    #[test]
    fn interrupted_work_ends_at_checkpoint() {
        let progress = Progress::default();
        let counted = progress.clone();
        let working = std::thread::spawn(move || {
            counted.count_this_thread();
            assert_eq!(checkpoint(), Ok(()));
            assert_eq!(stepping(0..10_000).count(), 10_000);
            assert!(counted.steps() >= 3, "{}", counted.steps());
            counted.stop();
            checkpoint()
        });
        assert_eq!(working.join().unwrap(), Err(Stopped));
        // The work of another thread continues.
        progress.stop();
        assert_eq!(checkpoint(), Ok(()));
    }
}
