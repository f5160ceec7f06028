//! TCP_SYNCNT, which a short initial RTO needs more of: the kernel gives up after a time that is
//! a multiple of it (`retransmits_timed_out()`, Linux 6.12). A connection without storage gets them at its first loss: the
//! kernel looks at the number at each SYN timeout, after RTO_CB.

use rto_agent_common::{Options, Policy, SockOpt, policy_flags, syncnt};

use crate::{
    options::Target,
    syn_ack_rto,
    tables::{self, Tally},
};

/// Sets TCP_SYNCNT as the policy wants it, and remembers what it was.
///
/// Where the socket cannot be asked (bpf_getsockopt knows TCP_SYNCNT from Linux 6.1 on) a value that the
/// application has set itself is not seen, and replaced as if it were the host's.
#[inline(always)]
pub(crate) fn apply(target: Target, options: &mut Options, policy: &Policy, tally: Tally) {
    let own = own(target, options);
    match syncnt::wanted(policy, own) {
        Some(wanted) => set(target, options, own, wanted, tally),
        None => restore(target, options),
    }
}

/// The same at the first SYN timeout, for the timer that fired: the entry that decided over the connection may say
/// something else by now, or be gone.
#[inline(always)]
pub(crate) fn apply_at_loss(
    target: Target,
    options: &mut Options,
    policy: &Policy,
    timer: u32,
    tally: Tally,
) {
    let hz = syn_ack_rto::kernel_jiffies();
    let own = own(target, options);
    // A brake held, and a number that is not chosen to go with the timer stands all the same.
    let is_fixed = timer == hz && policy.flags & policy_flags::SYN_RETRIES_FIXED != 0;
    let wanted = if is_fixed || is_timer_of(policy, timer, hz) {
        syncnt::wanted(policy, own).unwrap_or(own)
    } else {
        syncnt::enough(own, timer, hz)
    };
    if wanted != own {
        set(target, options, own, wanted, tally);
    }
}

/// Whether a policy's connections begin with this timer.
#[inline(always)]
fn is_timer_of(policy: &Policy, timer: u32, hz: u32) -> bool {
    match policy.initial_rto_jiffies {
        0 => timer == hz,
        jiffies => timer == jiffies,
    }
}

#[inline(always)]
fn own(target: Target, options: &Options) -> u32 {
    match target.get(SockOpt::SynCnt) {
        Some(value) => syncnt::own(options, Some(value), 0),
        None => syncnt::own(options, None, tables::host_defaults().syn_retries),
    }
}

#[inline(always)]
fn set(target: Target, options: &mut Options, own: u32, wanted: u32, tally: Tally) {
    if target.set(SockOpt::SynCnt, wanted, tally) {
        options.syn_retries_before = own;
        options.syn_retries_set = wanted;
    }
}

/// Gives the socket's own TCP_SYNCNT back, unless somebody has set another since.
#[inline(always)]
pub(crate) fn restore(target: Target, options: &mut Options) {
    if options.syn_retries_set == 0 {
        return;
    }
    // TCP_SYNCNT of the socket, or its namespace's `tcp_syn_retries`; unknown before Linux 6.1.
    if let Some(before) = syncnt::to_restore(options, target.get(SockOpt::SynCnt)) {
        // The option held this very value before, so that the kernel takes it.
        let _taken = target.set(SockOpt::SynCnt, before, Tally::NOBODY);
    }
    options.syn_retries_set = 0;
    options.syn_retries_before = 0;
}
