//! A policy as the program reads it.

use crate::{POLICY_NAME_LEN, SYN_ACK_RETRIES_LEN, features};

/// Settings of one policy, in the kernel's units. 0 leaves the kernel's own value. The fields that the program reads
/// for every connection come first.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// Bits of [`policy_flags`].
    pub flags: u32,
    /// Increases each time the slot gets another policy, so that sockets of the former policy are not counted for the
    /// new one.
    pub generation: u32,
    /// Initial RTO of the SYN, jiffies (`reply` of TIMEOUT_INIT).
    pub initial_rto_jiffies: u32,
    /// The initial RTO of the SYN in effect, the kernel's own included, microseconds. If the answer took less time than
    /// this, no copy was sent too early.
    pub initial_rto_us: u32,
    /// Connections whose [`crate::arm::hash`] is below this value are in the control arm; 0: no control arm.
    pub control_below: u32,
    /// Seed of that hash.
    pub control_seed: u32,
    /// Epoch of the initial RTO in each [`crate::direction`] (active, passive): increases with each new value, so that
    /// a verdict only counts for the value that it judges. 0: without a [`crate::fallback`]; see
    /// [`policy_flags::GUARDED`].
    pub epochs: [u32; 2],
    /// TCP_BPF_RTO_MIN, microseconds.
    pub rto_min_us: u32,
    /// TCP_BPF_DELACK_MAX, microseconds.
    pub delack_max_us: u32,
    /// TCP_RTO_MAX_MS, milliseconds.
    pub rto_max_ms: u32,
    /// TCP_USER_TIMEOUT, milliseconds; set when the connection is established.
    pub user_timeout_ms: u32,
    /// RTOs in linear (thin) mode before the backoff becomes exponential; for the RTO hook.
    pub linear_retries: u32,
    /// Jiffies per second if `rto_min_us` is lowered while few segments are outstanding ([`crate::restart`]); 0: it is
    /// not lowered.
    pub restart_hz: u16,
    /// From this time on after the first SYN, jiffies, its retransmissions may take another path (IPv6 flow label): the
    /// law says of the path's RTTs that an answer would have arrived. 0: nothing is learnt; the kernel's own first
    /// timeout.
    pub repath_jiffies: u16,
    /// TCP_SYNCNT that determines when connect() gives up; 0: the socket's own. See
    /// [`policy_flags::GIVES_UP_BY_TIMER`].
    pub syn_retries: u32,
    /// Initial RTO of the SYN-ACK, jiffies. The index is the number of retransmissions before the kernel drops the
    /// request (`net.ipv4.tcp_synack_retries`, or the listener's TCP_SYNCNT); the last element is for all higher
    /// numbers.
    pub syn_ack_rto_jiffies: [u32; SYN_ACK_RETRIES_LEN],
    /// UTF-8, padded with NUL; all NUL means a free slot.
    pub name: [u8; POLICY_NAME_LEN],
}

/// A slot of `POLICIES`, with two copies of its policy.
///
/// Invariant: a program that runs while the daemon writes the slot reads one whole policy, either the old or the new
/// one. The kernel copies an array element, which is not atomic (`array_map_update_elem()`, Linux 6.12). Therefore the
/// daemon first writes the inactive copy, and then only [`PolicySlot::active`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PolicySlot {
    /// Index of the active copy, 0 or 1.
    pub active: u32,
    /// Keeps the size a multiple of 8.
    pub reserved: u32,
    /// The two copies.
    pub copies: [Policy; 2],
}

impl PolicySlot {
    /// The active policy.
    #[must_use]
    pub const fn policy(&self) -> &Policy {
        &self.copies[(self.active & 1) as usize]
    }

    /// The two values that the daemon writes, in this order: the slot with `policy` in its inactive copy, and the same
    /// slot with that copy active.
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

/// Defaults of the daemon's network namespace, used if the program cannot read the defaults of the socket's own
/// namespace.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostDefaults {
    /// `net.ipv4.tcp_syn_retries`.
    pub syn_retries: u32,
    /// `net.ipv4.tcp_syn_linear_timeouts`; 0 before Linux 6.5.
    pub syn_linear_timeouts: u32,
    /// The assumed number of SYN-ACK retransmissions: `net.ipv4.tcp_synack_retries`, but at most 5, the kernel's
    /// default, which is what a new network namespace starts with. From Linux 6.2 the program reads it from the
    /// request's listener.
    pub syn_ack_retries: u32,
}

/// Bits of [`Policy::flags`].
pub mod policy_flags {
    /// The policy sets TCP_THIN_LINEAR_TIMEOUTS.
    pub const THIN_LINEAR_SET: u32 = 1 << 0;
    /// The value to which the policy sets TCP_THIN_LINEAR_TIMEOUTS.
    pub const THIN_LINEAR: u32 = 1 << 1;
    /// The policy also applies to MPTCP sockets: their SYNs get its initial RTO and rto_max.
    pub const MPTCP: u32 = 1 << 2;
    /// connect() gives up when the kernel would with the connection's own initial RTO. Without this flag, it gives up
    /// when the kernel would with an initial RTO of 1 s.
    pub const GIVES_UP_BY_TIMER: u32 = 1 << 3;
    /// The slot has a policy. A slot without this flag is free, and an entry that still points to it has no effect.
    pub const IN_USE: u32 = 1 << 4;
    /// Connections have storage from the start: the policy sets an option later in a connection's life, or an option
    /// whose former value the program cannot recognise and so must remember.
    pub const STORED: u32 = 1 << 5;
    /// [`super::Policy::epochs`] are set.
    pub const GUARDED: u32 = 1 << 10;
    /// For [`crate::UNMATCHED`]: peers are noted in [`crate::maps::DISCOVERED`].
    pub const DISCOVERS: u32 = 1 << 11;
    /// The program is about to be unloaded: new connections keep the kernel's own timers, and those that have the
    /// policy's keep it until they are established or have failed.
    pub const DRAINING: u32 = 1 << 13;
    /// Flags that cause extra work when a connection is established. One test of this mask suffices for most
    /// connections.
    pub const AT_ESTABLISHED: u32 = GUARDED | DISCOVERS;
}

/// Elements of `LASTING`: options that the program may have set on connections without storage.
pub mod lasting {
    use crate::SockOpt;

    /// The bit of an option with [`crate::also::RECOGNISED`].
    #[inline(always)]
    #[must_use]
    pub const fn bit(option: SockOpt) -> u32 {
        1 << option as u32
    }

    /// Length of `LASTING`: both options take up to 200 ms, in whole jiffies of at least 1 ms.
    pub const LEN: u32 = 256;

    /// The index of a value in microseconds. Values outside the options' range share the last index.
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
        rto_min_us: 0,
        delack_max_us: 0,
        rto_max_ms: 0,
        user_timeout_ms: 0,
        linear_retries: 0,
        restart_hz: 0,
        repath_jiffies: 0,
        syn_retries: 0,
        syn_ack_rto_jiffies: [0; SYN_ACK_RETRIES_LEN],
        name: [0; POLICY_NAME_LEN],
    };

    /// The bits of [`features`] that a program needs for this policy.
    #[must_use]
    pub const fn features(&self) -> u8 {
        if self.restart_hz == 0 {
            0
        } else {
            features::RTO_RESTART
        }
    }

    /// What remains of a policy while the program drains: enough for the connections that have its initial RTO, and
    /// nothing for new ones.
    #[must_use]
    pub const fn draining(&self) -> Self {
        const KEPT: u32 =
            policy_flags::IN_USE | policy_flags::MPTCP | policy_flags::GIVES_UP_BY_TIMER;
        Self {
            flags: self.flags & KEPT | policy_flags::DRAINING,
            generation: self.generation,
            initial_rto_jiffies: self.initial_rto_jiffies,
            initial_rto_us: self.initial_rto_us,
            control_below: self.control_below,
            control_seed: self.control_seed,
            syn_retries: self.syn_retries,
            name: self.name,
            ..Self::EMPTY
        }
    }

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

    /// The slot as a program sees it in the middle of the kernel's copy: the first words are new, the others old.
    fn torn(from: &PolicySlot, to: &PolicySlot, words: usize) -> PolicySlot {
        type Words = [u64; size_of::<PolicySlot>() / size_of::<u64>()];
        // SAFETY: repr(C) of integers and bytes only, without padding (asserted), so both types are the same bytes.
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
        const ALL: [u32; 9] = [
            THIN_LINEAR_SET,
            THIN_LINEAR,
            MPTCP,
            GIVES_UP_BY_TIMER,
            IN_USE,
            STORED,
            GUARDED,
            DISCOVERS,
            DRAINING,
        ];
        let mut seen = 0;
        for bit in ALL {
            assert_eq!((bit.count_ones(), seen & bit), (1, 0));
            seen |= bit;
        }
        for bit in [GUARDED, DISCOVERS] {
            assert_ne!(AT_ESTABLISHED & bit, 0);
        }
        assert_eq!(AT_ESTABLISHED.count_ones(), 2);
    }

    /// The program decides by its value whether an option of a socket without storage must be restored, so no two
    /// values may share an index.
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
    fn policy_needs_features_of_its_settings() {
        assert_eq!(Policy::EMPTY.features(), 0);
        let restarts = Policy {
            restart_hz: 250,
            ..Policy::EMPTY
        };
        assert_eq!(restarts.features(), features::RTO_RESTART);
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
            syn_retries: n.into(),
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
