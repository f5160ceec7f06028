//! The service manager: readiness, reloads, status, watchdog, descriptor store (sd_notify(3)).

use std::{
    ffi::OsStr,
    io::{self, IoSlice},
    os::{
        fd::{AsFd as _, AsRawFd, BorrowedFd, FromRawFd as _, OwnedFd},
        unix::{ffi::OsStrExt as _, net::UnixDatagram},
    },
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

use nix::{
    fcntl::OFlag,
    poll::{PollFd, PollFlags, PollTimeout},
    sys::socket::{ControlMessage, MsgFlags, UnixAddr, sendmsg},
    time::{ClockId, clock_gettime},
};
use rto_agent_kernel::datapath::handover::Handed;
use sd_notify::NotifyState;
use tracing::warn;

use super::handle::Handle;

/// The service manager, if there is one. NOTIFY_SOCKET is read for each message.
#[derive(Default)]
pub(super) struct Systemd {
    /// The last status sent: only changes are sent.
    status: String,
    /// READY=1 could not be sent, and is sent with the next status.
    owes_ready: bool,
}

impl Systemd {
    pub(super) fn ready(&mut self, status: &str) {
        status.clone_into(&mut self.status);
        self.reloaded();
        forget_handed_over();
    }

    pub(super) fn reloading(&self) {
        // Type=notify-reload needs the time at which the reload began.
        let now = clock_gettime(ClockId::CLOCK_MONOTONIC)
            .map(Duration::from)
            .unwrap_or_default();
        let usec = i128::try_from(now.as_micros()).unwrap_or_default();
        send(&[NotifyState::Reloading, NotifyState::MonotonicUsec(usec)]);
    }

    pub(super) fn reloaded(&mut self) {
        self.owes_ready = !send(&[NotifyState::Ready, NotifyState::Status(&self.status)]);
    }

    pub(super) fn status(&mut self, status: &str) {
        let is_new = self.status != status;
        status.clone_into(&mut self.status);
        if self.owes_ready {
            self.reloaded();
        } else if is_new {
            send(&[NotifyState::Status(status)]);
        }
    }
}

/// Whether the service manager claims to keep descriptors over a restart: systemd 254 sets FDSTORE;
/// for older versions the unit sets it, whatever a drop-in says.
pub(super) fn says_it_keeps() -> bool {
    let is_set = |name: &&str| std::env::var_os(name).is_some();
    ["FDSTORE", "NOTIFY_SOCKET"].iter().all(is_set)
}

/// Time the service manager gets to read all messages.
const BARRIER_LIMIT_MS: u16 = 1000;
/// Additional time to close the descriptors that it refuses: some versions do that on another
/// thread.
const CLOSE_LIMIT_MS: u8 = 100;
/// Name of a pipe that shows whether the service manager keeps descriptors.
const PROBE: &str = "probe";

/// Hands these to the service manager for the next start, and waits until it has them. Returns
/// whether there were any.
///
/// # Errors
///
/// If the service manager claims to keep descriptors but does not, or keeps fewer. It does not
/// report what it refuses. It keeps none of them then.
pub(super) fn hand_over(objects: &[Handed]) -> io::Result<bool> {
    if objects.is_empty() {
        return Ok(false);
    }
    let stored = store(objects);
    if stored.is_err() {
        forget(objects.iter().map(|object| &*object.name));
    }
    forget([PROBE]);
    stored.map(|()| true)
}

fn store(objects: &[Handed]) -> io::Result<()> {
    for object in objects {
        let state = [
            NotifyState::FdStore,
            NotifyState::FdName(&object.name),
            // Without FDPOLL=0, systemd drops maps other than ring buffers: polling them reports an
            // error (bpf_map_poll(), Linux 6.12).
            NotifyState::Custom("FDPOLL=0"),
        ];
        send_within(STORE_LIMIT, &state, &[object.fd.as_fd()])?;
    }
    // Sent last: if the probe is kept, so is everything before it.
    let probe = send_pipe(&[NotifyState::FdStore, NotifyState::FdName(PROBE)])?;
    // sd_notify_barrier(3): the pipe is closed once all earlier messages have been read.
    let barrier = send_pipe(&[NotifyState::Custom("BARRIER=1")])?;
    if !is_closed(&barrier, BARRIER_LIMIT_MS.into())? {
        return Err(io::Error::other(format!(
            "no answer within {BARRIER_LIMIT_MS} ms; it is unknown whether it keeps the \
             descriptors"
        )));
    }
    if is_closed(&probe, CLOSE_LIMIT_MS.into())? {
        return Err(io::Error::other(format!(
            "it keeps fewer than the {} descriptors needed, or none; raise FileDescriptorStoreMax= \
             of the unit",
            objects.len() + 1
        )));
    }
    Ok(())
}

/// Sends one end of a pipe and returns the other, on which the closing of the first can be seen.
fn send_pipe(state: &[NotifyState<'_>]) -> io::Result<OwnedFd> {
    let (ours, theirs) = nix::unistd::pipe2(OFlag::O_CLOEXEC)?;
    send_within(STORE_LIMIT, state, &[theirs.as_fd()])?;
    Ok(ours)
}

/// Whether the other end of a pipe is closed within the limit.
fn is_closed(end: &OwnedFd, limit: PollTimeout) -> io::Result<bool> {
    let mut closed = [PollFd::new(end.as_fd(), PollFlags::empty())];
    Ok(nix::poll::poll(&mut closed, limit)? != 0)
}

/// Has the service manager drop these descriptors. Stops at the first message that it does not
/// read.
fn forget<'a>(names: impl IntoIterator<Item = &'a str>) {
    for name in names {
        let state = [NotifyState::FdStoreRemove, NotifyState::FdName(name)];
        if !is_sent(send_within(STORE_LIMIT, &state, &[])) {
            return;
        }
    }
}

/// The descriptors kept for this start. Must be called once, before their numbers can be reused.
pub fn handed_over() -> io::Result<Vec<Handed>> {
    let listed = sd_notify::listen_fds_with_names()?;
    // SAFETY: the service manager has opened these for this process (sd_listen_fds(3)), and this
    // function is called once.
    let owned = |fd| unsafe { OwnedFd::from_raw_fd(fd) };
    let handed = listed.map(|(fd, name)| Handed {
        name,
        fd: owned(fd),
    });
    Ok(handed.filter(|one| one.name != PROBE).collect())
}

/// Has the service manager drop the descriptors kept for this start: they are pinned now.
fn forget_handed_over() {
    let variable = |name| std::env::var(name).unwrap_or_default();
    if variable("LISTEN_PID") != std::process::id().to_string() {
        return;
    }
    let names = variable("LISTEN_FDNAMES");
    forget(names.split(':').filter(|name| !name.is_empty()));
}

/// Reports to the service manager that the daemon is stopping, even if the engine is busy.
pub fn stopping() {
    send(&[NotifyState::Stopping, NotifyState::Status("stopping")]);
}

/// The longest time between steps of an idle engine under a watchdog: half the time after which
/// [`WatchdogKeepalive`] assumes a stall.
pub(super) fn step_interval() -> Duration {
    sd_notify::watchdog_enabled().map_or(Duration::MAX, |timeout| timeout / 4)
}

/// An action that is due at once, and then again after each interval.
struct Every {
    interval: Duration,
    next: Instant,
}

impl Every {
    fn new(interval: Duration) -> Self {
        let next = Instant::now();
        Self { interval, next }
    }

    /// Whether the action is due; if so, the interval restarts.
    fn is_due(&mut self) -> bool {
        let now = Instant::now();
        let is_due = now >= self.next;
        if is_due {
            self.next = now + self.interval;
        }
        is_due
    }
}

/// The start's timeout is extended by this much, this often. A start that makes no step for as long
/// is stuck.
const EXTENSION: Duration = Duration::from_secs(30);
const EXTEND_EVERY: Duration = Duration::from_secs(5);

/// Reports to the service manager that the engine is alive while its operation makes progress:
/// millions of entries take longer than the unit's timeouts.
pub struct WatchdogKeepalive {
    /// WATCHDOG_USEC, and when the next keepalive is due.
    watchdog: Option<(Duration, Every)>,
    extension: Every,
    stall: Stall,
}

impl WatchdogKeepalive {
    /// Reads WATCHDOG_USEC.
    #[must_use]
    pub fn from_environment() -> Self {
        let watchdog = sd_notify::watchdog_enabled();
        Self {
            watchdog: watchdog.map(|timeout| (timeout, Every::new(timeout / 4))),
            extension: Every::new(EXTEND_EVERY),
            stall: Stall::new(Instant::now()),
        }
    }

    /// How often to call [`Self::look`], so that no keepalive is later than half of the service
    /// manager's timeout.
    #[must_use]
    pub fn interval(&self) -> Duration {
        let watchdog = self.watchdog.as_ref();
        let every = watchdog.map_or(EXTEND_EVERY, |(timeout, _)| *timeout / 8);
        every.max(Duration::from_millis(1))
    }

    /// Sends a keepalive if one is due and the engine makes progress. Call it on another thread
    /// than the engine's.
    pub fn look(&mut self, engine: &Handle) {
        let stalled = self.stall.lasts(engine.steps(), Instant::now());
        if engine.snapshot().is_starting() {
            if stalled < EXTENSION && self.extension.is_due() {
                let more = u32::try_from(EXTENSION.as_micros()).unwrap_or(u32::MAX);
                send(&[NotifyState::ExtendTimeoutUsec(more)]);
            }
        } else if let Some((timeout, watchdog)) = &mut self.watchdog
            // The service manager waits another WATCHDOG_USEC after the last keepalive.
            && stalled < *timeout / 2
            && watchdog.is_due()
        {
            send(&[NotifyState::Watchdog]);
        }
    }
}

/// Measures how long a counter has been unchanged.
struct Stall {
    steps: u64,
    since: Instant,
}

impl Stall {
    fn new(now: Instant) -> Self {
        Self {
            steps: 0,
            since: now,
        }
    }

    fn lasts(&mut self, steps: u64, now: Instant) -> Duration {
        if steps != self.steps {
            *self = Self { steps, since: now };
        }
        now.saturating_duration_since(self.since)
    }
}

/// Time a message may wait for a full socket.
const SEND_LIMIT: Duration = Duration::from_millis(50);
/// The same for messages about the descriptor store, which are not repeated.
const STORE_LIMIT: Duration = Duration::from_millis(BARRIER_LIMIT_MS as u64);
static UNSENT: AtomicU64 = AtomicU64::new(0);

/// The number of messages that could not be sent.
pub(super) fn unsent() -> u64 {
    UNSENT.load(Ordering::Relaxed)
}

/// Sends a message; true if it was sent or there is no service manager.
fn send(state: &[NotifyState<'_>]) -> bool {
    is_sent(send_within(SEND_LIMIT, state, &[]))
}

/// Counts messages that could not be sent, and reports the first.
fn is_sent(sent: io::Result<()>) -> bool {
    if let Err(e) = &sent
        && UNSENT.fetch_add(1, Ordering::Relaxed) == 0
    {
        warn!("the service manager could not be notified (further failures are only counted): {e}");
    }
    sent.is_ok()
}

/// (`sd_notify::notify` and similar functions block until the socket is read.)
fn send_within(
    limit: Duration,
    state: &[NotifyState<'_>],
    fds: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let Some(name) = std::env::var_os("NOTIFY_SOCKET") else {
        return Ok(());
    };
    let message: String = state.iter().map(|one| format!("{one}\n")).collect();
    send_to(&name, limit, &message, fds)
}

fn send_to(name: &OsStr, limit: Duration, message: &str, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let address = match name.as_bytes() {
        [b'@', name @ ..] => UnixAddr::new_abstract(name)?,
        _ => UnixAddr::new(name)?,
    };
    let socket = UnixDatagram::unbound()?;
    socket.set_write_timeout(Some(limit))?;
    let fds: Vec<_> = fds.iter().map(AsRawFd::as_raw_fd).collect();
    let rights = [ControlMessage::ScmRights(&fds)];
    let rights = if fds.is_empty() { &[][..] } else { &rights };
    let text = [IoSlice::new(message.as_bytes())];
    let flags = MsgFlags::MSG_NOSIGNAL;
    sendmsg(socket.as_raw_fd(), &text, rights, flags, Some(&address))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn stall_ends_with_a_step_only() {
        let begin = Instant::now();
        let mut stall = Stall::new(begin);
        // However long the operation takes.
        for step in 1..10_000 {
            let now = begin + step * 10 * SECOND;
            assert_eq!(stall.lasts(step.into(), now), Duration::ZERO);
        }
        let last = begin + 9_999 * 10 * SECOND;
        for seconds in 1..100 {
            let now = last + seconds * SECOND;
            assert_eq!(stall.lasts(9_999, now), seconds * SECOND);
        }
        // A later operation begins with a step.
        assert_eq!(stall.lasts(10_000, last + 100 * SECOND), Duration::ZERO);
    }

    #[test]
    fn notify_gives_up_on_unread_socket() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        let receiver = UnixDatagram::bind(&path).unwrap();
        let send = |message| send_to(path.as_os_str(), SEND_LIMIT, message, &[]);
        // The socket's queue holds net.unix.max_dgram_qlen messages.
        let full = (0..100_000).find(|_| send("STATUS=x\n").is_err());
        assert!(full.is_some());
        let mut message = [0; 16];
        assert_eq!(receiver.recv(&mut message).unwrap(), 9);
        send("READY=1\n").unwrap();
    }
}
