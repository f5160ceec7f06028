//! The socket behind a context, and its storage.

use aya_ebpf::{
    bindings::BPF_SK_STORAGE_GET_F_CREATE,
    helpers::{bpf_ktime_get_ns, generated::bpf_sk_storage_get},
    programs::SockOpsContext,
};
use rto_agent_common::{NO_POLICY, SocketState};

use crate::tables::SOCKETS;

/// What to do about storage a socket does not have.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Missing {
    None,
    Create,
}

/// Reads one field by a load of its own.
///
/// # Safety
///
/// The pointer must be one the verifier lets the program read.
#[inline(always)]
pub(crate) unsafe fn read<T: Copy>(field: *const T) -> T {
    // SAFETY: by the contract of this function.
    unsafe { core::ptr::read_volatile(field) }
}

/// Whether there is a full socket (and not just a connection request).
#[inline(always)]
pub(crate) fn is_full(ctx: &SockOpsContext) -> bool {
    // SAFETY: a field of the context.
    unsafe { read(&raw const (*ctx.ops).is_fullsock) != 0 }
}

/// Its state (`BPF_TCP_*`).
#[inline(always)]
pub(crate) fn state(ctx: &SockOpsContext) -> u32 {
    // SAFETY: a field of the context.
    unsafe { read(&raw const (*ctx.ops).state) }
}

/// Its retransmissions so far, SYNs (or SYN-ACKs) included.
#[inline(always)]
pub(crate) fn total_retrans(ctx: &SockOpsContext) -> u32 {
    // SAFETY: a field of the context.
    unsafe { read(&raw const (*ctx.ops).total_retrans) }
}

/// The storage of a socket that a policy was chosen for; `None` for any other.
#[inline(always)]
pub(crate) fn policy_state(ctx: &SockOpsContext) -> Option<&'static mut SocketState> {
    let state = storage(ctx, Missing::None)?;
    if state.policy == NO_POLICY {
        None
    } else {
        Some(state)
    }
}

/// The socket's storage. `None` without a full socket or, if it was to be made, without memory.
///
/// The kernel holds the socket's lock in every callback of a full socket, so that nobody else
/// looks at the storage meanwhile.
#[inline(always)]
pub(crate) fn storage(ctx: &SockOpsContext, missing: Missing) -> Option<&'static mut SocketState> {
    let flags = if missing == Missing::Create {
        BPF_SK_STORAGE_GET_F_CREATE
    } else {
        0
    };
    // SAFETY: a field of the context.
    let sk = unsafe { read(&raw const (*ctx.ops).__bindgen_anon_2.sk) };
    if sk.is_null() {
        return None;
    }
    // SAFETY: the map is a socket storage map; `sk` is a socket that the verifier tracks, not null.
    let state = unsafe {
        bpf_sk_storage_get(
            core::ptr::from_ref(&SOCKETS).cast_mut().cast(),
            sk.cast(),
            core::ptr::null_mut(),
            flags.into(),
        )
    };
    // SAFETY: null, or the socket's own value, whose size the map's definition gives.
    unsafe { state.cast::<SocketState>().as_mut() }
}

/// Nanoseconds since boot, CLOCK_MONOTONIC.
#[inline(always)]
pub(crate) fn now() -> u64 {
    // SAFETY: the helper takes nothing and only reads the clock.
    unsafe { bpf_ktime_get_ns() }
}
