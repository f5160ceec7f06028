//! The sock_ops program: sets the initial RTO and TCP options according to the longest prefix that covers the peer's
//! address. The other programs are loaded only if the kernel supports them: one for accepted sockets ([`clone`]), one
//! for sockets already open ([`walk`]), one for SYN-ACKs while a client listens ([`syn_ack`]), and one that probes the
//! kernel's features ([`probe`]).
//!
//! Invariant: the program always returns 1, because a 0 from any program makes the kernel ignore every program's
//! `reply` (`tcp_call_bpf()`, Linux 6.12). It writes `reply` only for a connection that has a policy; otherwise the
//! `reply` of an earlier sock_ops program is kept.
//!
//! A loss-free connection costs a lookup and a count in each callback, and leaves no state behind. It has no storage,
//! unless its policy needs some ([`rto_agent_common::policy_flags::STORED`]) or it is sampled. The first loss creates
//! storage.
//!
//! Kernel requirements: socket storage and BPF links (Linux 5.10 has both). If a helper is missing or fails, there is a
//! fallback or the failure is counted.
#![no_std]
#![no_main]
// `lock *(u64 *)`: rustc has no atomic addition for the BPF target (see `tables`).
#![feature(asm_experimental_arch)]

mod active;
mod clone;
mod discovery;
mod events;
mod fallback;
mod handshake;
mod hook;
mod kernel_sock;
mod lookup;
mod options;
mod passive;
mod probe;
mod series;
mod socket;
mod storage;
mod structs;
mod syn_ack;
mod syn_ack_rto;
mod syn_schedule;
mod tables;
mod unstored;
mod walk;

use aya_ebpf::{macros::sock_ops, programs::SockOpsContext};
use rto_agent_ebpf::ops::{Action, STATE_CB, decide, is_ours, is_watched};

/// The return value of every callback: the kernel continues.
const CONTINUE: u32 = 1;

/// The program. It uses only registers, and each operation that it handles has its own function, so that all other
/// operations cost only a few instructions.
#[sock_ops]
#[inline(always)]
fn rto_agent(ctx: SockOpsContext) -> u32 {
    let op = ctx.op();
    // A connection changes its state several times; few of the changes matter (argument 1: the new state).
    if is_ours(op) && !(op == STATE_CB && !is_watched(hook::argument(&ctx, 1))) {
        let mut action = decide(op, socket::is_full(&ctx), socket::state(&ctx));
        // A socket created from a request has not sent a segment yet. One that has is a simultaneous open, in which this
        // host called connect().
        if action == Action::PassiveEstablished && socket::segs_out(&ctx) != 0 {
            action = Action::ActiveEstablished;
        }
        let ops = ctx.ops;
        match action {
            Action::Leave => 0,
            Action::SynTimeout => active::syn_timeout(ops),
            Action::SynLost => active::syn_lost(ops),
            Action::SynRetransmitted => syn_schedule::retransmitted(ops),
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
