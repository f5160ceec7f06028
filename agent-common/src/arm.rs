//! The arms of a policy: the treated arm, which has the policy's settings, and the control arm, which keeps the
//! kernel's own timers.
//!
//! An arm is a number that combines the policy's slot with one bit for treated or control. A hash of the addresses and
//! ports draws the arm. They are known in every callback of a connection, so its request, the socket created from the
//! request, later callbacks and a walk all compute the same arm.

use crate::{Policy, address::Peer};

/// No arm: the arm of [`crate::NO_POLICY`].
pub const NONE: u32 = 0;

/// The treated arm.
#[inline(always)]
#[must_use]
pub const fn treated(slot: u32) -> u32 {
    slot << 1
}

/// The control arm.
#[inline(always)]
#[must_use]
pub const fn control(slot: u32) -> u32 {
    slot << 1 | 1
}

/// The slot of an arm's policy.
#[inline(always)]
#[must_use]
pub const fn slot(arm: u32) -> u32 {
    arm >> 1
}

/// Whether this is a control arm.
#[inline(always)]
#[must_use]
pub const fn is_control(arm: u32) -> bool {
    arm & 1 != 0
}

/// Both arms of a slot.
#[must_use]
pub const fn of(slot: u32) -> [u32; 2] {
    [treated(slot), control(slot)]
}

/// Whether a connection is in the control arm of its policy. `ports`: see [`hash`].
#[inline(always)]
#[must_use]
pub fn draws_control(policy: &Policy, peer: &Peer, ports: u32) -> bool {
    hash(policy.control_seed, address(peer), ports) < policy.control_below
}

/// The hash of a connection that is compared with [`Policy::control_below`]. `ports`: the remote port in the upper half
/// in network order, as in bpf_sock_ops, and the local port in the lower half.
///
/// Four multiplications, each by a constant of SplitMix64 (Steele, Lea, Flood, 2014): uniform for neighbouring
/// addresses and ports, and different for each seed.
#[inline(always)]
#[must_use]
pub const fn hash(seed: u32, [first, second]: [u64; 2], ports: u32) -> u32 {
    let mut hash = fold(first ^ (seed as u64) << 32, 0x9e37_79b9_7f4a_7c15);
    hash = fold(hash ^ second, 0xbf58_476d_1ce4_e5b9);
    hash = fold(hash ^ ports as u64, 0x94d0_49bb_1331_11eb);
    (hash.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as u32
}

/// An address as two words.
#[inline(always)]
#[must_use]
pub fn address(peer: &Peer) -> [u64; 2] {
    match peer {
        Peer::V4(address) => [u32::from_ne_bytes(*address).into(), 0],
        Peer::V6(a) => [
            u64::from_ne_bytes([a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7]]),
            u64::from_ne_bytes([a[8], a[9], a[10], a[11], a[12], a[13], a[14], a[15]]),
        ],
    }
}

#[inline(always)]
const fn fold(hash: u64, factor: u64) -> u64 {
    let hash = hash.wrapping_mul(factor);
    hash ^ hash >> 32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::address::peer_v6;

    #[test]
    fn an_arm_says_whose_it_is() {
        for slot in [0, 1, 2, crate::SLOTS - 1] {
            assert_eq!(
                (super::slot(treated(slot)), is_control(treated(slot))),
                (slot, false)
            );
            assert_eq!(
                (super::slot(control(slot)), is_control(control(slot))),
                (slot, true)
            );
        }
    }

    /// Neighbouring addresses and ports differ only in their least significant bits.
    #[test]
    fn shares_are_those_asked_for_whatever_differs() {
        // The Miri interpreter would take minutes for 100,000.
        const N: u32 = if cfg!(miri) { 1000 } else { 100_000 };
        type Case = fn(u32) -> (Peer, u32);
        let cases: [(&str, Case); 4] = [
            ("local ports", |n| {
                (
                    Peer::V4([10, 0, 0, 1]),
                    443 << 16 | (n & 0xffff) | (n >> 16) << 20,
                )
            }),
            ("remote ports", |n| {
                (Peer::V4([10, 0, 0, 1]), n << 16 | 443 | n >> 16)
            }),
            ("addresses", |n| {
                (Peer::V4((0x0a00_0000 + n).to_be_bytes()), 0)
            }),
            ("IPv6 addresses", |n| (peer_v6([0xfd, 0, 0, n.to_be()]), 0)),
        ];
        for (what, case) in cases {
            for (seed, percent) in [(1, 2), (2, 5), (77, 50), (3, 95)] {
                let below = u32::MAX / 100 * percent;
                let share = f64::from(percent) / 100.0;
                let mut in_control = 0.0;
                for n in 0..N {
                    let (peer, ports) = case(n);
                    in_control += f64::from(hash(seed, address(&peer), ports) < below);
                }
                let (mean, sigma) = (
                    share * f64::from(N),
                    (share * (1.0 - share) * f64::from(N)).sqrt(),
                );
                assert!(
                    (in_control - mean).abs() < 4.0 * sigma,
                    "{what}, {seed}: {in_control}"
                );
            }
        }
    }

    #[test]
    fn control_below_sets_the_share_of_connections() {
        let peer = Peer::V4([10, 0, 0, 1]);
        let drawn = |control_below| {
            let policy = Policy {
                control_below,
                control_seed: 7,
                ..Policy::EMPTY
            };
            let ports = 0..100;
            ports
                .filter(|port| draws_control(&policy, &peer, *port))
                .count()
        };
        assert_eq!((drawn(0), drawn(u32::MAX)), (0, 100));
        assert!((20..80).contains(&drawn(1 << 31)));
    }

    #[test]
    fn addresses_are_drawn_again_with_another_seed() {
        for address in [[0, 0], [u64::MAX, 0], [u64::MAX; 2]] {
            assert_ne!(hash(1, address, 0), hash(2, address, 0), "{address:?}");
        }
    }

    /// Otherwise some connections would always be in the same arm, and the shares would be wrong.
    #[test]
    fn no_step_of_the_hash_loses_anything() {
        for factor in [0x9e37_79b9_7f4a_7c15, 0xbf58_476d_1ce4_e5b9] {
            for n in 0..64 {
                let folded = fold(1 << n, factor);
                assert_eq!(folded ^ folded >> 32, factor << n);
            }
        }
    }

    #[test]
    fn another_seed_chooses_others() {
        let peer = |n: u32| Peer::V4((0x0a00_0000 + n).to_be_bytes());
        let both = (0..10_000).filter(|n| {
            hash(1, address(&peer(*n)), 0) < 1 << 31 && hash(2, address(&peer(*n)), 0) < 1 << 31
        });
        // A quarter, with a standard deviation of 43.
        assert!(both.count().abs_diff(2500) < 4 * 43);
    }
}
