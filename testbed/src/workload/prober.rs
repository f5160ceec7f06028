//! Starts connections continuously and reads the initial RTO that the kernel has chosen for each, to find any moment
//! without a policy.

use std::{
    net::SocketAddr,
    path::Path,
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

use anyhow::ensure;
use serde::{Deserialize, Serialize};

use super::{
    Program, Role, socket,
    stdio::{commands, reply},
};
use crate::{channel::ControlChannel, emulated::scaled, tcp::TcpInfo};

/// In gaps up to this length, a moment without a policy can hardly go unobserved: up to 2000 samples are taken per
/// second, and other processes run between them.
pub const MAX_GAP: Duration = Duration::from_millis(20);
/// Samples per second, not counting the time that each takes.
const LOOKS: u32 = 2000;
/// The same on an emulated processor, which otherwise has no time left for the agent under test.
const LOOKS_EMULATED: u32 = 250;

/// The connections to sample.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Probes {
    /// Addresses that do not answer, in turn.
    pub to: Vec<SocketAddr>,
    /// The valid initial RTOs.
    pub expected: Vec<Duration>,
}

/// A command to the prober.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Command {
    /// Start to sample.
    Begin,
    /// Stop; reply with the results ([`Seen`]).
    End,
}

/// A process in a cgroup; killed when dropped.
#[derive(Debug)]
pub struct Prober(ControlChannel);

/// The results.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Seen {
    /// Number of connections.
    pub count: u64,
    /// Connections with another initial RTO than expected.
    pub wrong: u64,
    /// Initial RTO of the first of these.
    pub first_wrong: Duration,
    /// The longest time without a sample.
    pub longest_gap: Duration,
    /// The sum of the gaps up to [`MAX_GAP`].
    pub covered: Duration,
    /// Duration of sampling.
    pub lasted: Duration,
}

impl Prober {
    /// Starts the process; it does not sample yet.
    pub fn start(netns: &str, cgroup: &Path, probes: Probes) -> anyhow::Result<Self> {
        let role = Role::Prober(probes);
        let program = Program::built()?;
        program.ready(netns, Some(cgroup), &role).map(Self)
    }

    /// Starts to sample.
    pub fn begin(&mut self) -> anyhow::Result<()> {
        self.0.request::<Seen>(&Command::Begin).map(drop)
    }

    /// Stops, and returns the results.
    pub fn end(&mut self) -> anyhow::Result<Seen> {
        self.0.request(&Command::End)
    }
}

#[derive(Default)]
struct Samples {
    on: bool,
    seen: Seen,
    last: Option<Instant>,
}

impl Samples {
    /// Accounts for the time since the last sample, or since the start.
    fn pass(&mut self) {
        let now = Instant::now();
        if let Some(last) = self.last.replace(now) {
            let gap = now - last;
            self.seen.longest_gap = self.seen.longest_gap.max(gap);
            self.seen.lasted += gap;
            if gap <= MAX_GAP {
                self.seen.covered += gap;
            }
        }
    }
}

pub(super) fn run(probes: Probes) -> anyhow::Result<()> {
    let samples = Arc::new(Mutex::new(Samples::default()));
    let shared = Arc::clone(&samples);
    let pause = Duration::from_secs(1) / scaled("looks a second", LOOKS, LOOKS_EMULATED);
    let sampler = thread::spawn(move || sample(&probes, pause, &shared));
    reply(&())?;
    commands(|command| {
        ensure!(!sampler.is_finished(), "sampling has ended");
        let mut samples = samples.lock().unwrap_or_else(PoisonError::into_inner);
        match command {
            Command::Begin => {
                *samples = Samples {
                    on: true,
                    last: Some(Instant::now()),
                    ..Samples::default()
                };
            }
            Command::End => {
                samples.on = false;
                samples.pass();
            }
        }
        Ok(samples.seen)
    })
}

fn sample(probes: &Probes, pause: Duration, shared: &Mutex<Samples>) -> anyhow::Result<()> {
    for to in probes.to.iter().cycle() {
        thread::sleep(pause);
        // The lock is held during the connection, so that none is under way when `End` is answered.
        let mut samples = shared.lock().unwrap_or_else(PoisonError::into_inner);
        if !samples.on {
            continue;
        }
        let socket = socket::begin(*to)?;
        let rto = Duration::from_micros(TcpInfo::of(&socket)?.rto_us.into());
        samples.pass();
        samples.seen.count += 1;
        if !probes.expected.contains(&rto) {
            if samples.seen.wrong == 0 {
                samples.seen.first_wrong = rto;
            }
            samples.seen.wrong += 1;
        }
    }
    Ok(())
}
