//! Reduces expensive work on an emulated processor.

use std::time::Duration;

/// Set in the machines of `cargo xtask vm`, whose processor is about ten times slower.
pub const EMULATED: &str = "RTO_TESTS_EMULATED";
/// Prefix of the line in which a test reports that it did less work; `cargo xtask vm` copies it into the matrix.
pub const SCALED: &str = "scaled: ";

/// Whether this processor is emulated.
#[must_use]
pub fn is_emulated() -> bool {
    std::env::var_os(EMULATED).is_some()
}

/// Whether the clock counts the instructions of the emulated processor, so that load on the host cannot delay a timer
/// (RTO_TESTS_COUNTED, which `cargo xtask vm` sets).
#[must_use]
pub fn counts_instructions() -> bool {
    is_emulated() && std::env::var_os("RTO_TESTS_COUNTED").is_some()
}

/// Whether this is one of the disposable machines of `cargo xtask vm`. Their root is the initramfs they were booted
/// with (`rootfs`), which is not the case on any other system.
#[must_use]
pub fn is_machine() -> bool {
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let root = mounts
        .lines()
        .rfind(|line| line.split(' ').nth(1) == Some("/"));
    is_emulated() && root.and_then(|line| line.split(' ').nth(2)) == Some("rootfs")
}

/// Returns `real`, or `emulated` on an emulated processor, which it then reports. `what` names the unit.
#[must_use]
pub fn scaled(what: &str, real: u32, emulated: u32) -> u32 {
    if !is_emulated() {
        return real;
    }
    eprintln!("{SCALED}{emulated} {what} instead of {real}");
    emulated
}

/// Prefix of the line with a result that the table of kernels shows.
pub const MEASURED: &str = "measured: ";

/// Reports a result for the table of kernels.
pub fn record(what: &str, result: &str) {
    eprintln!("{MEASURED}{what}: {result}");
}

/// Returns a duration as it is, or ten times as long on an emulated processor.
#[must_use]
pub fn slowed(real: Duration) -> Duration {
    const SLOWER: u32 = 10;
    if is_emulated() { SLOWER * real } else { real }
}
