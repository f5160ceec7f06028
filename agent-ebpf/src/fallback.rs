//! The conditions of [`rto_agent_common::fallback`]. All CPUs share them, so their counts are updated by atomic
//! additions. A connection that is established without a loss only reads them.

use core::{arch::asm, hint::cold_path, mem::offset_of};

use rto_agent_common::{
    Policy, SocketState, arm, direction,
    fallback::{Fallback, key},
    policy_flags,
};

use rto_agent_ebpf::counter::Counter;

use crate::{
    socket::{self, read},
    tables::{self, FALLBACKS, Tally},
};

/// [`Policy::epochs`] of a direction.
#[inline(always)]
pub(crate) fn epoch(policy: &Policy, direction: u32) -> u32 {
    match direction {
        direction::ACTIVE => policy.epochs[0],
        direction::PASSIVE => policy.epochs[1],
        _ => 0,
    }
}

/// Whether a connection of an arm with these settings begins with the kernel's own initial RTO because of a fallback;
/// if so, it is counted.
#[inline(always)]
pub(crate) fn holds(arm: u32, policy: &Policy, direction: u32) -> bool {
    policy.flags & policy_flags::GUARDED != 0 && any_holds(arm, policy, direction) != 0
}

#[inline(never)]
fn any_holds(arm: u32, policy: &Policy, direction: u32) -> u32 {
    let holds = holds_now(arm, policy, direction);
    if holds != 0 {
        cold_path();
        Tally::of(arm, direction).add(Counter::FALLBACKS, 1);
    }
    holds
}

/// All ones if a connection of this arm that began now would get the initial RTO of its settings, otherwise 0. (A mask
/// avoids a branch, whose two sides the verifier would both follow.)
#[inline(always)]
pub(crate) fn lets_through(arm: u32, policy: &Policy, direction: u32) -> u32 {
    holds_now(arm, policy, direction).wrapping_sub(1)
}

#[inline(always)]
fn holds_now(arm: u32, policy: &Policy, direction: u32) -> u32 {
    let epoch = epoch(policy, direction);
    if epoch == 0 {
        return 0;
    }
    match seen(key(arm::slot(arm), direction)) {
        Some((_, seen)) => (seen.is_spurious(epoch) || seen.is_outage(now_ms)).into(),
        None => 0,
    }
}

/// Notes a connection that was established after this number of retransmissions: it ends an outage, and credits a
/// hundredth of a spurious connection if there was no retransmission.
#[inline(always)]
pub(crate) fn established(arm: u32, policy: &Policy, direction: u32, retransmissions: u32) {
    let epoch = epoch(policy, direction);
    if epoch == 0 {
        return;
    }
    if let Some((place, seen)) = seen(key(arm::slot(arm), direction)) {
        if seen.lost != 0 {
            cold_path();
            // SAFETY: a map value; the verifier checks the access.
            unsafe { (&raw mut (*place).lost).write_volatile(0) };
        }
        if retransmissions == 0 && seen.spurious > 0 && !seen.is_spurious(epoch) {
            cold_path();
            add(place, offset_of!(Fallback, spurious), -1);
        }
    }
}

/// As [`established`], for a connection whose settings are not at hand.
#[inline(always)]
pub(crate) fn established_stored(state: &SocketState, retransmissions: u32) {
    rto_fallback_established(state.arm, state.direction, retransmissions);
}

/// Counts a connection with spurious retransmissions, if it began in the current epoch.
#[inline(always)]
pub(crate) fn judged_spurious(state: &SocketState) {
    rto_fallback_spurious(state.arm, state.direction, state.options.epoch);
}

/// Counts an attempt that has lost its first SYN.
#[inline(always)]
pub(crate) fn first_syn_lost(state: &SocketState) {
    rto_fallback_lost(state.arm);
}

// Global functions: see `tables`.

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn rto_fallback_established(arm: u32, direction: u32, retransmissions: u32) -> u32 {
    if let Some(policy) = tables::settings(arm) {
        established(arm, policy, direction, retransmissions);
    }
    0
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn rto_fallback_lost(arm: u32) -> u32 {
    if let Some(policy) = tables::settings(arm)
        && epoch(policy, direction::ACTIVE) != 0
        && let Some((place, seen)) = seen(key(arm::slot(arm), direction::ACTIVE))
        && seen.lost < Fallback::LOST
    {
        if seen.lost == 0 {
            // SAFETY: a map value; the verifier checks the access.
            unsafe { (&raw mut (*place).lost_since_ms).write_volatile(now_ms()) };
        }
        add(place, offset_of!(Fallback, lost), 1);
    }
    0
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn rto_fallback_spurious(arm: u32, direction: u32, began_with: u32) -> u32 {
    let Some(policy) = tables::settings(arm) else {
        return 0;
    };
    let epoch = epoch(policy, direction);
    if epoch == 0 || epoch != began_with {
        return 0;
    }
    let Some((place, mut seen)) = seen(key(arm::slot(arm), direction)) else {
        return 0;
    };
    if seen.epoch != epoch {
        // SAFETY: a map value, which the verifier checks. If two CPUs reset it at once, one count is lost.
        unsafe {
            (&raw mut (*place).spurious).write_volatile(0);
            (&raw mut (*place).epoch).write_volatile(epoch);
        }
        seen.spurious = 0;
    }
    add(place, offset_of!(Fallback, spurious), seen.cost());
    0
}

/// CLOCK_MONOTONIC, milliseconds.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "it wraps")]
fn now_ms() -> u32 {
    (socket::now() / 1_000_000) as u32
}

/// A pointer to the state of a policy and direction, and its current values.
#[inline(always)]
fn seen(key: u32) -> Option<(*mut Fallback, Fallback)> {
    let place = FALLBACKS.get_ptr_mut(key)?;
    // SAFETY: a map value; the verifier checks the accesses.
    let seen = unsafe {
        Fallback {
            epoch: read(&raw const (*place).epoch),
            spurious: read(&raw const (*place).spurious),
            lost: read(&raw const (*place).lost),
            lost_since_ms: read(&raw const (*place).lost_since_ms),
        }
    };
    Some((place, seen))
}

#[inline(always)]
fn add(place: *mut Fallback, offset: usize, n: i32) {
    // SAFETY: a 32-bit word of a map value; the verifier checks the access.
    unsafe {
        let word = place.byte_add(offset);
        asm!("lock *(u32 *)({word} + 0) += {n}", word = in(reg) word, n = in(reg) i64::from(n));
    }
}
