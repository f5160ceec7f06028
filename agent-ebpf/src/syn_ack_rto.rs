//! The initial RTO of a SYN-ACK, which determines the lifetime of a half-open request.

use aya_ebpf::programs::SockOpsContext;
use rto_agent_common::{Policy, SYN_ACK_RETRIES_LEN};

use crate::{
    kernel_sock::{DEFERRED, syn_ack_retries},
    socket::{constant, read},
    tables::bounded,
};

/// Jiffies per second. The loader writes it.
#[unsafe(no_mangle)]
static HZ: u32 = 250;

/// TCP_TIMEOUT_INIT, microseconds.
pub(crate) const KERNEL_US: u32 = 1_000_000;

/// TCP_TIMEOUT_INIT, jiffies.
#[inline(always)]
pub(crate) fn kernel_jiffies() -> u32 {
    constant(&HZ)
}

/// The policy's initial RTO for a request, or for the socket created from it, jiffies; 0: the kernel's own.
#[inline(always)]
pub(crate) fn jiffies(ctx: &SockOpsContext, policy: &Policy) -> u32 {
    let retries = syn_ack_retries(ctx);
    if retries == DEFERRED {
        return 0;
    }
    let retries = retries as usize;
    let index = if retries < SYN_ACK_RETRIES_LEN {
        retries
    } else {
        SYN_ACK_RETRIES_LEN - 1
    };
    let index = bounded::<SYN_ACK_RETRIES_LEN>(index);
    // SAFETY: within the table, by the bound; the verifier checks the access.
    unsafe {
        let table = (&raw const policy.syn_ack_rto_jiffies).cast::<u32>();
        read(table.add(index))
    }
}

/// Microseconds in whole jiffies.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "at most some hours")]
pub(crate) fn jiffies_of_us(us: u32) -> u32 {
    (u64::from(us) * u64::from(kernel_jiffies()) / 1_000_000) as u32
}

/// Milliseconds in whole jiffies.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "at most some minutes")]
pub(crate) fn jiffies_of_ms(ms: u32) -> u32 {
    (u64::from(ms) * u64::from(kernel_jiffies()) / 1000) as u32
}

/// Jiffies in milliseconds.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "at most some hours")]
pub(crate) fn milliseconds(jiffies: u32) -> u32 {
    match kernel_jiffies() {
        0 => 0,
        hz => (u64::from(jiffies) * 1000 / u64::from(hz)) as u32,
    }
}

/// Jiffies in microseconds; 0 stands for the kernel's own initial RTO.
#[inline(always)]
#[expect(
    clippy::cast_possible_truncation,
    reason = "at most TCP_RTO_MAX, 120 s"
)]
pub(crate) fn microseconds(jiffies: u32) -> u32 {
    if jiffies == 0 {
        return KERNEL_US;
    }
    match kernel_jiffies() {
        0 => KERNEL_US,
        hz => (u64::from(jiffies) * 1_000_000 / u64::from(hz)) as u32,
    }
}
