//! `rto-agent list`.

use std::{collections::BTreeMap, fmt::Write as _, process::ExitCode};

use rto_agent_common::EntryValue;

use super::{print, table};
use crate::{
    api::client::Client,
    cli::Reading,
    wire::types::{EntryView, ListAnswer},
};

pub(super) fn run(args: &Reading) -> anyhow::Result<ExitCode> {
    let answer: ListAnswer = Client::new(&args.socket.socket).get("/v1/entries")?;
    print(args.output.json, &answer, || text(&answer))?;
    Ok(ExitCode::SUCCESS)
}

/// The last column is the settings, which no other comes after.
const HEADER: [&str; 4] = ["CIDR", "POLICY", "SOURCE", "HITS"];

/// Not by the library of tables, whose cells of a million entries are a gigabyte.
fn text(answer: &ListAnswer) -> String {
    let settings: BTreeMap<_, _> = answer
        .policies
        .iter()
        .map(|(name, policy)| (name, table::settings(&policy.effects)))
        .collect();
    let mut text = String::new();
    if answer.entries.is_empty() {
        text.push_str("no entries\n");
    } else {
        let mut widths = HEADER.map(str::len);
        for entry in &answer.entries {
            for (width, cell) in widths.iter_mut().zip(cells(entry)) {
                *width = cell.len().max(*width);
            }
        }
        row(&mut text, widths, HEADER, "SETTINGS");
        for entry in &answer.entries {
            let settings = settings.get(&entry.policy).map_or("", String::as_str);
            let cells = cells(entry);
            let cells = cells.each_ref().map(String::as_str);
            row(&mut text, widths, cells, settings);
        }
    }
    for cidr in &answer.masked {
        text.push_str(&format!(
            "{cidr} is switched off at run time (rto-agent remove --undo {cidr})\n"
        ));
    }
    text
}

fn cells(entry: &EntryView) -> [String; 4] {
    let more = if entry.hits >= EntryValue::HITS_MAX {
        "+"
    } else {
        ""
    };
    [
        entry.cidr.to_string(),
        entry.policy.to_string(),
        entry.source.to_string(),
        format!("{}{more}", entry.hits),
    ]
}

fn row(text: &mut String, widths: [usize; 4], cells: [&str; 4], last: &str) {
    for (cell, width) in cells.iter().zip(widths) {
        // Writing to a string does not fail.
        let _written = write!(text, "{cell:width$}  ");
    }
    text.push_str(last);
    text.truncate(text.trim_end().len());
    text.push('\n');
}
