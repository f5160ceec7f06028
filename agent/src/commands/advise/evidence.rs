//! Evidence for advice: from the daemon, or from several hosts.

use std::{collections::BTreeSet, net::IpAddr};

use anyhow::{Context as _, bail, ensure};
use rto_agent_core::{
    advice::{self, ByDirection, Evidence, Present, percent},
    policy::{Cidr, PolicyName, compile::EffectiveSetting, units::jiffies_to_usecs},
    printable::counted,
    wire::{
        stats::{ArmStats, DirectionStats, PolicyStats, StatsAnswer},
        types::{ListAnswer, LookupAnswer},
    },
};
use rto_model::{advice::RoundTrips, distribution::Distribution};
use serde::Serialize;

use crate::client::Client;

/// The source of the evidence.
#[derive(Debug, Serialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub(super) enum Source {
    /// The daemon's statistics of a policy.
    Statistics {
        policy: PolicyName,
        /// The policy's entries.
        cidrs: Vec<Cidr>,
        /// Time of the answer, Unix milliseconds.
        at_ms: u64,
        /// When smoothed RTTs are sampled.
        rtt_sampling: String,
    },
    /// The metrics of several hosts, added by the Prometheus server.
    Prometheus {
        policy: PolicyName,
        url: String,
        /// Label matchers that select the hosts; empty: all hosts.
        matchers: String,
        /// Length of the observed time up to now.
        range: String,
        /// The number of hosts with the policy.
        hosts: u64,
    },
}

/// The evidence of a daemon or of a fleet.
pub(super) type Gathered = advice::Gathered<Source>;

/// The wanted policy, or the only one of several hosts.
pub(super) fn choose_policy(
    wanted: Option<PolicyName>,
    known: &BTreeSet<PolicyName>,
) -> anyhow::Result<PolicyName> {
    let names: Vec<_> = known.iter().map(PolicyName::as_str).collect();
    let names = names.join(", ");
    let unmatched = PolicyName::unmatched();
    let mut named = known.iter().filter(|name| **name != unmatched);
    let policy = match (wanted, named.next(), named.next()) {
        (Some(wanted), ..) => wanted,
        (None, Some(only), None) => only.clone(),
        _ => bail!("give the policy with --policy NAME; policies there: {names}"),
    };
    ensure!(
        known.contains(&policy),
        "no policy {policy}; policies there: {names}"
    );
    Ok(policy)
}

/// The policy of an entry, or of the entry that covers an address.
pub(super) fn policy_of(
    target: &str,
    client: &Client,
    entries: &ListAnswer,
) -> anyhow::Result<PolicyName> {
    if let Ok(address) = target.parse::<IpAddr>() {
        let answer: LookupAnswer = client.get(&format!("/v1/lookup?address={address}"))?;
        let Some(entry) = answer.entry else {
            bail!(
                "no entry covers {address}: see rto-agent list; with count_unmatched = true in \
                 [agent], --policy unmatched evaluates connections that no entry covers"
            );
        };
        return Ok(entry.entry.policy);
    }
    entry_policy(&target.parse()?, entries)
}

fn entry_policy(cidr: &Cidr, entries: &ListAnswer) -> anyhow::Result<PolicyName> {
    if let Some(entry) = entries.entries.iter().find(|entry| entry.cidr == *cidr) {
        return Ok(entry.policy.clone());
    }
    let covering = entries
        .entries
        .iter()
        .filter(|entry| entry.cidr.contains_cidr(cidr))
        .max_by_key(|entry| entry.cidr.prefix());
    match covering {
        Some(entry) => bail!(
            "{cidr} is not an entry, but within {}: use rto-agent advise {}",
            entry.cidr,
            entry.cidr
        ),
        None => bail!(
            "{cidr} is not an entry: see rto-agent list, or use a capture: rto-lab advise --pcap FILE --cidr {cidr}"
        ),
    }
}

/// Evidence from the daemon's statistics of a policy.
pub(super) fn of_policy(
    policy: &PolicyName,
    entries: &ListAnswer,
    mut answer: StatsAnswer,
    hz: u32,
) -> anyhow::Result<Gathered> {
    ensure!(
        answer.on,
        "no statistics: set statistics = true in [agent] and restart the daemon, or use a capture: \
         rto-lab advise --pcap FILE"
    );
    let known: Vec<_> = answer.policies.keys().map(ToString::to_string).collect();
    let stats = answer.policies.remove(policy).with_context(|| {
        let hint = if *policy == PolicyName::unmatched() {
            " (count_unmatched = true in [agent] counts connections that no entry covers)"
        } else {
            ""
        };
        format!(
            "no active policy {policy}{hint}; active policies: {}",
            known.join(", ")
        )
    })?;
    let own: Vec<_> = entries
        .entries
        .iter()
        .filter(|e| e.policy == *policy)
        .collect();
    let set = entries.policies.get(policy).filter(|_| !own.is_empty());
    let cidrs: Vec<Cidr> = own.iter().map(|entry| entry.cidr).collect();
    let source = Source::Statistics {
        policy: policy.clone(),
        cidrs: cidrs.clone(),
        at_ms: answer.at_ms,
        rtt_sampling: answer.rtt_sampling.clone(),
    };
    let is_named = *policy != PolicyName::unmatched();
    let mut gathered = Gathered {
        policy: is_named.then(|| policy.clone()),
        cidrs: if is_named { cidrs } else { Vec::new() },
        present: set.map_or(Present::KERNEL, |policy| present(&policy.effects, hz)),
        settings: set
            .map(|policy| policy.settings.clone())
            .unwrap_or_default(),
        observed_ms: stats
            .since_ms
            .map(|since_ms| answer.at_ms.saturating_sub(since_ms)),
        ..Gathered::new(source)
    };
    if own.len() > 1 {
        gathered.notes.push(format!(
            "statistics are kept per policy: these cover all {} CIDRs of {policy}; to see one CIDR \
             separately, give it its own policy",
            own.len()
        ));
    }
    count(&mut gathered, &stats, answer.sampling, &answer.rtt_sampling);
    Ok(gathered)
}

/// The active values of a policy, on a host with this HZ.
fn present(effects: &[EffectiveSetting], hz: u32) -> Present {
    let of = |setting: &str, kernel_us: u64| {
        let effect = effects.iter().find(|effect| effect.setting == setting);
        let jiffies = effect.and_then(|effect| effect.jiffies);
        jiffies.map_or(kernel_us, |jiffies| jiffies_to_usecs(jiffies, hz))
    };
    Present {
        initial_rto_us: of("initial_rto", Present::KERNEL.initial_rto_us),
        rto_min_us: of("rto_min", Present::KERNEL.rto_min_us),
    }
}

/// Adds the statistics of a policy. The timer does not change the path, so path RTTs include
/// both arms; all other counts come from the treated arm.
pub(super) fn count(
    gathered: &mut Gathered,
    stats: &PolicyStats,
    sampling: u32,
    rtt_sampling: &str,
) {
    if rtt_sampling == "off" {
        gathered.warnings.push(
            "no advice on rto_min, because smoothed RTTs are not sampled: set rtt_sampling = \
             \"end\" in [agent] and restart the daemon"
                .to_owned(),
        );
    }
    let sampling = sampling.into();
    let (mut connects, mut handshakes, mut round_trips) = (Vec::new(), Vec::new(), Vec::new());
    for (direction, stats) in stats.treated.directions() {
        connects.push((direction, stats.connect_time.distribution(1)));
        handshakes.push((direction, stats.path_rtt.distribution(1)));
        round_trips.push((direction, stats.srtt.distribution(sampling)));
        warn_of(gathered, direction, stats);
    }
    let control = stats.control.iter().flat_map(ArmStats::directions);
    for ((_, times), (_, stats)) in handshakes.iter_mut().zip(control) {
        times.extend(&stats.path_rtt.distribution(1));
    }
    gathered
        .evidence
        .extend(Evidence::rows("connect_time", &connects));
    gathered
        .evidence
        .extend(Evidence::rows("path_rtt", &handshakes));
    gathered
        .evidence
        .extend(Evidence::rows("srtt", &round_trips));
    let handshakes = handshakes.into_iter();
    gathered.handshakes =
        ByDirection::handshakes(handshakes.map(|(direction, times)| (direction, times.into())));
    let mut all = Distribution::default();
    for (_, times) in &round_trips {
        all.extend(times);
    }
    let each = round_trips.into_iter();
    let each = each.map(|(direction, times)| (direction, RoundTrips::Unordered(times)));
    gathered.round_trips = ByDirection::round_trips(RoundTrips::Unordered(all), each);
    gathered.notes.push(
        "the order of the samples is unknown: for rto_min, Linux's estimator runs over RTTs in \
         random order, and smoothed RTTs hide single slow answers; a capture shows both \
         (rto-lab advise --pcap)"
            .to_owned(),
    );
}

/// Adds warnings and notes about spurious retransmissions.
#[expect(clippy::cast_precision_loss, reason = "a share of two digits")]
fn warn_of(gathered: &mut Gathered, direction: &str, stats: &DirectionStats) {
    let share = |count: u64| percent(count as f64 / stats.connections.max(1) as f64);
    if stats.spurious > 0 {
        let (spurious, connections) = (stats.spurious, stats.connections);
        gathered.warnings.push(format!(
            "observed so far: {} in {} ({direction}): {}",
            counted(
                spurious,
                "spurious SYN or SYN-ACK retransmission",
                "spurious SYN or SYN-ACK retransmissions"
            ),
            counted(connections, "connection", "connections"),
            share(spurious)
        ));
    }
    if stats.undecided > 0 {
        gathered.warnings.push(format!(
            "{} ({direction}): unknown whether they were needed",
            counted(
                stats.undecided,
                "undecided SYN or SYN-ACK retransmission",
                "undecided SYN or SYN-ACK retransmissions"
            )
        ));
    }
    if stats.tail_loss_probes > 0 {
        gathered.notes.push(format!(
            "{} retransmitted a segment ({direction}, {} of the connections): spurious if \
             nothing was lost",
            counted(
                stats.tail_loss_probes,
                "tail loss probe",
                "tail loss probes"
            ),
            share(stats.tail_loss_probes)
        ));
    }
}

#[cfg(test)]
mod tests {
    use rto_agent_core::wire::types::{EntryView, SourceView};

    use super::*;

    fn entries(cidrs: &[(&str, &str)]) -> ListAnswer {
        let entry = |(cidr, policy): &(&str, &str)| EntryView {
            cidr: cidr.parse().unwrap(),
            policy: policy.parse().unwrap(),
            source: SourceView::File {
                path: "config.toml".into(),
                line: 1,
            },
            hits: 0,
            overrides: None,
        };
        ListAnswer {
            policies: [].into(),
            entries: cidrs.iter().map(entry).collect(),
            ..ListAnswer::default()
        }
    }

    #[test]
    fn unknown_cidr_is_refused_with_covering_entry() {
        let entries = entries(&[("10.0.0.0/8", "wide"), ("10.1.0.0/16", "near")]);
        let of = |cidr: &str| entry_policy(&cidr.parse().unwrap(), &entries);
        assert_eq!(of("10.1.0.0/16").unwrap().as_str(), "near");
        let error = of("10.1.2.0/24").unwrap_err().to_string();
        assert!(error.contains("rto-agent advise 10.1.0.0/16"), "{error}");
        let error = of("192.0.2.0/24").unwrap_err().to_string();
        assert!(error.contains("rto-agent list"), "{error}");
    }

    #[test]
    fn policy_without_counts_is_refused_with_the_fix() {
        let of = |policy: &str, answer: StatsAnswer| {
            let error = of_policy(&policy.parse().unwrap(), &entries(&[]), answer, 250);
            error.err().unwrap().to_string()
        };
        let off = of("near", StatsAnswer::default());
        assert!(off.contains("statistics = true"), "{off}");
        let on = StatsAnswer {
            on: true,
            policies: [("far".parse().unwrap(), PolicyStats::default())].into(),
            ..StatsAnswer::default()
        };
        let error = of("near", on.clone());
        assert!(
            error.contains("no active policy near; active policies: far"),
            "{error}"
        );
        let error = of("unmatched", on);
        assert!(error.contains("count_unmatched"), "{error}");
    }
}
