//! `rto-lab predict`.

use std::{ops::RangeInclusive, path::PathBuf, time::Duration};

use anyhow::{Context as _, ensure};
use clap::Args;
use rto_agent_common::syn::least_initial_rto;
use rto_model::{
    retransmit::{LinuxTimers, RTO_MAX_US, RTO_MIN_US, THIN_LINEAR_RETRIES},
    syn::syn_ack_rto_auto,
};
use rto_testbed::agent::find;
use serde::Serialize;

use super::print;
use crate::{
    handshake,
    outage::{self, Model, Version},
    policy::{EffectiveSetting, Host, Policy},
    predict::{self, Deadline, Prediction},
    report::{self, Table},
    summary::{micros, millis},
};

/// Maximum of disruptions and of the other durations: no connection waits longer.
const LONGEST: Duration = Duration::from_secs(3600);

/// An initial RTO, up to TCP_RTO_MAX.
const INITIAL_RTO_US: RangeInclusive<u64> = 1..=RTO_MAX_US;
/// TCP_BPF_RTO_MIN (`bpf_sol_tcp_setsockopt()`, net/core/filter.c, Linux 6.12), which is rounded up to whole jiffies.
const RTO_MINS_US: RangeInclusive<u64> = 1..=RTO_MIN_US;
/// TCP_RTO_MAX_MS (`do_tcp_setsockopt()`, Linux 6.15).
const RTO_MAXS_US: RangeInclusive<u64> = 1_000_000..=RTO_MAX_US;

/// Outages that end between the kernel's own SYNs and just before them.
const OUTAGES: &str = "50ms,300ms,600ms,850ms,970ms,1400ms,1970ms,2500ms,2970ms,3500ms,3970ms,4500ms,4970ms,6000ms,6970ms,9000ms,10970ms,13000ms,18970ms";

/// `rto-lab predict`.
#[derive(Debug, Args)]
pub struct Predict {
    /// A policy of the agent's configuration, as applied on this host, instead of the values below
    #[arg(long, short, value_name = "NAME", conflicts_with_all = ["initial_rto", "syn_ack_rto", "rto_min", "rto_restart", "thin", "linear_retries", "rto_max", "hz"])]
    policy: Option<String>,
    /// The agent's configuration file
    #[arg(
        long,
        short,
        env = "RTO_AGENT_CONFIG",
        default_value = "/etc/rto-agent/config.toml"
    )]
    config: PathBuf,
    /// The agent's binary, for --policy [default: next to this one, or in PATH]
    #[arg(long, value_name = "PATH", env = "RTO_AGENT_BIN")]
    agent: Option<PathBuf>,
    /// Timeout of the first SYN; SYN-ACKs and SYN retransmissions follow as with "auto"
    #[arg(long, value_name = "DURATION", value_parser = within(INITIAL_RTO_US))]
    initial_rto: Option<Duration>,
    /// Timeout of the first SYN-ACK
    #[arg(long, value_name = "DURATION", value_parser = within(INITIAL_RTO_US))]
    syn_ack_rto: Option<Duration>,
    /// Lower bound of the RTO
    #[arg(long, value_name = "DURATION", value_parser = within(RTO_MINS_US), default_value = "200ms")]
    rto_min: Duration,
    /// Lower --rto-min by the round-trip time, as for a single outstanding request (experimental)
    #[arg(long)]
    rto_restart: bool,
    /// Linear timeouts of a thin stream
    #[arg(long)]
    thin: bool,
    /// Consecutive timeouts before a thin stream's interval doubles
    #[arg(long, value_name = "N", requires = "thin", value_parser = clap::value_parser!(u32).range(1..=6), default_value_t = THIN_LINEAR_RETRIES)]
    linear_retries: u32,
    /// Upper bound of the RTO
    #[arg(long, value_name = "DURATION", value_parser = within(RTO_MAXS_US), default_value = "120s")]
    rto_max: Duration,
    /// Smoothed round-trip time of the connection
    #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "200us")]
    rtt: Duration,
    /// Variation of the round-trip time as used for the RTO: four mean deviations
    #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "0s")]
    rttvar: Duration,
    /// No tail loss probes (net.ipv4.tcp_early_retrans = 0)
    #[arg(long)]
    no_tlp: bool,
    /// Tail loss probes wait 200 ms instead of rto_min, as before Linux 6.11
    #[arg(long, conflicts_with = "no_tlp")]
    old_tlp: bool,
    /// Jiffies per second [default: this kernel's]
    #[arg(long, value_parser = clap::value_parser!(u64).range(24..=10_000))]
    hz: Option<u64>,
    /// Disruptions: comma-separated durations, or a range, which means 1, 2 and 5 of each power of ten in it
    #[arg(long, short, value_name = "LIST|FROM..TO", default_value = "10ms..20s")]
    disruption: String,
    /// Predict which rto_min lets a retransmission of a lost request be answered within this time; with --service
    #[arg(long, value_name = "DURATION", value_parser = duration, requires = "service")]
    #[arg(conflicts_with_all = ["disruption", "outage", "policy", "chart", "csv"])]
    deadline: Option<Duration>,
    /// With --deadline: how long the server takes at most
    #[arg(long, value_name = "DURATION", value_parser = duration, requires = "deadline")]
    service: Option<Duration>,
    /// Predict the time of connect(), by the duration for which SYNs or SYN-ACKs are lost: with --initial-rto, or a
    /// policy that has one
    #[arg(long, value_name = "LIST|FROM..TO", num_args = 0..=1, default_missing_value = OUTAGES, conflicts_with = "disruption")]
    outage: Option<String>,
    /// With --outage: use this kernel version. 6.5 sends the first SYNs every second [default: this kernel's]
    #[arg(long, value_name = "VERSION", requires = "outage")]
    linux: Option<Version>,
    /// Print lines of comma-separated values
    #[arg(long, conflicts_with = "json")]
    csv: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Also draw charts: idle time on logarithmic and on linear axes, and the ratio
    #[arg(long, value_name = "FILE.svg|FILE.html")]
    chart: Option<PathBuf>,
}

/// The output of `--json`.
#[derive(Serialize)]
struct Answer {
    hz: u64,
    srtt_us: u64,
    /// The effective settings of the policy on this host.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    effects: Vec<EffectiveSetting>,
    /// Handshakes; empty if the kernel's timers are used.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    handshakes: Vec<handshake::Prediction>,
    predictions: Vec<Prediction>,
}

pub(super) fn run(args: &Predict) -> anyhow::Result<()> {
    ensure!(args.rto_min <= args.rto_max, "--rto-max is below --rto-min");
    let policy = match (&args.policy, args.hz) {
        (Some(name), _) => {
            let agent = find(args.agent.as_deref())?;
            Policy::read(&agent, &args.config, name)?
        }
        (None, Some(hz)) => values(args, Host::with_defaults(hz)),
        (None, None) => values(args, Host::here()?),
    };
    if let Some(outages) = &args.outage {
        return through_outages(args, &policy, outages);
    }
    let hz = policy.host.hz;
    if let (Some(deadline), Some(service)) = (args.deadline, args.service) {
        let near = LinuxTimers::near(hz, micros(args.rtt));
        let rows = predict::deadlines(&near, deadline, service);
        return print(args.json, &rows, || deadline_table(&rows, hz, service));
    }
    let handshakes = policy.handshake();
    let handshakes = handshakes.map(|own| own.against(&policy.host.handshake()));
    let kernel = LinuxTimers {
        rttvar_us: micros(args.rttvar),
        ..LinuxTimers::near(hz, micros(args.rtt))
    };
    let own = own(args, &policy, kernel);
    let disruptions = durations("--disruption", &args.disruption)?;
    if let Some(path) = &args.chart {
        let dense = predict::between(&disruptions);
        let title = match &args.policy {
            Some(name) => format!("policy {name}"),
            None => format!("rto_min {}", humantime::format_duration(args.rto_min)),
        };
        let charts = predict::charts(&title, &predict::predict(&kernel, &own, &dense));
        report::write_charts(path, "rto-lab predict", &charts)
            .with_context(|| format!("--chart {}", path.display()))?;
    }
    let answer = Answer {
        hz,
        srtt_us: kernel.srtt_us,
        effects: policy.effects.clone(),
        handshakes: handshakes.unwrap_or_default(),
        predictions: predict::predict(&kernel, &own, &disruptions),
    };
    let text = match args.csv {
        true => report::csv(&answer.predictions)?,
        false => {
            let handshakes = match answer.handshakes.is_empty() {
                true => String::new(),
                false => handshake_table(&answer.handshakes).text() + "\n",
            };
            policy.text() + "\n" + &handshakes + &table(&answer.predictions).text()
        }
    };
    print(args.json, &answer, || text)
}

/// The output of `--outage --json`.
#[derive(Serialize)]
struct OutageAnswer {
    hz: u64,
    effects: Vec<EffectiveSetting>,
    predictions: Vec<outage::Prediction>,
    /// Comparison over outages up to the longest one.
    against_kernel: Vec<outage::Against>,
}

fn through_outages(args: &Predict, policy: &Policy, outages: &str) -> anyhow::Result<()> {
    let no_timer = "--outage: no initial RTO is set: give --initial-rto, or a policy with one";
    let own = policy.handshake().context(no_timer)?;
    // Another version has its own defaults, not this host's sysctls.
    let (version, host) = match args.linux {
        Some(version) => (version, Host::with_defaults(policy.host.hz)),
        None => (Version::here()?, policy.host),
    };
    let model = Model::new(version, &host.handshake(), &own);
    let outages = durations("--outage", outages)?;
    let longest = outages.iter().max().copied().unwrap_or_default();
    if let Some(path) = &args.chart {
        let charts = outage::charts(&model.predict(&outage::evenly(millis(longest))));
        report::write_charts(path, "rto-lab predict --outage", &charts)
            .with_context(|| format!("--chart {}", path.display()))?;
    }
    let outages: Vec<f64> = outages.into_iter().map(millis).collect();
    let answer = OutageAnswer {
        hz: model.hz,
        effects: policy.effects.clone(),
        predictions: model.predict(&outages),
        against_kernel: model.against(millis(longest)),
    };
    let text = match args.csv {
        true => report::csv(&answer.predictions)?,
        false => [
            policy.text(),
            outage::table(&answer.predictions).text(),
            outage::against_table(&answer.against_kernel).text(),
        ]
        .join("\n"),
    };
    print(args.json, &answer, || text)
}

/// The effective values at this HZ, as in `rto-agent check`: TCP_BPF_RTO_MIN and TCP_RTO_MAX_MS are rounded up to whole
/// jiffies, the former to at least two.
fn values(args: &Predict, host: Host) -> Policy {
    let hz = host.hz;
    let text = |time| {
        humantime::format_duration(time)
            .to_string()
            .replace(' ', "")
    };
    let jiffies = |asked, least| (micros(asked) * hz).div_ceil(1_000_000).max(least);
    let mut effects = Vec::new();
    let mut add = |setting: &str, asked: String, jiffies: Option<u64>| {
        let effective = jiffies.map(|n| text(Duration::from_micros(n * 1_000_000 / hz)));
        effects.push(EffectiveSetting {
            setting: setting.to_owned(),
            effective: effective.unwrap_or_else(|| asked.clone()),
            asked,
            jiffies,
        });
    };
    if let Some(asked) = args.initial_rto {
        let least = least_initial_rto(u32::try_from(hz).unwrap_or(u32::MAX));
        let initial_rto = jiffies(asked, least.into());
        add("initial_rto", text(asked), Some(initial_rto));
        add("syn_retries", "auto".to_owned(), None);
        if args.syn_ack_rto.is_none() {
            let auto = syn_ack_rto_auto(initial_rto, hz, host.tcp_synack_retries);
            add("syn_ack_rto", "auto".to_owned(), Some(auto));
        }
    }
    if let Some(asked) = args.syn_ack_rto {
        add("syn_ack_rto", text(asked), Some(jiffies(asked, 1)));
    }
    let rto_min = jiffies(args.rto_min, 2);
    add("rto_min", text(args.rto_min), Some(rto_min));
    if args.rto_restart {
        add("rto_restart", "on".to_owned(), None);
    }
    if args.thin {
        add("thin_linear", "true".to_owned(), None);
        add("linear_retries", args.linear_retries.to_string(), None);
    }
    if micros(args.rto_max) < RTO_MAX_US {
        add(
            "rto_max",
            text(args.rto_max),
            Some(jiffies(args.rto_max, 1)),
        );
    }
    Policy { host, effects }
}

fn own(args: &Predict, policy: &Policy, kernel: LinuxTimers) -> LinuxTimers {
    let own = policy.applied_to(kernel);
    LinuxTimers {
        probe_after_us: match (args.no_tlp, args.old_tlp) {
            (true, _) => None,
            (_, true) => Some(RTO_MIN_US),
            _ => own.probe_after_us,
        },
        ..own
    }
}

fn table(predictions: &[Prediction]) -> Table {
    let mut table = Table::new(
        "predict",
        "",
        &["lost for, ms", "kernel, ms", "with it, ms", "ratio", ""],
    );
    for p in predictions {
        table.row([
            p.disruption_ms.to_string(),
            format!("{:.1}", p.kernel_ms),
            format!("{:.1}", p.policy_ms),
            format!("{:.2}", p.policy_ms / p.kernel_ms),
            if p.worse { "worse" } else { "" }.to_owned(),
        ]);
    }
    table
}

/// The rows, and what the peer needs.
fn deadline_table(rows: &[Deadline], hz: u64, service: Duration) -> String {
    let columns = [
        "rto_min, ms",
        "retransmitted after, ms",
        "answered after, ms",
        "retransmissions in time",
    ];
    let mut table = Table::new("deadline", "", &columns);
    for row in rows {
        table.row([
            row.rto_min_ms.to_string(),
            format!("{:.1}", row.retransmission_ms),
            format!("{:.1}", row.answer_ms),
            row.in_time.to_string(),
        ]);
    }
    let best = rows.iter().rfind(|row| row.in_time > 0);
    let advice = match best {
        Some(row) if row.retransmission_ms < millis(service) => format!(
            "rto_min = \"{}ms\". A request that takes longer than that is retransmitted without a loss, unless the \
             server acknowledges it before: set delack_max there to {} ms less.",
            row.rto_min_ms,
            1000 / hz.max(1)
        ),
        Some(row) => format!("rto_min = \"{}ms\".", row.rto_min_ms),
        None => format!("No value leaves time for a retransmission at HZ={hz}."),
    };
    table.text() + "\n" + &advice + "\n"
}

fn handshake_table(predictions: &[handshake::Prediction]) -> Table {
    let columns = ["handshake", "kernel, ms", "with it, ms", "ratio", ""];
    let mut table = Table::new("handshakes", "", &columns);
    for p in predictions {
        let ms = |ms: Option<f64>| ms.map_or_else(|| "never".to_owned(), |ms| format!("{ms:.1}"));
        let ratio = p.kernel_ms.zip(p.policy_ms);
        let ratio = ratio.map(|(kernel, policy)| policy / kernel);
        let remark = match ratio {
            Some(ratio) if p.is_lifetime && ratio < 1.0 => "shorter",
            Some(ratio) if !p.is_lifetime && ratio > 1.0 => "worse",
            None if p.kernel_ms.is_some() => "worse",
            _ => "",
        };
        table.row([
            p.text.to_owned(),
            ms(p.kernel_ms),
            ms(p.policy_ms),
            ratio.map(|ratio| format!("{ratio:.2}")).unwrap_or_default(),
            remark.to_owned(),
        ]);
    }
    table
}

/// The durations of an option.
fn durations(option: &str, text: &str) -> anyhow::Result<Vec<Duration>> {
    let one = |text: &str| {
        let duration = duration(text.trim()).map_err(anyhow::Error::msg);
        duration.with_context(|| format!("{option} {text}"))
    };
    let Some((from, to)) = text.split_once("..") else {
        return text.split(',').map(one).collect();
    };
    let (from, to) = (one(from)?, one(to)?);
    let within = predict::steps(from, to);
    ensure!(
        !within.is_empty(),
        "{option} {text}: the range contains neither 1, 2 nor 5 of any power of ten; give a list"
    );
    Ok(within)
}

/// Parses a duration in a range of microseconds.
fn within(us: RangeInclusive<u64>) -> impl Fn(&str) -> Result<Duration, String> + Clone {
    move |text| {
        let given = duration(text)?;
        if us.contains(&micros(given)) {
            return Ok(given);
        }
        let end = |us: &u64| humantime::format_duration(Duration::from_micros(*us)).to_string();
        let (from, to) = (end(us.start()), end(us.end()));
        Err(format!("{text}: must be between {from} and {to}"))
    }
}

/// Parses a duration from 0s to one hour.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    let duration = humantime::parse_duration(text)
        .map_err(|e| format!("{text}: {e}; a number and a unit, such as 10ms"))?;
    if duration > LONGEST {
        return Err(format!("{text}: at most 1h"));
    }
    Ok(duration)
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::cli::{Cli, Verb};

    fn parsed(line: &str) -> Predict {
        let words = ["rto-lab", "predict"].into_iter().chain(line.split(' '));
        match Cli::parse_from(words).verb {
            Verb::Predict(args) => args,
            _ => unreachable!(),
        }
    }

    #[test]
    fn flags_give_kernel_timers() {
        let own = |line: &str, kernel| {
            let args = parsed(line);
            own(&args, &values(&args, Host::with_defaults(250)), kernel)
        };
        let near = LinuxTimers::near(250, 200);
        let fewer = own("--rto-min 8ms --thin --linear-retries 2", near);
        assert_eq!(fewer.linear_retries, 2);
        let far = LinuxTimers::near(250, 60_000);
        let restarted = own("--rto-min 100ms --rto-restart", far);
        assert_eq!(restarted, far.with_rto_min(40_000));
        let with = own("--rto-min 8ms --thin --rto-max 1s", near);
        let expected = LinuxTimers {
            rto_max_us: 1_000_000,
            ..near.with_rto_min(8_000).thin()
        };
        assert_eq!(with, expected);
        let without = own("--rto-min 8ms --no-tlp", near);
        assert_eq!(without.probe_after_us, None);
        let old = own("--rto-min 8ms --old-tlp", near);
        assert_eq!(old.probe_after_us, Some(RTO_MIN_US));
    }

    #[test]
    fn values_are_rounded_and_refused_as_the_kernel_does() {
        let host = Host::with_defaults(250);
        let policy = values(&parsed("--initial-rto 100ms"), host);
        let own = policy.handshake().unwrap();
        assert_eq!((own.syn.initial_rto, own.syn_ack_rto), (25, 124));
        assert_eq!(own.gives_up, host.handshake().gives_up);
        let table = handshake_table(&own.against(&host.handshake()));
        insta::assert_snapshot!("handshakes", table.text());
        let text = values(&parsed("--rto-min 5ms --rto-max 10s"), host).text();
        assert!(text.contains("5ms -> 8ms, 2 jiffies at HZ=250"), "{text}");
        for (line, message) in [
            ("--rto-min 201ms", "must be between 1us and 200ms"),
            ("--rto-min 0s", "must be between"),
            ("--rto-max 500ms", "must be between 1s and 2m"),
        ] {
            let words = ["rto-lab", "predict"].into_iter().chain(line.split(' '));
            let error = Cli::try_parse_from(words).unwrap_err().to_string();
            assert!(error.contains(message), "{line}: {error}");
        }
    }

    #[test]
    fn table_marks_worse_predictions() {
        let near = LinuxTimers::near(250, 200);
        let ms = Duration::from_millis;
        let own = near.with_rto_min(50_000);
        let predictions = predict::predict(&near, &own, &[ms(20), ms(200)]);
        insta::assert_snapshot!(table(&predictions).text());
        let csv = report::csv(&predictions).unwrap();
        let heading = "disruption_ms,kernel_ms,policy_ms,worse\n20.0,";
        assert!(csv.starts_with(heading), "{csv}");
    }

    #[test]
    fn invalid_lists_are_refused() {
        for (text, message) in [
            ("", "--disruption"),
            ("10", "such as 10ms"),
            ("2h", "at most 1h"),
            ("30ms..40ms", "give a list"),
        ] {
            let error = format!("{:#}", durations("--disruption", text).unwrap_err());
            assert!(error.contains(message), "{text}: {error}");
        }
    }
}
