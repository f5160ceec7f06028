//! Long operations with threads of their own. A job posts its result; nothing polls it.

use std::{io, sync::mpsc, time::Instant};

use rto_agent_core::wire::{kernel::Verdict, types::WalkView};

use super::Message;

pub(super) mod comparing;
pub(super) mod events;
pub(super) mod probing;
pub mod walk;

/// The result of a job.
#[derive(Debug)]
pub enum Done {
    /// A walk over open sockets; `view` is `None` if its thread panicked.
    Walk {
        /// The walk's number.
        number: u64,
        /// What the walk did.
        view: Option<Box<WalkView>>,
    },
    /// A probe; `None` if its thread panicked.
    Probe(Option<Verdict>),
    /// A comparison of a part of the maps; `None` if the engine changed them during it.
    Compare(Option<comparing::Round>),
}

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
        let post = Post {
            messages: messages.clone(),
            done: Some(died),
            _running: running,
        };
        let thread = std::thread::Builder::new().name(name.to_owned());
        thread.spawn(move || {
            let mut post = post;
            post.done = Some(work());
        })?;
        Ok(Self { ended })
    }

    /// Waits for the thread to end; returns whether it did before the deadline.
    fn wait(&mut self, deadline: Instant) -> bool {
        let left = deadline.saturating_duration_since(Instant::now());
        self.ended.recv_timeout(left) == Err(mpsc::RecvTimeoutError::Disconnected)
    }
}

/// Posts a thread's result when dropped, even after a panic.
struct Post {
    messages: mpsc::Sender<Message>,
    done: Option<Done>,
    _running: mpsc::Sender<()>,
}

impl Drop for Post {
    fn drop(&mut self) {
        if let Some(done) = self.done.take() {
            // The engine may be gone.
            let _stopped = self.messages.send(Message::Done(done));
        }
    }
}
