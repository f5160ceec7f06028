//! What goes wrong around the daemon: each fault has an outcome, as docs/faults.md tells.

mod desired;
mod kill;

use super::Test;

pub(super) const TESTS: &[Test] = &[("killed_at_random_moments", kill::rounds)];

/// Whether there is time for more rounds: `cargo xtask test --long`.
fn is_long() -> bool {
    std::env::var_os("RTO_TESTS_LONG").is_some()
}
