//! `rto-agent list`.

use std::{collections::BTreeMap, fmt::Write as _, process::ExitCode};

use rto_agent_common::EntryValue;
use rto_agent_core::{
    policy::{Cidr, PolicyName},
    wire::types::{EntryView, ListAnswer, SourceView},
};

use super::{print, table, terminal};
use crate::{
    cli::List,
    client::{Client, ClientError},
};

mod pinned;

pub(super) fn run(args: &List) -> anyhow::Result<ExitCode> {
    let wanted = Wanted::of(args)?;
    let answer = Client::new(&args.daemon.socket).get::<ListAnswer>("/v1/entries");
    let mut answer = match answer {
        Err(error @ ClientError::NotRunning { .. }) => return pinned::list(args, &wanted, error),
        answer => answer?,
    };
    wanted.keep_policy(&mut answer.policies)?;
    answer.entries.retain(|entry| wanted.has(entry));
    answer.masked.retain(|cidr| wanted.has_masked(cidr));
    answer
        .left_out
        .retain(|cidr, _| !wanted.file && wanted.has_cidr(cidr));
    print(args.daemon.json, &answer, || {
        text(&answer, terminal::columns(args.table))
    })
}

/// A filter of entries.
#[derive(Debug, Default)]
struct Wanted {
    policy: Option<PolicyName>,
    /// Only entries within one of these; empty: all entries.
    cidrs: Vec<Cidr>,
    runtime: bool,
    file: bool,
}

impl Wanted {
    fn of(args: &List) -> anyhow::Result<Self> {
        let cidrs = args.cidr.iter().map(|text| text.parse());
        Ok(Self {
            policy: args.policy.as_deref().map(str::parse).transpose()?,
            cidrs: cidrs.collect::<Result<_, _>>()?,
            runtime: args.runtime,
            file: args.file,
        })
    }

    fn has(&self, entry: &EntryView) -> bool {
        let is_runtime = matches!(entry.source, SourceView::Runtime { .. });
        self.has_entry(&entry.cidr, &entry.policy, is_runtime)
    }

    fn has_entry(&self, cidr: &Cidr, policy: &PolicyName, is_runtime: bool) -> bool {
        self.policy.as_ref().is_none_or(|wanted| wanted == policy)
            && self.has_cidr(cidr)
            && (!self.runtime || is_runtime)
            && (!self.file || !is_runtime)
    }

    /// Keeps only the requested policy.
    fn keep_policy<T>(&self, policies: &mut BTreeMap<PolicyName, T>) -> anyhow::Result<()> {
        if let Some(policy) = &self.policy {
            anyhow::ensure!(policies.contains_key(policy), "no active policy {policy}");
            policies.retain(|name, _| name == policy);
        }
        Ok(())
    }

    /// Masked entries come from the files; their policy is not reported.
    fn has_masked(&self, cidr: &Cidr) -> bool {
        !self.runtime && self.policy.is_none() && self.has_cidr(cidr)
    }

    fn has_cidr(&self, cidr: &Cidr) -> bool {
        let within = |wanted: &Cidr| wanted == cidr || wanted.contains_cidr(cidr);
        self.cidrs.is_empty() || self.cidrs.iter().any(within)
    }
}

/// The padded columns; the settings follow as the last column.
const HEADER: [&str; 4] = ["CIDR", "POLICY", "SOURCE", "HITS"];

fn text(answer: &ListAnswer, columns: Option<usize>) -> String {
    let settings: BTreeMap<_, _> = answer
        .policies
        .iter()
        .map(|(name, policy)| (name, table::settings(&policy.effects)))
        .collect();
    let mut text = match answer.detached_by {
        Some(by) => by.detached() + "\n",
        None => String::new(),
    };
    if answer.entries.is_empty() {
        text.push_str("no entries\n");
    } else {
        let settings = |entry: &EntryView| settings.get(&entry.policy).map_or("", String::as_str);
        rows(&mut text, &answer.entries, cells, settings, columns);
    }
    for (name, policy) in &answer.policies {
        if let Some(description) = &policy.description {
            text.push_str(&format!("policy {name}: {description}\n"));
        }
    }
    for cidr in &answer.masked {
        text.push_str(&format!(
            "{cidr} is switched off at run time (undo: rto-agent remove --undo {cidr})\n"
        ));
    }
    for (cidr, reason) in &answer.left_out {
        text.push_str(&format!(
            "{cidr} was added at run time and is left out: {reason}\n"
        ));
    }
    text
}

fn cells(entry: &EntryView) -> [String; 4] {
    [
        entry.cidr.to_string(),
        entry.policy.to_string(),
        entry.source.to_string(),
        hits(entry.hits),
    ]
}

fn hits(count: u32) -> String {
    let more = if count >= EntryValue::HITS_MAX {
        "+"
    } else {
        ""
    };
    format!("{count}{more}")
}

/// A table of entries without the table library, with which the cells of a million entries would
/// take a gigabyte.
fn rows<'a, E>(
    text: &mut String,
    entries: &'a [E],
    cells: impl Fn(&E) -> [String; 4],
    settings: impl Fn(&'a E) -> &'a str,
    columns: Option<usize>,
) {
    let mut widths = HEADER.map(str::len);
    for entry in entries {
        for (width, cell) in widths.iter_mut().zip(cells(entry)) {
            *width = cell.len().max(*width);
        }
    }
    let mut row = |cells: [String; 4], settings: &str| {
        let mut line = String::new();
        for (cell, width) in cells.iter().zip(widths) {
            // Writing to a string does not fail.
            let _written = write!(line, "{cell:width$}  ");
        }
        line.push_str(settings);
        text.push_str(&terminal::shortened(line.trim_end(), columns));
        text.push('\n');
    };
    row(HEADER.map(ToOwned::to_owned), "SETTINGS");
    for entry in entries {
        row(cells(entry), settings(entry));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(cidr: &str, policy: &str, runtime: bool) -> EntryView {
        let source = if runtime {
            serde_json::json!({"kind": "runtime", "by": {"uid": 0, "pid": 1}})
        } else {
            serde_json::json!({"kind": "file", "path": "/etc/rto-agent/config.toml", "line": 3})
        };
        EntryView {
            cidr: cidr.parse().unwrap(),
            policy: policy.parse().unwrap(),
            source: serde_json::from_value(source).unwrap(),
            hits: 7,
            overrides: None,
        }
    }

    fn all() -> Vec<EntryView> {
        vec![
            entry("10.0.0.0/8", "far", false),
            entry("10.1.0.0/16", "near", false),
            entry("10.1.2.0/24", "near", true),
        ]
    }

    #[test]
    fn only_what_was_asked_for() {
        let wanted = |change: fn(&mut Wanted)| {
            let mut wanted = Wanted::default();
            change(&mut wanted);
            let entries = all().into_iter().filter(|entry| wanted.has(entry));
            entries.map(|e| e.cidr.to_string()).collect::<Vec<_>>()
        };
        assert_eq!(wanted(|_| {}).len(), 3);
        assert_eq!(wanted(|w| w.runtime = true), ["10.1.2.0/24"]);
        assert_eq!(wanted(|w| w.file = true), ["10.0.0.0/8", "10.1.0.0/16"]);
        let near = wanted(|w| w.policy = "near".parse().ok());
        assert_eq!(near, ["10.1.0.0/16", "10.1.2.0/24"]);
        let within = wanted(|w| w.cidrs = vec!["10.1.0.0/16".parse().unwrap()]);
        assert_eq!(within, ["10.1.0.0/16", "10.1.2.0/24"]);
    }

    #[test]
    fn lines_fit_a_terminal() {
        let mut answer = ListAnswer {
            entries: all(),
            ..ListAnswer::default()
        };
        let settings = serde_json::json!({
            "settings": {},
            "effects": [{"setting": "initial_rto", "asked": "100ms", "effective": "100ms"},
                        {"setting": "syn_retries", "asked": "auto", "effective": "11", "count": 11}]
        });
        let view: rto_agent_core::wire::types::PolicyView =
            serde_json::from_value(settings).unwrap();
        answer.policies.insert("near".parse().unwrap(), view);
        let wide = text(&answer, None);
        assert!(
            wide.contains("initial_rto 100ms, syn_retries auto (11)\n"),
            "{wide}"
        );
        let narrow = text(&answer, Some(60));
        assert!(
            narrow.lines().all(|line| line.chars().count() <= 60),
            "{narrow}"
        );
        assert!(
            narrow.contains("initial_rto…") || narrow.contains('…'),
            "{narrow}"
        );
    }
}
