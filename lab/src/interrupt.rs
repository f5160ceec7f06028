//! SIGINT and SIGTERM end an experiment as an error does, so that what it made is removed.

use std::sync::{
    Arc, OnceLock,
    atomic::{AtomicBool, Ordering},
};

use anyhow::{Context as _, bail};
use signal_hook::{
    consts::{SIGINT, SIGTERM},
    flag,
};

static INTERRUPTED: OnceLock<Arc<AtomicBool>> = OnceLock::new();

/// From now on the signals only set a flag; the second one ends the process.
pub fn handle() -> anyhow::Result<()> {
    let interrupted = INTERRUPTED.get_or_init(Arc::default);
    for signal in [SIGINT, SIGTERM] {
        // In this order, so that the first does not end it.
        flag::register_conditional_shutdown(signal, 130, Arc::clone(interrupted))
            .and_then(|_| flag::register(signal, Arc::clone(interrupted)))
            .context("signal handlers")?;
    }
    Ok(())
}

/// Whether there was such a signal.
#[must_use]
pub fn interrupted() -> bool {
    INTERRUPTED
        .get()
        .is_some_and(|flag| flag.load(Ordering::Relaxed))
}

/// An error after such a signal.
pub fn check() -> anyhow::Result<()> {
    if interrupted() {
        bail!("interrupted: what was made for it is removed");
    }
    Ok(())
}
