//! Long operations with threads of their own. A job posts its result; nothing polls it.

use std::{io, sync::mpsc, time::Instant};

use super::Message;
use crate::{kernel::interference::Verdict, wire::types::WalkView};

pub(super) mod comparing;
pub(super) mod events;
pub(super) mod probing;
pub mod walk;

/// What a job ended with.
#[derive(Debug)]
pub enum Done {
    /// A walk over open sockets; no view if it died.
    Walk {
        /// Which.
        number: u64,
        /// What it did.
        view: Option<Box<WalkView>>,
    },
    /// A probe; no verdict if it died.
    Probe(Option<Verdict>),
    /// A part of the maps was compared; `None` if the engine changed them during the comparison.
    Compare(Option<comparing::Round>),
}

/// A thread that runs.
pub(super) struct Job {
    /// Nothing is ever sent: its other end goes with the thread.
    ended: mpsc::Receiver<()>,
}

impl Job {
    /// Has a thread do `work` and post what comes of it, or `died`.
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

    /// Waits for its end; whether it came in time.
    fn wait(&mut self, deadline: Instant) -> bool {
        let left = deadline.saturating_duration_since(Instant::now());
        self.ended.recv_timeout(left) == Err(mpsc::RecvTimeoutError::Disconnected)
    }
}

/// Posts what a thread ended with, however it ended.
struct Post {
    messages: mpsc::Sender<Message>,
    done: Option<Done>,
    _running: mpsc::Sender<()>,
}

impl Drop for Post {
    fn drop(&mut self) {
        if let Some(done) = self.done.take() {
            // The engine may have gone.
            let _stopped = self.messages.send(Message::Done(done));
        }
    }
}
