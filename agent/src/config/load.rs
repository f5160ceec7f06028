//! From the texts of all files to one configuration.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use super::{
    AgentConfig, Config, ConfigError, ConfigErrors, MOST_ERRORS,
    lists::SpannedCidr,
    parse::{self, Parsed, RawPolicy},
    source::Source,
};
use crate::{
    parallel,
    policy::{
        Cidr, HostFacts, Location, Policy, PolicyName, PolicySet,
        compile::{Compiled, check_is_counted, check_prefix_width, compile, uncounted_holdout},
        entries::Builder,
    },
    printable,
};

#[derive(Default)]
pub(super) struct Loader {
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
    /// One more thing that is wrong, if there is one.
    pub(super) fn refuse(&mut self, error: Option<ConfigError>) {
        self.errors.extend(error);
    }

    /// `[agent]` alone.
    pub(super) fn agent(self) -> Result<AgentConfig, ConfigErrors> {
        match self.agent {
            Some(agent) => Ok(agent),
            None if self.errors.is_empty() => Ok(AgentConfig::default()),
            None => Err(ConfigErrors(self.errors)),
        }
    }

    /// The first file is the main one.
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
                        .push(ConfigError::whole(path, format!("{e}{fix}")));
                }
            }
            self.files.push(path.to_owned());
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

    pub(super) fn finish(mut self, host: &HostFacts) -> Result<Config, ConfigErrors> {
        let agent = self.agent.take().unwrap_or_default();
        let mut set = PolicySet::default();
        let mut warnings = Vec::new();
        self.settings(host, agent.statistics, &mut set, &mut warnings);
        if !agent.statistics {
            warnings.extend(set.policies.iter().filter_map(|(name, policy)| {
                let warning = uncounted_holdout(&policy.settings)?;
                let at = policy.location.as_ref()?;
                Some(format!("{at}: policy {name}: {warning}"))
            }));
        }
        self.entries(&mut set);
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
    fn settings(
        &mut self,
        host: &HostFacts,
        are_counted: bool,
        set: &mut PolicySet,
        warnings: &mut Vec<String>,
    ) {
        let mut first: BTreeMap<&PolicyName, (usize, &RawPolicy)> = BTreeMap::new();
        for (index, raw) in self.policies.iter().filter(|(_, raw)| !raw.is_extension()) {
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
                            printable::path(&source.path),
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
            if !are_counted && let Err(error) = check_is_counted(&raw.settings) {
                let span = raw.spans.get(error.setting).unwrap_or(&raw.span).clone();
                self.errors.push(source.error(span, error.to_string()));
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
                    "unknown policy {}: no file gives it any setting; add one (initial_rto = \"100ms\") or fix the name",
                    raw.name
                );
                self.errors.push(source.error(raw.span.clone(), message));
                continue;
            };
            let number = builder.policy(&raw.name);
            // Each part goes when it has been read: a million places are as large as the entries.
            for SpannedCidr { cidr, start, line } in
                std::mem::take(&mut raw.cidrs).into_iter().flatten()
            {
                if self.errors.len() >= MOST_ERRORS {
                    return;
                }
                if let Err(e) = check_prefix_width(&cidr, &policy.settings) {
                    self.errors
                        .push(source.error(source.quoted(start), e.to_string()));
                }
                builder.push(cidr, number, Some((files[*index], line)));
            }
        }
        let (entries, duplicates) = builder.build();
        if !duplicates.is_empty() {
            self.report_duplicates(&duplicates.into_iter().collect());
        }
        set.entries = entries;
        if let Err(message) = set.check_size() {
            let main = self.files.first().map_or(Path::new(""), PathBuf::as_path);
            self.errors.push(ConfigError::whole(main, message));
        }
    }

    /// Reads the sources again, as nothing else knows any more where in a line a CIDR stands.
    fn report_duplicates(&mut self, duplicates: &BTreeSet<Cidr>) {
        let mut first: BTreeMap<Cidr, String> = BTreeMap::new();
        for source in &self.sources {
            let (parsed, _) = parse::parse(source);
            let places = parsed.policies.iter().flat_map(|raw| &raw.cidrs);
            let places = places
                .flatten()
                .filter(|place| duplicates.contains(&place.cidr));
            for SpannedCidr { cidr, start, line } in places {
                if self.errors.len() >= MOST_ERRORS {
                    return;
                }
                if let Some(place) = first.get(cidr) {
                    let message = format!("{cidr} stands at {place} already");
                    self.errors
                        .push(source.error(source.quoted(*start), message));
                } else {
                    first.insert(*cidr, format!("{}:{line}", printable::path(&source.path)));
                }
            }
        }
    }
}
