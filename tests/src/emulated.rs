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

/// So many as on a real machine, or fewer on an emulated one, which is said. `what` names them.
#[must_use]
pub fn scaled(what: &str, real: u32, emulated: u32) -> u32 {
    if !is_emulated() {
        return real;
    }
    println!("{SCALED}{emulated} {what} instead of {real}");
    emulated
}

/// As long as on a real machine, or as much longer as an emulated processor is slower.
#[must_use]
pub fn slowed(real: Duration) -> Duration {
    const SLOWER: u32 = 10;
    if is_emulated() { SLOWER * real } else { real }
}
