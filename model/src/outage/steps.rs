//! Finds the values that are in step with the kernel's timers.

use std::{
    collections::BTreeMap,
    ops::Range,
    sync::{Arc, Mutex, PoisonError},
};

use super::{Comparison, Host, IN_STEP_LATE, Timers, compare_by, phases};
use crate::retransmit::LinuxTimers;

/// Number of retransmissions; it only matters for outages of minutes.
const SYN_RETRIES: u8 = 6;
/// The smoothed RTT of a near peer, microseconds.
const SRTT_US: u64 = 200;
/// Outages for which an `rto_min` is judged, milliseconds. In longer ones the kernel's own doubling costs more.
pub const DATA_OUTAGES_MS: Range<u64> = 100..6_000;
/// A smaller delay of data does not count as late, milliseconds. Timers of two seconds and more are rounded to 256 ms
/// at HZ 250, also the kernel's, so that a quarter of a second is chance.
const DATA_LATE_MS: u64 = 300;

/// Tables by HZ and linear phase; those without a linear phase are for `rto_min`.
type Tables = BTreeMap<(u64, Option<u8>), Arc<[u64]>>;

static TABLES: Mutex<Tables> = Mutex::new(BTreeMap::new());

/// The initial RTOs below one second that are in step with [`Timers::Capped`], jiffies, ascending. Computed once for
/// each HZ and linear phase, which takes a few milliseconds at HZ 250 and some ten at HZ 1000.
pub fn in_step(hz: u64, linear_timeouts: u8) -> Arc<[u64]> {
    let host = Host {
        hz,
        linear_timeouts,
        syn_retries: SYN_RETRIES,
    };
    table(hz, Some(linear_timeouts), || {
        (1..hz)
            .filter(|rto| host.is_in_step(Timers::Capped(*rto)))
            .collect()
    })
}

impl Host {
    /// [`in_step`] for this host.
    pub fn in_step(&self) -> Arc<[u64]> {
        in_step(self.hz, self.linear_timeouts)
    }
}

/// The values of `rto_min` below the kernel's 200 ms with which data is late in few outages of 0.1 to 6 s, jiffies,
/// ascending.
pub fn rto_min_in_step(hz: u64) -> Arc<[u64]> {
    table(hz, None, || {
        let values = 2..(hz / 5);
        values
            .filter(|rto_min| compare_rto_min(hz, *rto_min).late < IN_STEP_LATE)
            .collect()
    })
}

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

fn table(hz: u64, linear_timeouts: Option<u8>, values: impl FnOnce() -> Vec<u64>) -> Arc<[u64]> {
    let mut tables = TABLES.lock().unwrap_or_else(PoisonError::into_inner);
    let table = tables
        .entry((hz, linear_timeouts))
        .or_insert_with(|| values().into());
    Arc::clone(table)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::outage::nearest;

    const fn host(hz: u64) -> Host {
        Host {
            hz,
            linear_timeouts: 4,
            syn_retries: 6,
        }
    }

    fn ms(jiffies: &[u64], hz: u64) -> Vec<u64> {
        jiffies.iter().map(|jiffies| jiffies * 1_000 / hz).collect()
    }

    #[test]
    fn syn_values_in_step_are_those_of_sweeps() {
        let in_step = ms(&host(250).in_step(), 250);
        for value in [16, 28, 32, 56, 60, 100, 112, 180, 200, 264, 280, 300, 600] {
            assert!(in_step.contains(&value), "{value}: {in_step:?}");
        }
        for value in [12, 20, 40, 64, 80, 120, 128, 208, 332] {
            assert!(!in_step.contains(&value), "{value}: {in_step:?}");
        }
        let near = |value| nearest(&in_step, value);
        assert_eq!(near(40), (Some(32), Some(56)));
        assert_eq!(near(100), (Some(60), Some(112)));
        assert_eq!((near(1).0, near(999).1), (None, None));
    }

    /// Of 60 outages of 0.1 to 6 s, none is late with 48 and 100 ms, 40 with 12, 28 and 60 ms, and 46 with 24 and 52
    /// ms.
    #[test]
    fn rto_min_in_step_is_that_of_sweeps() {
        let in_step = ms(&rto_min_in_step(250), 250);
        assert_eq!(in_step, [48, 96, 100, 196]);
        for (value, late) in [
            (12, 0.67),
            (28, 0.67),
            (60, 0.67),
            (24, 0.77),
            (52, 0.77),
            (20, 0.03),
        ] {
            let compared = compare_rto_min(250, value / 4);
            assert!((compared.late - late).abs() < 0.15, "{value}: {compared:?}");
        }
        assert!(rto_min_in_step(1_000).contains(&100));
        assert!(rto_min_in_step(0).is_empty() && host(0).in_step().is_empty());
    }
}
