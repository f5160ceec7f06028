//! What is shown of workloads.

use clap::ValueEnum as _;

use super::{ALL, DELAY, KERNEL, Lost, Plan, SHARE, TIMERS, settings};
use crate::{
    engine::{ChartSpec, Column, Design, EffectSpec, Only, Stat, TableSpec, only, texts},
    policy::one_line,
    protocol::Kind,
};

impl Plan {
    /// How it is shown.
    pub(super) fn shown(&self) -> Design {
        let own = |(name, value): (&str, String)| (name.to_owned(), value);
        let column = |name: &str, title: &str, stat| TableSpec {
            name: name.to_owned(),
            title: title.to_owned(),
            rows: texts(&["workload", "lost"]),
            across: texts(&["timers"]),
            columns: vec![Column::new("time", stat, "")],
            only: Only::new(),
        };
        let mut method: Vec<(String, String)> = self
            .workloads
            .iter()
            .map(|kind| (kind.name().to_owned(), kind.description()))
            .collect();
        let rtt_ms = 2.0 * DELAY.as_secs_f64() * 1e3;
        method.extend(
            [
                ("link", format!("emulated, a round trip of {rtt_ms} ms")),
                ("timers", format!("the agent's at both ends, each alone and all: {}", one_line(&settings(ALL)))),
                (
                    "lost",
                    format!(
                        "nothing; the first SYN or SYN-ACK of each connection; {} % of the data segments in each \
                         direction, by chance; all packets for 50 to 500 ms, as long for \
                         all timers",
                        SHARE * 100.0
                    ),
                ),
                (
                    "time",
                    "from a request to the end of its response; with a connection for each, from connect(2) on; \
                     in an outage the longest"
                        .to_owned(),
                ),
                ("runs of a cell", self.runs.to_string()),
                (
                    "requests of a run",
                    self.lost
                        .iter()
                        .map(|lost| format!("{} {}", lost.requests(), lost.name()))
                        .collect::<Vec<_>>()
                        .join(", "),
                ),
            ]
            .map(own),
        );
        let timers = TIMERS.iter().map(|(name, _)| *name);
        let timers: Vec<&str> = [KERNEL].into_iter().chain(timers).chain([ALL]).collect();
        let workloads: Vec<&str> = Kind::value_variants()
            .iter()
            .map(|kind| kind.name())
            .collect();
        Design {
            name: "workloads".to_owned(),
            question: "Which workloads gain from which timer of a policy, and how much?".to_owned(),
            method,
            levels: [
                ("workload", texts(&workloads)),
                ("timers", texts(&timers)),
                ("lost", texts(&Lost::ALL.map(Lost::name))),
            ]
            .map(|(name, levels)| (name.to_owned(), levels))
            .into(),
            units: [("time".to_owned(), "ms".to_owned())].into(),
            effects: vec![EffectSpec {
                measure: "time".to_owned(),
                stat: Stat::Mean,
                across: "timers".to_owned(),
                base: KERNEL.to_owned(),
                rows: texts(&["workload", "lost"]),
                // Outages of the same number are as long.
                paired: true,
                only: Only::new(),
            }],
            pivot: true,
            tables: vec![
                column("means", "Time, ms, mean", Stat::Mean),
                column(
                    "p99",
                    "Time, ms, p99 where there are values enough",
                    Stat::Quantile(0.99),
                ),
            ],
            charts: vec![ChartSpec {
                title: "time".to_owned(),
                per: texts(&["workload", "lost"]),
                across: texts(&["timers"]),
                measure: "time".to_owned(),
                log: true,
                only: only("lost", &[Lost::Data.name()]),
                ..ChartSpec::default()
            }],
            ..Design::default()
        }
    }
}
