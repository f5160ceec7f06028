//! What was measured, in tables, charts and words.

use std::time::Duration;

use rto_model::chart::{Axis, Chart, Legend, Series};
use rto_testbed::machine::Machine;

use super::{Cell, LATE_MS, Setting};
use crate::report::{Report, Table};

/// Published for one client on a local network: pause in ms; min, mean, p50, p90, p99 of its latency in us.
const PUBLISHED: [(u64, [u64; 5]); 5] = [
    (0, [60, 101, 95, 133, 197]),
    (8, [93, 159, 149, 209, 300]),
    (16, [101, 171, 162, 226, 324]),
    (32, [115, 194, 186, 249, 342]),
    (41, [109, 193, 186, 246, 334]),
];

pub(super) fn report(
    machine: Machine,
    bound: Duration,
    pauses: &[u64],
    [skip, count]: [usize; 2],
    cells: &[Cell],
) -> Report {
    let all = All {
        bound,
        pauses,
        skip,
        count,
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
                ms(cell.client.srtt_us)
            }),
            all.table("rto-server", "RTO at the server, ms", |cell| {
                ms(cell.server.rto_us)
            }),
            all.table(
                "retransmissions",
                "Spurious retransmissions by the server (nothing is lost)",
                |cell| cell.server.total_retrans.to_string(),
            ),
            all.latencies(),
        ],
        charts: all.charts(),
    }
}

/// The value that was learnt, and the one in force at the end.
pub(super) fn learnt(begin: Duration, end: Option<Duration>) -> String {
    let text = |value: Duration| humantime::format_duration(value).to_string();
    format!(
        "rto_min auto: {} when the measurement began, {} when it ended.",
        text(begin),
        end.map_or("the kernel's own".to_owned(), text)
    )
}

struct All<'a> {
    bound: Duration,
    pauses: &'a [u64],
    /// Transactions of each connection that are not measured, and those that are.
    skip: usize,
    count: usize,
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
                    let t = cell.latency;
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
        let chart = |title: &str, y, series| Chart {
            title: title.to_owned(),
            x: Axis::ms("pause"),
            y: Axis::ms(y),
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
                f(cell.client.srtt_us) / 1000.0
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
                f(cell.latency.p50_us) / 1000.0
            }));
            latency.push(line(named("p90", setting), setting, |cell| {
                f(cell.latency.p90_us) / 1000.0
            }));
        }
        for (name, at) in [("p50, published", 2), ("p90, published", 3)] {
            let points = PUBLISHED.map(|(pause, times)| (f(pause), f(times[at]) / 1000.0));
            latency.push(Series::line(name, points.into()));
        }
        vec![
            chart("smoothed RTT", "smoothed RTT", srtt),
            chart("the server's RTO", "RTO", rto.into()),
            chart("latency as the application sees it", "latency", latency),
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
        let network = peak.client.srtt_us;
        findings.push(format!(
            "With the kernel's own timers the server's smoothed RTT is longest at a pause of {pause} ms: {} ms, {:.0} \
             times the client's ({} ms), which is the network's; without a pause it is {} ms.",
            ms(peak.server.srtt_us),
            f(peak.server.srtt_us) / f(network.max(1)),
            ms(network),
            ms(without.server.srtt_us),
        ));
        let beyond: Vec<&Cell> = self
            .of(Setting::Kernel)
            .filter(|cell| cell.pause_ms > pause)
            .collect();
        if let (Some(next), Some(last)) = (beyond.first(), beyond.last()) {
            let falls = 4 * last.server.srtt_us < 3 * peak.server.srtt_us;
            let longest = beyond.iter().map(|cell| cell.server.srtt_us).max();
            findings.push(format!(
                "With longer pauses ({} ms and more) it {}: at most {} ms.",
                next.pause_ms,
                if falls {
                    "falls back"
                } else {
                    "stays near that"
                },
                ms(longest.unwrap_or(0)),
            ));
        }
        for setting in [Setting::Delack, Setting::RtoMin, Setting::RtoMinServer] {
            if let (Some(cell), Some(most)) = (self.at(setting, pause), highest(setting)) {
                findings.push(format!(
                    "{}: the server's smoothed RTT is {} ms at a pause of {pause} ms, and nowhere \
                     above {} ms (at {} ms).",
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
            "The RTO is the smoothed RTT plus the larger of rto_min and four mean deviations. At a pause of {pause} ms a server that \
             loses a response waits {}; without a pause {} ms with the kernel's own timers.",
            rtos.join(", "),
            ms(without.server.rto_us),
        ));
        for setting in Setting::ALL {
            findings.push(self.spurious(setting));
        }
        findings.extend(self.late());
        findings.extend(self.application(pause));
        findings
    }

    fn spurious(&self, setting: Setting) -> String {
        let name = setting.name(self.bound);
        let cells: Vec<&Cell> = self
            .of(setting)
            .filter(|cell| cell.server.total_retrans > 0)
            .collect();
        let worst = cells.iter().max_by_key(|cell| cell.server.total_retrans);
        let Some(worst) = worst else {
            return format!("{name}: the server retransmitted nothing.");
        };
        let all: u32 = cells.iter().map(|cell| cell.server.total_retrans).sum();
        let most = worst.server.total_retrans;
        let transactions = self.transactions(worst);
        let why = if setting == Setting::RtoMinServer && u64::from(most) * 2 > transactions {
            ": its timer runs out before the client's delayed ACK comes, again and again."
        } else {
            "."
        };
        format!(
            "{name}: the server retransmitted {all} responses spuriously; at a pause of {} ms {most} of {transactions}{why}",
            worst.pause_ms,
        )
    }

    /// Of a connection, also those not measured.
    fn transactions(&self, cell: &Cell) -> u64 {
        (self.skip + self.count * cell.setting.times(cell.pause_ms)) as u64
    }

    /// Responses that were retransmitted, of all with pauses that the client's delayed ACK comes after.
    fn late(&self) -> Option<String> {
        let late: Vec<&Cell> = self
            .of(Setting::AutoServer)
            .filter(|cell| LATE_MS.contains(&cell.pause_ms))
            .collect();
        let again: u64 = late
            .iter()
            .map(|cell| u64::from(cell.server.total_retrans))
            .sum();
        let all: u64 = late.iter().map(|cell| self.transactions(cell)).sum();
        (all > 0).then(|| {
            format!(
                "{}: with pauses of {} to {} ms {again} of {all} responses were retransmitted, spuriously: {:.3} %.",
                Setting::AutoServer.name(self.bound),
                LATE_MS.start(),
                LATE_MS.end(),
                100.0 * f(again) / f(all)
            )
        })
    }

    /// What the application has of it.
    fn application(&self, pause: u64) -> Option<String> {
        let median = |setting, pause| Some(self.at(setting, pause)?.latency.p50_us);
        let published = |(at, _): &&(u64, _)| self.pauses.contains(at);
        let longest = PUBLISHED.iter().rfind(published)?;
        Some(format!(
            "The application sees a median of {} us without a pause and {} us at {pause} ms ({} us with {}): what the \
             server's TCP sees beyond that is the client's pause, not the network. Published: {} us without a pause, {} us at \
             {} ms, for which {} us were measured.",
            median(Setting::Kernel, 0)?,
            median(Setting::Kernel, pause)?,
            median(Setting::Delack, pause)?,
            Setting::Delack.name(self.bound),
            PUBLISHED[0].1[2],
            longest.1[2],
            longest.0,
            median(Setting::Kernel, longest.0)?,
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

#[cfg(test)]
mod tests {
    use rto_testbed::tcp::TcpInfo;

    use super::*;
    use crate::rr::measure::Times;

    /// As the mechanism would have it: the shorter of the pause and the timer, and a network of 0.2 ms.
    fn cell(setting: Setting, pause_ms: u64) -> Cell {
        let timer = match setting {
            Setting::Delack | Setting::RtoMin => 8,
            _ => 40,
        };
        let rto_min = match setting {
            Setting::Kernel | Setting::Delack | Setting::AutoControl => 200,
            Setting::RtoMin | Setting::RtoMinServer => 8,
            Setting::AutoServer => 56,
        };
        let waits = if pause_ms < 40 {
            pause_ms.min(timer)
        } else {
            0
        };
        let info = |ms: u64, total_retrans| TcpInfo {
            srtt_us: u32::try_from(ms * 1000 + 200).unwrap(),
            rto_us: u32::try_from((ms + rto_min + 4) * 1000).unwrap(),
            total_retrans,
            ..TcpInfo::default()
        };
        let spurious = setting == Setting::RtoMinServer && waits > 8;
        Cell {
            setting,
            pause_ms,
            latency: Times {
                count: 60,
                min_us: 50 + pause_ms,
                mean_us: 100.0,
                p50_us: 90 + pause_ms,
                p90_us: 150,
                p99_us: 300,
                p99_9_us: 400,
                max_us: 500,
                stddev_us: 1.0,
            },
            client: info(0, 0),
            server: info(waits, if spurious { 98 } else { 0 }),
        }
    }

    #[test]
    fn in_words() {
        let pauses = [0, 8, 30, 60];
        let cells: Vec<Cell> = pauses
            .iter()
            .flat_map(|pause| Setting::ALL.map(|setting| cell(setting, *pause)))
            .collect();
        let machine = Machine {
            kernel: "6.18.5".to_owned(),
            hz: 250,
            architecture: "x86_64".to_owned(),
            processor: "a processor".to_owned(),
            cores: 2,
        };
        let report = report(machine, Duration::from_millis(8), &pauses, [40, 60], &cells);
        insta::assert_snapshot!(report.text());
        for chart in &report.charts {
            rto_model::chart::svg(std::slice::from_ref(chart)).unwrap();
        }
    }
}
