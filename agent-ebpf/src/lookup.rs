//! From the peer's address to its policy.

use aya_ebpf::{bindings::bpf_sock_ops, btf_maps::lpm_trie::Key};
use rto_agent_common::{
    EntryValue, NO_POLICY, Policy,
    address::{AF_INET, AF_INET6, Peer, peer_v6},
};

use crate::{
    socket::read,
    tables::{self, ENTRIES_V4, ENTRIES_V6},
};

/// The policy of the longest prefix that covers the peer, and one hit for its entry.
#[inline(always)]
pub(crate) fn policy_of_peer(ops: *mut bpf_sock_ops) -> Option<(u32, &'static Policy)> {
    let entry = entry_of_peer(ops)?;
    let found = live_policy(entry)?;
    count_hit(entry);
    Some(found)
}

/// The same without a hit: the connection request of an accepted connection had its own.
#[inline(always)]
pub(crate) fn policy_of_peer_uncounted(ops: *mut bpf_sock_ops) -> Option<(u32, &'static Policy)> {
    live_policy(entry_of_peer(ops)?)
}

/// A slot without a name is free: an entry that still points at it is inert.
#[inline(always)]
fn live_policy(entry: *mut EntryValue) -> Option<(u32, &'static Policy)> {
    // SAFETY: a map value; the verifier checks the access.
    let index = unsafe { read(&raw const (*entry).policy) };
    if index == NO_POLICY {
        return None;
    }
    let policy = tables::policy(index)?;
    if policy.name[0] == 0 { None } else { Some((index, policy)) }
}

/// Saturates instead of wrapping, so that a busy entry never looks unused. A race between CPUs
/// may lose a hit: an exact count would need an atomic read-modify-write with a result, which
/// BPF has from 5.12 on only, and contention on one cache line for the wide prefixes.
#[inline(always)]
fn count_hit(entry: *mut EntryValue) {
    // SAFETY: a map value; the verifier checks both accesses.
    unsafe {
        let hits = read(&raw const (*entry).hits);
        if hits != u32::MAX {
            core::ptr::write_volatile(&raw mut (*entry).hits, hits + 1);
        }
    }
}

/// The family says where the address is: `remote_ip4` means nothing for a pure IPv6 peer, and
/// IPv4-mapped peers of IPv6 sockets are looked up as IPv4.
#[inline(always)]
fn entry_of_peer(ops: *mut bpf_sock_ops) -> Option<*mut EntryValue> {
    // SAFETY: fields of the context; each is read once, by its own load (a compiler that merges
    // loads of different fields makes a context access the verifier refuses).
    let peer = unsafe {
        match read(&raw const (*ops).family) {
            AF_INET => Peer::V4(read(&raw const (*ops).remote_ip4).to_ne_bytes()),
            AF_INET6 => peer_v6([
                read(&raw const (*ops).remote_ip6[0]),
                read(&raw const (*ops).remote_ip6[1]),
                read(&raw const (*ops).remote_ip6[2]),
                read(&raw const (*ops).remote_ip6[3]),
            ]),
            _ => return None,
        }
    };
    let entry = match peer {
        Peer::V4(address) => ENTRIES_V4.get(&Key::new(32, address))?,
        Peer::V6(address) => ENTRIES_V6.get(&Key::new(128, address))?,
    };
    Some(core::ptr::from_ref(entry).cast_mut())
}
