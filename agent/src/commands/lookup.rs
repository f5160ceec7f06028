//! `rto-agent lookup`.

use std::{
    net::{IpAddr, SocketAddr},
    process::ExitCode,
};

use anyhow::bail;
use rto_agent_core::wire::{
    stats::StatsAnswer,
    types::{LookupAnswer, LookupEntry},
};
use rto_agent_kernel::kernel::hz::measure;

use super::{known_rtt, print, table};
use crate::{cli::Lookup, client::Client};

pub(super) fn run(args: &Lookup) -> anyhow::Result<ExitCode> {
    // All addresses are parsed first: a typo in the last one must not cost the answers to the
    // others.
    let addresses: anyhow::Result<Vec<IpAddr>> =
        args.addresses.iter().map(|a| address(a)).collect();
    let client = Client::new(&args.daemon.socket);
    let mut answers: Vec<LookupAnswer> = Vec::new();
    for address in addresses? {
        answers.push(client.get(&format!("/v1/lookup?address={address}"))?);
    }
    let counted = known_rtt::ask(client);
    let hz = measure().unwrap_or_default();
    let text = || {
        answers
            .iter()
            .map(|answer| text(answer, counted.as_ref(), hz))
            .collect()
    };
    match &*answers {
        [one] => print(args.daemon.json, one, text),
        all => print(args.daemon.json, &all, text),
    }
}

/// Parses an address. It goes into a URL, so anything else is refused here. A port is ignored,
/// because entries have none, so that an address can be pasted from a log or from ss(8).
fn address(text: &str) -> anyhow::Result<IpAddr> {
    if let Ok(address) = text.parse() {
        return Ok(address);
    }
    let bare = text
        .strip_prefix('[')
        .and_then(|text| text.strip_suffix(']'));
    if let Some(Ok(address)) = bare.map(str::parse) {
        return Ok(address);
    }
    if text.contains('%') {
        let (address, _) = text
            .trim_start_matches('[')
            .split_once('%')
            .unwrap_or_default();
        bail!(
            "{text:?} has a zone, but entries cover their prefix on all interfaces; leave the zone \
             out: rto-agent lookup {address}"
        );
    }
    match text.parse::<SocketAddr>() {
        Ok(end) => Ok(end.ip()),
        Err(_) if text.contains('/') => bail!(
            "{text:?} is a prefix, not an address; rto-agent list --cidr {text} lists its entries"
        ),
        Err(_) => bail!(
            "{text:?} is not an IPv4 or IPv6 address; write, for example, 10.1.2.3, 10.1.2.3:443 \
             or [fd00:1::7]:443 (host names are not resolved)"
        ),
    }
}

fn text(answer: &LookupAnswer, counted: Option<&StatsAnswer>, hz: u32) -> String {
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
    if let (Some(LookupEntry { entry, sets }), Some(counted)) = (&answer.entry, counted)
        && let Some(stats) = counted.policies.get(&entry.policy)
    {
        let warnings = known_rtt::of_policy(&entry.policy, &sets.settings, stats);
        text.push_str(&table::remarks("  warning", warnings));
    }
    for cidr in &answer.shadowed {
        text.push_str(&format!("  not applied: {cidr}, a shorter prefix\n"));
    }
    for cidr in &answer.masked {
        text.push_str(&format!(
            "  not applied: {cidr}, switched off at run time (undo: rto-agent remove --undo \
             {cidr})\n"
        ));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lookup_takes_addresses_with_ports() {
        for (text, wanted) in [
            ("10.1.2.3", "10.1.2.3"),
            ("10.1.2.3:443", "10.1.2.3"),
            ("fd00::7", "fd00::7"),
            ("[fd00::7]", "fd00::7"),
            ("[fd00::7]:443", "fd00::7"),
        ] {
            assert_eq!(address(text).unwrap().to_string(), wanted, "{text}");
        }
    }

    #[test]
    fn lookup_of_no_address_names_fix() {
        for (text, message) in [
            ("fe80::1%eth0", "rto-agent lookup fe80::1"),
            ("[fe80::1%2]:443", "rto-agent lookup fe80::1"),
            ("10.0.0.0/8", "rto-agent list --cidr 10.0.0.0/8"),
            ("localhost", "host names are not resolved"),
            ("10.1.2.3:99999", "10.1.2.3:443"),
            ("[fd00::7", "10.1.2.3:443"),
            ("", "10.1.2.3:443"),
        ] {
            let error = address(text).unwrap_err().to_string();
            assert!(error.contains(message), "{text}: {error}");
        }
    }
}
