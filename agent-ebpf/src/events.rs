//! Events that the program sends while a client listens.

use core::mem::offset_of;

use aya_ebpf::{bindings::bpf_sock_ops, programs::SockOpsContext};
use rto_agent_common::{
    SocketState,
    event::{Event, EventControl, LIVE, kind},
    socket_flags, statistics,
};

use crate::{
    socket::{self, read},
    tables,
};

/// Sends an event for a retransmission of a connection that has a policy, if a client listens.
#[inline(always)]
pub(crate) fn tell(
    ctx: &SockOpsContext,
    state: &SocketState,
    kind: u32,
    attempt: u32,
    timer_jiffies: u32,
) {
    if tables::counts(statistics::ON) && state.flags & socket_flags::UNCOUNTED == 0 {
        tell_now(ctx.ops, state, kind, attempt, timer_jiffies);
    }
}

/// Whether new connections need storage from the start: because a client listens, or because another program overwrites
/// callbacks.
#[inline(always)]
pub(crate) fn need_storage() -> bool {
    const {
        assert!(offset_of!(EventControl, on).is_multiple_of(8));
        assert!(offset_of!(EventControl, overwritten) == offset_of!(EventControl, on) + 4);
    }
    if !tables::counts(statistics::ON) {
        return false;
    }
    match tables::event_control() {
        // SAFETY: both fields of a map value, which the verifier checks.
        Some(control) => unsafe { read((&raw const (*control).on).cast::<u64>()) != 0 },
        None => false,
    }
}

/// Notes that another program overwrites callbacks.
#[inline(always)]
pub(crate) fn note_overwritten() {
    if let Some(control) = tables::event_control() {
        // SAFETY: a map value, which the verifier checks.
        unsafe { (&raw mut (*control).overwritten).write_volatile(1) };
    }
}

/// [`rto_agent_common::event::EventControl::on`].
#[inline(always)]
fn listeners() -> u32 {
    match tables::event_control() {
        // SAFETY: a map value; the verifier checks the access.
        Some(control) => unsafe { read(&raw const (*control).on) },
        None => 0,
    }
}

/// A function without a symbol, unlike those in `tables`, so it is verified at each call: to accept a context as an
/// argument of a global function, the verifier needs the kernel's BTF, which not every kernel has.
#[inline(never)]
fn tell_now(
    ops: *mut bpf_sock_ops,
    state: &SocketState,
    kind: u32,
    attempt: u32,
    timer_jiffies: u32,
) -> u32 {
    let on = listeners();
    // The tracepoint has already sent an event for each SYN-ACK.
    if on == 0 || (on == LIVE && kind == kind::SYN_ACK) {
        return 0;
    }
    tables::tell(|event: *mut Event| {
        // SAFETY: room for one event, and fields of the context, each read by a load of its own.
        unsafe {
            (*event).time_ns = socket::now();
            (*event).family = read(&raw const (*ops).family);
            let v4 = (*event).family == rto_agent_common::address::AF_INET;
            macro_rules! address {
                ($field:ident, $ip4:ident, $ip6:ident) => {
                    // Both are always loaded: the verifier rejects a load through a pointer chosen by a branch.
                    let (ip4, first) = (
                        read(&raw const (*ops).$ip4),
                        read(&raw const (*ops).$ip6[0]),
                    );
                    (*event).$field[0] = if v4 { ip4 } else { first };
                    (*event).$field[1] = read(&raw const (*ops).$ip6[1]);
                    (*event).$field[2] = read(&raw const (*ops).$ip6[2]);
                    (*event).$field[3] = read(&raw const (*ops).$ip6[3]);
                };
            }
            address!(local, local_ip4, local_ip6);
            address!(remote, remote_ip4, remote_ip6);
            (*event).local_port = read(&raw const (*ops).local_port);
            (*event).remote_port = read(&raw const (*ops).remote_port);
            (*event).kind = kind;
            (*event).attempt = attempt;
            (*event).timer_jiffies = timer_jiffies;
            (*event).state = read(&raw const (*ops).state);
            (*event).arm = state.arm;
            (*event).generation = state.generation;
            (*event).direction = state.direction;
            (*event).pid = state.watch.pid;
            (*event).comm = state.watch.comm;
            (*event).reserved = 0;
        }
    });
    0
}
