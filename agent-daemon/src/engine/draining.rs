//! Messages about a detached program that stays for connecting sockets.

use rto_agent_core::printable::counted;

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
