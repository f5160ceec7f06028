//! Faults around the daemon: docs/internals/faults.md lists the outcome of each.

use crate::prelude::*;

pub(crate) mod clients;
mod clocks;
mod desired;
mod files;
mod kill;
mod memory;
mod unread;
mod writes;

/// Whether there is time for more rounds (`cargo xtask test --long`).
pub(super) fn is_long() -> bool {
    std::env::var_os("RTO_TESTS_LONG").is_some()
}

/// The number of open descriptors of the daemon.
pub(super) fn descriptors(env: &TestEnv) -> anyhow::Result<usize> {
    Ok(fs::read_dir(format!("/proc/{}/fd", env.pid()?))?.count())
}

fn memory_kb(env: &TestEnv) -> anyhow::Result<u64> {
    of_status(env, "VmRSS:")
}

/// The peak of the daemon's resident memory.
pub(super) fn peak_memory_kb(env: &TestEnv) -> anyhow::Result<u64> {
    of_status(env, "VmHWM:")
}

fn of_status(env: &TestEnv, key: &str) -> anyhow::Result<u64> {
    let text = fs::read_to_string(format!("/proc/{}/status", env.pid()?))?;
    let line = text.lines().find_map(|line| line.strip_prefix(key));
    let number = line.and_then(|line| line.split_whitespace().next());
    Ok(number.with_context(|| key.to_owned())?.parse()?)
}
