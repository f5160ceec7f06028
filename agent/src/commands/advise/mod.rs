//! `rto-agent advise`.

use std::{process::ExitCode, time::Duration};

use anyhow::{Context as _, bail, ensure};
use rto_advice::advice::{self, Advice, Question};

mod answer;
mod capture;
mod evidence;
mod prometheus;
mod text;

use rto_agent_core::policy::{
    Cidr, HostFacts, InitialRtoSetting, PolicyName, Settings,
    compile::{check_prefix_width, compile},
};
use rto_agent_kernel::{datapath::probe, kernel::facts::host_facts};
use rto_model::tune::law;

use self::{
    answer::{Answer, CIDRS_SHOWN, Decided},
    evidence::{ByDirection, Gathered},
};
use super::{
    discover::{DAY_MS, rounded},
    print, terminal,
};
use crate::{cli::Advise, client::Client};

/// The valid shares: a smaller one needs more samples than any host has.
const SHARES: std::ops::RangeInclusive<f64> = 0.000_01..=0.5;

pub(super) fn run(args: &Advise) -> anyhow::Result<ExitCode> {
    let host = host_facts(&probe::features())?;
    let question = question(args, &host)?;
    let gathered = gather(args, host.hz)?;
    let answer = answer(gathered, &question, &host);
    print(args.daemon.json, &answer, || {
        text::text(&answer, terminal::columns(args.table))
    })
}

fn question(args: &Advise, host: &HostFacts) -> anyhow::Result<Question> {
    Ok(Question {
        hz: host.hz,
        share: share(&args.spurious)?,
        min_us: law::Settings::new(host.hz).min_us,
        peer_delack_us: u64::try_from(args.peer_delack.as_micros()).unwrap_or(u64::MAX),
    })
}

fn share(text: &str) -> anyhow::Result<f64> {
    let percent = text.trim().strip_suffix('%');
    let Some(percent) = percent.and_then(|number| number.trim_end().parse::<f64>().ok()) else {
        bail!("--spurious {text}: not a percentage; write, for example, 0.1%");
    };
    let share = percent / 100.0;
    ensure!(
        SHARES.contains(&share),
        "--spurious {text}: must be 0.001% to 50%"
    );
    Ok(share)
}

fn gather(args: &Advise, hz: u32) -> anyhow::Result<Gathered> {
    if let Some(path) = &args.samples {
        let cidrs = args.cidr.iter().map(|text| text.parse());
        let cidrs = cidrs.collect::<Result<Vec<Cidr>, _>>().context("--cidr")?;
        return capture::read(path, &cidrs, &args.host, hz);
    }
    if let Some(url) = &args.prometheus {
        return prometheus::read(url, args);
    }
    let client = Client::new(&args.daemon.socket);
    let entries = client.get("/v1/entries")?;
    let policy = match (&args.policy, &args.target) {
        (Some(name), _) => name.parse()?,
        (None, Some(target)) => evidence::policy_of(target, &client, &entries)?,
        (None, None) => {
            bail!(
                "no data to evaluate: give a CIDR, an address, --policy, --prometheus or --samples"
            )
        }
    };
    evidence::of_policy(&policy, &entries, client.get("/v1/stats")?)
}

fn answer(gathered: Gathered, question: &Question, host: &HostFacts) -> Answer {
    let present = &gathered.present;
    let auto = gathered.settings.auto_initial_rto();
    let question = &Question {
        min_us: auto.map_or(question.min_us, |auto| auto.to_law(host.hz).min_us),
        ..*question
    };
    let initial_rto = decided(&gathered.handshakes, |times| {
        advice::initial_rto(times, question, present.initial_rto_us)
    });
    let rto_min = decided(&gathered.round_trips, |times| {
        advice::rto_min(times.as_model(), question, present.rto_min_us)
    });
    let mut answer = Answer {
        source: gathered.source,
        hz: host.hz,
        spurious: question.share,
        peer_delack_us: question.peer_delack_us,
        observed_ms: gathered.observed_ms,
        evidence: gathered.evidence,
        initial_rto,
        rto_min,
        snippet: None,
        command: None,
        warnings: gathered.warnings,
        notes: gathered.notes,
    };
    match answer.observed_ms {
        Some(ms) if ms < DAY_MS => answer.warnings.push(format!(
            "observed for only {}: other times of day may need longer timers; repeat after a day",
            rounded(ms)
        )),
        Some(_) => {}
        None => answer.warnings.push(
            "the length of the observation is unknown: if it is less than a day, times of day that \
             need longer timers may be missing"
                .to_owned(),
        ),
    }
    let handshakes = match gathered.handshakes.all.longer_than.count() {
        0 => "handshakes",
        _ => "handshakes (those without a round trip included)",
    };
    for (setting, what, advice) in [
        ("initial_rto", handshakes, &answer.initial_rto.advice),
        ("rto_min", "round trips", &answer.rto_min.advice),
    ] {
        if advice.reason == Some(advice::NoSuggestion::TooFewSamples) {
            let by = text::needed_by(setting, question.share);
            // The law needs as many for any share.
            let or = match setting {
                "initial_rto" => "",
                _ => ", or accept a larger share (--spurious)",
            };
            answer.warnings.push(format!(
                "{setting}: {} of the {} {what} that {by} needs: wait for more{or}",
                advice.samples, advice.needed,
            ));
        } else if advice.present.expected.share > question.share {
            answer.warnings.push(format!(
                "the active {setting} = {} is too short: {} of the {what} took longer",
                text::duration(advice.present.value_us),
                evidence::percent(advice.present.expected.share),
            ));
        }
    }
    suggest(&mut answer, &gathered.settings, host);
    answer
}

/// The advice for the direction that needs the longest value, because a setting applies to all
/// directions.
fn decided<T>(times: &ByDirection<T>, advise: impl Fn(&T) -> Advice) -> Decided {
    let rank = |advice: &Advice| {
        let enough = advice.samples >= advice.needed;
        let jiffies = advice.suggestion.map_or(u64::MAX, |c| c.jiffies);
        (enough, if enough { jiffies } else { advice.samples })
    };
    let mut best = Decided {
        by: "all",
        advice: advise(&times.all),
    };
    for (by, times) in &times.each {
        let advice = advise(times);
        if rank(&advice) > rank(&best.advice) {
            best = Decided { by, advice };
        }
    }
    best
}

/// Adds the suggestions to a policy, unless this host would refuse it.
fn suggest(answer: &mut Answer, present: &Settings, host: &HostFacts) {
    let value = |decided: &Decided| {
        let suggestion = decided.advice.suggestion.as_ref()?;
        Some(Duration::from_micros(suggestion.value_us))
    };
    // A learnt timer needs no advice.
    let initial_rto = value(&answer.initial_rto).map(InitialRtoSetting::Fixed);
    let initial_rto = initial_rto
        .filter(|rto| present.auto_initial_rto().is_none() && Some(*rto) != present.initial_rto);
    let rto_min = value(&answer.rto_min).filter(|rto| Some(*rto) != present.rto_min);
    // The advice on rto_min assumes that rto_restart is off.
    let restarts = present.rto_restart == Some(true) && rto_min.is_some();
    let changes = Settings {
        initial_rto,
        rto_min,
        rto_restart: restarts.then_some(false),
        ..Settings::default()
    };
    if changes.is_empty() {
        return;
    }
    if restarts {
        answer.warnings.push(
            "rto_restart lowers the policy's rto_min by the round trip: the effective value is \
             shorter than shown here, and the suggestion assumes no rto_restart"
                .to_owned(),
        );
    }
    let settings = Settings {
        initial_rto: changes.initial_rto.or(present.initial_rto),
        rto_min: changes.rto_min.or(present.rto_min),
        rto_restart: changes.rto_restart.or(present.rto_restart),
        ..present.clone()
    };
    let (name, cidrs) = answer.source.policy();
    match check(&settings, &cidrs, host) {
        Ok(warnings) => answer.warnings.extend(warnings),
        Err(errors) => {
            let errors = errors.into_iter();
            let errors = errors.map(|error| format!("rto-agent check would reject this: {error}"));
            answer.warnings.extend(errors);
            return;
        }
    }
    match name {
        None => answer.snippet = Some(text::policy(&cidrs, &settings)),
        Some(name) if name.is_made_of(present) => {
            answer.command = Some(text::command(&cidrs, &settings));
        }
        Some(name) => answer.snippet = Some(text::keys(&name, &changes)),
    }
}

/// The warnings or errors that `check` would report for a policy.
fn check(
    settings: &Settings,
    cidrs: &[Cidr],
    host: &HostFacts,
) -> Result<Vec<String>, Vec<String>> {
    let compiled = compile(
        &PolicyName::for_settings(settings, |_| false),
        settings,
        host,
    );
    let too_wide = cidrs
        .iter()
        .find_map(|cidr| check_prefix_width(cidr, settings).err());
    match (compiled, too_wide) {
        (Ok(compiled), None) => Ok(compiled.warnings),
        (compiled, too_wide) => {
            let errors = compiled.err().unwrap_or_default().into_iter();
            Err(errors.chain(too_wide).map(|e| e.to_string()).collect())
        }
    }
}

#[cfg(test)]
mod tests;
