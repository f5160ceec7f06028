//! The probe of the timers in force: when it runs, and its last verdict.

use std::{path::Path, sync::mpsc, time::Instant};

use rto_agent_core::{
    policy::ProbeTarget,
    wire::{
        kernel::Verdict,
        types::{ProbeView, now_s},
    },
};
use rto_agent_kernel::{
    datapath::{OtherProgram, other_programs},
    kernel::{cgroup, interference, programs},
};
use tracing::{info, warn};

use super::{Done, Job, Message};

/// How often a probe without a verdict is repeated.
const ATTEMPTS: u32 = 3;

/// Runs probes on a thread of its own, and keeps the last verdict.
pub(in crate::engine) struct Probing {
    last: Option<ProbeView>,
    /// Programs between the root and the attached cgroup at the last probe.
    programs: Vec<u32>,
    /// Programs that are there now.
    in_ancestry: Vec<u32>,
    /// Those of them that are of rto-agent, but not this daemon's.
    others: Vec<OtherProgram>,
    messages: mpsc::Sender<Message>,
    pending: Option<Job>,
    /// The state in force changed during the probe: its verdict describes neither state.
    invalid: bool,
    /// Consecutive probes without a verdict.
    unanswered: u32,
    /// Killed probes may have left cgroups.
    has_leftovers: bool,
}

impl Probing {
    pub(in crate::engine) fn new(messages: mpsc::Sender<Message>) -> Self {
        Self {
            last: None,
            programs: Vec::new(),
            in_ancestry: Vec::new(),
            others: Vec::new(),
            messages,
            pending: None,
            invalid: false,
            unanswered: 0,
            has_leftovers: true,
        }
    }

    /// The state in force is changing.
    pub(in crate::engine) fn invalidate(&mut self) {
        self.invalid = self.pending.is_some();
    }

    /// Updates the list of programs between the root and the attached cgroup. `own` is the
    /// daemon's.
    pub(in crate::engine) fn look(&mut self, cgroup: &Path, pin_dir: &Path, own: Option<u32>) {
        let now = ids(cgroup);
        if now != self.in_ancestry || !self.others.is_empty() {
            self.others = other_programs(pin_dir, own, cgroup);
        }
        self.in_ancestry = now;
    }

    /// Programs of other pin directories.
    pub(in crate::engine) fn others(&self) -> &[OtherProgram] {
        &self.others
    }

    /// Removes cgroups that killed probes have left.
    pub(in crate::engine) fn sweep(&mut self, cgroup: &Path) {
        if self.pending.is_none() {
            self.has_leftovers = !interference::sweep(cgroup);
        }
    }

    /// The programs found by the last [`Self::look`].
    pub(in crate::engine) fn in_ancestry(&self) -> &[u32] {
        &self.in_ancestry
    }

    pub(in crate::engine) fn last(&self) -> Option<&ProbeView> {
        self.last.as_ref()
    }

    /// Begins a probe if the programs in the ancestry have changed since the last one: only they
    /// can interfere. [`Self::look`] comes first.
    pub(in crate::engine) fn consider(&mut self, cgroup: &Path, target: Option<ProbeTarget>) {
        if self.pending.is_some() {
            return;
        }
        // Leftovers of an earlier run are removed even if there is nothing to probe now.
        if self.has_leftovers {
            self.sweep(cgroup);
        }
        let Some(target) = target else {
            // A new probe begins once there is a target again.
            self.programs.clear();
            return;
        };
        let now = self.in_ancestry.clone();
        if now == self.programs {
            return;
        }
        self.programs = now;
        self.invalid = false;
        let cgroup = cgroup.to_owned();
        let probe = move || Done::Probe(Some(interference::probe(&cgroup, &target)));
        match Job::begin("probe", &self.messages, Done::Probe(None), probe) {
            Ok(job) => self.pending = Some(job),
            Err(_) => self.programs.clear(),
        }
    }

    /// Waits for a running probe, so that it leaves no cgroup behind. The next start removes the
    /// cgroup of a probe that misses the deadline.
    pub(in crate::engine) fn finish(&mut self, deadline: Instant) {
        if let Some(mut pending) = self.pending.take() {
            pending.wait(deadline);
        }
    }

    /// Handles the verdict of a probe; `None`: its thread panicked.
    pub(in crate::engine) fn done(&mut self, verdict: Option<Verdict>) {
        self.pending = None;
        match verdict {
            Some(verdict) if !self.invalid => {
                if matches!(verdict, Verdict::NotProbed { .. }) {
                    self.unanswered += 1;
                    if self.unanswered < ATTEMPTS {
                        self.programs.clear();
                    }
                } else {
                    self.unanswered = 0;
                }
                self.record(verdict, "the daemon");
            }
            // Repeated at the next health check.
            Some(_) | None => self.programs.clear(),
        }
    }

    /// Records a verdict.
    pub(in crate::engine) fn record(&mut self, verdict: Verdict, by: &str) {
        // The attempts to probe without the privileges for it are one line.
        let is_known = self
            .last
            .as_ref()
            .is_some_and(|last| last.verdict == verdict);
        match &verdict {
            Verdict::NotProbed { .. } if is_known => {}
            Verdict::Interference { .. } => warn!(by, "probe: {}", verdict.describe()),
            _ => info!(by, "probe: {}", verdict.describe()),
        }
        self.last = Some(ProbeView {
            at_s: now_s(),
            by: by.to_owned(),
            verdict,
        });
    }
}

fn ids(attached: &Path) -> Vec<u32> {
    let found = programs::in_ancestry(cgroup::top_of(attached), attached, &[]);
    found.into_iter().map(|program| program.id).collect()
}
