//! The peer of a connection, and whether it may use the socket.

use std::os::fd::{AsRawFd as _, BorrowedFd};

use nix::{
    errno::Errno,
    libc,
    sys::socket::{getsockopt, sockopt::PeerCredentials},
    unistd::{Gid, Group},
};
use rto_agent_core::wire::types::Caller;

/// Peers that may use the socket: root, and members of one group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allowed {
    /// Group id of `[agent] group`.
    pub group: Gid,
}

/// The peer of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// User and process at the time of connect().
    pub caller: Caller,
    /// Its group ID and supplementary groups.
    pub groups: Vec<u32>,
}

impl Allowed {
    /// Whether this peer may use the socket.
    pub fn permits(&self, peer: &Peer) -> bool {
        peer.caller.uid == 0 || peer.groups.contains(&self.group.as_raw())
    }
}

/// Finds a group by name or number. "root" is 0 even without a group database (an image FROM
/// scratch).
pub fn group_id(name: &str) -> anyhow::Result<Gid> {
    if let Ok(number) = name.parse() {
        anyhow::ensure!(
            number != u32::MAX,
            "[agent] group = \"{name}\": to the kernel this number means \"no group\" (chown(2)); \
             give the name or number of a group"
        );
        return Ok(Gid::from_raw(number));
    }
    if name == "root" {
        return Ok(Gid::from_raw(0));
    }
    let found = match Group::from_name(name) {
        // There is no group database.
        Err(Errno::ENOENT) => None,
        found => found?,
    };
    found.map(|group| group.gid).ok_or_else(|| {
        anyhow::anyhow!(
            "[agent] group = \"{name}\": there is no such group; create it (groupadd --system \
                 {name}), or give the number of a group"
        )
    })
}

/// Reads a peer's credentials (SO_PEERCRED) and groups (SO_PEERGROUPS, Linux 4.13).
pub fn peer_of(socket: BorrowedFd<'_>) -> std::io::Result<Peer> {
    let credentials = getsockopt(&socket, PeerCredentials)?;
    let mut groups = peer_groups(socket)?;
    groups.push(credentials.gid());
    Ok(Peer {
        caller: Caller {
            uid: credentials.uid(),
            pid: credentials.pid(),
        },
        groups,
    })
}

fn peer_groups(socket: BorrowedFd<'_>) -> std::io::Result<Vec<u32>> {
    // NGROUPS_MAX.
    let mut groups = vec![0u32; 1 << 16];
    let bytes = size_of_val(groups.as_slice());
    let mut length = libc::socklen_t::try_from(bytes).map_err(std::io::Error::other)?;
    // SAFETY: the buffer is `length` bytes long and `length` outlives the call, which writes at most
    // that many bytes into it.
    let done = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERGROUPS,
            groups.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    Errno::result(done)?;
    groups.truncate(length as usize / size_of::<u32>());
    Ok(groups)
}

#[cfg(test)]
mod tests {
    use std::os::{fd::AsFd as _, unix::net::UnixStream};

    use super::*;

    #[test]
    fn peer_of_socketpair_is_this_process() {
        let (a, _b) = UnixStream::pair().unwrap();
        let peer = peer_of(a.as_fd()).unwrap();
        assert_eq!(peer.caller.uid, nix::unistd::geteuid().as_raw());
        assert_eq!(peer.caller.pid, nix::unistd::getpid().as_raw());
        assert!(peer.groups.contains(&nix::unistd::getegid().as_raw()));
    }

    #[test]
    fn group_is_name_or_number() {
        assert_eq!(group_id("root").unwrap().as_raw(), 0);
        assert_eq!(group_id("65534").unwrap().as_raw(), 65_534);
        let error = group_id("no-such-group").unwrap_err().to_string();
        assert!(error.contains("or give the number of a group"), "{error}");
    }

    #[test]
    fn only_root_and_group_are_permitted() {
        let allowed = Allowed {
            group: Gid::from_raw(7),
        };
        let peer = |uid, groups: &[u32]| Peer {
            caller: Caller { uid, pid: 1 },
            groups: groups.to_vec(),
        };
        assert!(allowed.permits(&peer(0, &[0])));
        assert!(allowed.permits(&peer(1000, &[1000, 7])));
        assert!(!allowed.permits(&peer(1000, &[1000, 8])));
    }
}
