//! Reads, checks and applies the configuration files.

use std::{
    collections::BTreeSet,
    sync::Arc,
    time::{Duration, Instant},
};

use rto_agent_core::{
    config::{AgentConfig, Files},
    policy::{
        Cidr, PolicySet, SETTINGS, differences::Differences, plan::ChangeSummary,
        units::format_duration,
    },
    progress::stepping,
    wire::types::{Caller, ChangeAnswer, ReloadRequest, ReloadView},
};
use rto_agent_kernel::{datapath::room_for, kernel::clock::boottime_ms};
use tracing::{error, warn};

use super::{
    audit::{Cause, Source},
    change::{Engine, Persist},
    desired::{LoadedConfig, Resolved},
    detach::{attach, detach_now},
    error::{EngineError, refused},
    files::{self, Taken},
    health::{compare_next, verify},
    memory,
    notes::Notes,
    runtime::Override,
    store::emptied,
};

/// How long a reload without a change names the one before.
const RECENTLY: Duration = Duration::from_mins(1);
/// With more entries, a reload answers first and compares the kernel's maps in the background.
const COMPARED_AT_ONCE: usize = 65_536;

/// Reads the files again, and logs the result.
pub(super) fn reload_requested(
    engine: &mut Engine,
    request: &ReloadRequest,
    cause: &Cause,
) -> Result<ChangeAnswer, EngineError> {
    engine.detachment.check_not_restoring()?;
    let files = match engine.files.read() {
        Ok(files) => files,
        Err(e) if request.dry_run => return Err(e),
        Err(e) => return Err(unread(engine, e, cause)),
    };
    if request.dry_run {
        return reload_dry(engine, &files, request.allow_empty);
    }
    let mut answer = reload(engine, files, request.allow_empty, cause)?;
    if request.attach {
        answer.notes.extend(attach(engine, cause)?.notes);
        engine.publish();
    }
    note_detached(engine, &mut answer);
    Ok(answer)
}

pub(super) fn files_changed(engine: &mut Engine) {
    match engine.files.read() {
        Ok(files) if Some(files.fingerprint()) == engine.files.fingerprint => {}
        Ok(files) => {
            let _ = reload(engine, files, false, &Source::File.into()); // it has been logged
            memory::trim_heap();
        }
        // The files are checked every half minute: known errors are not logged again.
        Err(e) if engine.files.last_reload.errors == [e.to_string()] => {}
        Err(e) => {
            let _ = unread(engine, e, &Source::File.into()); // it has been logged
        }
    }
}

/// Treats unreadable files like rejected ones. Once they are readable again, they are loaded
/// even if unchanged.
fn unread(engine: &mut Engine, error: EngineError, cause: &Cause) -> EngineError {
    if matches!(error, EngineError::Stopping) {
        return error;
    }
    engine.files.fingerprint = None;
    let error = not_reloaded(engine, error, cause);
    engine.publish();
    error
}

fn reload(
    engine: &mut Engine,
    files: Files,
    allow_empty: bool,
    cause: &Cause,
) -> Result<ChangeAnswer, EngineError> {
    engine.systemd.reloading();
    let is_known = engine.files.fingerprint == Some(files.fingerprint());
    engine.files.fingerprint = Some(files.fingerprint());
    let taken_before = engine.files.taken.clone().filter(|_| is_known);
    let entries = engine.resolved.maps.entries.len();
    let differences = if entries <= COMPARED_AT_ONCE {
        verify(engine).differences
    } else {
        engine.comparing.compare_all();
        Differences::default()
    };
    let taken = take_over(engine, files, &[], &Persist::Later, allow_empty, cause);
    let mut result = taken.map_err(|error| not_reloaded(engine, error, cause));
    // Files that change are taken over at once, so that a reload is often too late to change something.
    if let Ok(answer) = &mut result
        && answer.changed == ChangeSummary::default()
        && let Some(taken) = taken_before.filter(|taken| taken.at.elapsed() < RECENTLY)
    {
        let ago = format_duration(Duration::from_secs(taken.at.elapsed().as_secs().max(1)));
        let Taken { cause, detail, .. } = taken;
        let note = format!("these files were taken over {ago} ago ({cause}): {detail}");
        answer.notes.insert(0, note);
    }
    for note in result.iter().flat_map(|answer| &answer.notes) {
        warn!(%cause, "{note}");
    }
    if let Ok(answer) = &mut result
        && !differences.is_empty()
    {
        // Already logged.
        let note = format!("another process had changed the kernel's maps: {differences}");
        answer.notes.push(note);
    }
    engine.publish();
    compare_next(engine);
    engine.systemd.reloaded();
    result
}

fn load_checked(
    engine: &Engine,
    files: &Files,
    allow_empty: bool,
) -> Result<Arc<LoadedConfig>, EngineError> {
    let loaded = files::load(files, engine.desired())?;
    let former = &engine.resolved.config().set;
    match emptied(&loaded.config.set, former).filter(|_| !allow_empty) {
        Some(error) => refused(error),
        None => Ok(loaded),
    }
}

/// Reports what a reload would change.
fn reload_dry(
    engine: &Engine,
    files: &Files,
    allow_empty: bool,
) -> Result<ChangeAnswer, EngineError> {
    let loaded = load_checked(engine, files, allow_empty)?;
    let before = &engine.resolved;
    let next = before.desired.with_files(loaded, boottime_ms()).resolve()?;
    let mut notes = next.config().warnings.clone();
    notes.extend(restart_notes(
        &engine.config.config.agent,
        &next.config().agent,
    ));
    notes.extend(next.left_out_text());
    Ok(ChangeAnswer {
        changed: ChangeSummary::between(&before.maps, &next.maps),
        would_change: Some(difference(before, &next)),
        notes,
        ..ChangeAnswer::default()
    })
}

/// Stores the last good configuration again if it was removed.
pub(super) fn keep_last_good(engine: &mut Engine) {
    if engine.store.last_good.is_gone()
        && let Ok(files) = engine.files.read()
        && files.fingerprint() == engine.desired().files.fingerprint
    {
        engine.store.last_good.stage(&files);
        engine.store.last_good.commit();
    }
}

/// Applies these files, and keeps them as the last good configuration. Runtime entries and masks of
/// `saved` end.
pub(super) fn take_over(
    engine: &mut Engine,
    files: Files,
    saved: &[Cidr],
    persist: &Persist,
    allow_empty: bool,
    cause: &Cause,
) -> Result<ChangeAnswer, EngineError> {
    let loaded = load_checked(engine, &files, allow_empty)?;
    engine.store.last_good.stage(&files);
    // The texts take as much memory as the parsed configuration.
    drop(files);
    let agent = &loaded.config.agent;
    let mut notes = loaded.config.warnings.clone();
    let warnings = restart_notes(&engine.config.config.agent, agent);
    notes.extend(warnings.iter().cloned());
    let room = |agent: &AgentConfig| room_for(0, agent.max_entries);
    if room(agent) < room(&engine.resolved.config().agent) {
        notes.push("[agent] max_entries is smaller: it takes effect at the next start".to_owned());
    }
    let (next, ended) = engine.desired().without_overrides(saved);
    let next = next.with_files(loaded.clone(), boottime_ms());
    let change = match engine.change(&next, persist, cause) {
        Ok(change) => change,
        Err(e) => {
            engine.store.last_good.discard();
            return Err(e);
        }
    };
    engine.store.last_good.commit();
    engine.files.last_reload = cause.reload_view(Ok(&loaded.config));
    engine.files.warnings = warnings;
    if !change.detail.is_empty() {
        engine.files.taken = Some(Taken {
            at: Instant::now(),
            cause: cause.to_string(),
            detail: change.detail,
        });
    }
    notes.extend(ended_overrides(saved, ended, &loaded.config.set));
    notes.extend(change.unsaved);
    notes.extend(engine.control.take_notes());
    // The next start reads the mark in the `persistent_dir` of these files.
    let agent = &loaded.config.agent;
    let detached_by = engine.detachment.by;
    let mark = &mut engine.store.mark;
    mark.follow(&agent.persistent_dir, detached_by);
    let followed = match (agent.attach, detached_by) {
        (false, None) => detach_now(engine, Caller::CONFIGURATION).map(drop),
        (true, Some(Caller::CONFIGURATION)) => attach(engine, cause).map(drop),
        _ => Ok(()),
    };
    notes.extend(followed.err().map(|e| format!("[agent] attach: {e}")));
    Ok(ChangeAnswer {
        changed: change.summary,
        notes,
        ..ChangeAnswer::default()
    })
}

/// Records that the files were rejected, and logs what is in force instead.
fn not_reloaded(engine: &mut Engine, error: EngineError, cause: &Cause) -> EngineError {
    const KEPT: &str = "the last good configuration stays active";
    engine.files.last_reload = ReloadView {
        kept_at_s: engine.files.last_reload.kept_at_s,
        ..cause.reload_view(Err(&error.to_string()))
    };
    if error.is_interrupted() {
        return error;
    }
    if error.is_refusal() {
        error!(%cause, "configuration rejected, {KEPT}:\n{error}");
    } else if engine.kernel.out_of_sync.is_some() {
        // The error's text says what the kernel holds.
        error!(%cause, "the configuration could not be applied: {error}");
        return error;
    } else {
        error!(%cause, "the configuration could not be applied, {KEPT}: {error}");
    }
    EngineError::NotReloaded(Box::new(error))
}

/// Notes that no policy is active.
pub(super) fn note_detached(engine: &Engine, answer: &mut ChangeAnswer) {
    if let Some(by) = engine.detachment.by {
        answer.notes.push(by.detached());
    }
}

/// Notes which runtime entries and masks a change of the saved entries has ended.
fn ended_overrides(saved: &[Cidr], ended: Vec<Option<Override>>, files: &PolicySet) -> Vec<String> {
    let mut notes = Notes::default();
    for (cidr, ended) in stepping(saved).zip(ended) {
        let is_saved = files.entries.contains_key(cidr);
        match ended {
            Some(Override::Entry) if is_saved => notes.push(|| {
                format!("{cidr}: the runtime entry has ended; the saved entry replaces it")
            }),
            Some(Override::Entry) => {
                notes.push(|| format!("{cidr}: the runtime entry has ended as well"));
            }
            Some(Override::Mask) if is_saved => {
                notes.push(|| format!("{cidr} is no longer switched off"));
            }
            Some(Override::Mask) | None => {}
        }
    }
    notes.end()
}

/// The changes that a reload would make: "~ policy near: initial_rto 100ms -> 200ms", "+
/// 10.2.0.0/16 near".
fn difference(before: &Resolved, next: &Resolved) -> Vec<String> {
    let (old, new) = (&before.config().set.policies, &next.config().set.policies);
    let names: BTreeSet<_> = old.keys().chain(new.keys()).collect();
    let mut policies = Notes::default();
    for name in names {
        match (old.get(name), new.get(name)) {
            (Some(_), None) => policies.push(|| format!("- policy {name}")),
            (None, Some(new)) => policies.push(|| {
                let given = SETTINGS.iter().filter_map(|setting| {
                    Some(format!(
                        "{} {}",
                        setting.key.name,
                        (setting.text)(&new.settings)?
                    ))
                });
                format!("+ policy {name}: {}", given.collect::<Vec<_>>().join(", "))
            }),
            (Some(old), Some(new)) if old.settings != new.settings => policies.push(|| {
                let changes = SETTINGS.iter().filter_map(|setting| {
                    let [old, new] = [old, new].map(|policy| (setting.text)(&policy.settings));
                    let text =
                        |value: &Option<String>| value.clone().unwrap_or("(none)".to_owned());
                    let (from, to) = (text(&old), text(&new));
                    (old != new).then(|| format!("{} {from} -> {to}", setting.key.name))
                });
                format!(
                    "~ policy {name}: {}",
                    changes.collect::<Vec<_>>().join(", ")
                )
            }),
            _ => {}
        }
    }
    let mut entries = Notes::default();
    before
        .set
        .entries
        .differences(&next.set.entries, |cidr, old, new| {
            entries.push(|| match (old, new) {
                (Some(old), Some(new)) => format!("~ {cidr} {old} -> {new}"),
                (Some(old), None) => format!("- {cidr} {old}"),
                (None, Some(new)) => format!("+ {cidr} {new}"),
                (None, None) => cidr.to_string(),
            });
        });
    [policies.end(), entries.end()].concat()
}

/// Changes of `[agent]` that need a restart.
fn restart_notes(started: &AgentConfig, now: &AgentConfig) -> Vec<String> {
    let keys = started.restart_keys(now).into_iter();
    keys.map(|key| format!("[agent] {key} changed: it takes effect at the next start"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::desired::tests::{NEAR, desired, files};

    #[test]
    fn dry_run_shows_settings_and_entries_that_change() {
        let old =
            format!("{NEAR}[policy.gone]\ninitial_rto = \"300ms\"\ncidrs = [\"10.3.0.0/16\"]\n");
        let new = "[policy.near]\ninitial_rto = \"200ms\"\nrto_min = \"20ms\"\ncidrs = [\"10.1.0.0/16\"]\n\
                   [policy.far]\ninitial_rto = \"300ms\"\ncidrs = [\"10.3.0.0/16\", \"10.4.0.0/16\"]\n";
        let before = desired(&old);
        let next = before.with_files(files(new), 0).resolve().unwrap();
        let before = before.resolve().unwrap();
        let wanted = [
            "+ policy far: initial_rto 300ms",
            "- policy gone",
            "~ policy near: initial_rto 100ms -> 200ms, rto_min (none) -> 20ms",
            "~ 10.3.0.0/16 gone -> far",
            "+ 10.4.0.0/16 far",
            "- fd00:1::/48 near",
        ];
        assert_eq!(difference(&before, &next), wanted);
        assert_eq!(difference(&next, &next), Vec::<String>::new());
    }
}
