//! `rto-agent advise`.

use std::process::ExitCode;

use anyhow::bail;
use rto_agent_core::advice::{answer, share};
use rto_agent_kernel::{datapath::probe, kernel::facts::host_facts};
use rto_model::advice::Question;

mod evidence;
mod prometheus;
mod text;

use rto_model::tune::law;

use self::evidence::Gathered;
use super::print_table;
use crate::{cli::Advise, client::Client};

pub(super) fn run(args: &Advise) -> anyhow::Result<ExitCode> {
    let host = host_facts(&probe::features())?;
    let question = Question {
        hz: host.hz,
        share: share(&args.spurious).map_err(anyhow::Error::msg)?,
        min_us: law::Settings::new(host.hz).min_us,
        peer_delack_us: u64::try_from(args.peer_delack.as_micros()).unwrap_or(u64::MAX),
    };
    let answer = answer(gather(args, host.hz)?, &question, &host);
    print_table(args.daemon.json, &answer, args.table, |columns| {
        text::text(&answer, columns)
    })
}

fn gather(args: &Advise, hz: u32) -> anyhow::Result<Gathered> {
    if let Some(url) = &args.prometheus {
        return prometheus::read(url, args);
    }
    let client = Client::new(&args.daemon.socket);
    let entries = client.get("/v1/entries")?;
    let policy = match (&args.policy, &args.target) {
        (Some(name), _) => name.parse()?,
        (None, Some(target)) => evidence::policy_of(target, &client, &entries)?,
        (None, None) => {
            bail!("no data to evaluate: give a CIDR, an address, --policy or --prometheus")
        }
    };
    evidence::of_policy(&policy, &entries, client.get("/v1/stats")?, hz)
}

#[cfg(test)]
mod tests;
