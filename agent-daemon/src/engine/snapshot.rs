//! Snapshots for readers: the state that the engine last published, with a kernel reader of its
//! own. Answers are computed on the caller's thread, as the engine may be busy for seconds.

use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

use rto_agent_core::{
    config::{AgentConfig, Config, OnExit},
    policy::PolicyName,
    wire::{
        kernel::{Attachment, Found},
        stats::{ArmStatistics, PolicyStats, StatsAnswer},
        tune::TuneAnswer,
        types::{Caller, ProbeView, ReloadView, VerifyAnswer, WalkView, now_ms},
    },
};
use rto_agent_kernel::{
    datapath::{DatapathError, KernelReader, room_for},
    kernel::cgroup,
};

use self::shared::{Counted, Reused};
pub(super) use self::shared::{Published, locked};
use super::{
    comparison::{Comparison, Part, answer, compare},
    config::EngineConfig,
    desired::{Desired, LoadedConfig, Resolved},
    error::EngineError,
    harm::Harms,
    runtime::RuntimeEntries,
};

mod shared;

/// The state after a change, and a reader of the kernel for it.
#[derive(Clone)]
pub struct Snapshot {
    pub(super) started: Instant,
    /// What the daemon started with.
    pub(super) config: Arc<EngineConfig>,
    /// Absent until the engine has started.
    pub(super) resolved: Option<Arc<Resolved>>,
    /// Absent while nothing is in the kernel.
    pub(super) reader: Option<Arc<dyn KernelReader>>,
    pub(super) health: Arc<Health>,
    pub(super) walk: Published<WalkView>,
    pub(super) tuned: Published<TuneAnswer>,
    /// The kernel matches this snapshot while [`Shared::epoch`] has this value.
    pub(super) epoch: u64,
    pub(super) shared: Arc<Shared>,
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

impl Snapshot {
    /// The snapshot before the engine has started.
    pub(super) fn starting(config: &EngineConfig) -> Self {
        Self {
            started: Instant::now(),
            config: Arc::new(config.clone()),
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
                max_entries: room_for(0, config.config.agent.max_entries),
                ..Health::default()
            }),
            walk: Published::default(),
            tuned: Published::default(),
            epoch: 0,
            shared: Arc::default(),
        }
    }

    /// The snapshot of an engine with nothing active: no policies, no entries.
    pub(super) fn empty(config: &EngineConfig) -> Self {
        let files = Arc::new(LoadedConfig {
            config: Config::default(),
            fingerprint: config.fingerprint,
            host: config.host,
        });
        let desired = Desired::new(files, RuntimeEntries::default(), config.host);
        Self {
            resolved: desired.resolve().ok().map(Arc::new),
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
        resolved.map_or(&self.config.config.files, |resolved| {
            &resolved.config().files
        })
    }

    /// The walk over open sockets that is running, or the last one.
    #[must_use]
    pub fn walk(&self) -> Arc<WalkView> {
        self.walk.borrow().clone()
    }

    /// The state of learnt and guarded timers.
    #[must_use]
    pub fn tune(&self) -> Arc<TuneAnswer> {
        self.tuned.borrow().clone()
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
                let compared = || compare(reader, &resolved.maps, Part::ALL).ok();
                let holds = || compared().map(|found| found.differences.is_empty());
                let read = || (self.epoch, holds());
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

    /// Compares a part of the kernel with the desired state; `None` if the engine changes it during
    /// the comparison, as a difference means nothing then.
    fn compare(&self, part: Part) -> Option<Result<Comparison, DatapathError>> {
        let maps = &self.resolved.as_ref()?.maps;
        self.unchanged(|reader| compare(reader, maps, part))
    }

    /// Compares all of the kernel, and the attachment.
    #[must_use]
    pub fn verify(&self) -> Option<VerifyAnswer> {
        let problem = self.unchanged(|reader| reader.attachment().problem)?;
        let differences = self.compare(Part::ALL)?.ok()?.differences;
        let resolved = self.resolved.as_deref()?;
        let mut verified = answer(resolved, differences, Vec::from_iter(problem), true);
        verified.ok &= self.health.in_sync;
        Some(verified)
    }

    /// As [`Self::compare`], and reads the counters of the same policies for `status`.
    pub(super) fn compare_in_turn(&self, part: Part) -> Option<Result<Comparison, DatapathError>> {
        let compared = self.compare(part)?;
        if self.agent().statistics
            && let Ok(Comparison { cursor, .. }) = &compared
        {
            let first = part.cursor.policy;
            let read = cursor.policy.checked_sub(first).filter(|read| *read > 0);
            let names = self.resolved.as_ref()?.set.policies.keys().skip(first);
            self.look_for_harm(names.take(read.unwrap_or(usize::MAX)), cursor.policy == 0);
        }
        Some(compared)
    }

    /// Reads the counters of these policies for `status`, unless the engine changes the kernel.
    fn look_for_harm<'a>(&self, policies: impl Iterator<Item = &'a PolicyName>, is_last: bool) {
        let read: Option<Result<Vec<_>, _>> = self.unchanged(|reader| {
            let read = policies.filter_map(|name| match reader.statistics_of(name) {
                Ok(statistics) => Some(Ok((name, PolicyStats::from(&statistics?)))),
                Err(e) => Some(Err(e)),
            });
            read.collect()
        });
        let mut harms = locked(&self.shared.harms);
        match read {
            Some(Ok(read)) => {
                let read = read.iter().map(|(name, stats)| (*name, stats));
                harms.note(Instant::now(), read, is_last);
            }
            Some(Err(e)) => harms.note_unread(&e),
            None => {}
        }
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
                        harms.note(Instant::now(), &stats.policies, true);
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

    /// Reads the statistics of all policies; without a reader, there are none.
    fn read_stats(
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

    /// `[agent]` at the start.
    pub(crate) fn agent(&self) -> &AgentConfig {
        &self.config.config.agent
    }

    pub(super) fn resolved(&self) -> Result<&Resolved, EngineError> {
        self.resolved.as_deref().ok_or(EngineError::Stopping)
    }
}

/// State shared by all snapshots of an engine.
#[derive(Default)]
pub(super) struct Shared {
    /// Odd from the first write of a change until its snapshot is published; each change gets a new
    /// value.
    epoch: AtomicU64,
    newest: Mutex<Weak<Snapshot>>,
    pub(super) statistics: Reused<(u64, Counted)>,
    /// The last statistics read while the engine was not changing the kernel.
    counted: Mutex<Option<Arc<StatsAnswer>>>,
    /// What the counters showed when they were last read.
    pub(super) harms: Mutex<Harms>,
    holds: Reused<(u64, Option<bool>)>,
}

impl Shared {
    fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::SeqCst)
    }

    fn newest(&self) -> Option<Arc<Snapshot>> {
        locked(&self.newest).upgrade()
    }

    /// Marks the beginning of a change, unless one has begun. Publishing the next snapshot ends it.
    pub(super) fn begin(&self) {
        self.epoch.fetch_or(1, Ordering::SeqCst);
    }

    /// The epoch of the next snapshot: that after the change, if one has begun.
    pub(super) fn next_epoch(&self) -> u64 {
        let epoch = self.epoch();
        epoch + (epoch & 1)
    }

    /// Ends a change, if one has begun, as its snapshot is published.
    pub(super) fn published(&self, snapshot: &Arc<Snapshot>) {
        *locked(&self.newest) = Arc::downgrade(snapshot);
        self.epoch.store(snapshot.epoch, Ordering::SeqCst);
        if snapshot.reader.is_none() {
            // The next maps count from 0.
            *locked(&self.counted) = None;
            *locked(&self.harms) = Harms::default();
            return;
        }
        if let Some(resolved) = &snapshot.resolved {
            let policies = resolved.set.policies.iter();
            let policies = policies.map(|(name, policy)| (name, &policy.settings));
            let begun = locked(&self.harms).follow(policies);
            if !begun.is_empty() && snapshot.agent().statistics {
                snapshot.look_for_harm(begun.into_iter(), false);
            }
        }
        if locked(&self.counted).is_none() {
            // Serves readers during the next change. An error is returned to the next client.
            let _ = snapshot.stats();
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::engine::fake::{FakeHost, options};

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

    #[test]
    fn kernel_is_read_while_no_change_runs() {
        let shared = Arc::new(Shared::default());
        let publish = || {
            let snapshot = Arc::new(Snapshot {
                epoch: shared.next_epoch(),
                shared: shared.clone(),
                ..Snapshot::starting(&EngineConfig::for_tests())
            });
            shared.published(&snapshot);
            snapshot
        };
        let first = publish();
        assert!(first.is_current() && publish().is_current());
        // Without a write the epoch is unchanged.
        assert!(first.is_current());
        shared.begin();
        shared.begin();
        assert!(!first.is_current());
        let second = publish();
        assert!(!first.is_current() && second.is_current());
    }
}
