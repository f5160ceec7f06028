//! Snapshots for readers: the state that the engine last published, with a kernel reader of its
//! own. Answers are computed on the caller's thread, as the engine may be busy for seconds.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    path::PathBuf,
    sync::Arc,
    time::Instant,
};

use rto_agent_common::{address::Peer, arm, policy_flags};
use rto_agent_core::{
    config::{Config, OnExit},
    policy::{Cidr, EntryRef, HostFacts, PolicySet, plan::MapState},
    wire::{
        experiments::ExperimentsAnswer,
        kernel::{Attachment, Feature, Found},
        stats::{Arm, StatsAnswer},
        tune::TuneAnswer,
        types::{
            Caller, EntryView, LookupAnswer, LookupEntry, PolicyView, ProbeView, ReloadView,
            SourceView, WalkView,
        },
    },
};
use rto_agent_kernel::{
    datapath::{DatapathError, KernelReader, room_for},
    kernel::{cgroup, clock::boottime_ms},
};
use serde::Serialize;

use self::shared::Counted;
pub(super) use self::shared::{Published, Shared, locked};
use super::{
    EngineConfig, EngineError,
    desired::{Desired, LoadedConfig, Resolved},
    experiments::SharedExperiments,
    runtime::RuntimeEntries,
};

mod shared;

/// The state after a change, and a reader of the kernel for it.
#[derive(Clone)]
pub struct Snapshot {
    pub(super) about: Arc<About>,
    /// Absent until the engine has started.
    pub(super) resolved: Option<Arc<Resolved>>,
    /// Absent while nothing is in the kernel.
    pub(super) reader: Option<Arc<dyn KernelReader>>,
    pub(super) health: Arc<Health>,
    pub(super) walk: Published<WalkView>,
    pub(super) experiments: SharedExperiments,
    pub(super) tuned: Published<TuneAnswer>,
    /// The kernel matches this snapshot while [`Shared::epoch`] has this value.
    pub(super) epoch: u64,
    pub(super) shared: Arc<Shared>,
}

/// Facts that do not change while the daemon runs.
pub(super) struct About {
    pub(super) started: Instant,
    pub(super) config_path: PathBuf,
    /// The files read at the start.
    pub(super) files: Vec<PathBuf>,
    pub(super) pin_dir: PathBuf,
    pub(super) kernel: String,
    pub(super) features: Vec<Feature>,
    pub(super) host: HostFacts,
    /// `statistics` in `[agent]`.
    pub(super) statistics: bool,
    /// `count_unmatched` in `[agent]`.
    pub(super) count_unmatched: bool,
    /// `sampling` in `[agent]`.
    pub(super) sampling: u32,
    /// `rtt_sampling` in `[agent]`.
    pub(super) rtt_sampling: String,
    pub(super) dropped_lines: fn() -> u64,
}

/// The daemon's health, as the engine knows it.
#[derive(Clone, Debug, Default)]
pub(super) struct Health {
    /// Problems of the kernel at the last check.
    pub(super) problems: Vec<String>,
    pub(super) in_sync: bool,
    /// Changes of the kernel's maps by other processes, by kind.
    pub(super) map_differences: BTreeMap<String, u64>,
    /// When all maps were last compared, Unix seconds.
    pub(super) maps_compared_at_s: Option<u64>,
    /// The attachment at the time of publishing.
    pub(super) attachment: Attachment,
    pub(super) warnings: Vec<String>,
    pub(super) last_reload: ReloadView,
    pub(super) detached_by: Option<Caller>,
    pub(super) found: Found,
    pub(super) max_entries: u32,
    pub(super) probe: Option<ProbeView>,
    /// Programs between the hierarchy's root and the attached cgroup.
    pub(super) programs: Vec<u32>,
}

/// Whether the daemon does its job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Readiness {
    /// Attached, and the kernel's maps match the desired state.
    Ready,
    /// The reasons.
    Unready(Vec<String>),
    /// The maps differ from the desired state, and the engine does not know yet.
    Differs,
}

/// Bytes of a list that are passed on at once.
const PIECE: usize = 64 << 10;

impl Snapshot {
    /// The snapshot before the engine has started.
    pub(super) fn starting(config: &EngineConfig) -> Self {
        let agent = &config.config.agent;
        Self {
            about: Arc::new(About {
                started: Instant::now(),
                config_path: config.config_path.clone(),
                files: config.config.files.clone(),
                pin_dir: agent.pin_dir.clone(),
                kernel: config.kernel.clone(),
                features: config.features.clone(),
                host: config.host,
                statistics: agent.statistics,
                count_unmatched: agent.count_unmatched,
                sampling: agent.sampling,
                rtt_sampling: agent.rtt_sampling.to_string(),
                dropped_lines: config.dropped_lines,
            }),
            resolved: None,
            reader: None,
            health: Arc::new(Health {
                problems: vec!["starting".to_owned()],
                attachment: Attachment {
                    cgroup: config.cgroup.clone(),
                    is_root: cgroup::is_root(&config.cgroup),
                    ..Attachment::default()
                },
                last_reload: ReloadView {
                    cause: "start".to_owned(),
                    ok: true,
                    ..ReloadView::default()
                },
                max_entries: room_for(0, agent.max_entries),
                ..Health::default()
            }),
            walk: Published::default(),
            experiments: SharedExperiments::default(),
            tuned: Published::default(),
            epoch: 0,
            shared: Arc::default(),
        }
    }

    /// The snapshot of an engine with nothing active: no policies, no entries.
    pub(super) fn empty(config: &EngineConfig) -> Self {
        let files = LoadedConfig {
            config: Config::default(),
            fingerprint: config.fingerprint,
            host: config.host,
        };
        let resolved = Resolved {
            desired: Desired::new(Arc::new(files), RuntimeEntries::default(), config.host),
            set: PolicySet::default(),
            policies: BTreeMap::new(),
            misfits: BTreeSet::new(),
            left_out: BTreeMap::new(),
            maps: MapState::default(),
        };
        Self {
            resolved: Some(Arc::new(resolved)),
            ..Self::starting(config)
        }
    }

    /// Whether the kernel still matches this snapshot: the engine is not changing it, and has not
    /// changed it since.
    fn is_current(&self) -> bool {
        self.shared.epoch() == self.epoch
    }

    /// Reads the kernel; `None` if the engine is changing it.
    pub(super) fn unchanged<T>(&self, read: impl FnOnce(&dyn KernelReader) -> T) -> Option<T> {
        let reader = self.reader.as_deref().filter(|_| self.is_current())?;
        let read = read(reader);
        self.is_current().then_some(read)
    }

    /// Whether and where the program is attached.
    pub(super) fn attachment(&self) -> Attachment {
        if self.health.detached_by.is_some() {
            return self.health.attachment.clone();
        }
        if let Some(now) = self.unchanged(|reader| reader.attachment()) {
            return now;
        }
        match &self.reader {
            Some(reader) if self.health.attachment.attached => reader.attachment_during_change(),
            _ => self.health.attachment.clone(),
        }
    }

    /// What the daemon leaves in force when it ends; `None` while it is starting.
    #[must_use]
    pub fn on_exit(&self) -> Option<OnExit> {
        Some(self.resolved.as_ref()?.config().agent.on_exit)
    }

    /// Whether the engine is still starting.
    #[must_use]
    pub fn is_starting(&self) -> bool {
        self.resolved.is_none()
    }

    /// The files that the configuration was read from.
    #[must_use]
    pub fn files(&self) -> &[PathBuf] {
        let resolved = self.resolved.as_ref();
        resolved.map_or(&self.about.files, |resolved| &resolved.config().files)
    }

    /// The walk over open sockets that is running, or the last one.
    #[must_use]
    pub fn walk(&self) -> Arc<WalkView> {
        self.walk.get()
    }

    /// Experiments and their current results.
    #[must_use]
    pub fn experiments(&self) -> ExperimentsAnswer {
        self.experiments.answer()
    }

    /// The state of learnt and guarded timers.
    #[must_use]
    pub fn tune(&self) -> Arc<TuneAnswer> {
        self.tuned.get()
    }

    /// Whether the program is attached and the maps, read from the kernel, match the desired state.
    /// Takes a second with a million entries.
    #[must_use]
    pub fn readiness(&self) -> Readiness {
        if self.health.in_sync
            && let Some(resolved) = &self.resolved
        {
            // A read error does not count as a difference: the engine reports it.
            let holds = |reader: &dyn KernelReader| {
                let differences = || reader.differences(&resolved.maps).ok();
                let read = || (self.epoch, differences().map(|found| found.is_empty()));
                // A result of another epoch is not used, but does reduce how often the maps are
                // compared.
                self.shared.holds.get(|_| true, read)
            };
            if let Some((epoch, holds)) = self.unchanged(holds)
                && epoch == self.epoch
                && holds != Some(true)
            {
                return Readiness::Differs;
            }
        }
        self.known_readiness()
    }

    /// As [`Self::readiness`], based on the engine's own view of the maps.
    #[must_use]
    pub fn known_readiness(&self) -> Readiness {
        let attachment = self.attachment();
        if attachment.attached && self.health.in_sync {
            return Readiness::Ready;
        }
        let mut problems: Vec<String> = attachment.problem.into_iter().collect();
        problems.extend(self.health.problems.iter().cloned());
        if problems.is_empty() {
            problems.push("not attached".to_owned());
        }
        Readiness::Unready(problems)
    }

    /// The statistics of all policies. During a change, which may give one policy's counters to
    /// another, and if they cannot be read, the last ones.
    ///
    /// # Errors
    ///
    /// If the statistics cannot be read, and never could be.
    pub fn stats(&self) -> Result<Arc<StatsAnswer>, Arc<DatapathError>> {
        let Some(reader) = self.reader.as_deref() else {
            return self.read_stats(None);
        };
        let again = || self.shared.newest()?.unchanged_stats();
        let read = self.unchanged_stats().or_else(again);
        let last = locked(&self.shared.counted).clone();
        match (read, last) {
            (Some(Ok(stats)), _) | (_, Some(stats)) => Ok(stats),
            (Some(Err(e)), None) => Err(e),
            (None, None) => self.read_stats(Some(reader)),
        }
    }

    fn unchanged_stats(&self) -> Option<Counted> {
        let read = |reader: &dyn KernelReader| {
            let stats = self.read_stats(Some(reader));
            if self.is_current() {
                let mut harms = locked(&self.shared.harms);
                match &stats {
                    Ok(stats) => {
                        harms.note(&stats.policies, true);
                        *locked(&self.shared.counted) = Some(stats.clone());
                    }
                    Err(e) => harms.note_unread(e),
                }
            }
            (self.epoch, stats)
        };
        let of_this = |(epoch, _): &(u64, Counted)| *epoch == self.epoch;
        let statistics = &self.shared.statistics;
        let (_, stats) = self.unchanged(|reader| statistics.get(of_this, || read(reader)))?;
        Some(stats)
    }

    /// The entry and settings that apply to an address, with the reasons.
    pub fn lookup(&self, address: IpAddr) -> Result<LookupAnswer, EngineError> {
        let resolved = self.resolved()?;
        let looked_up = address.to_canonical();
        let mut matching = resolved.set.entries.covering(looked_up).into_iter();
        let best = matching.next();
        let shadowed: Vec<Cidr> = matching.collect();
        let mut masked: Vec<Cidr> = masked(resolved).copied().collect();
        masked.retain(|cidr| cidr.contains(looked_up));
        masked.sort_unstable_by_key(|cidr| std::cmp::Reverse(cidr.prefix()));
        let mut reason = String::new();
        if looked_up != address {
            reason = format!("{address} is IPv4-mapped and treated as {looked_up}; ");
        }
        let entry = match best.and_then(|cidr| Some((cidr, resolved.set.entries.get(&cidr)?))) {
            None => {
                reason.push_str("no entry covers it: the kernel's own timers apply");
                None
            }
            Some((cidr, entry)) => {
                let reader = self.reader.as_ref();
                let hits = reader.map_or(Ok(0), |reader| reader.hits_of(&cidr))?;
                reason.push_str(&match shadowed.len() {
                    0 => "the only entry that covers it".to_owned(),
                    n => format!("the longest of {} prefixes that cover it", n + 1),
                });
                if let Some(policy) = resolved.maps.policies.get(entry.policy)
                    && let Some(arm) = arm_of_peer(policy, looked_up)
                {
                    reason.push_str(&format!("; this peer is in its {arm} arm"));
                }
                if let Some(by) = &self.health.detached_by {
                    reason.push_str(&format!("; but no policy is active: detached by {by}"));
                }
                Some(view(resolved, self.listed(resolved, cidr, entry, hits)))
            }
        };
        Ok(LookupAnswer {
            address,
            looked_up,
            entry,
            shadowed,
            masked,
            reason,
        })
    }

    /// Reads the hit counters of all entries.
    pub fn hits(&self) -> Result<Vec<(Cidr, u32)>, EngineError> {
        let reader = self.reader.as_ref();
        Ok(reader.map_or_else(|| Ok(Vec::new()), |reader| reader.hits())?)
    }

    /// Writes the JSON of a [`rto_agent_core::wire::types::ListAnswer`] in pieces until `take` wants no
    /// more: a million entries are a hundred megabytes.
    pub fn list(
        &self,
        hits: &[(Cidr, u32)],
        mut take: impl FnMut(Vec<u8>) -> bool,
    ) -> serde_json::Result<()> {
        let Ok(resolved) = self.resolved() else {
            return Ok(());
        };
        let mut text = Vec::with_capacity(2 * PIECE);
        text.extend_from_slice(b"{\"policies\":{");
        for (i, (name, policy)) in resolved.set.policies.iter().enumerate() {
            separate(&mut text, i);
            put(&mut text, name)?;
            text.push(b':');
            let effects = resolved.effects(name).to_vec();
            let settings = policy.settings.clone();
            let description = policy.description.clone();
            let view = PolicyView {
                description,
                settings,
                effects,
            };
            put(&mut text, &view)?;
        }
        text.extend_from_slice(b"},\"entries\":[");
        let mut hits = hits.iter().peekable();
        for (i, (cidr, entry)) in resolved.set.entries.iter().enumerate() {
            separate(&mut text, i);
            while hits.peek().is_some_and(|(other, _)| *other < cidr) {
                hits.next();
            }
            let counted = hits.peek().filter(|(other, _)| *other == cidr);
            let counted = counted.map_or(0, |(_, count)| *count);
            put(&mut text, &self.listed(resolved, cidr, entry, counted))?;
            if text.len() >= PIECE {
                let piece = std::mem::replace(&mut text, Vec::with_capacity(2 * PIECE));
                if !take(piece) {
                    return Ok(());
                }
            }
        }
        text.extend_from_slice(b"],\"masked\":");
        put(&mut text, &masked(resolved).collect::<Vec<_>>())?;
        text.extend_from_slice(b",\"left_out\":");
        let left_out: BTreeMap<_, &str> = resolved
            .left_out
            .iter()
            .map(|(c, why)| (c, &**why))
            .collect();
        put(&mut text, &left_out)?;
        if let Some(by) = self.health.detached_by {
            text.extend_from_slice(b",\"detached_by\":");
            put(&mut text, &by)?;
        }
        text.push(b'}');
        take(text);
        Ok(())
    }

    fn listed(&self, resolved: &Resolved, cidr: Cidr, entry: EntryRef<'_>, hits: u32) -> EntryView {
        let is_in_force = || !resolved.left_out.contains_key(&cidr);
        let runtime = resolved
            .desired
            .runtime
            .get(&cidr)
            .filter(|_| is_in_force());
        let (source, overrides) = match (runtime, file(entry)) {
            (Some(runtime), _) => {
                let left = |end: u64| end.saturating_sub(boottime_ms()).div_ceil(1000);
                let expires_in_s = runtime.expires_ms.map(left);
                (
                    SourceView::Runtime {
                        by: runtime.by,
                        expires_in_s,
                    },
                    resolved.config().set.entries.get(&cidr).and_then(file),
                )
            }
            (None, Some(source)) => (source, None),
            // Neither a runtime entry nor one of a file. Impossible, but it must not hide the
            // entry.
            (None, None) => (
                SourceView::File {
                    path: self.about.config_path.clone(),
                    line: 0,
                },
                None,
            ),
        };
        EntryView {
            cidr,
            policy: entry.policy.clone(),
            source,
            hits,
            overrides,
        }
    }

    pub(super) fn resolved(&self) -> Result<&Resolved, EngineError> {
        self.resolved.as_deref().ok_or(EngineError::Stopping)
    }
}

/// Entries of the files that are masked.
fn masked(resolved: &Resolved) -> impl Iterator<Item = &Cidr> {
    let files = &resolved.config().set.entries;
    let masked = resolved.desired.runtime.masked().iter();
    masked.filter(|cidr| files.contains_key(cidr))
}

/// The arm of all connections to a peer; `None` if the policy's control arm does not draw peers.
fn arm_of_peer(policy: &rto_agent_common::Policy, address: IpAddr) -> Option<Arm> {
    if policy.control_below == 0 || policy.flags & policy_flags::CONTROL_BY_PEER == 0 {
        return None;
    }
    let peer = match address {
        IpAddr::V4(v4) => Peer::V4(v4.octets()),
        IpAddr::V6(v6) => Peer::V6(v6.octets()),
    };
    Some(match arm::draws_control(policy, &peer, 0) {
        true => Arm::Control,
        false => Arm::Treated,
    })
}

fn view(resolved: &Resolved, entry: EntryView) -> LookupEntry {
    let policy = resolved.set.policies.get(&entry.policy);
    LookupEntry {
        sets: PolicyView {
            description: policy.and_then(|p| p.description.clone()),
            settings: policy.map(|p| p.settings.clone()).unwrap_or_default(),
            effects: resolved.effects(&entry.policy).to_vec(),
        },
        entry,
    }
}

fn file(entry: EntryRef<'_>) -> Option<SourceView> {
    let (path, line) = entry.location?;
    Some(SourceView::File {
        path: path.to_path_buf(),
        line,
    })
}

fn put(text: &mut Vec<u8>, value: &impl Serialize) -> serde_json::Result<()> {
    serde_json::to_writer(text, value)
}

fn separate(text: &mut Vec<u8>, index: usize) {
    if index > 0 {
        text.push(b',');
    }
}

#[cfg(test)]
pub(super) mod tests {
    use rto_agent_core::wire::types::ListAnswer;

    use super::*;
    use crate::engine::{
        desired::tests::desired,
        fake::{FakeHost, options},
    };

    /// A snapshot of a desired state, and its kernel, which holds it and is attached.
    pub(in crate::engine) fn healthy(desired: Desired) -> (FakeHost, Snapshot) {
        let resolved = Arc::new(desired.resolve().unwrap());
        let host = FakeHost::default();
        let reader = host.open(options()).reader();
        host.state().maps = resolved.maps.clone();
        host.state().attached = true;
        let starting = Snapshot::starting(&EngineConfig::for_tests());
        let health = Health {
            in_sync: true,
            problems: Vec::new(),
            ..(*starting.health).clone()
        };
        let snapshot = Snapshot {
            resolved: Some(resolved),
            reader: Some(reader),
            health: Arc::new(health),
            ..starting
        };
        (host, snapshot)
    }

    fn snapshot(count: u32) -> Snapshot {
        use std::fmt::Write as _;

        let mut text = "[policy.near]\ninitial_rto = \"100ms\"\ncidrs = [\n".to_owned();
        for i in 0..count {
            let address = std::net::Ipv4Addr::from(i << 8);
            writeln!(text, "\"{address}/24\",").unwrap();
        }
        text.push_str("]\n");
        Snapshot {
            resolved: Some(Arc::new(desired(&text).resolve().unwrap())),
            ..Snapshot::starting(&EngineConfig::for_tests())
        }
    }

    #[test]
    fn the_pieces_are_a_list() {
        for count in [0, 1, 5000] {
            let snapshot = snapshot(count);
            let third: Cidr = "0.0.3.0/24".parse().unwrap();
            let hits = [("0.0.0.0/8".parse().unwrap(), 9), (third, 7)];
            let (mut text, mut pieces) = (Vec::new(), 0);
            snapshot
                .list(&hits, |piece| {
                    text.extend(piece);
                    pieces += 1;
                    true
                })
                .unwrap();
            let answer: ListAnswer = serde_json::from_slice(&text).unwrap();
            assert_eq!(answer.entries.len(), count as usize);
            assert_eq!(answer.policies.len(), 1);
            assert_eq!(pieces > 2, count > 1000);
            let counted: Vec<_> = answer.entries.iter().filter(|e| e.hits > 0).collect();
            assert!(counted.iter().all(|e| e.cidr == third && e.hits == 7));
            assert_eq!(counted.len(), usize::from(count > 3));
        }
    }

    #[test]
    fn list_ends_when_its_reader_does() {
        let mut pieces = 0;
        let take = |_| {
            pieces += 1;
            false
        };
        snapshot(20_000).list(&[], take).unwrap();
        assert_eq!(pieces, 1);
    }
}
