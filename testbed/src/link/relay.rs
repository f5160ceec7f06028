//! The emulated link: a TUN device in each namespace, and a thread that carries packets from one to the other.

use std::{
    cmp::Reverse,
    collections::BinaryHeap,
    io,
    net::IpAddr,
    os::fd::AsFd as _,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread::{self, JoinHandle},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use anyhow::Context as _;
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, ppoll},
    sys::{
        eventfd::{EfdFlags, EventFd},
        prctl,
        time::TimeSpec,
    },
};
use rand::{RngExt as _, SeedableRng as _, rngs::ChaCha8Rng};

use super::{
    Blackout, Link, Outage, RuleId,
    config::{Hop, LinkConfig},
    packet::{Direction, Flows, Packet},
    pcap::Pcap,
    rule::{Active, DropPattern, PacketFilter, Rule},
    tun::Tun,
};
use crate::{
    netns::{Pair, ip, until_local},
    process::run_in_real_time,
};

/// More than any packet of these links, whose MTU is 1500 bytes.
const LONGEST: usize = 1 << 16;
/// Packets read in a row before packets that are due are delivered.
const AT_ONCE: usize = 8;
/// Maximum number of recorded packets, about 100 MB. Later packets are still carried, and counted as unrecorded.
const RECORDED: usize = 1 << 20;
/// Timer slack of the thread, nanoseconds: how much later the kernel may wake it. The default is 50 us.
const TIMER_SLACK_NS: u64 = 1;

/// A packet, and what the link did with it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Relayed {
    /// When the link read it.
    pub at: Instant,
    /// The same time since the epoch, as a capture shows it.
    pub time: Duration,
    /// The packet, if it is TCP.
    pub packet: Option<Packet>,
    /// Bytes, including the IP header.
    pub bytes: usize,
    /// When it is due to leave; `None` if it was dropped.
    pub leaves: Option<Instant>,
}

impl Relayed {
    /// Whether it was dropped.
    #[must_use]
    pub const fn dropped(&self) -> bool {
        self.leaves.is_none()
    }

    /// Whether it matches a filter.
    #[must_use]
    pub fn is(&self, filter: &PacketFilter) -> bool {
        self.packet.is_some_and(|packet| filter.matches(&packet))
    }
}

/// How punctual the link has been since it was created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TimingStats {
    /// Packets delivered.
    pub delivered: u64,
    /// Sum of the delays beyond the intended ones.
    pub late: Duration,
    /// The largest of these delays.
    pub latest: Duration,
    /// Packets that were carried but not recorded.
    pub unrecorded: u64,
}

/// The link. When it is dropped its devices are removed, and packets in flight are lost.
#[derive(Debug)]
pub struct Relay {
    shared: Arc<Shared>,
    carrier: Option<JoinHandle<()>>,
    number: u8,
}

impl Relay {
    /// Creates the devices and their addresses (10.89.`number`.1 and .2, fd89:`number`::1 and ::2), and carries packets
    /// without delay or loss. `seed` initialises the random numbers. If a part fails, what was created is removed.
    pub fn new(pair: &Pair, number: u8, seed: u64) -> anyhow::Result<Self> {
        let shared = Arc::new(Shared {
            state: Mutex::new(State::new(seed)),
            stop: EventFd::from_flags(EfdFlags::EFD_CLOEXEC)?,
        });
        let mut relay = Self {
            shared: Arc::clone(&shared),
            carrier: None,
            number,
        };
        let client = Tun::new(&pair.client, &relay.client_device())?;
        let server = Tun::new(&pair.server, &relay.server_device())?;
        for (netns, device, host) in [
            (&pair.client, relay.client_device(), 1),
            (&pair.server, relay.server_device(), 2),
        ] {
            let (v4, v6) = (relay.address(host, false), relay.address(host, true));
            let lines = format!(
                "addr add {v4}/24 dev {device}
                addr add {v6}/64 dev {device} nodad
                link set {device} up"
            );
            ip(&["-n", netns], &lines)?;
            until_local(netns, &v6.to_string())?;
        }
        let carrier = thread::Builder::new().name("link".to_owned());
        relay.carrier = Some(carrier.spawn(move || carry(&shared, &client, &server))?);
        Ok(relay)
    }

    /// Name of the device in the client's namespace.
    #[must_use]
    pub fn client_device(&self) -> String {
        format!("tun-c{}", self.number)
    }

    /// Name of the device in the server's namespace.
    #[must_use]
    pub fn server_device(&self) -> String {
        format!("tun-s{}", self.number)
    }

    fn address(&self, host: u8, v6: bool) -> IpAddr {
        if v6 {
            [0xfd89, self.number.into(), 0, 0, 0, 0, 0, host.into()].into()
        } else {
            [10, 89, self.number, host].into()
        }
    }

    /// Configures both directions, for packets that arrive later.
    pub fn set(&self, config: LinkConfig) {
        for direction in Direction::BOTH {
            self.set_towards(direction, config);
        }
    }

    /// Configures one direction, for packets that arrive later.
    pub fn set_towards(&self, direction: Direction, config: LinkConfig) {
        self.shared.state().hop(direction).config = config;
    }

    /// Delays each packet by this much in both directions, and does nothing else.
    pub fn set_delay(&self, delay: Duration) {
        self.set(LinkConfig {
            delay,
            ..LinkConfig::default()
        });
    }

    /// Drops the next `count` packets that match, and no more.
    pub fn drop_next(&self, filter: PacketFilter, count: u64) -> RuleId {
        self.add(Rule::new(filter, DropPattern::Next(count)))
    }

    /// Adds a rule. Each packet passes the rules in the order in which they were added; a packet that one rule drops is
    /// not counted by later rules.
    pub fn add(&self, rule: Rule) -> RuleId {
        self.shared.state().add(rule)
    }

    /// Every packet so far, in order, including packets that are not TCP.
    #[must_use]
    pub fn log(&self) -> Vec<Relayed> {
        self.shared.state().log.clone()
    }

    /// Returns the log and clears it.
    #[must_use]
    pub fn take_log(&self) -> Vec<Relayed> {
        std::mem::take(&mut self.shared.state().log)
    }

    /// Clears the log.
    pub fn forget(&self) {
        self.shared.state().log.clear();
    }

    /// Switches recording on or off; it is initially on.
    pub fn record(&self, on: bool) {
        self.shared.state().recording = on;
    }

    /// Starts to write the packets at the client's end to a file, as tcpdump would: packets from the client when they
    /// are read, packets to it when they are delivered.
    pub fn capture(&self, path: &std::path::Path) -> anyhow::Result<()> {
        let pcap = Pcap::create(path).with_context(|| path.display().to_string())?;
        self.shared.state().capture = Some(Ok(pcap));
        Ok(())
    }

    /// Ends the capture and completes the file.
    pub fn end_capture(&self) -> anyhow::Result<()> {
        let capture = self.shared.state().capture.take();
        Ok(capture.context("there is no capture")??.finish()?)
    }

    /// How punctual the link has been.
    #[must_use]
    pub fn timing(&self) -> TimingStats {
        self.shared.state().timing
    }
}

impl Link for Relay {
    fn relay(&self) -> Option<&Relay> {
        Some(self)
    }

    fn client(&self, v6: bool) -> IpAddr {
        self.address(1, v6)
    }

    fn server(&self, v6: bool) -> IpAddr {
        self.address(2, v6)
    }

    fn drops(&self, rule: Rule) -> anyhow::Result<RuleId> {
        Ok(self.add(rule))
    }

    fn dropped(&self, rule: RuleId) -> anyhow::Result<u64> {
        let state = self.shared.state();
        let found = state.rules.iter().find(|(id, _)| *id == rule);
        Ok(found.map_or(0, |(_, active)| active.dropped()))
    }

    fn remove(&self, rule: RuleId) -> anyhow::Result<u64> {
        let dropped = self.dropped(rule)?;
        self.shared.state().rules.retain(|(id, _)| *id != rule);
        Ok(dropped)
    }

    fn start_outage(&self, filter: PacketFilter, length: Duration) -> anyhow::Result<Outage> {
        let from = Instant::now();
        let rule = self.add(Rule {
            until: Some(from + length),
            ..Rule::new(filter, DropPattern::All)
        });
        Ok(Outage { rule, from, length })
    }

    fn end_outage(&self, outage: Outage) -> anyhow::Result<Blackout> {
        // The rule expires by itself.
        outage.sleep();
        Ok(Blackout {
            from: outage.from,
            until: outage.from + outage.length,
            dropped: self.remove(outage.rule)?,
        })
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        let _told = self.shared.stop.write(1);
        if let Some(carrier) = self.carrier.take() {
            let _ended = carrier.join();
        }
    }
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    stop: EventFd,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        // A panic cannot leave a partial change.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Debug)]
struct State {
    hops: [Hop; 2],
    rules: Vec<(RuleId, Active)>,
    next_rule: u64,
    flows: Flows,
    rng: ChaCha8Rng,
    log: Vec<Relayed>,
    recording: bool,
    timing: TimingStats,
    /// The capture, or the write error that ended it.
    capture: Option<io::Result<Pcap>>,
}

impl State {
    fn new(seed: u64) -> Self {
        Self {
            hops: Default::default(),
            rules: Vec::new(),
            next_rule: 0,
            flows: Flows::default(),
            rng: ChaCha8Rng::seed_from_u64(seed),
            log: Vec::new(),
            recording: true,
            timing: TimingStats::default(),
            capture: None,
        }
    }

    /// Captures a packet that passes the client's end.
    fn passes(&mut self, bytes: &[u8]) {
        if let Some(Ok(pcap)) = &mut self.capture
            && let Err(error) = pcap.add(since_epoch(), bytes)
        {
            self.capture = Some(Err(error));
        }
    }

    fn hop(&mut self, direction: Direction) -> &mut Hop {
        match direction {
            Direction::ToServer => &mut self.hops[0],
            Direction::ToClient => &mut self.hops[1],
        }
    }

    fn add(&mut self, rule: Rule) -> RuleId {
        let id = RuleId(self.next_rule);
        self.next_rule += 1;
        self.rules.push((id, Active::new(rule)));
        id
    }

    /// Records a packet that has just arrived. Returns when it leaves; `None` if it is dropped.
    fn arrived(&mut self, direction: Direction, bytes: &[u8]) -> Option<Instant> {
        let at = Instant::now();
        if direction == Direction::ToServer {
            self.passes(bytes);
        }
        let packet = self.flows.packet(direction, bytes);
        let leaves = self.leaves(at, direction, packet.as_ref(), bytes.len());
        if !self.recording {
            return leaves;
        }
        if self.log.len() < RECORDED {
            self.log.push(Relayed {
                at,
                time: since_epoch(),
                packet,
                bytes: bytes.len(),
                leaves,
            });
        } else {
            self.timing.unrecorded += 1;
        }
        leaves
    }

    fn leaves(
        &mut self,
        now: Instant,
        direction: Direction,
        packet: Option<&Packet>,
        bytes: usize,
    ) -> Option<Instant> {
        if let Some(packet) = packet {
            for (_, rule) in &mut self.rules {
                if rule.drops(packet, now, self.rng.random()) {
                    return None;
                }
            }
        }
        let hop = match direction {
            Direction::ToServer => &mut self.hops[0],
            Direction::ToClient => &mut self.hops[1],
        };
        hop.take(now, bytes, &mut self.rng)
    }

    fn delivered(&mut self, direction: Direction, due: Instant, bytes: &[u8]) {
        if direction == Direction::ToClient {
            self.passes(bytes);
        }
        let late = due.elapsed();
        self.timing.delivered += 1;
        self.timing.late += late;
        self.timing.latest = self.timing.latest.max(late);
    }
}

fn since_epoch() -> Duration {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
}

/// Packets that are in flight in one direction.
struct Lane<'a> {
    direction: Direction,
    from: &'a Tun,
    to: &'a Tun,
    /// Ordered by time of departure, then by arrival.
    under_way: BinaryHeap<Reverse<(Instant, u64, Vec<u8>)>>,
    came: u64,
}

/// Carries packets until the stop event.
fn carry(shared: &Shared, client: &Tun, server: &Tun) {
    run_in_real_time();
    // If this fails, each delay is only a little longer.
    let _precise = prctl::set_timerslack(TIMER_SLACK_NS);
    let mut lanes = [
        (Direction::ToServer, client, server),
        (Direction::ToClient, server, client),
    ]
    .map(|(direction, from, to)| Lane {
        direction,
        from,
        to,
        under_way: BinaryHeap::new(),
        came: 0,
    });
    let mut buffer = vec![0; LONGEST];
    loop {
        let next = lanes.iter().filter_map(Lane::next).min();
        // poll(2) would round up to milliseconds.
        let timeout = next.map(|at| TimeSpec::from(at.saturating_duration_since(Instant::now())));
        let mut fds = [shared.stop.as_fd(), client.as_fd(), server.as_fd()]
            .map(|fd| PollFd::new(fd, PollFlags::POLLIN));
        match ppoll(&mut fds, timeout, None) {
            Err(Errno::EINTR) => continue,
            Err(_) => return,
            Ok(_) => {}
        }
        if fds[0].any() == Some(true) {
            return;
        }
        for lane in &mut lanes {
            for _ in 0..AT_ONCE {
                match lane.receive(shared, &mut buffer) {
                    Ok(true) => {}
                    Ok(false) => break,
                    // The device was removed.
                    Err(_) => return,
                }
            }
            lane.deliver(shared);
        }
    }
}

impl Lane<'_> {
    /// When the next packet is due.
    fn next(&self) -> Option<Instant> {
        self.under_way.peek().map(|Reverse((due, ..))| *due)
    }

    /// Reads a packet; returns false if no packet is ready.
    fn receive(&mut self, shared: &Shared, buffer: &mut [u8]) -> io::Result<bool> {
        let Some(length) = self.from.receive(buffer)? else {
            return Ok(false);
        };
        let packet = &buffer[..length];
        if let Some(due) = shared.state().arrived(self.direction, packet) {
            self.came += 1;
            self.under_way
                .push(Reverse((due, self.came, packet.to_vec())));
        }
        Ok(true)
    }

    fn deliver(&mut self, shared: &Shared) {
        let now = Instant::now();
        while self.next().is_some_and(|due| due <= now) {
            if let Some(Reverse((due, _, packet))) = self.under_way.pop() {
                let _lost = self.to.send(&packet);
                shared.state().delivered(self.direction, due, &packet);
            }
        }
    }
}
