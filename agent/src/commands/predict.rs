//! `rto-agent predict`.

use std::{fs, process::ExitCode, time::Duration};

use anyhow::{Context as _, bail, ensure};
use rto_model::{
    chart,
    predict::{self, Prediction},
};
use serde::Serialize;

use super::{print, stats::short_us, table};
use crate::{
    cli::Predict,
    config::Config,
    datapath::probe,
    kernel::facts::host_facts,
    policy::{
        HostFacts, PolicyName, Settings,
        compile::{EffectiveSetting, compile},
        predict::predict,
        units::format_duration,
    },
};

/// What `--json` prints.
#[derive(Serialize)]
struct Answer {
    /// Jiffies a second.
    hz: u32,
    /// Of the connection, microseconds.
    srtt_us: u64,
    /// What the values become on this host.
    effects: Vec<EffectiveSetting>,
    /// One a disruption.
    predictions: Vec<Prediction>,
}

pub(super) fn run(args: &Predict) -> anyhow::Result<ExitCode> {
    let host = host_facts(&probe::features())?;
    let (name, settings) = settings(args, &host)?;
    let compiled = compile(&name, &settings, &host).map_err(|errors| {
        let lines: Vec<String> = errors.iter().map(ToString::to_string).collect();
        anyhow::anyhow!(lines.join("\n"))
    })?;
    let (srtt, disruptions) = (args.rtt, &args.disruption.0);
    let answer = Answer {
        hz: host.hz,
        srtt_us: u64::try_from(srtt.as_micros()).unwrap_or(u64::MAX),
        predictions: predict(&compiled.kernel, &host, srtt, disruptions),
        effects: compiled.effects,
    };
    if let Some(path) = &args.chart {
        let dense = predict::between(disruptions);
        let drawn = predict(&compiled.kernel, &host, srtt, &dense);
        let charts = predict::charts(&table::settings(&answer.effects), &drawn);
        let ending = path.extension().and_then(|e| e.to_str()).unwrap_or("");
        let text = chart::document(ending, "rto-agent predict", &charts)
            .with_context(|| format!("--chart {}", path.display()))?;
        fs::write(path, text).with_context(|| format!("--chart {}", path.display()))?;
    }
    print(args.output.json, &answer, || {
        if args.csv {
            predict::csv(&answer.predictions)
        } else {
            text(&answer)
        }
    })?;
    Ok(ExitCode::SUCCESS)
}

/// Of a policy of the files, or as given.
fn settings(args: &Predict, host: &HostFacts) -> anyhow::Result<(PolicyName, Settings)> {
    if let Some(name) = &args.policy {
        let name: PolicyName = name.parse()?;
        let config = Config::load(&args.config.config, host)?;
        let Some(policy) = config.set.policies.get(&name) else {
            let known: Vec<_> = config.set.policies.keys().map(PolicyName::as_str).collect();
            bail!(
                "unknown policy {name}; the configuration has: {}",
                known.join(", ")
            );
        };
        return Ok((name, policy.settings.clone()));
    }
    let settings = Settings {
        rto_min: args.rto_min,
        rto_restart: args.rto_restart,
        thin_linear: args.thin_linear,
        linear_retries: args.linear_retries,
        rto_max: args.rto_max,
        ..Settings::default()
    };
    ensure!(
        !settings.is_empty(),
        "nothing to predict: give --policy NAME, or values such as --rto-min 10ms"
    );
    Ok((PolicyName::for_settings(&settings), settings))
}

fn text(answer: &Answer) -> String {
    let mut text = table::effects(&answer.effects, answer.hz, "");
    text.push_str(&format!(
        "all packets lost from the moment a request is sent, RTT {}, HZ {}; idle until the answer:\n\n",
        format_duration(Duration::from_micros(answer.srtt_us)),
        answer.hz
    ));
    let mut rows = table::new(["LOST FOR", "KERNEL", "WITH IT", "", ""]);
    for p in &answer.predictions {
        let time = |ms: f64| short_us(ms * 1000.0);
        rows.add_row([
            time(p.disruption_ms),
            time(p.kernel_ms),
            time(p.policy_ms),
            format!("{:.2}x", p.policy_ms / p.kernel_ms),
            if p.worse { "WORSE" } else { "" }.to_owned(),
        ]);
    }
    text.push_str(&table::text(&rows));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_table_and_csv() {
        let prediction = |disruption_ms, kernel_ms, policy_ms, worse| Prediction {
            disruption_ms,
            kernel_ms,
            policy_ms,
            worse,
        };
        let answer = Answer {
            hz: 250,
            srtt_us: 200,
            effects: Vec::new(),
            predictions: vec![
                prediction(10.0, 208.0, 16.0, false),
                prediction(2000.0, 3680.0, 3776.0, true),
            ],
        };
        insta::assert_snapshot!(format!(
            "{}\n{}",
            text(&answer),
            predict::csv(&answer.predictions)
        ));
    }
}
