//! The brakes of [`rto_agent_common::brake`]. All CPUs share them, so their counts are updated by atomic additions.

use core::{arch::asm, mem::offset_of};

use aya_ebpf::helpers::bpf_jiffies64;
use rto_agent_common::{
    Policy, SocketState, arm,
    brake::{Brake, key},
    direction, lease, policy_flags,
};

use rto_agent_ebpf::counter::Counter;

use crate::{
    socket::{self, read},
    syn_ack_rto,
    tables::{self, BRAKES, LEASE, Tally},
};

/// [`Policy::epochs`] and [`Policy::budgets`] of a direction.
#[inline(always)]
fn limits(policy: &Policy, direction: u32) -> (u32, u32) {
    match direction {
        direction::ACTIVE => (policy.epochs[0], policy.budgets[0]),
        direction::PASSIVE => (policy.epochs[1], policy.budgets[1]),
        _ => (0, 0),
    }
}

/// [`Policy::epochs`] of a direction.
#[inline(always)]
pub(crate) fn epoch(policy: &Policy, direction: u32) -> u32 {
    limits(policy, direction).0
}

/// Whether a connection of an arm with these settings begins with the kernel's own initial RTO because a brake holds;
/// if so, it is counted.
#[inline(always)]
pub(crate) fn holds(arm: u32, policy: &Policy, direction: u32) -> bool {
    policy.flags & policy_flags::BRAKED != 0 && any_holds(arm, policy, direction) != 0
}

#[inline(never)]
fn any_holds(arm: u32, policy: &Policy, direction: u32) -> u32 {
    let holds = holds_now(arm, policy, direction);
    if holds != 0 {
        Tally::of(arm, direction).add(Counter::BRAKED, 1);
    }
    holds
}

/// All ones if a connection of this arm that began now would get the initial RTO of its settings, otherwise 0. (A mask
/// avoids a branch, whose two sides the verifier would both follow.)
#[inline(always)]
pub(crate) fn lets_through(arm: u32, policy: &Policy, direction: u32) -> u32 {
    holds_now(arm, policy, direction).wrapping_sub(1)
}

/// Credits a connection that was established after this number of retransmissions.
#[inline(always)]
pub(crate) fn credit(arm: u32, policy: &Policy, direction: u32, retransmissions: u32) {
    let epoch = epoch(policy, direction);
    if epoch == 0 {
        return;
    }
    if let Some((place, brake)) = seen(key(arm::slot(arm), direction)) {
        if brake.budget > 0 {
            add(place, offset_of!(Brake, budget), -1);
        }
        if retransmissions == 0 && brake.fuse > 0 && brake.epoch == epoch && !brake.is_blown(epoch)
        {
            add(place, offset_of!(Brake, fuse), -1);
        }
    }
}

/// As [`credit`], for a connection whose settings are not at hand.
#[inline(always)]
pub(crate) fn credit_stored(state: &SocketState, retransmissions: u32) {
    rto_brake_credit(state.arm, state.direction, retransmissions);
}

/// Spends budget for this number of retransmissions.
#[inline(always)]
pub(crate) fn spend(state: &SocketState, retransmissions: u32) {
    rto_brake_spend(state.arm, state.direction, retransmissions);
}

/// Counts a connection with this number of spurious retransmissions, if it began in the current epoch.
#[inline(always)]
pub(crate) fn judged_spurious(state: &SocketState, retransmissions: u32) {
    rto_brake_spurious(
        state.arm,
        state.direction,
        state.options.epoch,
        retransmissions,
    );
}

#[inline(always)]
fn holds_now(arm: u32, policy: &Policy, direction: u32) -> u32 {
    let (epoch, budget) = limits(policy, direction);
    if epoch == 0 {
        return 0;
    }
    if policy.flags & leased(direction) != 0 && has_lapsed() {
        return 1;
    }
    match seen(key(arm::slot(arm), direction)) {
        Some((_, brake)) => brake.holds(epoch, budget).into(),
        None => 0,
    }
}

// Global functions: see `tables`.

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn rto_brake_credit(arm: u32, direction: u32, retransmissions: u32) -> u32 {
    if let Some(policy) = tables::settings(arm) {
        credit(arm, policy, direction, retransmissions);
    }
    0
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn rto_brake_spend(arm: u32, direction: u32, retransmissions: u32) -> u32 {
    if let Some(policy) = tables::settings(arm)
        && let (1.., budget) = limits(policy, direction)
        && let Some((place, brake)) = seen(key(arm::slot(arm), direction))
    {
        let cost = brake.budget_cost(budget, retransmissions);
        add(place, offset_of!(Brake, budget), cost);
    }
    0
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn rto_brake_spurious(
    arm: u32,
    direction: u32,
    began_with: u32,
    retransmissions: u32,
) -> u32 {
    let Some(policy) = tables::settings(arm) else {
        return 0;
    };
    let epoch = epoch(policy, direction);
    if epoch == 0 || epoch != began_with {
        return 0;
    }
    let Some((place, mut brake)) = seen(key(arm::slot(arm), direction)) else {
        return 0;
    };
    if brake.epoch != epoch {
        // SAFETY: a map value, which the verifier checks. If two CPUs reset it at once, one count is lost.
        unsafe {
            (&raw mut (*place).fuse).write_volatile(0);
            (&raw mut (*place).spurious).write_volatile(0);
            (&raw mut (*place).epoch).write_volatile(epoch);
        }
        brake.fuse = 0;
    }
    let cost = brake.fuse_cost(retransmissions);
    add(place, offset_of!(Brake, fuse), cost);
    add(place, offset_of!(Brake, spurious), 1);
    0
}

/// Whether the lease of automatic values has expired.
#[inline(always)]
fn has_lapsed() -> bool {
    let Some(until_ns) = LEASE.get(lease::UNTIL_NS) else {
        return true;
    };
    let (Some(seen_ns), Some(seen_jiffies)) = (
        LEASE.get_ptr_mut(lease::SEEN_NS),
        LEASE.get_ptr_mut(lease::SEEN_JIFFIES),
    ) else {
        return true;
    };
    // SAFETY: map values; the verifier checks the accesses.
    unsafe {
        let until_ns = read(until_ns);
        let jiffies = bpf_jiffies64();
        if read(seen_ns) == until_ns {
            return jiffies >= read(seen_jiffies);
        }
        let left_ns = until_ns.saturating_sub(socket::now());
        if left_ns == 0 {
            return true;
        }
        // `SEEN_NS` is written last. A CPU that sees it before the new `SEEN_JIFFIES` uses the former end, which is
        // earlier.
        seen_jiffies.write_volatile(jiffies + syn_ack_rto::jiffies_of(left_ns));
        seen_ns.write_volatile(until_ns);
        false
    }
}

/// The flag of a policy whose initial RTO in this direction is automatic.
#[inline(always)]
fn leased(direction: u32) -> u32 {
    match direction {
        direction::ACTIVE => policy_flags::LEASED_ACTIVE,
        _ => policy_flags::LEASED_PASSIVE,
    }
}

/// A pointer to a brake, and its current values.
#[inline(always)]
fn seen(key: u32) -> Option<(*mut Brake, Brake)> {
    let place = BRAKES.get_ptr_mut(key)?;
    // SAFETY: a map value; the verifier checks the accesses.
    let brake = unsafe {
        Brake {
            epoch: read(&raw const (*place).epoch),
            fuse: read(&raw const (*place).fuse),
            budget: read(&raw const (*place).budget),
            spurious: 0,
        }
    };
    Some((place, brake))
}

#[inline(always)]
fn add(place: *mut Brake, offset: usize, n: i32) {
    // SAFETY: a 32-bit word of a map value; the verifier checks the access.
    unsafe {
        let word = place.byte_add(offset);
        asm!("lock *(u32 *)({word} + 0) += {n}", word = in(reg) word, n = in(reg) i64::from(n));
    }
}
