//! TOML text -> validated [`PolicySet`], with errors that point to the line.
//!
//! Reads the configuration file and `policies.d/*.toml` beside it, in name order, and collects all
//! errors of all files. A policy is defined in one file; other files may add `cidrs` to it (as
//! `rto-agent add --save` does).

use std::{
    collections::BTreeMap,
    ffi::OsStr,
    fs,
    hash::{BuildHasher as _, Hash as _, Hasher as _},
    io,
    path::{Path, PathBuf},
    sync::{Arc, OnceLock},
};

use foldhash::quality::FixedState;

use crate::policy::{HostFacts, PolicyName, PolicySet, compile::Compiled, plan::MapState};

mod agent;
pub mod atomic_file;
mod exposure;
mod lists;
mod load;
mod parse;
mod reader;
pub mod regular_file;
pub mod save;
mod source;

pub use agent::{
    AGENT_KEYS, AgentConfig, CgroupSetting, MAX_SOCKET_PATH, MetricsSetting, OnExit, RttSampling,
};
use load::Loader;
pub use reader::{FilesReader, READ_LIMIT, ReadError, STALL_LIMIT};
pub use source::{ConfigError, ConfigErrors};

/// The default path of the configuration.
pub const DEFAULT_CONFIG: &str = "/etc/rto-agent/config.toml";
/// The default path of the control socket.
pub const DEFAULT_SOCKET: &str = "/run/rto-agent/control.sock";
/// Largest file, bytes: about three million CIDRs.
pub const MAX_FILE: u64 = 64 << 20;
/// Most errors of a kind that are reported, as locating each takes time.
const MOST_ERRORS: usize = 200;
const POLICIES_DIR: &str = "policies.d";
/// The file in `policies.d` that `rto-agent add --save` writes.
pub const SAVED_FILE: &str = "50-cli.toml";

/// A configuration that was read, and is valid for a host.
#[derive(Clone, Debug, Default)]
pub struct Config {
    /// `[agent]`.
    pub agent: AgentConfig,
    /// Policies and entries.
    pub set: PolicySet,
    /// The policies, compiled for that host.
    pub compiled: BTreeMap<PolicyName, Arc<Compiled>>,
    /// The files read, in order.
    pub files: Vec<PathBuf>,
    /// Warnings about valid but probably unintended values, with their locations.
    pub warnings: Vec<String>,
    /// Warnings about users other than root who can change the files.
    pub exposed: Vec<String>,
}

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
    #[must_use]
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

/// A snapshot of the configuration's files.
pub struct Files {
    /// Path and content of each file; the main file is first.
    files: Vec<(PathBuf, io::Result<Arc<String>>)>,
    dir_error: Option<ConfigError>,
    /// Warnings about users other than root who can change the files.
    exposed: Vec<String>,
    fingerprint: OnceLock<u64>,
}

impl Files {
    /// Reads the configuration file and `policies.d`, without a time limit; see [`FilesReader`].
    pub fn read(path: &Path) -> Self {
        Self::read_telling(path, &|_| {})
    }

    /// As [`Self::read`]; calls `telling` with each path before accessing it.
    fn read_telling(path: &Path, telling: &dyn Fn(&Path)) -> Self {
        let policies = policies_dir(path);
        telling(&policies);
        let (more, dir_error) = match list(&policies) {
            Ok(files) => (files, None),
            Err(e) => {
                let error = ConfigError::whole(&policies, e.to_string());
                (Vec::new(), Some(error))
            }
        };
        let all = std::iter::once(path.to_owned()).chain(more);
        let files: Vec<_> = all
            .map(|path| {
                telling(&path);
                let text = source::read(&path).map(Arc::new);
                (path, text)
            })
            .collect();
        Self {
            // On this thread, as the file system may hang.
            exposed: exposure::exposed(path, files.iter().map(|(path, _)| path)),
            files,
            dir_error,
            fingerprint: OnceLock::new(),
        }
    }

    /// Files whose texts were read earlier.
    #[must_use]
    pub fn of_texts(texts: Vec<(PathBuf, String)>) -> Self {
        let files = texts.into_iter();
        Self {
            files: files
                .map(|(path, text)| (path, Ok(Arc::new(text))))
                .collect(),
            dir_error: None,
            exposed: Vec::new(),
            fingerprint: OnceLock::new(),
        }
    }

    /// The texts of all readable files.
    pub fn texts(&self) -> impl Iterator<Item = (&Path, &str)> {
        let files = self.files.iter();
        files.filter_map(|(path, text)| Some((path.as_path(), text.as_ref().ok()?.as_str())))
    }

    fn iter(&self) -> impl Iterator<Item = (&Path, Result<Arc<String>, &io::Error>)> {
        let files = self.files.iter();
        files.map(|(path, text)| (path.as_path(), text.as_ref().map(Arc::clone)))
    }

    /// `persistent_dir`, as far as it can be parsed, even from rejected files.
    #[must_use]
    pub fn persistent_dir(&self) -> PathBuf {
        let main = self.iter().next();
        let agent = main.and_then(|(path, text)| {
            let source = source::Source::new(path, text.ok()?);
            Some(parse::agent(&source))
        });
        agent.unwrap_or_default().persistent_dir
    }

    /// Replaces the text of one file, or adds a file.
    #[must_use]
    pub fn with(mut self, path: &Path, text: String) -> Self {
        let text = Arc::new(text);
        match self.files.iter_mut().find(|(other, _)| other == path) {
            Some((_, former)) => *former = Ok(text),
            None => {
                self.files.push((path.to_owned(), Ok(text)));
                // The main file stays first, the others are in name order.
                self.files[1..].sort_by(|(a, _), (b, _)| a.cmp(b));
            }
        }
        self.fingerprint = OnceLock::new();
        self
    }

    /// An upper bound of the number of CIDRs, each of which is quoted.
    pub fn cidrs(&self) -> usize {
        let texts = self.files.iter().filter_map(|(_, text)| text.as_ref().ok());
        let quotes = texts.map(|text| memchr::memchr2_iter(b'"', b'\'', text.as_bytes()).count());
        quotes.sum::<usize>() / 2
    }

    /// A hash of all files: differs if any file differs.
    pub fn fingerprint(&self) -> u64 {
        *self.fingerprint.get_or_init(|| self.hash())
    }

    fn hash(&self) -> u64 {
        // Needs no protection against deliberate collisions, so a fast hash is enough.
        let mut hasher = FixedState::default().build_hasher();
        for (path, text) in &self.files {
            path.hash(&mut hasher);
            text.as_ref().map_err(io::Error::kind).hash(&mut hasher);
        }
        // An unreadable directory must differ from one without files.
        let dir_error = self.dir_error.as_ref();
        dir_error.map(ToString::to_string).hash(&mut hasher);
        hasher.finish()
    }
}

/// Whether a file of `policies.d` is read, judged by its name.
pub fn is_policy_file(path: &Path) -> bool {
    let name = path.file_name().map(OsStr::as_encoded_bytes);
    name.is_some_and(|name| !name.starts_with(b".") && name.ends_with(b".toml"))
}

/// The directory of policies beside this configuration file.
pub fn policies_dir(path: &Path) -> PathBuf {
    path.parent().unwrap_or(Path::new("")).join(POLICIES_DIR)
}

/// The files of `policies.d` in name order. Skips hidden files and a ConfigMap's `..data`, which
/// begin with a dot, and editors' backups (`x.toml~`), which do not end in `.toml`.
fn list(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(e),
    };
    let mut files = Vec::new();
    for entry in entries {
        let path = entry?.path();
        if is_policy_file(&path) {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

#[cfg(test)]
mod chart;
#[cfg(test)]
mod tests;
