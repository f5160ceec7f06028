//! A policy as the program reads it.

use crate::{POLICY_NAME_LEN, SYN_ACK_RETRIES_LEN, SYN_RETRIES_LEN};

/// Settings of one policy, in the units the kernel takes. Zero leaves the kernel's own value. What the program
/// reads of every connection comes first.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// Bits of [`policy_flags`].
    pub flags: u32,
    /// Goes up each time the slot gets another policy, so that sockets of the
    /// former owner are not counted for the new one.
    pub generation: u32,
    /// Initial RTO of the SYN, jiffies (`reply` of TIMEOUT_INIT).
    pub initial_rto_jiffies: u32,
    /// The initial RTO of the SYN in force, the kernel's own included, microseconds: an answer that
    /// took no longer is no answer to a copy sent too early.
    pub initial_rto_us: u32,
    /// Connections (or peers, [`policy_flags::CONTROL_BY_PEER`]) whose [`crate::arm::hash`] is below this are in the
    /// control arm; 0: there is none.
    pub control_below: u32,
    /// Seed of that hash.
    pub control_seed: u32,
    /// Of the initial RTO in each [`crate::direction`] (active, passive): goes up with each value, so that a verdict counts
    /// only for the value it is on. 0: without [`crate::brake`]; see [`policy_flags::BRAKED`].
    pub epochs: [u32; 2],
    /// Retransmissions that may be sent beyond a tenth of the connections ([`crate::brake`]), in tenths of one, by
    /// direction.
    pub budgets: [u32; 2],
    /// TCP_BPF_RTO_MIN, microseconds.
    pub rto_min_us: u32,
    /// TCP_BPF_DELACK_MAX, microseconds.
    pub delack_max_us: u32,
    /// TCP_RTO_MAX_MS, milliseconds.
    pub rto_max_ms: u32,
    /// TCP_USER_TIMEOUT, milliseconds; set once the connection is established.
    pub user_timeout_ms: u32,
    /// RTOs in linear (thin) mode before backoff turns exponential; for the RTO hook.
    pub linear_retries: u32,
    /// Jiffies a second, where `rto_min_us` is lowered while few segments are outstanding
    /// ([`crate::restart`]); 0: it is not.
    pub restart_hz: u32,
    /// Initial RTO of the SYN-ACK, jiffies, by how often the kernel retransmits it before it drops the
    /// request (`net.ipv4.tcp_synack_retries`, or the listener's TCP_SYNCNT); the last is for all beyond.
    pub syn_ack_rto_jiffies: [u32; SYN_ACK_RETRIES_LEN],
    /// What the first so many retransmissions of a SYN gain over the kernel's own timers, microseconds:
    /// negative where the policy's are longer.
    pub gain_us: [i32; GAINS],
    /// TCP_SYNCNT to set, by the value in force on the socket; 0 leaves it.
    pub syn_retries: [u8; SYN_RETRIES_LEN],
    /// UTF-8, padded with NUL; all NUL is a free slot.
    pub name: [u8; POLICY_NAME_LEN],
}

/// A slot of `POLICIES`. A program that runs while the slot is written reads one whole policy, the former or
/// the new one: a write of an array's value is a plain copy, so the daemon writes the copy that is not in
/// force, and then [`PolicySlot::active`] alone.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PolicySlot {
    /// Index of the copy in force, 0 or 1.
    pub active: u32,
    /// Keeps the size a multiple of 8.
    pub reserved: u32,
    /// The two copies.
    pub copies: [Policy; 2],
}

impl PolicySlot {
    /// The policy in force.
    #[must_use]
    pub const fn policy(&self) -> &Policy {
        &self.copies[(self.active & 1) as usize]
    }

    /// The slot with `policy` in the copy that is not in force, and the same with that copy in force: the two
    /// values to write, in this order.
    #[must_use]
    pub const fn replaced(&self, policy: &Policy) -> [Self; 2] {
        let next = (self.active & 1) ^ 1;
        let mut staged = *self;
        staged.copies[next as usize] = *policy;
        let mut flipped = staged;
        flipped.active = next;
        [staged, flipped]
    }
}

/// Defaults of the daemon's network namespace, for kernels on which a program cannot ask the socket itself.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostDefaults {
    /// `net.ipv4.tcp_syn_retries`. A socket's TCP_SYNCNT can be read by a program from Linux 6.1 on.
    pub syn_retries: u32,
    /// The retransmissions of a SYN-ACK to reckon with: `net.ipv4.tcp_synack_retries`, but no more than the
    /// kernel's default of 5, as a namespace of its own begins with that. A request's listener can be read
    /// from Linux 6.2 on.
    pub syn_ack_retries: u32,
}

/// Retransmissions that [`Policy::gain_us`] tells apart; more count as the last.
pub const GAINS: usize = 8;

/// Bits of [`Policy::flags`].
pub mod policy_flags {
    /// [`super::Policy`] decides TCP_THIN_LINEAR_TIMEOUTS.
    pub const THIN_LINEAR_SET: u32 = 1 << 0;
    /// The value it decides for.
    pub const THIN_LINEAR: u32 = 1 << 1;
    /// MPTCP sockets are as any other: their SYNs get the policy's initial RTO and rto_max, too.
    pub const MPTCP: u32 = 1 << 2;
    /// [`super::Policy::syn_retries`] is one number, and not chosen to go with the initial RTO.
    pub const SYN_RETRIES_FIXED: u32 = 1 << 3;
    /// The slot has a policy: one without this is free, and an entry that still points at it is inert.
    pub const IN_USE: u32 = 1 << 4;
    /// Connections have storage from their beginning on: the policy sets something later in a connection's life, or
    /// an option that the kernel does not tell a program, so that what it was must be remembered.
    pub const STORED: u32 = 1 << 5;
    /// All connections of a peer are in the same arm.
    pub const CONTROL_BY_PEER: u32 = 1 << 6;
    /// The initial RTO of connections that this host opens is an automatic one: in force while the daemon renews
    /// [`crate::maps::LEASE`].
    pub const LEASED_ACTIVE: u32 = 1 << 7;
    /// The handshake's time is counted of every connection, also where `SAMPLING` chooses a few.
    pub const TIMED: u32 = 1 << 8;
    /// Delays of ACKs are counted, of connections in the control arm.
    pub const MEASURES_ACKS: u32 = 1 << 9;
    /// [`super::Policy::epochs`] are set.
    pub const BRAKED: u32 = 1 << 10;
    /// Of [`crate::UNMATCHED`]: peers are noted in [`crate::maps::DISCOVERED`].
    pub const DISCOVERS: u32 = 1 << 11;
    /// As [`LEASED_ACTIVE`], of connections that it accepts.
    pub const LEASED_PASSIVE: u32 = 1 << 12;
    /// Those that are more work when a connection is established: one test for most.
    pub const AT_ESTABLISHED: u32 = TIMED | BRAKED | DISCOVERS;
}

/// Bits of `LASTING`: options that connections without storage may have.
pub mod lasting {
    /// TCP_BPF_RTO_MIN.
    pub const RTO_MIN: u32 = 1 << 0;
    /// TCP_BPF_DELACK_MAX.
    pub const DELACK_MAX: u32 = 1 << 1;
    /// Length of `LASTING`: both options take up to 200 ms, in whole jiffies of 1 ms at least.
    pub const LEN: u32 = 256;

    /// The place of a value, microseconds; one that the options do not take has the last.
    #[inline(always)]
    #[must_use]
    pub const fn index(us: u32) -> u32 {
        let ms = us / 1000;
        if ms < LEN { ms } else { LEN - 1 }
    }
}

impl Policy {
    /// A free slot.
    pub const EMPTY: Self = Self {
        flags: 0,
        generation: 0,
        initial_rto_jiffies: 0,
        initial_rto_us: 0,
        control_below: 0,
        control_seed: 0,
        epochs: [0; 2],
        budgets: [0; 2],
        rto_min_us: 0,
        delack_max_us: 0,
        rto_max_ms: 0,
        user_timeout_ms: 0,
        linear_retries: 0,
        restart_hz: 0,
        syn_ack_rto_jiffies: [0; SYN_ACK_RETRIES_LEN],
        gain_us: [0; GAINS],
        syn_retries: [0; SYN_RETRIES_LEN],
        name: [0; POLICY_NAME_LEN],
    };

    /// The name without its padding; `None` for a free slot or bytes that are not UTF-8.
    #[must_use]
    pub fn name(&self) -> Option<&str> {
        let end = self
            .name
            .iter()
            .position(|&b| b == 0)
            .unwrap_or(POLICY_NAME_LEN);
        match core::str::from_utf8(&self.name[..end]) {
            Ok("") | Err(_) => None,
            Ok(name) => Some(name),
        }
    }
}

impl Default for Policy {
    fn default() -> Self {
        Self::EMPTY
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a program sees of a slot that the kernel is copying: the first words new, the others as they were.
    fn torn(from: &PolicySlot, to: &PolicySlot, words: usize) -> PolicySlot {
        type Words = [u64; size_of::<PolicySlot>() / size_of::<u64>()];
        // SAFETY: repr(C) of integers and bytes alone, without padding (asserted), so that all are the same bytes.
        unsafe {
            let [from, to] =
                [*from, *to].map(|slot| core::mem::transmute::<PolicySlot, Words>(slot));
            let seen = core::array::from_fn(|i| if i < words { to[i] } else { from[i] });
            core::mem::transmute::<Words, PolicySlot>(seen)
        }
    }

    #[test]
    fn a_bit_has_one_meaning() {
        use policy_flags::*;
        const ALL: [u32; 13] = [
            THIN_LINEAR_SET,
            THIN_LINEAR,
            MPTCP,
            SYN_RETRIES_FIXED,
            IN_USE,
            STORED,
            CONTROL_BY_PEER,
            LEASED_ACTIVE,
            TIMED,
            MEASURES_ACKS,
            BRAKED,
            DISCOVERS,
            LEASED_PASSIVE,
        ];
        let mut seen = 0;
        for bit in ALL {
            assert_eq!((bit.count_ones(), seen & bit), (1, 0));
            seen |= bit;
        }
        for bit in [TIMED, BRAKED, DISCOVERS] {
            assert_ne!(AT_ESTABLISHED & bit, 0);
        }
        assert_eq!(AT_ESTABLISHED.count_ones(), 3);
        assert_eq!(lasting::RTO_MIN & lasting::DELACK_MAX, 0);
        assert_ne!(lasting::DELACK_MAX, 0);
    }

    /// What is given back to a socket without storage is looked up by its value: two values share no place.
    #[test]
    fn every_value_that_an_option_takes_has_a_place_of_its_own() {
        for hz in [100, 250, 300, 1000] {
            let mut before = None;
            for jiffies in 0..=hz / 5 {
                let place = lasting::index(jiffies * 1_000_000 / hz);
                assert!(
                    place < lasting::LEN - 1 && Some(place) > before,
                    "{jiffies}"
                );
                before = Some(place);
            }
        }
        for beyond in [lasting::LEN * 1000, u32::MAX] {
            assert_eq!(lasting::index(beyond), lasting::LEN - 1);
        }
    }

    #[test]
    fn a_name_ends_with_its_padding() {
        let named = |text: &[u8]| {
            let mut policy = Policy::EMPTY;
            policy.name[..text.len()].copy_from_slice(text);
            policy
        };
        assert_eq!(named(b"").name(), None);
        assert_eq!(named(b"dc").name(), Some("dc"));
        assert_eq!(named(&[b'a'; POLICY_NAME_LEN]).name().unwrap().len(), 64);
        assert_eq!(named(&[0xff]).name(), None);
    }

    #[test]
    fn a_slot_that_is_written_holds_a_whole_policy_at_every_moment() {
        let policy = |n: u8| Policy {
            initial_rto_jiffies: n.into(),
            syn_retries: [n; SYN_RETRIES_LEN],
            restart_hz: n.into(),
            ..Policy::EMPTY
        };
        let mut slot = PolicySlot::default();
        for n in 1..5 {
            let (former, new) = (*slot.policy(), policy(n));
            for next in slot.replaced(&new) {
                for words in 0..=size_of::<PolicySlot>() / 8 {
                    let seen = *torn(&slot, &next, words).policy();
                    assert!(seen == former || seen == new, "after {words} words");
                }
                slot = next;
            }
            assert_eq!(*slot.policy(), new);
        }
    }
}
