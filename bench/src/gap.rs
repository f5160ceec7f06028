//! Accuracy of the initial RTO: the first gap between the SYNs of connections to a black hole, by the packets'
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

use crate::{
    process::{agent, check_signals, helper},
    result::{BenchResult, Goal, millis, table},
    sample::Sample,
    suite::SampleSizes,
    traffic::NEAR,
};

/// The policy's initial RTO, and the kernel's own.
const TIMER: Duration = Duration::from_millis(100);
const KERNEL: Duration = Duration::from_secs(1);
/// Simultaneous connections. They begin at random points of a jiffy.
const BATCH: usize = 50;
const PORT: u16 = 7300;
/// As in the integration tests.
const EARLY_MS: f64 = 1.0;

pub(crate) fn run(sizes: SampleSizes, programs: &Path) -> anyhow::Result<BenchResult> {
    let env = agent(programs, NEAR)?;
    env.net.black_hole(PORT)?;
    let to: SocketAddr = format!("{SERVER_V4}:{PORT}").parse()?;
    let helper = helper(programs);
    let with = gaps(&env, &helper, to, TIMER, sizes.handshakes, true)?;
    let without = gaps(&env, &helper, to, KERNEL, sizes.handshakes / 5, false)?;
    let jiffy = millis(machine::jiffy());
    // The kernel arms the timer within a jiffy, just before the first packet's timestamp, and the timer fires at the
    // end of a jiffy.
    let within = |sample: &Sample| {
        sample.count(|by| (-EARLY_MS..=2.0 * jiffy).contains(&by)) as f64 / sample.len() as f64
    };
    let rows = [
        ("policy, 100 ms", &with),
        ("the kernel's 1 s, without an agent", &without),
    ];
    let rows = rows.map(|(name, sample)| {
        let at = |share: f64| format!("{:+.2}", sample.quantile(share));
        [
            name.to_owned(),
            sample.len().to_string(),
            at(0.0),
            at(0.01),
            at(0.5),
            at(0.99),
            at(1.0),
        ]
    });
    let head = [
        "gap less the timer, ms",
        "handshakes",
        "minimum",
        "1 %",
        "median",
        "99 %",
        "maximum",
    ];
    let share = within(&with);
    Ok(BenchResult {
        text: format!("{}\nA jiffy is {jiffy} ms.\n", table(head, rows)),
        goals: vec![Goal {
            what: "SYN gaps of a 100 ms timer from 1 ms before to two jiffies after it",
            limit: "at least 99 %".to_owned(),
            measured: format!("{:.1} % of {}", share * 100.0, with.len()),
            met: share >= 0.99,
        }],
    })
}

/// First gaps minus the timer, milliseconds.
fn gaps(
    env: &TestEnv,
    helper: &Path,
    to: SocketAddr,
    timer: Duration,
    count: usize,
    covered: bool,
) -> anyhow::Result<Sample> {
    let cgroup = covered.then(|| env.cgroup.path());
    let mut found = Vec::new();
    while found.len() < count {
        check_signals()?;
        let capture = Capture::start(&env.net.client, CLIENT_LINK)?;
        let batch = BATCH.min(count - found.len());
        let _connecting = Traffic::connect_many_by(helper, &env.net.client, cgroup, to, batch)?;
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
                "{} of {batch} SYNs were retransmitted",
                gaps.len()
            );
            thread::sleep(Duration::from_millis(5));
        }
    }
    Ok(Sample::of(found))
}
