//! rto_restart: rto_min less the smoothed RTT while few segments are outstanding, on a link with a delay.

use std::{thread, time::Duration};

use anyhow::Context as _;
use rto_tests::{
    agent::World,
    netns::sysctl,
    relay::{RELAY_SERVER_V4, RELAY_SERVER_V6, Relay},
    talk::{self, REQUEST, Talk, option},
    timing::jiffy,
    traffic::Traffic,
};
use serde_json::Value;

use super::{Test, established::lacks, to};

pub(super) const TESTS: &[Test] = &[
    ("experiment", experiment),
];

const PORT: u16 = 5000;
const NO_PAUSE: Duration = Duration::ZERO;
const ONE_WAY: Duration = Duration::from_millis(30);
const RTT: Duration = Duration::from_millis(60);
const RTO_MIN: Duration = Duration::from_millis(100);
/// Round trips after which an RTO has come down: what is too much of it goes by a quarter each.
const MANY: usize = 40;

/// With it for IPv4, without it for IPv6.
const POLICIES: &str = "[policy.with]\nrto_min = \"100ms\"\nrto_restart = true\n\
     cidrs = [\"10.89.0.0/24\"]\n\
     [policy.without]\nrto_min = \"100ms\"\ncidrs = [\"fd89::/64\"]\n";

struct Link {
    relay: Relay,
    world: World,
}

impl Link {
    fn new(config: &str) -> anyhow::Result<Self> {
        let world = World::with(config)?;
        for netns in [&world.net.client, &world.net.server] {
            sysctl(netns, "net.ipv4.tcp_congestion_control", "reno")?;
        }
        let relay = Relay::new(&world.net)?;
        relay.set_delay(ONE_WAY);
        Ok(Self { relay, world })
    }

    fn begin(&self, address: &str, port: u16) -> anyhow::Result<Flow<'_>> {
        let server = self.world.answer(to(address, port))?;
        let talk = self
            .world
            .talk(to(address, port), talk::Options::default())?;
        Ok(Flow {
            world: &self.world,
            talk,
            port,
            _server: server,
        })
    }
}

struct Flow<'a> {
    world: &'a World,
    talk: Talk,
    port: u16,
    _server: Traffic,
}

impl Flow<'_> {
    fn rto(&self) -> anyhow::Result<Duration> {
        talk::rto(&self.world.net.client, &format!("dport = :{}", self.port))
    }

    fn rto_min(&mut self) -> anyhow::Result<Duration> {
        let micros = self.talk.option(option::RTO_MIN_US)?;
        Ok(Duration::from_micros(micros.try_into()?))
    }
}

fn experiment() -> anyhow::Result<()> {
    let link = Link::new(POLICIES)?;
    let mut with = link.begin(RELAY_SERVER_V4, PORT)?;
    let mut without = link.begin(RELAY_SERVER_V6, PORT + 1)?;
    for i in 0..12 {
        eprintln!("{} with {:?} {:?}  without {:?} {:?}", i * 5, with.rto()?, with.rto_min(), without.rto()?, without.rto_min());
        thread::scope(|scope| {
            let a = scope.spawn(|| with.talk.rounds(5, NO_PAUSE));
            let b = scope.spawn(|| without.talk.rounds(5, NO_PAUSE));
            a.join().unwrap().unwrap();
            b.join().unwrap().unwrap();
        });
    }
    eprintln!("bulk");
    let filters = [with.port, without.port];
    let netns = link.world.net.client.clone();
    thread::scope(|scope| {
        let a = scope.spawn(|| for _ in 0..40 { with.talk.send(100_000).unwrap(); });
        let b = scope.spawn(|| for _ in 0..40 { without.talk.send(100_000).unwrap(); });
        let begin = std::time::Instant::now();
        let mut jumped = false;
        while !(a.is_finished() && b.is_finished()) {
            if begin.elapsed() > Duration::from_millis(900) && !jumped {
                jumped = true;
                link.relay.set_delay(Duration::from_millis(55));
                eprintln!("jump");
            }
            let mut line = format!("{:?}", begin.elapsed());
            for port in filters {
                let out = std::process::Command::new("ip").args(["netns", "exec", &netns, "ss", "-tinHO", "state", "established", "dport", "=", &format!(":{port}")]).output().unwrap();
                let text = String::from_utf8_lossy(&out.stdout).into_owned();
                for key in ["rto:", "rtt:", "unacked:", "retrans:", "cwnd:"] {
                    let w = text.split(' ').find(|w| w.starts_with(key)).unwrap_or("-");
                    line.push_str(&format!(" {w}"));
                }
                line.push_str("  |");
            }
            eprintln!("{line}");
            thread::sleep(Duration::from_millis(60));
        }
    });
    eprintln!("after with {:?} {:?}  without {:?} {:?}", with.rto()?, with.rto_min(), without.rto()?, without.rto_min());
    Ok(())
}
