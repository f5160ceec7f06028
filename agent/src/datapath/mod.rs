//! The only module that touches aya: load, pin, attach, write and read the maps.
//!
//! A [`Datapath`] is opened in two steps, so that a program never runs over an empty map and a
//! running one never loses an entry: [`Datapath::open`] finds or makes the maps (those of an
//! earlier run keep working meanwhile), the caller writes what should be in them, and
//! [`Datapath::attach`] puts the link in force and clears away what it replaced.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use aya::maps::MapData;
use rto_agent_common::{
    EntryValue, HostDefaults, LAYOUT_VERSION, Policy, Statistics, UNLISTED, maps, statistics,
};
use serde::{Deserialize, Serialize};

use crate::{
    config::RttSampling,
    kernel::bpf::program_info,
    policy::{
        Cidr, PolicyName,
        entries::{Builder, FamilyCounts},
        plan::{MapState, Plan},
    },
};

mod accepted;
mod error;
pub mod events;
mod link;
mod object;
mod pins;
pub mod probe;
mod slots;
mod tables;
mod tries;
pub mod walk;

pub use accepted::Accepted;
pub use error::DatapathError;
use link::{Link, attached};
pub use object::OBJECT;
use object::Values;
use slots::Slots;
use tables::{TRIES, Tables, describe};
use tries::Tries;

/// What a datapath is opened for.
#[derive(Clone, Debug)]
pub struct Options {
    /// The cgroup2 directory to attach to.
    pub cgroup: PathBuf,
    /// Directory on a BPF file system, for this agent alone.
    pub pin_dir: PathBuf,
    /// Entries there is room for; [`Datapath::grow`] makes more.
    pub max_entries: u32,
    /// What is counted.
    pub statistics: StatisticsOptions,
    /// Why there can be no program at `lsm_cgroup/inet_csk_clone`, where that was found out already.
    pub without_clone: Option<String>,
    /// Jiffies a second.
    pub hz: u32,
    /// What to reckon with where the kernel does not let the program ask the socket.
    pub host_defaults: HostDefaults,
}

/// What the program counts. Another choice is another program: what is off costs nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StatisticsOptions {
    /// Anything at all.
    pub on: bool,
    /// Connections that no entry covers.
    pub unlisted: bool,
    /// When smoothed RTTs are sampled.
    pub rtt: RttSampling,
    /// The kernel tells the program the current process.
    pub process: bool,
}

impl StatisticsOptions {
    fn counts_unlisted(self) -> bool {
        self.on && self.unlisted
    }

    fn mode(self) -> u8 {
        let bit = |bit: u8, on: bool| if on { bit } else { 0 };
        bit(statistics::ON, self.on)
            | bit(statistics::UNLISTED, self.counts_unlisted())
            | bit(
                statistics::RTT_AT_END,
                self.on && self.rtt != RttSampling::Off,
            )
            | bit(statistics::PROCESS, self.on && self.process)
    }

    fn rtt_interval_ns(self) -> u64 {
        match self.rtt {
            RttSampling::Off | RttSampling::AtEnd => 0,
            RttSampling::Every(interval) => u64::try_from(interval.as_nanos()).unwrap_or(u64::MAX),
        }
    }
}

impl Options {
    fn values(&self) -> Values {
        Values {
            trie_entries: Some(kernel_entries(self.max_entries)),
            hz: self.hz,
            statistics_mode: self.statistics.mode(),
            rtt_interval_ns: self.statistics.rtt_interval_ns(),
            ..Values::default()
        }
    }

    /// Where the pins of this program go.
    fn generation(&self) -> PathBuf {
        let name = pins::generation_name(OBJECT, &self.constants(), self.max_entries);
        self.pin_dir.join(name)
    }

    /// What is written into the program, but for the room.
    fn constants(&self) -> Vec<u8> {
        let constants = [
            &[self.statistics.mode()][..],
            &self.statistics.rtt_interval_ns().to_le_bytes(),
            &self.hz.to_le_bytes(),
        ];
        constants.concat()
    }
}

/// What [`Datapath::open`] found of an earlier run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Found {
    /// Nothing: maps and program are new.
    Nothing,
    /// The same program in force: adopted as it is.
    Adopted,
    /// Maps of the same layout: kept, under a new program.
    MapsKept,
    /// Only pins of another layout: replaced.
    Replaced,
}

/// Whether the program is in force.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Attachment {
    /// The kernel lists the program at the cgroup and the link's pin exists.
    pub attached: bool,
    /// What is amiss, if anything.
    pub problem: Option<String>,
    /// The cgroup.
    pub cgroup: PathBuf,
    /// The kernel's id of the program.
    pub program_id: Option<u32>,
    /// When accepted sockets get `rto_min`; absent while nothing is attached.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accepted: Option<Accepted>,
}

/// The program and its maps in the kernel. Dropping it closes the handles and leaves the kernel as it is.
pub struct Datapath {
    options: Options,
    dir: PathBuf,
    found: Found,
    tables: Tables,
    slots: Slots,
    /// Policies that there was no memory to count for.
    uncounted: BTreeSet<PolicyName>,
    /// What entries had counted in the tries that others take the place of, until those are filled.
    former_hits: HashMap<Cidr, u32>,
    link: Option<Link>,
    /// A link in force that an earlier run left, until this one's program has taken its place in it.
    former_link: Option<Link>,
    /// It was in force, and [`Datapath::unlink`] took it out.
    unlinked: bool,
    /// The second program's, for accepted sockets.
    hook: Option<accepted::Hook>,
}

impl Datapath {
    /// Finds or makes the maps. Nothing in force changes. Where the same program is in force with more room than
    /// is asked for (the tries had grown), that is found.
    ///
    /// # Errors
    ///
    /// If the pin directory cannot be used or a map cannot be made; pins made so far are removed.
    pub fn open(mut options: Options) -> Result<Self, DatapathError> {
        let pin_dir = &options.pin_dir;
        let pin_dir_error = |reason| DatapathError::PinDir {
            path: pin_dir.clone(),
            reason,
        };
        pins::create_pin_dir(pin_dir).map_err(pin_dir_error)?;
        let generations = pins::generations(pin_dir).map_err(pin_dir_error)?;

        let same = pins::roomy(
            &generations,
            OBJECT,
            &options.constants(),
            options.max_entries,
        );
        let in_force = same.into_iter().find_map(|(room, dir)| {
            let link = Link::in_force(dir, &options.cgroup).filter(|link| link.is_of(dir))?;
            Some((room, dir.to_owned(), link, Tables::open(dir).ok()?))
        });
        if let Some((room, dir, link, mut tables)) = in_force {
            let slots = Slots::read(tables.policies()?.into_iter());
            events::silence(&dir)?;
            tables.set_host_defaults(options.host_defaults)?;
            let uncounted = prepare(&mut tables, &slots, options.statistics)?;
            options.max_entries = room;
            return Ok(Self {
                uncounted,
                former_hits: HashMap::new(),
                dir,
                found: Found::Adopted,
                tables,
                slots,
                link: Some(link),
                former_link: None,
                unlinked: false,
                hook: None,
                options,
            });
        }

        let staging = new_staging(pin_dir)?;
        let opened = Self::stage(&options, &generations, &staging);
        match opened {
            Ok((found, mut tables, former_hits)) => {
                let slots = Slots::read(tables.policies()?.into_iter());
                events::silence(&staging)?;
                tables.set_host_defaults(options.host_defaults)?;
                let former_link = generations
                    .iter()
                    .find_map(|g| Link::in_force(&g.path, &options.cgroup));
                let uncounted = prepare(&mut tables, &slots, options.statistics)?;
                Ok(Self {
                    uncounted,
                    former_hits,
                    dir: staging,
                    found,
                    tables,
                    slots,
                    link: None,
                    former_link,
                    unlinked: false,
                    hook: None,
                    options,
                })
            }
            Err(e) => {
                // The first error is the one to tell; a leftover directory is swept by the next start.
                let _swept = pins::remove_generation(&staging);
                Err(e)
            }
        }
    }

    /// Pins in `staging` the maps of the newest usable generation, and makes those that are missing. If those are
    /// the tries, what the former ones have counted is returned as well.
    fn stage(
        options: &Options,
        generations: &[pins::Generation],
        staging: &Path,
    ) -> Result<(Found, Tables, HashMap<Cidr, u32>), DatapathError> {
        let mut kept = Kept::Nothing;
        let mut former_hits = HashMap::new();
        // One without a link was kept because sockets could not all be given back what they had: its
        // maps know what that was. One in force goes before it.
        let of_layout = generations
            .iter()
            .filter(|g| g.layout == Some(LAYOUT_VERSION));
        let (in_force, kept_maps): (Vec<_>, Vec<_>) = of_layout.partition(|g| is_in_use(&g.path));
        for generation in in_force.into_iter().chain(kept_maps) {
            let entries = kernel_entries(options.max_entries);
            kept = keep_maps(&generation.path, staging, entries)?;
            if kept == Kept::AllButTries {
                match Tries::open(&generation.path).and_then(|tries| tries.hits()) {
                    Ok(hits) => former_hits = hits.into_iter().collect(),
                    Err(e) => tracing::warn!("what entries have counted is lost: {e}"),
                }
            }
            if kept != Kept::Nothing {
                break;
            }
        }
        let found = match (kept, generations.is_empty()) {
            (Kept::All | Kept::AllButTries, _) => Found::MapsKept,
            (Kept::Nothing, true) => Found::Nothing,
            (Kept::Nothing, false) => Found::Replaced,
        };
        if kept != Kept::All {
            object::load(Some(staging), &options.values())?;
        }
        Ok((found, Tables::open(staging)?, former_hits))
    }

    /// What it was opened for.
    #[must_use]
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// What an earlier run had left.
    #[must_use]
    pub fn found(&self) -> Found {
        self.found
    }

    /// The state of the maps.
    ///
    /// # Errors
    ///
    /// If a map cannot be read.
    pub fn image(&self) -> Result<MapState, DatapathError> {
        let names = self.slots.by_index();
        let mut image = MapState::default();
        let mut entries = Builder::default();
        // An entry of a slot without a policy is inert; as "nameless" it is removed by any plan.
        let nameless = PolicyName::nameless();
        let mut numbers = HashMap::new();
        for (index, mut policy) in self.tables.policies()? {
            if let Some(name) = names.get(&index) {
                numbers.insert(index, entries.policy(name));
                policy.generation = 0;
                image.policies.insert((*name).clone(), policy);
            }
        }
        let all = self.tables.tries.all()?;
        entries.reserve(all.len());
        for (cidr, value) in all {
            let number = match numbers.get(&value.policy) {
                Some(number) => *number,
                None => entries.policy(&nameless),
            };
            entries.push(cidr, number, None);
        }
        (image.entries, _) = entries.build();
        Ok(image)
    }

    /// Writes a plan, in its order: policies, entries, removals, freed slots. `current` is the
    /// state the plan was made against.
    ///
    /// # Errors
    ///
    /// The first write that fails; what came before it stays written. The caller decides, with
    /// [`Datapath::image`] as the truth, whether to go back or to try again.
    pub fn apply(&mut self, current: &MapState, plan: &Plan) -> Result<(), DatapathError> {
        self.tables.be_patient();
        for (name, policy) in &plan.policies_write {
            self.write_policy(name, policy)?;
        }
        let tries = &self.tables.tries;
        let slots = self.slots.indices();
        tries.write(plan.entries_write.iter().map(|(cidr, name)| {
            let former = if plan.points_anew(current, cidr) {
                tries.get(cidr)?.map(|value| value.hits)
            } else {
                self.former_hits.get(cidr).copied()
            };
            let value = EntryValue {
                policy: slot_of(&slots, cidr, name)?,
                hits: former.unwrap_or(0),
            };
            Ok((*cidr, value))
        }))?;
        tries.remove(&plan.entries_remove)?;
        // Who comes later begins at 0.
        self.former_hits = HashMap::new();
        self.free(plan)
    }

    fn free(&mut self, plan: &Plan) -> Result<(), DatapathError> {
        for name in &plan.policies_remove {
            if let Some(slot) = self.slots.release(name) {
                let free = Policy {
                    generation: slot.generation,
                    ..Policy::EMPTY
                };
                self.tables.set_policy(slot.index, &free)?;
                self.tables.remove_statistics(slot.index)?;
                self.uncounted.remove(name);
            }
        }
        Ok(())
    }

    /// Does what `plan` says by making tries for `max_entries`, which hold what `desired` does, and putting
    /// the program in force over them before the former one goes. All other maps stay, and so does what
    /// entries have counted (but for what is counted meanwhile).
    ///
    /// # Errors
    ///
    /// As [`Datapath::apply`] and [`Datapath::attach`]; what was in force stays.
    pub fn grow(
        &mut self,
        max_entries: u32,
        plan: &Plan,
        desired: &MapState,
    ) -> Result<(), DatapathError> {
        let options = Options {
            max_entries,
            ..self.options.clone()
        };
        self.tables.be_patient();
        for (name, policy) in &plan.policies_write {
            self.write_policy(name, policy)?;
        }
        let staging = new_staging(&options.pin_dir)?;
        let former_tries = self.tables.tries.clone();
        let former_program = self.link.as_ref().map(|link| link.program_id);
        match self.fill(&options, &staging, desired) {
            Ok((tables, link)) => {
                if self.link.is_none() {
                    // Never in force: nobody else removes it.
                    let _swept = pins::remove_generation(&self.dir);
                }
                self.dir = staging;
                self.link = link;
                self.hook = None;
                self.tables = tables;
                self.options = options;
                self.former_hits = HashMap::new();
                if self.link.is_some() {
                    self.promote();
                }
            }
            Err(e) => {
                let _swept = pins::remove_generation(&staging);
                return Err(e);
            }
        }
        if self.link.is_some() {
            self.attach()?;
            tries::empty_later(former_tries, move || wait_for_end(former_program));
        }
        self.free(plan)
    }

    /// The maps of [`Datapath::grow`] in `staging`, and the link over them in its place, if there was one.
    fn fill(
        &self,
        options: &Options,
        staging: &Path,
        desired: &MapState,
    ) -> Result<(Tables, Option<Link>), DatapathError> {
        self.tables.pin_all_but_tries(staging)?;
        object::load(Some(staging), &options.values())?;
        let tables = Tables::open(staging)?;
        let mut former = self.former_hits.clone();
        former.extend(self.tables.tries.hits()?);
        let slots = self.slots.indices();
        tables
            .tries
            .write(desired.entries.iter().map(|(cidr, entry)| {
                let value = EntryValue {
                    policy: slot_of(&slots, &cidr, entry.policy)?,
                    hits: former.get(&cidr).copied().unwrap_or(0),
                };
                Ok((cidr, value))
            }))?;
        if self.link.is_none() {
            return Ok((tables, None));
        }
        let link = Link::put_in_force(options, staging, self.link.as_ref())?;
        Ok((tables, Some(link)))
    }

    fn write_policy(&mut self, name: &PolicyName, policy: &Policy) -> Result<(), DatapathError> {
        let slot = match self.slots.get(name) {
            Some(slot) => slot,
            None => {
                let slot = self
                    .slots
                    .take(name)
                    .ok_or_else(|| DatapathError::PolicyTableFull(name.clone()))?;
                if self.options.statistics.on
                    && !begin_statistics(&mut self.tables, name, slot.index)
                {
                    self.uncounted.insert(name.clone());
                }
                slot
            }
        };
        self.tables.set_policy(
            slot.index,
            &Policy {
                generation: slot.generation,
                ..*policy
            },
        )
    }

    /// Puts the program in force, if it is not, and removes the pins of everything it replaces.
    ///
    /// # Errors
    ///
    /// If the program cannot be loaded, attached or pinned; what was in force before stays.
    pub fn attach(&mut self) -> Result<(), DatapathError> {
        if self.link.is_none() {
            let former = self.former_link.as_ref();
            self.link = Some(Link::put_in_force(&self.options, &self.dir, former)?);
            self.former_link = None;
            self.promote();
        }
        if !self.options.statistics.counts_unlisted() {
            // Not before: a program that was in force until now may have counted them.
            retire_unlisted(&mut self.tables)?;
        }
        if self.hook.is_none() {
            self.hook = Some(accepted::Hook::adopt_or_attach(&self.options, &self.dir));
        }
        self.sweep()
    }

    /// Gives the pins of what is in force the name by which a later daemon adopts them. Where that fails they stay where
    /// they are, and the next start puts a program over new tries in the place of this one.
    fn promote(&mut self) {
        let wanted = self.options.generation();
        if self.dir == wanted {
            return;
        }
        match pins::promote(&self.options.pin_dir, &self.dir, &wanted) {
            Ok(()) => self.dir = wanted,
            Err(e) => tracing::warn!(
                "{}: {e}; the pins stay in {}",
                wanted.display(),
                self.dir.display()
            ),
        }
    }

    /// Pins the open maps once more, in a staging directory.
    fn restage(&self) -> Result<PathBuf, DatapathError> {
        let staging = new_staging(&self.options.pin_dir)?;
        match self.tables.pin(&staging) {
            Ok(()) => Ok(staging),
            Err(e) => {
                let _swept = pins::remove_generation(&staging);
                Err(e)
            }
        }
    }

    /// Removes every generation but the one in use.
    fn sweep(&self) -> Result<(), DatapathError> {
        let all = pins::generations(&self.options.pin_dir)
            .map_err(|e| pin_error(&self.options.pin_dir, &e))?;
        for generation in all.iter().filter(|g| g.path != self.dir) {
            tracing::info!(path = %generation.path.display(), "removing replaced pins");
            pins::remove_generation(&generation.path)
                .map_err(|e| pin_error(&generation.path, &e))?;
        }
        Ok(())
    }

    /// Changes what programs reckon with where a socket cannot be asked.
    ///
    /// # Errors
    ///
    /// If the map cannot be written.
    pub fn set_host_defaults(&mut self, host: HostDefaults) -> Result<(), DatapathError> {
        self.options.host_defaults = host;
        self.tables.set_host_defaults(host)
    }

    /// Asks the kernel whether the program is in force and its pins are there.
    #[must_use]
    pub fn attachment(&self) -> Attachment {
        let program_id = self.link.as_ref().map(|link| link.program_id);
        let problem = match program_id {
            None => Some("the program is not attached".to_owned()),
            Some(id) => match attached(&self.options.cgroup, id) {
                Ok(true) if self.dir.join(pins::LINK).exists() => None,
                Ok(true) => Some(format!("the pins in {} are gone", self.dir.display())),
                Ok(false) => {
                    Some("the kernel no longer lists the program at the cgroup".to_owned())
                }
                Err(e) => Some(format!("{}: {e}", self.options.cgroup.display())),
            },
        };
        Attachment {
            attached: problem.is_none(),
            problem,
            cgroup: self.options.cgroup.clone(),
            program_id,
            accepted: self.hook.as_ref().map(accepted::Hook::view),
        }
    }

    /// Makes what [`Datapath::attachment`] reports amiss good again: a new link, new pins. The maps stay.
    ///
    /// # Errors
    ///
    /// As [`Datapath::attach`]; nothing is worse than before.
    pub fn repair(&mut self) -> Result<(), DatapathError> {
        if self.attachment().attached {
            return Ok(());
        }
        let staging = self.restage()?;
        let in_force = |link: &Link| attached(&self.options.cgroup, link.program_id);
        // Where only its pins are gone the link stays.
        self.former_link = self
            .link
            .take()
            .filter(|link| in_force(link).unwrap_or(false));
        let former_dir = std::mem::replace(&mut self.dir, staging);
        // Its pin went with the others, or its cgroup did.
        let former_hook = self.hook.take();
        let attached = self.attach();
        if attached.is_err() {
            let staging = std::mem::replace(&mut self.dir, former_dir);
            self.link = self.link.take().or(self.former_link.take());
            self.hook = former_hook;
            let _swept = pins::remove_generation(&staging);
        }
        attached
    }

    /// What reads the entries' hits; it has handles of its own and can be used on another thread.
    #[must_use]
    pub fn hits(&self) -> Hits {
        Hits(self.tables.tries.clone())
    }

    /// Statistics of every policy, by [`rto_agent_common::direction::ALL`] and summed over the CPUs; those of connections
    /// that no entry covers belong to [`PolicyName::unlisted`].
    ///
    /// # Errors
    ///
    /// If the map cannot be read.
    pub fn statistics(&self) -> Result<BTreeMap<PolicyName, [Statistics; 3]>, DatapathError> {
        let unlisted = self.options.statistics.counts_unlisted();
        let unlisted = unlisted.then(|| (PolicyName::unmatched(), UNLISTED));
        self.slots
            .iter()
            .map(|(name, slot)| (name.clone(), slot.index))
            .chain(unlisted)
            .map(|(name, index)| Ok((name, self.tables.statistics(index)?)))
            .collect()
    }

    /// The names of slots and their generations, for telling whose an event is.
    #[must_use]
    pub fn owners(&self) -> BTreeMap<(u32, u32), PolicyName> {
        self.slots
            .iter()
            .map(|(name, slot)| ((slot.index, slot.generation), name.clone()))
            .chain(self.unlisted_owner())
            .collect()
    }

    fn unlisted_owner(&self) -> Option<((u32, u32), PolicyName)> {
        if !self.options.statistics.counts_unlisted() {
            return None;
        }
        let generation = self.tables.policy(UNLISTED).ok()?.generation;
        Some(((UNLISTED, generation), PolicyName::unmatched()))
    }

    /// Why the program reads less of sockets than this kernel has, if it does.
    #[must_use]
    pub fn limited(&self) -> Option<&str> {
        self.link.as_ref()?.limited.as_deref()
    }

    /// Policies that nothing is counted for, as there was no memory.
    #[must_use]
    pub fn uncounted(&self) -> &BTreeSet<PolicyName> {
        &self.uncounted
    }

    /// Tries once more to have them counted.
    pub fn count_uncounted(&mut self) {
        for name in std::mem::take(&mut self.uncounted) {
            let slot = if name == PolicyName::unmatched() {
                Some(UNLISTED)
            } else {
                self.slots.get(&name).map(|slot| slot.index)
            };
            if slot.is_some_and(|slot| self.tables.clear_statistics(slot).is_err()) {
                self.uncounted.insert(name);
            }
        }
    }

    /// What reads events; it has handles of its own and can be used on another thread.
    ///
    /// # Errors
    ///
    /// If the maps cannot be opened.
    pub fn events(&self) -> Result<events::Reader, DatapathError> {
        events::Reader::open(&self.dir)
    }

    /// What such a reader needs to have SYN-ACKs told as they are sent again.
    #[must_use]
    pub fn syn_acks(&self) -> events::SynAcks {
        events::SynAcks::new(&self.dir, &self.options)
    }

    /// What walks over the sockets that are open, with the policies as they are now. It has handles
    /// of its own and can be used on another thread.
    ///
    /// # Errors
    ///
    /// If the kernel does not take the iterator.
    pub fn walker(&self, mode: walk::Mode) -> Result<walk::Walker, DatapathError> {
        walk::Walker::load(&self.dir, Some(&self.options), mode)
    }

    /// Whether it was in force and is taken out: what the maps hold only tells what sockets had.
    #[must_use]
    pub fn is_unlinked(&self) -> bool {
        self.unlinked
    }

    /// Of these entries by address family, whether the tries have room for them.
    #[must_use]
    pub fn has_room_for(&self, entries: FamilyCounts) -> bool {
        let room = kernel_entries(self.options.max_entries) as usize;
        entries.ipv4.max(entries.ipv6) <= room
    }

    /// Takes the programs out of force; maps and their pins stay, so that a walker can still read
    /// what the sockets had.
    ///
    /// # Errors
    ///
    /// If a link's pin cannot be removed.
    pub fn unlink(&mut self) -> Result<(), DatapathError> {
        pins::remove_links(&self.dir).map_err(|e| pin_error(&self.dir, &e))?;
        self.hook = None;
        if let Some(link) = self.link.take() {
            let program_id = link.program_id;
            drop(link);
            self.unlinked = true;
            // The link goes some time after its last handle: a connection that is made meanwhile
            // still gets its policy.
            let _gone = wait_until(|| !attached(&self.options.cgroup, program_id).unwrap_or(false));
        }
        Ok(())
    }

    /// Takes the program out of force and removes every pin.
    ///
    /// # Errors
    ///
    /// If a pin cannot be removed; the others are removed all the same.
    pub fn detach(self) -> Result<Removed, DatapathError> {
        let pin_dir = self.options.pin_dir.clone();
        let unlinked = self.unlinked;
        let program_id = self.link.as_ref().map(|link| link.program_id);
        let tries = self.tables.tries.clone();
        drop(self);
        let mut removed = remove_pins(&pin_dir)?;
        removed.links += usize::from(unlinked);
        tries::empty_later(tries, move || wait_for_end(program_id));
        Ok(removed)
    }
}

/// Connections decided by entries. While it lives the kernel keeps the tries.
#[derive(Clone)]
pub struct Hits(Arc<Tries>);

impl Hits {
    /// Of every entry that has decided any, in order.
    ///
    /// # Errors
    ///
    /// If a map cannot be read.
    pub fn all(&self) -> Result<Vec<(Cidr, u32)>, DatapathError> {
        let mut hits = self.0.hits()?;
        hits.sort_unstable();
        Ok(hits)
    }

    /// Of one entry that is known to exist.
    ///
    /// # Errors
    ///
    /// If the map cannot be read.
    pub fn of(&self, cidr: &Cidr) -> Result<u32, DatapathError> {
        Ok(self.0.get(cidr)?.map_or(0, |value| value.hits))
    }
}

impl Drop for Datapath {
    /// A datapath that never came into force leaves nothing behind.
    fn drop(&mut self) {
        if self.link.is_none() && !self.unlinked {
            let _swept = pins::remove_generation(&self.dir);
        }
    }
}

/// Sees to it that what is to be counted has a place; what there is no memory for is returned.
fn prepare(
    tables: &mut Tables,
    slots: &Slots,
    statistics: StatisticsOptions,
) -> Result<BTreeSet<PolicyName>, DatapathError> {
    let mut uncounted = BTreeSet::new();
    tables.be_patient();
    if statistics.counts_unlisted() {
        let former = tables.policy(UNLISTED)?;
        if former.name().is_none() {
            let name = PolicyName::unmatched();
            let unlisted = Policy {
                name: name.padded(),
                // Sockets of an earlier time are not counted again.
                generation: former.generation.wrapping_add(1),
                // The kernel's own: TCP_TIMEOUT_INIT.
                initial_rto_us: 1_000_000,
                ..Policy::EMPTY
            };
            if !begin_statistics(tables, &name, UNLISTED) {
                uncounted.insert(name);
            }
            tables.set_policy(UNLISTED, &unlisted)?;
        }
    }
    if statistics.on {
        for (name, slot) in slots.iter() {
            if !tables.has_statistics(slot.index) && !begin_statistics(tables, name, slot.index) {
                uncounted.insert(name.clone());
            }
        }
    }
    Ok(uncounted)
}

/// Takes the place away where connections were counted that no entry covers.
fn retire_unlisted(tables: &mut Tables) -> Result<(), DatapathError> {
    let former = tables.policy(UNLISTED)?;
    if former.name().is_some() {
        let free = Policy {
            generation: former.generation,
            ..Policy::EMPTY
        };
        tables.set_policy(UNLISTED, &free)?;
        tables.remove_statistics(UNLISTED)?;
    }
    Ok(())
}

/// Timers matter more than counts: without memory for them the policy is in force all the same. Says
/// whether it is counted.
fn begin_statistics(tables: &mut Tables, name: &PolicyName, slot: u32) -> bool {
    match tables.clear_statistics(slot) {
        Ok(()) => true,
        Err(e) => {
            tracing::warn!(policy = %name, "nothing is counted: {e}");
            false
        }
    }
}

/// Makes the directory for pins, where there is none.
///
/// # Errors
///
/// If it cannot be made, or is not one that root alone can write on a BPF file system.
pub fn make_pin_dir(path: &Path) -> std::io::Result<()> {
    pins::create_pin_dir(path)
}

/// What [`remove_pins`] removed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Removed {
    /// Generations of pins.
    pub generations: Vec<PathBuf>,
    /// Of these, how many held a link.
    pub links: usize,
    /// Things in the directory that are not ours and were left.
    pub left: Vec<PathBuf>,
}

/// Removes every pin of ours below `pin_dir`, whatever its version, and the directory itself
/// if nothing else is in it. No daemon is needed; one that runs must be asked instead.
///
/// # Errors
///
/// If a pin cannot be removed; the others are removed all the same, and the error names the first.
pub fn remove_pins(pin_dir: &Path) -> Result<Removed, DatapathError> {
    let mut removed = Removed::default();
    let mut failed = None;
    for generation in pins::generations(pin_dir).map_err(|e| pin_error(pin_dir, &e))? {
        let had_link = generation.path.join(pins::LINK).exists();
        match pins::remove_generation(&generation.path) {
            Ok(()) => {
                removed.links += usize::from(had_link);
                removed.generations.push(generation.path);
            }
            Err(e) => failed = failed.or(Some(pin_error(&generation.path, &e))),
        }
    }
    if let Ok(rest) = std::fs::read_dir(pin_dir) {
        removed.left = rest.filter_map(|e| e.ok().map(|e| e.path())).collect();
    }
    if removed.left.is_empty()
        && let Err(e) = std::fs::remove_dir(pin_dir)
        && e.kind() != std::io::ErrorKind::NotFound
    {
        failed = failed.or(Some(pin_error(pin_dir, &e)));
    }
    failed.map_or(Ok(removed), Err)
}

/// Takes the programs of every generation below `pin_dir` out of force; the maps stay. Says how many
/// generations had one.
///
/// # Errors
///
/// If a link's pin cannot be removed.
pub fn remove_links(pin_dir: &Path) -> Result<usize, DatapathError> {
    let mut count = 0;
    let programs = pinned_program_ids(pin_dir);
    for generation in pins::generations(pin_dir).map_err(|e| pin_error(pin_dir, &e))? {
        count += usize::from(generation.path.join(pins::LINK).exists());
        pins::remove_links(&generation.path).map_err(|e| pin_error(&generation.path, &e))?;
    }
    let _gone = wait_until(|| programs.iter().all(|id| program_info(*id).is_err()));
    Ok(count)
}

/// Waits until a program is no more; whether it is.
fn wait_for_end(program_id: Option<u32>) -> bool {
    wait_until(|| program_id.is_none_or(|id| program_info(id).is_err()))
}

/// Waits, for a second at the most, until the kernel has done something; whether it has.
fn wait_until(done: impl Fn() -> bool) -> bool {
    const STEP: Duration = Duration::from_millis(2);
    for _ in 0..500 {
        if done() {
            return true;
        }
        std::thread::sleep(STEP);
    }
    false
}

/// The initial RTO in jiffies that the maps pinned below `pin_dir` have for an address; `None` if
/// none is in force or no entry with one covers it.
#[must_use]
pub fn pinned_initial_rto(pin_dir: &Path, address: std::net::IpAddr) -> Option<u32> {
    let generations = pins::generations(pin_dir).ok()?;
    let in_force = generations
        .iter()
        .find(|g| g.layout == Some(LAYOUT_VERSION) && is_in_use(&g.path))?;
    let tables = Tables::open(&in_force.path).ok()?;
    let host: Cidr = address.to_string().parse().ok()?;
    let entry = tables.tries.get(&host).ok()??;
    let policy = tables.policy(entry.policy).ok()?;
    (policy.initial_rto_jiffies != 0).then_some(policy.initial_rto_jiffies)
}

/// As [`remove_pins`], but only if none of them is in force: a daemon may have begun anew. Says
/// whether they were removed.
///
/// # Errors
///
/// As [`remove_pins`].
pub fn remove_kept_pins(pin_dir: &Path) -> Result<Option<Removed>, DatapathError> {
    let generations = pins::generations(pin_dir).map_err(|e| pin_error(pin_dir, &e))?;
    if generations.iter().any(|g| g.path.join(pins::LINK).exists()) {
        return Ok(None);
    }
    remove_pins(pin_dir).map(Some)
}

/// Program ids behind the links pinned below `pin_dir`: "ours", for telling foreign programs apart.
#[must_use]
pub fn pinned_program_ids(pin_dir: &Path) -> Vec<u32> {
    let generations = pins::generations(pin_dir).unwrap_or_default();
    generations
        .iter()
        .filter_map(|g| Link::at(&g.path))
        .map(|link| link.program_id)
        .collect()
}

/// Room to make for so many entries where so many are asked for.
#[must_use]
pub fn room_for(entries: usize, asked: u32) -> u32 {
    match u32::try_from(entries) {
        Ok(entries) if entries <= asked => asked,
        Ok(entries) => entries.checked_next_power_of_two().unwrap_or(u32::MAX),
        Err(_) => u32::MAX,
    }
}

/// Room of a trie for `max_entries`: a reload that exchanges every entry has the old and the new
/// in it for a moment. The tries take memory by what is in them, not by this number.
fn kernel_entries(max_entries: u32) -> u32 {
    max_entries.saturating_mul(2)
}

/// Whether the program in force uses the maps pinned in `dir`.
fn is_in_use(dir: &Path) -> bool {
    Link::at(dir).is_some_and(|link| link.is_of(dir))
}

/// What [`keep_maps`] could keep.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kept {
    All,
    /// The tries are of another size.
    AllButTries,
    Nothing,
}

/// Pins the maps of `from` in `to` as well, if every one of them is as this version makes it;
/// otherwise pins none.
fn keep_maps(from: &Path, to: &Path, kernel_entries: u32) -> Result<Kept, DatapathError> {
    let mut opened = Vec::new();
    let mut kept = Kept::All;
    for name in maps::ALL {
        let Ok(map) = MapData::from_pin(from.join(name)) else {
            return Ok(Kept::Nothing);
        };
        let Ok(info) = map.info() else {
            return Ok(Kept::Nothing);
        };
        if TRIES.contains(&name) && info.max_entries() != kernel_entries {
            kept = Kept::AllButTries;
        }
        opened.push((name, map));
    }
    if Tables::open(from).is_err() {
        return Ok(Kept::Nothing);
    }
    for (name, map) in opened {
        if TRIES.contains(&name) && kept == Kept::AllButTries {
            continue;
        }
        let path = to.join(name);
        map.pin(&path).map_err(|e| DatapathError::Pin {
            path,
            reason: describe(&e),
        })?;
    }
    Ok(kept)
}

fn new_staging(pin_dir: &Path) -> Result<PathBuf, DatapathError> {
    let staging = pins::unique(pin_dir, "staging", "");
    pins::create_pin_dir(pin_dir)
        .and_then(|()| pins::create_private_dir(&staging))
        .map_err(|e| pin_error(&staging, &e))?;
    Ok(staging)
}

fn slot_of(
    slots: &HashMap<&PolicyName, u32>,
    cidr: &Cidr,
    name: &PolicyName,
) -> Result<u32, DatapathError> {
    slots
        .get(name)
        .copied()
        .ok_or_else(|| DatapathError::UnknownPolicy {
            cidr: *cidr,
            policy: name.clone(),
        })
}

fn pin_error(path: &Path, error: &dyn std::error::Error) -> DatapathError {
    DatapathError::Pin {
        path: path.to_owned(),
        reason: describe(error),
    }
}
