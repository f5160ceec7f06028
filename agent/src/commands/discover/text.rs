//! Text output for discovered prefixes.

use std::time::{Duration, UNIX_EPOCH};

use rto_agent_core::{
    advice::rounded, figures, policy::units::format_duration, printable::counted,
};

use super::{Candidate, Discovery, Saved};
use crate::commands::table;

pub(super) fn text(discovery: &Discovery, columns: Option<usize>) -> String {
    let took_ms = discovery.at_ms.saturating_sub(discovery.since_ms);
    let since = UNIX_EPOCH + Duration::from_secs(discovery.since_ms / 1000);
    let mut text = format!(
        "connections that no entry covers, 1 in {} counted, for {} (since {})\n\n",
        discovery.one_in,
        rounded(took_ms),
        humantime::format_rfc3339_seconds(since)
    );
    if discovery.prefixes.is_empty() {
        text.push_str("no connection was counted\n");
    } else {
        text.push_str(&candidates(&discovery.prefixes, columns));
    }
    if discovery.more > 0 {
        let more = counted(discovery.more, "prefix", "prefixes");
        text.push_str(&format!("({more} more: --limit)\n"));
    }
    if let Some(snippet) = &discovery.snippet {
        text.push_str("\nnothing was added; add this to the configuration\n\n");
        for line in snippet.lines() {
            text.push_str(format!("  {line}").trim_end());
            text.push('\n');
        }
    }
    let left_out = [
        (discovery.covered, "now covered by an entry"),
        (
            discovery.special,
            "loopback, link-local, multicast or reserved",
        ),
    ];
    let mut notes = discovery.notes.clone();
    for (count, why) in left_out.iter().filter(|(count, _)| *count > 0) {
        let prefixes = counted(*count, "prefix", "prefixes");
        notes.push(format!("{prefixes} left out ({why})"));
    }
    if !discovery.warnings.is_empty() || !notes.is_empty() {
        text.push('\n');
    }
    text.push_str(&table::remarks("warning", &discovery.warnings));
    text.push_str(&table::remarks("note", &notes));
    text
}

fn candidates(prefixes: &[Candidate], columns: Option<usize>) -> String {
    const HEADER: [&str; 9] = [
        "PREFIX",
        "SEEN",
        "CONNECTIONS",
        "LOST",
        "P50",
        "P99.9",
        "AT MOST (95 %)",
        "INITIAL RTO",
        "SAVED A DAY",
    ];
    let rows = prefixes.iter().map(|one| {
        let time = |us: Option<u64>| us.map_or_else(|| "-".to_owned(), figures::time);
        [
            one.cidr.to_string(),
            one.seen.to_string(),
            one.connections.to_string(),
            one.lost.to_string(),
            time(one.p50_us),
            time(one.p999_us),
            time(one.p999_at_most_us),
            match (one.initial_rto_us, one.missing) {
                (Some(us), _) => format_duration(Duration::from_micros(us)),
                (None, 0) => "none shorter".to_owned(),
                (None, missing) => counted(missing, "sample short", "samples short"),
            },
            match one.missing {
                0 => range(one.saved_s_per_day),
                _ => "-".to_owned(),
            },
        ]
    });
    let rows: Vec<_> = rows.collect();
    table::fitting(HEADER, &rows, [0, 7, 8, 3, 2, 5, 4, 6, 1], columns)
}

/// "12s to 40s".
fn range(saved: Saved) -> String {
    let ends = [saved.outages, saved.independent].map(seconds);
    match ends[0] == ends[1] {
        true => ends[0].clone(),
        false => ends.join(" to "),
    }
}

/// An estimate in two or three digits.
fn seconds(seconds: f64) -> String {
    if seconds == 0.0 || seconds.abs() >= 10.0 {
        format!("{seconds:.0}s")
    } else {
        format!("{seconds:.1}s")
    }
}
