//! `rto-agent discover`.

use std::{
    collections::{BTreeMap, BTreeSet},
    process::ExitCode,
    time::Duration,
};

use rto_model::{
    distribution::Distribution,
    tune::{
        history::History,
        law::{self, LEAST_SAMPLES, Want},
        quantile::bounded_quantile_us,
    },
};

mod answer;
mod merge;
mod text;

use rto_agent_core::{
    advice::{DAY_MS, rounded},
    policy::{Cidr, HostFacts, InitialRtoSetting, Settings, units::format_duration},
    wire::discover::DiscoverAnswer,
};
use rto_agent_kernel::{datapath::probe, kernel::facts::host_facts};

use self::{
    answer::{Candidate, Discovery, Saved},
    merge::{Unit, is_special},
};
use super::{print, terminal};
use crate::{cli::Discover, client::Client, doctor::routes};

/// Outages that are so short that most connections attempted in one are established after it.
const OUTAGES_MS: [u64; 5] = [300, 1_000, 3_000, 10_000, 30_000];

pub(super) fn run(args: &Discover) -> anyhow::Result<ExitCode> {
    let answer: DiscoverAnswer = Client::new(&args.daemon.socket).get("/v1/discover")?;
    let host = host_facts(&probe::features())?;
    let mut warnings = Vec::new();
    let routes = routes::destinations().unwrap_or_else(|e| {
        warnings.push(format!(
            "the routes cannot be read ({e:#}): connections are not grouped by route"
        ));
        Vec::new()
    });
    let routes = routes
        .into_iter()
        .filter_map(|net| Cidr::containing(net.ip(), net.prefix()));
    let mut discovery = discovery(&answer, args, &routes.collect(), &host);
    discovery.warnings.append(&mut warnings);
    print(args.daemon.json, &discovery, || {
        text::text(&discovery, terminal::columns(args.table))
    })
}

fn discovery(
    answer: &DiscoverAnswer,
    args: &Discover,
    routes: &BTreeSet<Cidr>,
    host: &HostFacts,
) -> Discovery {
    let all = answer.prefixes.iter();
    let (special, counted): (Vec<_>, Vec<_>) = all.partition(|stats| is_special(&stats.prefix));
    let units = counted.into_iter().map(|stats| Unit {
        cidr: stats.prefix,
        is_route: false,
        seen: 1,
        connections: stats.connections,
        recovered: stats.recovered,
        times: stats.handshake.distribution(1),
    });
    let took_ms = answer.at_ms.saturating_sub(answer.since_ms);
    let units = merge::merged(units.collect(), routes);
    let candidates = units.iter();
    let candidates = candidates.map(|unit| Candidate::of(unit, answer.one_in, took_ms, host));
    let mut prefixes: Vec<_> = candidates.collect();
    prefixes.sort_by(Candidate::rank);
    let limit = usize::try_from(args.limit).unwrap_or(usize::MAX);
    let more = prefixes.len().saturating_sub(limit);
    prefixes.truncate(limit);
    let mut discovery = Discovery {
        at_ms: answer.at_ms,
        since_ms: answer.since_ms,
        hz: host.hz,
        one_in: answer.one_in,
        snippet: snippet(&prefixes),
        prefixes,
        more,
        covered: answer.covered,
        special: special.len(),
        warnings: Vec::new(),
        notes: Vec::new(),
    };
    if discovery.prefixes.is_empty() {
        return discovery;
    }
    if took_ms < DAY_MS {
        discovery.warnings.push(format!(
            "counted for only {}: SAVED A DAY is extrapolated",
            rounded(took_ms)
        ));
    }
    discovery.notes.extend([
        "SEEN is the number of /24 and /48 prefixes that had a connection; LOST and SAVED are \
         estimates; the range of SAVED is from losses in outages to independent losses"
            .to_owned(),
        "accepted connections save less, because the timer of a SYN-ACK is syn_ack_rto".to_owned(),
    ]);
    discovery
}

impl Candidate {
    fn of(unit: &Unit, one_in: u32, took_ms: u64, host: &HostFacts) -> Self {
        let (times, one_in) = (&unit.times, u64::from(one_in));
        let finite = |us: Option<u64>| us.filter(|us| *us < u64::MAX);
        let lost = unit.recovered.saturating_mul(one_in);
        let want = wanted(times, &law::Settings::new(host.hz));
        let saved = |jiffies| Saved::of(unit.recovered, one_in, jiffies, took_ms, host);
        Self {
            cidr: unit.cidr,
            is_route: unit.is_route,
            seen: unit.seen,
            connections: unit.connections.saturating_mul(one_in),
            lost,
            samples: times.count(),
            missing: LEAST_SAMPLES.saturating_sub(times.count()),
            p50_us: finite(times.quantile_us(0.5)),
            p999_us: finite(times.quantile_us(merge::SHARE)),
            p999_at_most_us: finite(bounded_quantile_us(times, 1.0 - merge::SHARE)),
            initial_rto_us: want.map(|jiffies| law::Settings::new(host.hz).micros(jiffies)),
            saved_s_per_day: want.map_or_else(Saved::default, saved),
        }
    }

    /// Prefixes with too few samples come last; the others are ordered by their savings.
    fn rank(&self, other: &Self) -> std::cmp::Ordering {
        let short = |one: &Self| one.missing > 0;
        short(self)
            .cmp(&short(other))
            .then((other.saved_s_per_day.independent).total_cmp(&self.saved_s_per_day.independent))
            .then(other.lost.cmp(&self.lost))
            .then(other.connections.cmp(&self.connections))
            .then(self.cidr.cmp(&other.cidr))
    }

    fn saves(&self) -> bool {
        self.saved_s_per_day.independent > 0.0
    }
}

/// The timer that the times allow, jiffies, by the law of automatic timers. `None` with too few
/// samples, and if it is not shorter than the kernel's.
fn wanted(times: &Distribution, law: &law::Settings) -> Option<u64> {
    let mut history = History::default();
    history.add(0, times, law.spurious);
    let want = Want::of(&history, law)?;
    (want.jiffies < law.largest()).then_some(want.jiffies)
}

impl Saved {
    /// The savings of a timer in jiffies, from a number of losses in one of `one_in` connections
    /// within `took_ms`.
    ///
    /// After an independent loss, the next copy arrives. In an outage, it arrives if the outage is
    /// over by then. So the other end of the range is the outage length that saves the least for
    /// each connection attempted in it.
    #[expect(clippy::cast_precision_loss, reason = "an estimate")]
    fn of(lost: u64, one_in: u64, jiffies: u64, took_ms: u64, host: &HostFacts) -> Self {
        if lost == 0 {
            return Self::default();
        }
        let independent = f64::from(host.hz) - jiffies as f64;
        let independent = independent / f64::from(host.hz);
        let (schedule, timers) = (host.syn_schedule(), host.syn_timers(jiffies));
        let of_outages = OUTAGES_MS.map(|ms| -schedule.compare(timers, 0..ms).mean_ms / 1e3);
        let outages = of_outages.into_iter().fold(independent, f64::min);
        // Bounds of a Poisson variable's mean at about 95 % confidence, from the count.
        let per_day = one_in as f64 * DAY_MS as f64 / took_ms.max(1) as f64;
        let [fewest, most] = [-1.0, 1.0].map(|by| ((lost as f64).sqrt() + by).powi(2) * per_day);
        Self {
            outages: outages * if outages < 0.0 { most } else { fewest },
            independent: independent * most,
        }
    }
}

/// Policies for all timers that would save time.
fn snippet(prefixes: &[Candidate]) -> Option<String> {
    let mut policies: BTreeMap<u64, Vec<Cidr>> = BTreeMap::new();
    for one in prefixes.iter().filter(|one| one.saves()) {
        let Some(us) = one.initial_rto_us else {
            continue;
        };
        policies.entry(us).or_default().push(one.cidr);
    }
    let policies = policies.into_iter().map(|(us, mut cidrs)| {
        let value = Duration::from_micros(us);
        cidrs.sort_unstable();
        let cidrs: Vec<_> = cidrs.iter().map(|cidr| format!("\"{cidr}\"")).collect();
        let settings = Settings {
            initial_rto: Some(InitialRtoSetting::Fixed(value)),
            ..Settings::default()
        };
        format!(
            "[policy.discovered-{}]\ncidrs = [{}]\n{}",
            format_duration(value),
            cidrs.join(", "),
            settings.to_toml()
        )
    });
    let policies: Vec<_> = policies.collect();
    (!policies.is_empty()).then(|| policies.join("\n"))
}

#[cfg(test)]
mod tests;
