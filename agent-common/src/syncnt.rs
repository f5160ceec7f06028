//! TCP_SYNCNT decisions of the eBPF program.

use crate::{Policy, SYN_RETRIES_LEN};

/// The value TCP_SYNCNT should get on a socket whose effective value is `in_force`
/// (its own, or its namespace's `tcp_syn_retries`); `None` leaves it.
#[inline(always)]
#[must_use]
pub fn wanted(policy: &Policy, in_force: u32) -> Option<u32> {
    let wanted = u32::from(policy.syn_retries[in_force as usize & (SYN_RETRIES_LEN - 1)]);
    if wanted == 0 || wanted == in_force { None } else { Some(wanted) }
}
