//! A simulated host that connects over a path: the program with its fallbacks, and the daemon, which tunes once per
//! second.

use rand::{RngExt as _, SeedableRng as _, rngs::ChaCha8Rng};
use rto_agent_common::histogram::{bucket_end_us, bucket_of};
use rto_agent_ebpf::verdict::LONG_US;
use rto_model::tune::{
    law::Settings,
    tuner::{Growth, Transition, Tuner},
};

use super::{
    agenda::Agenda,
    fallbacks::Fallbacks,
    handshake::{First, Handshake, Schedule},
    path::{Path, exponential},
};
use crate::summary::{f, share};

/// Jiffies per second of simulated hosts.
pub const HZ: u32 = 250;

/// The source of the timer.
#[derive(Clone, Debug)]
pub enum Control {
    /// `initial_rto = "auto"`.
    Auto(Settings),
    /// A fixed value, jiffies, with `guard = "off"`.
    Fixed(u64),
}

impl Control {
    /// Its name in tables, such as "auto" or "24 ms".
    pub fn name(&self) -> String {
        match self {
            Self::Auto(_) => "auto".to_owned(),
            Self::Fixed(jiffies) => format!("{} ms", jiffies * 1000 / u64::from(HZ)),
        }
    }
}

/// A point of a time series, recorded in addition to sums.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Point {
    /// End of the point's time, seconds.
    pub at_s: f64,
    /// The timer at that time, milliseconds.
    pub timer_ms: f64,
    /// Connections started.
    pub connections: u64,
    /// Connections with a spurious copy.
    pub spurious: u64,
}

impl Point {
    /// Share of connections with a spurious copy, 0 to 1.
    pub fn spurious_share(&self) -> f64 {
        share(self.spurious, self.connections)
    }
}

/// The results of a host.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Connections started.
    pub connections: u64,
    /// Connections with the policy's timer and a spurious copy. (On a path of more than 1 s the kernel's own timer has
    /// spurious copies, too.)
    pub spurious: u64,
    /// SYN copies.
    pub copies: u64,
    /// SYN copies that were spurious.
    pub spurious_copies: u64,
    /// Time saved compared with the kernel's own timer, microseconds.
    pub saved_us: f64,
    /// The transitions of the tuner.
    pub transitions: Vec<Transition>,
    /// The time series.
    pub points: Vec<Point>,
    /// The timer at the end, jiffies; `None`: the kernel's own.
    pub timer: Option<u64>,
    /// The last fallback (spurious).
    pub fell_back: Option<FellBack>,
}

impl Outcome {
    /// Share of connections with a spurious copy, 0 to 1.
    pub fn spurious_share(&self) -> f64 {
        share(self.spurious, self.connections)
    }

    /// Time saved per connection, milliseconds.
    pub fn saved_ms(&self) -> f64 {
        self.saved_us / 1e3 / f(self.connections.max(1))
    }
}

/// A fallback (spurious).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FellBack {
    /// Its beginning, seconds.
    pub at_s: f64,
    /// Connections with a copy that was judged spurious since the value was set.
    pub judged: u64,
    /// Connections that began after it with the policy's timer, and had a spurious copy.
    pub spurious_after: u64,
}

/// Later events of a connection.
#[derive(Clone, Copy, Debug)]
enum What {
    /// The first SYN is lost.
    Lost,
    /// Established; `clean`: without a retransmission, but after a long time.
    Established { clean: bool },
    Verdict {
        /// Epoch of the policy's timer, if the connection has that timer.
        epoch: Option<u32>,
        spurious: u32,
        path_us: Option<f64>,
    },
}

/// A host that connects over a path.
#[derive(Debug)]
pub struct Host {
    path: Path,
    rng: ChaCha8Rng,
    tuner: Option<Tuner>,
    /// The policy's timer, absent while it is the kernel's own.
    policy: Option<Schedule>,
    kernel: Schedule,
    epoch: u32,
    fallbacks: Fallbacks,
    /// Spurious connections since the value was set.
    judged: u64,
    later: Agenda<What>,
    /// Growth of the counters since the daemon's last step.
    counts: Growth,
    next_s: f64,
    tick: u32,
    /// Seconds per point; 0: no points.
    points: u32,
    point: Point,
    outcome: Outcome,
}

impl Host {
    /// A host whose random choices follow from a seed. It records a point every `points` seconds,
    /// or none with 0.
    pub fn new(path: Path, control: Control, seed: u64, points: u32) -> Self {
        let hz = u64::from(HZ);
        let (tuner, policy) = match control {
            Control::Auto(settings) => (Some(Tuner::new(settings, None)), None),
            Control::Fixed(jiffies) => (None, Some(Schedule::new(jiffies, hz))),
        };
        Self {
            path,
            rng: ChaCha8Rng::seed_from_u64(seed),
            tuner,
            policy,
            kernel: Schedule::new(hz, hz),
            epoch: 0,
            fallbacks: Fallbacks::default(),
            judged: 0,
            later: Agenda::new(),
            counts: Growth::default(),
            next_s: 0.0,
            tick: 0,
            points,
            point: Point::default(),
            outcome: Outcome::default(),
        }
    }

    /// Simulates this number of seconds; `daemon`: whether the daemon runs during that time.
    pub fn run(&mut self, seconds: u32, daemon: bool) {
        for _ in 0..seconds {
            self.tick += 1;
            let end_s = f64::from(self.tick);
            while self.next_s < end_s {
                self.pass(self.next_s);
                self.connect(self.next_s);
                self.next_s += exponential(&mut self.rng) / self.path.per_s;
            }
            self.pass(end_s);
            if daemon {
                self.tune();
            }
            self.note(end_s);
        }
    }

    /// The tuner, if there is one.
    pub const fn tuner(&self) -> Option<&Tuner> {
        self.tuner.as_ref()
    }

    /// The results so far.
    pub const fn outcome(&self) -> &Outcome {
        &self.outcome
    }

    /// The results.
    pub fn end(self) -> Outcome {
        let timer = self.tuner.as_ref().map(Tuner::jiffies);
        Outcome {
            timer: timer.flatten(),
            ..self.outcome
        }
    }

    fn connect(&mut self, at_s: f64) {
        let (epoch, is_own) = self.begin(at_s);
        let peer = self.path.peer(&mut self.rng);
        let rtt_us = self.path.rtt_us(at_s, peer, &mut self.rng);
        let losses = self.path.losses_at(at_s);
        let lost =
            self.rng.random::<f64>() < 1.0 - losses.map(|loss| 1.0 - loss).iter().product::<f64>();
        let delay_us = self.path.syn_delay_us(at_s);
        let schedule = self.policy.as_ref().filter(|_| is_own);
        let schedule = schedule.unwrap_or(&self.kernel);
        self.outcome.connections += 1;
        self.point.connections += 1;
        // By far the most frequent case: no retransmission. It is credited one round trip early, which saves half of
        // the agenda's work.
        if !lost && rtt_us + delay_us < schedule.timer_us.min(LONG_US.into()) {
            self.fallbacks.established(true);
            self.later_verdict(at_s, rtt_us, epoch, 0, Some(rtt_us + delay_us));
            return;
        }
        let first = First::new(rtt_us, lost.then_some(losses), &mut self.rng);
        // The kernel alone has the same luck.
        let seed = self.rng.random();
        let [one, alone] = [schedule, &self.kernel].map(|schedule| {
            let mut rng = ChaCha8Rng::seed_from_u64(seed);
            Handshake::simulate(&self.path, at_s, peer, schedule, first, &mut rng)
        });
        if let (Some(own_us), Some(alone_us)) = (one.took_us, alone.took_us) {
            self.outcome.saved_us += alone_us - own_us;
        }
        let copies = u64::try_from(one.copies_us.len()).unwrap_or(u64::MAX);
        self.outcome.copies += copies;
        self.outcome.spurious_copies += u64::from(one.spurious);
        if is_own && one.spurious > 0 {
            self.outcome.spurious += 1;
            self.point.spurious += 1;
            let in_force = self.fallbacks.is_spurious();
            if let Some(fell_back) = self.outcome.fell_back.as_mut().filter(|_| in_force) {
                fell_back.spurious_after += 1;
            }
        }
        let clean = one.copies_us.is_empty();
        if let Some(us) = one.copies_us.first() {
            self.later.add(at_s + us / 1e6, What::Lost);
        }
        if let Some(took_us) = one.took_us {
            self.later
                .add(at_s + took_us / 1e6, What::Established { clean });
        }
        if let Some(verdict) = one.verdict {
            let (spurious, path_us) = (verdict.spurious, verdict.path_us);
            self.later_verdict(at_s, verdict.after_us, epoch, spurious, path_us);
        }
    }

    /// The program's decision: the epoch whose timer the connection gets, and whether it is the policy's.
    fn begin(&mut self, at_s: f64) -> (Option<u32>, bool) {
        let Some(tuner) = &self.tuner else {
            return (None, true);
        };
        let own = !self.fallbacks.holds(at_s * 1e6) && self.policy.is_some();
        // Connections with the kernel's own timer are judged while that is the current timer.
        let learning = tuner.jiffies().is_none();
        ((own || learning).then_some(self.epoch), own)
    }

    fn later_verdict(
        &mut self,
        at_s: f64,
        after_us: f64,
        epoch: Option<u32>,
        spurious: u32,
        path_us: Option<f64>,
    ) {
        // Without a tuner, nothing uses the verdict.
        if self.tuner.is_none() {
            return;
        }
        let at_s = at_s + after_us / 1e6;
        if spurious == 0 && at_s < f64::from(self.tick) {
            // The verdict is in this second, in which no epoch ends.
            self.judged(at_s, epoch, 0, path_us);
            return;
        }
        let verdict = What::Verdict {
            epoch,
            spurious,
            path_us,
        };
        self.later.add(at_s, verdict);
    }

    /// Handles all events until this time.
    fn pass(&mut self, until_s: f64) {
        while let Some((at_s, what)) = self.later.take_until(until_s) {
            match what {
                What::Lost => self.fallbacks.first_syn_lost(at_s * 1e6),
                What::Established { clean } => self.fallbacks.established(clean),
                What::Verdict {
                    epoch,
                    spurious,
                    path_us,
                } => self.judged(at_s, epoch, spurious, path_us),
            }
        }
    }

    fn judged(&mut self, at_s: f64, epoch: Option<u32>, spurious: u32, path_us: Option<f64>) {
        if let Some(path_us) = path_us {
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "a cast to an integer saturates"
            )]
            let bucket = bucket_of(path_us as u64);
            let end_us = bucket_end_us(bucket).unwrap_or(u64::MAX);
            self.counts.samples.add(end_us, 1);
        }
        self.counts.counts.connections += 1;
        if epoch != Some(self.epoch) {
            return;
        }
        self.counts.counts.spurious += u64::from(spurious > 0);
        if self.policy.is_some() && spurious > 0 {
            let in_force = self.fallbacks.is_spurious();
            self.fallbacks.spurious();
            self.judged += 1;
            if !in_force && self.fallbacks.is_spurious() {
                self.outcome.fell_back = Some(FellBack {
                    at_s,
                    judged: self.judged,
                    spurious_after: 0,
                });
            }
        }
    }

    fn tune(&mut self) {
        let Some(tuner) = &mut self.tuner else {
            return;
        };
        let growth = Growth {
            spurious: self.fallbacks.is_spurious(),
            outage: !self.fallbacks.is_spurious()
                && self.fallbacks.holds(f64::from(self.tick) * 1e6),
            ..std::mem::take(&mut self.counts)
        };
        let transition = tuner.step(u64::from(self.tick) * 1000, &growth);
        self.outcome.transitions.extend(transition);
        if tuner.epoch() != self.epoch {
            let hz = u64::from(HZ);
            self.policy = tuner.jiffies().map(|jiffies| Schedule::new(jiffies, hz));
            self.epoch = tuner.epoch();
            self.fallbacks.begin(self.epoch);
            self.judged = 0;
        }
    }

    fn note(&mut self, at_s: f64) {
        if self.points == 0 || !self.tick.is_multiple_of(self.points) {
            return;
        }
        let schedule = self
            .policy
            .as_ref()
            .filter(|_| !self.fallbacks.is_spurious());
        let timer_us = schedule.unwrap_or(&self.kernel).timer_us;
        let point = Point {
            at_s,
            timer_ms: timer_us / 1000.0,
            ..std::mem::take(&mut self.point)
        };
        self.outcome.points.push(point);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_seed_gives_equal_host() {
        let run = |seed| {
            let auto = Control::Auto(Settings::new(HZ));
            let mut host = Host::new(Path::metro(20.0), auto, seed, 0);
            host.run(1_200, true);
            let outcome = host.end();
            (outcome.connections, outcome.copies, outcome.timer)
        };
        let (connections, copies, timer) = run(1);
        assert_eq!(run(1), (connections, copies, timer));
        assert!(connections.abs_diff(24_000) < 1_000, "{connections}");
        assert_ne!(run(2).0, connections);
        // About one connection in a hundred loses a packet.
        assert!(copies.abs_diff(connections / 100) < 60, "{copies}");
        assert!(timer.is_some_and(|jiffies| jiffies < 25), "{timer:?}");
    }

    #[test]
    fn fixed_timer_below_rtt_is_always_spurious() {
        let path = Path {
            base_us: 50_000.0,
            ..Path::metro(20.0)
        };
        let mut host = Host::new(path, Control::Fixed(5), 1, 10);
        host.run(60, true);
        let outcome = host.end();
        assert_eq!(outcome.points.len(), 6);
        assert!(outcome.spurious as f64 > 0.97 * outcome.connections as f64);
        assert!(outcome.spurious_copies > outcome.spurious);
    }

    #[test]
    fn time_saved_per_loss_is_the_timer_difference() {
        let mut host = Host::new(Path::metro(50.0), Control::Fixed(25), 2, 0);
        // Of 8,000 losses.
        host.run(16_000, true);
        let outcome = host.end();
        let saved_ms = outcome.saved_ms();
        assert!((saved_ms - 9.0).abs() < 0.5, "{saved_ms}");
    }
}
