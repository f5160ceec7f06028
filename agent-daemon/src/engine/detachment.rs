//! Whether the program is detached, and how far a detachment has come.

use std::time::{Duration, Instant};

use rto_agent_core::{
    printable::counted,
    wire::types::{Caller, DetachAnswer, NotLasting},
};

use super::{
    error::{EngineError, refused},
    handle::Reply,
};

/// How often a draining program is looked at.
const DRAIN_INTERVAL: Duration = Duration::from_secs(1);

/// The state of a detachment.
pub(super) struct Detachment {
    /// The user that has detached the program.
    pub(super) by: Option<Caller>,
    pub(super) restoring: Option<Restoring>,
    /// Detached, but the program stays until no socket with its timers is connecting.
    pub(super) is_draining: bool,
}

/// A detachment whose sockets are being restored.
pub(super) struct Restoring {
    pub(super) reply: Reply<DetachAnswer>,
    pub(super) deadline: Instant,
    pub(super) not_lasting: Option<NotLasting>,
}

impl Detachment {
    /// Whether the program is attached, and no sockets are being restored.
    pub(super) const fn is_attached(&self) -> bool {
        self.by.is_none() && self.restoring.is_none()
    }

    /// Refuses other changes while sockets are being restored.
    pub(super) fn check_not_restoring(&self) -> Result<(), EngineError> {
        if self.restoring.is_some() {
            return refused("sockets are being restored; try again in a few seconds");
        }
        Ok(())
    }

    /// Time until a draining program or a restoration is to be looked at again.
    pub(super) fn until_next(&self) -> Option<Duration> {
        let drain = self.is_draining.then_some(DRAIN_INTERVAL);
        let restoring = self.restoring.as_ref();
        let restore = restoring.map(|all| all.deadline.saturating_duration_since(Instant::now()));
        drain.into_iter().chain(restore).min()
    }
}

/// A program stays for this many connecting sockets.
pub(super) fn draining(connecting: u64) -> String {
    let connections = connections(connecting);
    format!(
        "{connections} still connecting with a policy's timers: the program treats no others and is removed when they end, in five minutes at the latest"
    )
}

/// The same where no daemon is left to remove it.
#[must_use]
pub fn left_draining(connecting: u64) -> String {
    let connections = connections(connecting);
    format!(
        "{connections} still connecting with a policy's timers: the program stays attached for them and treats no others; \
         the next start or rto-agent detach removes it"
    )
}

fn connections(count: u64) -> String {
    let count = usize::try_from(count).unwrap_or(usize::MAX);
    counted(count, "connection", "connections")
}
