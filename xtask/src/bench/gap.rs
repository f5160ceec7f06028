//! How exact an initial RTO is: the first gap between the SYNs of connections to a black hole, by the packets'
//! timestamps.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use anyhow::ensure;
use rto_testbed::{
    capture::{Capture, syns},
    env::TestEnv,
    machine,
    netns::{CLIENT_LINK, SERVER_V4},
    wait::TIMEOUT,
    workload::traffic::Traffic,
};

use super::{
    Sample, go_on,
    page::{Amount, Found, Goal, table},
    start::millis,
};

/// The policy's initial RTO, and the kernel's own.
const TIMER: Duration = Duration::from_millis(100);
const KERNEL: Duration = Duration::from_secs(1);
/// Connections at once. The processes begin at any point of a jiffy.
const BATCH: usize = 50;
const PORT: u16 = 7300;
/// What the integration tests allow as well.
const EARLY_MS: f64 = 1.0;

pub(super) fn run(amount: Amount, programs: &Path) -> anyhow::Result<Found> {
    let mut world = TestEnv::of(programs.join("rto-agent"))?;
    world.configure("[policy.near]\ncidrs = [\"10.88.0.0/24\"]\ninitial_rto = \"100ms\"\n")?;
    world.start()?;
    world.net.black_hole(PORT)?;
    let to: SocketAddr = format!("{SERVER_V4}:{PORT}").parse()?;
    let helper = programs.join("rto-workload");
    let with = gaps(&world, &helper, to, TIMER, amount.handshakes, true)?;
    let without = gaps(&world, &helper, to, KERNEL, amount.handshakes / 5, false)?;
    let jiffy = millis(machine::jiffy());
    // The timer is set inside a jiffy, a moment before the first packet's timestamp, and fires at the end of one.
    let within = |sample: &Sample| {
        let in_time = sample
            .sorted
            .iter()
            .filter(|by| (-EARLY_MS..=2.0 * jiffy).contains(*by));
        in_time.count() as f64 / sample.sorted.len() as f64
    };
    let rows = [
        ("policy, 100 ms", &with),
        ("the kernel's own, 1 s, no agent", &without),
    ];
    let rows = rows.map(|(name, sample)| {
        let at = |share: f64| format!("{:+.2}", sample.at(share));
        [
            name.to_owned(),
            sample.sorted.len().to_string(),
            at(0.0),
            at(0.01),
            at(0.5),
            at(0.99),
            at(1.0),
        ]
    });
    let head = [
        "ms from the timer",
        "handshakes",
        "least",
        "1 %",
        "median",
        "99 %",
        "most",
    ];
    let share = within(&with);
    Ok(Found {
        text: format!("{}\nA jiffy is {jiffy} ms.\n", table(head, rows)),
        goals: vec![Goal {
            what: "SYN gaps of a 100 ms timer from 1 ms before to two jiffies after it",
            wanted: "at least 99 %",
            measured: format!("{:.1} % of {}", share * 100.0, with.sorted.len()),
            met: share >= 0.99,
        }],
    })
}

/// First gaps less the timer, milliseconds.
fn gaps(
    world: &TestEnv,
    helper: &Path,
    to: SocketAddr,
    timer: Duration,
    count: usize,
    covered: bool,
) -> anyhow::Result<Sample> {
    let cgroup = covered.then(|| world.cgroup.path());
    let mut found = Vec::new();
    while found.len() < count {
        go_on()?;
        let capture = Capture::start(&world.net.client, CLIENT_LINK)?;
        let batch = BATCH.min(count - found.len());
        let _knocking = Traffic::connect_many_by(helper, &world.net.client, cgroup, to, batch)?;
        thread::sleep(timer);
        let end = Instant::now() + TIMEOUT;
        loop {
            let mut times: BTreeMap<(u16, u32), Vec<Duration>> = BTreeMap::new();
            for syn in syns(&capture.so_far()?, to) {
                let of = times.entry((syn.from.port(), syn.seq)).or_default();
                of.push(syn.time);
            }
            let gaps = times
                .values()
                .filter_map(|at| Some(at.get(1)?.saturating_sub(at[0])));
            let gaps: Vec<f64> = gaps.map(|gap| millis(gap) - millis(timer)).collect();
            if gaps.len() >= batch {
                found.extend(gaps);
                break;
            }
            ensure!(
                Instant::now() < end,
                "{} of {batch} SYNs were sent again",
                gaps.len()
            );
            thread::sleep(Duration::from_millis(5));
        }
    }
    Ok(Sample::of(found.into_iter()))
}
