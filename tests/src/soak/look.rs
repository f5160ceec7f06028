//! Checks the kernel during the disturbances: whether the policies are active, and what the agent holds.

use std::{
    fs,
    net::IpAddr,
    os::fd::AsRawFd as _,
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use rto_agent_common::{EntryValue, NO_POLICY, maps};
use rto_testbed::{
    agent::pins_in,
    bpf::pinned,
    cgroup,
    kernel::{Map, Objects, SOCK_OPS, programs_at},
    process::RealTime,
};
use serde::Serialize;

use super::{
    disturbance::Disturbance,
    event::{Event, Log},
    network::{LOST, PEER},
};
use crate::pinned::trie_key;

/// Time between two checks.
const INTERVAL: Duration = Duration::from_millis(200);
/// Checks per sample.
const LOOKS_PER_SAMPLE: u64 = 5;

/// Resources of the agent and of the kernel.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Sample {
    #[serde(flatten)]
    daemon: Process,
    /// Number of maps on the machine; likewise programs and links.
    maps: u64,
    programs: u64,
    links: u64,
    /// Unreclaimable slab memory of the kernel.
    slab_kib: u64,
    percpu_kib: u64,
    /// Removed cgroups that are still referenced.
    dying_cgroups: u64,
}

/// Resources of a process; all 0 while no daemon runs.
#[derive(Clone, Copy, Debug, Default, Serialize)]
struct Process {
    pid: i32,
    rss_kib: u64,
    /// Resident memory without mapped files such as the program itself.
    anonymous_kib: u64,
    descriptors: u64,
}

/// The current state of the soak, for messages.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Now {
    pub(super) round: u32,
    /// The current disturbance, or the last one.
    pub(super) disturbance: Option<Disturbance>,
    /// The daemon's pid; 0 while none runs.
    pub(super) pid: i32,
    pub(super) is_over: bool,
    /// Number of violated invariants.
    pub(super) failures: u32,
}

/// Shared by the thread that disturbs and the thread that checks.
pub(super) struct Shared {
    pub(super) log: Log,
    now: Mutex<Now>,
}

impl Shared {
    pub(super) fn new() -> Self {
        Self {
            log: Log::new(),
            now: Mutex::default(),
        }
    }

    pub(super) fn now(&self) -> MutexGuard<'_, Now> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn print(&self, event: &Event<'_>) -> anyhow::Result<()> {
        let round = self.now().round;
        self.log.print(round, event)
    }

    /// Reports a violated invariant.
    pub(super) fn fail(&self, why: &str) -> anyhow::Result<()> {
        let after = {
            let mut now = self.now();
            now.failures += 1;
            now.disturbance
        };
        self.print(&Event::Failure { after, why })
    }
}

/// The objects to check.
pub(super) struct Places {
    pub(super) cgroup: PathBuf,
    pub(super) pin_dir: PathBuf,
}

/// Checks until the soak is over. A violation is reported when it begins.
pub(super) fn look(shared: &Shared, places: &Places) -> anyhow::Result<()> {
    // The checks must be in time even when the disturbances load the machine.
    let _timely = RealTime::begin();
    let (mut looks, mut longest) = (0, Duration::ZERO);
    let mut last = Instant::now();
    let mut wrong = None;
    while !shared.now().is_over {
        let found = places.policy_in_force().err().map(|e| format!("{e:#}"));
        longest = longest.max(last.elapsed());
        last = Instant::now();
        if let Some(why) = &found
            && wrong.is_none()
        {
            shared.fail(&format!("no policy in force: {why}"))?;
        }
        wrong = found;
        if looks % LOOKS_PER_SAMPLE == 0 {
            let pid = shared.now().pid;
            shared.print(&Event::Sample(Sample::take(pid)?))?;
        }
        looks += 1;
        thread::sleep(INTERVAL.saturating_sub(last.elapsed()));
    }
    shared.print(&Event::End {
        looks,
        longest_gap_s: longest.as_secs_f64(),
    })
}

impl Places {
    /// Fails unless the pinned link's program is attached and a policy covers each address that has connections.
    fn policy_in_force(&self) -> anyhow::Result<()> {
        let pins = pins_in(&self.pin_dir).context("pins")?;
        let link = pinned(&pins.join("link")).context("the pinned link")?;
        let info = fs::read_to_string(format!("/proc/self/fdinfo/{}", link.as_raw_fd()))?;
        let program: u32 = field(&info, "prog_id:").context("a link without a program")?;
        let attached = programs_at(&self.cgroup, SOCK_OPS)?;
        ensure!(
            attached.contains(&program),
            "program {program} is not attached: {attached:?}"
        );
        let open = |name| Map::open(&pins.join(name)).context(name);
        let [v4, v6] = [open(maps::ENTRIES_V4)?, open(maps::ENTRIES_V6)?];
        let policies = open(maps::POLICIES)?;
        for address in PEER.iter().chain(&LOST) {
            let ip: IpAddr = address.parse()?;
            let (map, bits) = if ip.is_ipv4() { (&v4, 32) } else { (&v6, 128) };
            let entry = map
                .get(&trie_key(ip, bits))?
                .with_context(|| format!("no entry covers {address}"))?;
            let (policy_and_end, _) = entry.split_first_chunk().context("a short entry")?;
            let entry = EntryValue {
                policy_and_end: u32::from_ne_bytes(*policy_and_end),
                hits: 0,
            };
            ensure!(
                entry.slot() != NO_POLICY,
                "the entry of {address} has no policy"
            );
            let policy = policies.get(&entry.slot().to_ne_bytes())?;
            ensure!(
                policy.is_some_and(|policy| policy.iter().any(|byte| *byte != 0)),
                "the policy of {address} is empty"
            );
        }
        Ok(())
    }
}

/// The number after a name, in a file with one name per line.
fn field<T: std::str::FromStr>(text: &str, name: &str) -> Option<T> {
    let value = text.lines().find_map(|line| line.strip_prefix(name))?;
    value.split_whitespace().next()?.parse().ok()
}

impl Sample {
    fn take(pid: i32) -> anyhow::Result<Self> {
        let read = |path: &str| fs::read_to_string(path).with_context(|| path.to_owned());
        let memory = read("/proc/meminfo")?;
        let cgroups = fs::read_to_string(cgroup::root()?.join("cgroup.stat"))?;
        let of = |text, name| field(text, name).unwrap_or_default();
        let daemon = Process::of(pid).unwrap_or_default();
        let Objects {
            maps,
            programs,
            links,
        } = Objects::count()?;
        Ok(Self {
            daemon,
            maps,
            programs,
            links,
            slab_kib: of(&memory, "SUnreclaim:"),
            percpu_kib: of(&memory, "Percpu:"),
            dying_cgroups: of(&cgroups, "nr_dying_descendants "),
        })
    }
}

impl Process {
    /// `None` if the process has ended.
    fn of(pid: i32) -> Option<Self> {
        let dir = Path::new("/proc").join(pid.to_string());
        let status = fs::read_to_string(dir.join("status")).ok()?;
        Some(Self {
            pid,
            rss_kib: field(&status, "VmRSS:")?,
            anonymous_kib: field(&status, "RssAnon:")?,
            descriptors: fs::read_dir(dir.join("fd")).ok()?.count() as u64,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proc_fields_are_parsed() {
        let status = "Name:\trto-agent\nVmRSS:\t   8120 kB\nThreads:\t4\n";
        assert_eq!(field::<u64>(status, "VmRSS:"), Some(8120));
        assert_eq!(field::<u64>(status, "Threads:"), Some(4));
        assert_eq!(field::<u64>(status, "FDSize:"), None);
    }

    #[test]
    fn process_counts_memory_and_descriptors() {
        let this = i32::try_from(std::process::id()).unwrap();
        let before = Process::of(this).unwrap();
        let anonymous = before.anonymous_kib;
        assert!(0 < anonymous && anonymous < before.rss_kib, "{before:?}");
        let _open: Vec<_> = (0..100).map(|_| fs::File::open("/proc").unwrap()).collect();
        assert!(Process::of(this).unwrap().descriptors >= 100);
        assert!(Process::of(0).is_none());
    }
}
