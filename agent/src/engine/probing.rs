//! The probe of the timers in force: when it is made, and its last verdict.

use std::{path::Path, sync::mpsc, time::Duration};

use tracing::{info, warn};

use crate::{
    kernel::{
        cgroup,
        interference::{self, Target, Verdict},
        programs,
    },
    wire::types::{ProbeView, now_s},
};

/// Times a probe without an answer is made again.
const ATTEMPTS: u32 = 3;

/// Probes on a thread of its own, and remembers what came of it.
pub(super) struct Probing {
    last: Option<ProbeView>,
    /// Programs that ran on the way from the root to the attached cgroup when it was last probed.
    programs: Vec<u32>,
    /// Those that run there now.
    in_ancestry: Vec<u32>,
    pending: Option<mpsc::Receiver<Verdict>>,
    /// What is in force has changed while one was under way: its answer is of neither state.
    disturbed: bool,
    /// Probes without an answer in a row.
    unanswered: u32,
}

impl Probing {
    pub(super) fn new() -> Self {
        Self {
            last: None,
            programs: Vec::new(),
            in_ancestry: Vec::new(),
            pending: None,
            disturbed: false,
            unanswered: 0,
        }
    }

    /// What is in force changes.
    pub(super) fn disturb(&mut self) {
        self.disturbed = self.pending.is_some();
    }

    /// Looks which programs are on the way.
    pub(super) fn look(&mut self, cgroup: &Path) {
        self.in_ancestry = ids(cgroup);
    }

    /// How many programs but ours were on the way when that was last looked at.
    pub(super) fn foreign(&self, ours: Option<u32>) -> usize {
        self.in_ancestry
            .iter()
            .filter(|id| Some(**id) != ours)
            .count()
    }

    pub(super) fn last(&self) -> Option<&ProbeView> {
        self.last.as_ref()
    }

    /// Begins a probe if the programs on the way are others than at the last one: each of them can
    /// interfere, and nothing else can.
    pub(super) fn consider(&mut self, cgroup: &Path, target: Option<Target>) {
        self.look(cgroup);
        if self.pending.is_some() {
            return;
        }
        let Some(target) = target else {
            // ProbeResults again once there is something to see.
            self.programs.clear();
            return;
        };
        let now = self.in_ancestry.clone();
        if now == self.programs {
            return;
        }
        self.programs = now;
        self.disturbed = false;
        let cgroup = cgroup.to_owned();
        let (answer, pending) = mpsc::channel();
        let thread = std::thread::Builder::new().name("probe".to_owned());
        let begun = thread.spawn(move || {
            // The engine may have gone.
            let _stopped = answer.send(interference::probe(&cgroup, &target));
        });
        match begun {
            Ok(_) => self.pending = Some(pending),
            Err(_) => self.programs.clear(),
        }
    }

    /// Waits for a probe that is under way, so that it leaves nothing behind.
    pub(super) fn finish(&mut self) {
        const LIMIT: Duration = Duration::from_secs(2);
        if let Some(pending) = self.pending.take() {
            let _answer = pending.recv_timeout(LIMIT);
        }
    }

    /// Takes over an answer that has come meanwhile.
    pub(super) fn collect(&mut self) {
        let answer = match &self.pending {
            Some(pending) => match pending.try_recv() {
                Ok(verdict) => Some(verdict),
                Err(mpsc::TryRecvError::Empty) => return,
                Err(mpsc::TryRecvError::Disconnected) => None,
            },
            None => return,
        };
        self.pending = None;
        match answer {
            Some(verdict) if !self.disturbed => {
                if matches!(verdict, Verdict::Inconclusive { .. }) {
                    self.unanswered += 1;
                    if self.unanswered < ATTEMPTS {
                        self.programs.clear();
                    }
                } else {
                    self.unanswered = 0;
                }
                self.tell(verdict, "the daemon");
            }
            // ProbeResults again at the next health check.
            Some(_) | None => self.programs.clear(),
        }
    }

    /// Remembers a verdict.
    pub(super) fn tell(&mut self, verdict: Verdict, by: &str) {
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
    let Ok(root) = cgroup::resolve(None) else {
        return Vec::new();
    };
    let found = programs::in_ancestry(&root, attached, &[]);
    found.into_iter().map(|program| program.id).collect()
}
