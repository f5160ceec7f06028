//! Probes, on a socket of the loader, which options the kernel lets a program set.

use aya_ebpf::{
    helpers::generated::{bpf_get_socket_cookie, bpf_sock_ops_cb_flags_set},
    macros::sock_ops,
    programs::SockOpsContext,
};
use rto_agent_common::{Probe, SockOpt};
use rto_agent_ebpf::ops::{RETRANS_CB, TCP_CONNECT_CB, TIMEOUT_INIT};

use crate::{
    CONTINUE,
    hook::RETRANS_CB_FLAG,
    options::{Target, each_option},
    socket::read,
    storage,
    tables::{self, PROBE_STORAGE},
};

/// Cookie of the socket to probe on; all others are left alone. The loader writes it.
#[unsafe(no_mangle)]
static PROBE_COOKIE: u64 = 0;

/// The program. It is attached only during one connect() to a peer that does not answer.
#[sock_ops]
fn rto_probe(ctx: SockOpsContext) -> u32 {
    let op = ctx.op();
    if matches!(op, TCP_CONNECT_CB | TIMEOUT_INIT | RETRANS_CB)
        && is_ours(&ctx)
        && let Some(answers) = tables::probe()
    {
        match op {
            TCP_CONNECT_CB => ask(&ctx, answers),
            RETRANS_CB => answers.retransmitted = 1,
            _ if answers.retransmitted != 0 => answers.armed = 1,
            _ => begin(&ctx),
        }
    }
    CONTINUE
}

/// Makes the SYN's timer short, and requests RETRANS_CB.
#[inline(always)]
fn begin(ctx: &SockOpsContext) {
    // SAFETY: the context of this very callback.
    unsafe { bpf_sock_ops_cb_flags_set(ctx.ops, RETRANS_CB_FLAG.cast_signed()) };
    ctx.set_reply(1);
}

#[inline(always)]
fn is_ours(ctx: &SockOpsContext) -> bool {
    // SAFETY: the context of this callback; a constant that the loader has written.
    unsafe { bpf_get_socket_cookie(ctx.ops.cast()) == read(&raw const PROBE_COOKIE) }
}

#[inline(always)]
fn ask(ctx: &SockOpsContext, answers: &mut Probe) {
    const OUT_OF_MEMORY: i64 = -12;
    answers.storage = if storage::probe(ctx, &PROBE_STORAGE) {
        0
    } else {
        OUT_OF_MEMORY
    };
    let target = Target::of(ctx);
    each_option!(OPTION => {
        answers.set[OPTION as usize] = target.try_set(OPTION, OPTION.row().example);
        answers.get[OPTION as usize] = target.try_get(OPTION).err().unwrap_or(0);
    });
    // SAFETY: the context of this very callback.
    answers.cb_flags = unsafe { bpf_sock_ops_cb_flags_set(ctx.ops, 0) };
    answers.ran = 1;
}
