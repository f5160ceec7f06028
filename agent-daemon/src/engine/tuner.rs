//! Decisions about timers and arms, made once a second or by an operator, and applied like every
//! other change.

use rto_agent_core::{
    policy::PolicyName,
    wire::{
        events::StreamItem,
        tune::{TuneAction, TuneAnswer},
        types::Caller,
    },
};

use super::{
    audit::{Cause, Source},
    change::{Engine, Persist},
    error::{EngineError, refused},
};

/// Reads the counters that are due, and applies the resulting decisions.
pub(super) fn tick(engine: &mut Engine) {
    let Some(reader) = engine.reader.clone() else {
        return;
    };
    let decisions = engine.control.tick(reader.as_ref(), &engine.resolved);
    // Persist first, so that a crash cannot lose a decision.
    record(engine, &decisions.items);
    let applied = apply(engine);
    let in_force = engine.resolved.desired.adjustments.clone();
    let store = &engine.store.tuning;
    engine
        .control
        .show_some(&decisions.policies, &in_force, store);
    match applied {
        Ok(()) => engine.control.in_force(decisions.problem),
        Err(e) => {
            engine.control.not_in_force(&e);
            engine.publish();
        }
    }
}

/// `rto-agent tune freeze`, `resume` and `reset`.
pub(super) fn tune(
    engine: &mut Engine,
    action: TuneAction,
    policy: &PolicyName,
    by: Caller,
) -> Result<TuneAnswer, EngineError> {
    let desired = &engine.resolved.desired;
    let acted = match engine.control.act(policy, action, desired) {
        Ok(acted) => acted,
        Err(why) => return refused(why),
    };
    if let Err(e) = apply(engine) {
        engine.control.undo(policy, acted);
        return Err(e);
    }
    Cause::done(action.audited(), by).audit_other(action.audited());
    record(engine, &acted.items);
    let in_force = &engine.resolved.desired.adjustments;
    engine.control.show(in_force, &engine.store.tuning);
    Ok(engine.control.published().borrow().only(policy))
}

/// Applies the current decisions, if they have changed.
fn apply(engine: &mut Engine) -> Result<(), EngineError> {
    let desired = engine.desired();
    if engine.control.adjusted(desired).adjustments == desired.adjustments {
        return Ok(());
    }
    let next = desired.clone();
    let changed = engine.change(&next, &Persist::Later, &Source::Tuner.into());
    changed.map(drop)
}

/// Logs and stores decisions, and sends them to watchers.
fn record(engine: &mut Engine, items: &[StreamItem]) {
    for item in items {
        engine.events.tell(item.clone());
    }
    engine.control.record(items, &mut engine.store.tuning);
}
