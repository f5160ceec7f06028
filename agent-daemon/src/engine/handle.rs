//! The engine's handle: sends messages to it and reads what it publishes.

use std::sync::{Arc, mpsc};

use rto_agent_core::{
    policy::PolicyName,
    progress::Progress,
    wire::{
        events::StreamItem,
        kernel::Verdict,
        tune::{TuneAction, TuneAnswer},
        types::{
            AddRequest, ApplyRequest, Caller, ChangeAnswer, DetachAnswer, DetachRequest,
            ReloadRequest, RemoveRequest, VerifyAnswer, WalkView,
        },
    },
};
use tokio::sync::{broadcast, oneshot, watch};

use rto_agent_kernel::datapath::DatapathError;

use super::{comparison::Comparison, config::EngineConfig, error::EngineError, snapshot::Snapshot};

/// The channel for an answer.
pub type Reply<T> = oneshot::Sender<Result<T, EngineError>>;

/// A message to the engine.
pub enum Message {
    /// `rto-agent add`.
    Add(Box<AddRequest>, Caller, Reply<ChangeAnswer>),
    /// `rto-agent remove`.
    Remove(RemoveRequest, Caller, Reply<ChangeAnswer>),
    /// `rto-agent reload`.
    Reload(ReloadRequest, Caller, Reply<ChangeAnswer>),
    /// `rto-agent detach`.
    Detach(DetachRequest, Caller, Reply<DetachAnswer>),
    /// `rto-agent attach`.
    Attach(Caller, Reply<ChangeAnswer>),
    /// `rto-agent apply`.
    Apply(ApplyRequest, Caller, Reply<WalkView>),
    /// The verdict of a probe that `rto-agent doctor` made.
    Probed(Verdict, Caller, Reply<()>),
    /// `rto-agent verify`, or a job found a difference in the kernel's maps.
    Verify(Reply<VerifyAnswer>),
    /// `rto-agent watch`: begins a stream of events.
    Watch(
        Option<PolicyName>,
        Reply<broadcast::Receiver<Arc<StreamItem>>>,
    ),
    /// `rto-agent tune freeze`, `resume` and `reset`.
    Tune(TuneAction, PolicyName, Caller, Reply<TuneAnswer>),
    /// Why the metrics are not served, or that they are.
    Metrics(Option<String>),
    /// A watcher has disconnected.
    Unwatched,
    /// A job has ended.
    Done(Done),
    /// The host was suspended: timers of this process did not run.
    Resumed,
    /// SIGHUP.
    Sighup,
    /// A watched file changed.
    FilesChanged,
    /// SIGTERM or SIGINT.
    Stop,
}

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
    Compare(Option<Result<Comparison, DatapathError>>),
}

/// The handle. Cheap to clone.
#[derive(Clone)]
pub struct Handle {
    messages: mpsc::Sender<Message>,
    snapshots: watch::Receiver<Arc<Snapshot>>,
    progress: Progress,
}

/// The engine's ends of a [`Handle`]'s channels.
pub struct Channels {
    pub(super) messages: mpsc::Receiver<Message>,
    /// For the engine's jobs.
    pub(super) sender: mpsc::Sender<Message>,
    pub(super) snapshots: watch::Sender<Arc<Snapshot>>,
    pub(super) progress: Progress,
}

/// Creates a handle, which can be shared before the engine has started.
#[must_use]
pub fn channels(config: &EngineConfig) -> (Channels, Handle) {
    let (sender, messages) = mpsc::channel();
    let (snapshots, seen) = watch::channel(Arc::new(Snapshot::starting(config)));
    let progress = Progress::default();
    let handle = Handle {
        messages: sender.clone(),
        snapshots: seen,
        progress: progress.clone(),
    };
    let channels = Channels {
        messages,
        sender,
        snapshots,
        progress,
    };
    (channels, handle)
}

impl Handle {
    /// A handle without an engine: the holder of the receiver answers; nothing is active.
    #[must_use]
    pub fn disconnected(config: &EngineConfig) -> (Self, mpsc::Receiver<Message>) {
        let (messages, receiver) = mpsc::channel();
        let snapshot = Arc::new(Snapshot::empty(config));
        let handle = Self {
            messages,
            snapshots: watch::Sender::new(snapshot).subscribe(),
            progress: Progress::default(),
        };
        (handle, receiver)
    }

    /// Sends a message and waits for the answer.
    ///
    /// # Errors
    ///
    /// The engine's error, or [`EngineError::Stopping`] if the engine is gone.
    pub async fn call<T>(
        &self,
        message: impl FnOnce(Reply<T>) -> Message,
    ) -> Result<T, EngineError> {
        let (reply, answer) = oneshot::channel();
        self.messages
            .send(message(reply))
            .map_err(|_| EngineError::Stopping)?;
        answer.await.map_err(|_| EngineError::Stopping)?
    }

    /// Stops the engine. It abandons the current operation at the next step from which a start can
    /// recover.
    pub fn stop(&self) {
        self.progress.stop();
        self.notify(Message::Stop);
    }

    /// Sends a message that has no answer. Ignored if the engine has stopped.
    pub fn notify(&self, message: Message) {
        let _ = self.messages.send(message);
    }

    /// The state after the last change. Never waits.
    #[must_use]
    pub fn snapshot(&self) -> Arc<Snapshot> {
        self.snapshots.borrow().clone()
    }

    /// As [`Self::snapshot`], once the engine has started.
    ///
    /// # Errors
    ///
    /// [`EngineError::Stopping`] if the start failed.
    pub async fn started(&self) -> Result<Arc<Snapshot>, EngineError> {
        let mut snapshots = self.snapshots.clone();
        let started = snapshots.wait_for(|snapshot| !snapshot.is_starting()).await;
        let started = started.map_err(|_| EngineError::Stopping)?;
        Ok(started.clone())
    }

    /// Snapshots as they are published.
    #[must_use]
    pub fn snapshots(&self) -> watch::Receiver<Arc<Snapshot>> {
        self.snapshots.clone()
    }

    /// Counts the engine's steps, and stops it.
    #[cfg(test)]
    pub(super) fn progress(&self) -> &Progress {
        &self.progress
    }

    /// A counter that changes whenever the engine makes progress.
    #[must_use]
    pub fn steps(&self) -> u64 {
        self.progress.steps()
    }
}
