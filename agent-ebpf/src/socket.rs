//! The socket behind a context: its storage and its options.

use aya_ebpf::{
    bindings::{BPF_SK_STORAGE_GET_F_CREATE, bpf_sock_ops},
    helpers::generated::{bpf_getsockopt, bpf_setsockopt, bpf_sk_storage_get},
};
use rto_agent_common::{Counters, Policy, SockOpt, SocketState, syncnt};

use crate::tables::SOCKETS;

const SOL_TCP: i32 = 6;
const TCP_SYNCNT: i32 = 7;
const TCP_THIN_LINEAR_TIMEOUTS: i32 = 16;
const TCP_USER_TIMEOUT: i32 = 18;
const TCP_RTO_MAX_MS: i32 = 44;
const TCP_BPF_DELACK_MAX: i32 = 1003;
const TCP_BPF_RTO_MIN: i32 = 1004;

/// `net.ipv4.tcp_syn_retries` of the host, for kernels on which the socket cannot be asked
/// (bpf_getsockopt knows TCP_SYNCNT from 6.1 on). The loader writes it.
#[unsafe(no_mangle)]
static HOST_SYN_RETRIES: u8 = 6;

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

/// The socket's storage; made if missing and `create`. `None` without a socket or memory.
#[inline(always)]
pub(crate) fn storage(ops: *mut bpf_sock_ops, create: bool) -> Option<&'static mut SocketState> {
    let flags = if create { BPF_SK_STORAGE_GET_F_CREATE } else { 0 };
    // SAFETY: a field of the context.
    let sk = unsafe { read(&raw const (*ops).__bindgen_anon_2.sk) };
    if sk.is_null() {
        return None;
    }
    // SAFETY: the map is a socket storage map, `sk` a socket the verifier tracked and found not null.
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

/// Retransmissions of the socket so far, SYNs (or SYN-ACKs) included.
#[inline(always)]
pub(crate) fn total_retrans(ops: *mut bpf_sock_ops) -> u32 {
    // SAFETY: a field of the context.
    unsafe { read(&raw const (*ops).total_retrans) }
}

/// Sets an option; a refusal is counted.
#[inline(always)]
pub(crate) fn set(ops: *mut bpf_sock_ops, option: SockOpt, value: u32, counters: &mut Counters) {
    let name = match option {
        SockOpt::SynCnt => TCP_SYNCNT,
        SockOpt::RtoMin => TCP_BPF_RTO_MIN,
        SockOpt::DelackMax => TCP_BPF_DELACK_MAX,
        SockOpt::ThinLinear => TCP_THIN_LINEAR_TIMEOUTS,
        SockOpt::RtoMax => TCP_RTO_MAX_MS,
        SockOpt::UserTimeout => TCP_USER_TIMEOUT,
    };
    if set_raw(ops, name, value) != 0 {
        counters.setsockopt_failures[option as usize] += 1;
    }
}

#[inline(always)]
fn set_raw(ops: *mut bpf_sock_ops, name: i32, value: u32) -> i64 {
    let mut value = value;
    // SAFETY: the value is on the stack and four bytes long, as every option here takes it.
    unsafe { bpf_setsockopt(ops.cast(), SOL_TCP, name, (&raw mut value).cast(), 4) as i64 }
}

/// TCP_SYNCNT in force on the socket: its own or its namespace's `tcp_syn_retries`.
#[inline(always)]
fn syn_retries(ops: *mut bpf_sock_ops) -> u32 {
    let mut value = 0u32;
    // SAFETY: the buffer is on the stack and as long as said.
    let failed =
        unsafe { bpf_getsockopt(ops.cast(), SOL_TCP, TCP_SYNCNT, (&raw mut value).cast(), 4) };
    if failed == 0 {
        value
    } else {
        // SAFETY: a constant the loader may have written before the program was loaded.
        u32::from(unsafe { read(&raw const HOST_SYN_RETRIES) })
    }
}

/// TCP_SYNCNT the socket would have without this program. On a socket that is connected again,
/// what this program set for the former address does not count.
#[inline(always)]
pub(crate) fn own_syn_retries(ops: *mut bpf_sock_ops, state: &SocketState) -> u32 {
    let in_force = syn_retries(ops);
    if state.syn_retries_set != 0 && in_force == state.syn_retries_set {
        state.syn_retries_before
    } else {
        in_force
    }
}

/// Sets TCP_SYNCNT as the policy wants it for a socket whose own value is `own`.
#[inline(always)]
pub(crate) fn set_syn_retries(
    ops: *mut bpf_sock_ops,
    state: &mut SocketState,
    policy: &Policy,
    own: u32,
    counters: &mut Counters,
) {
    match syncnt::wanted(policy, own) {
        Some(wanted) => {
            if set_raw(ops, TCP_SYNCNT, wanted) == 0 {
                state.syn_retries_before = own;
                state.syn_retries_set = wanted;
            } else {
                counters.setsockopt_failures[SockOpt::SynCnt as usize] += 1;
            }
        }
        None => restore_syn_retries(ops, state),
    }
}

/// Gives the socket's own TCP_SYNCNT back, unless somebody has set another since.
#[inline(always)]
pub(crate) fn restore_syn_retries(ops: *mut bpf_sock_ops, state: &mut SocketState) {
    if state.syn_retries_set != 0 {
        if syn_retries(ops) == state.syn_retries_set {
            // The option held this very value before, so the kernel takes it.
            let _taken = set_raw(ops, TCP_SYNCNT, state.syn_retries_before);
        }
        state.syn_retries_set = 0;
        state.syn_retries_before = 0;
    }
}
