//! Parses one file's TOML into raw policies: all keys are known, all values valid.
//!
//! serde gets one value at a time, so that all errors are found and each has a location.

use std::{
    collections::BTreeMap,
    ops::Range,
    path::{Path, PathBuf},
    str::FromStr,
};

use serde::de::{DeserializeOwned, value::MapDeserializer};
use toml::{
    Spanned,
    de::{DeTable, DeValue},
};

use super::{
    AGENT_KEYS, AgentConfig,
    source::{ConfigError, MOST_ERRORS, Source},
};
use crate::{
    policy::{Cidr, Effect, PolicyName, SETTINGS, Settings, compile::SettingError},
    progress,
};

/// The parser's message for a repeated key or table.
const DUPLICATE: &str = "duplicate key";
/// The keys of a policy that are not settings.
const CIDRS: &str = "cidrs";
const CIDRS_FILE: &str = "cidrs_file";
const DESCRIPTION: &str = "description";
/// The longest description, characters.
const MAX_DESCRIPTION: usize = 200;

/// The content of one file.
#[derive(Default)]
pub(super) struct Parsed {
    pub(super) agent: Option<AgentConfig>,
    /// `[defaults]`: its location, and the settings for policies without values of their own.
    pub(super) defaults: Option<(Range<usize>, Settings)>,
    pub(super) policies: Vec<RawPolicy>,
}

/// A CIDR in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ListedCidr {
    pub(super) cidr: Cidr,
    /// Line, from 1.
    pub(super) line: u32,
}

/// One `[policy.NAME]`.
pub(super) struct RawPolicy {
    pub(super) name: PolicyName,
    /// The location of the name.
    pub(super) span: Range<usize>,
    pub(super) settings: Settings,
    pub(super) description: Option<String>,
    /// The location of each given value, by key.
    pub(super) spans: BTreeMap<&'static str, Range<usize>>,
    /// CIDRs in the order of the file.
    pub(super) cidrs: Vec<ListedCidr>,
    /// The file that lists more CIDRs, and the location of its name.
    pub(super) list: Option<(PathBuf, Range<usize>)>,
    /// `[defaults]` have been applied.
    pub(super) takes_defaults: bool,
}

impl RawPolicy {
    /// Whether none of the settings is given, not even an invalid one.
    pub(super) fn sets_nothing(&self) -> bool {
        let acts = |key: &&str| {
            let mut settings = SETTINGS.iter();
            settings.any(|setting| setting.key.name == *key && setting.effect != Effect::Nothing)
        };
        !self.spans.keys().any(acts)
    }

    /// Whether this place defines the policy.
    pub(super) fn sets(&self) -> bool {
        self.takes_defaults || !self.is_extension()
    }

    /// The location of the value that an error is about, or else of the policy's name.
    pub(super) fn span_of(&self, error: &SettingError) -> Range<usize> {
        let given = error.given.as_ref();
        let value = given.and_then(|(setting, _)| self.spans.get(setting));
        value.unwrap_or(&self.span).clone()
    }

    /// Whether this place only adds CIDRs to a policy that is defined elsewhere.
    pub(super) fn is_extension(&self) -> bool {
        self.spans
            .keys()
            .all(|key| [CIDRS, CIDRS_FILE].contains(key))
    }
}

fn setting_keys() -> Vec<&'static str> {
    SETTINGS.iter().map(|setting| setting.key.name).collect()
}

const TOP_KEYS: [&str; 3] = ["agent", "defaults", "policy"];

type Value<'a> = Spanned<DeValue<'a>>;

pub(super) fn parse(source: &Source) -> (Parsed, Vec<ConfigError>) {
    walked(source, |mut walk, table, syntax| {
        if let Some(first) = syntax.first() {
            walk.syntax(first);
            return (Parsed::default(), walk.errors);
        }
        let parsed = walk.top(table);
        (parsed, walk.errors)
    })
}

/// `[agent]` of a text that may be damaged: ignores what cannot be parsed.
pub(super) fn agent(source: &Source) -> AgentConfig {
    walked(source, |mut walk, table, _| {
        let agent = table.get("agent");
        let agent = agent.and_then(|value| value.get_ref().as_table());
        agent.map(|table| walk.agent(table)).unwrap_or_default()
    })
}

/// The lists that a file names with `cidrs_file`, as far as it can be parsed.
pub(super) fn lists(path: &Path, text: &str) -> Vec<PathBuf> {
    // Parsing is expensive, and few files name a list.
    if !text.contains(CIDRS_FILE) {
        return Vec::new();
    }
    let (table, _) = DeTable::parse_recoverable(text);
    let policies = table.get_ref().get("policy");
    let policies = policies.and_then(|value| value.get_ref().as_table());
    let policies = policies.into_iter().flat_map(|policies| policies.values());
    let lists = policies.filter_map(|value| {
        let name = value.get_ref().as_table()?.get(CIDRS_FILE)?;
        list_path(path, name.get_ref().as_str()?)
    });
    lists.collect()
}

/// The path of a list: relative to the file that names it.
fn list_path(path: &Path, name: &str) -> Option<PathBuf> {
    let is_list = !name.is_empty() && !name.ends_with(".toml");
    is_list.then(|| path.parent().unwrap_or(Path::new("")).join(name))
}

/// Calls `make` with the text's table and its syntax errors.
fn walked<T>(
    source: &Source,
    make: impl FnOnce(Walk<'_>, &DeTable<'_>, &[toml::de::Error]) -> T,
) -> T {
    let (table, syntax) = DeTable::parse_recoverable(&source.text);
    let walk = Walk {
        source,
        errors: Vec::new(),
    };
    make(walk, table.get_ref(), &syntax)
}

struct Walk<'a> {
    source: &'a Source,
    errors: Vec<ConfigError>,
}

impl Walk<'_> {
    fn top(&mut self, table: &DeTable<'_>) -> Parsed {
        let mut parsed = Parsed::default();
        for (key, value) in table {
            match key.get_ref().as_ref() {
                "agent" => {
                    if let Some(table) = self.table(value, "[agent]") {
                        parsed.agent = Some(self.agent(table));
                    }
                }
                "defaults" => {
                    if let Some(table) = self.table(value, "[defaults]") {
                        let settings = self.values(table.iter(), &setting_keys(), "[defaults] ");
                        parsed.defaults = Some((key.span(), settings));
                    }
                }
                "policy" => {
                    if let Some(table) = self.table(value, "[policy.NAME]") {
                        for (name, value) in table {
                            parsed.policies.extend(self.policy(name, value));
                        }
                    }
                }
                _ => self.unknown(key, "", &TOP_KEYS),
            }
        }
        parsed
    }

    /// Reports the first syntax error, of which later ones may be consequences.
    fn syntax(&mut self, error: &toml::de::Error) {
        let span = error.span().unwrap_or(0..0);
        let message = match error.message() {
            DUPLICATE => "this key or table is already in this file; join the two",
            message => message,
        };
        self.error(span, message);
    }

    fn agent(&mut self, table: &DeTable<'_>) -> AgentConfig {
        let known: Vec<_> = AGENT_KEYS.iter().map(|key| key.name).collect();
        let agent: AgentConfig = self.values(table.iter(), &known, "[agent] ");
        if let Some(([first, second], message)) = agent.conflicting_paths() {
            // The other one may be a default.
            let value = table.get(second).or_else(|| table.get(first));
            self.error(value.map_or(0..0, Spanned::span), message);
        }
        agent
    }

    fn policy(
        &mut self,
        name: &Spanned<std::borrow::Cow<'_, str>>,
        value: &Value<'_>,
    ) -> Option<RawPolicy> {
        let span = name.span();
        let name = match PolicyName::from_str(name.get_ref()) {
            Ok(name) => name,
            Err(e) => {
                self.error(span, e.to_string());
                return None;
            }
        };
        if name == PolicyName::unmatched() {
            self.error(
                span,
                "this name is reserved for connections that no entry covers; choose another",
            );
            return None;
        }
        let table = self.table(value, "[policy.NAME]")?;
        let known = [vec![CIDRS, CIDRS_FILE, DESCRIPTION], setting_keys()].concat();
        let spans = table.iter().filter_map(|(key, value)| {
            let known = known.iter().find(|k| **k == key.get_ref().as_ref())?;
            Some((*known, value.span()))
        });
        let spans = spans.collect();
        let cidrs = table.get(CIDRS).map(|value| self.cidrs(value));
        let list = table.get(CIDRS_FILE);
        let list = list.and_then(|value| Some((self.list(value)?, value.span())));
        let description = table.get(DESCRIPTION);
        let description = description.and_then(|value| self.description(value));
        let is_setting = |key: &str| ![CIDRS, CIDRS_FILE, DESCRIPTION].contains(&key);
        let settings = table.iter().filter(|(key, _)| is_setting(key.get_ref()));
        Some(RawPolicy {
            name,
            span,
            settings: self.values(settings, &known, ""),
            description,
            spans,
            cidrs: cidrs.unwrap_or_default(),
            list,
            takes_defaults: false,
        })
    }

    /// Deserializes each value alone, so that every error is found, and then all together.
    fn values<'v, 'i: 'v, T: DeserializeOwned + Default>(
        &mut self,
        table: impl Iterator<Item = (&'v Spanned<std::borrow::Cow<'i, str>>, &'v Value<'i>)>,
        known: &[&'static str],
        place: &str,
    ) -> T {
        let read = |pairs: Vec<(&'static str, Value<'i>)>| {
            T::deserialize(MapDeserializer::<_, toml::de::Error>::new(
                pairs.into_iter(),
            ))
        };
        let mut good = Vec::new();
        for (key, value) in table {
            let Some(name) = known.iter().find(|k| **k == key.get_ref().as_ref()) else {
                self.unknown(key, place, known);
                continue;
            };
            let pair = (*name, value.clone());
            match read(vec![pair.clone()]) {
                Ok(_) => good.push(pair),
                Err(e) => self.error(value.span(), e.message()),
            }
        }
        // Each value is valid alone, no key occurs twice, and every field has a default.
        read(good).unwrap_or_default()
    }

    fn cidrs(&mut self, value: &Value<'_>) -> Vec<ListedCidr> {
        let Some(array) = value.get_ref().as_array() else {
            self.wrong_kind(value, "a list of CIDRs, like [\"10.1.2.0/24\"]");
            return Vec::new();
        };
        let mut cidrs = Vec::with_capacity(array.len());
        for item in progress::stepping(array.iter()) {
            match self.text(item).map(Cidr::from_str) {
                Some(Ok(cidr)) => {
                    let line = self.source.line(item.span().start);
                    cidrs.push(ListedCidr {
                        cidr,
                        // Files are smaller than 4 GiB.
                        line: u32::try_from(line).unwrap_or(u32::MAX),
                    });
                }
                Some(Err(e)) => self.error(item.span(), e.to_string()),
                None => {}
            }
        }
        cidrs
    }

    fn list(&mut self, value: &Value<'_>) -> Option<PathBuf> {
        let name = self.text(value)?;
        let list = list_path(&self.source.path, name);
        if list.is_none() {
            self.error(
                value.span(),
                "expected a file with one CIDR a line, like \"aws.txt\", not a TOML file",
            );
        }
        list
    }

    fn description(&mut self, value: &Value<'_>) -> Option<String> {
        let text = self.text(value)?;
        let is_good = text.chars().count() <= MAX_DESCRIPTION && !text.contains(char::is_control);
        if !is_good {
            let message =
                format!("a description must be one line of at most {MAX_DESCRIPTION} characters");
            self.error(value.span(), message);
        }
        is_good.then(|| text.to_owned())
    }

    fn text<'v>(&mut self, value: &'v Value<'_>) -> Option<&'v str> {
        if value.get_ref().as_str().is_none() {
            self.wrong_kind(value, "a string in quotes");
        }
        value.get_ref().as_str()
    }

    fn table<'v, 'i>(&mut self, value: &'v Value<'i>, what: &str) -> Option<&'v DeTable<'i>> {
        if value.get_ref().as_table().is_none() {
            self.wrong_kind(value, &format!("a table, {what}"));
        }
        value.get_ref().as_table()
    }

    fn wrong_kind(&mut self, value: &Value<'_>, wanted: &str) {
        let found = value.get_ref().type_str();
        self.error(
            value.span(),
            format!("expected {wanted}, found {}", article(found)),
        );
    }

    fn unknown(&mut self, key: &Spanned<std::borrow::Cow<'_, str>>, place: &str, known: &[&str]) {
        let text = key.get_ref();
        let message = match nearest(text, known) {
            Some(near) => format!("unknown key {place}{text}; did you mean {near}?"),
            None => format!(
                "unknown key {place}{text}; known keys: {}",
                known.join(", ")
            ),
        };
        self.error(key.span(), message);
    }

    fn error(&mut self, span: Range<usize>, message: impl Into<String>) {
        if self.errors.len() < MOST_ERRORS {
            self.errors.push(self.source.error(span, message));
        }
    }
}

fn article(kind: &str) -> String {
    if kind.starts_with(['a', 'i']) {
        format!("an {kind}")
    } else {
        format!("a {kind}")
    }
}

/// The known key that differs by one or two typos.
fn nearest<'k>(text: &str, known: &[&'k str]) -> Option<&'k str> {
    let plain = |s: &str| s.to_ascii_lowercase().replace(['-', '_'], "");
    let distance = |k: &str| strsim::levenshtein(&plain(text), &plain(k));
    let scored = known.iter().map(|k| (distance(k), *k));
    scored
        .min()
        .filter(|(d, k)| *d <= 2 && *d < k.len() / 2)
        .map(|(_, k)| k)
}
