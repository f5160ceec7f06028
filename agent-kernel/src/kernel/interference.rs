//! Probes whether the initial RTO of a policy reaches the kernel: another sock_ops program may
//! overwrite it or disable it, which the kernel does not report.
//!
//! A child process moves itself into a temporary cgroup below the attached one and into a new
//! network namespace, where every packet to the probed address is dropped. It starts a connection
//! there, and reads the timer that the kernel chose (TCP_INFO). No packet leaves the namespace. The
//! connection is marked, so that the agent's program excludes it from every count.

use std::{
    fs, io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    os::fd::AsRawFd as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::Context as _;
use nix::{
    errno::Errno,
    libc,
    sched::{CloneFlags, unshare},
    sys::socket::{
        AddressFamily, SockFlag, SockType, SockaddrStorage, connect, setsockopt, socket, sockopt,
    },
};
use rto_agent_common::PROBE_MARK;
use rto_agent_core::{policy::ProbeTarget, wire::kernel::Verdict};

use super::interface::{self, LOOPBACK};

/// Name of the hidden verb that starts the child process.
pub const VERB: &str = "__probe";
/// Prefix of the temporary cgroups' names.
const CGROUP_PREFIX: &str = "rto-agent-probe-";
/// No server needs to listen there, because packets are dropped.
const PORT: u16 = 9;
const SOURCE_V4: Ipv4Addr = Ipv4Addr::new(169, 254, 114, 116);
const SOURCE_V6: Ipv6Addr = Ipv6Addr::new(0xfd72, 0x746f, 0, 0, 0, 0, 0, 1);

/// How often leftovers in use are tried again, and after which time.
const SWEEPS: u32 = 25;
const SWEEP_AGAIN: Duration = Duration::from_millis(20);

/// Probes below `cgroup`. Takes about ten milliseconds.
pub fn probe(cgroup: &Path, target: &ProbeTarget) -> Verdict {
    match child_answer(cgroup, target.address) {
        Ok(found_us) if found_us == target.initial_rto_us => Verdict::Good {
            address: target.address,
            initial_rto_us: found_us,
        },
        Ok(found_us) => Verdict::Interference {
            address: target.address,
            expected_us: target.initial_rto_us,
            found_us,
        },
        Err(e) => Verdict::NotProbed {
            reason: format!("{e:#}"),
        },
    }
}

#[expect(
    clippy::disallowed_methods,
    reason = "it is this very program, by no name"
)]
fn child_answer(parent: &Path, address: IpAddr) -> anyhow::Result<u64> {
    let cgroup = TempCgroup::new(parent)?;
    // Runs this same program, even if its file has been replaced.
    let output = Command::new("/proc/self/exe")
        .arg(VERB)
        .arg(&cgroup.path)
        .arg(address.to_string())
        .stdin(Stdio::null())
        .output()
        .context("cannot start the probe")?;
    let stdout = String::from_utf8_lossy(&output.stdout);
    match stdout.trim().parse() {
        Ok(rto_us) if output.status.success() => Ok(rto_us),
        _ => {
            let why = String::from_utf8_lossy(&output.stderr);
            let why = why.trim().trim_start_matches("rto-agent: ");
            anyhow::bail!("{why}")
        }
    }
}

/// A temporary cgroup, removed on drop.
#[derive(Debug)]
pub struct TempCgroup {
    path: PathBuf,
}

impl TempCgroup {
    /// Creates it below `parent`.
    pub fn new(parent: &Path) -> anyhow::Result<Self> {
        // The processes of a killed self-test end one after another.
        let _ = (0..SWEEPS).any(|_| {
            sweep(parent) || {
                std::thread::sleep(SWEEP_AGAIN);
                false
            }
        });
        let pid = std::process::id();
        let path = parent.join(format!("{CGROUP_PREFIX}{pid}"));
        match fs::create_dir(&path) {
            Ok(()) => Ok(Self { path }),
            Err(e) => {
                Err(e).with_context(|| format!("cannot create a cgroup below {}", parent.display()))
            }
        }
    }

    /// Its directory.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for TempCgroup {
    fn drop(&mut self) {
        // The child has ended, but the kernel may take a moment to report the cgroup as empty.
        for _ in 0..50 {
            sweep(&self.path);
            match fs::remove_dir(&self.path) {
                Err(e) if e.raw_os_error() == Some(libc::EBUSY) => {
                    std::thread::sleep(Duration::from_millis(2));
                }
                _ => return,
            }
        }
    }
}

/// Removes the cgroups that killed probes left below `parent`. Returns whether all of them are
/// gone. (A cgroup in use cannot be removed: a killed daemon's child may end a moment later.)
pub fn sweep(parent: &Path) -> bool {
    let own = std::process::id().to_string();
    let mut is_clean = true;
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if let Some(pid) = name.strip_prefix(CGROUP_PREFIX)
            // Another agent may just have created its cgroup, and not moved a process into it yet.
            && (pid == own || !is_agent(pid))
        {
            // A killed self-test may leave the cgroup of its daemon's probe.
            sweep(&entry.path());
            is_clean &= fs::remove_dir(entry.path()).is_ok();
        }
    }
    is_clean
}

/// Whether the process exists and runs this program: another process may have the pid by now.
fn is_agent(pid: &str) -> bool {
    let name = |pid: &str| fs::read_to_string(Path::new("/proc").join(pid).join("comm"));
    let own = name("self").ok();
    name(pid).is_ok_and(|other| own.is_none_or(|own| own == other))
}

/// The child process; see the module's documentation. Returns the initial RTO that the kernel
/// chose, microseconds.
pub fn child(cgroup: &Path, address: IpAddr) -> anyhow::Result<u64> {
    fs::write(cgroup.join("cgroup.procs"), "0")
        .with_context(|| format!("cannot move into {}", cgroup.display()))?;
    unshare(CloneFlags::CLONE_NEWNET)
        .context("cannot create a network namespace (CAP_SYS_ADMIN)")?;
    black_hole(address).context("cannot set up the network namespace")?;
    let family = match address {
        IpAddr::V4(_) => AddressFamily::Inet,
        IpAddr::V6(_) => AddressFamily::Inet6,
    };
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    // Must follow the moves: a socket stays in the cgroup and namespace in which it was created.
    let socket = socket(family, SockType::Stream, flags, None)?;
    setsockopt(&socket, sockopt::Mark, &PROBE_MARK).context("SO_MARK (CAP_NET_ADMIN)")?;
    let to = SockaddrStorage::from(SocketAddr::new(address, PORT));
    match connect(socket.as_raw_fd(), &to) {
        Err(Errno::EINPROGRESS) => rto_us(socket.as_raw_fd()).context("TCP_INFO"),
        Ok(()) => anyhow::bail!("the connection to a black hole succeeded"),
        Err(e) => Err(e).context("cannot start a connection"),
    }
}

/// Routes every packet to `address` through the loopback interface, where the kernel drops it on
/// arrival: the address is not local, and forwarding is off.
fn black_hole(address: IpAddr) -> anyhow::Result<()> {
    interface::set_up(LOOPBACK)?;
    let source = match address {
        IpAddr::V4(_) => IpAddr::V4(SOURCE_V4),
        IpAddr::V6(_) => IpAddr::V6(SOURCE_V6),
    };
    interface::add_address(LOOPBACK, source)?;
    interface::add_route(address, LOOPBACK)
}

/// `tcpi_rto`.
fn rto_us(socket: libc::c_int) -> io::Result<u64> {
    // SAFETY: all zeroes are a valid value of this struct of integers.
    let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
    let mut length = libc::socklen_t::try_from(size_of_val(&info)).unwrap_or(0);
    // SAFETY: buffer and length are on the stack, and the length is the buffer's.
    let done = unsafe {
        libc::getsockopt(
            socket,
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            (&raw mut info).cast(),
            &raw mut length,
        )
    };
    if done == 0 {
        Ok(info.tcpi_rto.into())
    } else {
        Err(io::Error::last_os_error())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interference_verdicts_are_shown() {
        let address = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));
        let good = Verdict::Good {
            address,
            initial_rto_us: 100_000,
        };
        assert_eq!(
            good.describe(),
            "good: a connection to 10.0.0.1 started with 100ms"
        );
        let bad = Verdict::Interference {
            address,
            expected_us: 100_000,
            found_us: 1_000_000,
        };
        assert!(bad.describe().ends_with("started with 1s instead of 100ms"));
    }

    #[test]
    fn leftovers_of_a_killed_probe_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        // Cgroups of no process, of a process that runs another program, and of this process.
        let own = format!("{CGROUP_PREFIX}{}", std::process::id());
        let left = [
            format!("{CGROUP_PREFIX}4194305"),
            format!("{CGROUP_PREFIX}1"),
            own,
        ];
        for name in left.iter().map(String::as_str).chain(["other"]) {
            fs::create_dir(at(name)).unwrap();
        }
        assert!(sweep(dir.path()));
        assert!(left.iter().all(|name| !at(name).exists()));
        assert!(at("other").exists());
        // The removal of a cgroup in use is tried again.
        fs::create_dir_all(at(&left[0]).join("process")).unwrap();
        assert!(!sweep(dir.path()));
    }

    #[test]
    fn failed_probe_says_why() {
        let target = ProbeTarget {
            address: IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1)),
            initial_rto_us: 1,
        };
        let verdict = probe(Path::new("/nonexistent"), &target);
        assert!(verdict.describe().contains("/nonexistent"), "{verdict:?}");
    }
}
