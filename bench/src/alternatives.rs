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
    netns::{CLIENT_LINK, Lost, SERVER_V4, lose_handshakes},
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
    result::{BenchResult, elapsed_ms, table},
    sample::Sample,
    suite::SampleSizes,
};

const PORT: u16 = 7400;
/// Outages, milliseconds.
const OUTAGES_MS: [u32; 4] = [300, 1000, 4000, 10_000];
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

/// Mean connect time of connections that begin evenly over each outage, and the median time of a request that is lost
/// once, milliseconds.
fn measure(way: Way, sizes: SampleSizes, programs: &Path) -> anyhow::Result<[f64; 5]> {
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

    let each = u16::try_from(sizes.handshakes / 10)?;
    let left = |outage_ms: u32| {
        (0..each).map(move |i| {
            Duration::from_millis(outage_ms.into()) * (2 * u32::from(i) + 1) / (2 * u32::from(each))
        })
    };
    let losses = OUTAGES_MS.into_iter().flat_map(left).zip(1000..);
    let losses: Vec<_> = losses
        .map(|(left, port)| (port, Lost::Syns, left))
        .collect();
    lose_handshakes(&client, &env.net.server, &losses)?;
    let from = |port: u16| Some((Ipv4Addr::UNSPECIFIED, port).into());
    let ends = losses.iter().map(|(port, ..)| (from(*port), to)).collect();
    let cgroup = Some(env.cgroup.path());
    let mut attempts = Attempts::load(&program, &client, cgroup, vec![ends], Own::new())?;
    attempts.start()?;
    let outcomes = attempts.outcomes()?;
    let means = outcomes.chunks(each.into()).map(|all| {
        let took = all.iter().map(|one| one.took).sum::<Duration>();
        took.as_secs_f64() * 1e3 / f64::from(each)
    });
    let mut times = [request; 5];
    for (time, mean) in times.iter_mut().zip(means) {
        *time = mean;
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
