//! TCP options a policy sets.

use aya_ebpf::{helpers::generated::bpf_setsockopt, programs::SockOpsContext};
use rto_agent_common::{
    Policy, SockOpt,
    policy_flags::{THIN_LINEAR, THIN_LINEAR_SET},
};
use rto_agent_ebpf::counter::Counter;

use crate::tables::{self, Tally};

pub(crate) const SOL_TCP: i32 = 6;

// include/uapi/linux/tcp.h and, from 1000 on, include/uapi/linux/bpf.h.
pub(crate) const TCP_SYNCNT: i32 = 7;
const TCP_THIN_LINEAR_TIMEOUTS: i32 = 16;
const TCP_USER_TIMEOUT: i32 = 18;
const TCP_RTO_MAX_MS: i32 = 44;
const TCP_BPF_DELACK_MAX: i32 = 1003;
const TCP_BPF_RTO_MIN: i32 = 1004;

/// The options of a policy that may stand before the handshake is over.
#[inline(always)]
pub(crate) fn apply(ctx: &SockOpsContext, policy: &Policy, tally: Tally) {
    let tally = Some(tally);
    set_unless_zero(ctx, SockOpt::RtoMin, policy.rto_min_us, tally);
    set_unless_zero(ctx, SockOpt::DelackMax, policy.delack_max_us, tally);
    if policy.flags & THIN_LINEAR_SET != 0 {
        let on = u32::from(policy.flags & THIN_LINEAR != 0);
        set(ctx, SockOpt::ThinLinear, on, tally);
    }
    set_unless_zero(ctx, SockOpt::RtoMax, policy.rto_max_ms, tally);
}

/// Sets an option for which 0 means that the policy does not.
#[inline(always)]
pub(crate) fn set_unless_zero(
    ctx: &SockOpsContext,
    option: SockOpt,
    value: u32,
    tally: Option<Tally>,
) {
    if value != 0 {
        set(ctx, option, value, tally);
    }
}

/// Sets an option, and says whether the kernel took it; a refusal is counted.
#[inline(always)]
pub(crate) fn set(ctx: &SockOpsContext, option: SockOpt, value: u32, tally: Option<Tally>) -> bool {
    let name = match option {
        SockOpt::SynCnt => TCP_SYNCNT,
        SockOpt::RtoMin => TCP_BPF_RTO_MIN,
        SockOpt::DelackMax => TCP_BPF_DELACK_MAX,
        SockOpt::ThinLinear => TCP_THIN_LINEAR_TIMEOUTS,
        SockOpt::RtoMax => TCP_RTO_MAX_MS,
        SockOpt::UserTimeout => TCP_USER_TIMEOUT,
    };
    let mut value = value;
    // SAFETY: the value is on the stack and four bytes long, as every option here takes it.
    let failed =
        unsafe { bpf_setsockopt(ctx.ops.cast(), SOL_TCP, name, (&raw mut value).cast(), 4) };
    if failed != 0 {
        tables::add(tally, Counter::failures_of(option), 1);
    }
    failed == 0
}
