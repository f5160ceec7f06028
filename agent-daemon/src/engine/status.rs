//! Builds `status` and `stats` from a snapshot.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use rto_agent_core::{
    policy::{PolicyName, entries::FamilyCounts},
    printable::counted,
    wire::{
        holdout::{HoldoutView, Verdict},
        kernel::{self, Attachment},
        stats::{ArmStatistics, PolicyStats, StatsAnswer},
        tune::{TimerKind, TunedTimer},
        types::{DroppedView, EntriesView, ProbeView, StatusAnswer, now_ms},
    },
};
use rto_agent_kernel::datapath::{DatapathError, KernelReader};
use rto_model::tune::tuner::State;

use super::{Snapshot, snapshot::locked, systemd};
use crate::build_info;

impl Snapshot {
    /// The daemon's status. Reads no statistics.
    #[must_use]
    pub fn status(&self) -> StatusAnswer {
        let health = &self.health;
        let attachment = self.attachment();
        let resolved = self.resolved.as_deref();
        let policies = resolved.filter(|_| self.reader.is_some());
        let policies = policies.map_or_else(BTreeSet::new, |resolved| {
            resolved.set.policies.keys().cloned().collect()
        });
        let harms = locked(&self.shared.harms);
        let (harmful, suspicious) = harms.report(&policies);
        let (mut problems, mut warnings) = (self.problems(&attachment), self.warnings());
        problems.extend(harmful);
        problems.extend(self.too_short());
        warnings.extend(suspicious);
        let left_out = resolved.map_or(0, |resolved| resolved.left_out.len());
        let runtime_entries =
            resolved.map_or(0, |resolved| resolved.desired.runtime.len()) - left_out;
        let foreign = |id: &&u32| Some(**id) != attachment.program_id;
        StatusAnswer {
            version: build_info::VERSION.to_owned(),
            commit: build_info::COMMIT.to_owned(),
            target: build_info::TARGET.to_owned(),
            pid: std::process::id(),
            uptime_s: self.started.elapsed().as_secs(),
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
            kernel: self.config.kernel.clone(),
            host: resolved.map_or(self.config.host, |resolved| resolved.desired.host),
            config: self.config.config_path.clone(),
            pin_dir: self.agent().pin_dir.clone(),
            entries: resolved.map_or(0, |resolved| resolved.set.entries.len()),
            runtime_entries,
            runtime_entries_left_out: left_out,
            entries_of: self.entries_of(),
            max_entries: health.max_entries,
            counters_read_at_s: harms.read_at_s(),
            policies,
            holdouts: self.holdouts(),
            dropped: self.dropped(),
            last_reload: health.last_reload.clone(),
            features: self.config.features.clone(),
            probe: health.probe.clone(),
            open_sockets: Some(self.walk())
                .filter(|walk| !walk.cause.is_empty())
                .map(Arc::unwrap_or_clone),
            tuning: self.unusual_timers(),
        }
    }

    /// Configured timers whose fallback (spurious) is in force.
    fn too_short(&self) -> Vec<String> {
        let tuned = self.tune();
        let is_short = |timer: &TunedTimer| {
            timer.kind == TimerKind::Guarded && timer.state == State::FallbackSpurious
        };
        let timers = tuned.timers().filter(|(_, timer)| is_short(timer));
        let line = |(name, timer): (&PolicyName, &TunedTimer)| {
            format!(
                "policy {name}: initial_rto {} is shorter than the path RTT: new connections have the \
                 kernel's own timer, fallback (spurious); raise it above the path RTT that \
                 rto-agent stats --policy {name} shows, or set it to \"auto\"",
                timer.direction
            )
        };
        timers.map(line).collect()
    }

    /// One line for each timer in fallback or frozen.
    fn unusual_timers(&self) -> Vec<String> {
        let tuned = self.tune();
        let unusual = tuned.timers().filter(|(_, timer)| timer.is_unusual());
        let line = |(name, timer): (&PolicyName, &TunedTimer)| timer.line(name, tuned.at_ms);
        unusual.map(line).collect()
    }

    /// The comparison of each policy's arms.
    fn holdouts(&self) -> BTreeMap<PolicyName, HoldoutView> {
        let tuned = self.tune();
        let policies = tuned.policies.iter();
        let compared = policies.filter_map(|(name, of)| Some((name.clone(), of.holdout.clone()?)));
        compared.collect()
    }

    fn problems(&self, attachment: &Attachment) -> Vec<String> {
        let health = &self.health;
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

    fn warnings(&self) -> Vec<String> {
        let health = &self.health;
        if self.is_starting() {
            return Vec::new();
        }
        let mut warnings = health.warnings.clone();
        let DroppedView {
            log,
            service_manager,
        } = self.dropped();
        if log + service_manager > 0 {
            warnings.push(format!(
                "dropped, because the receiver is too slow: {} of the log, {} to the service \
                 manager",
                counted(log, "line", "lines"),
                counted(service_manager, "message", "messages")
            ));
        }
        let reader = self.reader.as_deref();
        warnings.extend(reader.and_then(|r| r.limited()).map(ToOwned::to_owned));
        warnings.extend(health.last_reload.warnings.iter().cloned());
        if !self.agent().statistics {
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
        warnings.extend(self.holdouts().iter().filter_map(
            |(policy, holdout)| match holdout.verdict {
                Verdict::Harm if holdout.fallback => Some(format!(
                    "policy {policy}: fallback (harm): new connections get the kernel's own \
                     timers until rto-agent tune resume {policy}, or until the policy's settings \
                     change"
                )),
                Verdict::Harm | Verdict::Invalid => {
                    Some(format!("policy {policy}: {}", holdout.text))
                }
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

    fn dropped(&self) -> DroppedView {
        DroppedView {
            log: (self.config.dropped_lines)(),
            service_manager: systemd::unsent(),
        }
    }

    fn entries_of(&self) -> EntriesView {
        let Some(resolved) = &self.resolved else {
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

    /// Reads the statistics of all policies; without a reader, there are none.
    pub(super) fn read_stats(
        &self,
        reader: Option<&dyn KernelReader>,
    ) -> Result<Arc<StatsAnswer>, Arc<DatapathError>> {
        let resolved = self.resolved.as_deref();
        let tuned = self.tune();
        let mut policies = BTreeMap::new();
        let mut add = |name: &PolicyName, statistics: &ArmStatistics| {
            let policy = resolved.and_then(|resolved| resolved.set.policies.get(name));
            let stats = PolicyStats {
                since_ms: tuned.policies.get(name).and_then(|tuned| tuned.since_ms),
                description: policy.and_then(|policy| policy.description.clone()),
                holdout: policy
                    .and_then(|policy| policy.settings.holdout)
                    .filter(|_| statistics.control.is_some()),
                verdict: tuned
                    .policies
                    .get(name)
                    .and_then(|tuned| tuned.holdout.clone()),
                ..PolicyStats::from(statistics)
            };
            policies.insert(name.clone(), stats);
        };
        if let Some(reader) = reader {
            reader.statistics(&mut add)?;
        }
        Ok(Arc::new(StatsAnswer {
            at_ms: now_ms(),
            on: self.agent().statistics,
            sampling: self.agent().sampling,
            rtt_sampling: self.agent().rtt_sampling.to_string(),
            policies,
        }))
    }

    /// One line for `systemctl status`.
    pub(super) fn status_line(&self) -> String {
        let health = &self.health;
        let first = match (&health.detached_by, health.problems.first(), &self.resolved) {
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
    fn status_line_for_the_service_manager() {
        let line = |change: fn(&mut Health)| with(change).status_line();
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
    fn entries_of_files_and_of_run_time_are_told_apart() {
        let entries = snapshot().entries_of();
        let families = |view: &FamilyCounts| (view.ipv4, view.ipv6);
        assert_eq!(families(&entries.file), (1, 1));
        assert_eq!(families(&entries.runtime), (1, 0));
    }

    #[test]
    fn bad_file_leaves_the_last_good_in_force() {
        let told = |in_sync, kept_at_s| {
            let snapshot = with(|health| {
                health.in_sync = in_sync;
                health.last_reload.ok = false;
                health.last_reload.kept_at_s = kept_at_s;
            });
            snapshot.problems(&snapshot.attachment()).pop().unwrap()
        };
        assert!(told(true, None).ends_with("; the last good configuration is active"));
        assert!(
            told(true, Some(1))
                .ends_with("; the last good configuration, saved on disk, is active")
        );
        for kept_at_s in [None, Some(1)] {
            assert_eq!(
                told(false, kept_at_s),
                "the configuration was rejected (start)"
            );
        }
    }

    #[test]
    fn programs_of_others_and_walks_are_told_where_there_are_any() {
        let snapshot = with(|health| health.programs = vec![7, 8]);
        let status = snapshot.status();
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
