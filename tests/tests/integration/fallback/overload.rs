//! More connections than a server accepts, and handshakes that are never completed.

use rto_agent_common::direction::PASSIVE;
use rto_testbed::workload::arrivals::{Arrivals, Clients};

use super::*;

/// SYNs per second that get through; the clients make 1.2 times as many connections.
const CAPACITY: u32 = 200;
const OFFERED: u32 = 240;
const SECONDS: u32 = 15;

/// Runs clients that give up after ten seconds; returns all their handshakes and outcomes.
fn overload(timers: Timers) -> anyhow::Result<(Vec<Handshake>, Done)> {
    const PATIENCE: Duration = Duration::from_secs(10);
    const BURST: u32 = 20;
    let path = Path::new(timers.env(OFFERED)?, RTT)?;
    let policer = DropPattern::Above {
        per_s: CAPACITY,
        burst: BURST,
    };
    path.relay.add(Rule::new(PacketFilter::SYN, policer));
    let mut clients = path.clients(OFFERED, 1, PATIENCE)?;
    let done = clients.run(OFFERED * SECONDS)?;
    Ok((path.handshakes(), done))
}

test!(learnt_timer_does_not_harm_overloaded_server, || {
    overloaded(Timers::Automatic)
});
test!(guarded_timer_does_not_harm_overloaded_server, || {
    overloaded(Timers::Guarded)
});
/// Of 3,600 connections each: the shares differ by at most 0.025 by chance (two standard deviations).
fn overloaded(timers: Timers) -> anyhow::Result<()> {
    const BEYOND: f64 = 0.03;
    let both = rto_tests::beside(|| overload(Timers::Kernel), || overload(timers))?;
    let ((kernels, kernels_done), (agents, agents_done)) = both;
    #[expect(clippy::cast_precision_loss, reason = "thousands")]
    let each = |all: &[Handshake]| syns(all) as f64 / all.len() as f64;
    let (own_syns, kernel_syns) = (each(&agents), each(&kernels));
    let [own_beyond, kernel_beyond] = [&agents, &kernels].map(|all| share_beyond(all, LATE));
    let report = format!(
        "{own_syns:.2} SYNs a connection, kernel {kernel_syns:.2}; {own_beyond:.3} beyond 500 ms, kernel \
         {kernel_beyond:.3}; {agents_done:?} and {kernels_done:?}"
    );
    eprintln!("{report}");
    ensure!(own_beyond <= kernel_beyond + BEYOND, "{report}");
    // The control: the server is overloaded. (Before Linux 6.5 a connection doubles its timer at once and sends fewer
    // SYNs.)
    ensure!(kernel_syns > 1.3 && kernel_beyond > 0.15, "{report}");
    Ok(())
}

/// Number of sockets of a namespace in a state of ss(8).
fn sockets(netns: &str, state: &str) -> anyhow::Result<usize> {
    let all = run(&format!("ip netns exec {netns} ss -Htan state {state}"))?;
    Ok(all.lines().count())
}

/// SYNs and SYN-ACKs that the server's namespace has retransmitted.
fn retransmitted(env: &TestEnv) -> anyhow::Result<u64> {
    netstat(&env.net.server, "TcpExt: ", "TCPSynRetrans")
}

test!(incomplete_handshakes_change_nothing);
/// 10,000 requests whose SYN-ACKs are retransmitted: neither a learnt value nor its fallbacks change, and a policy without
/// samples does not get a value. That policy learns from the first completed connections.
fn incomplete_handshakes_change_nothing() -> anyhow::Result<()> {
    const FLOOD: usize = 10_000;
    /// The queue of received packets of a processor holds 1000 (net.core.netdev_max_backlog), for all namespaces
    /// together. More at once would make other tests lose packets.
    const AT_ONCE: usize = 500;
    /// Fewer than the backlog of a listener each.
    const LISTENERS: [(&str, u16, usize); 3] = [
        (SERVER_V4, PORT, 3_500),
        (SERVER_V4, PORT + 1, 3_500),
        (SERVER_V4_OTHER, PORT + 2, 3_000),
    ];
    const GOOD: u16 = PORT + 3;
    let env = warmed_up(
        100,
        "[policy.fresh]\ncidrs = [\"10.88.1.0/24\"]\ninitial_rto = \"auto\"\n",
    )?;
    // All of them must become requests, and none a SYN cookie.
    for (name, value) in [
        ("net.core.somaxconn", "4096"),
        ("net.ipv4.tcp_max_syn_backlog", "65536"),
        ("net.ipv4.tcp_syncookies", "0"),
    ] {
        sysctl(&env.net.server, name, value)?;
    }
    let look = |name: &str| -> anyhow::Result<_> {
        let policy = InKernel::of(&env, name)?;
        let [active, passive] = [ACTIVE, PASSIVE].map(|direction| policy.fallback(&env, direction));
        Ok((policy, active?, passive?))
    };
    let before = [look("near")?, look("fresh")?];
    let (mut servers, mut floods) = (Vec::new(), Vec::new());
    let client = &env.net.client;
    for (address, port, count) in LISTENERS {
        servers.push(env.echo_server(to(address, port))?);
        env.net.drop_final_acks(port)?;
        for _ in 0..count / AT_ONCE {
            floods.push(Traffic::connect_many(
                client,
                None,
                to(address, port),
                AT_ONCE,
            )?);
            let begun = floods.len() * AT_ONCE;
            // Each client has received a SYN-ACK and considers itself connected. (On a busy machine the first requests
            // expire before the last ones arrive.)
            let answered = || sockets(client, "established");
            eventually("answered SYNs", TIMEOUT, || {
                Ok((answered()? >= begun).then_some(()))
            })
            .with_context(|| format!("{:?} of {begun}", answered()))?;
        }
    }
    ensure!(floods.len() * AT_ONCE == FLOOD, "{}", floods.len());
    let all = sockets(&env.net.server, "syn-recv")?;
    eventually("retransmissions", TIMEOUT, || {
        Ok((retransmitted(&env)? >= FLOOD as u64).then_some(()))
    })?;
    let after = [look("near")?, look("fresh")?];
    ensure!(after == before, "{before:#?}\n{after:#?}");
    // The control: completed handshakes are counted, and the daemon has read the counters since.
    let _good = env.echo_server(to(SERVER_V4_OTHER, GOOD))?;
    let clients = Clients {
        rounds: 1,
        ..Clients::new(to(SERVER_V4_OTHER, GOOD), 2 * MS)
    };
    let done = Arrivals::start(&env.net.client, None, &clients)?.run(400)?;
    ensure!(done.complete == 400, "{done:?}");
    eventually("value that was learnt", TIMEOUT, || {
        let (policy, ..) = look("fresh")?;
        Ok((policy != before[1].0).then_some(()))
    })
    .with_context(|| env.log())?;
    ensure!(look("near")? == before[0], "{before:#?}");
    let still = sockets(&env.net.server, "syn-recv")?;
    eprintln!(
        "{all} half-open requests, {still} at the end, {} retransmissions",
        retransmitted(&env)?
    );
    // Otherwise all clients would send a FIN at the same time.
    run(&format!("ip -n {client} link set {CLIENT_LINK} down"))?;
    drop((floods, servers));
    Ok(())
}
