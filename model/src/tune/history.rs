//! Keeps the path RTTs of the last hours, by hour, and of the last connections.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use super::quantile::bounded_quantile_us;
use crate::distribution::Distribution;

/// An hour, milliseconds.
pub const HOUR_MS: u64 = 3_600_000;
/// How long an hour is remembered, and how long a value is kept without samples, milliseconds.
pub const MEMORY_MS: u64 = 24 * HOUR_MS;
/// The last connections include at least this many, if [`RECENT_MS`] had as many.
pub const RECENT_COUNT: u64 = 300;
/// Maximum age of the last connections, milliseconds.
pub const RECENT_MS: u64 = 600_000;

/// Path RTTs of one hour.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Hour {
    /// Number of the hour on the caller's clock.
    number: u64,
    times: Distribution,
    /// The quantile bound ([`bounded_quantile_us`]); known once the hour is over.
    bounded_us: Option<u64>,
}

/// The samples between two steps.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Part {
    at_ms: u64,
    times: Distribution,
}

/// Path RTTs of the last hours and of the last connections.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct History {
    /// The last hour is open.
    hours: VecDeque<Hour>,
    /// Sum of the hours.
    all: Distribution,
    recent: VecDeque<Part>,
    /// Sum of the recent parts.
    recent_all: Distribution,
}

impl History {
    /// Adds the samples since the last step. Times are milliseconds of a clock that never goes
    /// back; samples older than [`MEMORY_MS`] are dropped. `share` is used for [`History::hours_us`].
    pub fn add(&mut self, now_ms: u64, times: &Distribution, share: f64) {
        self.turn(now_ms / HOUR_MS, share);
        self.forget(now_ms);
        if times.count() == 0 {
            return;
        }
        self.all.extend(times);
        if let Some(open) = self.hours.back_mut() {
            open.times.extend(times);
        }
        self.recent_all.extend(times);
        self.recent.push_back(Part {
            at_ms: now_ms,
            times: times.clone(),
        });
        while self
            .recent
            .front()
            .is_some_and(|oldest| self.recent_all.count() - oldest.times.count() >= RECENT_COUNT)
        {
            self.forget_oldest();
        }
    }

    /// Recomputes the closed hours for a different share.
    pub fn rebound(&mut self, share: f64) {
        let closed = self.hours.len().saturating_sub(1);
        for hour in self.hours.iter_mut().take(closed) {
            hour.bounded_us = bounded_quantile_us(&hour.times, share);
        }
    }

    /// The largest quantile bound of the closed hours (at 95 %, [`bounded_quantile_us`]),
    /// microseconds; `None` if no hour had enough samples.
    pub fn hours_us(&self) -> Option<u64> {
        self.hours.iter().filter_map(|hour| hour.bounded_us).max()
    }

    /// All remembered samples.
    pub const fn all(&self) -> &Distribution {
        &self.all
    }

    /// The last [`RECENT_COUNT`] samples or slightly more; fewer if [`RECENT_MS`] had fewer.
    pub const fn recent(&self) -> &Distribution {
        &self.recent_all
    }

    /// Closes the hour that is over.
    fn turn(&mut self, number: u64, share: f64) {
        match self.hours.back_mut() {
            Some(open) if open.number >= number => return,
            Some(open) => open.bounded_us = bounded_quantile_us(&open.times, share),
            None => {}
        }
        self.hours.push_back(Hour {
            number,
            ..Hour::default()
        });
    }

    fn forget(&mut self, now_ms: u64) {
        let is_old = |hour: &Hour| (hour.number + 1) * HOUR_MS + MEMORY_MS <= now_ms;
        while self.hours.len() > 1 && self.hours.front().is_some_and(is_old) {
            if let Some(hour) = self.hours.pop_front() {
                self.all.remove(&hour.times);
            }
        }
        let is_old = |part: &Part| part.at_ms + RECENT_MS <= now_ms;
        while self.recent.front().is_some_and(is_old) {
            self.forget_oldest();
        }
    }

    fn forget_oldest(&mut self) {
        if let Some(oldest) = self.recent.pop_front() {
            self.recent_all.remove(&oldest.times);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times(us: u64, count: u64) -> Distribution {
        let mut times = Distribution::default();
        times.add(us, count);
        times
    }

    fn add(history: &mut History, at_ms: u64, us: u64, count: u64) {
        history.add(at_ms, &times(us, count), 0.001);
    }

    #[test]
    fn closed_hour_counts_for_a_day() {
        let mut history = History::default();
        add(&mut history, 0, 10_000, 5_000);
        assert_eq!(history.hours_us(), None);
        add(&mut history, HOUR_MS, 20_000, 2_000);
        assert_eq!(history.hours_us(), Some(10_000));
        // Too few samples in the second hour.
        add(&mut history, 2 * HOUR_MS, 30_000, 3_000);
        assert_eq!(history.hours_us(), Some(10_000));
        add(&mut history, 3 * HOUR_MS, 10_000, 1);
        assert_eq!(history.hours_us(), Some(30_000));
        assert_eq!(history.all().count(), 10_001);
        // The third hour ended three hours after the start.
        add(&mut history, 26 * HOUR_MS + HOUR_MS - 1, 10_000, 1);
        assert_eq!(history.hours_us(), Some(30_000));
        add(&mut history, 27 * HOUR_MS, 10_000, 1);
        assert_eq!(history.hours_us(), None);
        assert_eq!(history.all().count(), 3);
    }

    #[test]
    fn another_share_recomputes_closed_hours() {
        let mut history = History::default();
        add(&mut history, 0, 10_000, 9_990);
        add(&mut history, 1, 90_000, 10);
        add(&mut history, HOUR_MS, 10_000, 1);
        assert_eq!(history.hours_us(), Some(90_000));
        history.rebound(0.01);
        assert_eq!(history.hours_us(), Some(10_000));
    }

    #[test]
    fn latest_connections_are_kept() {
        let mut history = History::default();
        for second in 0..1_000 {
            add(&mut history, second * 1_000, 10_000, 1);
        }
        // At one per second these are the last three hundred.
        assert_eq!(history.recent().count(), RECENT_COUNT);
        // On a slow host these are the samples of ten minutes.
        let mut slow = History::default();
        for second in (0..5_000).step_by(10) {
            add(&mut slow, second * 1_000, second, 1);
        }
        assert_eq!(slow.recent().count(), 60);
        // Steps are kept as whole units.
        add(&mut slow, 5_000_000, 7, 299);
        assert_eq!(slow.recent().count(), 300);
        add(&mut slow, 5_000_001, 7, 10);
        assert_eq!(slow.recent().count(), 309);
        add(&mut slow, 5_000_002, 7, 1_000);
        assert_eq!(slow.recent().count(), 1_000);
    }
}
