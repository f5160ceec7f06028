//! Helpers of the integration tests that are not in the test bed: expected values, output of the agent's commands, and
//! features of a kernel.

pub mod brakes;
pub mod browser;
#[cfg(test)]
mod budget;
#[path = "../declared.rs"]
mod declared;
pub mod features;
pub mod handshakes;
pub mod held_thread;
pub mod lab;
pub mod load;
pub mod locked_socket;
pub mod path;
pub mod policy_slot;
pub mod pty;
pub mod relay;
pub mod soak;
pub mod verifier;
pub mod watcher;

/// Asserts that a text contains each of these parts.
#[track_caller]
pub fn assert_says(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "{part:?} is missing: {text}");
    }
}
