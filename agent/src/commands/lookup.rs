//! `rto-agent lookup`.

use std::process::ExitCode;

use super::{print, table};
use crate::{
    api::client::Client,
    cli::Lookup,
    kernel::hz::measure,
    wire::types::{LookupAnswer, LookupEntry},
};

pub(super) fn run(args: &Lookup) -> anyhow::Result<ExitCode> {
    // The address goes into a URL: what is no address is refused here, not encoded.
    let address: std::net::IpAddr = args.address.parse().map_err(|_| {
        anyhow::anyhow!(
            "{:?} is no IPv4 or IPv6 address (host names are not looked up)",
            args.address
        )
    })?;
    let path = format!("/v1/lookup?address={address}");
    let answer: LookupAnswer = Client::new(&args.socket.socket).get(&path)?;
    let hz = measure().unwrap_or_default();
    print(args.output.json, &answer, || text(&answer, hz))?;
    Ok(ExitCode::SUCCESS)
}

fn text(answer: &LookupAnswer, hz: u32) -> String {
    let mut text = match &answer.entry {
        None => format!("{}: {}\n", answer.address, answer.reason),
        Some(LookupEntry { entry, sets }) => format!(
            "{}: {} (policy {}, {}): {}\n{}",
            answer.address,
            entry.cidr,
            entry.policy,
            entry.source,
            answer.reason,
            table::effects(&sets.effects, hz, "  "),
        ),
    };
    for cidr in &answer.shadowed {
        text.push_str(&format!("  not applied: {cidr}, which is shorter\n"));
    }
    for cidr in &answer.masked {
        text.push_str(&format!(
            "  not applied: {cidr}, which was switched off at run time (rto-agent remove --undo {cidr})\n"
        ));
    }
    text
}
