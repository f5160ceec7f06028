//! `rto-agent list`.

use std::process::ExitCode;

use rto_agent_common::EntryValue;

use super::{print, table};
use crate::{
    api::{client::Client, types::ListAnswer},
    cli::Reading,
};

pub(super) fn run(args: &Reading) -> anyhow::Result<ExitCode> {
    let answer: ListAnswer = Client::new(&args.socket.socket).get("/v1/entries")?;
    print(args.output.json, &answer, || text(&answer))?;
    Ok(ExitCode::SUCCESS)
}

fn text(answer: &ListAnswer) -> String {
    let mut rows = table::new(["CIDR", "POLICY", "SOURCE", "HITS", "SETTINGS"]);
    for entry in &answer.entries {
        let more = if entry.hits >= EntryValue::HITS_MAX {
            "+"
        } else {
            ""
        };
        rows.add_row([
            entry.cidr.to_string(),
            entry.policy.to_string(),
            entry.source.to_string(),
            format!("{}{more}", entry.hits),
            table::settings(&entry.effects),
        ]);
    }
    let mut text = if answer.entries.is_empty() {
        "no entries\n".to_owned()
    } else {
        table::text(&rows)
    };
    for cidr in &answer.masked {
        text.push_str(&format!(
            "{cidr} is switched off by hand (rto-agent remove --undo {cidr})\n"
        ));
    }
    text
}
