//! The kernel by eBPF: loads, pins and attaches programs, and writes and reads their maps. The only
//! module that uses aya.

mod accepted;
mod attach;
pub mod events;
pub mod handover;
mod interface;
mod kernel;
mod link;
mod object;
mod open;
mod others;
mod pin_check;
mod pins;
pub mod probe;
mod reader;
mod removal;
mod schedules;
mod slots;
mod statistics;
mod tables;
mod tries;
pub mod walk;
mod write;

pub use kernel::BpfKernel;
pub use object::OBJECT;
pub use open::open;
pub use others::{OtherProgram, other_programs};
pub use removal::{
    PinnedEntry, PinnedMaps, make_pin_dir, pinned_maps, pinned_policy, pinned_program_ids,
    remove_kept_pins, remove_links, remove_pins,
};
pub use schedules::{connecting, drain, left_set, until_connected};
