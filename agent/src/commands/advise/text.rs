//! Text output for advice.

use std::time::Duration;

use rto_advice::advice::{Advice, NoSuggestion};
use rto_agent_core::{
    policy::{Cidr, PolicyName, Settings, units::format_duration},
    printable::{self, counted},
    wire::stats::direction_text,
};

use super::{
    Answer, CIDRS_SHOWN, Decided,
    evidence::{Source, percent},
};
use crate::commands::{discover::rounded, figures, flags, table, terminal::wrapped};

pub(super) fn text(answer: &Answer, columns: Option<usize>) -> String {
    let mut text = source(&answer.source);
    // For a capture, `source` already shows the time.
    let is_capture = matches!(answer.source, Source::Capture { .. });
    if let Some(ms) = answer.observed_ms.filter(|_| !is_capture) {
        text.push_str(&format!("observed for {}\n", rounded(ms)));
    }
    text.push('\n');
    text.push_str(&evidence(answer, columns));
    for (setting, samples, decided) in [
        ("initial_rto", "handshakes", &answer.initial_rto),
        ("rto_min", "round trips", &answer.rto_min),
    ] {
        text.push_str(&setting_text(setting, samples, decided, answer, columns));
    }
    let whole = answer.source.policy().0.is_none();
    let suggestion = match (&answer.snippet, &answer.command) {
        (Some(policy), _) if whole => Some(("add this to the configuration", policy)),
        (Some(keys), _) => Some(("change these keys in the configuration", keys)),
        (None, Some(command)) => Some(("run this command", command)),
        (None, None) => None,
    };
    if let Some((what, suggestion)) = suggestion {
        text.push_str(&format!(
            "\nnothing was changed; to apply the suggestion, {what}\n\n"
        ));
        for line in suggestion.lines() {
            let line = match answer.snippet {
                Some(_) => line.to_owned(),
                // A command can be copied with its line breaks.
                None => wrapped(line, 4, columns.map(|columns| columns.saturating_sub(4)))
                    .replace('\n', " \\\n"),
            };
            text.push_str(&format!("  {line}\n"));
        }
    }
    if !answer.warnings.is_empty() || !answer.notes.is_empty() {
        text.push('\n');
    }
    text.push_str(&table::remarks("warning", &answer.warnings));
    text.push_str(&table::remarks("note", &answer.notes));
    text
}

pub(super) fn source(source: &Source) -> String {
    match source {
        Source::Statistics { policy, cidrs, .. } => {
            let of = if cidrs.is_empty() {
                String::new()
            } else {
                format!(" ({})", self::cidrs(cidrs))
            };
            format!(
                "policy {policy}{of}: counts of the daemon since the policy was added or the host \
                 booted\n"
            )
        }
        Source::Prometheus {
            policy,
            matchers,
            range,
            hosts,
            ..
        } => {
            let of = match matchers.is_empty() {
                true => String::new(),
                false => format!(" with {matchers}"),
            };
            format!(
                "policy {policy}: counts of {}{of} in the last {range}, from Prometheus\n",
                counted(*hosts, "host", "hosts")
            )
        }
        Source::Capture {
            file,
            cidrs,
            packets,
            began_us,
            ended_us,
            flows,
            segments,
            retransmitted,
        } => {
            let peers = if cidrs.is_empty() {
                String::new()
            } else {
                format!(" to {}", self::cidrs(cidrs))
            };
            let lasted = match (began_us, ended_us) {
                (Some(began), Some(ended)) => lasted(*began, *ended),
                _ => String::new(),
            };
            format!(
                "{}: {}{lasted}; {}{peers} with {}, {retransmitted} of them retransmitted\n",
                printable::path(file),
                counted(*packets, "packet", "packets"),
                counted(*flows, "flow", "flows"),
                counted(*segments, "segment", "segments"),
            )
        }
    }
}

/// How long a capture lasted and when it began; empty for times outside the calendar.
fn lasted(began_us: i64, ended_us: i64) -> String {
    const YEAR_10000_S: u64 = 253_402_300_800;
    let began_s = u64::try_from(began_us / 1_000_000).ok();
    let Some(began_s) = began_s.filter(|began_s| *began_s < YEAR_10000_S) else {
        return String::new();
    };
    // Seconds are precise enough.
    let took = ended_us.abs_diff(began_us).div_ceil(1_000_000);
    let began = std::time::UNIX_EPOCH + Duration::from_secs(began_s);
    format!(
        " of {} from {}",
        humantime::format_duration(Duration::from_secs(took)),
        humantime::format_rfc3339_seconds(began)
    )
}

fn evidence(answer: &Answer, columns: Option<usize>) -> String {
    if answer.evidence.is_empty() {
        return "no round trip was observed\n".to_owned();
    }
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
    let rows = answer.evidence.iter().map(|one| {
        let time = |us: Option<u64>| us.map_or_else(|| ">67s".to_owned(), figures::time);
        [
            match one.what {
                "connect_time" => "connect time",
                "path_rtt" => "path RTT",
                "handshake" => "handshake",
                "unsampled" => "no sample",
                "srtt" => "smoothed RTT",
                _ => "RTT",
            }
            .to_owned(),
            direction_text(one.direction).to_owned(),
            one.samples.to_string(),
            time(one.p50_us),
            time(one.p90_us),
            time(one.p99_us),
            time(one.p999_us),
            time(one.longest_us),
        ]
    });
    let rows: Vec<_> = rows.collect();
    table::fitting(HEADER, &rows, [0, 1, 2, 3, 5, 7, 6, 4], columns)
}

/// What needs a number of samples: of the initial RTO the law, whatever the share is.
pub(super) fn needed_by(setting: &str, spurious: f64) -> String {
    match setting {
        "initial_rto" => "the law".to_owned(),
        _ => percent(spurious),
    }
}

fn setting_text(
    setting: &str,
    samples: &str,
    decided: &Decided,
    answer: &Answer,
    columns: Option<usize>,
) -> String {
    let advice = &decided.advice;
    let target = percent(answer.spurious);
    let by = match decided.by {
        "all" => String::new(),
        direction => format!(
            " of {} connections, which need the longest",
            direction_text(direction)
        ),
    };
    let mut text = match (&advice.suggestion, advice.reason) {
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
    };
    const INDENT: usize = 2;
    let columns = columns.map(|columns| columns.saturating_sub(INDENT));
    for line in candidates(advice, columns).lines() {
        text.push_str(&format!("{:INDENT$}{line}\n", ""));
    }
    text
}

fn candidates(advice: &Advice, columns: Option<usize>) -> String {
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
        [
            duration(candidate.value_us),
            share(candidate.expected.share),
            share(candidate.expected.at_most),
            remarks.collect::<Vec<_>>().join(", "),
        ]
    });
    let rows: Vec<_> = rows.collect();
    let header = ["VALUE", "SPURIOUS", "AT MOST (95 %)", ""];
    table::fitting(header, &rows, [0, 1, 2, 3], columns)
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
    format!("rto-agent add {cidrs} {}", flags::of(settings))
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
pub(super) fn cidrs(cidrs: &[Cidr]) -> String {
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
