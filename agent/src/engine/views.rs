//! What the engine tells: list, lookup, status.

use std::{
    collections::BTreeMap,
    net::IpAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use super::{Engine, EngineError, Start, manual::boottime_ms};
use crate::{
    api::{
        stats::{PolicyStats, StatsAnswer},
        types::{
            CountersView, EntriesView, EntryView, ListAnswer, LookupAnswer, ProbeView, ReloadView,
            SourceView, StatusAnswer, now_ms,
        },
    },
    datapath::{Attachment, Datapath, DatapathError, Found},
    kernel::interference::Verdict,
    policy::{Cidr, Entry, PolicyName},
};

impl Engine {
    pub(super) fn list(&self) -> Result<ListAnswer, EngineError> {
        let hits = match self.state.datapath() {
            Some(datapath) => datapath
                .hits()
                .map_err(|e| EngineError::Failed(e.to_string()))?,
            None => Default::default(),
        };
        let entries = &self.state.set().entries;
        let entries = entries
            .iter()
            .map(|(cidr, entry)| self.entry_view(cidr, entry, hits.get(cidr).copied().unwrap_or(0)))
            .collect();
        let masked = self.manual.masked().iter().copied();
        let masked = masked
            .filter(|c| self.config.set.entries.contains_key(c))
            .collect();
        Ok(ListAnswer { entries, masked })
    }

    pub(super) fn lookup(&self, address: IpAddr) -> Result<LookupAnswer, EngineError> {
        let looked_up = address.to_canonical();
        let entries = &self.state.set().entries;
        let mut matching: Vec<&Cidr> = entries.keys().filter(|c| c.contains(looked_up)).collect();
        matching.sort_by_key(|c| std::cmp::Reverse(c.prefix()));
        let mapped = if looked_up == address {
            String::new()
        } else {
            format!("{address} is IPv4-mapped and looked up as {looked_up}; ")
        };
        let (entry, reason) = match matching.split_first() {
            None => (
                None,
                format!("{mapped}no entry covers it: the kernel's own timers apply"),
            ),
            Some((best, shadowed)) => {
                let hits = match self.state.datapath() {
                    Some(d) => d
                        .hits_of(best)
                        .map_err(|e| EngineError::Failed(e.to_string()))?,
                    None => 0,
                };
                let why = match shadowed {
                    [] => "the only entry that covers it".to_owned(),
                    rest => format!("the longest of {} prefixes that cover it", rest.len() + 1),
                };
                (
                    Some(self.entry_view(best, &entries[*best], hits)),
                    format!("{mapped}{why}"),
                )
            }
        };
        let reason = match (&self.detached_by, &entry) {
            (Some(by), Some(_)) => format!("{reason}; but nothing is in force, detached by {by}"),
            _ => reason,
        };
        let shadowed = matching.into_iter().skip(1).copied().collect();
        Ok(LookupAnswer {
            address,
            looked_up,
            entry,
            shadowed,
            reason,
        })
    }

    fn entry_view(&self, cidr: &Cidr, entry: &Entry, hits: u32) -> EntryView {
        let file = |entry: &Entry| {
            let at = entry.location.clone()?;
            Some(SourceView::File {
                path: at.path,
                line: at.line,
            })
        };
        let of_file = self.config.set.entries.get(cidr).and_then(file);
        let (source, overrides) = match (self.manual.get(cidr), file(entry)) {
            (Some(manual), _) => {
                let left = |end: u64| end.saturating_sub(boottime_ms()).div_ceil(1000);
                let expires_in_s = manual.expires_ms.map(left);
                (
                    SourceView::Manual {
                        by: manual.by,
                        expires_in_s,
                    },
                    of_file,
                )
            }
            (None, Some(source)) => (source, None),
            // Neither by hand nor from a file: cannot be, and must not hide the entry if it is.
            (None, None) => (
                SourceView::File {
                    path: self.start.config_path.clone(),
                    line: 0,
                },
                None,
            ),
        };
        let policy = self.state.set().policies.get(&entry.policy);
        EntryView {
            cidr: *cidr,
            policy: entry.policy.clone(),
            source,
            settings: policy.map(|p| (&p.settings).into()).unwrap_or_default(),
            effects: self.state.effects(&entry.policy).to_vec(),
            hits,
            overrides,
        }
    }

    /// Publishes the state as it is now.
    pub(super) fn publish(&mut self) {
        self.probing.collect();
        self.events.policies_changed(self.state.datapath());
        let attachment = self.state.attachment();
        let mut problems: Vec<String> = self.state.problems().cloned().collect();
        if problems.is_empty() {
            problems.extend(attachment.problem.clone());
        }
        if !self.last_reload.ok {
            problems.push(format!(
                "the files were refused ({}); the last good configuration is in force",
                self.last_reload.cause
            ));
        }
        let mut warnings = self.warnings.clone();
        warnings.extend(self.last_reload.warnings.iter().cloned());
        if !self.start.config.agent.statistics {
            warnings.push("nothing is counted (statistics = false in [agent])".to_owned());
        }
        if let Err(e) = self.read_stats() {
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
        let unlisted = PolicyName::unlisted();
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
        let mut of = EntriesView::default();
        for cidr in self.state.set().entries.keys() {
            let source = if self.manual.get(cidr).is_some() {
                &mut of.manual
            } else {
                &mut of.file
            };
            let family = if cidr.is_ipv4() {
                &mut source.ipv4
            } else {
                &mut source.ipv6
            };
            *family += 1;
        }
        of
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
