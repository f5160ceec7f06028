//! What was measured, in tables, charts and words.

use std::time::Duration;

use rto_model::chart::{Chart, Legend, Series};

use super::{Cell, Setting};
use crate::{
    machine::Machine,
    report::{Report, Table},
};

/// Published for a client with one connection over a local network: pause in ms, and min, mean, p50, p90, p99 of its latency in us.
const PUBLISHED: [(u64, [u64; 5]); 5] = [
    (0, [60, 101, 95, 133, 197]),
    (8, [93, 159, 149, 209, 300]),
    (16, [101, 171, 162, 226, 324]),
    (32, [115, 194, 186, 249, 342]),
    (41, [109, 193, 186, 246, 334]),
];

pub(super) fn report(machine: Machine, bound: Duration, pauses: &[u64], cells: &[Cell]) -> Report {
    let all = All {
        bound,
        pauses,
        cells,
    };
    Report {
        name: "rtt".to_owned(),
        question: "How long is the round-trip time of a request/response connection as each end's TCP sees it, and \
                   as the application does, when the client pauses before its next request?"
            .to_owned(),
        machine,
        seed: 0,
        method: Vec::new(),
        findings: all.findings(),
        tables: vec![
            all.table("srtt-server", "Smoothed RTT at the server, ms", |cell| {
                ms(cell.server.srtt_us)
            }),
            all.table("srtt-client", "Smoothed RTT at the client, ms", |cell| {
                ms(cell.client.info.srtt_us)
            }),
            all.table("rto-server", "RTO at the server, ms", |cell| {
                ms(cell.server.rto_us)
            }),
            all.table(
                "retransmissions",
                "Sent again by the server, though nothing is lost",
                |cell| cell.server.total_retrans.to_string(),
            ),
            all.latencies(),
        ],
        charts: all.charts(),
    }
}

struct All<'a> {
    bound: Duration,
    pauses: &'a [u64],
    cells: &'a [Cell],
}

impl All<'_> {
    fn of(&self, setting: Setting) -> impl Iterator<Item = &Cell> {
        self.pauses
            .iter()
            .filter_map(move |pause| self.at(setting, *pause))
    }

    fn at(&self, setting: Setting, pause: u64) -> Option<&Cell> {
        self.cells
            .iter()
            .find(|cell| cell.setting == setting && cell.pause_ms == pause)
    }

    /// Pause by setting.
    fn table(&self, name: &str, title: &str, value: fn(&Cell) -> String) -> Table {
        let names = Setting::ALL.map(|setting| setting.name(self.bound));
        let mut columns = vec!["pause, ms"];
        columns.extend(names.iter().map(String::as_str));
        let mut table = Table::new(name, title, &columns);
        for pause in self.pauses {
            let mut row = vec![pause.to_string()];
            row.extend(
                Setting::ALL
                    .map(|setting| self.at(setting, *pause).map_or_else(String::new, value)),
            );
            table.row(row);
        }
        table
    }

    fn latencies(&self) -> Table {
        let mut table = Table::new(
            "latency",
            "Latency as the application sees it, us",
            &[
                "pause, ms",
                "timers",
                "min",
                "mean",
                "p50",
                "p90",
                "p99",
                "p99.9",
            ],
        );
        for pause in self.pauses {
            for setting in Setting::ALL {
                if let Some(cell) = self.at(setting, *pause) {
                    let t = cell.client.latency;
                    let mut row = vec![pause.to_string(), setting.name(self.bound)];
                    row.extend([t.min_us.to_string(), format!("{:.0}", t.mean_us)]);
                    row.extend([t.p50_us, t.p90_us, t.p99_us, t.p99_9_us].map(|us| us.to_string()));
                    table.row(row);
                }
            }
            if let Some((_, published)) = PUBLISHED.iter().find(|(at, _)| at == pause) {
                let mut row = vec![pause.to_string(), "published".to_owned()];
                row.extend(published.map(|us| us.to_string()));
                row.push(String::new());
                table.row(row);
            }
        }
        table
    }

    fn charts(&self) -> Vec<Chart> {
        let chart = |title: &str, series| Chart {
            title: title.to_owned(),
            log_x: false,
            log_y: false,
            legend: Legend::UpperLeft,
            series,
        };
        let line = |name: String, setting, value: fn(&Cell) -> f64| {
            let points = self.of(setting).map(|cell| (f(cell.pause_ms), value(cell)));
            Series::line(&name, points.collect())
        };
        let named = |end: &str, setting: Setting| format!("{end}, {}", setting.name(self.bound));
        let mut srtt: Vec<Series> = Setting::ALL
            .map(|setting| {
                line(named("server", setting), setting, |cell| {
                    f(cell.server.srtt_us) / 1000.0
                })
            })
            .into();
        for setting in [Setting::Kernel, Setting::Delack] {
            srtt.push(line(named("client", setting), setting, |cell| {
                f(cell.client.info.srtt_us) / 1000.0
            }));
        }
        let rto = Setting::ALL.map(|setting| {
            line(named("server", setting), setting, |cell| {
                f(cell.server.rto_us) / 1000.0
            })
        });
        let mut latency = Vec::new();
        for setting in [Setting::Kernel, Setting::Delack] {
            latency.push(line(named("p50", setting), setting, |cell| {
                f(cell.client.latency.p50_us)
            }));
            latency.push(line(named("p90", setting), setting, |cell| {
                f(cell.client.latency.p90_us)
            }));
        }
        for (name, at) in [("p50, published", 2), ("p90, published", 3)] {
            let points = PUBLISHED.map(|(pause, times)| (f(pause), f(times[at])));
            latency.push(Series::line(name, points.into()));
        }
        vec![
            chart("smoothed RTT, ms, by pause, ms", srtt),
            chart("the server's RTO, ms, by pause, ms", rto.into()),
            chart(
                "latency as the application sees it, us, by pause, ms",
                latency,
            ),
        ]
    }

    fn findings(&self) -> Vec<String> {
        let mut findings = Vec::new();
        let highest = |setting| self.of(setting).max_by_key(|cell| cell.server.srtt_us);
        let (Some(peak), Some(without)) = (highest(Setting::Kernel), self.at(Setting::Kernel, 0))
        else {
            return findings;
        };
        let pause = peak.pause_ms;
        let network = peak.client.info.srtt_us;
        findings.push(format!(
            "With the kernel's own timers the server's smoothed RTT grows with the pause: at {pause} ms it is {} ms, {:.0} \
             times the client's ({} ms), which is the network's.",
            ms(peak.server.srtt_us),
            f(peak.server.srtt_us) / f(network.max(1)),
            ms(network),
        ));
        if let Some(last) = self.of(Setting::Kernel).last()
            && last.pause_ms > pause
        {
            let falls = 4 * last.server.srtt_us < 3 * peak.server.srtt_us;
            let so = if falls {
                "falls back"
            } else {
                "stays near that"
            };
            let at = self.fallen(peak).unwrap_or(last);
            findings.push(format!(
                "With longer pauses it {so}: {} ms at a pause of {} ms, {} ms at {} ms.",
                ms(at.server.srtt_us),
                at.pause_ms,
                ms(last.server.srtt_us),
                last.pause_ms,
            ));
        }
        for setting in [Setting::Delack, Setting::RtoMin, Setting::RtoMinServer] {
            if let (Some(cell), Some(most)) = (self.at(setting, pause), highest(setting)) {
                findings.push(format!(
                    "{}: the server's smoothed RTT is {} ms at a pause of {pause} ms, and nowhere above {} ms (at {} ms).",
                    setting.name(self.bound),
                    ms(cell.server.srtt_us),
                    ms(most.server.srtt_us),
                    most.pause_ms,
                ));
            }
        }
        let rtos: Vec<String> = Setting::ALL
            .into_iter()
            .filter_map(|setting| {
                let rto = self.at(setting, pause)?.server.rto_us;
                Some(format!("{} ms ({})", ms(rto), setting.name(self.bound)))
            })
            .collect();
        findings.push(format!(
            "The RTO is the smoothed RTT and the larger of rto_min and four deviations. At a pause of {pause} ms a server that \
             loses a response waits {}; without a pause {} ms with the kernel's own timers.",
            rtos.join(", "),
            ms(without.server.rto_us),
        ));
        for setting in Setting::ALL {
            findings.push(self.needless(setting));
        }
        findings.extend(self.application(pause));
        findings
    }

    /// The first pause after the peak with less than three quarters of it.
    fn fallen(&self, peak: &Cell) -> Option<&Cell> {
        self.of(Setting::Kernel).find(|cell| {
            cell.pause_ms > peak.pause_ms && 4 * cell.server.srtt_us < 3 * peak.server.srtt_us
        })
    }

    fn needless(&self, setting: Setting) -> String {
        let name = setting.name(self.bound);
        let again: Vec<&Cell> = self
            .of(setting)
            .filter(|cell| cell.server.total_retrans > 0)
            .collect();
        let (Some(first), Some(last)) = (again.first(), again.last()) else {
            return format!("{name}: the server sent nothing again.");
        };
        let all: u32 = again.iter().map(|cell| cell.server.total_retrans).sum();
        let of: u64 = self.of(setting).map(|cell| cell.client.latency.count).sum();
        format!(
            "{name}: the server sent {all} segments again in vain (measured: {of} transactions), at pauses from {} to {} ms{}",
            first.pause_ms,
            last.pause_ms,
            if setting == Setting::RtoMinServer {
                ": its timers ran out before the client's delayed ACK."
            } else {
                "."
            }
        )
    }

    /// What the application has of it.
    fn application(&self, pause: u64) -> Option<String> {
        let median = |setting, pause| Some(self.at(setting, pause)?.client.latency.p50_us);
        Some(format!(
            "The application sees a median of {} us without a pause and {} us at {pause} ms ({} us with {}): what the \
             server's TCP sees beyond that is the client's pause, not the network.",
            median(Setting::Kernel, 0)?,
            median(Setting::Kernel, pause)?,
            median(Setting::Delack, pause)?,
            Setting::Delack.name(self.bound),
        ))
    }
}

fn ms(us: u32) -> String {
    format!("{:.2}", f(us) / 1000.0)
}

#[expect(
    clippy::cast_precision_loss,
    reason = "milliseconds and microseconds of a connection"
)]
fn f(number: impl Into<u64>) -> f64 {
    number.into() as f64
}
