//! What the daemon starts with.

use std::path::PathBuf;

use rto_agent_core::{config::Config, policy::HostFacts, wire::kernel::Feature};

use super::store::Refused;

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
