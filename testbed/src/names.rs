//! Names that are unique across tests and runs.

use std::sync::atomic::{AtomicU32, Ordering};

static NEXT: AtomicU32 = AtomicU32::new(0);

/// The first part of every name.
pub const PREFIX: &str = "rtot";

/// `rtot-<pid>-<number>`.
#[must_use]
pub fn unique() -> String {
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    format!("{PREFIX}-{}-{number}", std::process::id())
}

/// The process that made a name; `None` if the name has another form.
#[must_use]
pub fn owner(name: &str) -> Option<u32> {
    name.strip_prefix(PREFIX)?
        .strip_prefix('-')?
        .split('-')
        .next()?
        .parse()
        .ok()
}
