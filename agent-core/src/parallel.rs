//! Spreads short, large computations over all processors.

use std::{
    num::NonZero,
    sync::{Mutex, PoisonError},
    thread,
};

use crate::progress;

/// Memory bandwidth limits the speed: more threads gain nothing.
const MAX_THREADS: usize = 8;
/// Parts with fewer elements are not worth a thread.
const LEAST: usize = 1 << 14;

/// How many threads are worth starting for pieces of work.
pub fn threads(pieces: usize) -> usize {
    let processors = thread::available_parallelism().map_or(1, NonZero::get);
    processors.min(MAX_THREADS).min(pieces).max(1)
}

/// Calls `work` on equal parts of a slice, in parallel.
pub(crate) fn in_parts<T: Send>(all: &mut [T], work: impl Fn(&mut [T]) + Sync) {
    let threads = threads(all.len() / LEAST);
    if threads < 2 {
        return work(all);
    }
    let size = all.len().div_ceil(threads);
    map(all.chunks_mut(size).collect(), work);
}

/// Applies `work` to each piece, in parallel; results are in the order of the pieces.
pub fn map<T: Send, R: Send>(pieces: Vec<T>, work: impl Fn(T) -> R + Sync) -> Vec<R> {
    map_by(thread::Builder::new, pieces, work)
}

/// With at most `threads` threads, or as many as can be started.
fn map_by<T: Send, R: Send>(
    builder: impl Fn() -> thread::Builder,
    pieces: Vec<T>,
    work: impl Fn(T) -> R + Sync,
) -> Vec<R> {
    let threads = threads(pieces.len());
    if threads < 2 {
        return pieces.into_iter().map(work).collect();
    }
    let queue = Mutex::new(pieces.into_iter().enumerate());
    // A thread that panicked while it held the lock has left the queue consistent.
    let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).next();
    let run = || -> Vec<(usize, R)> {
        std::iter::from_fn(next)
            .inspect(|_| progress::step())
            .map(|(i, piece)| (i, work(piece)))
            .collect()
    };
    let mut done: Vec<(usize, R)> = thread::scope(|scope| {
        // If no thread can be started (pids.max, TasksMax), this thread does all the work.
        let others = (1..threads).map_while(|_| builder().spawn_scoped(scope, run).ok());
        let others: Vec<_> = others.collect();
        let mut done = run();
        for other in others {
            match other.join() {
                Ok(more) => done.extend(more),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        done
    });
    done.sort_by_key(|(i, _)| *i);
    done.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_once_and_in_order() {
        let squares = map((0..1000u32).collect(), |i| i * i);
        assert_eq!(squares, (0..1000).map(|i| i * i).collect::<Vec<_>>());
        assert!(map(Vec::<u32>::new(), |i| i).is_empty());
        let mut all: Vec<u32> = (0..100_000).collect();
        in_parts(&mut all, |part| part.iter_mut().for_each(|i| *i += 1));
        assert_eq!(all, (1..100_001).collect::<Vec<_>>());
        in_parts(&mut [0u8; 0], |_| {});
    }

    #[test]
    fn without_another_thread_as_well() {
        // No memory is available for such a stack; the kernel returns the same error as at a limit
        // of threads.
        let none = || thread::Builder::new().stack_size(1 << 60);
        assert!(none().spawn(|| ()).is_err());
        let squares = map_by(none, (0..1000u32).collect(), |i| i * i);
        assert_eq!(squares, (0..1000).map(|i| i * i).collect::<Vec<_>>());
    }
}
