//! `rto-agent reload`.

use std::process::ExitCode;

use rto_agent_core::wire::types::{ChangeAnswer, ReloadRequest};

use super::{print, table};
use crate::{cli::Reload, client::Client};

pub(super) fn run(args: &Reload) -> anyhow::Result<ExitCode> {
    let request = ReloadRequest {
        allow_empty: args.allow_empty,
        attach: args.attach,
        dry_run: args.dry_run,
    };
    let answer: ChangeAnswer = Client::new(&args.daemon.socket).post("/v1/reload", &request)?;
    print(args.daemon.json, &answer, || table::change(&answer))
}
