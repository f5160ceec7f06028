//! Finds listening TCP sockets of other processes, with the options on which a request's lifetime
//! depends. Used on kernels where the program cannot read these options.
//!
//! Duplicates each socket by pidfd_getfd(2) (Linux 5.6), reads two options, and closes it at once.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    fs::{self, File},
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    os::fd::{AsFd, AsRawFd as _, FromRawFd as _, OwnedFd},
    path::Path,
    thread,
};

use nix::{
    libc,
    sched::{CloneFlags, setns},
    sys::socket::{AddressFamily, SockFlag, SockType, socket},
};
use rto_agent_core::printable;
use rto_agent_kernel::kernel::tcp_option;

/// A listening socket that has one of the options.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Listener {
    /// The address it listens on, in its network namespace.
    pub(super) address: SocketAddr,
    /// A process that has it open.
    pub(super) pid: u32,
    /// The process's name.
    pub(super) name: String,
    /// TCP_DEFER_ACCEPT, seconds; 0 if not set.
    pub(super) defer_accept_s: u32,
    /// TCP_SYNCNT, if it differs from that of a new socket in its namespace.
    pub(super) syn_retries: Option<u8>,
}

impl fmt::Display for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} (pid {})", self.address, self.name, self.pid)?;
        if self.defer_accept_s != 0 {
            write!(f, ", TCP_DEFER_ACCEPT {} s", self.defer_accept_s)?;
        }
        if let Some(retries) = self.syn_retries {
            write!(f, ", TCP_SYNCNT {retries}")?;
        }
        Ok(())
    }
}

/// The result of [`with_options`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Found {
    /// Listeners with one of the options, by process.
    pub(super) listeners: Vec<Listener>,
    /// Number of listeners examined.
    pub(super) seen: usize,
    /// Number of processes that this one may not inspect.
    pub(super) hidden_processes: usize,
}

/// Finds every listener of the host with one of the options. Changes nothing.
pub(super) fn with_options() -> io::Result<Found> {
    let mut search = Search::default();
    for entry in fs::read_dir("/proc")?.flatten() {
        let name = entry.file_name();
        if let Some(pid) = name.to_str().and_then(|name| name.parse().ok()) {
            search.process(pid);
        }
    }
    Ok(search.found)
}

/// Addresses that listeners of this process's network namespace use. Unreadable files count as
/// empty.
pub(super) fn here() -> Vec<SocketAddr> {
    listening(Path::new("/proc/self")).into_values().collect()
}

/// The network namespaces and sockets examined so far.
#[derive(Default)]
struct Search {
    found: Found,
    /// By the namespace's inode number.
    namespaces: BTreeMap<String, Namespace>,
    /// Inode numbers of the sockets examined: several processes may share a listener.
    done: BTreeSet<u64>,
}

/// The listeners of a network namespace by inode number, and the TCP_SYNCNT of a new socket.
struct Namespace {
    listeners: BTreeMap<u64, SocketAddr>,
    syn_retries: Option<u8>,
}

impl Search {
    fn process(&mut self, pid: u32) {
        let dir = Path::new("/proc").join(pid.to_string());
        let looked = self.look(pid, &dir);
        // A process that has just ended is not reported.
        let denied = matches!(&looked, Err(e) if e.kind() == io::ErrorKind::PermissionDenied);
        self.found.hidden_processes += usize::from(denied && dir.exists());
    }

    fn look(&mut self, pid: u32, dir: &Path) -> io::Result<()> {
        let link = fs::read_link(dir.join("ns/net"))?;
        let namespace = self
            .namespaces
            .entry(link.to_string_lossy().into_owned())
            .or_insert_with(|| Namespace::of(dir));
        if namespace.listeners.is_empty() {
            return Ok(());
        }
        let mut process = None;
        for descriptor in fs::read_dir(dir.join("fd"))?.flatten() {
            let Some(inode) = fs::read_link(descriptor.path())
                .ok()
                .and_then(|link| socket_inode(&link))
            else {
                continue;
            };
            let Some(address) = namespace.listeners.get(&inode) else {
                continue;
            };
            let name = descriptor.file_name();
            let Some(number) = name.to_str().and_then(|name| name.parse().ok()) else {
                continue;
            };
            if self.done.contains(&inode) {
                continue;
            }
            let process = match &process {
                Some(process) => process,
                None => process.insert(pidfd_open(pid)?),
            };
            let socket = pidfd_getfd(process, number)?;
            // The descriptor's number may refer to another file by now.
            if socket_inode_of(&socket) != Some(inode) {
                continue;
            }
            self.done.insert(inode);
            self.found.seen += 1;
            let defer_accept_s = tcp_option(&socket, libc::TCP_DEFER_ACCEPT).unwrap_or(0);
            let syn_retries = tcp_option(&socket, libc::TCP_SYNCNT)
                .and_then(|retries| u8::try_from(retries).ok())
                .filter(|retries| namespace.syn_retries.is_some_and(|own| own != *retries));
            drop(socket);
            if defer_accept_s != 0 || syn_retries.is_some() {
                let name = fs::read(dir.join("comm")).unwrap_or_default();
                let name = String::from_utf8_lossy(&name);
                self.found.listeners.push(Listener {
                    address: *address,
                    pid,
                    name: printable::text(name.trim_end()).into_owned(),
                    defer_accept_s,
                    syn_retries,
                });
            }
        }
        Ok(())
    }
}

impl Namespace {
    /// Reads a process's network namespace. Unreadable files count as empty.
    fn of(dir: &Path) -> Self {
        let listeners = listening(dir);
        let syn_retries = match listeners.is_empty() {
            true => None,
            false => File::open(dir.join("ns/net"))
                .ok()
                .and_then(default_syn_retries),
        };
        Self {
            listeners,
            syn_retries,
        }
    }
}

/// The listeners of a process's network namespace, by inode number.
fn listening(dir: &Path) -> BTreeMap<u64, SocketAddr> {
    let mut listeners = BTreeMap::new();
    for table in ["net/tcp", "net/tcp6"] {
        let text = fs::read_to_string(dir.join(table)).unwrap_or_default();
        listeners.extend(text.lines().filter_map(listener));
    }
    listeners
}

/// TCP_SYNCNT of a new socket in a namespace, which a separate thread enters; `None` if it may not.
fn default_syn_retries(namespace: File) -> Option<u8> {
    let inside = thread::Builder::new().spawn(move || {
        setns(namespace, CloneFlags::CLONE_NEWNET).ok()?;
        let flags = SockFlag::SOCK_CLOEXEC;
        let socket = socket(AddressFamily::Inet, SockType::Stream, flags, None).ok()?;
        u8::try_from(tcp_option(&socket, libc::TCP_SYNCNT)?).ok()
    });
    inside.ok()?.join().ok()?
}

/// Parses the inode number and address of a listener from a line of `/proc/net/tcp` or `tcp6`.
fn listener(line: &str) -> Option<(u64, SocketAddr)> {
    const LISTEN: &str = "0A";
    let fields: Vec<&str> = line.split_ascii_whitespace().collect();
    let [_, local, _, LISTEN, _, _, _, _, _, inode, ..] = fields[..] else {
        return None;
    };
    let (address, port) = local.split_once(':')?;
    let words: Vec<[u8; 4]> = (0..address.len() / 8)
        .map(|n| {
            let word = address.get(n * 8..n * 8 + 8)?;
            // The file prints the bytes in memory as a native-endian number.
            Some(u32::from_str_radix(word, 16).ok()?.to_ne_bytes())
        })
        .collect::<Option<_>>()?;
    let address = match words[..] {
        [v4] => IpAddr::V4(Ipv4Addr::from(v4)),
        [a, b, c, d] => {
            let bytes = <[u8; 16]>::try_from([a, b, c, d].concat()).ok()?;
            IpAddr::V6(Ipv6Addr::from(bytes))
        }
        _ => return None,
    };
    let port = u16::from_str_radix(port, 16).ok()?;
    Some((inode.parse().ok()?, SocketAddr::new(address, port)))
}

/// Parses the number in "socket:[4711]".
fn socket_inode(link: &Path) -> Option<u64> {
    let text = link.to_str()?.strip_prefix("socket:[")?;
    text.strip_suffix(']')?.parse().ok()
}

fn socket_inode_of(socket: &OwnedFd) -> Option<u64> {
    let link = fs::read_link(format!("/proc/self/fd/{}", socket.as_raw_fd())).ok()?;
    socket_inode(&link)
}

fn pidfd_open(pid: u32) -> io::Result<OwnedFd> {
    // SAFETY: the call takes two integers.
    let descriptor = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    owned(descriptor)
}

fn pidfd_getfd(process: &OwnedFd, number: libc::c_int) -> io::Result<OwnedFd> {
    // SAFETY: the call takes three integers; the first is an open descriptor.
    let descriptor =
        unsafe { libc::syscall(libc::SYS_pidfd_getfd, process.as_raw_fd(), number, 0) };
    owned(descriptor)
}

fn owned(descriptor: libc::c_long) -> io::Result<OwnedFd> {
    match libc::c_int::try_from(descriptor) {
        // SAFETY: the kernel has just created this descriptor for this process.
        Ok(descriptor) if descriptor >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(descriptor) }),
        _ => Err(io::Error::last_os_error()),
    }
}

/// A numeric option of a TCP socket.
fn tcp_option(socket: &impl AsFd, option: libc::c_int) -> Option<u32> {
    u32::try_from(tcp_option::get(socket, option).ok()?).ok()
}

#[cfg(test)]
mod tests {
    use std::{net::TcpListener, process};

    use super::*;

    fn set(socket: &TcpListener, option: libc::c_int, value: libc::c_int) {
        // SAFETY: the buffer is on the stack, and the length is the buffer's.
        let done = unsafe {
            libc::setsockopt(
                socket.as_raw_fd(),
                libc::IPPROTO_TCP,
                option,
                (&raw const value).cast(),
                4,
            )
        };
        assert_eq!(done, 0);
    }

    #[test]
    fn listener_lines_are_parsed() {
        let v4 = "   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 4711 1 \
                  0000000000000000 100 0 0 10 0";
        assert_eq!(
            listener(v4),
            Some((4711, "127.0.0.1:8080".parse().unwrap()))
        );
        let v6 = v4.replace("0100007F", "B80D0120000000000000000001000000");
        assert_eq!(
            listener(&v6),
            Some((4711, "[2001:db8::1]:8080".parse().unwrap()))
        );
        assert_eq!(listener(&v4.replace(" 0A ", " 01 ")), None);
        for other in [
            "",
            "  sl  local_address rem_address   st tx_queue rx_queue",
            "x y z 0A",
        ] {
            assert_eq!(listener(other), None);
        }
        assert_eq!(socket_inode(Path::new("socket:[17]")), Some(17));
        assert_eq!(socket_inode(Path::new("pipe:[17]")), None);
    }

    #[test]
    fn own_listeners_are_found_by_their_options() {
        let [plain, deferring, own] =
            [(); 3].map(|()| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap());
        set(&deferring, libc::TCP_DEFER_ACCEPT, 5);
        set(&own, libc::TCP_SYNCNT, 2);
        let mut search = Search::default();
        search.process(process::id());
        let Found {
            listeners,
            seen,
            hidden_processes,
        } = search.found;
        if hidden_processes != 0 {
            // If a seccomp filter or an LSM forbids pidfd_getfd(2), nothing is reported.
            assert!(listeners.is_empty());
            return;
        }
        assert!(seen >= 3);
        let of = |socket: &TcpListener| {
            let address = socket.local_addr().unwrap();
            listeners.iter().find(|one| one.address == address)
        };
        assert_eq!(of(&plain), None);
        let found = of(&deferring).unwrap();
        // The kernel rounds up to retransmissions of 1 s: 1, 3, 7 s.
        assert_eq!((found.defer_accept_s, found.syn_retries), (7, None));
        assert!(
            found.to_string().contains("TCP_DEFER_ACCEPT 7 s"),
            "{found}"
        );
        // Without CAP_SYS_ADMIN the options of a new socket are unknown.
        if let Some(found) = of(&own) {
            assert_eq!((found.defer_accept_s, found.syn_retries), (0, Some(2)));
            assert_eq!(found.pid, process::id());
        } else {
            assert!(!nix::unistd::geteuid().is_root());
        }
    }
}
