//! What is shown of blackouts: tables, effects, and what they are compared with.

use std::collections::{BTreeMap, BTreeSet};

use rto_model::published::{Column as PublishedColumn, Table as Published};

use super::{BEFORE, KERNEL, Mechanism, Plan, Setting, record};
use crate::engine::{
    Agreement, ChartSpec, Column, Design, EffectSpec, Record, Stat, TableSpec, only, texts,
};

impl Plan {
    /// How it is shown.
    pub(super) fn shown(&self) -> Design {
        let names = self.names();
        let main = self.main();
        let by = [
            &main,
            "agent",
            "route",
            "sysctl",
            KERNEL,
            "theory",
            "kernel model",
        ];
        let columns = vec![Column::new("idle", Stat::P50, "idle")];
        let measured = only("by", &[&main, KERNEL]);
        let table = |name: String, title: String, across: &[&str], only| TableSpec {
            name,
            title,
            rows: texts(&["lost"]),
            across: texts(across),
            columns: columns.clone(),
            only,
        };
        let mut tables = vec![table(
            "medians".to_owned(),
            format!("Idle, ms: medians, settings by {main}"),
            &["setting"],
            measured.clone(),
        )];
        tables.extend(names.iter().map(|name| {
            let title = format!("Idle, ms: {name}, measured, computed and published");
            table(
                name.replace(' ', "-"),
                title,
                &["by"],
                only("setting", &[name]),
            )
        }));
        tables.extend(self.rto_mins_ms().into_iter().map(|ms| {
            let levels = [
                &main,
                "Linux 6.5",
                "Linux 6.11",
                "Linux 6.5 (5 ms)",
                "Linux 6.11 (5 ms)",
            ];
            let mut both = only("by", &levels);
            both.extend(only(
                "setting",
                &[&*format!("thin {ms} ms"), &*format!("thick {ms} ms")],
            ));
            let title = format!("Idle, ms: rto_min {ms} ms, here and published");
            table(
                format!("published-{ms}-ms"),
                title,
                &["setting", "by"],
                both,
            )
        }));
        let mut method = vec![
            ("transaction".to_owned(), format!("1 byte out, 2 bytes back, one at a time; {BEFORE} before the disruption")),
            (
                "disruption".to_owned(),
                "all packets of the connection in both directions, from a random moment of a transaction on".to_owned(),
            ),
            ("value".to_owned(), "the longest time between two responses; medians".to_owned()),
            ("link".to_owned(), format!("{:?}", self.backend).to_lowercase()),
            ("runs of a cell".to_owned(), format!("{}; {} by route and sysctl", self.runs, self.control_runs)),
        ];
        method.extend(self.lacking.iter().map(|by| {
            (
                format!("by {}", by.name()),
                "left out: not in this kernel".to_owned(),
            )
        }));
        Design {
            name: "blackout".to_owned(),
            question: "How long is a connection of one small request at a time idle if all its packets are lost \
                       for a while, by rto_min and backoff?"
                .to_owned(),
            method,
            levels: BTreeMap::from([
                ("setting".to_owned(), names.iter().cloned().chain([KERNEL.to_owned()]).collect()),
                ("by".to_owned(), texts(&by)),
            ]),
            units: [("idle", "ms"), ("lost", "ms")].map(|(name, unit)| (name.to_owned(), unit.to_owned())).into(),
            effects: vec![EffectSpec {
                measure: "idle".to_owned(),
                stat: Stat::P50,
                across: "setting".to_owned(),
                base: KERNEL.to_owned(),
                rows: texts(&["lost"]),
                // They begin at the same moment of a transaction.
                paired: true,
                only: measured,
            }],
            agreements: vec![Agreement {
                measure: "idle".to_owned(),
                stat: Stat::P50,
                across: "by".to_owned(),
                base: main,
                rows: texts(&["lost", "setting"]),
            }],
            tables,
            charts: vec![ChartSpec {
                title: "idle time".to_owned(),
                per: texts(&["setting"]),
                across: texts(&["by"]),
                x: Some("lost".to_owned()),
                measure: "idle".to_owned(),
                stat: Some(Stat::P50),
                log: true,
                ..ChartSpec::default()
            }],
            references: self.references(),
            ..Design::default()
        }
    }

    /// Settings of which tables are, once each, by whichever mechanism comes first.
    fn distinct(&self) -> Vec<Setting> {
        let mut distinct: Vec<Setting> = Vec::new();
        for setting in &self.settings {
            let is_known = distinct.iter().any(|known| known.name() == setting.name());
            if setting.by != Mechanism::Kernel && !is_known {
                distinct.push(*setting);
            }
        }
        distinct
    }

    /// Their names.
    pub(super) fn names(&self) -> Vec<String> {
        self.distinct().into_iter().map(Setting::name).collect()
    }

    /// Lower bounds of the RTO, from the least.
    fn rto_mins_ms(&self) -> BTreeSet<u64> {
        self.settings
            .iter()
            .map(|setting| setting.rto_min_us / 1000)
            .collect()
    }

    /// The agent, unless it was not asked for.
    fn main(&self) -> String {
        let agent = self
            .settings
            .iter()
            .find(|setting| setting.by == Mechanism::Agent);
        agent
            .or(self.settings.first())
            .map_or_else(String::new, |setting| setting.by.name())
    }

    /// Theory, the kernel's model and published tables.
    pub(super) fn references(&self) -> Vec<Record> {
        let published = [
            ("Linux 6.5", Published::linux_6_5()),
            ("Linux 6.11", Published::linux_6_11()),
        ];
        let mut references = Vec::new();
        for setting in self.distinct() {
            // Two jiffies are next to the published 5 ms, which they are not the same as.
            let (rto_min_us, suffix) = match setting.rto_min_us {
                ..20_000 => (5_000, " (5 ms)"),
                us => (us, ""),
            };
            let column = PublishedColumn {
                thin: setting.thin,
                rto_min_us,
            };
            for &lost in &self.disruptions_us {
                let mut all = vec![
                    ("theory".to_owned(), Some(setting.theory_ms(lost))),
                    (
                        "kernel model".to_owned(),
                        Some(setting.model_ms(self.hz, lost)),
                    ),
                ];
                all.extend(
                    published.iter().map(|(name, table)| {
                        (format!("{name}{suffix}"), table.idle_ms(column, lost))
                    }),
                );
                references.extend(all.into_iter().filter_map(|(by, idle_ms)| {
                    Some(record(&setting.name(), &by, lost, 0).with("idle", idle_ms?))
                }));
            }
        }
        references
    }
}
