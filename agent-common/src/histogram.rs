//! Log-linear histograms of times: four buckets per power of two, from 16 us to 67 s.

/// Buckets: one below, [`SUB`] for each power of two from 2^[`FIRST`] to 2^[`LAST`] us, one above.
pub const BUCKETS: usize = 2 + SUB * (LAST - FIRST);
/// Buckets per power of two: the relative width of a bucket is at most a quarter.
pub const SUB: usize = 4;
/// 2^4 us = 16 us is the lower end of the first full bucket.
pub const FIRST: usize = 4;
/// 2^26 us = 67.1 s is the upper end of the last full bucket.
pub const LAST: usize = 26;

/// A histogram of times; one per policy, direction and CPU.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Histogram {
    /// Sum of all times, microseconds.
    pub sum_us: u64,
    /// Number of times in each bucket ([`bucket_of`]).
    pub buckets: [u64; BUCKETS],
}

impl Default for Histogram {
    fn default() -> Self {
        Self {
            sum_us: 0,
            buckets: [0; BUCKETS],
        }
    }
}

/// The bucket that a time in microseconds belongs to.
#[inline(always)]
#[must_use]
#[expect(
    clippy::cast_possible_truncation,
    reason = "below 2^26, of which two bits are kept"
)]
pub const fn bucket_of(us: u64) -> usize {
    if us < 1 << FIRST {
        return 0;
    }
    if us >= 1 << LAST {
        return BUCKETS - 1;
    }
    let power = log2(us as u32);
    // The two bits after the leading one.
    let sub = (us >> (power - 2)) as usize & (SUB - 1);
    1 + (power - FIRST) * SUB + sub
}

/// The position of the leading 1 bit. BPF has no instruction for it, and the compiler's code for `ilog2` takes four
/// times as long.
#[inline(always)]
const fn log2(n: u32) -> usize {
    let (mut rest, mut power) = (n, 0);
    if rest >= 1 << 16 {
        (rest, power) = (rest >> 16, 16);
    }
    if rest >= 1 << 8 {
        (rest, power) = (rest >> 8, power + 8);
    }
    if rest >= 1 << 4 {
        (rest, power) = (rest >> 4, power + 4);
    }
    if rest >= 1 << 2 {
        (rest, power) = (rest >> 2, power + 2);
    }
    power + (rest >> 1) as usize
}

/// As [`bucket_of`], for a time below [`SHORT_US`]: the index in [`SHORT`], and the number of buckets to add to its
/// element. Every connection pays for this: BPF has no instruction for the leading 1 bit, and a search takes three
/// times as many instructions.
#[inline(always)]
#[must_use]
pub const fn short(us: u32) -> (usize, usize) {
    if us < SHORT_US >> PERIOD {
        ((us >> 2) as usize, 0)
    } else {
        ((us >> (2 + PERIOD)) as usize, SUB * PERIOD as usize)
    }
}

/// Number of powers of two that [`SHORT`] covers.
const PERIOD: u32 = 5;
/// 2^14 us = 16.4 ms.
pub const SHORT_US: u32 = 1 << (FIRST + 2 * PERIOD as usize);

/// The buckets of the first 512 us, 4 us each.
#[expect(clippy::cast_possible_truncation, reason = "below 32")]
pub static SHORT: [u8; (SHORT_US >> PERIOD >> 2) as usize] = {
    let mut buckets = [0; _];
    let mut index = 0;
    while index < buckets.len() {
        buckets[index] = bucket_of(index as u64 * 4) as u8;
        index += 1;
    }
    buckets
};

/// The exclusive upper end of a bucket, microseconds; `None` for the last bucket.
#[must_use]
pub const fn bucket_end_us(bucket: usize) -> Option<u64> {
    if bucket + 1 >= BUCKETS {
        return None;
    }
    let (power, sub) = (FIRST + bucket / SUB, bucket % SUB);
    Some(((SUB + sub) as u64) << (power - 2))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_time_lies_below_the_end_of_its_bucket_and_not_below_that_of_the_one_before() {
        let near = |n: u64| [n.saturating_sub(1), n, n + 1];
        let powers = (0..40).flat_map(|p| near(1 << p));
        let between = (0..40).flat_map(|p| near(5 << p));
        for us in powers.chain(between).chain(0..5000).chain([u64::MAX]) {
            let bucket = bucket_of(us);
            if us < SHORT_US.into() {
                let (index, further_up) = short(u32::try_from(us).unwrap());
                assert_eq!(usize::from(SHORT[index]) + further_up, bucket);
            }
            if let Some(end) = bucket_end_us(bucket) {
                assert!(us < end, "{us} in {bucket}, which ends at {end}");
            }
            if let Some(before) = bucket.checked_sub(1) {
                let begin = bucket_end_us(before).unwrap();
                assert!(us >= begin, "{us} in {bucket}, which begins at {begin}");
            }
        }
    }

    #[test]
    fn buckets_are_at_most_a_quarter_wide() {
        assert_eq!(BUCKETS, 90);
        assert_eq!(bucket_end_us(0), Some(16));
        assert_eq!(bucket_end_us(1), Some(20));
        assert_eq!(bucket_end_us(4), Some(32));
        assert_eq!(bucket_end_us(BUCKETS - 2), Some(1 << 26));
        assert_eq!(bucket_end_us(BUCKETS - 1), None);
        for bucket in 1..BUCKETS - 1 {
            let (begin, end) = (bucket_end_us(bucket - 1), bucket_end_us(bucket));
            let (begin, end) = (begin.unwrap(), end.unwrap());
            assert!(begin < end && (end - begin) * 4 <= begin);
        }
    }
}
