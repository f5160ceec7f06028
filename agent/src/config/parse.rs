//! One file's TOML into raw policies: every key known, every value of the right kind.
//!
//! The tree is walked by hand, not by serde, so that all errors are found at once and each knows
//! its place.

use std::{collections::BTreeMap, ops::Range, path::PathBuf, str::FromStr, time::Duration};

use toml::{
    Spanned,
    de::{DeTable, DeValue},
};

use super::{
    AgentConfig, CgroupSetting, MOST_ERRORS, MetricsSetting, OnExit, RttSampling,
    lists::{Lists, Place},
    source::{ConfigError, Source},
};
use crate::policy::{Cidr, PolicyName, Settings, SynAckRto, SynRetries, units::parse_duration};

/// What one file says.
#[derive(Default)]
pub(super) struct Parsed {
    pub(super) agent: Option<AgentConfig>,
    pub(super) policies: Vec<RawPolicy>,
}

/// One `[policy.NAME]`.
pub(super) struct RawPolicy {
    pub(super) name: PolicyName,
    /// Of the name.
    pub(super) span: Range<usize>,
    pub(super) settings: Settings,
    /// Of each value given, by key.
    pub(super) spans: BTreeMap<&'static str, Range<usize>>,
    /// In the order of the file.
    pub(super) cidrs: Vec<Vec<Place>>,
}

impl RawPolicy {
    /// Whether it has none of the settings, not even one that could not be read.
    pub(super) fn sets_nothing(&self) -> bool {
        self.spans
            .keys()
            .all(|key| ["cidrs", "force"].contains(key))
    }

    /// Whether it only adds CIDRs to a policy that is set elsewhere.
    pub(super) fn is_extension(&self) -> bool {
        self.spans.keys().all(|key| *key == "cidrs")
    }
}

const TOP_KEYS: [&str; 2] = ["agent", "policy"];
const AGENT_KEYS: [&str; 12] = [
    "cgroup",
    "pin_dir",
    "socket",
    "state_dir",
    "group",
    "on_exit",
    "metrics",
    "max_entries",
    "apply_to_open",
    "statistics",
    "count_unlisted",
    "rtt_sampling",
];
const POLICY_KEYS: [&str; 13] = [
    "cidrs",
    "initial_rto",
    "syn_ack_rto",
    "rto_min",
    "rto_restart",
    "delack_max",
    "thin_linear",
    "linear_retries",
    "rto_max",
    "user_timeout",
    "syn_retries",
    "mptcp",
    "force",
];

type Value<'a> = Spanned<DeValue<'a>>;

pub(super) fn parse(source: &Source) -> (Parsed, Vec<ConfigError>) {
    let lists = Lists::take_out(&source.text);
    let rest = lists.rest.clone();
    let (table, syntax) = DeTable::parse_recoverable(&rest);
    let mut walk = Walk {
        source,
        lists,
        errors: Vec::new(),
    };
    if !syntax.is_empty() {
        for e in syntax.iter().take(MOST_ERRORS) {
            walk.error(e.span().unwrap_or(0..0), e.message());
        }
        return (Parsed::default(), walk.errors);
    }
    let parsed = walk.top(table.get_ref());
    (parsed, walk.errors)
}

struct Walk<'a> {
    source: &'a Source,
    /// Spans in the tree are of the rest that they left.
    lists: Lists<'a>,
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

    fn agent(&mut self, table: &DeTable<'_>) -> AgentConfig {
        let mut agent = AgentConfig::default();
        for (key, value) in table {
            let span = value.span();
            match key.get_ref().as_ref() {
                "cgroup" => {
                    if let Some(text) = self.text(value) {
                        if text == "auto" {
                            agent.cgroup = CgroupSetting::Auto;
                        } else if let Some(path) = self.absolute(value) {
                            agent.cgroup = CgroupSetting::Path(path);
                        }
                    }
                }
                "pin_dir" => {
                    if let Some(path) = self.absolute(value) {
                        let dotted = path.components().any(|c| {
                            matches!(c, std::path::Component::Normal(n) if n.as_encoded_bytes().contains(&b'.'))
                        });
                        if dotted {
                            self.error(span, "names in a BPF file system must not contain dots");
                        }
                        agent.pin_dir = path;
                    }
                }
                "socket" => assign(&mut agent.socket, self.absolute(value)),
                "state_dir" => assign(&mut agent.state_dir, self.absolute(value)),
                "group" => assign(&mut agent.group, self.text(value).map(ToOwned::to_owned)),
                "on_exit" => match self.text(value) {
                    Some("detach") => agent.on_exit = OnExit::Detach,
                    Some("keep") => agent.on_exit = OnExit::Keep,
                    Some(_) => self.error(span, "on_exit is \"detach\" or \"keep\""),
                    None => {}
                },
                "metrics" => match self.text(value).map(str::parse::<MetricsSetting>) {
                    Some(Ok(metrics)) => agent.metrics = metrics,
                    Some(Err(e)) => self.error(span, e),
                    None => {}
                },
                "max_entries" => {
                    let range = 1..=i64::from(super::MAX_ENTRIES_LIMIT);
                    if let Some(n) = self.integer(value, range) {
                        agent.max_entries = u32::try_from(n).unwrap_or(u32::MAX);
                    }
                }
                "apply_to_open" => assign(&mut agent.apply_to_open, self.boolean(value)),
                "statistics" => assign(&mut agent.statistics, self.boolean(value)),
                "count_unlisted" => assign(&mut agent.count_unlisted, self.boolean(value)),
                "rtt_sampling" => match self.text(value).map(str::parse::<RttSampling>) {
                    Some(Ok(sampling)) => agent.rtt_sampling = sampling,
                    Some(Err(e)) => self.error(span, e),
                    None => {}
                },
                _ => self.unknown(key, "[agent] ", &AGENT_KEYS),
            }
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
        if name == PolicyName::unlisted() {
            self.error(
                span,
                "connections that no entry covers are counted under this name; choose another",
            );
            return None;
        }
        let table = self.table(value, "[policy.NAME]")?;
        let mut raw = RawPolicy {
            name,
            span: self.lists.in_text(span),
            settings: Settings::default(),
            spans: BTreeMap::new(),
            cidrs: Vec::new(),
        };
        for (key, value) in table {
            let Some(known) = POLICY_KEYS.iter().find(|k| **k == key.get_ref().as_ref()) else {
                self.unknown(key, "", &POLICY_KEYS);
                continue;
            };
            raw.spans.insert(known, self.lists.in_text(value.span()));
            let settings = &mut raw.settings;
            match *known {
                "cidrs" => raw.cidrs = self.cidrs(value),
                "initial_rto" => settings.initial_rto = self.duration(value),
                "syn_ack_rto" => assign(&mut settings.syn_ack_rto, self.syn_ack_rto(value)),
                "rto_min" => settings.rto_min = self.duration(value),
                "delack_max" => settings.delack_max = self.duration(value),
                "rto_max" => settings.rto_max = self.duration(value),
                "user_timeout" => settings.user_timeout = self.duration(value),
                "rto_restart" => settings.rto_restart = self.boolean(value),
                "thin_linear" => settings.thin_linear = self.boolean(value),
                "linear_retries" => {
                    let range = 0..=u8::MAX.into();
                    let number = self.integer(value, range);
                    settings.linear_retries = number.and_then(|n| u8::try_from(n).ok());
                }
                "force" => settings.force = self.boolean(value).unwrap_or_default(),
                "syn_retries" => assign(&mut settings.syn_retries, self.syn_retries(value)),
                "mptcp" => match self.text(value).map(str::parse) {
                    Some(Ok(mptcp)) => settings.mptcp = mptcp,
                    Some(Err::<_, String>(e)) => self.error(value.span(), e),
                    None => {}
                },
                _ => {}
            }
        }
        Some(raw)
    }

    fn cidrs(&mut self, value: &Value<'_>) -> Vec<Vec<Place>> {
        if let Some(cidrs) = self.lists.take(value.span().start) {
            return cidrs;
        }
        let Some(array) = value.get_ref().as_array() else {
            self.wrong_kind(value, "a list of CIDRs, like [\"10.1.2.0/24\"]");
            return Vec::new();
        };
        let mut cidrs = Vec::with_capacity(array.len());
        for item in array.iter() {
            match self.text(item).map(Cidr::from_str) {
                Some(Ok(cidr)) => {
                    let start = self.lists.in_text(item.span()).start;
                    let line = self.source.line(start);
                    cidrs.push(Place {
                        cidr,
                        // Files are not as large.
                        start: u32::try_from(start).unwrap_or(u32::MAX),
                        line: u32::try_from(line).unwrap_or(u32::MAX),
                    });
                }
                Some(Err(e)) => self.error(item.span(), e.to_string()),
                None => {}
            }
        }
        vec![cidrs]
    }

    fn syn_retries(&mut self, value: &Value<'_>) -> Option<SynRetries> {
        let text = match value.get_ref() {
            DeValue::String(text) => text.to_string(),
            DeValue::Integer(number) => number.to_string(),
            _ => {
                self.wrong_kind(value, "\"auto\", \"keep\" or a number from 1 to 127");
                return None;
            }
        };
        text.parse()
            .map_err(|e: String| self.error(value.span(), e))
            .ok()
    }

    fn syn_ack_rto(&mut self, value: &Value<'_>) -> Option<SynAckRto> {
        match value.get_ref().as_str().map(str::parse::<SynAckRto>) {
            Some(Ok(SynAckRto::Fixed(_))) | None => self.duration(value).map(SynAckRto::Fixed),
            Some(Ok(keyword)) => Some(keyword),
            Some(Err(e)) => {
                self.error(value.span(), e);
                None
            }
        }
    }

    fn duration(&mut self, value: &Value<'_>) -> Option<Duration> {
        let text = match value.get_ref() {
            DeValue::String(text) => text.to_string(),
            // The parser of durations says what is missing from a bare number.
            DeValue::Integer(number) => number.to_string(),
            DeValue::Float(number) => number.to_string(),
            _ => {
                self.wrong_kind(value, "a duration, like \"5ms\"");
                return None;
            }
        };
        parse_duration(&text)
            .map_err(|e| self.error(value.span(), e.to_string()))
            .ok()
    }

    fn text<'v>(&mut self, value: &'v Value<'_>) -> Option<&'v str> {
        if value.get_ref().as_str().is_none() {
            self.wrong_kind(value, "a string in quotes");
        }
        value.get_ref().as_str()
    }

    fn absolute(&mut self, value: &Value<'_>) -> Option<PathBuf> {
        let path = PathBuf::from(self.text(value)?);
        if !path.is_absolute() {
            self.error(value.span(), "an absolute path is needed, beginning with /");
            return None;
        }
        Some(path)
    }

    fn boolean(&mut self, value: &Value<'_>) -> Option<bool> {
        if value.get_ref().as_bool().is_none() {
            self.wrong_kind(value, "true or false, without quotes");
        }
        value.get_ref().as_bool()
    }

    fn integer(&mut self, value: &Value<'_>, range: std::ops::RangeInclusive<i64>) -> Option<i64> {
        let number = value
            .get_ref()
            .as_integer()
            .map(|n| i64::from_str_radix(n.as_str(), n.radix()));
        match number {
            Some(Ok(number)) if range.contains(&number) => Some(number),
            _ => {
                let wanted = format!("a whole number from {} to {}", range.start(), range.end());
                self.wrong_kind(value, &wanted);
                None
            }
        }
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
            format!("this is {}; wanted is {wanted}", article(found)),
        );
    }

    fn unknown(&mut self, key: &Spanned<std::borrow::Cow<'_, str>>, place: &str, known: &[&str]) {
        let text = key.get_ref();
        let message = match nearest(text, known) {
            Some(near) => format!("unknown key {place}{text}; did you mean {near}?"),
            None => format!("unknown key {place}{text}; known are {}", known.join(", ")),
        };
        self.error(key.span(), message);
    }

    fn error(&mut self, span: Range<usize>, message: impl Into<String>) {
        if self.errors.len() < MOST_ERRORS {
            let span = self.lists.in_text(span);
            self.errors.push(self.source.error(span, message));
        }
    }
}

fn assign<T>(place: &mut T, value: Option<T>) {
    if let Some(value) = value {
        *place = value;
    }
}

fn article(kind: &str) -> String {
    if kind.starts_with(['a', 'i']) {
        format!("an {kind}")
    } else {
        format!("a {kind}")
    }
}

/// The known key one or two slips of the pen away.
fn nearest<'k>(text: &str, known: &[&'k str]) -> Option<&'k str> {
    let plain = |s: &str| s.to_ascii_lowercase().replace(['-', '_'], "");
    let scored = known
        .iter()
        .map(|k| (distance(&plain(text), &plain(k)), *k));
    scored
        .min()
        .filter(|(d, k)| *d <= 2 && *d < k.len() / 2)
        .map(|(_, k)| k)
}

/// Levenshtein distance.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let replace = diagonal + usize::from(x != *y);
            diagonal = row[j + 1];
            row[j + 1] = replace.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}
