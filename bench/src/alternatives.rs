//! What users could choose instead of the agent, by what it gains: connect() in outages, and a lost request.

use std::{
    net::{Ipv4Addr, SocketAddr},
    path::Path,
    thread,
    time::Duration,
};

use rto_testbed::{
    env::TestEnv,
    foreign::Foreign,
    machine::jiffy,
    netns::{CLIENT_LINK, SERVER_V4},
    process::run as run_line,
    workload::{
        Program,
        attempts::{Attempts, Own},
        conversation::Conversation,
        traffic::{Connect, Traffic},
    },
};

use crate::{
    process::helper,
    result::{BenchResult, elapsed_ms, millis, table},
    sample::Sample,
    suite::SampleSizes,
};

const PORT: u16 = 7400;
/// Outages, milliseconds.
const OUTAGES_MS: [u64; 4] = [300, 1000, 4000, 10_000];
const TIMER: Duration = Duration::from_millis(100);
const POLICY: &str =
    "[policy.near]\ncidrs = [\"10.88.0.0/24\"]\ninitial_rto = \"100ms\"\nrto_min = \"8ms\"\n";

/// A way to shorter timers.
#[derive(Clone, Copy)]
enum Way {
    Nothing,
    LinearTimeouts,
    Route,
    Sample,
    Agent,
}

const WAYS: [(Way, &str); 5] = [
    (Way::Nothing, "the kernel alone"),
    (
        Way::LinearTimeouts,
        "`net.ipv4.tcp_syn_linear_timeouts = 20`",
    ),
    (Way::Route, "`ip route ... rto_min 8ms`"),
    (Way::Sample, "a sock_ops program that replies 100 ms"),
    (
        Way::Agent,
        "the agent, `initial_rto = \"100ms\"` and `rto_min = \"8ms\"`",
    ),
];

pub(crate) fn run(sizes: SampleSizes, programs: &Path) -> anyhow::Result<BenchResult> {
    // At the same time, each in namespaces of its own.
    let rows = thread::scope(|scope| {
        let runs = WAYS.map(|(way, name)| {
            scope.spawn(move || anyhow::Ok((name, measure(way, sizes, programs)?)))
        });
        let ended = runs.map(|run| run.join().map_err(|_| anyhow::anyhow!("panicked"))?);
        ended.into_iter().collect::<anyhow::Result<Vec<_>>>()
    })?;
    let rows = rows.into_iter().map(|(name, times)| {
        let [a, b, c, d, request] = times.map(|ms| format!("{ms:.0}"));
        [name.to_owned(), a, b, c, d, request]
    });
    let head = [
        "ms",
        "connect(), outage of 0.3 s",
        "1 s",
        "4 s",
        "10 s",
        "lost request",
    ];
    Ok(BenchResult {
        text: table(head, rows),
        goals: Vec::new(),
    })
}

/// Mean connect time of the connections that begin in each outage, a hundred a second, and the median time of a request
/// that is lost once, milliseconds.
fn measure(
    way: Way,
    sizes: SampleSizes,
    programs: &Path,
) -> anyhow::Result<[f64; OUTAGES_MS.len() + 1]> {
    let mut env = TestEnv::of(programs.join("rto-agent"))?;
    let client = env.net.client.clone();
    let mut _foreign = None;
    match way {
        Way::Nothing => {}
        Way::LinearTimeouts => env.net.sysctl("net.ipv4.tcp_syn_linear_timeouts", "20")?,
        Way::Route => run_line(&format!(
            "ip -n {client} route change 10.88.0.0/24 dev {CLIENT_LINK} rto_min 8ms"
        ))
        .map(drop)?,
        Way::Sample => {
            let jiffies = TIMER.as_nanos() / jiffy().as_nanos();
            _foreign = Some(Foreign::attach(env.cgroup.path(), i32::try_from(jiffies)?)?);
        }
        Way::Agent => {
            env.configure(POLICY)?;
            env.start()?;
        }
    }
    let program = Program::at(&helper(programs));
    let on = SocketAddr::from((Ipv4Addr::UNSPECIFIED, PORT));
    let _server = Traffic::echo_server(&env.net.server, None, on, false)?;
    let to: SocketAddr = format!("{SERVER_V4}:{PORT}").parse()?;
    let request = lost_request(&env, to, sizes.rounds)?;

    let mut times = [request; OUTAGES_MS.len() + 1];
    for (time, outage_ms) in times.iter_mut().zip(OUTAGES_MS) {
        env.net
            .server_loses_syns_for(Duration::from_millis(outage_ms))?;
        // A group each, which begin 10 ms apart.
        let ends = vec![vec![(None, to)]; usize::try_from(outage_ms / 10)?];
        let cgroup = Some(env.cgroup.path());
        let mut attempts = Attempts::load(&program, &client, cgroup, ends, Own::new())?;
        attempts.start()?;
        let took: Vec<_> = attempts.outcomes()?.iter().map(|one| one.took).collect();
        *time = millis(took.iter().sum::<Duration>()) / took.len() as f64;
        env.net.drop_nothing()?;
    }
    Ok(times)
}

/// Median duration of a request that is lost once, milliseconds.
fn lost_request(env: &TestEnv, to: SocketAddr, count: u32) -> anyhow::Result<f64> {
    let mut times = Vec::new();
    for _ in 0..count {
        let cgroup = Some(env.cgroup.path());
        let mut client = Conversation::start(&env.net.client, cgroup, to, Connect::default())?;
        client.rounds(3)?;
        env.net.server_drops(&format!(
            "tcp dport {PORT} meta length > 120 limit rate 1/hour burst 1 packets"
        ))?;
        times.push(elapsed_ms(|| client.rounds(1))?);
        env.net.drop_nothing()?;
    }
    Ok(Sample::of(times).median())
}
