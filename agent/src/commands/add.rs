//! `rto-agent add`.

use std::process::ExitCode;

use super::{print, table};
use crate::{
    api::client::Client,
    cli::Add,
    kernel::hz::measure,
    wire::types::{AddRequest, ChangeAnswer},
};

pub(super) fn run(args: Add) -> anyhow::Result<ExitCode> {
    let request = AddRequest {
        cidrs: args.cidrs,
        policy: args.policy,
        settings: args.settings,
        ttl: args.ttl,
        save: args.save,
    };
    let answer: ChangeAnswer = Client::new(&args.socket.socket).post("/v1/entries", &request)?;
    let hz = measure().unwrap_or_default();
    print(args.output.json, &answer, || table::change(&answer, hz))?;
    Ok(ExitCode::SUCCESS)
}
