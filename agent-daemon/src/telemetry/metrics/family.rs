//! The samples of a scrape, in the text format.

use std::fmt;

use prometheus_client::{
    encoding::{EncodeMetric, MetricEncoder, NoLabelSet},
    metrics::{MetricType, counter::ConstCounter, gauge::ConstGauge},
    registry::{Metric, Registry},
};
use rto_agent_core::wire::histogram::HistogramView;

pub(super) type Labels = Vec<(&'static str, String)>;

/// The labels and one more.
pub(super) fn with(labels: &Labels, name: &'static str, value: &str) -> Labels {
    let more = (name, value.to_owned());
    labels.iter().cloned().chain([more]).collect()
}

/// A sample for each value of a label: 1 for the current one.
pub(super) fn state_set<'a>(
    labels: &Labels,
    name: &'static str,
    values: impl IntoIterator<Item = &'a str>,
    current: &str,
) -> Vec<(Labels, f64)> {
    let samples = values.into_iter().map(|value| {
        let is_current = f64::from(u8::from(value == current));
        (with(labels, name, value), is_current)
    });
    samples.collect()
}

/// For counts that stay below 2^53, so that a double holds them exactly.
#[expect(clippy::cast_precision_loss, reason = "a gauge is a double")]
pub(super) const fn number(value: usize) -> f64 {
    value as f64
}

#[expect(clippy::cast_precision_loss, reason = "seconds are a double")]
pub(super) fn seconds(us: u64) -> f64 {
    us as f64 / 1e6
}

/// The metrics of a scrape. A family without samples is left out.
pub(super) struct Metrics(pub(super) Registry);

impl Metrics {
    fn add<N, M: Metric>(
        &mut self,
        kind: MetricType,
        name: impl Into<String>,
        help: &str,
        samples: impl IntoIterator<Item = (Labels, N)>,
        metric: fn(N) -> M,
    ) {
        let samples = samples.into_iter();
        let samples = samples.map(|(labels, value)| (labels, metric(value)));
        let samples: Vec<_> = samples.collect();
        if !samples.is_empty() {
            self.0.register(name, help, Family { kind, samples });
        }
    }

    /// The name is without "_total".
    pub(super) fn counters(
        &mut self,
        name: impl Into<String>,
        help: &str,
        samples: impl IntoIterator<Item = (Labels, u64)>,
    ) {
        self.add(MetricType::Counter, name, help, samples, ConstCounter::new);
    }

    /// Counters of a fractional quantity, like seconds.
    pub(super) fn amounts(
        &mut self,
        name: impl Into<String>,
        help: &str,
        samples: impl IntoIterator<Item = (Labels, f64)>,
    ) {
        self.add(MetricType::Counter, name, help, samples, ConstCounter::new);
    }

    pub(super) fn gauges(
        &mut self,
        name: &str,
        help: &str,
        samples: impl IntoIterator<Item = (Labels, f64)>,
    ) {
        self.add(MetricType::Gauge, name, help, samples, ConstGauge::new);
    }

    pub(super) fn gauge(&mut self, name: &str, help: &str, value: f64) {
        self.gauges(name, help, [(Vec::new(), value)]);
    }

    pub(super) fn flag(&mut self, name: &str, help: &str, value: bool) {
        self.gauge(name, help, f64::from(u8::from(value)));
    }

    pub(super) fn times<'a>(
        &mut self,
        name: &str,
        help: &str,
        samples: impl IntoIterator<Item = (Labels, &'a HistogramView)>,
    ) {
        self.add(MetricType::Histogram, name, help, samples, Distribution::of);
    }
}

/// The samples of one metric.
#[derive(Debug)]
struct Family<M> {
    kind: MetricType,
    samples: Vec<(Labels, M)>,
}

impl<M: EncodeMetric> EncodeMetric for Family<M> {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> Result<(), fmt::Error> {
        for (labels, value) in &self.samples {
            value.encode(encoder.encode_family(labels)?)?;
        }
        Ok(())
    }

    fn metric_type(&self) -> MetricType {
        self.kind
    }
}

/// A histogram of times.
#[derive(Debug)]
struct Distribution {
    sum_s: f64,
    count: u64,
    /// Upper bound of each bucket in seconds, and the samples in it.
    buckets: Vec<(f64, u64)>,
}

impl Distribution {
    /// Merges the buckets to one per power of two: with four, as they are counted, a histogram
    /// would have some 90 series.
    fn of(view: &HistogramView) -> Self {
        let mut buckets = Vec::new();
        let mut before = 0;
        for (end_us, below) in view.cumulative() {
            if end_us.is_none_or(u64::is_power_of_two) {
                buckets.push((end_us.map_or(f64::INFINITY, seconds), below - before));
                before = below;
            }
        }
        Self {
            sum_s: seconds(view.sum_us),
            count: view.count,
            buckets,
        }
    }
}

impl EncodeMetric for Distribution {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> Result<(), fmt::Error> {
        encoder.encode_histogram::<NoLabelSet>(self.sum_s, self.count, &self.buckets, None)
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Histogram
    }
}
