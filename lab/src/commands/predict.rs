//! `rto-lab predict`.

use std::{fs, path::PathBuf, time::Duration};

use anyhow::{Context as _, ensure};
use clap::Args;
use rto_model::{
    chart,
    predict::{self, Prediction},
    retransmit::{LinuxTimers, RTO_MAX_US, RTO_MIN_US, THIN_LINEAR_RETRIES},
};
use rto_testbed::{agent::find, machine::Machine};
use serde::Serialize;

use super::print;
use crate::{
    policy::{EffectiveSetting, Policy},
    report::Table,
};

/// Longest disruption, and longest of the other durations: no connection waits longer.
const LONGEST: Duration = Duration::from_secs(3600);

/// `rto-lab predict`.
#[derive(Debug, Args)]
pub struct Predict {
    /// A policy of the agent's configuration, as it is on this host; or else the values below
    #[arg(long, short, value_name = "NAME", conflicts_with_all = ["rto_min", "rto_restart", "thin", "linear_retries", "rto_max", "hz"])]
    policy: Option<String>,
    /// The agent's configuration file
    #[arg(
        long,
        short,
        env = "RTO_AGENT_CONFIG",
        default_value = "/etc/rto-agent/config.toml"
    )]
    config: PathBuf,
    /// The agent's binary, for --policy [default: beside this one, or on the path]
    #[arg(long, value_name = "PATH", env = "RTO_AGENT_BIN")]
    agent: Option<PathBuf>,
    /// Lower bound of the RTO
    #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "200ms")]
    rto_min: Duration,
    /// Lower --rto-min by the round-trip time, as a lone request has it (experimental)
    #[arg(long)]
    rto_restart: bool,
    /// Linear timeouts of a thin stream
    #[arg(long)]
    thin: bool,
    /// Timeouts in a row before a thin stream's interval doubles
    #[arg(long, value_name = "N", requires = "thin", value_parser = clap::value_parser!(u32).range(1..=6), default_value_t = THIN_LINEAR_RETRIES)]
    linear_retries: u32,
    /// Upper bound of the RTO
    #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "120s")]
    rto_max: Duration,
    /// Smoothed round-trip time of the connection
    #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "200us")]
    rtt: Duration,
    /// Variation of the round-trip time as the RTO has it: four mean deviations
    #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "0s")]
    rttvar: Duration,
    /// No tail loss probes (net.ipv4.tcp_early_retrans = 0)
    #[arg(long)]
    no_tlp: bool,
    /// Tail loss probes wait for 200 ms instead of rto_min, as before Linux 6.11
    #[arg(long, conflicts_with = "no_tlp")]
    old_tlp: bool,
    /// Jiffies a second [default: this kernel's]
    #[arg(long, value_parser = clap::value_parser!(u64).range(24..=10_000))]
    hz: Option<u64>,
    /// Disruptions: durations separated by commas, or a range, of which 1, 2 and 5 of each power of ten
    /// are taken
    #[arg(long, short, value_name = "LIST|FROM..TO", default_value = "10ms..20s")]
    disruption: String,
    /// Print lines of comma-separated values
    #[arg(long, conflicts_with = "json")]
    csv: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Draw it as well: idle time on logarithmic and on linear axes, and the improvement
    #[arg(long, value_name = "FILE.svg|FILE.html")]
    chart: Option<PathBuf>,
}

/// What `--json` prints.
#[derive(Serialize)]
struct Answer {
    hz: u64,
    srtt_us: u64,
    /// What the policy's settings become on this host.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    effects: Vec<EffectiveSetting>,
    predictions: Vec<Prediction>,
}

pub(super) fn run(args: &Predict) -> anyhow::Result<()> {
    ensure!(
        args.rto_min <= args.rto_max,
        "--rto-max is below --rto-min: no RTO lies between"
    );
    let policy = match &args.policy {
        Some(name) => {
            let agent = find(args.agent.as_deref())?;
            Some(Policy::read(&agent, &args.config, name)?)
        }
        None => None,
    };
    let hz = match (&policy, args.hz) {
        (Some(policy), _) => policy.hz,
        (None, Some(hz)) => hz,
        (None, None) => Machine::here()?.hz,
    };
    let kernel = LinuxTimers {
        rttvar_us: micros(args.rttvar),
        ..LinuxTimers::near(hz, micros(args.rtt))
    };
    let own = match &policy {
        Some(policy) => policy.applied_to(kernel),
        None => own(args, kernel),
    };
    let disruptions = disruptions(&args.disruption)?;
    if let Some(path) = &args.chart {
        let dense = predict::between(&disruptions);
        let title = match &args.policy {
            Some(name) => format!("policy {name}"),
            None => format!("rto_min {}", humantime::format_duration(args.rto_min)),
        };
        let charts = predict::charts(&title, &predict::predict(&kernel, &own, &dense));
        let ending = path.extension().and_then(|e| e.to_str()).unwrap_or("");
        let text = chart::document(ending, "rto-lab predict", &charts)
            .with_context(|| format!("--chart {}", path.display()))?;
        fs::write(path, text).with_context(|| format!("--chart {}", path.display()))?;
    }
    let answer = Answer {
        hz,
        srtt_us: kernel.srtt_us,
        effects: policy.iter().flat_map(|p| p.effects.clone()).collect(),
        predictions: predict::predict(&kernel, &own, &disruptions),
    };
    print(args.json, &answer, || {
        if args.csv {
            predict::csv(&answer.predictions)
        } else {
            let settings = policy.as_ref().map(Policy::text).unwrap_or_default();
            settings + &table(&answer.predictions).text()
        }
    })
}

fn own(args: &Predict, kernel: LinuxTimers) -> LinuxTimers {
    let mut own = kernel.with_rto_min(micros(args.rto_min));
    if args.rto_restart {
        own = own.with_restart();
    }
    LinuxTimers {
        rto_max_us: micros(args.rto_max).min(RTO_MAX_US),
        linear_retries: if args.thin { args.linear_retries } else { 0 },
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

fn disruptions(text: &str) -> anyhow::Result<Vec<Duration>> {
    let one = |text: &str| {
        let duration = duration(text.trim()).map_err(anyhow::Error::msg);
        duration.with_context(|| format!("--disruption {text}"))
    };
    let Some((from, to)) = text.split_once("..") else {
        return text.split(',').map(one).collect();
    };
    let (from, to) = (one(from)?, one(to)?);
    let within = predict::steps(from, to);
    ensure!(
        !within.is_empty(),
        "--disruption {text}: neither 1, 2 nor 5 of any power of ten lies in it; give a list"
    );
    Ok(within)
}

/// More than nothing, and at most an hour; "0s" is taken where nothing is meant.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    let duration = humantime::parse_duration(text)
        .map_err(|e| format!("{text}: {e}; a number and a unit, such as 10ms"))?;
    if duration > LONGEST {
        return Err(format!("{text}: at most 1h"));
    }
    Ok(duration)
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
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
    fn flags_make_a_kernel() {
        let near = LinuxTimers::near(250, 200);
        let fewer = own(&parsed("--rto-min 8ms --thin --linear-retries 2"), near);
        assert_eq!(fewer.linear_retries, 2);
        let far = LinuxTimers::near(250, 60_000);
        let restarted = own(&parsed("--rto-min 100ms --rto-restart"), far);
        assert_eq!(restarted, far.with_rto_min(40_000));
        let with = own(&parsed("--rto-min 8ms --thin --rto-max 1s"), near);
        let expected = LinuxTimers {
            rto_max_us: 1_000_000,
            ..near.with_rto_min(8_000).thin()
        };
        assert_eq!(with, expected);
        let without = own(&parsed("--rto-min 8ms --no-tlp"), near);
        assert_eq!(without.probe_after_us, None);
        let old = own(&parsed("--rto-min 8ms --old-tlp"), near);
        assert_eq!(old.probe_after_us, Some(RTO_MIN_US));
    }

    #[test]
    fn the_table_marks_what_is_worse() {
        let near = LinuxTimers::near(250, 200);
        let ms = Duration::from_millis;
        let own = near.with_rto_min(50_000);
        let text = table(&predict::predict(&near, &own, &[ms(20), ms(200)])).text();
        insta::assert_snapshot!(text);
    }

    #[test]
    fn bad_lists() {
        for (text, said) in [
            ("", "--disruption"),
            ("10", "such as 10ms"),
            ("2h", "at most 1h"),
            ("30ms..40ms", "give a list"),
        ] {
            let error = format!("{:#}", disruptions(text).unwrap_err());
            assert!(error.contains(said), "{text}: {error}");
        }
    }
}
