//! Less of what costs much work, on an emulated processor.

use std::time::Duration;

/// Set in the machines of `cargo xtask vm`, whose processor is some ten times as slow.
pub const EMULATED: &str = "RTO_TESTS_EMULATED";
/// What a test prints before it tells that it did less; `cargo xtask vm` puts it into the matrix.
pub const SCALED: &str = "scaled: ";

/// Whether this processor is emulated.
#[must_use]
pub fn is_emulated() -> bool {
    std::env::var_os(EMULATED).is_some()
}

/// Whether its clock is the number of its instructions, so that nothing of the host's makes a timer late:
/// RTO_TESTS_COUNTED, which `cargo xtask vm` sets.
#[must_use]
pub fn counts_instructions() -> bool {
    is_emulated() && std::env::var_os("RTO_TESTS_COUNTED").is_some()
}

/// Whether this is one of the machines of `cargo xtask vm`, which are nobody's: their root is the archive they
/// were booted with, which no other system's is.
#[must_use]
pub fn is_machine() -> bool {
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let root = mounts
        .lines()
        .rfind(|line| line.split(' ').nth(1) == Some("/"));
    is_emulated() && root.and_then(|line| line.split(' ').nth(2)) == Some("rootfs")
}

/// So many as on a real machine, or fewer on an emulated one, which is said. `what` names them.
#[must_use]
pub fn scaled(what: &str, real: u32, emulated: u32) -> u32 {
    if !is_emulated() {
        return real;
    }
    eprintln!("{SCALED}{emulated} {what} instead of {real}");
    emulated
}

/// As long as on a real machine, or as much longer as an emulated processor is slower.
#[must_use]
pub fn slowed(real: Duration) -> Duration {
    const SLOWER: u32 = 10;
    if is_emulated() { SLOWER * real } else { real }
}
