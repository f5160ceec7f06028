//! `rto-agent list`.

use std::{collections::BTreeMap, process::ExitCode};

use rto_agent_core::{
    policy::compile::settings_text,
    wire::types::{EntryView, ListAnswer},
};

use self::rows::{Wanted, hits, rows};
use super::print_table;
use crate::{
    cli::List,
    client::{Client, ClientError},
};

mod pinned;
mod rows;

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
    print_table(args.daemon.json, &answer, args.table, |columns| {
        text(&answer, columns)
    })
}

fn text(answer: &ListAnswer, columns: Option<usize>) -> String {
    let settings: BTreeMap<_, _> = answer
        .policies
        .iter()
        .map(|(name, policy)| (name, settings_text(&policy.effects)))
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
    fn list_is_filtered_by_policy_and_cidr() {
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
    fn list_fits_terminal() {
        let mut answer = ListAnswer {
            entries: all(),
            ..ListAnswer::default()
        };
        let settings = serde_json::json!({
            "settings": {},
            "effects": [{"setting": "initial_rto", "asked": "100ms", "effective": "100ms"},
                        {"setting": "syn_retries", "asked": "9", "effective": "9", "count": 9}]
        });
        let view: rto_agent_core::wire::types::PolicyView =
            serde_json::from_value(settings).unwrap();
        answer.policies.insert("near".parse().unwrap(), view);
        let wide = text(&answer, None);
        assert!(
            wide.contains("initial_rto 100ms, syn_retries 9\n"),
            "{wide}"
        );
        let narrow = text(&answer, Some(60));
        assert!(
            narrow.lines().all(|line| line.chars().count() <= 60),
            "{narrow}"
        );
        // A setting is shown in full or not at all.
        assert!(narrow.contains("runtime        7     …\n"), "{narrow}");
    }
}
