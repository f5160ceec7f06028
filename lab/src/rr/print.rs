//! Prints an outcome as text.

use rto_testbed::tcp::TcpInfo;

use super::measure::{Interval, Outcome, Test, Times};
use crate::{
    report::Table,
    summary::{f, ms},
};

/// Connections whose ends are shown one by one; JSON has all.
const SHOWN: usize = 4;
/// As text for a terminal; the first lines are like netperf's.
pub fn text(outcome: &Outcome) -> String {
    let Outcome { test, to, .. } = outcome;
    let mut text = format!("{test} to {to}\n\n{}", rate(outcome).text());
    let transaction = match *test == Test::Connect.name() {
        true => "handshake",
        false => "transaction",
    };
    let mut latency = Table::new(
        "",
        "",
        &[
            "us", "min", "mean", "p50", "p90", "p99", "p99.9", "max", "stddev",
        ],
    );
    for (name, times) in [(transaction, outcome.latency), ("connect", outcome.connect)] {
        if let Some(times) = times {
            let mut cells = vec![name.to_owned()];
            cells.extend(numbers(&times));
            latency.row(cells);
        }
    }
    text.push_str(&format!("\n{}", latency.text()));
    if let Some(idle) = &outcome.longest_idle {
        text.push_str(&format!(
            "\nlongest idle time: {:.3} ms, starting at {:.3} s ({}){}{}\n",
            ms(idle.us),
            idle.after_s,
            idle.began,
            if outcome.connections > 1 {
                format!(", connection {}", idle.connection)
            } else {
                String::new()
            },
            if idle.unfinished { ", not over" } else { "" },
        ));
    }
    if !outcome.tcp.is_empty() {
        text.push_str(&format!("\n{}", ends(outcome).text()));
    }
    let more = outcome.tcp.len().saturating_sub(SHOWN);
    if more > 0 {
        text.push_str(&format!("and {more} more connections; --json has all\n"));
    }
    if outcome.retransmissions > 0 {
        text.push_str(&format!(
            "retransmissions by the client in total: {}\n",
            outcome.retransmissions
        ));
    }
    text
}

/// A table like netperf's TCP_RR.
fn rate(outcome: &Outcome) -> Table {
    let mut table = Table::new(
        "",
        "",
        &[
            "request, bytes",
            "response, bytes",
            "pause, ms",
            "connections",
            "elapsed, s",
            "transactions",
            "per s",
        ],
    );
    table.row([
        outcome.request_bytes.to_string(),
        outcome.response_bytes.to_string(),
        ms(outcome.pause_us).to_string(),
        outcome.connections.to_string(),
        format!("{:.2}", outcome.elapsed_s),
        outcome.transactions.to_string(),
        format!("{:.2}", outcome.transactions_per_s),
    ]);
    table
}

fn ends(outcome: &Outcome) -> Table {
    let mut table = Table::new(
        "",
        "",
        &[
            "TCP at the end, us",
            "srtt",
            "rttvar",
            "rto",
            "min_rtt",
            "retransmissions",
            "delivered",
        ],
    );
    for connection in outcome.tcp.iter().take(SHOWN) {
        table.row(line(
            format!("client {}", connection.local),
            &connection.client,
        ));
        if let Some(server) = &connection.server {
            table.row(line(format!("server {}", connection.peer), server));
        }
    }
    table
}

fn line(name: String, info: &TcpInfo) -> [String; 7] {
    [
        name,
        info.srtt_us.to_string(),
        info.rttvar_us.to_string(),
        info.rto_us.to_string(),
        info.min_rtt_us
            .map_or_else(String::new, |us| us.to_string()),
        info.total_retrans.to_string(),
        info.delivered.to_string(),
    ]
}

/// A line during the measurement.
pub fn live(interval: &Interval) -> String {
    let until = interval.from_s + interval.seconds;
    let rate = f(interval.transactions) / interval.seconds;
    let times = interval.latency.map_or_else(String::new, |t| {
        format!(
            ", p50 {} us, p99 {} us, max {} us",
            t.p50_us, t.p99_us, t.max_us
        )
    });
    format!("{until:8.1} s  {rate:10.1} per s{times}\n")
}

/// The numbers in the order of the headings.
fn numbers(times: &Times) -> [String; 8] {
    [
        times.min_us.to_string(),
        format!("{:.1}", times.mean_us),
        times.p50_us.to_string(),
        times.p90_us.to_string(),
        times.p99_us.to_string(),
        times.p99_9_us.to_string(),
        times.max_us.to_string(),
        format!("{:.1}", times.stddev_us),
    ]
}

#[cfg(test)]
mod tests {
    use hdrhistogram::Histogram;

    use super::*;
    use crate::rr::measure::{Connection, Ended, Idle};

    fn times() -> Option<Times> {
        let mut histogram = Histogram::<u64>::new(3).unwrap();
        for us in 1..=1000 {
            histogram.record(us).unwrap();
        }
        Times::of(&histogram)
    }

    fn outcome() -> Outcome {
        let client = TcpInfo {
            srtt_us: 101,
            rttvar_us: 20,
            rto_us: 204_000,
            min_rtt_us: Some(60),
            delivered: 1001,
            ..TcpInfo::default()
        };
        let server = TcpInfo {
            srtt_us: 32_000,
            min_rtt_us: None,
            ..client
        };
        let connection = Connection {
            local: ([10, 0, 0, 1], 40_000).into(),
            peer: ([10, 0, 0, 2], 4700).into(),
            connect_us: 150,
            client,
            server: Some(server),
        };
        Outcome {
            to: ([10, 0, 0, 2], 4700).into(),
            test: "TCP_RR",
            request_bytes: 1,
            response_bytes: 2,
            pause_us: 1500,
            connections: 2,
            began: "2026-01-02T03:04:05.000Z".to_owned(),
            elapsed_s: 10.004,
            transactions: 1000,
            transactions_per_s: 99.96,
            latency: times(),
            connect: None,
            longest_idle: Some(Idle {
                us: 208_123,
                after_s: 3.5,
                began: "2026-01-02T03:04:08.500Z".to_owned(),
                connection: 2,
                unfinished: true,
            }),
            retransmissions: 1,
            tcp: vec![connection; 5],
            remarks: Vec::new(),
            ended: Ended::Done,
            reason: None,
        }
    }

    #[test]
    fn rr_result_is_shown() {
        insta::assert_snapshot!(text(&outcome()));
    }

    #[test]
    fn live_line_has_rate_and_percentiles() {
        let interval = Interval {
            from_s: 1.0,
            seconds: 0.5,
            transactions: 1000,
            latency: times(),
            is_rest: false,
        };
        assert_eq!(
            live(&interval),
            "     1.5 s      2000.0 per s, p50 500 us, p99 990 us, max 1000 us\n"
        );
    }
}
