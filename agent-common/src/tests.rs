//! Tests of what lies in the crate's root.

use super::*;

#[test]
fn statistics_add_up_word_by_word() {
    let mut a = Statistics::default();
    a.counters.connections = 1;
    a.counters.rtos[7] = 2;
    a.counters.setsockopt_failures[SockOpt::CbFlags as usize] = 3;
    a.handshake.buckets[5] = 4;
    let mut b = a;
    b.counters.aborted = 5;
    b.srtt.sum_us = 6;
    let sum = a.plus(&b);
    assert_eq!(sum.counters.connections, 2);
    assert_eq!(sum.counters.rtos, [0, 0, 0, 0, 0, 0, 0, 4]);
    assert_eq!(sum.counters.setsockopt_failures[6], 6);
    assert_eq!((sum.counters.aborted, sum.counters.expired), (5, 0));
    assert_eq!((sum.handshake.buckets[5], sum.srtt.sum_us), (8, 6));
}

#[test]
fn what_is_counted_fast_is_a_part_of_all_that_is_counted() {
    let mut fast = FastStatistics {
        counters: Counters::default(),
        handshake: Histogram::default(),
    };
    fast.counters.connections = 1;
    fast.handshake.sum_us = 2;
    let all = Statistics::from(fast);
    assert_eq!(
        (all.counters, all.handshake),
        (fast.counters, fast.handshake)
    );
    assert_eq!((all.srtt, all.ack_excess), Default::default());
}

#[test]
fn two_whole_configurations_have_slots() {
    assert_eq!((FIRST_SLOT..SLOTS).len(), 2 * MAX_POLICIES as usize);
}

/// Counting ends before the number does, however many processors count the last hit at once.
#[test]
fn hits_have_room_beyond_their_most() {
    let processors = u16::MAX.into();
    assert_eq!(EntryValue::HITS_MAX.checked_add(processors), Some(u32::MAX));
}

#[test]
fn a_bit_has_one_meaning() {
    use statistics::{ON, PROCESS, RTT_AT_END, UNMATCHED};
    let mut seen = 0;
    for bit in [ON, UNMATCHED, RTT_AT_END, PROCESS] {
        assert_eq!((bit.count_ones(), seen & bit), (1, 0));
        seen |= bit;
    }
}

#[test]
fn every_arm_and_direction_has_a_key_of_its_own() {
    let mut seen = [false; 1 << (UNKNOWN_SHIFT + 2)];
    for slot in 0..SLOTS {
        for arm in arm::of(slot) {
            for direction in direction::ALL {
                let key = statistics_key(arm, direction);
                assert!(!seen[key as usize], "{arm} {direction}");
                seen[key as usize] = true;
                let is_fast = slot < FAST_SLOTS && direction != direction::UNKNOWN;
                assert_eq!(key < FAST_COUNTERS, is_fast, "{arm} {direction}");
            }
        }
    }
    assert_eq!(
        statistics_key(arm::treated(NO_POLICY), direction::ACTIVE),
        0
    );
}
