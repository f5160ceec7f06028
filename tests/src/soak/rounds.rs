//! The host: rounds of disturbances, and the comparison of counters after each.

use std::{
    net::{Ipv6Addr, SocketAddr},
    thread,
    time::{Duration, Instant},
};

use anyhow::{bail, ensure};
use nix::{
    mount::{MsFlags, mount},
    sys::utsname::uname,
};
use rto_agent_core::wire::stats::StatsAnswer;
use rto_testbed::{
    agent::{Agent, find},
    wait::eventually_seen,
    workload::counted::{Client, Command, CountedClient, CountedServer},
};

use super::{
    config::Config,
    counters::{Counted, Difference},
    disturbance::{Disturbance, Disturbed, Plan},
    event::Event,
    look::{Places, Shared, look},
    network::{self, LOST, PEER, PORT},
    peer::{PAUSE, Peer},
};

/// How long to wait for the agent's counters after the last connection.
const COUNTED: Duration = Duration::from_secs(10);
/// After this many failures, further ones would add nothing new.
const MOST_FAILURES: u32 = 20;

/// Most characters of an error that are reported.
const MOST_OF_ERROR: usize = 1000;

pub(super) fn run(seconds: u64, seed: u64) -> anyhow::Result<()> {
    network::set_up_host()?;
    let shared = Shared::new();
    let mut disturbed = Disturbed {
        agent: Agent::new(find(None)?)?,
        shared: &shared,
    };
    let state = disturbed.state_dir();
    std::fs::create_dir(&state)?;
    let options = Some("size=128k,mode=755");
    mount(
        Some("state"),
        &state,
        Some("tmpfs"),
        MsFlags::empty(),
        options,
    )?;
    disturbed.agent.configure(&Config::Usual.policies())?;
    disturbed.start()?;
    let cgroup = disturbed.agent.cgroup.path().to_owned();
    let everywhere = SocketAddr::from((Ipv6Addr::UNSPECIFIED, PORT));
    let server = CountedServer::start(Some(&cgroup), everywhere)?;
    let peer = Peer::accept()?;
    let client = Client {
        to: network::all_at(&PEER, PORT)?,
        lost: network::all_at(&LOST, PORT)?,
        pause: PAUSE,
    };
    let client = CountedClient::start(Some(&cgroup), client)?;
    let kernel = uname()?.release().to_string_lossy().into_owned();
    shared.print(&Event::Begin {
        seed,
        kernel: &kernel,
    })?;
    let places = Places {
        cgroup,
        pin_dir: disturbed.agent.pin_dir(),
    };
    let mut ends = Ends {
        client,
        server,
        peer,
        known: Vec::new(),
    };
    let duration = Duration::from_secs(seconds);
    thread::scope(|scope| {
        let looker = scope.spawn(|| look(&shared, &places));
        let done = rounds(&mut disturbed, &mut ends, duration, seed);
        shared.now().is_over = true;
        let looked = looker.join();
        done?;
        looked.unwrap_or_else(|_| bail!("the checking thread panicked"))
    })?;
    let failures = shared.now().failures;
    ensure!(failures == 0, "{failures} failures");
    Ok(())
}

/// In the first half daemons are killed; in the second half the same one keeps running.
fn rounds(
    disturbed: &mut Disturbed<'_>,
    ends: &mut Ends,
    duration: Duration,
    seed: u64,
) -> anyhow::Result<()> {
    let begin = Instant::now();
    let mut plan = Plan::new(seed);
    let shared = disturbed.shared;
    while begin.elapsed() < duration {
        shared.now().round += 1;
        ends.run()?;
        for disturbance in plan.round(begin.elapsed() >= duration / 2) {
            if begin.elapsed() >= duration {
                break;
            }
            once(disturbed, disturbance)?;
            ensure!(
                shared.now().failures < MOST_FAILURES,
                "too many failures to continue"
            );
        }
        ends.compare(disturbed)?;
    }
    Ok(())
}

fn once(disturbed: &mut Disturbed<'_>, disturbance: Disturbance) -> anyhow::Result<()> {
    let shared = disturbed.shared;
    shared.now().disturbance = Some(disturbance);
    let begin = Instant::now();
    if let Err(error) = disturbed.disturb(disturbance) {
        let text = format!("{error:#}");
        shared.fail(&format!("{disturbance}: {}", end_of(&text)))?;
        return disturbed.recover();
    }
    shared.print(&Event::Done {
        disturbance,
        took_s: begin.elapsed().as_secs_f64(),
    })
}

/// The last part of an error, as it begins with the daemon's whole log.
fn end_of(text: &str) -> &str {
    let begin = text.char_indices().rev().nth(MOST_OF_ERROR - 1);
    begin.map_or(text, |(index, _)| &text[index..])
}

/// Both ends of the connections.
struct Ends {
    client: CountedClient,
    server: CountedServer,
    peer: Peer,
    /// Differences that were already reported.
    known: Vec<Difference>,
}

impl Ends {
    fn run(&mut self) -> anyhow::Result<()> {
        self.peer.tell(Command::Run)?;
        self.client.tell(Command::Run)?;
        Ok(())
    }

    /// Waits until no connection is open, and compares the counters.
    fn compare(&mut self, disturbed: &Disturbed<'_>) -> anyhow::Result<()> {
        let peer = self.peer.tell(Command::Pause)?;
        let host = self.client.tell(Command::Pause)?;
        let accepted = self.server.accepted()?;
        let expected = Counted::expected(&host, accepted);
        let mut counted = Counted::default();
        let look = || {
            let stats: StatsAnswer = serde_json::from_value(disturbed.agent.json(&["stats"])?)?;
            counted = Counted::of(&stats);
            Ok(counted)
        };
        // Differences that remain are reported below.
        let _same = eventually_seen("counters", COUNTED, look, |counted| {
            counted.differences(&expected).is_empty()
        });
        let shared = disturbed.shared;
        shared.print(&Event::Counters {
            host: &host,
            peer: &peer,
            accepted,
            counted,
        })?;
        let mut wrong = counted.differences(&expected);
        wrong.extend(Difference::of_servers(peer.established, accepted));
        wrong.extend(Difference::of_client("the host's client", &host));
        wrong.extend(Difference::of_client("the peer's client", &peer));
        for difference in &wrong {
            if !self.known.iter().any(|known| difference.is_still(known)) {
                shared.fail(&difference.text)?;
            }
        }
        self.known = wrong;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_error_keeps_its_end() {
        assert_eq!(end_of("why"), "why");
        let long = format!("{}why", "\u{e9}".repeat(MOST_OF_ERROR));
        let end = end_of(&long);
        assert_eq!(end.chars().count(), MOST_OF_ERROR);
        assert!(end.ends_with("why"));
    }
}
