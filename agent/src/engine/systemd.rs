//! Talking to the service manager: readiness, reloads, status, watchdog (sd_notify(3)).

use std::time::{Duration, Instant};

use nix::time::{ClockId, clock_gettime};
use sd_notify::NotifyState;
use tracing::warn;

use super::Handle;

/// The service manager, if there is one.
pub(super) struct Systemd {
    watchdog: Option<Every>,
    /// What it was told last: it is told only what is new.
    told: String,
}

impl Systemd {
    /// Reads WATCHDOG_USEC; NOTIFY_SOCKET is read at each message.
    pub(super) fn from_environment() -> Self {
        // Half of WATCHDOG_USEC, as sd_watchdog_enabled(3) advises.
        let interval = sd_notify::watchdog_enabled().map(|timeout| timeout / 2);
        Self {
            watchdog: interval.map(Every::new),
            told: String::new(),
        }
    }

    pub(super) fn ready(&mut self, status: &str) {
        status.clone_into(&mut self.told);
        send(&[NotifyState::Ready, NotifyState::Status(status)]);
    }

    pub(super) fn reloading(&self) {
        // Type=notify-reload wants the time at which the reload began.
        let now = clock_gettime(ClockId::CLOCK_MONOTONIC)
            .map(Duration::from)
            .unwrap_or_default();
        let usec = i128::try_from(now.as_micros()).unwrap_or_default();
        send(&[NotifyState::Reloading, NotifyState::MonotonicUsec(usec)]);
    }

    pub(super) fn status(&mut self, status: &str) {
        if self.told != status {
            status.clone_into(&mut self.told);
            send(&[NotifyState::Status(status)]);
        }
    }

    pub(super) fn stopping(&self) {
        send(&[NotifyState::Stopping, NotifyState::Status("stopping")]);
    }

    /// Tells the watchdog, when it is time, that the engine is alive.
    pub(super) fn watchdog(&mut self) {
        if self.watchdog.as_mut().is_some_and(Every::is_due) {
            send(&[NotifyState::Watchdog]);
        }
    }

    /// How long until the watchdog must hear of us.
    pub(super) fn watchdog_due(&self) -> Duration {
        self.watchdog.as_ref().map_or(Duration::MAX, Every::left)
    }
}

/// Something that is due at first, and again each time after a while.
struct Every {
    interval: Duration,
    next: Instant,
}

impl Every {
    fn new(interval: Duration) -> Self {
        let next = Instant::now();
        Self { interval, next }
    }

    /// Whether it is; then it is due again in a while.
    fn is_due(&mut self) -> bool {
        let now = Instant::now();
        let is_due = now >= self.next;
        if is_due {
            self.next = now + self.interval;
        }
        is_due
    }

    fn left(&self) -> Duration {
        self.next.saturating_duration_since(Instant::now())
    }
}

/// Longest change for which somebody else speaks: beyond it the engine counts as stuck.
const LONGEST_CHANGE: Duration = Duration::from_mins(10);
/// What a start is given at a time, and how often.
const EXTENSION: Duration = Duration::from_secs(30);
const EXTEND_EVERY: Duration = Duration::from_secs(5);

/// Tells the service manager that the engine is alive while one change keeps it from saying so: millions of
/// entries take longer than the unit's times are long.
pub struct Voucher {
    watchdog: Option<Every>,
    extension: Every,
}

impl Voucher {
    /// Reads WATCHDOG_USEC.
    #[must_use]
    pub fn from_environment() -> Self {
        Self {
            watchdog: sd_notify::watchdog_enabled().map(|timeout| Every::new(timeout / 4)),
            extension: Every::new(EXTEND_EVERY),
        }
    }

    /// To be called every now and then, on another thread than the engine's.
    pub fn look(&mut self, engine: &Handle) {
        let busy = engine.busy_for();
        if busy.is_zero() || busy > LONGEST_CHANGE {
            return;
        }
        if engine.is_starting() {
            if self.extension.is_due() {
                let more = u32::try_from(EXTENSION.as_micros()).unwrap_or(u32::MAX);
                send(&[NotifyState::ExtendTimeoutUsec(more)]);
            }
        } else if self.watchdog.as_mut().is_some_and(Every::is_due) {
            send(&[NotifyState::Watchdog]);
        }
    }
}

fn send(state: &[NotifyState<'_>]) {
    if let Err(e) = sd_notify::notify(state) {
        warn!("the service manager could not be told: {e}");
    }
}
