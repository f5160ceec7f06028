//! Summarises many measurements in a few numbers.

use std::time::Duration;

/// A time in microseconds, the unit of measurements.
pub fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

/// Microseconds in milliseconds.
pub fn ms(us: impl Into<u64>) -> f64 {
    us.into() as f64 / 1000.0
}

/// A time in milliseconds.
pub fn millis(time: Duration) -> f64 {
    time.as_nanos() as f64 / 1e6
}

/// A count as a value.
pub const fn f(count: u64) -> f64 {
    count as f64
}

/// Share of a total, 0 to 1; 0 if the total is 0.
pub fn share(count: u64, all: u64) -> f64 {
    f(count) / f(all.max(1))
}

/// The median of some values, or the mean of the two in the middle. `None` without values.
pub fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let upper = *sorted.get(sorted.len() / 2)?;
    let lower = sorted[(sorted.len() - 1) / 2];
    Some(f64::midpoint(lower, upper))
}

/// The smallest value that at least this share (0 to 1) of the values does not exceed (nearest rank). `None` without
/// values.
pub fn quantile(values: &[f64], share: f64) -> Option<f64> {
    let mut values = values.to_vec();
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "an index of a list, held within it"
    )]
    let rank = (share.clamp(0.0, 1.0) * values.len() as f64).ceil() as usize;
    let index = rank.saturating_sub(1);
    (index < values.len()).then(|| *values.select_nth_unstable_by(index, f64::total_cmp).1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_of_values() {
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[3.0]), Some(3.0));
        assert_eq!(median(&[5.0, 1.0, 3.0]), Some(3.0));
        let hundred: Vec<f64> = (1..=100).rev().map(f64::from).collect();
        assert_eq!(quantile(&hundred, 0.0), Some(1.0));
        assert_eq!(quantile(&hundred, 0.9), Some(90.0));
        assert_eq!(quantile(&hundred, 0.99), Some(99.0));
        assert_eq!(median(&hundred), Some(50.5));
        assert_eq!(quantile(&hundred, 1.0), Some(100.0));
    }
}
