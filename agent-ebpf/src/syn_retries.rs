//! TCP_SYNCNT, which a short initial RTO needs more of: the kernel gives up after a time that is
//! a multiple of it (`retransmits_timed_out()`, Linux 6.12).

use aya_ebpf::programs::SockOpsContext;
use rto_agent_common::{Policy, SockOpt, SocketState, syncnt};

use crate::{
    options::Target,
    tables::{self, Tally},
};

/// Sets TCP_SYNCNT as the policy wants it, and remembers what it was.
///
/// Where the socket cannot be asked (bpf_getsockopt knows TCP_SYNCNT from Linux 6.1 on) a value that the
/// application has set itself is not seen, and replaced as if it were the host's.
#[inline(always)]
pub(crate) fn apply(ctx: &SockOpsContext, state: &mut SocketState, policy: &Policy, tally: Tally) {
    let own = match Target::of(ctx).get(SockOpt::SynCnt) {
        Some(value) => syncnt::own(state, Some(value), 0),
        None => syncnt::own(state, None, tables::host_defaults().syn_retries),
    };
    match syncnt::wanted(policy, own) {
        Some(wanted) => {
            if Target::of(ctx).set(SockOpt::SynCnt, wanted, tally) {
                state.syn_retries_before = own;
                state.syn_retries_set = wanted;
            }
        }
        None => restore(Target::of(ctx), state),
    }
}

/// Gives the socket's own TCP_SYNCNT back, unless somebody has set another since.
#[inline(always)]
pub(crate) fn restore(target: Target, state: &mut SocketState) {
    if state.syn_retries_set == 0 {
        return;
    }
    // TCP_SYNCNT of the socket, or its namespace's `tcp_syn_retries`; unknown before Linux 6.1.
    if let Some(before) = syncnt::to_restore(state, target.get(SockOpt::SynCnt)) {
        // The option held this very value before, so that the kernel takes it.
        let _taken = target.set(SockOpt::SynCnt, before, Tally::NOBODY);
    }
    state.syn_retries_set = 0;
    state.syn_retries_before = 0;
}
