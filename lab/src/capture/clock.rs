//! Detects the resolution of the clocks that made a capture's times.
//!
//! A file states the unit of its times, not how often its clock ticked. Two signs reveal a coarser clock: digits that
//! are always zero, and packets with equal times. A host answers a SYN-ACK within microseconds, so a clock that ticks
//! once a millisecond gives both the same time, which a fine clock hardly ever does.

use std::collections::BTreeMap;

use super::{Times, file::Frame};

/// Smaller steps back are not reported: the kernel's queues are not read in the order of the times.
const BACK_NS: u64 = 1_000_000;
/// With fewer packets the unit of the file is used, as they do not show the clock's resolution.
const FEW: u64 = 10;
/// Interfaces with their own clock; all others share the last one.
const INTERFACES: u32 = 256;
/// Powers of ten up to a second, nanoseconds.
const POWERS: usize = 10;

/// The clocks of a capture's interfaces.
#[derive(Debug, Default)]
pub(super) struct Clocks {
    each: BTreeMap<u32, Clock>,
    earliest_ns: Option<i64>,
    latest_ns: Option<i64>,
    last_ns: Option<i64>,
    /// How often a clock went back, and the largest step. Out-of-order packets of two interfaces look the same.
    back: u64,
    back_ns: u64,
}

#[derive(Debug)]
struct Clock {
    packets: u64,
    unit_ns: u64,
    last_ns: i64,
    /// Packets with the same time as the previous one.
    equal: u64,
    /// Gaps between packets, by powers of two: the number and the longest.
    gaps: [(u64, u64); 64],
    /// Times that are multiples of each power of ten.
    multiples: [u64; POWERS],
}

impl Clocks {
    /// Records the time of a packet, and returns how often a clock has gone back so far; `None` if the packet has no
    /// time.
    pub(super) fn take(&mut self, frame: &Frame<'_>) -> Option<u64> {
        let time_ns = frame.time_ns?;
        self.earliest_ns = Some(self.earliest_ns.map_or(time_ns, |ns| ns.min(time_ns)));
        self.latest_ns = Some(self.latest_ns.map_or(time_ns, |ns| ns.max(time_ns)));
        let clock = self
            .each
            .entry(frame.interface.min(INTERFACES - 1))
            .or_insert_with(|| Clock::new(time_ns));
        clock.take(time_ns, frame.unit_ns);
        let last_ns = self.last_ns.replace(time_ns).unwrap_or(time_ns);
        if time_ns < last_ns && last_ns.abs_diff(time_ns) >= BACK_NS {
            self.back += 1;
            self.back_ns = self.back_ns.max(last_ns.abs_diff(time_ns));
        }
        Some(self.back)
    }

    /// The earliest time, since the epoch.
    pub(super) const fn earliest_ns(&self) -> Option<i64> {
        self.earliest_ns
    }

    pub(super) fn times(&self) -> Times {
        let resolutions = self.each.values().map(Clock::resolution_ns);
        Times {
            began_us: self.earliest_ns.map(|ns| ns.div_euclid(1000)),
            ended_us: self.latest_ns.map(|ns| ns.div_euclid(1000)),
            resolution_us: resolutions.max().unwrap_or(0).div_ceil(1000),
            back: self.back,
            back_us: self.back_ns.div_ceil(1000),
        }
    }
}

impl Clock {
    const fn new(first_ns: i64) -> Self {
        Self {
            packets: 0,
            unit_ns: 0,
            last_ns: first_ns,
            equal: 0,
            gaps: [(0, 0); 64],
            multiples: [0; POWERS],
        }
    }

    fn take(&mut self, time_ns: i64, unit_ns: u64) {
        let gap_ns = time_ns.abs_diff(self.last_ns);
        self.last_ns = time_ns;
        self.unit_ns = self.unit_ns.max(unit_ns);
        if self.packets > 0 {
            match gap_ns.checked_ilog2() {
                None => self.equal += 1,
                Some(power) => {
                    if let Some((count, longest)) = self.gaps.get_mut(power as usize) {
                        *count += 1;
                        *longest = gap_ns.max(*longest);
                    }
                }
            }
        }
        self.packets += 1;
        let mut power = 1;
        for count in &mut self.multiples {
            if time_ns % power != 0 {
                break;
            }
            *count += 1;
            power *= 10;
        }
    }

    /// The resolution of the times; `u64::MAX` if all are equal.
    fn resolution_ns(&self) -> u64 {
        if self.packets < FEW {
            return self.unit_ns;
        }
        // A few packets may have another clock (a merged file), so 5 % may differ.
        let zeros = self
            .multiples
            .iter()
            .rposition(|count| *count * 20 >= self.packets * 19);
        let written = zeros.map_or(1, |zeros| 10u64.pow(u32::try_from(zeros).unwrap_or(0)));
        let ticks = if self.equal * 10 >= self.packets {
            self.short_gap_ns().unwrap_or(u64::MAX)
        } else {
            0
        };
        self.unit_ns.max(written).max(ticks)
    }

    /// The 10th percentile of the gaps, rounded up to the longest gap within its power of two.
    fn short_gap_ns(&self) -> Option<u64> {
        let all: u64 = self.gaps.iter().map(|(count, _)| count).sum();
        let mut shorter = 0;
        let found = self.gaps.iter().find(|(count, _)| {
            shorter += count;
            shorter > all / 10
        });
        found.map(|(_, longest)| *longest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(time_ns: i64, unit_ns: u64) -> Frame<'static> {
        Frame {
            time_ns: Some(time_ns),
            unit_ns,
            outgoing: None,
            link: 1,
            interface: 0,
            length: 0,
            data: &[],
        }
    }

    /// The resolution that these times show, microseconds.
    fn resolution_us(unit_ns: u64, times_ns: impl IntoIterator<Item = i64>) -> u64 {
        let mut clocks = Clocks::default();
        for time_ns in times_ns {
            clocks.take(&frame(time_ns, unit_ns));
        }
        clocks.times().resolution_us
    }

    /// Handshakes of 30.217 ms, each ACK 23 us after the SYN-ACK, at irregular times.
    fn handshakes() -> impl Iterator<Item = i64> {
        (0..500).flat_map(|n| {
            let at = 1_700_000_000_000_000_000 + n * 187_654_321;
            [at, at + 30_217_000, at + 30_240_000]
        })
    }

    #[test]
    fn resolution_is_that_of_the_file_with_a_fine_clock() {
        assert_eq!(resolution_us(1, handshakes()), 1);
        assert_eq!(
            resolution_us(1000, handshakes().map(|ns| ns / 1000 * 1000)),
            1
        );
        assert_eq!(resolution_us(976_562, handshakes()), 977);
        assert_eq!(resolution_us(1_000_000_000, [0; 3]), 1_000_000);
    }

    #[test]
    fn coarse_clock_is_detected_in_finer_units() {
        for tick_ns in [1_000_000, 4_000_000, 10_000_000, 15_625_000, 1_000_000_000] {
            let coarse = || handshakes().map(move |ns| ns / tick_ns * tick_ns);
            let least = tick_ns.unsigned_abs() / 1000;
            let found = resolution_us(1000, coarse());
            // No gap in it is shorter than a handshake.
            let most = 2 * least.max(32_000);
            assert!((least..=most).contains(&found), "{tick_ns}: {found}");
            // Ticks that are not round numbers, and a few packets from a finer clock.
            let odd = coarse().map(|ns| ns + 123_456);
            let some = handshakes().take(6).chain(odd);
            let found = resolution_us(1000, some);
            assert!(found >= least, "{tick_ns}: {found}");
        }
        assert_eq!(resolution_us(1000, [7; 20]), u64::MAX.div_ceil(1000));
    }

    #[test]
    fn clock_that_goes_back_is_counted() {
        let mut clocks = Clocks::default();
        // A step of 10 us is caused by queues; one of 5 s is not.
        let times = [0, 20_000, 10_000, 6_000_000_000, 1_000_000_000, -1_000];
        let turns = times.map(|ns| clocks.take(&frame(ns, 1000)));
        assert_eq!(turns, [0, 0, 0, 0, 1, 2].map(Some));
        let times = clocks.times();
        assert_eq!((times.back, times.back_us), (2, 5_000_000));
        assert_eq!(
            (times.began_us, times.ended_us),
            (Some(-1), Some(6_000_000))
        );
    }
}
