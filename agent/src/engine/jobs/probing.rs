//! The probe of the timers in force: when it is made, and its last verdict.

use std::{path::Path, sync::mpsc, time::Instant};

use tracing::{info, warn};

use super::{Done, Job, Message};
use crate::{
    kernel::{
        cgroup,
        interference::{self, Verdict},
        programs,
    },
    policy::ProbeTarget,
    wire::types::{ProbeView, now_s},
};

/// Times a probe without an answer is made again.
const ATTEMPTS: u32 = 3;

/// Probes on a thread of its own, and remembers what came of it.
pub(in crate::engine) struct Probing {
    last: Option<ProbeView>,
    /// Programs that ran on the way from the root to the attached cgroup when it was last probed.
    programs: Vec<u32>,
    /// Programs that run there now.
    in_ancestry: Vec<u32>,
    messages: mpsc::Sender<Message>,
    pending: Option<Job>,
    /// What is in force has changed while one was under way: its answer is of neither state.
    invalid: bool,
    /// Probes without an answer in a row.
    unanswered: u32,
    /// Cgroups of killed probes may be left.
    has_leftovers: bool,
}

impl Probing {
    pub(in crate::engine) fn new(messages: mpsc::Sender<Message>) -> Self {
        Self {
            last: None,
            programs: Vec::new(),
            in_ancestry: Vec::new(),
            messages,
            pending: None,
            invalid: false,
            unanswered: 0,
            has_leftovers: true,
        }
    }

    /// What is in force changes.
    pub(in crate::engine) fn invalidate(&mut self) {
        self.invalid = self.pending.is_some();
    }

    /// Looks which programs are on the way.
    pub(in crate::engine) fn look(&mut self, cgroup: &Path) {
        self.in_ancestry = ids(cgroup);
    }

    /// Removes the cgroups that killed probes have left.
    pub(in crate::engine) fn sweep(&mut self, cgroup: &Path) {
        if self.pending.is_none() {
            self.has_leftovers = !interference::sweep(cgroup);
        }
    }

    /// The programs that ran there when that was last looked at.
    pub(in crate::engine) fn in_ancestry(&self) -> &[u32] {
        &self.in_ancestry
    }

    pub(in crate::engine) fn last(&self) -> Option<&ProbeView> {
        self.last.as_ref()
    }

    /// Begins a probe if the programs on the way are others than at the last one: each of them can
    /// interfere, and nothing else can.
    pub(in crate::engine) fn consider(&mut self, cgroup: &Path, target: Option<ProbeTarget>) {
        self.look(cgroup);
        if self.pending.is_some() {
            return;
        }
        // Leftovers of an earlier run, whether or not there is something to probe now.
        if self.has_leftovers {
            self.sweep(cgroup);
        }
        let Some(target) = target else {
            // Asked again once there is something to see.
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

    /// Waits for a probe that is under way, so that it leaves nothing behind; the next start removes what one that is
    /// later has left.
    pub(in crate::engine) fn finish(&mut self, deadline: Instant) {
        if let Some(mut pending) = self.pending.take() {
            pending.wait(deadline);
        }
    }

    /// Takes over the answer of a probe; `None`: it died.
    pub(in crate::engine) fn done(&mut self, verdict: Option<Verdict>) {
        self.pending = None;
        match verdict {
            Some(verdict) if !self.invalid => {
                if matches!(verdict, Verdict::Inconclusive { .. }) {
                    self.unanswered += 1;
                    if self.unanswered < ATTEMPTS {
                        self.programs.clear();
                    }
                } else {
                    self.unanswered = 0;
                }
                self.record(verdict, "the daemon");
            }
            // Asked again at the next health check.
            Some(_) | None => self.programs.clear(),
        }
    }

    /// Remembers a verdict.
    pub(in crate::engine) fn record(&mut self, verdict: Verdict, by: &str) {
        match &verdict {
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
