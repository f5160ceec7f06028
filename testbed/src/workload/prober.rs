//! Connections begun all the time, and the initial RTO the kernel has chosen for each: whether there was
//! a moment without policy.

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

/// Looks no further apart than this leave little time for a moment that nobody sees: there are up to 2000 a second,
/// and what is between is other processes' turn.
pub const MAX_GAP: Duration = Duration::from_millis(20);
/// Connections in a second, but for the time that each takes.
const LOOKS: u32 = 2000;
/// The same on an emulated processor, which would have no time left for what is looked at.
const LOOKS_EMULATED: u32 = 250;

/// What is looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Probes {
    /// Where SYNs get lost; each in turn.
    pub to: Vec<SocketAddr>,
    /// The initial RTOs that are as they should be.
    pub expected: Vec<Duration>,
}

/// What a prober is told.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Command {
    /// Look from now on.
    Begin,
    /// Look no more; what was [`Seen`].
    End,
}

/// A process in a cgroup; ended when dropped.
#[derive(Debug)]
pub struct Prober(ControlChannel);

/// What it saw.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Seen {
    /// Connections.
    pub count: u64,
    /// Of these, those with another initial RTO than expected.
    pub wrong: u64,
    /// The first of these.
    pub first_wrong: Duration,
    /// The longest time without a look.
    pub longest_gap: Duration,
    /// Of the time of looking, that between looks no further apart than [`MAX_GAP`].
    pub covered: Duration,
    /// The time of looking.
    pub lasted: Duration,
}

impl Prober {
    /// Starts it; nothing is looked at yet.
    ///
    /// # Errors
    ///
    /// If it does not start.
    pub fn start(netns: &str, cgroup: &Path, probes: Probes) -> anyhow::Result<Self> {
        let role = Role::Prober(probes);
        let mut command = Program::built()?.command(netns, Some(cgroup), &role)?;
        let mut channel = ControlChannel::start(&mut command)?;
        channel.recv::<()>()?;
        Ok(Self(channel))
    }

    /// Looks from now on.
    ///
    /// # Errors
    ///
    /// If it has ended.
    pub fn begin(&mut self) -> anyhow::Result<()> {
        self.0.request::<Seen>(&Command::Begin).map(drop)
    }

    /// Looks no more; what was seen.
    ///
    /// # Errors
    ///
    /// If it has ended.
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
    /// Time has passed since the last look, or the beginning.
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
        // Held over the connection: none is under way when the end is answered.
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
