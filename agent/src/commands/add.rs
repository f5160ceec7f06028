//! `rto-agent add`.

use std::process::ExitCode;

use super::{print, table};
use crate::{
    api::{
        client::Client,
        types::{AddRequest, ChangeAnswer, SettingsSpec},
    },
    cli::{Add, SettingsArgs},
    kernel::hz::measure,
};

pub(super) fn run(args: Add) -> anyhow::Result<ExitCode> {
    let settings = spec(args.settings);
    let request = AddRequest {
        cidrs: args.cidrs,
        policy: args.policy,
        settings: (settings != SettingsSpec::default()).then_some(settings),
        ttl: args.ttl,
        save: args.save,
    };
    let answer: ChangeAnswer = Client::new(&args.socket.socket).post("/v1/entries", &request)?;
    let hz = measure().unwrap_or_default();
    print(args.output.json, &answer, || table::change(&answer, hz))?;
    Ok(ExitCode::SUCCESS)
}

fn spec(args: SettingsArgs) -> SettingsSpec {
    let SettingsArgs {
        initial_rto,
        syn_ack_rto,
        rto_min,
        rto_restart,
        delack_max,
        thin_linear,
        linear_retries,
        rto_max,
        user_timeout,
        syn_retries,
        mptcp,
        force,
    } = args;
    SettingsSpec {
        initial_rto,
        syn_ack_rto: syn_ack_rto.map(|value| value.to_string()),
        rto_min,
        rto_restart,
        delack_max,
        thin_linear,
        linear_retries,
        rto_max,
        user_timeout,
        syn_retries,
        mptcp: mptcp.map(|value| value.to_string()),
        force,
    }
}
