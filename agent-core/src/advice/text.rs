//! Text output for advice.

use std::time::Duration;

use rto_model::advice::{Advice, NoSuggestion};

use super::answer::{Answer, Decided, Evidence};
use crate::{
    figures,
    policy::{Cidr, PolicyName, Settings, units::format_duration},
    printable::{counted, direction_text},
};

/// The most CIDRs that are written out.
const CIDRS_SHOWN: usize = 8;
/// Spaces before the lines of a setting's table.
const INDENT: usize = 2;

/// The answer as text, after `source`, which describes where the evidence is from. `table` lays out
/// a table from its header, its rows, the indices of its columns (the most important first), and
/// the number of columns of the terminal that are not available to it.
pub fn text<S>(
    answer: &Answer<S>,
    source: &str,
    table: impl Fn(&[&str], &[Vec<String>], &[usize], usize) -> String,
) -> String {
    let mut text = format!("{source}\n");
    if answer.evidence.is_empty() {
        text.push_str("no round trip was observed\n");
    } else {
        const HEADER: [&str; 8] = [
            "TIMES",
            "DIRECTION",
            "SAMPLES",
            "P50",
            "P90",
            "P99",
            "P99.9",
            "LONGEST",
        ];
        let rows: Vec<_> = answer.evidence.iter().map(row).collect();
        text.push_str(&table(&HEADER, &rows, &[0, 1, 2, 3, 5, 7, 6, 4], 0));
    }
    for (setting, samples, decided) in [
        ("initial_rto", "handshakes", &answer.initial_rto),
        ("rto_min", "round trips", &answer.rto_min),
    ] {
        text.push_str(&heading(setting, samples, decided, answer));
        let rows = candidates(&decided.advice);
        let header = ["VALUE", "SPURIOUS", "AT MOST (95 %)", ""];
        for line in table(&header, &rows, &[0, 1, 2, 3], INDENT).lines() {
            text.push_str(&format!("{:INDENT$}{line}\n", ""));
        }
    }
    let suggestion = match (&answer.snippet, &answer.command) {
        (Some(policy), _) if answer.is_new_policy => {
            Some(("add this to the configuration", policy))
        }
        (Some(keys), _) => Some(("change these keys in the configuration", keys)),
        (None, Some(command)) => Some(("run this command", command)),
        (None, None) => None,
    };
    if let Some((what, suggestion)) = suggestion {
        text.push_str(&format!(
            "\nnothing was changed; to apply the suggestion, {what}\n\n"
        ));
        for line in suggestion.lines() {
            text.push_str(&format!("  {line}\n"));
        }
    }
    if !answer.warnings.is_empty() || !answer.notes.is_empty() {
        text.push('\n');
    }
    for (what, remarks) in [("warning", &answer.warnings), ("note", &answer.notes)] {
        for remark in remarks {
            text.push_str(&format!("{what}: {remark}\n"));
        }
    }
    text
}

fn row(evidence: &Evidence) -> Vec<String> {
    let time = |us: Option<u64>| us.map_or_else(|| ">67s".to_owned(), figures::time);
    let what = match evidence.what {
        "connect_time" => "connect time",
        "path_rtt" => "path RTT",
        "handshake" => "handshake",
        "unsampled" => "no sample",
        "srtt" => "smoothed RTT",
        _ => "RTT",
    };
    vec![
        what.to_owned(),
        direction_text(evidence.direction).to_owned(),
        evidence.samples.to_string(),
        time(evidence.p50_us),
        time(evidence.p90_us),
        time(evidence.p99_us),
        time(evidence.p999_us),
        time(evidence.longest_us),
    ]
}

/// What needs a number of samples: of the initial RTO the law, whatever the share is.
pub(super) fn needed_by(setting: &str, spurious: f64) -> String {
    match setting {
        "initial_rto" => "the law".to_owned(),
        _ => percent(spurious),
    }
}

fn heading<S>(setting: &str, samples: &str, decided: &Decided, answer: &Answer<S>) -> String {
    let advice = &decided.advice;
    let target = percent(answer.spurious);
    let by = match decided.by {
        "all" => String::new(),
        direction => format!(
            " of {} connections, which need the longest",
            direction_text(direction)
        ),
    };
    match (&advice.suggestion, advice.reason) {
        (Some(suggestion), _) => format!(
            "\n{setting}: {} ({} at HZ={}) for at most {target} spurious; {} {samples}{by}\n\n",
            duration(suggestion.value_us),
            counted(suggestion.jiffies, "jiffy", "jiffies"),
            answer.hz,
            advice.samples,
        ),
        (None, Some(NoSuggestion::NothingShorter)) => format!(
            "\n{setting}: no suggestion; no value below the kernel's own meets {target}; {} \
             {samples}{by}\n\n",
            advice.samples,
        ),
        (None, _) => format!(
            "\n{setting}: no suggestion; {} {samples}, {} needs {}\n\n",
            advice.samples,
            needed_by(setting, answer.spurious),
            advice.needed,
        ),
    }
}

fn candidates(advice: &Advice) -> Vec<Vec<String>> {
    let rows = advice.candidates.iter().map(|candidate| {
        let is = |other: Option<u64>| other == Some(candidate.jiffies);
        let remarks = [
            (is(advice.suggestion.map(|c| c.jiffies)), "suggested"),
            (is(Some(advice.present.jiffies)), "now"),
            (
                candidate.below_delack,
                "shorter than the peers' delayed ACK",
            ),
        ];
        let remarks = remarks.iter().filter(|(is, _)| *is).map(|(_, what)| *what);
        let share = |share| match advice.samples {
            0 => "-".to_owned(),
            _ => percent(share),
        };
        vec![
            duration(candidate.value_us),
            share(candidate.expected.share),
            share(candidate.expected.at_most),
            remarks.collect::<Vec<_>>().join(", "),
        ]
    });
    rows.collect()
}

/// The changed keys of a policy that is in the configuration.
pub(super) fn keys(name: &PolicyName, changes: &Settings) -> String {
    // The dot is the only character of names that TOML requires to be quoted.
    let header = match name.as_str().contains('.') {
        true => format!("[policy.\"{name}\"]\n"),
        false => format!("[policy.{name}]\n"),
    };
    header + &changes.to_toml().to_string()
}

/// A command that changes the settings of runtime entries.
pub(super) fn command(cidrs: &[Cidr], settings: &Settings) -> String {
    let cidrs = match cidrs.len() {
        1..=CIDRS_SHOWN => cidrs
            .iter()
            .map(ToString::to_string)
            .collect::<Vec<_>>()
            .join(" "),
        _ => "CIDR...".to_owned(),
    };
    format!("rto-agent add {cidrs} {}", settings.to_flags())
}

/// A new policy for the configuration.
pub(super) fn policy(cidrs: &[Cidr], settings: &Settings) -> String {
    let mut text = "[policy.suggested]\n".to_owned();
    if cidrs.is_empty() || cidrs.len() > CIDRS_SHOWN {
        text.push_str("cidrs = []  # add the prefixes\n");
    } else {
        let quoted: Vec<_> = cidrs.iter().map(|cidr| format!("\"{cidr}\"")).collect();
        text.push_str(&format!("cidrs = [{}]\n", quoted.join(", ")));
    }
    text.push_str(&settings.to_toml().to_string());
    text
}

/// The first CIDRs, and the number of others.
pub fn cidrs(cidrs: &[Cidr]) -> String {
    let shown: Vec<_> = cidrs
        .iter()
        .take(CIDRS_SHOWN)
        .map(ToString::to_string)
        .collect();
    let more = match cidrs.len().saturating_sub(CIDRS_SHOWN) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    format!("{}{more}", shown.join(", "))
}

/// Exact, because it may be copied into a configuration.
pub(super) fn duration(us: u64) -> String {
    format_duration(Duration::from_micros(us))
}

/// A share in per cent, with two digits: "0.1%", "12%", "0.0031%".
pub fn percent(share: f64) -> String {
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

/// A duration in at most two units.
pub fn rounded(took_ms: u64) -> String {
    let seconds = took_ms / 1000;
    let unit = match seconds {
        0..3600 => 1,
        3600..86_400 => 60,
        _ => 3600,
    };
    humantime::format_duration(Duration::from_secs(seconds / unit * unit)).to_string()
}
