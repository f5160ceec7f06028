//! Looks up the policy of a peer's address.

use core::hint::cold_path;

use aya_ebpf::{
    bindings::bpf_sock_ops, btf_maps::lpm_trie::Key, helpers::generated::bpf_ktime_get_boot_ns,
    programs::SockOpsContext,
};
use rto_agent_common::{
    CONTROL, EntryValue, NO_POLICY, Policy, UNMATCHED,
    address::{AF_INET, AF_INET6, Peer, peer_v6},
    arm, policy_flags, statistics,
};

use crate::{
    socket::{self, read},
    structs::SockCommon,
    tables::{self, ENTRIES_V4, ENTRIES_V6},
};

/// Whether a lookup counts as a hit of the entry. A connection is one hit: connect() counts, and so does a connection
/// request; the accepted connection created from the request does not.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Hit {
    Count,
    Leave,
}

/// The arm of a connection and that arm's settings, by the longest prefix that covers the peer of a sock_ops context.
#[inline(always)]
pub(crate) fn policy_of_peer(ctx: &SockOpsContext, hit: Hit) -> Option<(u32, &'static Policy)> {
    // The sequence number of a request cannot be read.
    let random = || match socket::is_full(ctx) {
        true => socket::sequence_hash(ctx),
        false => socket::port_hash(ctx),
    };
    find(peer(ctx), hit, random, |policy| is_control(ctx.ops, policy))
}

/// As [`policy_of_peer`]. If connections that no entry covers are counted, they get [`UNMATCHED`], which sets nothing.
#[inline(always)]
pub(crate) fn policy_or_unmatched(
    ctx: &SockOpsContext,
    hit: Hit,
) -> Option<(u32, &'static Policy)> {
    or_unmatched(policy_of_peer(ctx, hit))
}

/// As [`policy_or_unmatched`], for paths that few connections take: a call of a global function, which the verifier
/// checks only once. Without a policy: [`arm::NONE`] and the settings of [`NO_POLICY`], which set nothing.
#[inline(always)]
pub(crate) fn arm_at_loss(ctx: &SockOpsContext) -> Option<(u32, &'static Policy)> {
    let arm = rto_arm_of_peer(ctx.ops);
    Some((arm, tables::settings(arm)?))
}

/// A global function: see `tables`.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn rto_arm_of_peer(ops: *mut bpf_sock_ops) -> u32 {
    let ctx = &SockOpsContext::new(ops);
    policy_or_unmatched(ctx, Hit::Leave).map_or(arm::NONE, |(arm, _)| arm)
}

/// The policy found, or else [`UNMATCHED`] if such connections are counted.
#[inline(always)]
pub(crate) fn or_unmatched(
    found: Option<(u32, &'static Policy)>,
) -> Option<(u32, &'static Policy)> {
    if found.is_some() || !tables::counts(statistics::ON) || !tables::counts(statistics::UNMATCHED)
    {
        return found;
    }
    cold_path();
    Some((arm::treated(UNMATCHED), tables::policy(UNMATCHED)?))
}

/// As [`policy_of_peer`], for a socket or a connection request.
#[inline(always)]
pub(crate) fn policy_of(common: SockCommon) -> Option<(u32, &'static Policy)> {
    let peer = common.peer();
    let is_control = |policy: &Policy| {
        let ports = common.remote_port() | common.local_port();
        peer.is_some_and(|peer| arm::draws_control(policy, &peer, ports))
    };
    find(peer, Hit::Leave, || 0, is_control)
}

#[inline(always)]
fn find(
    peer: Option<Peer>,
    hit: Hit,
    random: impl FnOnce() -> u32,
    is_control: impl FnOnce(&Policy) -> bool,
) -> Option<(u32, &'static Policy)> {
    let entry = entry_of(peer?)?;
    // SAFETY: a map value; the verifier checks the access.
    let policy_and_end = unsafe { read(&raw const (*entry).policy_and_end) };
    let value = EntryValue {
        policy_and_end,
        hits: 0,
    };
    let slot = value.slot();
    // SAFETY: a helper without arguments, for every type of program (Linux 5.8).
    if slot == NO_POLICY || value.is_over(|| unsafe { bpf_ktime_get_boot_ns() }) {
        return None;
    }
    let policy = tables::policy(slot)?;
    // An entry may still point to a free slot.
    if policy.flags & policy_flags::IN_USE == 0 {
        return None;
    }
    if hit == Hit::Count {
        tables::count_hit(entry, random);
    }
    if policy.control_below != 0 {
        cold_path();
        if is_control(policy) {
            return Some((arm::control(slot), tables::policy(CONTROL)?));
        }
    }
    Some((arm::treated(slot), policy))
}

/// Whether the connection of a sock_ops context is in the control arm of its policy. The address is read again, so that
/// policies without a control arm need not keep it.
#[inline(never)]
fn is_control(ops: *mut bpf_sock_ops, policy: &Policy) -> bool {
    let ctx = &SockOpsContext::new(ops);
    peer(ctx).is_some_and(|peer| arm::draws_control(policy, &peer, socket::ports(ctx)))
        // The agent's own probe always gets the policy's settings.
        && !(socket::is_full(ctx) && socket::is_probe(ctx))
}

/// The peer's address. The family decides which field is valid: `remote_ip4` means nothing for a pure IPv6 peer.
/// IPv4-mapped peers of IPv6 sockets are looked up as IPv4.
#[inline(always)]
pub(crate) fn peer(ctx: &SockOpsContext) -> Option<Peer> {
    let ops = ctx.ops;
    // SAFETY: fields of the context; each is read once, by its own load (if the compiler merged loads of different
    // fields, the verifier would reject the access).
    unsafe {
        match read(&raw const (*ops).family) {
            AF_INET => Some(Peer::V4(read(&raw const (*ops).remote_ip4).to_ne_bytes())),
            AF_INET6 => Some(peer_v6([
                read(&raw const (*ops).remote_ip6[0]),
                read(&raw const (*ops).remote_ip6[1]),
                read(&raw const (*ops).remote_ip6[2]),
                read(&raw const (*ops).remote_ip6[3]),
            ])),
            _ => None,
        }
    }
}

#[inline(always)]
fn entry_of(peer: Peer) -> Option<*mut EntryValue> {
    let entry = match peer {
        Peer::V4(address) => ENTRIES_V4.get(&Key::new(32, address))?,
        Peer::V6(address) => ENTRIES_V6.get(&Key::new(128, address))?,
    };
    Some(core::ptr::from_ref(entry).cast_mut())
}
