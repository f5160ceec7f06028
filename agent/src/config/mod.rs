//! TOML text -> validated [`PolicySet`], with errors that point at the line.
//!
//! Read are the configuration file and `policies.d/*.toml` beside it, in name order. All errors of
//! all files are found before anything is said. A policy's settings stand in one file; other files
//! may add `cidrs` to it (that is what `rto-agent add --save` writes).

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    hash::{BuildHasher as _, Hash as _, Hasher as _},
    io,
    path::{Path, PathBuf},
    sync::{Arc, OnceLock},
    time::Duration,
};

use foldhash::quality::FixedState;

use crate::{
    parallel,
    policy::{
        Cidr, HostFacts, Location, Policy, PolicyName, PolicySet,
        compile::{Compiled, check_force, compile},
        entries::Builder,
        units::{format_duration, parse_duration},
    },
};

pub mod draft;
mod lists;
mod parse;
pub mod save;
mod source;

use lists::Place;
use parse::{Parsed, RawPolicy};
use source::Source;
pub use source::{ConfigError, ConfigErrors};

/// Socket of the daemon unless said otherwise.
pub const DEFAULT_SOCKET: &str = "/run/rto-agent/control.sock";
/// Largest `max_entries`, and most entries there can be.
pub const MAX_ENTRIES_LIMIT: u32 = 4 << 20;
/// Largest file, bytes: some three million CIDRs.
const MAX_FILE: u64 = 64 << 20;
/// After so many errors of a kind no more are looked for: to find the place of each takes time.
const MOST_ERRORS: usize = 200;
const POLICIES_DIR: &str = "policies.d";
const SAVED_FILE: &str = "50-cli.toml";

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
}

/// `[agent]`: how the daemon runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgentConfig {
    /// The cgroup to attach to.
    pub cgroup: CgroupSetting,
    /// Directory on a BPF file system for link and maps.
    pub pin_dir: PathBuf,
    /// The control socket.
    pub socket: PathBuf,
    /// Entries added by hand, the instance lock.
    pub state_dir: PathBuf,
    /// Who may use the socket, beside root.
    pub group: String,
    /// What becomes of the policies when the daemon ends.
    pub on_exit: OnExit,
    /// Where the metrics are served.
    pub metrics: MetricsSetting,
    /// Entries there is room for at once; where there are more, room is made.
    pub max_entries: u32,
    /// Whether sockets that are open already get the options of a policy that comes to cover them.
    pub apply_to_open: bool,
    /// Whether anything is counted.
    pub statistics: bool,
    /// Whether connections are counted that no entry covers.
    pub count_unlisted: bool,
    /// When smoothed RTTs are sampled.
    pub rtt_sampling: RttSampling,
}

/// `cgroup = ...`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CgroupSetting {
    /// The cgroup2 root.
    Auto,
    /// This directory.
    Path(PathBuf),
}

/// `metrics = ...`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MetricsSetting {
    /// Nowhere.
    Off,
    /// At an address and port.
    Tcp(std::net::SocketAddr),
    /// At a Unix socket.
    Unix(PathBuf),
}

impl std::str::FromStr for MetricsSetting {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "off" {
            return Ok(Self::Off);
        }
        if let Some(path) = text.strip_prefix("unix:") {
            let path = PathBuf::from(path);
            return if path.is_absolute() {
                Ok(Self::Unix(path))
            } else {
                Err("after unix: comes an absolute path".to_owned())
            };
        }
        match text.parse::<std::net::SocketAddr>() {
            Ok(address) if address.port() == 0 => Err("port 0 is no port".to_owned()),
            Ok(address) => Ok(Self::Tcp(address)),
            Err(_) => Err(
                "metrics is \"off\", an address and port like \"127.0.0.1:9464\", or \
                 \"unix:/run/rto-agent/metrics.sock\""
                    .to_owned(),
            ),
        }
    }
}

/// `rtt_sampling = ...`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RttSampling {
    /// Never.
    Off,
    /// When a connection ends.
    AtEnd,
    /// Then, and meanwhile no more often than this.
    Every(Duration),
}

/// Shortest and longest `rtt_sampling`.
const RTT_SAMPLING: std::ops::RangeInclusive<Duration> =
    Duration::from_millis(1)..=Duration::from_secs(24 * 3600);

impl std::str::FromStr for RttSampling {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "off" => Ok(Self::Off),
            "end" => Ok(Self::AtEnd),
            _ => match parse_duration(text) {
                Ok(interval) if RTT_SAMPLING.contains(&interval) => Ok(Self::Every(interval)),
                Ok(_) => Err("an interval of rtt_sampling is 1ms to 24h".to_owned()),
                Err(_) => Err(
                    "rtt_sampling is \"off\", \"end\" (of each connection), or also an interval like \
                     \"1s\""
                        .to_owned(),
                ),
            },
        }
    }
}

impl std::fmt::Display for RttSampling {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Off => f.write_str("off"),
            Self::AtEnd => f.write_str("end"),
            Self::Every(interval) => f.write_str(&format_duration(*interval)),
        }
    }
}

/// `on_exit = ...`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnExit {
    /// Nothing stays in the kernel.
    Detach,
    /// The policies stay in force.
    Keep,
}

impl Default for AgentConfig {
    fn default() -> Self {
        Self {
            cgroup: CgroupSetting::Auto,
            pin_dir: "/sys/fs/bpf/rto-agent".into(),
            socket: DEFAULT_SOCKET.into(),
            state_dir: "/run/rto-agent".into(),
            group: "root".to_owned(),
            on_exit: OnExit::Detach,
            metrics: MetricsSetting::Off,
            max_entries: 16384,
            apply_to_open: false,
            statistics: true,
            count_unlisted: false,
            rtt_sampling: RttSampling::AtEnd,
        }
    }
}

impl Config {
    /// Reads and checks everything, for a host.
    ///
    /// # Errors
    ///
    /// Everything that is wrong, each with its place and the mend.
    pub fn load(path: &Path, host: &HostFacts) -> Result<Self, ConfigErrors> {
        Self::of(Files::read(path), host)
    }

    /// Checks everything that was read, for a host.
    ///
    /// # Errors
    ///
    /// As [`Config::load`].
    pub fn of(files: Files, host: &HostFacts) -> Result<Self, ConfigErrors> {
        let mut loader = Loader::default();
        loader.add_all(files.files);
        loader.errors.extend(files.unlisted);
        loader.finish(host)
    }

    /// Checks one file's text, for a host. Nothing is read: `path` is only named.
    ///
    /// # Errors
    ///
    /// As [`Config::load`].
    pub fn from_text(path: &Path, text: String, host: &HostFacts) -> Result<Self, ConfigErrors> {
        let mut loader = Loader::default();
        loader.add_all(vec![(path.to_owned(), Ok(text))]);
        loader.finish(host)
    }

    /// Only `[agent]`, for commands that need no more: errors elsewhere do not concern them.
    ///
    /// # Errors
    ///
    /// If the file cannot be read or its `[agent]` is wrong.
    pub fn load_agent(path: &Path) -> Result<AgentConfig, ConfigErrors> {
        let mut loader = Loader::default();
        loader.add_all(vec![(path.to_owned(), source::read(path, true))]);
        let agent = loader.agent.take();
        match agent {
            Some(agent) => Ok(agent),
            None if loader.errors.is_empty() => Ok(AgentConfig::default()),
            None => Err(ConfigErrors(loader.errors)),
        }
    }

    /// The file `rto-agent add --save` writes.
    #[must_use]
    pub fn saved_path(path: &Path) -> PathBuf {
        policies_dir(path).join(SAVED_FILE)
    }
}

/// The configuration's files as they were at one time.
pub struct Files {
    /// The main one is the first.
    files: Vec<(PathBuf, io::Result<String>)>,
    unlisted: Option<ConfigError>,
    fingerprint: OnceLock<u64>,
}

impl Files {
    /// Reads the configuration file and those beside it.
    #[must_use]
    pub fn read(path: &Path) -> Self {
        let (more, unlisted) = match list(&policies_dir(path)) {
            Ok(files) => (files, None),
            Err(e) => {
                let error = ConfigError::whole(&policies_dir(path), e.to_string());
                (Vec::new(), Some(error))
            }
        };
        let all = std::iter::once(path.to_owned()).chain(more);
        let files = all
            .enumerate()
            .map(|(i, path)| {
                let text = source::read(&path, i == 0);
                (path, text)
            })
            .collect();
        Self {
            files,
            unlisted,
            fingerprint: OnceLock::new(),
        }
    }

    /// The same with another text of one of them.
    #[must_use]
    pub fn with(mut self, path: &Path, text: String) -> Self {
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

    /// A number that is another when any of them is.
    #[must_use]
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
        let unlisted = self.unlisted.as_ref();
        unlisted.map(ToString::to_string).hash(&mut hasher);
        hasher.finish()
    }
}

fn policies_dir(path: &Path) -> PathBuf {
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
        let name = path
            .file_name()
            .map(std::ffi::OsStr::as_encoded_bytes)
            .unwrap_or_default();
        if !name.starts_with(b".") && name.ends_with(b".toml") {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

#[derive(Default)]
struct Loader {
    agent: Option<AgentConfig>,
    sources: Vec<Source>,
    policies: Vec<(usize, RawPolicy)>,
    compiled: BTreeMap<PolicyName, Arc<Compiled>>,
    files: Vec<PathBuf>,
    errors: Vec<ConfigError>,
}

/// Below so many bytes in all, files are read one after the other.
const SMALL: usize = 1 << 20;

fn parse_all(sources: Vec<Source>) -> Vec<(Source, Parsed, Vec<ConfigError>)> {
    let parse = |source: Source| {
        let (parsed, errors) = parse::parse(&source);
        (source, parsed, errors)
    };
    let bytes: usize = sources.iter().map(|source| source.text.len()).sum();
    if bytes < SMALL {
        return sources.into_iter().map(parse).collect();
    }
    parallel::map(sources, parse)
}

impl Loader {
    /// The first file is the main one.
    fn add_all(&mut self, files: Vec<(PathBuf, io::Result<String>)>) {
        let mut sources = Vec::new();
        for (i, (path, text)) in files.into_iter().enumerate() {
            match text {
                Ok(text) => sources.push(Source::new(&path, text)),
                Err(e) => {
                    let mend = match e.kind() {
                        io::ErrorKind::NotFound if i == 0 => {
                            "; write one (an example comes with rto-agent) or name it with --config"
                        }
                        io::ErrorKind::InvalidData => "; configuration files are UTF-8 text",
                        io::ErrorKind::PermissionDenied => {
                            "; it must be root's, or readable for everybody: the daemon reads as root without \
                             CAP_DAC_OVERRIDE"
                        }
                        _ => "",
                    };
                    self.errors
                        .push(ConfigError::whole(&path, format!("{e}{mend}")));
                }
            }
            self.files.push(path);
        }
        for (source, parsed, errors) in parse_all(sources) {
            self.add(source, parsed, errors);
        }
    }

    fn add(&mut self, source: Source, parsed: Parsed, errors: Vec<ConfigError>) {
        self.errors.extend(errors);
        let is_main = self
            .files
            .first()
            .is_some_and(|main| **main == *source.path);
        match parsed.agent {
            Some(agent) if is_main => self.agent = Some(agent),
            Some(_) => {
                let at = source.text.find("agent").unwrap_or(0);
                let message = "[agent] stands in the main configuration file only";
                self.errors
                    .push(source.error(at..at + "agent".len(), message));
            }
            None => {}
        }
        let index = self.sources.len();
        self.sources.push(source);
        self.policies
            .extend(parsed.policies.into_iter().map(|raw| (index, raw)));
    }

    fn finish(mut self, host: &HostFacts) -> Result<Config, ConfigErrors> {
        let agent = self.agent.take().unwrap_or_default();
        let mut set = PolicySet::default();
        let mut warnings = Vec::new();
        self.settings(host, &mut set, &mut warnings);
        self.entries(&mut set);
        if self.errors.is_empty() {
            Ok(Config {
                agent,
                set,
                compiled: self.compiled,
                files: self.files,
                warnings,
            })
        } else {
            let order: BTreeMap<&PathBuf, usize> = self
                .files
                .iter()
                .enumerate()
                .map(|(i, path)| (path, i))
                .collect();
            self.errors.sort_by_key(|e| {
                (
                    order.get(&e.path).copied().unwrap_or(usize::MAX),
                    e.line,
                    e.column,
                )
            });
            self.errors.dedup();
            Err(ConfigErrors(self.errors))
        }
    }

    /// The policies: each set in one place.
    fn settings(&mut self, host: &HostFacts, set: &mut PolicySet, warnings: &mut Vec<String>) {
        let mut first: BTreeMap<&PolicyName, (usize, &RawPolicy)> = BTreeMap::new();
        for (index, raw) in self.policies.iter().filter(|(_, raw)| !raw.is_extension()) {
            if self.errors.len() >= MOST_ERRORS {
                return;
            }
            let source = &self.sources[*index];
            if let Some((other, former)) = first.get(&raw.name) {
                let other = &self.sources[*other];
                let at = format!("{}:{}", other.path.display(), other.line(former.span.start));
                let message = format!(
                    "the settings of policy {} stand at {at} already; here it may only have cidrs",
                    raw.name
                );
                self.errors.push(source.error(raw.span.clone(), message));
                continue;
            }
            first.insert(&raw.name, (*index, raw));
            let line = source.line(raw.span.start);
            match compile(&raw.name, &raw.settings, host) {
                Ok(compiled) => {
                    warnings.extend(compiled.warnings.iter().map(|warning| {
                        format!(
                            "{}:{line}: policy {}: {warning}",
                            source.path.display(),
                            raw.name
                        )
                    }));
                    let compiled = Arc::new(compiled);
                    self.compiled.insert(raw.name.clone(), compiled);
                }
                // A policy whose only value could not be read does not "set nothing".
                Err(errors) => self.errors.extend(
                    errors
                        .into_iter()
                        .filter(|error| !error.setting.is_empty() || raw.sets_nothing())
                        .map(|error| {
                            let span = raw.spans.get(error.setting).unwrap_or(&raw.span).clone();
                            source.error(span, error.to_string())
                        }),
                ),
            }
            let location = Some(Location {
                path: source.path.clone(),
                line,
            });
            let policy = Policy {
                settings: raw.settings.clone(),
                location,
            };
            set.policies.insert(raw.name.clone(), policy);
        }
    }

    fn entries(&mut self, set: &mut PolicySet) {
        let mut builder = Builder::default();
        builder.reserve(
            self.policies
                .iter()
                .flat_map(|(_, raw)| &raw.cidrs)
                .map(Vec::len)
                .sum(),
        );
        let sources = self.sources.iter();
        let files: Vec<u16> = sources.map(|source| builder.file(&source.path)).collect();
        for (index, raw) in &mut self.policies {
            if self.errors.len() >= MOST_ERRORS {
                return;
            }
            let source = &self.sources[*index];
            let Some(policy) = set.policies.get(&raw.name) else {
                let message = format!(
                    "unknown policy {}: no file gives it any setting; add one (initial_rto = \"100ms\") or mend the name",
                    raw.name
                );
                self.errors.push(source.error(raw.span.clone(), message));
                continue;
            };
            let number = builder.policy(&raw.name);
            // Each part goes when it has been read: a million places are as large as the entries.
            for Place { cidr, start, line } in std::mem::take(&mut raw.cidrs).into_iter().flatten()
            {
                if self.errors.len() >= MOST_ERRORS {
                    return;
                }
                if let Err(e) = check_force(&cidr, &policy.settings) {
                    self.errors
                        .push(source.error(source.quoted(start), e.to_string()));
                }
                builder.push(cidr, number, Some((files[*index], line)));
            }
        }
        let (entries, twice) = builder.build();
        if !twice.is_empty() {
            self.tell_twice(&twice.into_iter().collect());
        }
        if entries.len() > MAX_ENTRIES_LIMIT as usize {
            let main = self.files.first().map_or(Path::new(""), PathBuf::as_path);
            let message = format!(
                "{} entries are more than there can be ({MAX_ENTRIES_LIMIT})",
                entries.len()
            );
            self.errors.push(ConfigError::whole(main, message));
        }
        set.entries = entries;
    }

    /// Reads the sources again, as nothing else knows any more where in a line a CIDR stands.
    fn tell_twice(&mut self, twice: &BTreeSet<Cidr>) {
        let mut first: BTreeMap<Cidr, String> = BTreeMap::new();
        for source in &self.sources {
            let (parsed, _) = parse::parse(source);
            let places = parsed.policies.iter().flat_map(|raw| &raw.cidrs);
            let places = places.flatten().filter(|place| twice.contains(&place.cidr));
            for Place { cidr, start, line } in places {
                if self.errors.len() >= MOST_ERRORS {
                    return;
                }
                if let Some(place) = first.get(cidr) {
                    let message = format!("{cidr} stands at {place} already");
                    self.errors
                        .push(source.error(source.quoted(*start), message));
                } else {
                    first.insert(*cidr, format!("{}:{line}", source.path.display()));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
