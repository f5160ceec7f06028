//! What the engine tells: list, lookup, status.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use super::{Engine, Start, reading::Reading};
use crate::{
    datapath::{Attachment, Datapath, DatapathError, Found},
    kernel::interference::Verdict,
    policy::PolicyName,
    wire::{
        stats::{PolicyStats, StatsAnswer},
        types::{
            CountersView, EntriesView, FamiliesView, ProbeView, ReloadView, StatusAnswer, now_ms,
        },
    },
};

impl Engine {
    /// Publishes what `list` and `lookup` go by. After every change, before its answer.
    pub(super) fn publish_reading(&mut self) {
        self.reading.send_replace(Some(Arc::new(Reading {
            set: self.state.set().clone(),
            effects: self.state.all_effects().clone(),
            files: self.config.set.entries.clone(),
            manual: self.manual.clone(),
            detached_by: self.detached_by,
            config_path: self.start.config_path.clone(),
            hits: self.state.datapath().map(Datapath::hits),
        })));
    }

    /// Publishes the state as it is now.
    pub(super) fn publish(&mut self) {
        self.publish_with(true);
    }

    /// The same with the statistics that were read last: before a change is answered, so that who asks next
    /// does not see the state of before.
    pub(super) fn publish_known(&mut self) {
        self.publish_with(false);
    }

    fn publish_with(&mut self, with_stats: bool) {
        self.probing.collect();
        if self.state.take_renewed()
            && let Some(datapath) = self.state.datapath()
        {
            self.events.resume(datapath, self.state.host());
        }
        self.events.policies_changed(self.state.datapath());
        let attachment = self.state.attachment();
        let mut problems: Vec<String> = self.state.problems().cloned().collect();
        if problems.is_empty() {
            problems.extend(attachment.problem.clone());
        }
        if !self.last_reload.ok {
            // Where the kernel could not go back it says so itself.
            let in_force = if self.state.in_sync() {
                "; the last good configuration is in force"
            } else {
                ""
            };
            let cause = &self.last_reload.cause;
            problems.push(format!("the files were not taken over ({cause}){in_force}"));
        }
        let mut warnings = self.warnings.clone();
        warnings.extend(self.shelf.problem());
        let limited = self.state.datapath().and_then(Datapath::limited);
        warnings.extend(limited.map(ToOwned::to_owned));
        warnings.extend(self.last_reload.warnings.iter().cloned());
        if !self.start.config.agent.statistics {
            warnings.push("nothing is counted (statistics = false in [agent])".to_owned());
        }
        if with_stats && let Err(e) = self.read_stats() {
            problems.push(e.to_string());
        }
        let stats = self.stats.borrow().clone();
        for name in self
            .state
            .datapath()
            .into_iter()
            .flat_map(Datapath::uncounted)
        {
            warnings.push(format!(
                "policy {name}: nothing is counted, for want of memory; its timers are in force"
            ));
        }
        let unlisted = PolicyName::unmatched();
        let policies: BTreeMap<_, _> = stats
            .policies
            .iter()
            .filter(|(name, _)| **name != unlisted)
            .map(|(name, stats)| (name.clone(), CountersView::from(stats)))
            .collect();
        if let Some(ProbeView {
            verdict: verdict @ Verdict::Interference { .. },
            ..
        }) = self.probing.last()
        {
            warnings.push(format!(
                "probe: {}; rto-agent doctor names the other programs",
                verdict.describe()
            ));
        }
        for (name, counters) in &policies {
            for (option, count) in &counters.setsockopt_failures {
                warnings.push(format!(
                    "policy {name}: the kernel refused {option} {count} times"
                ));
            }
            if counters.storage_failures > 0 {
                warnings.push(format!(
                    "policy {name}: {} connections left alone for want of memory",
                    counters.storage_failures
                ));
            }
        }
        let status = StatusAnswer {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            uptime_s: self.started.elapsed().as_secs(),
            healthy: problems.is_empty(),
            problems,
            warnings,
            foreign_programs: self.probing.foreign(attachment.program_id),
            attachment,
            detached_by: self.detached_by,
            found_at_start: self.state.found(),
            in_sync: self.state.in_sync(),
            kernel: self.start.kernel.clone(),
            host: *self.state.host(),
            config: self.start.config_path.clone(),
            pin_dir: self.state.options().pin_dir.clone(),
            entries: self.state.entries(),
            entries_by_hand: self.manual.len(),
            entries_of: self.entries_of(),
            max_entries: self.state.options().max_entries,
            policies,
            last_reload: self.last_reload.clone(),
            features: self.start.features.clone(),
            probe: self.probing.last().cloned(),
            open_sockets: Some(self.walks.last())
                .filter(|walk| !walk.cause.is_empty())
                .map(|walk| (*walk).clone()),
        };
        let line = self.status_line();
        self.systemd.status(&line);
        self.status.send_replace(Arc::new(status));
    }

    /// Reads the statistics anew. Where that takes long (many policies on many processors) it is not done
    /// again at once: nine tenths of the time are the engine's for other things.
    fn read_stats(&mut self) -> Result<(), DatapathError> {
        const QUICK: Duration = Duration::from_millis(5);
        let (read, took) = self.stats_read;
        if self.state.datapath().is_some() && took > QUICK && read.elapsed() < 9 * took {
            return Ok(());
        }
        let begin = Instant::now();
        let stats = self
            .state
            .datapath()
            .map_or_else(|| Ok(BTreeMap::new()), Datapath::statistics);
        let agent = &self.start.config.agent;
        let stats = stats.map(|stats| {
            let policies = stats.iter();
            StatsAnswer {
                at_ms: now_ms(),
                on: agent.statistics,
                rtt_sampling: agent.rtt_sampling.to_string(),
                policies: policies
                    .map(|(name, stats)| (name.clone(), PolicyStats::from(stats)))
                    .collect(),
            }
        })?;
        self.stats.send_replace(Arc::new(stats));
        self.stats_read = (Instant::now(), begin.elapsed());
        Ok(())
    }

    fn entries_of(&self) -> EntriesView {
        let all = self.state.set().entries.families();
        let manual = self.manual.families();
        EntriesView {
            file: FamiliesView {
                ipv4: all.ipv4.saturating_sub(manual.ipv4),
                ipv6: all.ipv6.saturating_sub(manual.ipv6),
            },
            manual,
        }
    }

    /// One line for `systemctl status`.
    pub(super) fn status_line(&self) -> String {
        let entries = self.state.entries();
        let policies = self.state.set().policies.len();
        let first = match (&self.detached_by, self.state.problems().next()) {
            (Some(by), _) => format!("detached by {by}"),
            (None, Some(problem)) => problem.clone(),
            (None, None) => format!("{entries} entries of {policies} policies in force"),
        };
        if self.last_reload.ok {
            first
        } else {
            format!("{first}; last reload refused, the last good configuration is in force")
        }
    }
}

/// A status before anything is known.
pub(super) fn initial(start: &Start, found: Found) -> StatusAnswer {
    StatusAnswer {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        pid: std::process::id(),
        uptime_s: 0,
        healthy: false,
        problems: vec!["starting".to_owned()],
        warnings: Vec::new(),
        attachment: Attachment {
            attached: false,
            problem: None,
            cgroup: start.cgroup.clone(),
            program_id: None,
            accepted: None,
        },
        detached_by: None,
        found_at_start: found,
        in_sync: false,
        kernel: start.kernel.clone(),
        host: start.host,
        config: start.config_path.clone(),
        pin_dir: start.config.agent.pin_dir.clone(),
        entries: 0,
        entries_by_hand: 0,
        entries_of: EntriesView::default(),
        max_entries: start.config.agent.max_entries,
        policies: BTreeMap::new(),
        last_reload: ReloadView {
            at_s: 0,
            cause: "start".to_owned(),
            ok: true,
            errors: Vec::new(),
            warnings: Vec::new(),
        },
        foreign_programs: 0,
        features: start.features.clone(),
        probe: None,
        open_sockets: None,
    }
}
