//! `tp_btf/tcp_retransmit_synack`: sends an event for each SYN-ACK when the kernel retransmits it. A sock_ops program
//! sees these only when the connection is established, or never.
//!
//! The program is attached only while a client listens. During that time the kernel runs it for every retransmitted
//! SYN-ACK of the host (`tcp_rtx_synack()`, Linux 6.12).

use core::ffi::c_void;

use rto_agent_common::{
    address::{AF_INET, AF_INET6},
    direction,
    event::{self, kind},
};

use crate::{
    lookup,
    socket::{self, read},
    structs::{Request, SockCommon},
    syn_ack_rto, tables,
};

/// `BPF_TCP_NEW_SYN_RECV`.
const NEW_SYN_RECV: u32 = 12;

/// The arguments of the tracepoint: the listener, and the connection request.
#[unsafe(no_mangle)]
#[unsafe(link_section = "tp_btf/tcp_retransmit_synack")]
extern "C" fn rto_synack(arguments: *const [*mut c_void; 2]) -> i32 {
    // SAFETY: the context of the tracepoint; each argument is read with its own load.
    let (listener, request) = unsafe {
        (
            read((&raw const (*arguments)[0]).cast::<*mut c_void>()),
            read((&raw const (*arguments)[1]).cast::<*mut c_void>()),
        )
    };
    if listener.is_null() || request.is_null() {
        return 0;
    }
    let Some(control) = tables::event_control() else {
        return 0;
    };
    // SAFETY: a map value; the verifier checks the access.
    let (on, cgroup) = unsafe {
        (
            read(&raw const (*control).on),
            read(&raw const (*control).cgroup),
        )
    };
    // SAFETY: not null, and the verifier knows their types.
    let (listener, request) = unsafe { (SockCommon::new(listener), Request::new(request)) };
    if on != event::LIVE || (cgroup != 0 && !listener.is_in_cgroup(cgroup)) {
        return 0;
    }
    let common = request.common();
    let found = lookup::policy_of(common);
    let Some((arm, policy)) = lookup::or_unmatched(found) else {
        return 0;
    };
    let timer = match request.timeout() {
        0 => syn_ack_rto::kernel_jiffies(),
        timeout => timeout,
    };
    tables::tell(|event| {
        // SAFETY: room for one event.
        unsafe {
            (*event).time_ns = socket::now();
            (*event).family = if common.is_v4() { AF_INET } else { AF_INET6 };
            (*event).local = common.local_words();
            (*event).remote = common.remote_words();
            (*event).local_port = common.local_port();
            (*event).remote_port = common.remote_port();
            (*event).kind = kind::SYN_ACK;
            (*event).attempt = request.retransmissions() + 1;
            (*event).timer_jiffies = timer;
            (*event).state = NEW_SYN_RECV;
            (*event).arm = arm;
            (*event).generation = tables::generation(arm, policy);
            (*event).direction = direction::PASSIVE;
            (*event).pid = 0;
            (*event).comm = [0; event::COMM_LEN];
            (*event).reserved = 0;
        }
    });
    0
}
