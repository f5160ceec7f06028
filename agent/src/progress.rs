//! How far the engine's work has come, for whoever must know whether it still gets on.
//!
//! Long operations tell each step on the thread they run on. Only a thread whose steps are counted counts them: what
//! clients have read on other threads meanwhile says nothing about the engine.

use std::{
    cell::RefCell,
    io::{self, Read},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

thread_local! {
    static COUNTED: RefCell<Option<Progress>> = const { RefCell::new(None) };
}

/// A number of steps. It guards nothing, so that relaxed ordering will do.
#[derive(Clone, Debug, Default)]
pub(crate) struct Progress(Arc<AtomicU64>);

impl Progress {
    /// Counts this thread's steps from now on.
    pub(crate) fn count_this_thread(&self) {
        COUNTED.set(Some(self.clone()));
    }

    /// Steps so far.
    pub(crate) fn steps(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// One more.
    pub(crate) fn step(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// A step of this thread's: to be called by what can take long, every second at least.
pub(crate) fn step() {
    COUNTED.with_borrow(|counted| {
        if let Some(progress) = counted {
            progress.step();
        }
    });
}

/// A reader of which each piece is a step.
pub(crate) struct Stepwise<R>(pub(crate) R);

impl<R: Read> Read for Stepwise<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.0.read(buffer);
        step();
        read
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_steps_of_one_thread_count() {
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
}
