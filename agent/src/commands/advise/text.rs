//! Text output for advice.

use rto_agent_core::{
    advice::{self, Answer, rounded},
    printable::counted,
};

use super::evidence::Source;
use crate::commands::table;

pub(super) fn text(answer: &Answer<Source>, columns: Option<usize>) -> String {
    let mut source = source(&answer.source);
    if let Some(ms) = answer.observed_ms {
        source.push_str(&format!("observed for {}\n", rounded(ms)));
    }
    advice::text(answer, &source, |header, rows, importance, indent| {
        let columns = columns.map(|columns| columns.saturating_sub(indent));
        table::fitting(header, rows, importance, columns)
    })
}

pub(super) fn source(source: &Source) -> String {
    match source {
        Source::Statistics { policy, cidrs, .. } => {
            let of = if cidrs.is_empty() {
                String::new()
            } else {
                format!(" ({})", advice::cidrs(cidrs))
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
    }
}
