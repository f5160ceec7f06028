//! Builds `status` and `stats` from a snapshot.

use std::{collections::BTreeMap, sync::Arc};

use rto_agent_core::{
    policy::PolicyName,
    printable::counted,
    wire::{
        kernel::{Attachment, Verdict},
        stats::{ArmStatistics, ArmStats, PolicyStats, StatsAnswer, TOO_MANY_SPURIOUS},
        tune::TunedTimer,
        types::{
            CountersView, DroppedView, EntriesView, FamiliesView, ProbeView, StatusAnswer, now_ms,
        },
    },
};
use rto_agent_kernel::datapath::{DatapathError, KernelReader};

use super::{Snapshot, systemd};
use crate::build_info;

impl Snapshot {
    /// The daemon's status.
    #[must_use]
    pub fn status(&self) -> StatusAnswer {
        self.status_and_stats().0
    }

    /// The status with the statistics it is based on: the last ones if they cannot be read, which
    /// the status reports.
    #[must_use]
    pub fn status_and_stats(&self) -> (StatusAnswer, Arc<StatsAnswer>) {
        let (stats, problem) = match self.last_stats() {
            Ok((stats, None)) => (stats, None),
            Ok((stats, Some(e))) => (
                stats,
                Some(format!(
                    "{e}; the statistics shown are out of \
                                                          date"
                )),
            ),
            Err(e) => (Arc::default(), Some(e.to_string())),
        };
        (self.status_with(self.counters(&stats), problem), stats)
    }

    fn status_with(
        &self,
        policies: BTreeMap<PolicyName, CountersView>,
        problem: Option<String>,
    ) -> StatusAnswer {
        let health = &self.health;
        let attachment = self.attachment();
        let mut problems = self.problems(&attachment);
        problems.extend(problem);
        problems.extend(policies.iter().filter_map(|(name, counters)| {
            let (share, text) = spurious(name, counters)?;
            (share > MOSTLY_SPURIOUS).then_some(text)
        }));
        let resolved = self.resolved.as_deref();
        let left_out = resolved.map_or(0, |resolved| resolved.left_out.len());
        let runtime_entries =
            resolved.map_or(0, |resolved| resolved.desired.runtime.len()) - left_out;
        let foreign = |id: &&u32| Some(**id) != attachment.program_id;
        StatusAnswer {
            version: build_info::VERSION.to_owned(),
            commit: build_info::COMMIT.to_owned(),
            target: build_info::TARGET.to_owned(),
            pid: std::process::id(),
            uptime_s: self.about.started.elapsed().as_secs(),
            healthy: problems.is_empty(),
            problems,
            warnings: self.warnings(&policies),
            foreign_programs: health.programs.iter().filter(foreign).count(),
            attachment,
            detached_by: health.detached_by,
            found_at_start: health.found,
            in_sync: health.in_sync,
            map_differences: health.map_differences.clone(),
            maps_compared_at_s: health.maps_compared_at_s,
            kernel: self.about.kernel.clone(),
            host: resolved.map_or(self.about.host, |resolved| resolved.desired.host),
            config: self.about.config_path.clone(),
            pin_dir: self.about.pin_dir.clone(),
            entries: resolved.map_or(0, |resolved| resolved.set.entries.len()),
            runtime_entries,
            runtime_entries_left_out: left_out,
            entries_of: self.entries_of(),
            max_entries: health.max_entries,
            policies,
            experiments: self.experiments.summaries(),
            dropped: self.dropped(),
            last_reload: health.last_reload.clone(),
            features: self.about.features.clone(),
            probe: health.probe.clone(),
            open_sockets: Some(self.walk())
                .filter(|walk| !walk.cause.is_empty())
                .map(Arc::unwrap_or_clone),
            tuning: self.unusual_timers(),
        }
    }

    /// One line for each braked or frozen timer.
    fn unusual_timers(&self) -> Vec<String> {
        let tuned = self.tune();
        let unusual = tuned.timers().filter(|(_, timer)| timer.is_unusual());
        let line = |(name, timer): (&PolicyName, &TunedTimer)| timer.line(name, tuned.at_ms);
        unusual.map(line).collect()
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

    fn warnings(&self, policies: &BTreeMap<PolicyName, CountersView>) -> Vec<String> {
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
        if !self.about.statistics {
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
        warnings.extend(self.experiments.warnings());
        if let Some(ProbeView {
            verdict: verdict @ Verdict::Interference { .. },
            ..
        }) = &health.probe
        {
            warnings.push(format!(
                "probe: {}; rto-agent doctor names the other programs",
                verdict.describe()
            ));
        }
        for (name, counters) in policies {
            for (option, count) in &counters.setsockopt_failures {
                warnings.push(format!(
                    "policy {name}: the kernel refused {option} {}",
                    counted(*count, "time", "times")
                ));
            }
            warnings.extend(spurious(name, counters).and_then(|(share, text)| {
                let is_warning = share > TOO_MANY_SPURIOUS && share <= MOSTLY_SPURIOUS;
                is_warning.then_some(text)
            }));
            if counters.storage_failures > 0 {
                warnings.push(format!(
                    "policy {name}: not enough memory for the state of {}, which may lack options \
                     or be counted only in part",
                    counted(counters.storage_failures, "connection", "connections")
                ));
            }
        }
        warnings
    }

    fn dropped(&self) -> DroppedView {
        DroppedView {
            log: (self.about.dropped_lines)(),
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
            *(if cidr.is_ipv4() {
                &mut runtime.ipv4
            } else {
                &mut runtime.ipv6
            }) -= 1;
        }
        EntriesView {
            file: FamiliesView {
                ipv4: all.ipv4.saturating_sub(runtime.ipv4),
                ipv6: all.ipv6.saturating_sub(runtime.ipv6),
            },
            runtime,
        }
    }

    pub(super) fn read_stats(
        &self,
        reader: &dyn KernelReader,
    ) -> Result<Arc<StatsAnswer>, Arc<DatapathError>> {
        Ok(Arc::new(self.stats_answer(&reader.statistics()?)))
    }

    pub(super) fn stats_answer(
        &self,
        statistics: &BTreeMap<PolicyName, ArmStatistics>,
    ) -> StatsAnswer {
        let resolved = self.resolved.as_ref();
        let holdout = |name| {
            let resolved = resolved?;
            let adjustment = resolved.desired.adjustments.get(name);
            match adjustment.and_then(|adjustment| adjustment.control) {
                // An experiment's control arm replaces the policy's own.
                Some(control) => Some(control.share),
                None => resolved.set.policies.get(name)?.settings.control_share(),
            }
        };
        let policies = statistics.iter();
        let tuned = self.tune();
        StatsAnswer {
            at_ms: now_ms(),
            on: self.about.statistics,
            sampling: self.about.sampling,
            rtt_sampling: self.about.rtt_sampling.clone(),
            policies: policies
                .map(|(name, statistics)| {
                    let policy = resolved.and_then(|resolved| resolved.set.policies.get(name));
                    let stats = PolicyStats {
                        since_ms: tuned.policies.get(name).and_then(|tuned| tuned.since_ms),
                        description: policy.and_then(|policy| policy.description.clone()),
                        holdout: holdout(name).filter(|_| statistics.control.is_some()),
                        ..PolicyStats::from(statistics)
                    };
                    (name.clone(), stats)
                })
                .collect(),
        }
    }

    /// Counters of the policies active, without control arms (except `storage_failures`) and
    /// without connections that no entry covers.
    fn counters(&self, stats: &StatsAnswer) -> BTreeMap<PolicyName, CountersView> {
        let resolved = self.resolved.as_ref().filter(|_| self.reader.is_some());
        let names = resolved.into_iter().flat_map(|r| r.set.policies.keys());
        let counters = |name| {
            let stats = stats.policies.get(name)?;
            let mut counters = CountersView::from(&stats.treated);
            let control = stats.control.iter().flat_map(ArmStats::directions);
            // In either arm, connections without socket storage are counted only in part.
            counters.storage_failures += control
                .map(|(_, stats)| stats.storage_failures)
                .sum::<u64>();
            Some(counters)
        };
        names
            .map(|name| (name.clone(), counters(name).unwrap_or_default()))
            .collect()
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

/// From this share of connections with a spurious SYN or SYN-ACK, a policy counts as harmful.
const MOSTLY_SPURIOUS: f64 = 0.5;

/// The share of a policy's connections that sent a spurious copy in their handshake, and what to do
/// about it; `None` if too few have been counted.
#[expect(clippy::cast_precision_loss, reason = "a share")]
fn spurious(name: &PolicyName, counters: &CountersView) -> Option<(f64, String)> {
    const FEWEST: u64 = 20;
    let spurious = counters.spurious_connections;
    let connections = counters.established_active + counters.established_passive;
    if spurious < FEWEST {
        return None;
    }
    let share = spurious as f64 / connections.max(spurious) as f64;
    let text = format!(
        "policy {name}: {spurious} of {connections} connections ({:.1}%) sent a spurious SYN or \
         SYN-ACK, because the initial RTO is shorter than their path RTT; raise it above the path \
         RTT that rto-agent stats --policy {name} shows, or set it to \"auto\"",
        share * 100.0
    );
    Some((share, text))
}

#[cfg(test)]
mod tests {
    use rto_agent_common::Statistics;
    use rto_agent_core::wire::types::Caller;

    use super::*;
    use crate::engine::{
        EngineConfig,
        desired::tests::{NEAR, desired},
        fake::{FakeHost, options},
        runtime::RuntimeEntry,
        snapshot::Health,
    };

    const BY: Caller = Caller { uid: 0, pid: 1 };

    fn near() -> PolicyName {
        "near".parse().unwrap()
    }

    /// A healthy snapshot with two entries of a file and one runtime entry.
    fn snapshot() -> Snapshot {
        let entry = RuntimeEntry {
            policy: near(),
            by: BY,
            expires_ms: None,
        };
        let desired = desired(NEAR);
        let settings = desired.files.config.set.policies[&near()].settings.clone();
        let cidr = "10.9.0.0/16".parse().unwrap();
        let resolved = desired.with_entries(&[cidr], &entry, &settings).resolve();
        let host = FakeHost::default();
        let starting = Snapshot::starting(&EngineConfig::for_tests());
        let health = Health {
            in_sync: true,
            problems: Vec::new(),
            ..(*starting.health).clone()
        };
        Snapshot {
            resolved: Some(Arc::new(resolved.unwrap())),
            reader: Some(host.open(options()).reader()),
            health: Arc::new(health),
            ..starting
        }
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
        let families = |view: &FamiliesView| (view.ipv4, view.ipv6);
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

    #[test]
    fn spurious_share_warns_and_beyond_half_is_a_problem() {
        let snapshot = snapshot();
        let found = |connections, spurious| {
            let mut active = Statistics::default();
            active.counters.untimed = connections;
            active.counters.spurious_connections = spurious;
            let statistics = ArmStatistics {
                treated: [active, Statistics::default(), Statistics::default()],
                control: None,
            };
            let all = BTreeMap::from([(near(), statistics)]);
            let counters = snapshot.counters(&snapshot.stats_answer(&all));
            let status = snapshot.status_with(counters, None);
            let said = |texts: &[String]| {
                texts.iter().any(|text| {
                    text.contains(
                        "sent a spurious \
                                                                                 SYN",
                    )
                })
            };
            (said(&status.warnings), said(&status.problems))
        };
        assert_eq!(found(10_000, 100), (false, false));
        assert_eq!(found(10_000, 101), (true, false));
        // Too few for a warning.
        assert_eq!(found(19, 19), (false, false));
        assert_eq!(found(200, 150), (false, true));
    }

    #[test]
    fn connections_without_memory_are_counted_in_both_arms_and_warned_of() {
        let snapshot = snapshot();
        let counted = |treated, control| {
            let of = |failures| {
                let mut active = Statistics::default();
                active.counters.storage_failures = failures;
                [active, Statistics::default(), Statistics::default()]
            };
            let statistics = ArmStatistics {
                treated: of(treated),
                control: Some(of(control)),
            };
            let all = BTreeMap::from([(near(), statistics)]);
            let counters = snapshot.counters(&snapshot.stats_answer(&all));
            let warnings = snapshot.warnings(&counters);
            (counters[&near()].storage_failures, warnings.len())
        };
        assert_eq!(counted(0, 0), (0, 0));
        assert_eq!(counted(2, 0), (2, 1));
        assert_eq!(counted(2, 3), (5, 1));
        assert_eq!(counted(0, 3), (3, 1));
    }
}
