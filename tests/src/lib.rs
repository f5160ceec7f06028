//! Helpers of the integration tests that are not in the test bed: expected values, output of the agent's commands, and
//! features of a kernel.

pub mod browser;
#[cfg(test)]
mod budget;
#[path = "../declared.rs"]
mod declared;
pub mod features;
pub mod handshakes;
pub mod held_thread;
pub mod in_kernel;
pub mod lab;
pub mod load;
pub mod locked_socket;
pub mod path;
pub mod pinned;
pub mod pty;
pub mod relay;
pub mod soak;
pub mod verifier;
pub mod watcher;

use std::{panic::resume_unwind, thread};

/// Runs one closure in another thread beside the other.
pub fn beside<A: Send, B>(
    other: impl FnOnce() -> anyhow::Result<A> + Send,
    own: impl FnOnce() -> anyhow::Result<B>,
) -> anyhow::Result<(A, B)> {
    thread::scope(|scope| {
        let other = scope.spawn(other);
        let own = own();
        let other = other.join().unwrap_or_else(|panic| resume_unwind(panic));
        Ok((other?, own?))
    })
}

/// Asserts that a text contains each of these parts.
#[track_caller]
pub fn assert_says(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "{part:?} is missing: {text}");
    }
}
