//! `rto-agent detach` and `attach`. A detachment lasts until it is undone, see
//! [`DetachMark`](super::store::DetachMark).

use std::time::{Duration, Instant};

use rto_agent_core::{
    config::OnExit,
    wire::{
        kernel::Removed,
        types::{Caller, ChangeAnswer, DetachAnswer, DetachRequest, NotLasting, WalkView},
    },
};
use rto_agent_kernel::datapath::{
    DatapathError, OtherProgram, connecting, drain, handover, remove_pins, until_connected,
};
use tracing::{info, warn};

use super::{
    audit::Cause,
    change::{Engine, check_can_walk},
    detachment::{Restoring, draining, left_draining},
    error::{EngineError, refused},
    handle::Reply,
    health::look_at_programs,
    jobs::walk,
    systemd,
};

/// How long a daemon that stops, or a command without a daemon, waits for connecting sockets before it leaves the
/// program with them. Most outages are shorter.
pub const DRAIN_LIMIT: Duration = Duration::from_secs(5);
/// Limit of `detach --restore`: shorter than its client waits.
const RESTORE_LIMIT: Duration = Duration::from_secs(60);

/// Why `rto-agent attach` is refused where the configuration detaches.
const ATTACH_IS_OFF: &str =
    "attach = false in [agent] detaches this host: set it to true; nothing was changed";

/// An answer, to be sent once the change is published.
type Answer = (Reply<DetachAnswer>, Result<DetachAnswer, EngineError>);

/// `rto-agent detach`; `None`: [`finish_restore`] answers.
pub(super) fn detach(
    engine: &mut Engine,
    request: &DetachRequest,
    by: Caller,
    reply: Reply<DetachAnswer>,
) -> Option<Answer> {
    engine.probing.invalidate();
    if let Err(refusal) = engine.detachment.check_not_restoring() {
        return Some((reply, Err(refusal)));
    }
    let restores = engine.kernel.kernel().is_some() || engine.kernel.has_left_maps;
    if !request.restore || !restores {
        return Some((reply, detach_now(engine, by)));
    }
    match begin_restore(engine, by) {
        Ok(not_lasting) => {
            engine.detachment.restoring = Some(Restoring {
                reply,
                deadline: Instant::now() + RESTORE_LIMIT,
                not_lasting,
            });
            None
        }
        Err(refusal) => Some((reply, Err(refusal))),
    }
}

/// Detaches the program at once.
pub(super) fn detach_now(engine: &mut Engine, by: Caller) -> Result<DetachAnswer, EngineError> {
    let not_lasting = engine.store.mark.set(by);
    engine.walks.stop();
    // The thread loads a program over the pins that are about to be removed.
    engine.events.end();
    let left = begin_draining(engine, Duration::ZERO);
    let unlinked = left.and_then(|left| match left {
        0 => engine.kernel.unlink(),
        _ => {
            engine.kernel.is_frozen = true;
            engine.detachment.is_draining = true;
            Ok(())
        }
    });
    if let Err(e) = unlinked {
        return Err(not_detached(engine, e));
    }
    if !engine.detachment.is_draining {
        engine.kernel.resume(&engine.resolved);
    }
    let links = detached(engine, by);
    let mut answer = detach_answer(links, not_lasting, engine.connecting());
    detach_others(engine, &mut answer);
    Ok(answer)
}

fn detach_others(engine: &mut Engine, answer: &mut DetachAnswer) {
    look_at_programs(engine);
    remove_others(engine.probing.others(), answer);
    look_at_programs(engine);
}

/// Leaves new connections to the kernel's own timers, and waits for those that are connecting; returns how many
/// still are.
fn begin_draining(engine: &Engine, limit: Duration) -> Result<u64, DatapathError> {
    match engine.kernel.kernel() {
        Some(_) => drain(&engine.kernel.options.pin_dir, limit),
        None => Ok(0),
    }
}

/// Unloads a draining program once no socket with its timers is connecting. Returns whether it has.
pub(super) fn finish_draining(engine: &mut Engine) -> bool {
    if !engine.detachment.is_draining || engine.detachment.restoring.is_some() {
        return false;
    }
    match connecting(&engine.kernel.options.pin_dir) {
        Ok(0) => {}
        Ok(_) => return false,
        Err(e) => {
            warn!("whether sockets are connecting is unknown: {e}");
            return false;
        }
    }
    if let Err(e) = engine.kernel.unlink() {
        warn!("the program is still attached, but treats no connection: {e}");
        return false;
    }
    engine.detachment.is_draining = false;
    engine.kernel.is_frozen = false;
    engine.kernel.resume(&engine.resolved);
    info!("no socket with the policies' timers is connecting: the program is removed");
    true
}

fn not_detached(engine: &mut Engine, error: DatapathError) -> EngineError {
    let back = match engine.detachment.by {
        Some(by) => {
            engine.store.mark.retry(Some(by));
            Ok(())
        }
        None => engine.store.mark.clear(),
    };
    if let Err(e) = back {
        warn!("the next start is detached, though this detachment failed: {e}");
    }
    engine.kernel.resume(&engine.resolved);
    error.into()
}

/// Records the detachment, and returns the number of links it removed.
fn detached(engine: &mut Engine, by: Caller) -> usize {
    // Watchers wait for the next maps.
    engine.events.end();
    let was_attached = engine.detachment.by.replace(by).is_none();
    let cgroup = &engine.kernel.options.cgroup;
    engine.probing.sweep(cgroup);
    Cause::request(by).audit_other("detach");
    info!("detached: no policy is active until rto-agent attach");
    was_attached.into()
}

/// `rto-agent attach`: ends a detachment. The counters continue unless the maps are new.
pub(super) fn attach(engine: &mut Engine, cause: &Cause) -> Result<ChangeAnswer, EngineError> {
    engine.detachment.check_not_restoring()?;
    let mut answer = ChangeAnswer::default();
    let Some(by) = engine.detachment.by else {
        answer.notes.push("already attached".to_owned());
        return Ok(answer);
    };
    if !engine.resolved.config().agent.attach {
        return refused(ATTACH_IS_OFF);
    }
    let detachment = &mut engine.detachment;
    let mark = &mut engine.store.mark;
    mark.clear().map_err(EngineError::Unsaved)?;
    engine.kernel.is_frozen = false;
    if let Err(e) = engine.kernel.attach_detached(&engine.resolved) {
        let _ = mark.set(by); // Its problem says how it went.
        if detachment.is_draining {
            // Policies may have been written again.
            if let Err(e) = begin_draining(engine, Duration::ZERO) {
                warn!("the program may still treat new connections: {e}");
            }
            engine.kernel.is_frozen = true;
        }
        return Err(e);
    }
    detachment.is_draining = false;
    detachment.by = None;
    // The jobs read what is published.
    engine.publish();
    engine.resume_events();
    look_at_programs(engine);
    cause.audit_other("attach");
    engine.apply_to_open(cause);
    answer.notes.push("attached again".to_owned());
    Ok(answer)
}

/// Detaches the programs and begins to restore sockets. `finish_restore()` completes the
/// detachment.
fn begin_restore(engine: &mut Engine, by: Caller) -> Result<Option<NotLasting>, EngineError> {
    check_can_walk(&engine.config)?;
    engine.walks.stop();
    engine.events.end();
    if engine.walks.is_running() {
        return refused(
            "the walk over open sockets is blocked; try again, or detach without --restore",
        );
    }
    let not_lasting = engine.store.mark.set(by);
    let was_draining = engine.detachment.is_draining;
    let left = begin_draining(engine, Duration::ZERO);
    let walkers = left.and_then(|left| {
        engine.detachment.is_draining = left != 0;
        engine
            .kernel
            .unlink_for_restoring(engine.detachment.is_draining)
    });
    let walkers = match walkers {
        Ok(walkers) => walkers,
        Err(e) => {
            engine.detachment.is_draining = was_draining;
            return Err(not_detached(engine, e));
        }
    };
    detached(engine, by);
    engine.walks.begin(walkers, walk::RESTORE, Vec::new());
    Ok(not_lasting)
}

/// Completes a detachment once its walk has ended, or has taken too long.
pub(super) fn finish_restore(engine: &mut Engine) -> Option<Answer> {
    let over = |restoring: &Restoring| Instant::now() >= restoring.deadline;
    if engine.walks.is_running() && !engine.detachment.restoring.as_ref().is_some_and(over) {
        return None;
    }
    let Restoring {
        reply, not_lasting, ..
    } = engine.detachment.restoring.take()?;
    let mut restored = WalkView::clone(&engine.walks.progress().borrow());
    if engine.walks.is_running() {
        engine.walks.stop();
        restored.problems.push(format!(
            "not finished after {} s: blocked by a socket that is in use",
            RESTORE_LIMIT.as_secs()
        ));
    }
    let left_maps = if engine.detachment.is_draining {
        // The maps stay as they are for the program.
        let pin_dir = &engine.kernel.options.pin_dir;
        Ok((!restored.is_complete()).then(|| pin_dir.clone()))
    } else if restored.is_complete() {
        engine.kernel.restored(&engine.resolved).map(|()| None)
    } else {
        Ok(Some(engine.kernel.leave_maps()))
    };
    info!(complete = restored.is_complete(), "restored open sockets");
    let answer = left_maps.map(|kept| {
        let mut answer = DetachAnswer {
            restored: Some(restored),
            kept,
            ..detach_answer(1, not_lasting, engine.connecting())
        };
        detach_others(engine, &mut answer);
        answer
    });
    Some((reply, answer.map_err(EngineError::from)))
}

/// If the service manager keeps descriptors, hands it the pinned objects for the next start,
/// and unpins them. It drops them, and the link with them, when the daemon has ended and is not
/// restarted. Returns whether it has them.
fn hand_over(engine: &Engine, deadline: Instant) -> bool {
    if !systemd::says_it_keeps() {
        return false;
    }
    let pin_dir = &engine.kernel.options.pin_dir;
    // The program is gone as soon as the service manager drops the descriptors.
    if until_connected(pin_dir, until(deadline)).is_ok_and(|left| left != 0) {
        return false;
    }
    let done = handover::pinned_objects(pin_dir).and_then(|objects| {
        let is_taken = systemd::hand_over(&objects)?;
        if is_taken {
            handover::unpin(pin_dir)?;
        }
        Ok(is_taken)
    });
    match done {
        Ok(is_taken) => {
            if is_taken {
                info!("stopping; the service manager keeps the active policies for a restart");
            }
            is_taken
        }
        Err(e) => {
            warn!(
                "the service manager could not take over the active policies; no policy is \
                 active until the next start: {e}"
            );
            false
        }
    }
}

/// Leaves the kernel as `on_exit` says.
pub(super) fn leave(engine: &mut Engine) -> anyhow::Result<()> {
    if engine.detachment.restoring.is_some() || engine.kernel.has_left_maps {
        let directory = engine.kernel.leave_maps();
        warn!(
            "some sockets could not be restored: the maps in {} are kept; run rto-agent detach \
             --restore as root to finish",
            directory.display()
        );
        return Ok(());
    }
    if engine.detachment.is_draining {
        warn!("{}", left_draining(engine.connecting()));
        return Ok(());
    }
    let deadline = Instant::now() + DRAIN_LIMIT;
    match engine.resolved.config().agent.on_exit {
        OnExit::Keep if engine.detachment.by.is_some() => {
            info!("stopping; no policy is active, and statistics are kept");
        }
        OnExit::Keep => {
            info!("stopping; the policies stay active (on_exit = \"keep\")");
        }
        OnExit::Detach if engine.detachment.by.is_none() && hand_over(engine, deadline) => {}
        OnExit::Detach => {
            let left = begin_draining(engine, until(deadline))?;
            if left != 0 {
                warn!("{}", left_draining(left));
                engine.kernel.leave_draining();
                return Ok(());
            }
            let removed = engine.kernel.detach()?;
            info!(links = removed.links, "stopping; detached");
        }
    }
    Ok(())
}

fn until(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now())
}

/// Removes programs of other pin directories that no daemon manages, and notes what is left.
pub fn remove_others(others: &[OtherProgram], answer: &mut DetachAnswer) {
    for other in others {
        let Some(pin_dir) = other.pin_dir.as_ref().filter(|_| !other.is_managed) else {
            answer.notes.push(format!(
                "{other}: another daemon seems to manage it, and it is left"
            ));
            continue;
        };
        match drain(pin_dir, DRAIN_LIMIT) {
            Ok(0) => {}
            Ok(connecting) => {
                answer
                    .notes
                    .push(format!("{other}: {}", left_draining(connecting)));
                continue;
            }
            Err(e) => {
                answer.notes.push(format!("{other}, and is left: {e}"));
                continue;
            }
        }
        match remove_pins(pin_dir) {
            Ok(Removed {
                generations,
                links,
                left,
            }) => {
                answer.removed.links += links;
                answer.removed.generations.extend(generations);
                answer.removed.left.extend(left);
                answer
                    .notes
                    .push(format!("{other}: it was detached as well"));
            }
            Err(e) => answer.notes.push(format!("{other}, and is left: {e}")),
        }
    }
}

fn detach_answer(links: usize, not_lasting: Option<NotLasting>, connecting: u64) -> DetachAnswer {
    DetachAnswer {
        connecting,
        notes: (connecting != 0)
            .then(|| draining(connecting))
            .into_iter()
            .collect(),
        removed: Removed {
            links,
            ..Removed::default()
        },
        by_daemon: true,
        not_lasting,
        ..DetachAnswer::default()
    }
}
