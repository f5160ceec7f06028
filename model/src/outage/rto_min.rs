//! How late data is after an outage with a shorter `rto_min`. No program can shape its intervals.

use std::ops::Range;

use super::{Comparison, compare_by, phases};
use crate::retransmit::LinuxTimers;

/// The smoothed RTT of a near peer, microseconds.
const SRTT_US: u64 = 200;
/// Outages for which an `rto_min` is judged, milliseconds. In longer ones the kernel's own doubling costs more.
pub const DATA_OUTAGES_MS: Range<u64> = 100..6_000;
/// A smaller delay of data does not count as late, milliseconds. Timers of two seconds and more are rounded to 256 ms
/// at HZ 250, also the kernel's, so that a quarter of a second is chance.
const DATA_LATE_MS: u64 = 300;

/// Compares an `rto_min` (jiffies) with the kernel's 200 ms: data is lost in outages of 0.1 to 6 s, on a connection to
/// a near peer with one segment at a time. Data is late if it arrives later by more than max(0.3 s, 5 % of the outage).
pub fn compare_rto_min(hz: u64, rto_min: u64) -> Comparison {
    let [from, to] = [DATA_OUTAGES_MS.start, DATA_OUTAGES_MS.end].map(|ms| ms * hz / 1_000);
    let kernel = LinuxTimers::near(hz, SRTT_US);
    let other = kernel.with_rto_min(rto_min * 1_000_000 / hz);
    let times = |timers: LinuxTimers, begin| {
        // One time more than the longest outage needs.
        let mut is_over = false;
        let times = timers.times(begin);
        let needed = times.take_while(|time| !std::mem::replace(&mut is_over, *time >= to));
        needed.collect()
    };
    let pairs: Vec<_> = phases()
        .map(|begin| (times(kernel, begin), times(other, begin)))
        .collect();
    compare_by(&pairs, from..to, hz, DATA_LATE_MS)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of 60 outages of 0.1 to 6 s, none was late with 48 and 100 ms, 40 with 12, 28 and 60 ms, and 46 with 24 and 52
    /// ms.
    #[test]
    fn late_shares_match_a_sweep() {
        for (rto_min_ms, late) in [
            (48, 0.0),
            (100, 0.0),
            (12, 0.67),
            (28, 0.67),
            (60, 0.67),
            (24, 0.77),
            (52, 0.77),
            (20, 0.03),
        ] {
            let compared = compare_rto_min(250, rto_min_ms / 4);
            assert!(
                (compared.late - late).abs() < 0.15,
                "{rto_min_ms}: {compared:?}"
            );
        }
    }

    /// The table of `docs/operate/tuning.md`.
    #[test]
    fn table_in_docs_is_current() {
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/operate/tuning.md");
        let page = std::fs::read_to_string(page).unwrap();
        for (rto_min_ms, hz) in [
            (48_u64, 250_u64),
            (100, 250),
            (100, 300),
            (24, 1000),
            (100, 1000),
        ] {
            let jiffies = (rto_min_ms * hz).div_ceil(1_000);
            let Comparison {
                mean_ms,
                late,
                worst,
                ..
            } = compare_rto_min(hz, jiffies);
            let row = format!(
                "| `{rto_min_ms}ms` | {hz} | {mean_ms:+.0} ms | {:.1} % | {} ms |",
                late * 100.0,
                worst.later_ms,
            );
            assert!(page.contains(&row), "{row}");
        }
    }
}
