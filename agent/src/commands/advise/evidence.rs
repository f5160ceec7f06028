//! Evidence for advice: from the daemon, from several hosts, or from a capture.

use std::{
    collections::BTreeSet,
    fs::File,
    io::{self, BufReader, Read},
    net::IpAddr,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, bail, ensure};
use rto_advice::{
    advice::{Handshakes, RTO_MIN_US, RoundTrips},
    estimator::Sample,
};
use rto_agent_core::{
    policy::{Cidr, PolicyName, Settings, compile::EffectiveSetting, units::parse_duration},
    printable::{self, counted},
    wire::{
        stats::{ArmStats, DirectionStats, PolicyStats, StatsAnswer},
        types::{ListAnswer, LookupAnswer},
    },
};
use rto_model::{distribution::Distribution, syn::INITIAL_RTO_US};
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
    /// A packet capture.
    Capture {
        file: PathBuf,
        /// The only peers considered; empty: all peers.
        cidrs: Vec<Cidr>,
        packets: u64,
        /// Times of the first and the last packet, Unix microseconds.
        #[serde(skip_serializing_if = "Option::is_none")]
        began_us: Option<i64>,
        #[serde(skip_serializing_if = "Option::is_none")]
        ended_us: Option<i64>,
        /// Directions of connections that were examined.
        flows: usize,
        /// Segments that these sent, and segments sent again.
        segments: u64,
        retransmitted: u64,
    },
}

impl Source {
    /// The policy that a suggestion is for, if there is one, and its CIDRs.
    pub(super) fn policy(&self) -> (Option<PolicyName>, Vec<Cidr>) {
        match self {
            Self::Statistics { policy, cidrs, .. } if *policy != PolicyName::unmatched() => {
                (Some(policy.clone()), cidrs.clone())
            }
            // The CIDRs are unknown, because each of these hosts has its own entries.
            Self::Prometheus { policy, .. } if *policy != PolicyName::unmatched() => {
                (Some(policy.clone()), Vec::new())
            }
            Self::Statistics { .. } | Self::Prometheus { .. } => (None, Vec::new()),
            Self::Capture { cidrs, .. } => (None, cidrs.clone()),
        }
    }
}

/// One kind of times, in one direction.
#[derive(Debug, Serialize)]
pub(super) struct Evidence {
    /// From the daemon: "connect_time" (including losses, for connections with the policy's
    /// settings), "path_rtt" (without losses, both arms) and "srtt" (smoothed RTT). From a capture:
    /// "handshake" (without losses), "unsampled" (how long a handshake without a round trip was
    /// waited for) and "rtt" (of each ACK).
    pub(super) what: &'static str,
    /// "active", "passive" or "unknown".
    pub(super) direction: &'static str,
    pub(super) samples: u64,
    /// Quantiles, microseconds. From a histogram they are upper bounds of buckets, absent for the
    /// last bucket, which has none.
    pub(super) p50_us: Option<u64>,
    pub(super) p90_us: Option<u64>,
    pub(super) p99_us: Option<u64>,
    pub(super) p999_us: Option<u64>,
    pub(super) longest_us: Option<u64>,
}

impl Evidence {
    fn of(what: &'static str, direction: &'static str, times: &Distribution) -> Self {
        let quantile = |share| times.quantile_us(share).filter(|us| *us < u64::MAX);
        Self {
            what,
            direction,
            samples: times.count(),
            p50_us: quantile(0.5),
            p90_us: quantile(0.9),
            p99_us: quantile(0.99),
            p999_us: quantile(0.999),
            longest_us: quantile(1.0),
        }
    }
}

/// Round trips of established connections.
#[derive(Debug)]
pub(super) enum Times {
    Unordered(Distribution),
    Flows(Vec<Vec<Sample>>),
}

impl Times {
    pub(super) fn is_empty(&self) -> bool {
        match self {
            Self::Unordered(times) => times.count() == 0,
            Self::Flows(flows) => flows.is_empty(),
        }
    }

    pub(super) fn as_model(&self) -> RoundTrips<'_> {
        match self {
            Self::Unordered(times) => RoundTrips::Unordered(times),
            Self::Flows(flows) => RoundTrips::Flows(flows),
        }
    }
}

/// The times of all connections, and of each direction if there are several.
pub(super) struct ByDirection<T> {
    pub(super) all: T,
    pub(super) each: Vec<(&'static str, T)>,
}

impl<T> ByDirection<T> {
    pub(super) fn new(
        all: T,
        each: impl IntoIterator<Item = (&'static str, T)>,
        is_empty: impl Fn(&T) -> bool,
    ) -> Self {
        let mut each: Vec<_> = each
            .into_iter()
            .filter(|(_, times)| !is_empty(times))
            .collect();
        if each.len() == 1 {
            each.clear();
        }
        Self { all, each }
    }
}

impl ByDirection<Handshakes> {
    pub(super) fn of(each: impl IntoIterator<Item = (&'static str, Handshakes)>) -> Self {
        let each: Vec<_> = each.into_iter().collect();
        let mut all = Handshakes::default();
        for (_, handshakes) in &each {
            all.took.extend(&handshakes.took);
            all.longer_than.extend(&handshakes.longer_than);
        }
        Self::new(all, each, |handshakes| handshakes.count() == 0)
    }
}

/// The active values, microseconds.
#[derive(Debug)]
pub(super) struct Present {
    pub(super) initial_rto_us: u64,
    pub(super) rto_min_us: u64,
}

impl Present {
    /// The kernel's defaults.
    pub(super) const KERNEL: Self = Self {
        initial_rto_us: INITIAL_RTO_US,
        rto_min_us: RTO_MIN_US,
    };

    fn of(effects: &[EffectiveSetting]) -> Self {
        let of = |setting: &str, kernel_us: u64| {
            let effect = effects.iter().find(|effect| effect.setting == setting);
            let duration = effect.and_then(|effect| parse_duration(&effect.effective).ok());
            duration.map_or(kernel_us, |d| {
                u64::try_from(d.as_micros()).unwrap_or(u64::MAX)
            })
        };
        Self {
            initial_rto_us: of("initial_rto", INITIAL_RTO_US),
            rto_min_us: of("rto_min", RTO_MIN_US),
        }
    }
}

/// Everything that advice is based on.
pub(super) struct Gathered {
    pub(super) source: Source,
    pub(super) present: Present,
    /// The policy's settings.
    pub(super) settings: Settings,
    /// The time observed, milliseconds, if known; for several hosts the shortest.
    pub(super) observed_ms: Option<u64>,
    pub(super) evidence: Vec<Evidence>,
    pub(super) handshakes: ByDirection<Handshakes>,
    pub(super) round_trips: ByDirection<Times>,
    pub(super) warnings: Vec<String>,
    pub(super) notes: Vec<String>,
}

/// Opens the file of an option ("-": standard input); returns its name for errors, too.
pub(super) fn open(
    option: &str,
    path: &Path,
) -> anyhow::Result<(String, BufReader<Box<dyn Read>>)> {
    let title = format!("{option} {}", printable::path(path));
    let input: Box<dyn Read> = match path == Path::new("-") {
        true => Box::new(io::stdin().lock()),
        false => Box::new(File::open(path).with_context(|| title.clone())?),
    };
    Ok((title, BufReader::new(input)))
}

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
    let source = Source::Statistics {
        policy: policy.clone(),
        cidrs: own.iter().map(|entry| entry.cidr).collect(),
        at_ms: answer.at_ms,
        rtt_sampling: answer.rtt_sampling.clone(),
    };
    let mut gathered = Gathered {
        present: set.map_or(Present::KERNEL, |policy| Present::of(&policy.effects)),
        settings: set
            .map(|policy| policy.settings.clone())
            .unwrap_or_default(),
        observed_ms: stats
            .since_ms
            .map(|since_ms| answer.at_ms.saturating_sub(since_ms)),
        ..Gathered::of(source)
    };
    if own.len() > 1 {
        gathered.notes.push(format!(
            "statistics are kept per policy: these cover all {} CIDRs of {policy}; to see one CIDR \
             separately, give it its own policy",
            own.len()
        ));
    }
    gathered.count(&stats, answer.sampling, &answer.rtt_sampling);
    Ok(gathered)
}

impl Gathered {
    /// Empty evidence, with the kernel's own timers as the active values.
    pub(super) fn of(source: Source) -> Self {
        Self {
            source,
            present: Present::KERNEL,
            settings: Settings::default(),
            observed_ms: None,
            evidence: Vec::new(),
            handshakes: ByDirection::of([]),
            round_trips: ByDirection {
                all: Times::Flows(Vec::new()),
                each: Vec::new(),
            },
            warnings: Vec::new(),
            notes: Vec::new(),
        }
    }

    /// Adds the statistics of a policy. The timer does not change the path, so path RTTs include
    /// both arms; all other counts come from the treated arm.
    pub(super) fn count(&mut self, stats: &PolicyStats, sampling: u32, rtt_sampling: &str) {
        if rtt_sampling == "off" {
            self.warnings.push(
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
            self.warn_of(direction, stats);
        }
        let control = stats.control.iter().flat_map(ArmStats::directions);
        for ((_, times), (_, stats)) in handshakes.iter_mut().zip(control) {
            times.extend(&stats.path_rtt.distribution(1));
        }
        self.evidence.extend(rows("connect_time", &connects));
        self.evidence.extend(rows("path_rtt", &handshakes));
        self.evidence.extend(rows("srtt", &round_trips));
        let handshakes = handshakes.into_iter();
        self.handshakes =
            ByDirection::of(handshakes.map(|(direction, times)| (direction, times.into())));
        let mut all = Distribution::default();
        for (_, times) in &round_trips {
            all.extend(times);
        }
        let each = round_trips.into_iter();
        let each = each.map(|(direction, times)| (direction, Times::Unordered(times)));
        self.round_trips = ByDirection::new(Times::Unordered(all), each, Times::is_empty);
        self.notes.push(
            "the order of the samples is unknown: for rto_min, Linux's estimator runs over RTTs in \
             random order, and smoothed RTTs hide single slow answers; a capture shows both \
             (rto-lab advise --pcap)"
                .to_owned(),
        );
    }

    /// Adds warnings and notes about spurious retransmissions.
    #[expect(clippy::cast_precision_loss, reason = "a share of two digits")]
    fn warn_of(&mut self, direction: &str, stats: &DirectionStats) {
        let share = |count: u64| percent(count as f64 / stats.connections.max(1) as f64);
        if stats.spurious > 0 {
            let (spurious, connections) = (stats.spurious, stats.connections);
            self.warnings.push(format!(
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
            self.warnings.push(format!(
                "{} ({direction}): unknown whether they were needed",
                counted(
                    stats.undecided,
                    "undecided SYN or SYN-ACK retransmission",
                    "undecided SYN or SYN-ACK retransmissions"
                )
            ));
        }
        if stats.tail_loss_probes > 0 {
            self.notes.push(format!(
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
}

/// A share in per cent, with two digits: "0.1%", "12%", "0.0031%".
pub(super) fn percent(share: f64) -> String {
    let percent = share * 100.0;
    if percent == 0.0 {
        return "0%".to_owned();
    }
    if percent >= 99.95 {
        return "100%".to_owned();
    }
    let decimals = [10.0, 1.0, 0.1, 0.01, 0.001]
        .iter()
        .position(|least| percent >= *least)
        .unwrap_or(5);
    let text = format!("{percent:.decimals$}");
    let trimmed = if decimals > 0 {
        text.trim_end_matches('0').trim_end_matches('.')
    } else {
        &text
    };
    format!("{trimmed}%")
}

pub(super) fn rows(
    what: &'static str,
    directions: &[(&'static str, Distribution)],
) -> impl Iterator<Item = Evidence> {
    let with_any = directions.iter().filter(|(_, times)| times.count() > 0);
    with_any.map(move |(direction, times)| Evidence::of(what, direction, times))
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
    fn a_cidr_is_an_entry_or_refused_with_the_one_meant() {
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
            let error = of_policy(&policy.parse().unwrap(), &entries(&[]), answer);
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
