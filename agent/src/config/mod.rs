//! TOML text -> validated [`PolicySet`], with errors that point at the line.
//!
//! Read are the configuration file and `policies.d/*.toml` beside it, in name order. All errors of
//! all files are collected before they are reported. A policy's settings are in one file; other files
//! may add `cidrs` to it (that is what `rto-agent add --save` writes).

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

use crate::policy::{HostFacts, PolicyName, PolicySet, compile::Compiled};

mod agent;
pub mod atomic_file;
mod exposure;
mod keys;
mod lists;
mod load;
mod parse;
mod reader;
pub(crate) mod regular_file;
pub mod save;
mod source;

#[cfg(test)]
pub(crate) use agent::MAX_SOCKET_PATH;
pub use agent::{AgentConfig, CgroupSetting, MetricsSetting, OnExit, RttSampling};
use load::Loader;
pub use reader::{FilesReader, ReadError};
#[cfg(test)]
pub(crate) use reader::{READ_LIMIT, STALL_LIMIT};
pub use source::{ConfigError, ConfigErrors};

/// Where the configuration is unless said otherwise.
pub const DEFAULT_CONFIG: &str = "/etc/rto-agent/config.toml";
/// Socket of the daemon unless said otherwise.
pub const DEFAULT_SOCKET: &str = "/run/rto-agent/control.sock";
/// Largest file, bytes: some three million CIDRs.
pub(crate) const MAX_FILE: u64 = 64 << 20;
/// The limit of reported errors of a kind: finding the place of each takes time.
const MOST_ERRORS: usize = 200;
const POLICIES_DIR: &str = "policies.d";
pub(crate) const SAVED_FILE: &str = "50-cli.toml";

/// A configuration that was read and found good for this host.
#[derive(Clone, Debug, Default)]
pub struct Config {
    /// `[agent]`.
    pub agent: AgentConfig,
    /// Policies and entries.
    pub set: PolicySet,
    /// The policies as they are for that host.
    pub compiled: BTreeMap<PolicyName, Arc<Compiled>>,
    /// The files read, in order.
    pub files: Vec<PathBuf>,
    /// Allowed, but probably not meant; each names its place.
    pub warnings: Vec<String>,
    /// Warnings about users who may change the files.
    pub exposed: Vec<String>,
}

impl Config {
    /// Reads and checks everything, for a host.
    pub fn load(path: &Path, host: &HostFacts) -> Result<Self, ConfigErrors> {
        match FilesReader::default().read(path) {
            Ok(files) => Self::of(&files, host),
            Err(e) => Err(e.into()),
        }
    }

    /// Checks everything that was read, for a host.
    pub fn of(files: &Files, host: &HostFacts) -> Result<Self, ConfigErrors> {
        let mut loader = Loader::default();
        loader.add_all(files.iter());
        loader.refuse(files.dir_error.clone());
        let mut config = loader.finish(host)?;
        config.warnings.extend_from_slice(&files.exposed);
        config.exposed.clone_from(&files.exposed);
        Ok(config)
    }

    /// Checks one file's text, for a host. Nothing is read: `path` is only named.
    pub fn from_text(path: &Path, text: String, host: &HostFacts) -> Result<Self, ConfigErrors> {
        let mut loader = Loader::default();
        loader.add_all(std::iter::once((path, Ok(Arc::new(text)))));
        loader.finish(host)
    }

    /// Only `[agent]`, for commands that need no more: errors elsewhere do not concern them.
    pub fn load_agent(path: &Path) -> Result<AgentConfig, ConfigErrors> {
        let files = FilesReader::default().read(path)?;
        let mut loader = Loader::default();
        loader.add_all(files.iter().take(1));
        loader.agent()
    }

    /// The file `rto-agent add --save` writes.
    pub fn saved_path(path: &Path) -> PathBuf {
        policies_dir(path).join(SAVED_FILE)
    }
}

/// The configuration's files as they were at one time.
pub struct Files {
    /// The main one is the first.
    files: Vec<(PathBuf, io::Result<Arc<String>>)>,
    dir_error: Option<ConfigError>,
    /// Who else may change them.
    exposed: Vec<String>,
    fingerprint: OnceLock<u64>,
}

impl Files {
    /// Reads the configuration file and those beside it, however long that takes; see [`FilesReader`].
    pub fn read(path: &Path) -> Self {
        Self::read_telling(path, &|_| {})
    }

    /// The same; tells the name of each before it is touched.
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
            // On this thread, as their file system may hang.
            exposed: exposure::exposed(path, files.iter().map(|(path, _)| path)),
            files,
            dir_error,
            fingerprint: OnceLock::new(),
        }
    }

    /// Files that were read at another time.
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

    /// What could be read.
    pub fn texts(&self) -> impl Iterator<Item = (&Path, &str)> {
        let files = self.files.iter();
        files.filter_map(|(path, text)| Some((path.as_path(), text.as_ref().ok()?.as_str())))
    }

    fn iter(&self) -> impl Iterator<Item = (&Path, Result<Arc<String>, &io::Error>)> {
        let files = self.files.iter();
        files.map(|(path, text)| (path.as_path(), text.as_ref().map(Arc::clone)))
    }

    /// `persistent_dir` as far as it can be read, also of files that are refused.
    #[must_use]
    pub fn persistent_dir(&self) -> PathBuf {
        let main = self.iter().next();
        let agent = main.and_then(|(path, text)| {
            let source = source::Source::new(path, text.ok()?);
            Some(parse::agent(&source))
        });
        agent.unwrap_or_default().persistent_dir
    }

    /// The same with another text of one of them.
    #[must_use]
    pub fn with(mut self, path: &Path, text: String) -> Self {
        let text = Arc::new(text);
        match self.files.iter_mut().find(|(other, _)| other == path) {
            Some((_, former)) => *former = Ok(text),
            None => {
                self.files.push((path.to_owned(), Ok(text)));
                // The main one stays the first, the others are in name order.
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

    /// A number that is another when any of them is.
    pub fn fingerprint(&self) -> u64 {
        *self.fingerprint.get_or_init(|| self.hash())
    }

    fn hash(&self) -> u64 {
        // Files change by themselves and not against us: what is fast will do.
        let mut hasher = FixedState::default().build_hasher();
        for (path, text) in &self.files {
            path.hash(&mut hasher);
            text.as_ref().map_err(io::Error::kind).hash(&mut hasher);
        }
        // With nothing to read beside it, the main file is not all there is.
        let dir_error = self.dir_error.as_ref();
        dir_error.map(ToString::to_string).hash(&mut hasher);
        hasher.finish()
    }
}

/// Whether a file of `policies.d` is read, by its name.
pub(crate) fn is_policy_file(path: &Path) -> bool {
    let name = path.file_name().map(OsStr::as_encoded_bytes);
    name.is_some_and(|name| !name.starts_with(b".") && name.ends_with(b".toml"))
}

pub(crate) fn policies_dir(path: &Path) -> PathBuf {
    path.parent().unwrap_or(Path::new("")).join(POLICIES_DIR)
}

/// The files of `policies.d` in name order. Hidden files, editors' leftovers (`x.toml~`) and a
/// ConfigMap's `..data` do not end in `.toml` or begin with a dot.
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
pub(crate) mod reference;
#[cfg(test)]
mod tests;
