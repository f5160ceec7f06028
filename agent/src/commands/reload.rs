//! `rto-agent reload`.

use std::process::ExitCode;

use super::{print, table};
use crate::{api::client::Client, cli::Reload, wire::types::ChangeAnswer};

pub(super) fn run(args: &Reload) -> anyhow::Result<ExitCode> {
    let answer: ChangeAnswer = Client::new(&args.socket.socket).post("/v1/reload", &())?;
    print(args.output.json, &answer, || table::change(&answer, 0))?;
    Ok(ExitCode::SUCCESS)
}
