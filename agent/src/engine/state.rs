//! What the kernel holds and what it should hold.

use std::{path::PathBuf, time::Instant};

use tracing::{debug, error, info, warn};

use super::EngineError;
use crate::{
    config::MAX_ENTRIES_LIMIT,
    datapath::{
        Attachment, Datapath, DatapathError, Found, Options, Removed, room_for,
        walk::{self, Mode, Walker},
    },
    policy::{
        HostFacts, PolicyName, PolicySet,
        compile::{EffectiveSetting, Effects},
        entries::FamilyCounts,
        plan::{ChangeSummary, MapState, Plan},
    },
    problem::Problem,
    progress,
};

/// So many changes are told one by one.
const WORDS: usize = 12;

/// The datapath and the state it is kept in.
pub(super) struct State {
    datapath: Option<Datapath>,
    options: Options,
    found: Found,
    host: HostFacts,
    /// What should be in force.
    set: PolicySet,
    effects: Effects,
    desired: MapState,
    /// What the maps hold, as last read or written.
    image: MapState,
    /// Why they differ, if they do.
    out_of_sync: Option<String>,
    /// What the last repair could not mend.
    broken: Problem,
    /// The last change in words.
    last_change: String,
    /// Entries to make room for at least (`max_entries`).
    room: u32,
    /// Programs and tries were made anew.
    renewed: bool,
    /// Maps without a program were left, see [`State::leave_maps`].
    kept: bool,
}

impl State {
    /// Reads what the maps hold. `room`: see [`State::set_room`].
    pub(super) fn new(
        datapath: Datapath,
        host: HostFacts,
        room: u32,
    ) -> Result<Self, DatapathError> {
        let image = datapath.image()?;
        Ok(Self {
            options: datapath.options().clone(),
            found: datapath.found(),
            datapath: Some(datapath),
            host,
            set: PolicySet::default(),
            effects: Effects::new(),
            desired: image.clone(),
            image,
            out_of_sync: None,
            broken: Problem::default(),
            last_change: String::new(),
            room,
            renewed: false,
            kept: false,
        })
    }

    pub(super) fn options(&self) -> &Options {
        &self.options
    }

    pub(super) fn found(&self) -> Found {
        self.found
    }

    pub(super) fn host(&self) -> &HostFacts {
        &self.host
    }

    /// What values are computed with, from the next change on, and at once what the program reckons with where it
    /// cannot ask a socket.
    pub(super) fn set_host(&mut self, host: HostFacts) {
        self.host = host;
        self.options.host_defaults = host.defaults();
        if let Some(datapath) = &mut self.datapath
            && let Err(e) = datapath.set_host_defaults(host.defaults())
        {
            error!("the program goes by former settings of the host: {e}");
        }
    }

    /// The set in force (or that will be, once attached again).
    pub(super) fn set(&self) -> &PolicySet {
        &self.set
    }

    pub(super) fn all_effects(&self) -> &Effects {
        &self.effects
    }

    pub(super) fn effects(&self, policy: &PolicyName) -> &[EffectiveSetting] {
        self.effects.get(policy).map_or(&[], Vec::as_slice)
    }

    pub(super) fn entries(&self) -> usize {
        self.set.entries.len()
    }

    pub(super) fn datapath(&self) -> Option<&Datapath> {
        self.datapath.as_ref()
    }

    pub(super) fn problems(&self) -> impl Iterator<Item = &String> {
        self.out_of_sync.iter().chain(self.broken.text())
    }

    pub(super) fn in_sync(&self) -> bool {
        self.out_of_sync.is_none()
    }

    /// Makes the kernel hold `set`, or leaves everything as it is.
    ///
    /// # Errors
    ///
    /// `Refused` if the set cannot be had on this host, `Failed` if a write failed and was undone.
    pub(super) fn become_set(&mut self, set: PolicySet) -> Result<ChangeSummary, EngineError> {
        let (desired, effects) = set.image(&self.host).map_err(|errors| {
            let lines: Vec<String> = errors.iter().map(ToString::to_string).collect();
            EngineError::Refused(lines.join("\n"))
        })?;
        let count = desired.entries.len();
        if count > MAX_ENTRIES_LIMIT as usize {
            return Err(EngineError::Refused(format!(
                "{count} entries are more than there can be ({MAX_ENTRIES_LIMIT})"
            )));
        }
        let room = room_for(count, self.room);
        progress::step();
        let begin = Instant::now();
        let plan = Plan::between(&self.image, &desired);
        let compared = begin.elapsed();
        progress::step();
        // Said against what was wanted before, not against what the kernel happened to hold.
        let changed = if self.image == self.desired {
            ChangeSummary::of(&plan, &self.desired, &desired)
        } else {
            ChangeSummary::between(&self.desired, &desired)
        };
        // While sockets are given back what they had, the maps stay as they are: they know what that was.
        if let Some(datapath) = self.datapath.as_mut().filter(|d| !d.is_unlinked()) {
            let room = room.max(self.options.max_entries);
            self.renewed |= write(
                datapath,
                &mut self.image,
                room,
                &plan,
                &desired,
                &mut self.out_of_sync,
            )?;
        }
        debug!(?compared, written = ?begin.elapsed() - compared, "change took");
        self.options.max_entries = self.options.max_entries.max(room);
        let known = |name: &PolicyName| self.desired.policies.contains_key(name);
        self.last_change = plan.describe(WORDS, known);
        self.set = set;
        self.effects = effects;
        self.desired = desired;
        Ok(changed)
    }

    /// Which entries and policies the last change was about.
    pub(super) fn last_change(&self) -> &str {
        &self.last_change
    }

    /// Sets for how many entries there is to be room at least, from the next change on; returns what was
    /// set before.
    pub(super) fn set_room(&mut self, entries: u32) -> u32 {
        std::mem::replace(&mut self.room, entries)
    }

    /// Whether programs and tries were made anew since this was last asked.
    pub(super) fn take_renewed(&mut self) -> bool {
        std::mem::take(&mut self.renewed)
    }

    pub(super) fn attach(&mut self) -> Result<(), DatapathError> {
        self.datapath.as_mut().map_or(Ok(()), Datapath::attach)
    }

    pub(super) fn attachment(&self) -> Attachment {
        match &self.datapath {
            Some(datapath) => datapath.attachment(),
            None => Attachment {
                attached: false,
                problem: Some("detached on purpose; rto-agent reload attaches again".to_owned()),
                cgroup: self.options.cgroup.clone(),
                program_id: None,
                accepted: None,
            },
        }
    }

    /// Takes the programs out of force, if they are, and returns what gives the sockets back what they
    /// had. The maps stay until [`State::detach`].
    pub(super) fn unlink_for_restoring(&mut self) -> Result<Vec<Walker>, DatapathError> {
        let Some(datapath) = &mut self.datapath else {
            return walk::for_restoring(&self.options.pin_dir);
        };
        // First: where it cannot be had, nothing has changed.
        let walker = datapath.walker(Mode::Restore)?;
        datapath.unlink()?;
        Ok(vec![walker])
    }

    /// Lets go of what [`State::unlink_for_restoring`] took out of force and leaves the maps, which
    /// know what sockets had; says where.
    pub(super) fn leave_maps(&mut self) -> PathBuf {
        self.forget();
        self.datapath = None;
        self.kept = true;
        self.options.pin_dir.clone()
    }

    /// There is nothing in the kernel that could be out of step.
    fn forget(&mut self) {
        self.image = MapState::default();
        self.out_of_sync = None;
        self.broken = Problem::default();
    }

    /// Whether maps were left that still know what sockets had.
    pub(super) fn has_kept_maps(&self) -> bool {
        self.kept
    }

    /// Removes everything from the kernel.
    pub(super) fn detach(&mut self) -> Result<Removed, DatapathError> {
        self.forget();
        self.kept = false;
        match self.datapath.take() {
            Some(datapath) => datapath.detach(),
            None => super::remove_pins(&self.options.pin_dir),
        }
    }

    /// Fills and attaches a new datapath after [`State::detach`].
    pub(super) fn reopen(&mut self, datapath: Datapath) -> Result<ChangeSummary, EngineError> {
        let failed = |e: DatapathError| EngineError::Failed(e.to_string());
        self.image = datapath.image().map_err(failed)?;
        self.datapath = Some(datapath);
        self.kept = false;
        self.desired = MapState::default();
        let changed = self.become_set(self.set.clone())?;
        self.attach().map_err(failed)?;
        Ok(changed)
    }

    /// Compares the kernel's maps with what they should hold; [`State::heal`] mends a difference.
    pub(super) fn verify(&mut self) {
        let Some(datapath) = &self.datapath else {
            return;
        };
        match datapath.image() {
            Ok(image) => {
                let same = image == self.desired;
                if !same && self.out_of_sync.is_none() {
                    let text = "the kernel's maps hold something else than they should";
                    error!("{text}");
                    self.out_of_sync = Some(text.to_owned());
                }
                if same {
                    self.out_of_sync = None;
                    // Not a second table of the same.
                    self.image.clone_from(&self.desired);
                } else {
                    self.image = image;
                }
            }
            Err(e) => self.out_of_sync = Some(format!("the kernel's maps cannot be read: {e}")),
        }
    }

    /// Looks whether the program is in force and the maps are in step, and mends what is not.
    pub(super) fn heal(&mut self) {
        let Some(datapath) = &mut self.datapath else {
            return;
        };
        datapath.count_uncounted();
        if let Some(problem) = datapath.attachment().problem {
            match datapath.repair() {
                Ok(()) => {
                    warn!(problem, "attached again");
                    self.broken = Problem::default();
                }
                Err(e) => {
                    let text = format!("{problem}; attaching again failed: {e}");
                    self.broken.becomes(Some(text), |text| error!("{text}"));
                }
            }
        } else {
            self.broken = Problem::default();
        }
        if self.out_of_sync.is_some() {
            let retried = datapath.image().map_err(failed).and_then(|image| {
                self.image = image;
                let plan = Plan::between(&self.image, &self.desired);
                write(
                    datapath,
                    &mut self.image,
                    self.options.max_entries,
                    &plan,
                    &self.desired,
                    &mut self.out_of_sync,
                )
            });
            match retried {
                Ok(renewed) => {
                    self.renewed |= renewed;
                    info!("the kernel's maps are in step again");
                }
                Err(e) => error!("the kernel's maps are still out of step: {e}"),
            }
        }
    }
}

/// Applies a plan, with new tries if there is to be more room than there is, or what should go leaves too little of
/// it; whether there were new ones. Undoes it if a write fails.
fn write(
    datapath: &mut Datapath,
    image: &mut MapState,
    room: u32,
    plan: &Plan,
    desired: &MapState,
    out_of_sync: &mut Option<String>,
) -> Result<bool, EngineError> {
    let renews = room > datapath.options().max_entries
        || !datapath.has_room_for(most_meanwhile(image, plan));
    let written = if renews {
        datapath.grow(room, plan, desired)
    } else {
        datapath.apply(image, plan)
    };
    match written {
        Ok(()) => {
            image.clone_from(desired);
            *out_of_sync = None;
            Ok(renews)
        }
        Err(failure) => {
            error!("{failure}; going back");
            let undone = datapath.image().and_then(|actual| {
                let back = Plan::between(&actual, image);
                datapath.apply(&actual, &back)
            });
            match undone {
                Ok(()) => Err(EngineError::Failed(format!(
                    "{failure}; nothing was changed"
                ))),
                Err(e) => {
                    let text = format!("{failure}; going back failed as well: {e}");
                    *out_of_sync = Some(format!("the kernel's maps are out of step: {text}"));
                    let held = match datapath.image() {
                        Ok(actual) => {
                            let told = held(&ChangeSummary::between(image, &actual));
                            *image = actual;
                            told
                        }
                        Err(_) => "the kernel's maps cannot be read".to_owned(),
                    };
                    Err(EngineError::Failed(format!(
                        "{text}\n{held}; what should be in force is tried again every few seconds, see \
                         rto-agent status"
                    )))
                }
            }
        }
    }
}

/// What the kernel holds that could not go back, by what differs from before.
fn held(differs: &ChangeSummary) -> String {
    let ChangeSummary {
        added,
        changed,
        removed,
        ..
    } = differs;
    format!(
        "in force is what was before, but for entries added: {added}, changed: {changed}, \
         removed: {removed}"
    )
}

/// Entries in the tries before a plan takes any out.
fn most_meanwhile(image: &MapState, plan: &Plan) -> FamilyCounts {
    let mut most = image.entries.families();
    let written = plan.entries_write.iter().map(|(cidr, _)| cidr);
    for cidr in written.filter(|cidr| !plan.points_anew(image, cidr)) {
        *most.of(cidr) += 1;
    }
    most
}

fn failed(error: DatapathError) -> EngineError {
    EngineError::Failed(error.to_string())
}
