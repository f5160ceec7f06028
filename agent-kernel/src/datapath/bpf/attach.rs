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

/// Attaches the program, if it is not attached, and removes the pins of everything it replaces.
///
/// # Errors
///
/// If the program cannot be loaded, attached or pinned; the program attached before stays.
pub(super) fn put_in_force(kernel: &mut BpfKernel) -> Result<(), DatapathError> {
    if kernel.link.is_none() && kernel.found == Found::Replaced {
        // Socket storage disappears with the maps of a different layout, which no walk can
        // read.
        until_connected(&kernel.options.pin_dir, REPLACED_LIMIT)?;
    }
    kernel.tables.resume_shaping()?;
    if kernel.link.is_none() {
        let former = kernel.former_link.as_ref();
        kernel.link = Some(Link::put_in_force(&kernel.options, &kernel.dir, former)?);
        kernel.former_link = None;
        kernel.was_in_force = true;
        kernel.unlinked = false;
        promote(kernel);
    }
    if !kernel.options.statistics.counts_unmatched() {
        // Not earlier: the program attached until now may have counted them.
        retire_unmatched(&mut kernel.tables)?;
    }
    if kernel.hook.is_none() {
        kernel.hook = Some(accepted::Hook::adopt_or_attach(
            &kernel.options,
            &kernel.dir,
        ));
    }
    sweep(kernel)
}

/// Gives the active pin set the name by which a later daemon adopts it. If that fails, the set
/// keeps its name, and the next start replaces this program by one over new tries.
pub(super) fn promote(kernel: &mut BpfKernel) {
    let wanted = kernel.options.pin_set();
    if kernel.dir == wanted {
        return;
    }
    match pins::promote(&kernel.options.pin_dir, &kernel.dir, &wanted) {
        Ok(()) => kernel.dir = wanted,
        Err(e) => tracing::warn!(
            "{}: {e}; the pins stay in {}",
            wanted.display(),
            kernel.dir.display()
        ),
    }
}

/// Pins the open maps again, in a staging directory.
fn restage(kernel: &BpfKernel) -> Result<PathBuf, DatapathError> {
    let staging = new_staging(&kernel.options.pin_dir)?;
    match kernel.tables.pin(&staging) {
        Ok(()) => Ok(staging),
        Err(e) => {
            let _ = pins::remove_pin_set(&staging); // The next start removes it.
            Err(e)
        }
    }
}

/// Removes all pin sets except the active one.
fn sweep(kernel: &BpfKernel) -> Result<(), DatapathError> {
    let all = pins::pin_sets(&kernel.options.pin_dir)
        .map_err(|e| pin_error(&kernel.options.pin_dir, e))?;
    for set in all.iter().filter(|set| set.path != kernel.dir) {
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
/// As [`put_in_force`]; the state is no worse than before.
pub(super) fn attach_again(kernel: &mut BpfKernel) -> Result<(), DatapathError> {
    let staging = restage(kernel)?;
    let in_force = |link: &Link| attached(&kernel.options.cgroup, link.program_id);
    // The link stays if only its pins are gone.
    kernel.former_link = kernel
        .link
        .take()
        .filter(|link| in_force(link).unwrap_or(false));
    let former_dir = std::mem::replace(&mut kernel.dir, staging);
    // Its pin, or its cgroup, was removed with the others.
    let former_hook = kernel.hook.take();
    let attached = put_in_force(kernel);
    if attached.is_err() {
        let staging = std::mem::replace(&mut kernel.dir, former_dir);
        kernel.link = kernel.link.take().or(kernel.former_link.take());
        kernel.hook = former_hook;
        let _ = pins::remove_pin_set(&staging); // The next start removes it.
    }
    attached
}

/// Detaches the programs. Maps and their pins stay, so that a walker can still read the
/// sockets' former options.
pub(super) fn take_out_of_force(kernel: &mut BpfKernel) -> Result<(), DatapathError> {
    stop_shaping(&kernel.options.pin_dir)?;
    pins::remove_links(&kernel.dir).map_err(|e| pin_error(&kernel.dir, e))?;
    if let Some(hook) = kernel.hook.take() {
        hook.detach();
    }
    if let Some(link) = kernel.link.take().or_else(|| kernel.former_link.take()) {
        let program_id = link.program_id;
        link.detach();
        drop(link);
        kernel.unlinked = true;
        // A link that could not be detached ends some time after its last handle.
        let _ = wait_until(|| !attached(&kernel.options.cgroup, program_id).unwrap_or(false));
    }
    Ok(())
}

/// Detaches the program and removes every pin.
///
/// # Errors
///
/// If a pin cannot be removed; all others are still removed.
pub(super) fn remove(kernel: Box<BpfKernel>) -> Result<Removed, DatapathError> {
    let pin_dir = kernel.options.pin_dir.clone();
    let cgroup = kernel.options.cgroup.clone();
    let unlinked = kernel.unlinked;
    let program_id = kernel.link.as_ref().map(|link| link.program_id);
    let tries = kernel.tables.read.tries.clone();
    let mut removed = remove_pins(&pin_dir)?;
    // Needed even if the pins were lost.
    if let Some(link) = &kernel.link {
        link.detach();
    }
    if let Some(hook) = &kernel.hook {
        hook.detach();
    }
    drop(kernel);
    removed.links += usize::from(unlinked);
    tries::empty_later(tries, move || wait_for_end(&cgroup, program_id));
    Ok(removed)
}
