//! The round-trip time of a request/response connection as each end's TCP sees it, and as the application does,
//! by the pause between a response and the next request.
//!
//! A response is acknowledged by the next request or by a delayed ACK, whichever comes first, so that the
//! server's RTT sample is about the shorter of the pause and the client's delayed-ACK timer. Nothing is lost here: what
//! is retransmitted is retransmitted spuriously.

mod report;

use std::{
    cmp::Reverse,
    ops::RangeInclusive,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use hdrhistogram::Histogram;
use indicatif::{ProgressBar, ProgressStyle};
use rand::{SeedableRng as _, rngs::ChaCha8Rng, seq::SliceRandom as _};
use rto_testbed::{
    agent::Agent,
    channel::ControlChannel,
    machine::{Machine, jiffy},
    tcp::TcpInfo,
    warm::{self, Learnt},
    workload::{
        Role,
        rtt::{Client, Seen},
    },
};

use crate::{
    interrupt,
    report::Report,
    rr::measure::Times,
    topology::{LinkBackend, Topology},
};

/// Number of the first topology's link.
const FIRST: u8 = 61;
/// Numbers of links among which are clients of both arms, but for one case in 500,000.
const AUTO_FIRST: u8 = 71;
const AUTO_LAST: u8 = 90;
/// The policy that learns, and the share of its control arm.
const AUTO: &str = "auto";
const HOLDOUT: &str = "50%";
/// Pauses of the control arm that is learnt from, milliseconds: its ACKs are late by so much.
const LATE_MS: RangeInclusive<u64> = 20..=36;
/// What a daemon would have seen for hours of a control arm with pauses of [`LATE_MS`]: by how much ACKs were late,
/// microseconds, and how many of them a second.
const SEEN: [(u64, u64); 2] = [(20_480, 50), (36_864, 50)];
/// Transactions a second that disturb each other little, on two cores.
const LOAD: f64 = 400.0;
/// A transaction over the emulated link and what goes with it.
const TRANSACTION: Duration = Duration::from_micros(400);
/// How often a wait looks for signals.
const TICK: Duration = Duration::from_millis(50);
/// What the policies set, if that is two jiffies.
const BOUND: Duration = Duration::from_millis(8);

/// What to measure.
#[derive(Clone, Copy, Debug)]
pub struct Options<'a> {
    /// Fewer pauses and transactions.
    pub quick: bool,
    /// Transactions of each connection; `None`: the default.
    pub transactions: Option<usize>,
    /// Of the order.
    pub seed: u64,
    /// The agent's binary.
    pub agent: &'a Path,
}

impl Options<'_> {
    /// Milliseconds. The timer is at 40, and a jiffy later where it is not exact.
    fn pauses(self) -> &'static [u64] {
        if self.quick {
            &[0, 8, 20, 30, 60]
        } else {
            &[
                0, 1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 41, 44, 48, 60,
            ]
        }
    }

    /// Of each connection: those at its begin, when ACKs are not delayed (16 in a row) and the smoothed time still
    /// remembers the handshake (an eighth of each sample is taken), and those measured.
    fn transactions(self) -> (usize, usize) {
        let (skip, count) = if self.quick { (40, 60) } else { (60, 400) };
        (skip, self.transactions.unwrap_or(count))
    }
}

/// What the agent sets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Setting {
    /// Nothing: no entry covers the connection.
    Kernel,
    /// The delayed-ACK timer, at both ends.
    Delack,
    /// rto_min at both ends, which bounds the delayed ACK as well (Linux 6.11).
    RtoMin,
    /// rto_min at the server alone: the client's ACKs are as late as ever.
    RtoMinServer,
    /// The same, learnt; a client of the policy's treated arm.
    AutoServer,
    /// A client of its control arm, from which it is learnt.
    AutoControl,
}

impl Setting {
    const ALL: [Self; 6] = [
        Self::Kernel,
        Self::Delack,
        Self::RtoMin,
        Self::RtoMinServer,
        Self::AutoServer,
        Self::AutoControl,
    ];

    /// Numbers that the link may have: those of the last two depend on in which arm the client's address is.
    const fn numbers(self) -> RangeInclusive<u8> {
        match self {
            Self::AutoServer | Self::AutoControl => AUTO_FIRST..=AUTO_LAST,
            _ => FIRST + self as u8..=FIRST + self as u8,
        }
    }

    /// The number of its link.
    fn number(self, agent: &Agent) -> anyhow::Result<u8> {
        for number in self.numbers() {
            let lookup = agent.cli(&["lookup", &client(number)])?;
            let is_control = lookup.contains("this peer is in its control arm");
            if is_control == (self == Self::AutoControl) {
                return Ok(number);
            }
        }
        bail!("no address is in the arm of {self:?}")
    }

    /// Transactions of a connection, where a setting's failures are so rare that the others' do not show them.
    fn times(self, pause_ms: u64) -> usize {
        if self == Self::AutoServer && LATE_MS.contains(&pause_ms) {
            5
        } else {
            1
        }
    }

    fn name(self, bound: Duration) -> String {
        let bound = humantime::format_duration(bound);
        match self {
            Self::Kernel => "kernel".to_owned(),
            Self::Delack => format!("delack_max {bound}"),
            Self::RtoMin => format!("rto_min {bound}"),
            Self::RtoMinServer => format!("rto_min {bound} (server)"),
            Self::AutoServer => "rto_min auto (server)".to_owned(),
            Self::AutoControl => "rto_min auto, control arm (server)".to_owned(),
        }
    }

    fn policy(self, bound: Duration) -> Option<String> {
        let number = *self.numbers().start();
        let (name, cidr, key) = match self {
            Self::Kernel | Self::AutoControl => return None,
            Self::AutoServer => {
                let peers = self
                    .numbers()
                    .map(|number| format!("\"{}/32\"", client(number)));
                let peers = peers.collect::<Vec<_>>().join(", ");
                return Some(format!(
                    "[policy.{AUTO}]\ncidrs = [{peers}]\nrto_min = \"auto\"\nholdout = \"{HOLDOUT}\"\n"
                ));
            }
            Self::Delack => ("delack", format!("10.89.{number}.0/24"), "delack_max"),
            Self::RtoMin => ("rto-min", format!("10.89.{number}.0/24"), "rto_min"),
            // The client's address: it is the server that connections to it belong to.
            Self::RtoMinServer => ("server", format!("{}/32", client(number)), "rto_min"),
        };
        let bound = humantime::format_duration(bound)
            .to_string()
            .replace(' ', "");
        Some(format!(
            "[policy.{name}]\ncidrs = [\"{cidr}\"]\n{key} = \"{bound}\"\n"
        ))
    }
}

/// The client's address on a link.
fn client(number: u8) -> String {
    format!("10.89.{number}.1")
}

/// A connection that was measured.
#[derive(Clone, Copy, Debug)]
struct Cell {
    setting: Setting,
    pause_ms: u64,
    latency: Times,
    client: TcpInfo,
    server: TcpInfo,
}

/// The namespaces of a setting, and their server.
struct Testbed {
    topology: Topology,
    server: ControlChannel,
}

/// Measures, and reports.
///
/// # Errors
///
/// If something cannot be made or measured.
pub fn run(options: Options<'_>) -> anyhow::Result<Report> {
    let bound = BOUND.max(jiffy() * 2);
    let mut agent = Agent::new(options.agent.to_owned())?;
    let policies = Setting::ALL.into_iter().filter_map(|s| s.policy(bound));
    agent.configure(&policies.collect::<String>())?;
    let seen = warm::Seen {
        each_second: &SEEN,
        hz: u32::try_from(Machine::here()?.hz)?,
    };
    let learnt = Learnt::RtoMin(seen).start(&mut agent, AUTO)?;
    let (skip, count) = options.transactions();
    let mut testbeds = Vec::new();
    for setting in Setting::ALL {
        let cgroup = Some(agent.cgroup.path());
        let number = setting.number(&agent)?;
        let topology = Topology::new(LinkBackend::Relay, number, options.seed, cgroup)?;
        let on = topology.server_address();
        let server = topology.serve(&Role::RttServer { on, skip })?;
        testbeds.push(Testbed { topology, server });
    }
    let mut order: Vec<(Setting, u64)> = Vec::new();
    for pause in options.pauses() {
        order.extend(Setting::ALL.map(|setting| (setting, *pause)));
    }
    order.shuffle(&mut ChaCha8Rng::seed_from_u64(options.seed));
    // Of a length, as those that are measured at once take as long as the longest.
    order.sort_by_key(|cell| Reverse(expected_ms(&[*cell], skip, count)));
    let waves = waves(&order);
    let bar = ProgressBar::new(
        waves
            .iter()
            .map(|wave| expected_ms(wave, skip, count))
            .sum(),
    );
    bar.set_style(ProgressStyle::with_template(
        "{bar:40} {percent} %, {eta} left",
    )?);
    let mut cells = Vec::new();
    for wave in waves {
        cells.extend(measure_wave(&mut testbeds, &wave, skip, count)?);
        bar.inc(expected_ms(&wave, skip, count));
    }
    bar.finish_and_clear();
    let in_force = agent.json(&["tune", AUTO])?["policies"][AUTO]["timers"][0]["value_us"].as_u64();
    let mut report = report::report(
        Machine::here()?,
        bound,
        options.pauses(),
        [skip, count],
        &cells,
    );
    report
        .findings
        .push(report::learnt(learnt, in_force.map(Duration::from_micros)));
    report.seed = options.seed;
    report.method = vec![
        (
            "link".to_owned(),
            "emulated, without delay and loss of its own".to_owned(),
        ),
        (
            "transactions".to_owned(),
            format!("{count} of each connection, after {skip}; 1 byte and 2 bytes"),
        ),
        (
            Setting::AutoServer.name(bound),
            format!(
                "learnt from the control arm, {HOLDOUT} of the peers; warmed up by two hours of delays: {} of {} us and \
                 {} of {} us a second; {} times the transactions at pauses of {} to {} ms",
                SEEN[0].1,
                SEEN[0].0,
                SEEN[1].1,
                SEEN[1].0,
                Setting::AutoServer.times(*LATE_MS.start()),
                LATE_MS.start(),
                LATE_MS.end()
            ),
        ),
        (
            "TCP's view".to_owned(),
            "TCP_INFO at each response (client) and request (server): medians".to_owned(),
        ),
    ];
    Ok(report)
}

/// Cells that are measured at the same time.
fn waves(order: &[(Setting, u64)]) -> Vec<Vec<(Setting, u64)>> {
    let rate = |pause: u64| 1.0 / (Duration::from_millis(pause) + TRANSACTION).as_secs_f64();
    let mut waves: Vec<(f64, Vec<(Setting, u64)>)> = Vec::new();
    for &(setting, pause) in order {
        let room = waves
            .iter_mut()
            .find(|(load, _)| load + rate(pause) <= LOAD);
        match room {
            Some((load, wave)) => {
                *load += rate(pause);
                wave.push((setting, pause));
            }
            None => waves.push((rate(pause), vec![(setting, pause)])),
        }
    }
    waves.into_iter().map(|(_, wave)| wave).collect()
}

fn expected_ms(wave: &[(Setting, u64)], skip: usize, count: usize) -> u64 {
    let each = wave.iter().map(|(setting, pause)| {
        let transactions = skip + count * setting.times(*pause);
        (pause + 1) * transactions as u64
    });
    each.max().unwrap_or(0)
}

fn measure_wave(
    testbeds: &mut [Testbed],
    wave: &[(Setting, u64)],
    skip: usize,
    count: usize,
) -> anyhow::Result<Vec<Cell>> {
    let end = Instant::now() + Duration::from_millis(expected_ms(wave, skip, count));
    let mut clients = Vec::new();
    for (setting, pause) in wave {
        let topology = &testbeds[*setting as usize].topology;
        clients.push(topology.client(&Role::RttClient(Client {
            to: topology.server_address(),
            pause: Duration::from_millis(*pause),
            skip,
            count: count * setting.times(*pause),
        }))?);
    }
    // Their answers cannot come sooner, and who only waits for an answer hears no signal.
    while Instant::now() < end {
        interrupt::check()?;
        thread::sleep(TICK);
    }
    let mut cells = Vec::new();
    for (&(setting, pause_ms), client) in wave.iter().zip(&mut clients) {
        interrupt::check()?;
        let seen: Seen = client.recv()?;
        let mut latencies = Histogram::<u64>::new(3)?;
        for us in &seen.latencies_us {
            latencies.record(*us)?;
        }
        cells.push(Cell {
            setting,
            pause_ms,
            latency: Times::of(&latencies).context("nothing to measure")?,
            client: seen.info,
            server: testbeds[setting as usize].server.request(&seen.port)?,
        });
    }
    Ok(cells)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waves_hold_every_cell_once_and_no_more_than_they_may() {
        let pauses = [0, 1, 8, 40, 41, 60];
        let order: Vec<_> = pauses
            .iter()
            .flat_map(|pause| Setting::ALL.map(|setting| (setting, *pause)))
            .collect();
        let waves = waves(&order);
        for wave in &waves {
            let rate: f64 = wave.iter().map(|(_, p)| 1000.0 / (*p as f64 + 0.4)).sum();
            assert!(rate <= LOAD || wave.len() == 1, "{wave:?}");
        }
        assert_eq!(waves.iter().map(Vec::len).sum::<usize>(), order.len());
        // The long pauses of all settings are measured at once.
        assert!(waves.iter().any(|wave| wave.len() >= 10), "{waves:?}");
    }

    #[test]
    fn policies_tell_the_fields_apart() {
        let auto = Setting::AutoServer.policy(BOUND).unwrap();
        assert!(
            auto.starts_with("[policy.auto]\ncidrs = [\"10.89.71.1/32\", "),
            "{auto}"
        );
        assert!(
            auto.ends_with("rto_min = \"auto\"\nholdout = \"50%\"\n"),
            "{auto}"
        );
        let all: Vec<String> = Setting::ALL[..4]
            .iter()
            .filter_map(|setting| setting.policy(BOUND))
            .collect();
        assert_eq!(
            all.concat(),
            "[policy.delack]\ncidrs = [\"10.89.62.0/24\"]\ndelack_max = \"8ms\"\n\
             [policy.rto-min]\ncidrs = [\"10.89.63.0/24\"]\nrto_min = \"8ms\"\n\
             [policy.server]\ncidrs = [\"10.89.64.1/32\"]\nrto_min = \"8ms\"\n"
        );
    }
}
