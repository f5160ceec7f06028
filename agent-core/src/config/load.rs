//! Combines the texts of all files into one configuration.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use super::{
    AgentConfig, ConfigError, ConfigErrors, list,
    parse::{self, ListedCidr, Parsed, RawPolicy},
    source::{MOST_ERRORS, Source},
};
use crate::{
    policy::{
        HostFacts, Location, Policy, PolicyName, PolicySet, SETTINGS, Settings,
        compile::{
            Compiled, check_is_counted, check_prefix_width, compile, short_for_width,
            uncounted_holdout,
        },
        entries::{Builder, Duplicate},
    },
    printable,
};

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

#[derive(Default)]
pub(super) struct Loader {
    agent: Option<AgentConfig>,
    defaults: Option<Settings>,
    sources: Vec<Source>,
    /// The texts of lists, or why they could not be read.
    lists: BTreeMap<PathBuf, Result<Arc<String>, String>>,
    policies: Vec<(usize, RawPolicy)>,
    compiled: BTreeMap<PolicyName, Arc<Compiled>>,
    files: Vec<PathBuf>,
    errors: Vec<ConfigError>,
}

/// The error for a file whose lines are not shown, see [`looks_ours`].
const NOT_OURS: &str = "this is not a configuration of rto-agent, because no line begins with \
                        [policy.NAME]; remove the file or symbolic link from policies.d (its lines \
                        are not shown, because [agent] group may read errors)";

/// Whether errors may cite a file of `policies.d`. The daemon reads it as root, and every member of
/// the socket's group sees its errors: a link to a secret must not reveal it. A secret has no
/// `[policy` line. Files that do are cited, as most typos are made by members of the group.
fn looks_ours(text: &str) -> bool {
    const BEFORE: [char; 7] = ['\u{feff}', ' ', '\t', '\r', '[', '"', '\''];
    let mut lines = text.lines();
    lines.any(|line| line.trim_start_matches(BEFORE).starts_with("policy"))
}

impl Loader {
    /// Adds an error, if there is one.
    pub(super) fn refuse(&mut self, error: Option<ConfigError>) {
        self.errors.extend(error);
    }

    /// Only `[agent]`.
    pub(super) fn agent(self) -> Result<AgentConfig, ConfigErrors> {
        match self.agent {
            Some(agent) => Ok(agent),
            None if self.errors.is_empty() => Ok(AgentConfig::default()),
            None => Err(ConfigErrors(self.errors)),
        }
    }

    /// Adds the texts of lists, before the files that name them.
    pub(super) fn add_lists<'f>(
        &mut self,
        lists: impl Iterator<Item = (&'f Path, Result<Arc<String>, &'f io::Error>)>,
    ) {
        let owned = lists.map(|(path, text)| (path.to_owned(), text.map_err(ToString::to_string)));
        self.lists.extend(owned);
    }

    /// Adds all files; the first is the main one.
    pub(super) fn add_all<'f>(
        &mut self,
        files: impl Iterator<Item = (&'f Path, Result<Arc<String>, &'f io::Error>)>,
    ) {
        let mut sources = Vec::new();
        for (i, (path, text)) in files.enumerate() {
            match text {
                Ok(text) => sources.push(Source::new(path, text)),
                Err(e) => {
                    let fix = match e.kind() {
                        io::ErrorKind::NotFound if i == 0 => {
                            "; create it (rto-agent comes with an example), or give another file \
                             with --config"
                        }
                        io::ErrorKind::InvalidData => "; configuration files are UTF-8 text",
                        io::ErrorKind::PermissionDenied => {
                            "; the file must belong to root or be world-readable, because the \
                             daemon reads it as root without CAP_DAC_OVERRIDE"
                        }
                        _ => "",
                    };
                    self.errors
                        .push(ConfigError::whole(path, format!("{e}{fix}")));
                }
            }
            self.files.push(path.to_owned());
        }
        for source in sources {
            let (parsed, errors) = parse::parse(&source);
            self.add(source, parsed, errors);
        }
    }

    fn add(&mut self, source: Source, parsed: Parsed, errors: Vec<ConfigError>) {
        let is_main = self
            .files
            .first()
            .is_some_and(|main| **main == *source.path);
        let is_ours = is_main || looks_ours(&source.text);
        match parsed.defaults {
            Some((_, defaults)) if is_main => self.defaults = Some(defaults),
            Some((at, _)) if is_ours => {
                let message = "[defaults] is only allowed in the main configuration file";
                self.errors.push(source.error(at, message));
            }
            _ => {}
        }
        match parsed.agent {
            _ if !is_ours => {
                let begin = || source.error(0..0, NOT_OURS);
                let first = errors.into_iter().next();
                let first = first.or_else(|| parsed.agent.is_some().then(begin));
                self.errors
                    .extend(first.map(|error| error.without_words(NOT_OURS)));
            }
            agent if is_main => {
                self.agent = agent;
                self.errors.extend(errors);
            }
            Some(_) => {
                self.errors.extend(errors);
                let at = source.text.find("agent").unwrap_or(0);
                let message = "[agent] is only allowed in the main configuration file";
                self.errors
                    .push(source.error(at..at + "agent".len(), message));
            }
            None => self.errors.extend(errors),
        }
        let index = self.sources.len();
        self.sources.push(source);
        self.policies
            .extend(parsed.policies.into_iter().map(|raw| (index, raw)));
    }

    pub(super) fn finish(mut self, host: &HostFacts) -> Result<Config, ConfigErrors> {
        let agent = self.agent.take().unwrap_or_default();
        let mut set = PolicySet::default();
        let mut warnings = Vec::new();
        self.take_defaults();
        self.settings(host, agent.statistics, &mut set, &mut warnings);
        if !agent.statistics {
            warnings.extend(set.policies.iter().filter_map(|(name, policy)| {
                let warning = uncounted_holdout(&policy.settings)?;
                let at = policy.location.as_ref()?;
                Some(format!("{at}: policy {name}: {warning}"))
            }));
        }
        self.entries(&mut set, &mut warnings);
        if self.errors.is_empty() {
            Ok(Config {
                agent,
                set,
                compiled: self.compiled,
                files: self.files,
                warnings,
                exposed: Vec::new(),
            })
        } else {
            let files = &self.files;
            let order = |path: &PathBuf| files.iter().position(|file| file == path);
            let place = |e: &ConfigError| (order(&e.path).unwrap_or(usize::MAX), e.line, e.column);
            self.errors.sort_by_key(place);
            self.errors.dedup();
            Err(ConfigErrors(self.errors))
        }
    }

    /// Applies `[defaults]` to policies, except for values of their own. A policy that only lists
    /// CIDRs is considered defined where it is first listed.
    fn take_defaults(&mut self) {
        let Some(defaults) = &self.defaults else {
            return;
        };
        let is_set = self.policies.iter().filter(|(_, raw)| !raw.is_extension());
        let mut is_set: BTreeSet<_> = is_set.map(|(_, raw)| raw.name.clone()).collect();
        for (_, raw) in &mut self.policies {
            if raw.is_extension() && !is_set.insert(raw.name.clone()) {
                continue;
            }
            for setting in SETTINGS {
                if !raw.spans.contains_key(setting.key.name) {
                    (setting.copy)(&mut raw.settings, defaults);
                }
            }
            raw.takes_defaults = true;
        }
    }

    /// The settings of all policies; each policy must be defined in one place.
    fn settings(
        &mut self,
        host: &HostFacts,
        are_counted: bool,
        set: &mut PolicySet,
        warnings: &mut Vec<String>,
    ) {
        let mut first: BTreeMap<&PolicyName, (usize, &RawPolicy)> = BTreeMap::new();
        for (index, raw) in self.policies.iter().filter(|(_, raw)| raw.sets()) {
            if self.errors.len() >= MOST_ERRORS {
                return;
            }
            let source = &self.sources[*index];
            if let Some((other, former)) = first.get(&raw.name) {
                let other = &self.sources[*other];
                let at = format!(
                    "{}:{}",
                    printable::path(&other.path),
                    other.line(former.span.start)
                );
                let message = format!(
                    "policy {} already has its settings at {at}; here it may only have cidrs",
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
                            printable::path(&source.path),
                            raw.name
                        )
                    }));
                    let compiled = Arc::new(compiled);
                    self.compiled.insert(raw.name.clone(), compiled);
                }
                // A policy whose only value is invalid is not reported as setting nothing.
                Err(errors) => self.errors.extend(
                    errors
                        .into_iter()
                        .filter(|error| error.given.is_some() || raw.sets_nothing())
                        .map(|error| source.error(raw.span_of(&error), error.to_string())),
                ),
            }
            if !are_counted && let Err(error) = check_is_counted(&raw.settings) {
                let span = raw.span_of(&error);
                self.errors.push(source.error(span, error.to_string()));
            }
            let location = Some(Location {
                path: source.path.clone(),
                line,
            });
            let policy = Policy {
                settings: raw.settings.clone(),
                description: raw.description.clone(),
                location,
            };
            set.policies.insert(raw.name.clone(), policy);
        }
    }

    fn entries(&mut self, set: &mut PolicySet, warnings: &mut Vec<String>) {
        self.files.extend(self.lists.keys().cloned());
        let mut builder = Builder::default();
        let in_toml = self.policies.iter().map(|(_, raw)| raw.cidrs.len());
        let in_lists = self.lists.values().flatten().map(|text| list::lines(text));
        builder.reserve(in_toml.chain(in_lists).sum());
        let sources = self.sources.iter();
        let files: Vec<u16> = sources.map(|source| builder.file(&source.path)).collect();
        // Dropped one by one: a million locations take as much memory as the entries.
        for (index, raw) in std::mem::take(&mut self.policies) {
            if self.errors.len() >= MOST_ERRORS {
                return;
            }
            let source = &self.sources[index];
            let Some(policy) = set.policies.get(&raw.name) else {
                let message = format!(
                    "policy {} has no settings: add initial_rto or another key, or correct the name",
                    raw.name
                );
                self.errors.push(source.error(raw.span.clone(), message));
                continue;
            };
            let number = builder.policy(&raw.name);
            // One warning for a part, however long it is.
            let mut is_short = false;
            let mut add = |builder: &mut Builder, source: &Source, file: u16, cidr: ListedCidr| {
                let ListedCidr { cidr, line } = cidr;
                let wide = check_prefix_width(&cidr, &policy.settings).err();
                let short = short_for_width(&cidr, &policy.settings).filter(|_| !is_short);
                is_short |= short.is_some();
                warnings.extend(short.map(|warning| {
                    let path = printable::path(&source.path);
                    format!("{path}:{line}: policy {}: {warning}", raw.name)
                }));
                builder.push(cidr, number, Some((file, line)));
                wide.map(|e| source.error(source.span_of(&cidr, line as usize), e.to_string()))
            };
            for cidr in raw.cidrs {
                self.errors
                    .extend(add(&mut builder, source, files[index], cidr));
                if self.errors.len() >= MOST_ERRORS {
                    return;
                }
            }
            let Some((path, span)) = raw.list else {
                continue;
            };
            let text = match self.lists.get(&path) {
                Some(Ok(text)) => text.clone(),
                unread => {
                    let why = match unread {
                        Some(Err(why)) => why,
                        _ => "not read",
                    };
                    let message = format!("{}: {why}", printable::path(&path));
                    self.errors.push(source.error(span, message));
                    continue;
                }
            };
            let list = Source::new(&path, text);
            let file = builder.file(&list.path);
            list::parse(&list, &mut self.errors, |cidr| {
                add(&mut builder, &list, file, cidr)
            });
            self.sources.push(list);
        }
        let (entries, duplicates) = builder.build();
        for conflict in &duplicates.conflicting {
            let error = self.conflict(conflict);
            self.errors.extend(error);
        }
        warnings.extend(duplicates.repeated.iter().filter_map(repeated));
        set.entries = entries;
        if let Err(message) = set.check_size() {
            let main = self.files.first().map_or(Path::new(""), PathBuf::as_path);
            self.errors.push(ConfigError::whole(main, message));
        }
    }

    /// The error about a CIDR that two policies list.
    fn conflict(&self, conflict: &Duplicate) -> Option<ConfigError> {
        let Duplicate { policy, cidr, .. } = conflict;
        let [first, again] = conflict.places.each_ref().map(Option::as_ref);
        let (first, again) = (first?, again?);
        let source = self.sources.iter().find(|s| s.path == again.path)?;
        let message = format!(
            "{cidr} is already listed at {first}, in policy {policy}; an entry has only one policy: \
             remove it from one of them"
        );
        Some(source.error(source.span_of(cidr, again.line), message))
    }
}

/// One warning per policy, however many CIDRs it repeats.
fn repeated(repeated: &Duplicate) -> Option<String> {
    let Duplicate {
        policy,
        count,
        cidr,
        places: [Some(first), Some(again)],
    } = repeated
    else {
        return None;
    };
    let more = match count - 1 {
        0 => String::new(),
        more => {
            format!(
                ", and {more} more CIDRs are listed twice; sort -u removes duplicates from a \
                     list with one CIDR per line"
            )
        }
    };
    Some(format!(
        "{again}: policy {policy}: {cidr} is already listed at {first}{more}"
    ))
}
