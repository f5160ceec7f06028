//! `rto-agent remove`.

use std::process::ExitCode;

use rto_agent_core::{
    config::SAVED_FILE,
    policy::PolicyName,
    wire::types::{ChangeAnswer, ListAnswer, RemoveRequest, SourceView},
};

use super::{print, table};
use crate::{cli::Remove, client::Client};

pub(super) fn run(args: Remove) -> anyhow::Result<ExitCode> {
    let client = Client::new(&args.daemon.socket);
    let cidrs = match &args.policy {
        Some(policy) => of_policy(&client, &policy.parse()?, args.save)?,
        None => args.cidrs,
    };
    let request = RemoveRequest {
        cidrs,
        save: args.save,
        undo: args.undo,
    };
    let answer: ChangeAnswer = client.post("/v1/entries/remove", &request)?;
    print(args.daemon.json, &answer, || table::change(&answer))
}

/// The CIDRs of a policy's entries, or only of its saved entries.
fn of_policy(client: &Client, policy: &PolicyName, saved: bool) -> anyhow::Result<Vec<String>> {
    let list: ListAnswer = client.get("/v1/entries")?;
    let is_saved = |source: &SourceView| matches!(source, SourceView::File { path, .. } if path.ends_with(SAVED_FILE));
    let entries = list.entries.iter();
    let entries = entries.filter(|entry| {
        entry.policy == *policy
            && (!saved || is_saved(&entry.source) || entry.overrides.as_ref().is_some_and(is_saved))
    });
    let cidrs: Vec<String> = entries.map(|entry| entry.cidr.to_string()).collect();
    anyhow::ensure!(
        !cidrs.is_empty(),
        "policy {policy} has no entry{}; see rto-agent list",
        if saved {
            " in policies.d/50-cli.toml"
        } else {
            ""
        }
    );
    Ok(cidrs)
}
