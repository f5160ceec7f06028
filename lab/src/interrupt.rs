//! SIGINT and SIGTERM make an experiment fail like an error, so that it cleans up.

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

/// After this call, the first signal only sets a flag; the second one ends the process.
pub fn handle() -> anyhow::Result<()> {
    let interrupted = INTERRUPTED.get_or_init(Arc::default);
    for signal in [SIGINT, SIGTERM] {
        // Registered in this order, so that the first signal does not end the process.
        flag::register_conditional_shutdown(signal, 130, Arc::clone(interrupted))
            .and_then(|_| flag::register(signal, Arc::clone(interrupted)))
            .context("signal handlers")?;
    }
    Ok(())
}

/// Whether such a signal has arrived.
pub fn interrupted() -> bool {
    INTERRUPTED
        .get()
        .is_some_and(|flag| flag.load(Ordering::Relaxed))
}

/// Returns an error after such a signal.
pub fn check() -> anyhow::Result<()> {
    if interrupted() {
        bail!("interrupted: removing temporary namespaces and files");
    }
    Ok(())
}
