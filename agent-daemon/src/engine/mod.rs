//! The only writer to the kernel. Every change (file reload, CLI call, TTL expiry, signal) is a
//! message to the engine, so no lock is needed.
//!
//! `Config -> Desired -> Resolved -> Plan -> Change`:
//! A request is a function from one [`desired`] state to the next, and only `Engine::change()`
//! writes it to the kernel. Readers see a [`Snapshot`], published after each change and read on
//! their own threads.

mod actor;
mod audit;
mod change;
mod comparison;
mod config;
mod control;
pub mod desired;
mod detach;
mod detach_mark;
mod detachment;
pub mod discover;
mod document;
mod error;
#[cfg(test)]
mod fake;
mod files;
mod handle;
mod harm;
mod health;
mod jobs;
mod kernel;
mod last_good;
pub mod listing;
pub mod memory;
mod notes;
mod open_sockets;
mod reload;
mod requests;
pub mod runtime;
mod snapshot;
pub mod status;
pub mod store;
pub mod systemd;
mod tuner;
mod tuning_store;

/// For commands that work without a daemon.
pub use rto_agent_kernel::datapath::{
    drain, remove_kept_pins, remove_links, remove_pins, walk::for_restoring,
};

pub use self::{
    actor::{Actor, STOP_LIMIT},
    config::EngineConfig,
    detach::{DRAIN_LIMIT, remove_others},
    detach_mark::DetachMark,
    detachment::left_draining,
    document::{MAX_FILE as MAX_STATE_FILE, aside as state_file_aside},
    error::EngineError,
    files::state_files,
    handle::{Channels, Done, Handle, Message, Reply, channels},
    jobs::walk,
    last_good::{LastGood, StartConfig},
    snapshot::{Readiness, Snapshot},
};
