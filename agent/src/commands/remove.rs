//! `rto-agent remove`.

use std::process::ExitCode;

use super::{print, table};
use crate::{
    api::client::Client,
    cli::Remove,
    wire::types::{ChangeAnswer, RemoveRequest},
};

pub(super) fn run(args: Remove) -> anyhow::Result<ExitCode> {
    let request = RemoveRequest {
        cidrs: args.cidrs,
        save: args.save,
        undo: args.undo,
    };
    let answer: ChangeAnswer =
        Client::new(&args.socket.socket).post("/v1/entries/remove", &request)?;
    print(args.output.json, &answer, || table::change(&answer, 0))?;
    Ok(ExitCode::SUCCESS)
}
