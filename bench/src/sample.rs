//! Quantiles of repeated measurements.

/// Several measurements of the same quantity.
pub(crate) struct Sample {
    sorted: Vec<f64>,
}

impl Sample {
    pub(crate) fn of(values: impl IntoIterator<Item = f64>) -> Self {
        let mut sorted: Vec<f64> = values.into_iter().collect();
        sorted.sort_by(f64::total_cmp);
        Self { sorted }
    }

    pub(crate) fn len(&self) -> usize {
        self.sorted.len()
    }

    /// How many of the measurements satisfy a condition.
    pub(crate) fn count(&self, is: impl Fn(f64) -> bool) -> usize {
        self.sorted.iter().filter(|value| is(**value)).count()
    }

    /// The value below which this share (0 to 1) of the measurements is, interpolated; NaN without measurements.
    pub(crate) fn quantile(&self, share: f64) -> f64 {
        let Some(last) = self.sorted.len().checked_sub(1) else {
            return f64::NAN;
        };
        let position = last as f64 * share;
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "an index"
        )]
        let index = position as usize;
        let (low, high) = (self.sorted[index], self.sorted[(index + 1).min(last)]);
        low + (high - low) * position.fract()
    }

    pub(crate) fn median(&self) -> f64 {
        self.quantile(0.5)
    }

    pub(crate) fn min(&self) -> f64 {
        self.quantile(0.0)
    }

    pub(crate) fn max(&self) -> f64 {
        self.quantile(1.0)
    }

    /// "266 (264 to 268)": the median and the interquartile range.
    pub(crate) fn with_quartiles(&self, digits: usize) -> String {
        let [low, median, high] = [0.25, 0.5, 0.75].map(|share| self.quantile(share));
        format!("{median:.digits$} ({low:.digits$} to {high:.digits$})")
    }

    /// "266 (260 to 281)": the median, the minimum and the maximum.
    pub(crate) fn with_range(&self, digits: usize) -> String {
        let [low, median, high] = [self.min(), self.median(), self.max()];
        format!("{median:.digits$} ({low:.digits$} to {high:.digits$})")
    }
}

#[cfg(test)]
mod tests {
    use super::Sample;

    #[test]
    fn quantiles() {
        let five = Sample::of([5.0, 1.0, 4.0, 2.0, 3.0]);
        assert_eq!(
            [0.0, 0.25, 0.5, 0.75, 1.0].map(|share| five.quantile(share)),
            [1.0, 2.0, 3.0, 4.0, 5.0]
        );
        assert_eq!(five.with_quartiles(1), "3.0 (2.0 to 4.0)");
        assert_eq!(Sample::of([2.0, 1.0]).median(), 1.5);
        assert!(Sample::of([]).median().is_nan());
    }
}
