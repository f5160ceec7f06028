//! Two servers with one IPv6 address behind a router that chooses between them by the hash of addresses and flow label
//! (`fib_multipath_hash_policy` = 0).

use rto_testbed::{
    link::{Link as _, relay::Relay},
    machine::Machine,
    names,
    netns::{nft, until_local},
    warm::Seen,
    workload::arrivals::{Arrivals, Clients, Done},
};

use crate::prelude::*;

/// The servers' address that policies cover, and the control's.
const COVERED: &str = "fd98::1";
const CONTROL: &str = "fd99::1";
/// Connections of each.
const COUNT: u32 = 48;
/// Of the clients; each of the kernel's retransmissions in this time leaves a dead path with a chance of a half.
const PATIENCE: Duration = Duration::from_secs(6);

/// A client behind a link, the router, and the servers.
struct Anycast {
    _servers: Vec<Traffic>,
    link: Relay,
    namespaces: [Namespace; 2],
    env: TestEnv,
}

/// A network namespace; removed when dropped.
struct Namespace(String);

impl Drop for Namespace {
    fn drop(&mut self) {
        let _gone = run(&format!("ip netns del {}", self.0));
    }
}

impl Anycast {
    /// A client at this round-trip time from the servers.
    fn new(env: TestEnv, round_trip: Duration) -> anyhow::Result<Self> {
        let link = relay(&env.net)?;
        link.set_delay(round_trip / 2);
        let (client, router) = (&env.net.client, &env.net.server);
        sysctl(router, "net.ipv6.conf.all.forwarding", "1")?;
        let name = names::unique();
        let mut servers = Vec::new();
        let mut paths = String::new();
        let namespaces = ["a", "b"].map(|end| Namespace(format!("{name}-{end}")));
        for (end, Namespace(server)) in ["a", "b"].into_iter().zip(&namespaces) {
            for line in [
                format!("netns add {server}"),
                format!("-n {server} link set lo up"),
                format!("-n {router} link add to-{end} type veth peer name eth netns {server}"),
                format!("-n {router} addr add fd97:{end}::1/64 dev to-{end} nodad"),
                format!("-n {server} addr add fd97:{end}::2/64 dev eth nodad"),
                format!("-n {server} addr add {COVERED}/128 dev lo nodad"),
                format!("-n {server} addr add {CONTROL}/128 dev lo nodad"),
                format!("-n {router} link set to-{end} up"),
                format!("-n {server} link set eth up"),
                format!("-n {server} route add default via fd97:{end}::1"),
            ] {
                run(&format!("ip {line}"))?;
            }
            paths.push_str(&format!(" nexthop via fd97:{end}::2 dev to-{end}"));
            until_local(router, &format!("fd97:{end}::1"))?;
            until_local(server, &format!("fd97:{end}::2"))?;
            for address in [COVERED, CONTROL] {
                until_local(server, address)?;
                servers.push(Traffic::echo_server(
                    server,
                    None,
                    to(address, PORT),
                    false,
                )?);
            }
        }
        for address in [COVERED, CONTROL] {
            run(&format!("ip -n {router} -6 route add {address}/128{paths}"))?;
            let device = link.client_device();
            run(&format!(
                "ip -n {client} -6 route add {address}/128 via {RELAY_SERVER_V6} dev {device}"
            ))?;
        }
        let found = Self {
            _servers: servers,
            link,
            namespaces,
            env,
        };
        // Neighbours are known then.
        for address in [COVERED, CONTROL] {
            let connect = || found.clients(address, Duration::ZERO)?.run(COUNT);
            eventually_seen("both paths", TIMEOUT, connect, |done| {
                done.complete == COUNT
            })?;
        }
        Ok(found)
    }

    /// Clients of one address, which send a request after this pause.
    fn clients(&self, address: &str, pause: Duration) -> anyhow::Result<Arrivals> {
        let clients = Clients {
            rounds: 1,
            pauses: vec![pause],
            patience: PATIENCE,
            ..Clients::new(to(address, PORT), Duration::from_millis(2))
        };
        Arrivals::start(&self.env.net.client, Some(self.env.cgroup.path()), &clients)
    }

    /// Makes connections until the law has a value.
    fn learn(&self) -> anyhow::Result<()> {
        let done = self.clients(COVERED, Duration::ZERO)?.run(400)?;
        ensure!(done.failed == 0, "{done:?}");
        eventually_seen(
            "a value of the law",
            TIMEOUT,
            || self.law(),
            Option::is_some,
        )
        .map(drop)
    }

    /// What the law says of the policy's path.
    fn law(&self) -> anyhow::Result<Option<Duration>> {
        let tuned = self.env.json(&["tune", "near"])?;
        let value = &tuned["policies"]["near"]["timers"][0]["evidence"]["want_us"];
        Ok(value.as_u64().map(Duration::from_micros))
    }

    /// Connections to both addresses at the same time: the policy's, and the control's.
    fn both(
        &self,
        pause: Duration,
        during: impl FnOnce() -> anyhow::Result<()>,
    ) -> anyhow::Result<[Done; 2]> {
        let mut both = [self.clients(COVERED, pause)?, self.clients(CONTROL, pause)?];
        for clients in &mut both {
            clients.begin(COUNT)?;
        }
        during()?;
        let [policy, control] = &mut both;
        Ok([policy.done()?, control.done()?])
    }

    /// One of the servers answers nothing.
    fn lose_one(&self) -> anyhow::Result<()> {
        let Namespace(server) = &self.namespaces[1];
        let rules = format!(
            "add table inet t\nadd chain inet t in {{ type filter hook input priority 0; }}\n\
             add set inet t hit {{ type inet_service; size 65535; flags dynamic; }}\n\
             add rule inet t in ip6 daddr {COVERED} tcp flags syn add @hit {{ tcp sport }} drop\n\
             add rule inet t in meta l4proto tcp drop\n"
        );
        nft(server, &["-f", "-"], &rules).map(drop)
    }

    /// How many of the policy's connections have sent a SYN to that server: those whose first path leads to it, because
    /// the others are answered.
    fn hit(&self) -> anyhow::Result<u32> {
        let Namespace(server) = &self.namespaces[1];
        let listed = nft(server, &["-j", "list", "set", "inet", "t", "hit"], "")?;
        let listed: Value = serde_json::from_str(&listed)?;
        let sets = listed["nftables"].as_array().context("no list")?;
        let set = sets.iter().find(|one| one["set"].is_object());
        let ports = set.and_then(|one| one["set"]["elem"].as_array());
        Ok(u32::try_from(ports.map_or(0, Vec::len))?)
    }
}

/// Connections that took longer, or were given up.
fn beyond(done: &Done, limit: Duration) -> u32 {
    done.count()
        - u32::try_from(done.connects.iter().filter(|took| **took <= limit).count()).unwrap_or(0)
}

const RTT: Duration = Duration::from_millis(10);
/// Less than the kernel's initial RTO.
const SOON: Duration = Duration::from_millis(950);

test!(
    learnt_timer_leaves_a_dead_path_within_a_second,
    needs = [TXREHASH]
);
fn learnt_timer_leaves_a_dead_path_within_a_second() -> anyhow::Result<()> {
    let mut env = configured(&format!(
        "[policy.near]\ncidrs = [\"{COVERED}\"]\ninitial_rto = \"auto\"\n"
    ))?;
    let seen = Seen {
        each_second: &[(10_240, 100)],
        hz: u32::try_from(Machine::here()?.hz)?,
    };
    let value = seen.start(&mut env, "near")?;
    leaves_a_dead_path_within_a_second(&Anycast::new(env, RTT)?, &format!("{value:?}"))
}

test!(
    fixed_timer_leaves_a_dead_path_once_its_rtts_are_known,
    needs = [TXREHASH]
);
/// The law's time decides, not the value. It outlives the daemon.
fn fixed_timer_leaves_a_dead_path_once_its_rtts_are_known() -> anyhow::Result<()> {
    let mut anycast = Anycast::new(TestEnv::with(&near(&format!("\"{COVERED}\"")))?, RTT)?;
    anycast.learn()?;
    anycast.env.restart(Signal::SIGTERM)?;
    ensure!(anycast.law()?.is_some(), "nothing is known any more");
    leaves_a_dead_path_within_a_second(&anycast, "100ms")
}

fn leaves_a_dead_path_within_a_second(anycast: &Anycast, value: &str) -> anyhow::Result<()> {
    anycast.lose_one()?;
    let [policy, control] = anycast.both(Duration::ZERO, || Ok(()))?;
    let hit = anycast.hit()?;
    let [late, control_late] = [&policy, &control].map(|done| beyond(done, SOON));
    let report = format!(
        "{value}: {hit} of {COUNT} at first on the dead path, {late} for a second; kernel alone: {control_late}"
    );
    eprintln!("{report}");
    ensure!(
        policy.failed + control.failed == 0,
        "{policy:?} {control:?}"
    );
    // Each retransmission has another path with a chance of a half.
    ensure!(hit >= 8 && control_late >= 8 && late <= 3, "{report}");
    Ok(())
}

test!(
    unlearnt_timer_leaves_a_dead_path_as_the_kernel,
    needs = [TXREHASH],
    || measured(unlearnt_timer_leaves_a_dead_path_as_the_kernel)
);
/// Nothing is known of the path, so an answer may still be under way.
fn unlearnt_timer_leaves_a_dead_path_as_the_kernel() -> anyhow::Result<()> {
    let anycast = Anycast::new(TestEnv::with(&near(&format!("\"{COVERED}\"")))?, RTT)?;
    anycast.lose_one()?;
    let [policy, control] = anycast.both(Duration::ZERO, || Ok(()))?;
    let hit = anycast.hit()?;
    let [late, control_late] = [&policy, &control].map(|done| beyond(done, SOON));
    let report = format!(
        "{hit} of {COUNT} at first on the dead path, {late} for a second; kernel alone: {control_late}"
    );
    eprintln!("{report}");
    ensure!(
        policy.failed + control.failed == 0,
        "{policy:?} {control:?}"
    );
    ensure!(hit >= 8 && control_late >= 8 && late == hit, "{report}");
    Ok(())
}

test!(early_syns_reach_the_same_anycast_server, needs = [TXREHASH]);
/// The policy's timer is shorter than the path. A SYN that reaches the other server would lead to a reset.
fn early_syns_reach_the_same_anycast_server() -> anyhow::Result<()> {
    for rtt_ms in [150, 250, 350] {
        // Without the fallback, which all these spurious retransmissions would begin.
        let policy = near(&format!("\"{COVERED}\"")) + "guard = \"off\"\n";
        let anycast = Anycast::new(TestEnv::with(&policy)?, Duration::from_millis(rtt_ms))?;
        let _begun = anycast.link.take_log();
        let [policy, control] = anycast.both(Duration::ZERO, || Ok(()))?;
        let syns = anycast
            .link
            .log()
            .iter()
            .filter(|one| one.is(&PacketFilter::SYN))
            .count();
        eprintln!("{rtt_ms} ms: {policy:?}; kernel alone: {control:?}; {syns} SYNs");
        ensure!(
            policy.failed <= control.failed,
            "{rtt_ms} ms: {policy:?}; kernel alone: {control:?}"
        );
        // The policy's connections have sent more than one.
        ensure!(syns >= 3 * COUNT as usize, "{syns}");
    }
    Ok(())
}

test!(
    early_syns_of_a_known_path_reach_the_same_anycast_server,
    needs = [TXREHASH],
    || measured(early_syns_of_a_known_path_reach_the_same_anycast_server)
);
/// The policy's timer is shorter than the path has become, and the law's time longer. There are too few connections for
/// the fallback.
fn early_syns_of_a_known_path_reach_the_same_anycast_server() -> anyhow::Result<()> {
    const FEW: u32 = 18;
    let policy = near(&format!("\"{COVERED}\"")).replace("100ms", "250ms");
    let anycast = Anycast::new(TestEnv::with(&policy)?, Duration::from_millis(100))?;
    anycast.learn()?;
    let law = anycast.law()?.context("nothing is learnt")?;
    ensure!(law >= Duration::from_millis(300), "{law:?}");
    anycast.link.set_delay(Duration::from_millis(150));
    let _begun = anycast.link.take_log();
    let done = anycast.clients(COVERED, Duration::ZERO)?.run(FEW)?;
    let log = anycast.link.log();
    let syns = log.iter().filter(|one| one.is(&PacketFilter::SYN)).count();
    ensure!(
        done.failed == 0 && syns >= 2 * FEW as usize,
        "{done:?}, {syns} SYNs"
    );
    Ok(())
}

test!(lower_rto_min_changes_anycast_server_sooner);
/// A retransmission timeout of an established connection chooses another path (`tcp_write_timeout()`, Linux 6.18). Every
/// second connection then reaches a server that does not know it.
fn lower_rto_min_changes_anycast_server_sooner() -> anyhow::Result<()> {
    const PAUSE: Duration = Duration::from_secs(1);
    let env = TestEnv::with(&format!(
        "[policy.near]\ncidrs = [\"{COVERED}\"]\nrto_min = \"48ms\"\n"
    ))?;
    let anycast = Anycast::new(env, RTT)?;
    // The first is shorter than the kernel's least timeout (200 ms), the second longer than its second.
    for (wait_ms, is_the_kernels) in [(80, false), (500, true)] {
        // Requests are sent within a tenth of a second.
        let begins = PAUSE - Duration::from_millis(20);
        let length = Duration::from_millis(120 + wait_ms);
        let [policy, control] = anycast.both(PAUSE, || {
            thread::sleep(begins);
            let outage = anycast.link.start_outage(PacketFilter::ALL, length)?;
            anycast.link.end_outage(outage).map(drop)
        })?;
        let report = format!("at least {wait_ms} ms: {policy:?}; kernel alone: {control:?}");
        eprintln!("{report}");
        ensure!(
            policy.failed >= 8 && (control.failed > 0) == is_the_kernels,
            "{report}"
        );
    }
    Ok(())
}
