//! Builds `status` and `stats` from a snapshot.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use rto_agent_core::{
    policy::{PolicyName, entries::FamilyCounts},
    printable::{counted, direction_text},
    wire::{
        holdout::{HoldoutView, Verdict},
        kernel::{self, Attachment},
        tune::{TimerKind, TunedTimer},
        types::{DroppedView, EntriesView, ProbeView, StatusAnswer},
    },
};
use rto_model::tune::tuner::{State, Value};

use super::{
    snapshot::{Snapshot, locked},
    systemd,
};
use crate::build_info;

/// The daemon's status. Reads no statistics.
#[must_use]
pub fn status(snapshot: &Snapshot) -> StatusAnswer {
    let health = &snapshot.health;
    let attachment = snapshot.attachment();
    let resolved = snapshot.resolved.as_deref();
    let policies = resolved.filter(|_| snapshot.reader.is_some());
    let policies = policies.map_or_else(BTreeSet::new, |resolved| {
        resolved.set.policies.keys().cloned().collect()
    });
    let harms = locked(&snapshot.shared.harms);
    let short = too_short(snapshot);
    let names = short.iter().map(|(name, _)| name.clone()).collect();
    let (harmful, suspicious) = harms.report(&policies, &names);
    let (mut problems, mut warnings) = (problems(snapshot, &attachment), warnings(snapshot));
    problems.extend(harmful);
    problems.extend(short.into_iter().map(|(_, problem)| problem));
    warnings.extend(suspicious);
    let left_out = resolved.map_or(0, |resolved| resolved.left_out.len());
    let runtime_entries = resolved.map_or(0, |resolved| resolved.desired.runtime.len()) - left_out;
    let foreign = |id: &&u32| Some(**id) != attachment.program_id;
    StatusAnswer {
        version: build_info::VERSION.to_owned(),
        commit: build_info::COMMIT.to_owned(),
        target: build_info::TARGET.to_owned(),
        pid: std::process::id(),
        uptime_s: snapshot.started.elapsed().as_secs(),
        healthy: problems.is_empty(),
        problems,
        warnings,
        foreign_programs: health.programs.iter().filter(foreign).count(),
        attachment,
        detached_by: health.detached_by,
        found_at_start: health.found,
        in_sync: health.in_sync,
        map_differences: health.map_differences.clone(),
        maps_compared_at_s: health.maps_compared_at_s,
        kernel: snapshot.config.kernel.clone(),
        host: resolved.map_or(snapshot.config.host, |resolved| resolved.desired.host),
        config: snapshot.config.config_path.clone(),
        pin_dir: snapshot.agent().pin_dir.clone(),
        entries: resolved.map_or(0, |resolved| resolved.set.entries.len()),
        runtime_entries,
        runtime_entries_left_out: left_out,
        entries_of: entries_of(snapshot),
        max_entries: health.max_entries,
        counters_read_at_s: harms.read_at_s(),
        policies,
        holdouts: holdouts(snapshot),
        dropped: dropped(snapshot),
        last_reload: health.last_reload.clone(),
        features: snapshot.config.features.clone(),
        probe: health.probe.clone(),
        open_sockets: Some(snapshot.walk())
            .filter(|walk| !walk.cause.is_empty())
            .map(Arc::unwrap_or_clone),
        tuning: unusual_timers(snapshot),
    }
}

/// Configured timers whose fallback (spurious) is in force.
fn too_short(snapshot: &Snapshot) -> Vec<(PolicyName, String)> {
    let tuned = snapshot.tune();
    let is_short = |timer: &TunedTimer| {
        timer.kind == TimerKind::Guarded && timer.state == State::FallbackSpurious
    };
    let timers = tuned.timers().filter(|(_, timer)| is_short(timer));
    let line = |(name, timer): (&PolicyName, &TunedTimer)| {
        let problem = format!(
            "policy {name}: initial_rto {} is shorter than the path RTT of {} connections: new ones have \
             the kernel's own timer, fallback (spurious); raise it above the path RTT that \
             rto-agent stats --policy {name} shows, or set it to \"auto\"",
            Value(timer.configured_us),
            direction_text(&timer.direction)
        );
        (name.clone(), problem)
    };
    timers.map(line).collect()
}

/// One line for each timer in fallback or frozen.
fn unusual_timers(snapshot: &Snapshot) -> Vec<String> {
    let tuned = snapshot.tune();
    let unusual = tuned.timers().filter(|(_, timer)| timer.is_unusual());
    let line = |(name, timer): (&PolicyName, &TunedTimer)| timer.line(name, tuned.at_ms);
    unusual.map(line).collect()
}

/// The comparison of each policy's arms.
fn holdouts(snapshot: &Snapshot) -> BTreeMap<PolicyName, HoldoutView> {
    let tuned = snapshot.tune();
    let policies = tuned.policies.iter();
    let compared = policies.filter_map(|(name, of)| Some((name.clone(), of.holdout.clone()?)));
    compared.collect()
}

fn problems(snapshot: &Snapshot, attachment: &Attachment) -> Vec<String> {
    let health = &snapshot.health;
    let mut problems = health.problems.clone();
    if problems.is_empty() {
        problems.extend(attachment.problem.clone());
    }
    if !health.last_reload.ok {
        // The problem of a failed rollback is listed already.
        let in_force = match health.last_reload.kept_at_s {
            _ if !health.in_sync => "",
            None => "; the last good configuration is active",
            Some(_) => "; the last good configuration, saved on disk, is active",
        };
        let cause = &health.last_reload.cause;
        problems.push(format!(
            "the configuration was rejected ({cause}){in_force}"
        ));
    }
    problems
}

fn warnings(snapshot: &Snapshot) -> Vec<String> {
    let health = &snapshot.health;
    if snapshot.is_starting() {
        return Vec::new();
    }
    let mut warnings = health.warnings.clone();
    let DroppedView {
        log,
        service_manager,
    } = dropped(snapshot);
    if log + service_manager > 0 {
        warnings.push(format!(
            "dropped, because the receiver is too slow: {} of the log, {} to the service \
             manager",
            counted(log, "line", "lines"),
            counted(service_manager, "message", "messages")
        ));
    }
    let reader = snapshot.reader.as_deref();
    warnings.extend(reader.and_then(|r| r.limited()).map(ToOwned::to_owned));
    warnings.extend(health.last_reload.warnings.iter().cloned());
    if !snapshot.agent().statistics {
        warnings.push("no statistics (statistics = false in [agent])".to_owned());
    }
    if let Some(reader) = reader {
        warnings.extend(reader.missing_stats().iter().map(|name| {
            format!(
                "policy {name}: at least one arm has no statistics, because there was not \
                 enough memory; its timers are active"
            )
        }));
    }
    warnings.extend(holdouts(snapshot).iter().filter_map(
        |(policy, holdout)| match holdout.verdict {
            Verdict::Harm if holdout.fallback => Some(format!(
                "policy {policy}: fallback (harm): new connections get the kernel's own \
                 timers until rto-agent tune resume {policy}, or until the policy's settings \
                 change"
            )),
            Verdict::Harm | Verdict::Invalid => Some(format!("policy {policy}: {}", holdout.text)),
            Verdict::NotYet | Verdict::Gain => None,
        },
    ));
    if let Some(ProbeView {
        verdict: verdict @ kernel::Verdict::Interference { .. },
        ..
    }) = &health.probe
    {
        warnings.push(format!(
            "probe: {}; rto-agent doctor names the other programs",
            verdict.describe()
        ));
    }
    warnings
}

fn dropped(snapshot: &Snapshot) -> DroppedView {
    DroppedView {
        log: (snapshot.config.dropped_lines)(),
        service_manager: systemd::unsent(),
    }
}

fn entries_of(snapshot: &Snapshot) -> EntriesView {
    let Some(resolved) = &snapshot.resolved else {
        return EntriesView::default();
    };
    let all = resolved.set.entries.families();
    let mut runtime = resolved.desired.runtime.families();
    for cidr in resolved.left_out.keys() {
        *runtime.of(cidr) -= 1;
    }
    EntriesView {
        file: FamilyCounts {
            ipv4: all.ipv4.saturating_sub(runtime.ipv4),
            ipv6: all.ipv6.saturating_sub(runtime.ipv6),
        },
        runtime,
    }
}

/// One line for `systemctl status`.
pub(super) fn status_line(snapshot: &Snapshot) -> String {
    let health = &snapshot.health;
    let first = match (
        &health.detached_by,
        health.problems.first(),
        &snapshot.resolved,
    ) {
        (Some(by), ..) => format!("detached by {by}"),
        (None, Some(problem), _) => problem.clone(),
        (None, None, resolved) => {
            let set = resolved.as_ref().map(|resolved| &resolved.set);
            let entries = set.map_or(0, |set| set.entries.len());
            let policies = set.map_or(0, |set| set.policies.len());
            format!(
                "{} of {} active",
                counted(entries, "entry", "entries"),
                counted(policies, "policy", "policies")
            )
        }
    };
    if health.last_reload.ok {
        first
    } else {
        format!("{first}; last reload rejected, the last good configuration is active")
    }
}

#[cfg(test)]
mod tests {
    use rto_agent_core::wire::types::Caller;

    use super::*;
    use crate::engine::{
        desired::tests::{NEAR, desired, entry, settings},
        snapshot::{Health, tests::healthy},
    };

    const BY: Caller = Caller { uid: 0, pid: 1 };

    /// A healthy snapshot with two entries of a file and one runtime entry.
    fn snapshot() -> Snapshot {
        let desired = desired(NEAR);
        let cidr = "10.9.0.0/16".parse().unwrap();
        healthy(desired.with_entries(&[cidr], &entry("near", None), &settings(100))).1
    }

    fn with(change: impl FnOnce(&mut Health)) -> Snapshot {
        let mut snapshot = snapshot();
        change(Arc::make_mut(&mut snapshot.health));
        snapshot
    }

    #[test]
    fn service_manager_gets_one_line_status() {
        let line = |change: fn(&mut Health)| status_line(&with(change));
        assert_eq!(line(|_| {}), "3 entries of 1 policy active");
        let broken = line(|health| health.problems = vec!["out of sync".to_owned()]);
        assert_eq!(broken, "out of sync");
        let detached = line(|health| health.detached_by = Some(BY));
        assert_eq!(detached, format!("detached by {BY}"));
        let refused = line(|health| health.last_reload.ok = false);
        assert_eq!(
            refused,
            "3 entries of 1 policy active; last reload rejected, the last good configuration is \
             active"
        );
    }

    #[test]
    fn entries_are_counted_by_source() {
        let entries = entries_of(&snapshot());
        let families = |view: &FamilyCounts| (view.ipv4, view.ipv6);
        assert_eq!(families(&entries.file), (1, 1));
        assert_eq!(families(&entries.runtime), (1, 0));
    }

    #[test]
    fn bad_file_leaves_the_last_good_in_force() {
        let text = |in_sync, kept_at_s| {
            let snapshot = with(|health| {
                health.in_sync = in_sync;
                health.last_reload.ok = false;
                health.last_reload.kept_at_s = kept_at_s;
            });
            problems(&snapshot, &snapshot.attachment()).pop().unwrap()
        };
        assert!(text(true, None).ends_with("; the last good configuration is active"));
        assert!(
            text(true, Some(1))
                .ends_with("; the last good configuration, saved on disk, is active")
        );
        for kept_at_s in [None, Some(1)] {
            assert_eq!(
                text(false, kept_at_s),
                "the configuration was rejected (start)"
            );
        }
    }

    #[test]
    fn status_counts_foreign_programs() {
        let snapshot = with(|health| health.programs = vec![7, 8]);
        let status = status(&snapshot);
        assert_eq!(status.foreign_programs, 2);
        assert!(status.open_sockets.is_none());
        assert!(
            status
                .attachment
                .program_id
                .is_none_or(|id| id != 7 && id != 8)
        );
    }
}
