//! The engine's address: messages to it, and what it publishes.

use std::sync::{Arc, mpsc};

use tokio::sync::{broadcast, oneshot, watch};

use super::{EngineConfig, EngineError, jobs::Done, snapshot::Snapshot};
use crate::{
    kernel::interference::Verdict,
    policy::PolicyName,
    progress::Progress,
    wire::{
        events::StreamItem,
        experiments::{ExperimentAnswer, StartRequest},
        tune::{TuneAction, TuneAnswer},
        types::{
            AddRequest, ApplyRequest, Caller, ChangeAnswer, DetachAnswer, DetachRequest,
            ReloadRequest, RemoveRequest, VerifyAnswer, WalkView,
        },
    },
};

/// Where an answer goes.
pub type Reply<T> = oneshot::Sender<Result<T, EngineError>>;

/// What the engine is asked.
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
    /// `rto-agent experiment start`.
    StartExperiment(
        PolicyName,
        Box<StartRequest>,
        Caller,
        Reply<ExperimentAnswer>,
    ),
    /// `rto-agent experiment stop`.
    StopExperiment(PolicyName, Caller, Reply<ExperimentAnswer>),
    /// `rto-agent experiment clear`.
    ClearExperiment(PolicyName, Caller, Reply<ExperimentAnswer>),
    /// What `rto-agent doctor` found by its own probe.
    Probed(Verdict, Caller, Reply<()>),
    /// `rto-agent verify`, or a job has found a difference in the kernel's maps.
    Verify(Reply<VerifyAnswer>),
    /// `rto-agent watch`: retransmissions from this moment.
    Watch(
        Option<PolicyName>,
        Reply<broadcast::Receiver<Arc<StreamItem>>>,
    ),
    /// `rto-agent tune freeze`, `resume` and `reset`.
    Tune(TuneAction, PolicyName, Caller, Reply<TuneAnswer>),
    /// A watcher has disconnected.
    Unwatched,
    /// A job of the engine's own has ended.
    Done(Done),
    /// SIGHUP.
    Sighup,
    /// A watched file changed.
    FilesChanged,
    /// SIGTERM or SIGINT.
    Stop,
}

/// The engine's address.
#[derive(Clone)]
pub struct Handle {
    messages: mpsc::Sender<Message>,
    snapshots: watch::Receiver<Arc<Snapshot>>,
    progress: Progress,
}

/// The engine's ends of the channels of a [`Handle`].
pub struct Channels {
    pub(super) messages: mpsc::Receiver<Message>,
    /// For its own jobs.
    pub(super) sender: mpsc::Sender<Message>,
    pub(super) snapshots: watch::Sender<Arc<Snapshot>>,
    pub(super) progress: Progress,
}

/// An engine's address, which can be given to others before the engine has started.
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
    /// A handle without an engine: the holder of the receiver answers; nothing is in force.
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
    /// What the engine answers, or [`EngineError::Stopping`] if it is gone.
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

    /// Has the engine end: what it is at is left at the next step at which the next start can take it up.
    pub fn stop(&self) {
        self.progress.stop();
        self.notify(Message::Stop);
    }

    /// Sends a message that has no answer; a stopped engine needs none.
    pub fn notify(&self, message: Message) {
        let _stopped = self.messages.send(message);
    }

    /// The state after the last change. Never waits.
    #[must_use]
    pub fn snapshot(&self) -> Arc<Snapshot> {
        self.snapshots.borrow().clone()
    }

    /// The same, once the engine has started.
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

    /// The snapshots, as they come.
    #[must_use]
    pub fn snapshots(&self) -> watch::Receiver<Arc<Snapshot>> {
        self.snapshots.clone()
    }

    /// What its work is counted and stopped by.
    #[cfg(test)]
    pub(super) fn progress(&self) -> &Progress {
        &self.progress
    }

    /// How far its work has come: another number each time that it has got on.
    #[must_use]
    pub fn steps(&self) -> u64 {
        self.progress.steps()
    }
}
