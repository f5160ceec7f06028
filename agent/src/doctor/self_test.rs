//! `rto-agent doctor --self-test`: tests the timers on this kernel without touching the host's connections.
//!
//! A child process runs a daemon with a configuration of its own, attached to a temporary cgroup. The child has a
//! network namespace and a mount namespace, so that sockets, pins and files end with it, even if it is killed; the
//! parent removes the cgroup. Connections of the child over its loopback interface lose packets, because a socket
//! filter of the receiver drops them for a while, with policies and with the kernel's own timers.

use std::{
    fs::{self, File},
    io::{self, Read as _, Write as _},
    net::{IpAddr, SocketAddr},
    os::{fd::AsFd as _, unix::process::CommandExt as _},
    path::{Path, PathBuf},
    process::{Child, Command, ExitCode, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail, ensure};
use nix::{
    mount::{MsFlags, mount},
    sched::{CloneFlags, unshare},
    sys::{
        prctl::set_pdeathsig,
        signal::{SigSet, Signal, kill},
    },
    unistd::Pid,
};
use rto_agent_core::{
    config::{AgentConfig, CgroupSetting},
    policy::HostFacts,
    wire::kernel::Feature,
};
use rto_agent_daemon::build_info;
use rto_agent_kernel::{
    datapath::{pinned_policy, probe},
    kernel::{
        cgroup,
        facts::host_facts,
        interface::{LOOPBACK, add_address, set_up},
        interference::TempCgroup,
        privileges::{self, cap},
        programs::{self, AttachedProgram},
        version,
    },
};
use rto_model::{
    outage::{Timers, first_from, phases},
    wheel,
};
use serde::Serialize;
use socket2::{Domain, SockFilter, Socket, Type};

use crate::cli::SELF_TEST;

/// Where the child mounts a tmpfs; the directory exists on every host.
const DIR: &str = "/tmp";
/// Longest wait for the daemon, and for a packet.
const LIMIT: Duration = Duration::from_secs(60);
/// How much later than its timer a packet may arrive, milliseconds. The kernel's own timers differ by more.
const LATE_MS: f64 = 90.0;
/// How often a case is repeated that did not pass.
const REPEATS: u32 = 3;

/// Addresses that no host has: 240.0.0.0/4 is reserved (RFC 1112), 100::/64 is for discarding (RFC 6666). A program of
/// the host runs for the test's connections as well, so an entry that covers the addresses would change the timers.
/// [`POLICIES`] covers all but the first two.
const UNCOVERED: [&str; 2] = ["240.0.0.1", "240.0.0.2"];
const OPENED: [&str; 2] = ["240.0.1.1", "100::1"];
const ACCEPTED: &str = "240.0.1.17";
const ESTABLISHED: &str = "240.0.1.33";
const POLICIES: &str = "
[policy.opened]
cidrs = [\"240.0.1.0/28\", \"100::/64\"]
initial_rto = \"100ms\"
[policy.accepted]
cidrs = [\"240.0.1.16/28\"]
syn_ack_rto = \"200ms\"
[policy.established]
cidrs = [\"240.0.1.32/28\"]
rto_min = \"20ms\"
";

/// The report, which users send.
#[derive(Debug, Serialize)]
pub struct SelfTest {
    /// Version, commit and target of this binary.
    pub version: &'static str,
    /// Kernel release.
    pub kernel: String,
    /// Jiffies per second.
    pub hz: u32,
    /// The kernel's features.
    pub features: Vec<Feature>,
    /// The sock_ops programs that the connections of the test ran, the agent's first.
    pub programs: Vec<AttachedProgram>,
    /// From the daemon's start until its program was attached.
    pub start_ms: u128,
    /// The cases.
    pub cases: Vec<Case>,
    /// Whether all cases passed.
    pub passed: bool,
}

/// A connection whose first packets are lost.
#[derive(Debug, Default, Serialize)]
pub struct Case {
    /// The lost packets, and the timer.
    pub name: &'static str,
    /// How long packets are lost.
    pub lost_ms: u16,
    /// When the first packet after that arrives, after the first lost one: least and most, without delays.
    pub expected_ms: [f64; 2],
    /// The same, as measured.
    pub measured_ms: Option<f64>,
    /// Why nothing was measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Whether the measured time is the expected one.
    pub passed: bool,
    #[serde(skip)]
    lost: Lost,
    #[serde(skip)]
    to: &'static str,
    /// The client's address, if it is not the server's.
    #[serde(skip)]
    from: Option<&'static str>,
}

/// The packets that are lost.
#[derive(Clone, Copy, Debug, Default)]
enum Lost {
    #[default]
    Syns,
    SynAcks,
    Data,
}

/// Runs the child with these options in a cgroup below that of the host's agent, removes the cgroup, and returns the
/// child's exit status.
#[expect(
    clippy::disallowed_methods,
    reason = "it is this very program, by no name"
)]
pub fn run(options: &[&str], agent: &AgentConfig) -> anyhow::Result<ExitCode> {
    let missing = privileges::missing(privileges::effective().unwrap_or_default());
    ensure!(
        missing.is_empty() && privileges::has(cap::SYS_ADMIN),
        "--self-test loads programs and creates namespaces: run it as root"
    );
    refuse_covered(&agent.pin_dir)?;
    let configured = match &agent.cgroup {
        CgroupSetting::Auto => None,
        CgroupSetting::Path(path) => Some(path.as_path()),
    };
    let parent = cgroup::resolve(configured).or_else(|_| cgroup::resolve(None))?;
    let ends = [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP];
    let signals: SigSet = ends.into_iter().chain([Signal::SIGCHLD]).collect();
    signals.thread_block()?;
    let cgroup = TempCgroup::new(&parent)?;
    let mut child = Command::new("/proc/self/exe");
    child.arg(SELF_TEST).arg(cgroup.path()).args(options);
    let mut child = child.spawn()?;
    let status = loop {
        if ends.contains(&signals.wait()?) {
            child.kill()?;
        }
        if let Some(status) = child.try_wait()? {
            break status;
        }
    };
    let code = status.code().context("interrupted")?;
    Ok(ExitCode::from(u8::try_from(code)?))
}

/// Refuses a test whose connections get timers of the host's own policies.
fn refuse_covered(pin_dir: &Path) -> anyhow::Result<()> {
    let addresses = [ACCEPTED, ESTABLISHED].into_iter();
    for address in addresses.chain(UNCOVERED).chain(OPENED) {
        ensure!(
            pinned_policy(pin_dir, address.parse()?).is_none(),
            "--self-test would measure the host's own policies: an active entry covers {address} \
             (rto-agent lookup {address} shows it); deactivate it for the test: rto-agent detach"
        );
    }
    Ok(())
}

/// The child process; see the module's documentation.
pub fn child(cgroup: &Path) -> anyhow::Result<SelfTest> {
    set_pdeathsig(Signal::SIGKILL)?;
    // The parent's are blocked, and the daemon would inherit that.
    SigSet::all().thread_unblock()?;
    let features = probe::features();
    let own = CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWNS;
    unshare(own).context("cannot create namespaces")?;
    let config = files(cgroup).with_context(|| format!("cannot mount below {DIR}"))?;
    set_up(LOOPBACK)?;
    let v4 = [OPENED[0], ACCEPTED, ESTABLISHED];
    for address in UNCOVERED.into_iter().chain(v4) {
        add_address(LOOPBACK, address.parse()?)?;
    }
    let has_ipv6 = add_address(LOOPBACK, OPENED[1].parse()?).is_ok();
    let host = host_facts(&features)?;
    let begin = Instant::now();
    let mut daemon = start(&config)?;
    let dir = File::open(cgroup)?;
    while programs::attached_ids(dir.as_fd())?.is_empty() {
        let waits = daemon.try_wait()?.is_none() && begin.elapsed() < LIMIT;
        ensure!(waits, "the daemon attaches nothing: {}", log());
        thread::sleep(Duration::from_millis(5));
    }
    let start_ms = begin.elapsed().as_millis();
    fs::write(cgroup.join("cgroup.procs"), "0").context("cannot move into the cgroup")?;
    let programs = programs::in_ancestry(cgroup::top_of(cgroup), cgroup, &[]);
    let mut cases = measured(cases(&host, has_ipv6), host.hz);
    kill(Pid::from_raw(daemon.id().cast_signed()), Signal::SIGTERM)?;
    ensure!(daemon.wait()?.success(), "the daemon fails: {}", log());
    let mut after = syns(
        &host,
        "SYN, after the daemon's end",
        OPENED[0],
        Timers::Kernel,
        1,
    );
    after.lost_ms = 50;
    cases.append(&mut measured(vec![after], host.hz));
    Ok(SelfTest {
        version: build_info::LINE,
        kernel: version::running()?.to_string(),
        hz: host.hz,
        features,
        programs,
        start_ms,
        passed: cases.iter().all(|case| case.passed),
        cases,
    })
}

/// Mounts file systems that only this process and its children see; returns the configuration file.
fn files(cgroup: &Path) -> anyhow::Result<PathBuf> {
    let (none, no_flags) = (None::<&str>, MsFlags::empty());
    let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
    mount(none, "/", none, private, none)?;
    mount(
        Some("tmpfs"),
        DIR,
        Some("tmpfs"),
        no_flags,
        Some("mode=0755"),
    )?;
    let dir = Path::new(DIR);
    let pins = dir.join("bpf");
    fs::create_dir(&pins)?;
    mount(Some("bpf"), &pins, Some("bpf"), no_flags, none)?;
    let agent = [
        ("cgroup", cgroup.to_owned()),
        ("pin_dir", pins.join("rto-agent")),
        ("socket", dir.join("control.sock")),
        ("state_dir", dir.join("state")),
        ("persistent_dir", dir.join("lasting")),
    ];
    let agent = agent.map(|(key, path)| format!("{key} = \"{}\"\n", path.display()));
    let config = dir.join("config.toml");
    fs::write(&config, format!("[agent]\n{}{POLICIES}", agent.concat()))?;
    Ok(config)
}

/// Starts the daemon, which is killed when this process ends.
#[expect(
    clippy::disallowed_methods,
    reason = "it is this very program, by no name"
)]
fn start(config: &Path) -> anyhow::Result<Child> {
    let mut run = Command::new("/proc/self/exe");
    run.args(["run", "--log-format", "text", "--config"])
        .arg(config)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(File::create(Path::new(DIR).join("log"))?);
    // SAFETY: prctl(2) may be called between fork() and exec().
    unsafe { run.pre_exec(|| Ok(set_pdeathsig(Signal::SIGKILL)?)) };
    Ok(run.spawn()?)
}

/// What the daemon logged.
fn log() -> String {
    fs::read_to_string(Path::new(DIR).join("log")).unwrap_or_default()
}

fn cases(host: &HostFacts, has_ipv6: bool) -> Vec<Case> {
    let jiffies = |ms: u64| (ms * u64::from(host.hz)).div_ceil(1000);
    let opened = |name, to, lost_ms| syns(host, name, to, host.syn_timers(jiffies(100)), lost_ms);
    let one = |name, lost, (from, to), rto_ms| Case {
        name,
        lost,
        lost_ms: 5,
        to,
        from,
        expected_ms: range(host, |at| Some(wheel::fires_at(at, jiffies(rto_ms)) - at)),
        ..Case::default()
    };
    let [kernel, client] = UNCOVERED;
    let mut cases = vec![
        syns(host, "SYN, kernel", kernel, Timers::Kernel, 50),
        opened("SYN, initial_rto = 100ms", OPENED[0], 50),
        syns(host, "SYNs, kernel", kernel, Timers::Kernel, 1500),
        opened("SYNs, initial_rto = 100ms", OPENED[0], 1500),
        one(
            "SYN-ACK, kernel",
            Lost::SynAcks,
            (Some(client), kernel),
            1000,
        ),
        one(
            "SYN-ACK, syn_ack_rto = 200ms",
            Lost::SynAcks,
            (Some(ACCEPTED), kernel),
            200,
        ),
        one("data, kernel", Lost::Data, (None, kernel), 200),
        one("data, rto_min = 20ms", Lost::Data, (None, ESTABLISHED), 20),
    ];
    if has_ipv6 {
        cases.push(opened("SYN over IPv6, initial_rto = 100ms", OPENED[1], 50));
    }
    cases
}

/// A case with the times of the model.
fn syns(
    host: &HostFacts,
    name: &'static str,
    to: &'static str,
    timers: Timers,
    lost_ms: u16,
) -> Case {
    let model = host.syn_schedule();
    let end = (u64::from(lost_ms) * model.hz).div_ceil(1000);
    Case {
        name,
        lost_ms,
        to,
        expected_ms: range(host, |begin| {
            first_from(&model.syns(timers, begin).sent, end)
        }),
        ..Case::default()
    }
}

/// The least and the most over the positions in the timer wheel, from jiffies to milliseconds.
fn range(host: &HostFacts, at: impl Fn(u64) -> Option<u64>) -> [f64; 2] {
    let all = || {
        phases()
            .filter_map(&at)
            .filter_map(|jiffies| u32::try_from(jiffies).ok())
    };
    [all().min(), all().max()].map(|end| f64::from(end.unwrap_or(0)) * 1000.0 / f64::from(host.hz))
}

/// Runs all cases at the same time, and then one by one what was not as expected: a busy host delays a packet now and
/// then, and a wrong timer is wrong each time.
fn measured(mut cases: Vec<Case>, hz: u32) -> Vec<Case> {
    thread::scope(|scope| {
        for case in &mut cases {
            scope.spawn(|| case.measure(hz));
        }
    });
    for case in &mut cases {
        for _ in 0..REPEATS {
            if !case.passed {
                case.measure(hz);
            }
        }
    }
    cases
}

impl Case {
    /// Runs the case once.
    fn measure(&mut self, hz: u32) {
        self.error = None;
        match self.arrival() {
            Ok(took) => {
                let ms = took.as_secs_f64() * 1000.0;
                let [least, most] = self.expected_ms;
                self.measured_ms = Some(ms);
                // The first jiffy of a timer may have begun before.
                self.passed = ms > least - 1000.0 / f64::from(hz) && ms < most + LATE_MS;
            }
            Err(e) => self.error = Some(format!("{e:#}")),
        }
    }

    /// The time from the first packet, which is lost, until one arrives.
    fn arrival(&self) -> anyhow::Result<Duration> {
        let at =
            |address: &str| Ok::<_, anyhow::Error>(SocketAddr::new(address.parse::<IpAddr>()?, 0));
        let to = at(self.to)?;
        let socket = || Socket::new(Domain::for_address(to), Type::STREAM, None);
        let (server, client) = (socket()?, socket()?);
        server.bind(&to.into())?;
        server.listen(1)?;
        if let Some(from) = self.from {
            client.bind(&at(from)?.into())?;
        }
        let to = server.local_addr()?;
        let connect = || client.connect_timeout(&to, LIMIT);
        match self.lost {
            Lost::Syns => self.losing(&server, connect),
            Lost::SynAcks => self.losing(&client, connect),
            Lost::Data => {
                connect()?;
                let (accepted, _) = server.accept()?;
                accepted.set_read_timeout(Some(LIMIT))?;
                self.losing(&accepted, || {
                    (&client).write_all(b"x")?;
                    (&accepted).read_exact(&mut [0])
                })
            }
        }
    }

    /// How long `run` takes while the receiver drops every packet at first.
    fn losing(
        &self,
        receiver: &Socket,
        run: impl FnOnce() -> io::Result<()>,
    ) -> anyhow::Result<Duration> {
        // BPF_RET | BPF_K: accept 0 bytes.
        receiver.attach_filter(&[SockFilter::new(0x06, 0, 0, 0)])?;
        let begin = Instant::now();
        thread::scope(|scope| {
            let outage = scope.spawn(|| {
                thread::sleep(Duration::from_millis(self.lost_ms.into()));
                receiver.detach_filter()
            });
            run()?;
            let took = begin.elapsed();
            match outage.join() {
                Ok(ended) => Ok(ended.map(|()| took)?),
                Err(_) => bail!("panicked"),
            }
        })
    }
}
