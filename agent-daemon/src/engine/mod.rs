//! The only writer to the kernel. Every change (file reload, CLI call, TTL expiry, signal) is a
//! message to the engine, so no lock is needed.
//!
//! `Config -> Desired -> Resolved -> Plan -> Change`:
//! A request is a function from one [`desired`] state to the next, and only `reconcile` writes it
//! to the kernel. Readers see a [`Snapshot`], published after each change and read on their own
//! threads.

use std::{path::PathBuf, time::Duration};

use rto_agent_core::{
    config::{AgentConfig, Config},
    policy::HostFacts,
    wire::kernel::Feature,
};

mod actor;
mod apply;
mod audit;
mod changing;
mod control;
pub mod desired;
mod detach_mark;
mod discover;
mod document;
mod draining;
mod error;
#[cfg(test)]
mod fake;
mod handle;
mod harm;
mod jobs;
mod last_good;
mod listing;
pub mod memory;
mod reconcile;
pub mod runtime;
mod snapshot;
mod state;
mod status;
pub mod store;
pub mod systemd;
mod tuning_store;
mod verify;

pub use actor::Engine;
pub use apply::{DRAIN_LIMIT, detach::remove_others};
pub use changing::Open;
pub use detach_mark::DetachMark;
pub use document::{MAX_FILE as MAX_STATE_FILE, aside as state_file_aside};
pub use draining::left_draining;
pub use error::EngineError;
pub use handle::{Channels, Done, Handle, Message, Reply, channels};
pub use jobs::walk;
pub use last_good::{LastGood, Refused, StartConfig};
pub use snapshot::{Readiness, Snapshot};

/// Time the engine gets to end after a stop. The daemon's own steps use the rest of two seconds.
pub const STOP_LIMIT: Duration = Duration::from_millis(1500);

/// What the daemon starts with.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// The configuration file.
    pub config_path: PathBuf,
    /// The configuration read from it.
    pub config: Config,
    /// [`rto_agent_core::config::Files::fingerprint`] of these files.
    pub fingerprint: u64,
    /// Why this is the last good configuration, not that of the current files.
    pub refused: Option<Refused>,
    /// The cgroup2 directory to attach to.
    pub cgroup: PathBuf,
    /// The host.
    pub host: HostFacts,
    /// Kernel release, for status.
    pub kernel: String,
    /// The features of this kernel.
    pub features: Vec<Feature>,
    /// The kernel tells the program which process called connect().
    pub tells_process: bool,
    /// Reads the number of dropped log lines.
    pub dropped_lines: fn() -> u64,
}

/// Files that keep state of the daemon, with the consequence of losing each.
#[must_use]
pub fn state_files(agent: &AgentConfig) -> Vec<(PathBuf, &'static str)> {
    let (lasting, of_boot) = (&agent.persistent_dir, &agent.state_dir);
    let learnt = "timers start learning again, and proven harm is forgotten";
    let detached = "no policy is active until rto-agent attach";
    vec![
        (lasting.join(tuning_store::FILE), learnt),
        (of_boot.join(tuning_store::FILE), learnt),
        (lasting.join(detach_mark::FILE), detached),
        (of_boot.join(detach_mark::FILE), detached),
        (
            lasting.join(last_good::FILE),
            "a start with an invalid configuration has no last good one to use instead",
        ),
    ]
}

#[cfg(test)]
impl EngineConfig {
    /// For a host that does not exist.
    pub(crate) fn for_tests() -> Self {
        Self {
            config_path: "/config.toml".into(),
            config: Config::default(),
            fingerprint: 0,
            refused: None,
            cgroup: "/nowhere".into(),
            host: rto_agent_core::testing::HOST,
            kernel: "6.12".to_owned(),
            features: Vec::new(),
            tells_process: false,
            dropped_lines: || 0,
        }
    }
}

/// For commands that work without a daemon.
pub use rto_agent_kernel::datapath::{
    drain, remove_kept_pins, remove_links, remove_pins, walk::for_restoring,
};
