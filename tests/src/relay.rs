//! A second link between the two namespaces that delays packets and drops chosen ones: a TUN device
//! in each, and a thread that carries packets from one to the other.
//!
//! Not netem, which not every kernel has, and which cannot drop "the next SYN-ACK".

use std::{
    collections::{HashMap, VecDeque},
    fs::File,
    io::{self, Read as _, Write as _},
    os::{
        fd::{AsFd as _, AsRawFd as _},
        unix::fs::OpenOptionsExt as _,
    },
    panic,
    process::Command,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread::{self, JoinHandle},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use anyhow::Context as _;
use etherparse::{SlicedPacket, TransportSlice};
use nix::{
    errno::Errno,
    libc,
    poll::{PollFd, PollFlags, ppoll},
    sched::{CloneFlags, setns},
    sys::{
        eventfd::{EfdFlags, EventFd},
        time::TimeSpec,
    },
};

use crate::{netns::Pair, process::run};

/// Address of the client's end.
pub const RELAY_CLIENT_V4: &str = "10.89.0.1";
/// Its IPv6 address.
pub const RELAY_CLIENT_V6: &str = "fd89::1";
/// Address of the server's end.
pub const RELAY_SERVER_V4: &str = "10.89.0.2";
/// Its IPv6 address.
pub const RELAY_SERVER_V6: &str = "fd89::2";

/// The client's interface.
pub const RELAY_CLIENT_LINK: &str = "tun-c";
/// The server's interface.
pub const RELAY_SERVER_LINK: &str = "tun-s";

/// More than any packet of these links, whose MTU is the default of 1500 bytes.
const LONGEST: usize = 1 << 16;

/// TCP packets that can be told to get lost. Resets, pure FINs and the server's pure ACKs cannot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// A SYN, with or without data, from either side.
    Syn,
    /// A SYN-ACK, from either side.
    SynAck,
    /// An ACK of the client's without data (also a keepalive probe).
    ClientAck,
    /// A segment with data from the client.
    ClientData,
    /// A segment with data from the server.
    ServerData,
}

/// What became of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Relayed {
    /// When it arrived at the relay, since the epoch, as in [`crate::capture::Segment`].
    pub time: Duration,
    /// What it was, if it is of a kind that can be dropped.
    pub kind: Option<Kind>,
    /// Whether it was dropped; otherwise it leaves one delay after it arrived.
    pub dropped: bool,
}

/// The link; its devices vanish when it is dropped, and with them what is still under way.
#[derive(Debug)]
pub struct Relay {
    shared: Arc<Shared>,
    carrier: Option<JoinHandle<()>>,
}

impl Relay {
    /// Makes the devices and their addresses, and carries packets without delay and loss.
    ///
    /// # Errors
    ///
    /// If a device cannot be made or `ip` fails; what was made is removed.
    pub fn new(pair: &Pair) -> anyhow::Result<Self> {
        let client = Device::new(&pair.client, RELAY_CLIENT_LINK)?;
        let server = Device::new(&pair.server, RELAY_SERVER_LINK)?;
        for (netns, link, v4, v6) in [
            (
                &pair.client,
                RELAY_CLIENT_LINK,
                RELAY_CLIENT_V4,
                RELAY_CLIENT_V6,
            ),
            (
                &pair.server,
                RELAY_SERVER_LINK,
                RELAY_SERVER_V4,
                RELAY_SERVER_V6,
            ),
        ] {
            run(&format!("ip -n {netns} addr add {v4}/24 dev {link}"))?;
            run(&format!("ip -n {netns} addr add {v6}/64 dev {link} nodad"))?;
            run(&format!("ip -n {netns} link set {link} up"))?;
        }
        let shared = Arc::new(Shared {
            state: Mutex::default(),
            stop: EventFd::from_flags(EfdFlags::EFD_CLOEXEC)?,
        });
        let of_carrier = Arc::clone(&shared);
        let carrier = thread::Builder::new()
            .name("relay".to_owned())
            .spawn(move || carry(&of_carrier, &client, &server))?;
        Ok(Self {
            shared,
            carrier: Some(carrier),
        })
    }

    /// Delays each packet that arrives from now on by this much, in both directions. Packets keep
    /// their order: after a shorter delay is set, they still wait for those before them.
    pub fn set_delay(&self, one_way: Duration) {
        self.shared.state().delay = one_way;
    }

    /// Drops the next `count` packets of a kind that arrive, and no more. Takes the place of what
    /// was asked for that kind before; 0 drops none any more.
    pub fn drop_next(&self, what: Kind, count: usize) {
        self.shared.state().to_drop.insert(what, count);
    }

    /// Every packet that has arrived so far, in order; also what is not TCP.
    #[must_use]
    pub fn log(&self) -> Vec<Relayed> {
        self.shared.state().log.clone()
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

#[derive(Debug, Default)]
struct State {
    delay: Duration,
    to_drop: HashMap<Kind, usize>,
    log: Vec<Relayed>,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        // Each change is complete by itself.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes a packet that has just arrived; its delay unless it gets lost.
    fn arrived(&self, from: Side, packet: &[u8]) -> Option<Duration> {
        let kind = kind(from, packet);
        let mut state = self.state();
        let left = kind.and_then(|kind| state.to_drop.get_mut(&kind));
        let dropped = match left {
            Some(left) if *left > 0 => {
                *left -= 1;
                true
            }
            _ => false,
        };
        state.log.push(Relayed {
            time: SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .unwrap_or_default(),
            kind,
            dropped,
        });
        (!dropped).then_some(state.delay)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Client,
    Server,
}

/// Packets from one device on their way to the other.
struct Direction<'a> {
    side: Side,
    from: &'a File,
    to: &'a File,
    under_way: VecDeque<(Instant, Vec<u8>)>,
}

/// Carries packets until it is told to stop.
fn carry(shared: &Shared, client: &Device, server: &Device) {
    let (client, server) = (&client.tun, &server.tun);
    let mut directions = [
        (Side::Client, client, server),
        (Side::Server, server, client),
    ]
    .map(|(side, from, to)| Direction {
        side,
        from,
        to,
        under_way: VecDeque::new(),
    });
    let mut buffer = vec![0; LONGEST];
    loop {
        let next = directions.iter().filter_map(Direction::next).min();
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
        for direction in &mut directions {
            if direction.receive(shared, &mut buffer).is_err() {
                // The device was removed.
                return;
            }
            direction.deliver();
        }
    }
}

impl Direction<'_> {
    /// When the next packet is to be delivered.
    fn next(&self) -> Option<Instant> {
        self.under_way.front().map(|(due, _)| *due)
    }

    /// Takes one packet, if there is one: more at once would let those that are due wait.
    fn receive(&mut self, shared: &Shared, buffer: &mut [u8]) -> io::Result<()> {
        let length = match self.from.read(buffer) {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(()),
            length => length?,
        };
        let now = Instant::now();
        let packet = &buffer[..length];
        if let Some(delay) = shared.arrived(self.side, packet) {
            let before = self.under_way.back().map(|(due, _)| *due);
            let due = before.unwrap_or(now).max(now + delay);
            self.under_way.push_back((due, packet.to_vec()));
        }
        Ok(())
    }

    fn deliver(&mut self) {
        let now = Instant::now();
        while let Some((_, packet)) = self.under_way.pop_front_if(|(due, _)| *due <= now) {
            // Lost if the other end is down, as on any link.
            let _lost = self.to.write(&packet);
        }
    }
}

/// What a packet is, if it is of a kind that can be dropped.
fn kind(from: Side, packet: &[u8]) -> Option<Kind> {
    let Some(TransportSlice::Tcp(tcp)) = SlicedPacket::from_ip(packet).ok()?.transport else {
        return None;
    };
    match (tcp.syn(), tcp.ack(), from) {
        _ if tcp.rst() => None,
        (true, false, _) => Some(Kind::Syn),
        (true, true, _) => Some(Kind::SynAck),
        (false, _, Side::Client) if !tcp.payload().is_empty() => Some(Kind::ClientData),
        (false, _, Side::Server) if !tcp.payload().is_empty() => Some(Kind::ServerData),
        (false, true, Side::Client) if !tcp.fin() => Some(Kind::ClientAck),
        _ => None,
    }
}

/// What TUNSETIFF takes: struct ifreq (include/uapi/linux/if.h).
#[repr(C)]
struct InterfaceRequest {
    name: [u8; libc::IFNAMSIZ],
    flags: libc::c_short,
    _rest: [u8; size_of::<libc::ifreq>() - libc::IFNAMSIZ - size_of::<libc::c_short>()],
}

/// A TUN device in a namespace; it vanishes when it is dropped.
struct Device {
    tun: File,
    netns: String,
    name: &'static str,
}

impl Device {
    fn new(netns: &str, name: &'static str) -> anyhow::Result<Self> {
        // A thread of its own, because the one that asks has to stay in its namespace.
        let tun = thread::scope(|scope| {
            scope
                .spawn(|| {
                    let namespace = File::open(format!("/run/netns/{netns}"))?;
                    setns(namespace, CloneFlags::CLONE_NEWNET)?;
                    open_tun(name)
                })
                .join()
                .unwrap_or_else(|panic| panic::resume_unwind(panic))
        })
        .with_context(|| format!("{name} in {netns}"))?;
        Ok(Self {
            tun,
            netns: netns.to_owned(),
            name,
        })
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // It would go with its last descriptor, but a child that another test has just forked has
        // that as well until it execs.
        let _gone = Command::new("ip")
            .args(["-n", &self.netns, "link", "del", self.name])
            .output();
    }
}

/// A new TUN device in the namespace of the calling thread.
fn open_tun(name: &str) -> anyhow::Result<File> {
    let tun = File::options()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NONBLOCK)
        .open("/dev/net/tun")
        .context("/dev/net/tun")?;
    let mut request = InterfaceRequest {
        name: [0; libc::IFNAMSIZ],
        flags: (libc::IFF_TUN | libc::IFF_NO_PI).try_into()?,
        _rest: [0; _],
    };
    for (to, from) in request.name.iter_mut().zip(name.bytes()) {
        *to = from;
    }
    // SAFETY: the descriptor is open, and `request` is as long as the struct ifreq the kernel reads
    // and writes.
    let done = unsafe { libc::ioctl(tun.as_raw_fd(), libc::TUNSETIFF, &raw mut request) };
    Errno::result(done).context("TUNSETIFF")?;
    Ok(tun)
}

#[cfg(test)]
mod tests {
    use etherparse::PacketBuilder;

    use super::*;

    #[test]
    fn kinds() -> anyhow::Result<()> {
        let cases = [
            (Side::Client, "S", "", Some(Kind::Syn)),
            (Side::Client, "S", "fast open", Some(Kind::Syn)),
            (Side::Server, "SA", "", Some(Kind::SynAck)),
            (Side::Client, "A", "", Some(Kind::ClientAck)),
            (Side::Server, "A", "", None),
            (Side::Client, "A", "x", Some(Kind::ClientData)),
            (Side::Client, "AF", "x", Some(Kind::ClientData)),
            (Side::Server, "A", "x", Some(Kind::ServerData)),
            (Side::Client, "AF", "", None),
            (Side::Client, "AR", "", None),
            (Side::Client, "R", "", None),
        ];
        for v6 in [false, true] {
            for (from, flags, data, expected) in cases {
                let builder = if v6 {
                    PacketBuilder::ipv6([0; 16], [1; 16], 64)
                } else {
                    PacketBuilder::ipv4([10, 89, 0, 1], [10, 89, 0, 2], 64)
                };
                let mut step = builder.tcp(1, 2, 3, 4);
                for flag in flags.chars() {
                    step = match flag {
                        'S' => step.syn(),
                        'A' => step.ack(5),
                        'F' => step.fin(),
                        _ => step.rst(),
                    };
                }
                let mut packet = Vec::new();
                step.write(&mut packet, data.as_bytes())?;
                assert_eq!(kind(from, &packet), expected, "{from:?} {flags} {data}");
            }
        }
        assert_eq!(kind(Side::Client, b"not a packet"), None);
        Ok(())
    }
}
