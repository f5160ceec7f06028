//! TOML text -> validated [`PolicySet`](crate::policy::PolicySet), with errors that point to the line.
//!
//! Reads the configuration file and `policies.d/*.toml` beside it, in name order, and collects all
//! errors of all files. A policy is defined in one file; other files may add `cidrs` to it (as
//! `rto-agent add --save` does). `cidrs_file` names a list of CIDRs, one a line, which is read
//! without the TOML parser.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use crate::policy::{HostFacts, plan::MapState};

mod agent;
pub mod atomic_file;
mod exposure;
mod files;
mod list;
mod load;
mod parse;
mod reader;
pub mod regular_file;
pub mod save;
mod source;

pub use agent::{
    AGENT_KEYS, AgentConfig, CgroupSetting, DEFAULT_SOCKET, MAX_SOCKET_PATH, MetricsSetting,
    OnExit, RttSampling,
};
pub use files::{Files, is_policy_file, policies_dir};
pub use load::Config;
use load::Loader;
pub use reader::{FilesReader, ReadError, STALL_LIMIT};
pub use source::{ConfigError, ConfigErrors, MAX_FILE};

/// The default path of the configuration.
pub const DEFAULT_CONFIG: &str = "/etc/rto-agent/config.toml";
/// The file in `policies.d` that `rto-agent add --save` writes.
pub const SAVED_FILE: &str = "50-cli.toml";

impl Config {
    /// Reads and checks all files, for a host.
    pub fn load(path: &Path, host: &HostFacts) -> Result<Self, ConfigErrors> {
        match FilesReader::default().read(path) {
            Ok(files) => Self::of(&files, host),
            Err(e) => Err(e.into()),
        }
    }

    /// Checks all files, for a host.
    pub fn of(files: &Files, host: &HostFacts) -> Result<Self, ConfigErrors> {
        let mut loader = Loader::default();
        loader.add_lists(files.lists());
        loader.add_all(files.iter());
        loader.refuse(files.dir_error.clone());
        let mut config = loader.finish(host)?;
        config.warnings.extend_from_slice(&files.exposed);
        config.exposed.clone_from(&files.exposed);
        Ok(config)
    }

    /// Checks the text of one file, for a host. Reads nothing: `path` is used in messages.
    pub fn from_text(path: &Path, text: String, host: &HostFacts) -> Result<Self, ConfigErrors> {
        let mut loader = Loader::default();
        loader.add_all(std::iter::once((path, Ok(Arc::new(text)))));
        loader.finish(host)
    }

    /// Only `[agent]`, for commands that need nothing else: ignores errors elsewhere.
    pub fn load_agent(path: &Path) -> Result<AgentConfig, ConfigErrors> {
        let files = FilesReader::default().read(path)?;
        let mut loader = Loader::default();
        loader.add_all(files.iter().take(1));
        loader.agent()
    }

    /// What the kernel's maps should hold.
    pub fn maps(&self) -> MapState {
        let policies = self.compiled.iter();
        MapState {
            policies: policies.map(|(name, c)| (name.clone(), c.kernel)).collect(),
            entries: self.set.entries.clone(),
            ..MapState::default()
        }
    }

    /// The file that `rto-agent add --save` writes.
    pub fn saved_path(path: &Path) -> PathBuf {
        policies_dir(path).join(SAVED_FILE)
    }
}

#[cfg(test)]
mod chart;
#[cfg(test)]
mod tests;
