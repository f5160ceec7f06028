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
mod detachment;
pub mod discover;
mod error;
#[cfg(test)]
mod fake;
mod files;
mod handle;
mod harm;
mod health;
mod jobs;
mod kernel;
pub mod listing;
pub mod memory;
mod notes;
mod open_sockets;
mod reload;
mod requests;
pub mod runtime;
mod snapshot;
pub mod status;
mod store;
pub mod systemd;
mod tuner;

/// For commands that work without a daemon.
pub use rto_agent_kernel::datapath::{
    drain, remove_kept_pins, remove_links, remove_pins, walk::for_restoring,
};

pub use self::{
    actor::{Actor, STOP_LIMIT},
    config::EngineConfig,
    detach::{DRAIN_LIMIT, remove_others},
    detachment::left_draining,
    error::EngineError,
    handle::{Channels, Done, Handle, Message, Reply, channels},
    jobs::walk,
    snapshot::{Readiness, Snapshot},
    store::{
        DetachMark, LastGood, MAX_STATE_FILE, Refused, RuntimeStore, StartConfig, state_file_aside,
        state_files,
    },
};
