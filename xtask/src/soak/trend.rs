//! Decides whether a value grows.

/// One part in this many, at the start of the series, does not count: caches fill.
const WARM_UP: usize = 5;
/// Minimum number of values.
const LEAST: usize = 40;

/// The medians of a series' first and last quarter, after the warm-up.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Trend {
    pub(super) first: f64,
    pub(super) last: f64,
}

impl Trend {
    /// The trend of values at equal intervals; `None` if there are too few.
    pub(super) fn of(values: &[f64]) -> Option<Self> {
        let rest = &values[values.len() / WARM_UP..];
        if rest.len() < LEAST {
            return None;
        }
        let quarter = rest.len() / 4;
        Some(Self {
            first: median(&rest[..quarter]),
            last: median(&rest[rest.len() - quarter..]),
        })
    }

    /// Growth relative to the first median; negative if the value shrinks.
    pub(super) fn growth(&self) -> f64 {
        if self.first == 0.0 {
            return if self.last > 0.0 { f64::INFINITY } else { 0.0 };
        }
        self.last / self.first - 1.0
    }
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn growth(value: impl Fn(f64) -> f64) -> f64 {
        let values: Vec<f64> = (0..600).map(|i| value(f64::from(i))).collect();
        Trend::of(&values).unwrap().growth()
    }

    #[test]
    fn trend_ignores_noise_and_warm_up_but_not_leaks() {
        assert_eq!(growth(|_| 12.0), 0.0);
        assert_eq!(growth(|_| 0.0), 0.0);
        // 480 values remain after the warm-up; the medians of their quarters are 360 apart.
        let leak = growth(|i| 10_000.0 + i);
        assert!((0.034..0.036).contains(&leak), "{leak}");
        // A saw tooth and single outliers do not count as growth.
        assert!(growth(|i| 1000.0 + 50.0 * (i % 30.0)).abs() < 0.01);
        assert_eq!(growth(|i| if i % 7.0 == 0.0 { 5000.0 } else { 100.0 }), 0.0);
        // Growth in the warm-up only.
        assert_eq!(growth(|i| i.min(110.0)), 0.0);
        assert_eq!(growth(|i| if i > 500.0 { 1.0 } else { 0.0 }), f64::INFINITY);
        assert!(growth(|i| 10_000.0 - i) < 0.0);
        assert_eq!(Trend::of(&[1.0; LEAST]), None);
    }
}
