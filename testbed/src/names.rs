//! Names that no other test, and no other run, has.

use std::sync::atomic::{AtomicU32, Ordering};

static NEXT: AtomicU32 = AtomicU32::new(0);

/// First part of every name made here.
pub const PREFIX: &str = "rtot";

/// `rtot-<pid>-<number>`.
#[must_use]
pub fn unique() -> String {
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    format!("{PREFIX}-{}-{number}", std::process::id())
}

/// The process that made a name, if it is one of ours.
#[must_use]
pub fn owner(name: &str) -> Option<u32> {
    name.strip_prefix(PREFIX)?
        .strip_prefix('-')?
        .split('-')
        .next()?
        .parse()
        .ok()
}
