//! Walks over open sockets, in every network namespace of the host.
//!
//! A walk enters the namespaces one by one, which changes its thread's namespace. So it always has
//! a thread of its own, and reports its progress while the engine continues.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    time::{Duration, Instant},
};

use nix::sched::{CloneFlags, setns};
use rto_agent_core::{
    printable::counted,
    progress,
    wire::types::{OpenSocketsView, SkippedNamespace, WalkView},
};
use rto_agent_kernel::{
    datapath::walk::{Defaults, Mode, Walked, Walker},
    kernel::{
        netns::{self, Netns},
        privileges, sysctl,
    },
};
use tracing::{info, warn};

use super::{Done, Job, Message};
use crate::engine::{audit::Cause, snapshot::Published};

/// Largest value TCP_BPF_RTO_MIN takes, and its default (`TCP_RTO_MIN`).
const RTO_MIN_US: u32 = 200_000;
/// The cause of a walk that restores all sockets.
pub(in crate::engine) const RESTORE: &str = "detach --restore";
/// How long a request to detach waits for a running walk.
const PATIENCE: Duration = Duration::from_secs(2);
/// `TCP_RTO_MAX`.
const RTO_MAX_MS: u32 = 120_000;

/// The engine's walks, one at a time.
pub(in crate::engine) struct Walks {
    messages: mpsc::Sender<Message>,
    /// The progress of the running walk or the last one.
    progress: Published<WalkView>,
    running: Option<Job>,
    /// The flag that stops the latest walk.
    number: u64,
    stop: Arc<AtomicBool>,
    /// Why another walk is needed: entries changed during the running one.
    again: Option<Cause>,
}

impl Walks {
    pub(in crate::engine) fn new(messages: mpsc::Sender<Message>) -> Self {
        Self {
            messages,
            progress: Published::default(),
            running: None,
            number: 0,
            stop: Arc::default(),
            again: None,
        }
    }

    pub(in crate::engine) fn is_running(&self) -> bool {
        self.running.is_some()
    }

    pub(in crate::engine) fn progress(&self) -> &Published<WalkView> {
        &self.progress
    }

    /// Requests another walk after the running one.
    pub(in crate::engine) fn ask_again(&mut self, cause: &Cause) {
        self.again = Some(cause.clone());
    }

    /// The cause of the requested walk, if it can begin now.
    pub(in crate::engine) fn take_again(&mut self) -> Option<Cause> {
        if self.is_running() {
            return None;
        }
        self.again.take()
    }

    /// Stops a running walk before its next namespace.
    pub(in crate::engine) fn cancel(&mut self) {
        self.again = None;
        self.stop.store(true, Ordering::Relaxed);
    }

    /// Stops a running walk, and waits for it briefly.
    pub(in crate::engine) fn stop(&mut self) {
        self.cancel();
        self.finish(Instant::now() + PATIENCE);
    }

    /// Waits for a running walk to end. (It is held up while a socket's owner holds the socket's
    /// lock.)
    pub(in crate::engine) fn finish(&mut self, deadline: Instant) {
        if let Some(running) = self.running.take_if(|job| job.wait(deadline)) {
            drop(running);
        } else if self.is_running() {
            warn!("the walk over open sockets is blocked by a socket that is in use");
        }
    }

    /// Begins a walk; the caller has checked that none is running.
    pub(in crate::engine) fn begin(
        &mut self,
        walkers: Vec<Walker>,
        cause: &str,
        notes: Vec<String>,
    ) -> WalkView {
        let view = WalkView {
            notes,
            ..WalkView::begin(cause)
        };
        self.progress.send_replace(Arc::new(view.clone()));
        // A new flag, as a stopped walk keeps its own.
        self.stop = Arc::default();
        self.number += 1;
        let number = self.number;
        let (progress, stop, begun) = (self.progress.clone(), self.stop.clone(), view.clone());
        let walk = move || {
            let view = walk_all(walkers, begun, &stop, &|view| {
                progress.send_replace(Arc::new(view.clone()));
            });
            log(&view);
            Done::Walk {
                number,
                view: Some(Box::new(view)),
            }
        };
        let died = Done::Walk { number, view: None };
        match Job::begin("walk", &self.messages, died, walk) {
            Ok(job) => self.running = Some(job),
            Err(e) => {
                self.number += 1;
                self.refused(cause, format!("cannot start a thread for the walk: {e}"));
            }
        }
        view
    }

    /// Handles the result of a walk; `None`: its thread panicked. Ignores a walk that another has
    /// followed.
    pub(in crate::engine) fn done(&mut self, number: u64, view: Option<WalkView>) {
        if number != self.number {
            return;
        }
        self.running = None;
        self.progress.send_modify(|last| {
            *last = Arc::new(view.unwrap_or_else(|| WalkView {
                running: false,
                problems: vec!["the walk's thread panicked".to_owned()],
                ..(**last).clone()
            }));
        });
    }

    /// Reports that a walk could not begin.
    pub(in crate::engine) fn refused(&mut self, cause: &str, why: String) {
        self.progress.send_replace(Arc::new(WalkView {
            running: false,
            problems: vec![why],
            ..WalkView::begin(cause)
        }));
    }
}

/// Restores every socket of the host, and returns when done. For commands.
///
/// # Errors
///
/// If no thread can be started, or the walk's thread panics.
pub fn restore(walkers: Vec<Walker>) -> std::io::Result<WalkView> {
    let begun = WalkView::begin(RESTORE);
    let (done, result) = mpsc::channel();
    let thread = std::thread::Builder::new().name("restore".to_owned());
    thread.spawn(move || {
        let view = walk_all(walkers, begun, &AtomicBool::new(false), &|_| {});
        let _ = done.send(view); // The receiver waits.
    })?;
    loop {
        progress::step();
        match result.recv_timeout(STEP) {
            Ok(view) => return Ok(view),
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                return Err(std::io::Error::other("the walk's thread panicked"));
            }
            Err(mpsc::RecvTimeoutError::Timeout) => {}
        }
    }
}

/// Interval at which waiting for a walk counts as a step of this thread.
const STEP: Duration = Duration::from_millis(100);

fn log(done: &WalkView) {
    let changed: u64 = done.policies.values().map(|p| p.changed).sum();
    info!(
        cause = done.cause,
        changed,
        namespaces = done.namespaces_done,
        skipped = done.skipped.len(),
        "open sockets"
    );
    for problem in &done.problems {
        warn!("open sockets: {problem}");
    }
}

/// Walks on the current thread.
fn walk_all(
    mut walkers: Vec<Walker>,
    mut view: WalkView,
    stop: &AtomicBool,
    publish: &dyn Fn(&WalkView),
) -> WalkView {
    let begin = Instant::now();
    match netns::all() {
        Ok(found) => {
            view.namespaces = found.namespaces.len();
            tell_hidden(found.hidden_processes, &mut view);
            for namespace in &found.namespaces {
                publish(&view);
                if stop.load(Ordering::Relaxed) {
                    view.problems
                        .push("stopped before it was finished".to_owned());
                    break;
                }
                let is_own = namespace.inode == found.own;
                match walk_one(&mut walkers, namespace, is_own, &mut view) {
                    Ok(()) => view.namespaces_done += 1,
                    Err(reason) => view.skipped.push(SkippedNamespace {
                        inode: namespace.inode,
                        place: namespace.places.first().cloned().unwrap_or_default(),
                        reason,
                    }),
                }
            }
        }
        Err(e) => view.problems.push(format!("/proc: {e}")),
    }
    view.running = false;
    view.took_ms = u64::try_from(begin.elapsed().as_millis()).unwrap_or(u64::MAX);
    view
}

/// Enters a namespace and walks through it. The thread stays in it.
fn walk_one(
    walkers: &mut [Walker],
    namespace: &Netns,
    is_own: bool,
    view: &mut WalkView,
) -> Result<(), String> {
    // Without CAP_SYS_ADMIN this thread has never left its own namespace.
    if !is_own || privileges::has(privileges::cap::SYS_ADMIN) {
        // The namespace is gone: without processes and references it has no sockets either.
        let Some(handle) = namespace.open().map_err(|e| e.to_string())? else {
            return Ok(());
        };
        setns(&handle, CloneFlags::CLONE_NEWNET)
            .map_err(|e| format!("cannot be entered: {e} (CAP_SYS_ADMIN is needed)"))?;
    }
    let defaults = defaults();
    for walker in walkers {
        let walked = walker.walk(defaults).map_err(|e| e.to_string())?;
        add(view, &walked, walker.mode());
    }
    Ok(())
}

fn tell_hidden(hidden: usize, view: &mut WalkView) {
    if hidden == 0 {
        return;
    }
    let processes = counted(hidden, "process", "processes");
    let text = format!(
        "the network namespaces of {processes} are unknown: sockets in namespaces that \
         only they use were skipped"
    );
    // Only a process that is better protected than root's own withstands CAP_SYS_PTRACE.
    if privileges::has(privileges::cap::SYS_PTRACE) {
        view.notes.push(text);
    } else {
        view.problems
            .push(format!("{text} (CAP_SYS_PTRACE is needed)"));
    }
}

fn add(view: &mut WalkView, walked: &Walked, mode: Mode) {
    if mode == Mode::Restore {
        if walked.others.seen > 0 {
            *view.former.get_or_insert_default() += walked.others.into();
        }
    } else {
        view.uncovered += u64::from(walked.others.seen);
    }
    for (name, counts) in &walked.policies {
        *view.policies.entry(name.clone()).or_default() += OpenSocketsView::from(*counts);
    }
}

/// The defaults of the thread's network namespace.
fn defaults() -> Defaults {
    Defaults {
        rto_min_us: sysctl::ipv4("tcp_rto_min_us").map_or(RTO_MIN_US, |us: u32| us.min(RTO_MIN_US)),
        rto_max_ms: sysctl::ipv4("tcp_rto_max_ms").unwrap_or(RTO_MAX_MS),
    }
}

/// Notes on how the settings in force affect open sockets.
pub(in crate::engine) fn notes(sets_rto_min: bool, has_hook: bool) -> Vec<String> {
    let mut notes = Vec::new();
    if sets_rto_min {
        notes.push(
            "rto_min: the RTO of an open socket takes about 20 round trips to fall to a lower \
             minimum; a higher minimum does not raise it"
                .to_owned(),
        );
    }
    if !has_hook {
        notes.push(
            "this kernel cannot enable the RTO hook of open sockets (Linux 6.12 and later): \
             linear_retries, rto_restart and the counts of RTOs and tail loss probes apply to new \
             connections only"
                .to_owned(),
        );
    }
    notes
}
