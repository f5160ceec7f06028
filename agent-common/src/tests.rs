//! Tests of the items in the crate's root.

use super::*;

#[test]
fn statistics_add_up_word_by_word() {
    let mut a = Statistics::default();
    a.counters.attempts = 1;
    a.counters.rtos[7] = 2;
    a.counters.setsockopt_failures[SockOpt::CbFlags as usize] = 3;
    a.path_rtt.buckets[5] = 4;
    let mut b = a;
    b.counters.aborted = 5;
    b.srtt.sum_us = 6;
    let sum = a.plus(&b);
    assert_eq!(sum.counters.attempts, 2);
    assert_eq!(sum.counters.rtos, [0, 0, 0, 0, 0, 0, 0, 4]);
    assert_eq!(
        sum.counters.setsockopt_failures[SockOpt::CbFlags as usize],
        6
    );
    assert_eq!((sum.counters.aborted, sum.counters.expired), (5, 0));
    assert_eq!((sum.path_rtt.buckets[5], sum.srtt.sum_us), (8, 6));
}

#[test]
fn fast_counters_are_a_part_of_all_counters() {
    let mut fast = FastStatistics {
        counters: Counters::default(),
        path_rtt: Histogram::default(),
    };
    fast.counters.attempts = 1;
    fast.path_rtt.sum_us = 2;
    let all = Statistics::from(fast);
    assert_eq!((all.counters, all.path_rtt), (fast.counters, fast.path_rtt));
    assert_eq!(all.srtt, Histogram::default());
}

/// One connection without a loss, and one with a loss: its connect time is 1 s, its path RTT 100 us.
#[test]
fn connect_times_are_path_rtts_but_for_connections_with_losses() {
    use histogram::bucket_of;
    let mut counted = Statistics::default();
    let (clean_us, path_us, connect_us) = (200, 100, 1_000_000);
    counted.path_rtt.buckets[bucket_of(clean_us)] += 1;
    counted.path_rtt.sum_us += clean_us;
    counted.lossy.buckets[bucket_of(connect_us)] += 1;
    counted.lossy.sum_us += connect_us;
    let mut expected = Histogram {
        sum_us: clean_us + connect_us,
        ..Histogram::default()
    };
    expected.buckets[bucket_of(clean_us)] = 1;
    expected.buckets[bucket_of(connect_us)] = 1;
    assert_eq!(counted.connect_times(), expected);
    // The path RTT becomes known. For another connection, the subtraction is read before the addition.
    counted.path_rtt.buckets[bucket_of(path_us)] += 1;
    counted.path_rtt.sum_us += path_us;
    for us in [path_us, path_us * 10] {
        let bucket = &mut counted.lossy.buckets[bucket_of(us)];
        *bucket = bucket.wrapping_sub(1);
    }
    counted.lossy.sum_us = counted.lossy.sum_us.wrapping_sub(path_us);
    assert_eq!(counted.connect_times(), expected);
    counted.counters.untimed = 3;
    assert_eq!(counted.connections(), 5);
}

#[test]
fn two_whole_configurations_have_slots() {
    assert_eq!((FIRST_SLOT..SLOTS).len(), 2 * MAX_POLICIES as usize);
}

/// Counting stops before the number overflows, even if every CPU counts the last hit at the same moment.
#[test]
fn hits_have_room_beyond_their_most() {
    let processors = u16::MAX.into();
    assert_eq!(EntryValue::HITS_MAX.checked_add(processors), Some(u32::MAX));
}

#[test]
fn entry_ends_at_its_time_or_within_a_unit() {
    const UNIT_NS: u64 = 1 << EntryValue::END_SHIFT;
    for (slot, ms) in [(FIRST_SLOT, 1), (SLOTS - 1, 366 * 86_400_000)] {
        let entry = EntryValue::new(slot, EntryValue::end_at(ms));
        assert_eq!(entry.slot(), slot);
        let end_ns = ms * 1_000_000;
        assert!(!entry.is_over(|| end_ns - 1));
        assert!(entry.is_over(|| end_ns + UNIT_NS));
    }
    assert_eq!(EntryValue::end_at(u64::MAX), 0);
    assert!(!EntryValue::new(SLOTS - 1, 0).is_over(|| unreachable!("it has no end")));
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
