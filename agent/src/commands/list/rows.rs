//! Which entries are listed, and their table.

use std::{collections::BTreeMap, fmt::Write as _};

use rto_agent_common::EntryValue;
use rto_agent_core::{
    policy::{Cidr, PolicyName},
    wire::types::{EntryView, SourceView},
};

use crate::{cli::List, commands::table};

/// A filter of entries.
#[derive(Debug, Default)]
pub(super) struct Wanted {
    pub(super) policy: Option<PolicyName>,
    /// Only entries within one of these; empty: all entries.
    pub(super) cidrs: Vec<Cidr>,
    pub(super) runtime: bool,
    pub(super) file: bool,
}

impl Wanted {
    pub(super) fn of(args: &List) -> anyhow::Result<Self> {
        let cidrs = args.cidr.iter().map(|text| text.parse());
        Ok(Self {
            policy: args.policy.as_deref().map(str::parse).transpose()?,
            cidrs: cidrs.collect::<Result<_, _>>()?,
            runtime: args.runtime,
            file: args.file,
        })
    }

    pub(super) fn has(&self, entry: &EntryView) -> bool {
        let is_runtime = matches!(entry.source, SourceView::Runtime { .. });
        self.has_entry(&entry.cidr, &entry.policy, is_runtime)
    }

    pub(super) fn has_entry(&self, cidr: &Cidr, policy: &PolicyName, is_runtime: bool) -> bool {
        self.policy.as_ref().is_none_or(|wanted| wanted == policy)
            && self.has_cidr(cidr)
            && (!self.runtime || is_runtime)
            && (!self.file || !is_runtime)
    }

    /// Keeps only the requested policy.
    pub(super) fn keep_policy<T>(
        &self,
        policies: &mut BTreeMap<PolicyName, T>,
    ) -> anyhow::Result<()> {
        if let Some(policy) = &self.policy {
            anyhow::ensure!(policies.contains_key(policy), "no active policy {policy}");
            policies.retain(|name, _| name == policy);
        }
        Ok(())
    }

    /// Masked entries come from the files; their policy is not reported.
    pub(super) fn has_masked(&self, cidr: &Cidr) -> bool {
        !self.runtime && self.policy.is_none() && self.has_cidr(cidr)
    }

    pub(super) fn has_cidr(&self, cidr: &Cidr) -> bool {
        let within = |wanted: &Cidr| wanted == cidr || wanted.contains_cidr(cidr);
        self.cidrs.is_empty() || self.cidrs.iter().any(within)
    }
}

/// The padded columns; the settings follow as the last column.
const HEADER: [&str; 4] = ["CIDR", "POLICY", "SOURCE", "HITS"];

pub(super) fn hits(count: u32) -> String {
    let more = if count >= EntryValue::HITS_MAX {
        "+"
    } else {
        ""
    };
    format!("{count}{more}")
}

/// The settings of a policy are shown if this much of them fits.
const LEAST_SETTINGS: usize = 12;

/// As many settings as fit, each in full.
fn fitting(settings: &str, columns: usize) -> String {
    if settings.chars().count() <= columns {
        return settings.to_owned();
    }
    let mut text = String::new();
    for one in settings.split_inclusive(", ") {
        // With room for the ellipsis.
        if text.chars().count() + one.trim_end().chars().count() >= columns {
            break;
        }
        text.push_str(one);
    }
    text + "…"
}

/// A table of entries without the table library, with which the cells of a million entries would
/// take a gigabyte. On a terminal, the last columns that do not fit are dropped; CIDR and policy never are.
pub(super) fn rows<'a, E>(
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
    const GAP: usize = 2;
    let mut left = columns.unwrap_or(usize::MAX);
    let fits = widths.iter().take_while(|width| {
        let rest = left.checked_sub(**width);
        left = rest.unwrap_or(0).saturating_sub(GAP);
        rest.is_some()
    });
    let shown = fits.count().max(2);
    let has_settings = shown == widths.len() && left >= LEAST_SETTINGS;
    let mut row = |cells: [String; 4], settings: &str| {
        let mut line = String::new();
        for (cell, width) in cells.iter().zip(widths).take(shown) {
            // Writing to a string does not fail.
            let _ = write!(line, "{cell:width$}  ");
        }
        if has_settings {
            line.push_str(&fitting(settings, left));
        }
        text.push_str(line.trim_end());
        text.push('\n');
    };
    row(HEADER.map(ToOwned::to_owned), "SETTINGS");
    for entry in entries {
        row(cells(entry), settings(entry));
    }
    let dropped = widths.len() + 1 - shown - usize::from(has_settings);
    text.push_str(&table::more(dropped, ": --wide"));
}
