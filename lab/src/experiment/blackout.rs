//! How long a request/response connection is idle when all its packets are lost for a while, by setting and by the
//! mechanism of the setting; compared with theory, the kernel's model and published tables.

use std::{collections::BTreeSet, path::Path, time::Duration};

use anyhow::ensure;
use clap::ValueEnum;
use rto_model::retransmit::LinuxTimers;
use rto_testbed::machine::{Machine, jiffy};

use super::definition::{Cell, Plan, Settings};
use crate::{
    commands::blackout::Blackout,
    engine::{Design, Record, TableSpec, only, texts},
    published::{Column as PublishedColumn, Table as Published},
    summary::{micros, ms},
};

/// The design of the report.
const DESIGN: &str = include_str!("../../experiments/blackout.toml");
/// Settings that all levels share. After 40 transactions the estimator knows the path, and quick ACKs are over.
const OF_ALL: &str = "workload = \"request-response\"\nskip = 40\ncount = 10\n";
/// Smoothed RTT of the emulated link for the model, microseconds; its influence is at most one jiffy.
const SRTT_US: u64 = 200;
/// The kernel's own timers.
const KERNEL: Setting = Setting {
    thin: false,
    rto_min_us: 200_000,
};
/// Names of the published values: for the same rto_min, and 5 ms for comparison with two jiffies.
const LINUX: [&str; 4] = [
    "Linux 6.5",
    "Linux 6.11",
    "Linux 6.5 (5 ms)",
    "Linux 6.11 (5 ms)",
];

/// The mechanism of a setting.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Mechanism {
    /// By the agent, at both ends
    Agent,
    /// By the metric of a route (rto_min) and by the application (thin), at both ends
    Route,
    /// By net.ipv4.tcp_rto_min_us and net.ipv4.tcp_thin_linear_timeouts, at both ends
    Sysctl,
    /// By the agent, at both ends, and the client's own firewall drops the packets, in INPUT and OUTPUT
    Firewall,
    /// None: the kernel's own timers, 200 ms and thick
    Kernel,
}

impl Mechanism {
    fn name(self) -> String {
        format!("{self:?}").to_lowercase()
    }

    /// Whether this kernel supports the mechanism.
    fn is_possible(self) -> bool {
        self != Self::Sysctl || Path::new("/proc/sys/net/ipv4/tcp_rto_min_us").exists()
    }
}

/// A setting of both ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Setting {
    thin: bool,
    rto_min_us: u64,
}

impl Setting {
    /// The name, such as "thin 8 ms".
    fn name(self) -> String {
        let kind = if self.thin { "thin" } else { "thick" };
        format!("{kind} {} ms", self.rto_min_us / 1000)
    }

    /// The settings for this mechanism and an outage of this length.
    fn settings(self, by: Mechanism, disruption_us: u64) -> Result<Settings, toml::de::Error> {
        let (us, thin) = (self.rto_min_us, self.thin);
        let made = match by {
            Mechanism::Agent => {
                format!("policy = {{ rto_min = \"{us}us\", thin_linear = {thin} }}")
            }
            // Most outages begin in the pause, so that the next send fails.
            Mechanism::Firewall => format!(
                "pause = \"2ms\"\noutage_at = \"client\"\npolicy = {{ rto_min = \"{us}us\", thin_linear = {thin} }}"
            ),
            Mechanism::Route => format!("route_rto_min = \"{us}us\"\nthin = {thin}"),
            Mechanism::Sysctl => format!(
                "sysctls = {{ \"net.ipv4.tcp_rto_min_us\" = {us}, \"net.ipv4.tcp_thin_linear_timeouts\" = {} }}",
                u8::from(thin)
            ),
            Mechanism::Kernel => String::new(),
        };
        toml::from_str(&format!("{OF_ALL}outage = \"{disruption_us}us\"\n{made}"))
    }
}

/// The whole experiment.
pub(crate) fn plan(args: &Blackout) -> anyhow::Result<Plan> {
    let quick = args.engine.common.quick;
    let millis = Duration::from_millis;
    let two_jiffies = 2 * jiffy();
    let rto_mins = match args.rto_min.is_empty() {
        false => args.rto_min.clone(),
        true => vec![two_jiffies, millis(50), millis(200)],
    };
    for rto_min in &rto_mins {
        ensure!(
            (two_jiffies..=millis(200)).contains(rto_min),
            "--rto-min {}: must be between {} and 200ms on this kernel",
            humantime::format_duration(*rto_min),
            humantime::format_duration(two_jiffies)
        );
    }
    let disruptions_us: Vec<u64> = match (args.disruption.is_empty(), quick) {
        (false, _) => args.disruption.iter().copied().map(micros).collect(),
        (true, false) => Published::theory().disruptions_us(),
        (true, true) => vec![10_000, 60_000, 200_000, 700_000],
    };
    let settings = settings(&rto_mins);
    let (runs, control_runs) = if quick { (5, 1) } else { (11, 5) };
    let runs = args.runs.unwrap_or(runs);
    let control_runs = args.control_runs.unwrap_or(control_runs);
    let mut design = design(&settings, &disruptions_us, Machine::here()?.hz)?;
    let mut add = |name: &str, value| design.method.push((name.to_owned(), value));
    add("link", format!("{:?}", args.engine.link).to_lowercase());
    add(
        "runs of a cell",
        format!("{runs}; {control_runs} with route, sysctl and firewall"),
    );
    let mut cells = Vec::new();
    for &by in &args.mechanisms {
        if !by.is_possible() {
            add(&by.name(), "left out: not in this kernel".to_owned());
            continue;
        }
        let kernel = [(KERNEL, by.name())];
        let of_others: Vec<_> = settings.iter().map(|one| (*one, one.name())).collect();
        let (settings, runs) = match by {
            Mechanism::Kernel => (&kernel[..], runs),
            Mechanism::Agent => (&of_others[..], runs),
            Mechanism::Route | Mechanism::Sysctl | Mechanism::Firewall => {
                (&of_others[..], control_runs)
            }
        };
        for (setting, name) in settings {
            for &us in &disruptions_us {
                cells.push(Cell {
                    levels: levels(name, &by.name(), us),
                    settings: setting.settings(by, us)?,
                    runs,
                });
            }
        }
    }
    Plan::new(design, "idle", cells, &args.engine)
}

/// Each of these values with thin and thick streams.
fn settings(rto_mins: &[Duration]) -> Vec<Setting> {
    let each = rto_mins.iter().map(|rto_min| micros(*rto_min));
    let both = each.flat_map(|rto_min_us| [true, false].map(|thin| Setting { thin, rto_min_us }));
    both.collect()
}

fn levels(setting: &str, by: &str, lost_us: u64) -> Vec<(String, String)> {
    let lost = ms(lost_us).to_string();
    [("setting", setting), ("by", by), ("lost", &lost)]
        .map(|(factor, level)| (factor.to_owned(), level.to_owned()))
        .into()
}

/// The design for these settings.
fn design(settings: &[Setting], disruptions_us: &[u64], hz: u64) -> anyhow::Result<Design> {
    let mut design: Design = toml::from_str(DESIGN)?;
    let names: Vec<String> = settings.iter().map(|setting| setting.name()).collect();
    let medians = design.tables[0].clone();
    let mut table = |name: String, title: String, across: &[&str], only| {
        design.tables.push(TableSpec {
            name,
            title: format!("Idle, ms: {title}"),
            across: texts(across),
            only,
            ..medians.clone()
        });
    };
    for name in &names {
        let title = format!("{name}, measured, computed and published");
        table(
            name.replace(' ', "-"),
            title,
            &["by"],
            only("setting", &[name]),
        );
    }
    let rto_mins_ms: BTreeSet<u64> = settings.iter().map(|one| one.rto_min_us / 1000).collect();
    let named: Vec<String> = rto_mins_ms.iter().map(u64::to_string).collect();
    design.rto_min = format!("{} ms; kernel 200 ms", named.join(", "));
    for ms in rto_mins_ms {
        let mut both = only(
            "by",
            &["agent", "firewall", LINUX[0], LINUX[1], LINUX[2], LINUX[3]],
        );
        let settings = [format!("thin {ms} ms"), format!("thick {ms} ms")];
        both.insert("setting".to_owned(), settings.into());
        let title = format!("rto_min {ms} ms, here and published");
        table(
            format!("published-{ms}-ms"),
            title,
            &["setting", "by"],
            both,
        );
    }
    let all = names.into_iter().chain([Mechanism::Kernel.name()]);
    design.levels.insert("setting".to_owned(), all.collect());
    let each = settings
        .iter()
        .flat_map(|setting| disruptions_us.iter().map(|us| (*setting, *us)));
    design.references = each
        .flat_map(|(setting, lost_us)| references(setting, lost_us, hz))
        .collect();
    Ok(design)
}

/// Theory, the kernel's model (the median over the start of the outage) and published tables.
fn references(setting: Setting, lost_us: u64, hz: u64) -> Vec<Record> {
    let Setting { thin, rto_min_us } = setting;
    let near = LinuxTimers::near(hz, SRTT_US).with_rto_min(rto_min_us);
    let kernel = if thin { near.thin() } else { near };
    // Two jiffies are compared with the published 5 ms, although they are not the same.
    let (linux, rto_min_us) = match rto_min_us {
        ..20_000 => (&LINUX[2..], 5_000),
        us => (&LINUX[..2], us),
    };
    let column = PublishedColumn { thin, rto_min_us };
    let all = [
        (
            "theory",
            Some(ms(PublishedColumn {
                thin,
                rto_min_us: setting.rto_min_us,
            }
            .ideal_idle_us(lost_us))),
        ),
        ("kernel model", Some(ms(kernel.median_idle_us(lost_us)))),
        (
            "firewall model",
            Some(ms(kernel.median_own_firewall_idle_us(lost_us))),
        ),
        (linux[0], Published::linux_6_5().idle_ms(column, lost_us)),
        (linux[1], Published::linux_6_11().idle_ms(column, lost_us)),
    ];
    let records = all.into_iter().filter_map(|(by, idle_ms)| {
        let levels = levels(&setting.name(), by, lost_us);
        let levels = levels.iter().map(|(factor, level)| (&**factor, &**level));
        Some(Record::new(levels, 0).with("idle", idle_ms?))
    });
    records.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_named_and_computed() {
        let settings = settings(&[8, 200].map(Duration::from_millis));
        let design = design(&settings, &[10_000, 20_000], 250).unwrap();
        let named = [
            "thin 8 ms",
            "thick 8 ms",
            "thin 200 ms",
            "thick 200 ms",
            "kernel",
        ];
        assert_eq!(design.levels["setting"], named);
        let tables: Vec<&str> = design.tables.iter().map(|table| &*table.name).collect();
        assert_eq!(tables[..2], ["medians", "thin-8-ms"]);
        assert_eq!(tables[5..], ["published-8-ms", "published-200-ms"]);
        let of = |by: &str| -> Vec<f64> {
            let all = design.references.iter().filter(|one| one.level("by") == by);
            all.map(|one| one.values["idle"][0]).collect()
        };
        assert_eq!((of("theory").len(), of("theory")[1]), (8, 24.0));
        assert_eq!((of("kernel model").len(), of("kernel model")[0]), (8, 16.0));
        // 8 ms is compared with the values published for 5 ms, although they are not the same.
        let published = [LINUX[3], LINUX[1], LINUX[2]].map(|by| of(by).len());
        assert_eq!(published, [4, 4, 0]);
    }

    #[test]
    fn each_mechanism_applies_setting() {
        let (thin, rto_min_us) = (true, 8_000);
        for (by, message) in [
            (
                Mechanism::Agent,
                "policy = { rto_min = \"8000us\", thin_linear = true }",
            ),
            (Mechanism::Route, "route_rto_min = \"8ms\""),
            (Mechanism::Sysctl, "\"net.ipv4.tcp_rto_min_us\" = 8000"),
            (Mechanism::Kernel, "outage = \"10ms\", skip = 40"),
        ] {
            let made = Setting { thin, rto_min_us }.settings(by, 10_000);
            let made = made.unwrap().describe();
            assert!(made.contains(message), "{made}");
        }
    }
}
