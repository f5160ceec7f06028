//! The sock_ops program: initial RTO, and TCP options, by longest prefix of the peer's address.
//! Beside it, and loaded only where the kernel has the place for them: one for accepted sockets
//! ([`clone`]), one for sockets already open ([`walk`]), one for SYN-ACKs while somebody watches
//! ([`syn_ack`]), and one that asks the kernel what it can do ([`probe`]).
//!
//! It returns 1 always and writes `reply` only where an entry says so: any other sock_ops
//! program on the host must not notice it (a `reply` of an earlier program is kept).
//!
//! A connection of which nothing is lost costs a lookup and a count at each step, and leaves nothing behind: it has no
//! storage, unless its policy takes some ([`rto_agent_common::policy_flags::STORED`]) or it is one of those that are
//! measured. The first loss makes it.
//!
//! Needed of the kernel: socket storage and BPF links (Linux 5.10 has all of it). Every helper
//! that may be missing or refuse later on has its failure counted or a fallback.
#![no_std]
#![no_main]
// `lock *(u64 *)`: rustc gives the BPF target no atomic addition (see `tables`).
#![feature(asm_experimental_arch)]

mod active;
mod brake;
mod clone;
mod discovery;
mod events;
mod handshake;
mod hook;
mod kernel_sock;
mod lookup;
mod options;
mod passive;
mod probe;
mod socket;
mod storage;
mod structs;
mod syn_ack;
mod syn_ack_rto;
mod syn_retries;
mod tables;
mod walk;

use aya_ebpf::{macros::sock_ops, programs::SockOpsContext};
use rto_agent_ebpf::ops::{Action, STATE_CB, decide, is_end, is_ours};

/// What every callback answers: "go on".
const CONTINUE: u32 = 1;

/// The program. It uses registers alone, and each operation that is ours has a function of its own, so that those that
/// are not cost a few instructions.
#[sock_ops]
#[inline(always)]
fn rto_agent(ctx: SockOpsContext) -> u32 {
    let op = ctx.op();
    // Most changes of state are not the end, and come several times a connection.
    if is_ours(op) && !(op == STATE_CB && !is_end(hook::argument(&ctx, 1))) {
        let action = decide(op, socket::is_full(&ctx), socket::state(&ctx));
        let ops = ctx.ops;
        match action {
            Action::Leave => 0,
            Action::SynTimeout => active::syn_timeout(ops),
            Action::SynLost => active::syn_lost(ops),
            Action::ConnectFailed => active::failed(ops),
            Action::SynAckTimeout => passive::syn_ack_timeout(ops),
            Action::ActiveEstablished => active::established(ops),
            Action::PassiveEstablished => passive::established(ops),
            Action::RetransmissionTimeout => hook::rto(ops),
            Action::Retransmitted => hook::retransmitted(ops),
            Action::StateChange => handshake::state_changed(ops),
            Action::RttSample => handshake::rtt_sample(ops),
        };
    }
    CONTINUE
}

/// The verifier proves that nothing panics; the compiler requires a handler.
#[panic_handler]
fn panic(_info: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}

/// The kernel reads the licence to decide which helpers a program may call.
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
