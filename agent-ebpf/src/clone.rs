//! `lsm_cgroup/inet_csk_clone`: an accepted socket, before its first RTT sample.
//!
//! PASSIVE_ESTABLISHED_CB runs after that sample, when the kernel has already computed the RTO with the default
//! rto_min; after that the RTO only falls by a quarter of the excess per round trip. This hook runs when the kernel has
//! just created the socket (`inet_csk_clone_lock()`, Linux 6.12), so that the policy's rto_min already applies to the
//! first RTO.

use core::ffi::c_void;

use rto_agent_common::{also, direction};
use rto_agent_ebpf::counter::Counter;

use crate::{
    lookup,
    options::{Defaults, Target},
    socket::read,
    storage::Storage,
    structs::SockCommon,
    tables::Tally,
};

/// The value that a program must return at a hook without a result.
const VOID: i32 = 1;

/// The arguments of the hook: the new socket, and the connection request that it is created from.
#[unsafe(no_mangle)]
#[unsafe(link_section = "lsm_cgroup/inet_csk_clone")]
extern "C" fn rto_clone(arguments: *const [*mut c_void; 2]) -> i32 {
    // SAFETY: the context of the hook; each argument is read with its own load.
    let (sk, request) = unsafe {
        (
            read((&raw const (*arguments)[0]).cast::<*mut c_void>()),
            read((&raw const (*arguments)[1]).cast::<*mut c_void>()),
        )
    };
    // SAFETY: a request begins with a `sock_common`; the hook's arguments are never null. (The
    // socket's own address is not filled in yet.)
    let request = unsafe { SockCommon::new(request) };
    if let Some((arm, policy)) = lookup::policy_of(request)
        && policy.rto_min_us != 0
    {
        let tally = Tally::of(arm, direction::PASSIVE);
        // The state has no policy yet: PASSIVE_ESTABLISHED_CB chooses it and keeps what is set here.
        // SAFETY: this run has no other `Storage`, and the new socket is not yet visible to other CPUs.
        let mut storage = unsafe { Storage::of_socket(sk) };
        match storage.make() {
            Some(state) => {
                Target::socket(sk).settle_those::<{ also::AT_CLONE }>(
                    &mut state.options,
                    Some(policy),
                    Defaults::Kernel,
                    tally,
                );
            }
            None => tally.add(Counter::STORAGE_FAILURES, 1),
        }
    }
    VOID
}
