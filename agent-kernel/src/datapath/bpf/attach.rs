//! Attaches and detaches programs: the link, its pins, and their replacement.

use std::{path::PathBuf, time::Duration};

use rto_agent_core::wire::kernel::{Found, Removed};

use super::{
    accepted,
    kernel::BpfKernel,
    link::{Link, attached},
    open::new_staging,
    pins,
    removal::{remove_pins, wait_for_end, wait_until},
    schedules::{stop_shaping, until_connected},
    statistics::retire_unmatched,
    tries,
};
use crate::datapath::{DatapathError, error::pin_error};

/// How long a program with a different layout stays for connecting sockets.
const REPLACED_LIMIT: Duration = Duration::from_secs(10);

impl BpfKernel {
    /// Attaches the program, if it is not attached, and removes the pins of everything it replaces.
    ///
    /// # Errors
    ///
    /// If the program cannot be loaded, attached or pinned; the program attached before stays.
    pub(super) fn put_in_force(&mut self) -> Result<(), DatapathError> {
        if self.link.is_none() && self.found == Found::Replaced {
            // Socket storage disappears with the maps of a different layout, which no walk can
            // read.
            until_connected(&self.options.pin_dir, REPLACED_LIMIT)?;
        }
        self.tables.resume_shaping()?;
        if self.link.is_none() {
            let former = self.former_link.as_ref();
            self.link = Some(Link::put_in_force(&self.options, &self.dir, former)?);
            self.former_link = None;
            self.was_in_force = true;
            self.unlinked = false;
            self.promote();
        }
        if !self.options.statistics.counts_unmatched() {
            // Not earlier: the program attached until now may have counted them.
            retire_unmatched(&mut self.tables)?;
        }
        if self.hook.is_none() {
            self.hook = Some(accepted::Hook::adopt_or_attach(&self.options, &self.dir));
        }
        self.sweep()
    }

    /// Gives the active pin set the name by which a later daemon adopts it. If that fails, the set
    /// keeps its name, and the next start replaces this program by one over new tries.
    pub(super) fn promote(&mut self) {
        let wanted = self.options.pin_set();
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

    /// Pins the open maps again, in a staging directory.
    fn restage(&self) -> Result<PathBuf, DatapathError> {
        let staging = new_staging(&self.options.pin_dir)?;
        match self.tables.pin(&staging) {
            Ok(()) => Ok(staging),
            Err(e) => {
                let _ = pins::remove_pin_set(&staging); // The next start removes it.
                Err(e)
            }
        }
    }

    /// Removes all pin sets except the active one.
    fn sweep(&self) -> Result<(), DatapathError> {
        let all = pins::pin_sets(&self.options.pin_dir)
            .map_err(|e| pin_error(&self.options.pin_dir, e))?;
        for set in all.iter().filter(|set| set.path != self.dir) {
            tracing::info!(path = %set.path.display(), "removing replaced pins");
            pins::remove_pin_set(&set.path).map_err(|e| pin_error(&set.path, e))?;
        }
        Ok(())
    }

    /// Loads the program again and puts it in force with new pins: after another process removed
    /// its pins or its link, or because a policy needs another feature. The maps stay.
    ///
    /// # Errors
    ///
    /// As [`BpfKernel::put_in_force`]; the state is no worse than before.
    pub(super) fn attach_again(&mut self) -> Result<(), DatapathError> {
        let staging = self.restage()?;
        let in_force = |link: &Link| attached(&self.options.cgroup, link.program_id);
        // The link stays if only its pins are gone.
        self.former_link = self
            .link
            .take()
            .filter(|link| in_force(link).unwrap_or(false));
        let former_dir = std::mem::replace(&mut self.dir, staging);
        // Its pin, or its cgroup, was removed with the others.
        let former_hook = self.hook.take();
        let attached = self.put_in_force();
        if attached.is_err() {
            let staging = std::mem::replace(&mut self.dir, former_dir);
            self.link = self.link.take().or(self.former_link.take());
            self.hook = former_hook;
            let _ = pins::remove_pin_set(&staging); // The next start removes it.
        }
        attached
    }

    /// Detaches the programs. Maps and their pins stay, so that a walker can still read the
    /// sockets' former options.
    pub(super) fn take_out_of_force(&mut self) -> Result<(), DatapathError> {
        stop_shaping(&self.options.pin_dir)?;
        pins::remove_links(&self.dir).map_err(|e| pin_error(&self.dir, e))?;
        if let Some(hook) = self.hook.take() {
            hook.detach();
        }
        if let Some(link) = self.link.take().or_else(|| self.former_link.take()) {
            let program_id = link.program_id;
            link.detach();
            drop(link);
            self.unlinked = true;
            // A link that could not be detached ends some time after its last handle.
            let _ = wait_until(|| !attached(&self.options.cgroup, program_id).unwrap_or(false));
        }
        Ok(())
    }

    /// Detaches the program and removes every pin.
    ///
    /// # Errors
    ///
    /// If a pin cannot be removed; all others are still removed.
    pub(super) fn remove(self: Box<Self>) -> Result<Removed, DatapathError> {
        let pin_dir = self.options.pin_dir.clone();
        let cgroup = self.options.cgroup.clone();
        let unlinked = self.unlinked;
        let program_id = self.link.as_ref().map(|link| link.program_id);
        let tries = self.tables.read.tries.clone();
        let mut removed = remove_pins(&pin_dir)?;
        // Needed even if the pins were lost.
        if let Some(link) = &self.link {
            link.detach();
        }
        if let Some(hook) = &self.hook {
            hook.detach();
        }
        drop(self);
        removed.links += usize::from(unlinked);
        tries::empty_later(tries, move || wait_for_end(&cgroup, program_id));
        Ok(removed)
    }
}
