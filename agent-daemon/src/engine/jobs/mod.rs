//! Long operations with threads of their own. A job posts its result; nothing polls it.

use std::{
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::mpsc,
    time::Instant,
};

use super::handle::{Done, Message};

pub(super) mod comparing;
pub(super) mod events;
pub(super) mod probing;
pub mod walk;

/// A running thread.
pub(super) struct Job {
    /// Never receives a message: it is disconnected when the thread ends.
    ended: mpsc::Receiver<()>,
}

impl Job {
    /// Starts a thread that does `work` and posts its result, or `died` if it panics.
    fn begin(
        name: &str,
        messages: &mpsc::Sender<Message>,
        died: Done,
        work: impl FnOnce() -> Done + Send + 'static,
    ) -> io::Result<Self> {
        let (running, ended) = mpsc::channel();
        let messages = messages.clone();
        let thread = std::thread::Builder::new().name(name.to_owned());
        thread.spawn(move || {
            let done = catch_unwind(AssertUnwindSafe(work)).unwrap_or(died);
            // The engine may be gone.
            let _ = messages.send(Message::Done(done));
            drop(running);
        })?;
        Ok(Self { ended })
    }

    /// Waits for the thread to end; returns whether it did before the deadline.
    fn wait(&mut self, deadline: Instant) -> bool {
        let left = deadline.saturating_duration_since(Instant::now());
        self.ended.recv_timeout(left) == Err(mpsc::RecvTimeoutError::Disconnected)
    }
}
