//! The comparison of a policy's arms: in `GET /v1/stats`, `GET /v1/status` and `GET /v1/tune`.

pub use rto_model::tune::holdout::Verdict;
use rto_model::tune::{
    evidence,
    holdout::{Arms, Assessment},
};
use serde::{Deserialize, Serialize};

use super::histogram::HistogramView;
use crate::policy::Share;

/// The connects of both arms, and what they prove. Counts start when the policy gets this holdout
/// and these settings, and after `rto-agent tune resume`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct HoldoutView {
    /// The verdict.
    pub verdict: Verdict,
    /// The verdict in a sentence.
    pub text: String,
    /// Whether harm is proven: all new connections get the kernel's own timers until `rto-agent
    /// tune resume`, or until the policy's settings change.
    pub fallback: bool,
    /// Share of connections in the control arm.
    pub share: Share,
    /// When counting began, Unix milliseconds; absent until it does, two seconds after a change.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since_ms: Option<u64>,
    /// When the verdict was reached, Unix milliseconds; absent without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at_ms: Option<u64>,
    /// Connects that this host began, by arm.
    #[serde(flatten)]
    pub arms: Arms<ArmConnects>,
    /// The ratio of the shares of bad attempts, the e-values, and the attempts that are still
    /// needed.
    #[serde(flatten)]
    pub evidence: Assessment,
    /// How much longer connect() takes in the treated arm, on average over established connections;
    /// absent while an arm has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub connect_time_difference: Option<Difference>,
}

/// Connects of one arm.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct ArmConnects {
    /// Attempts: connect() calls whose first SYN was sent.
    pub attempts: u64,
    /// Of these, not established within 500 ms of their first SYN; an attempt under way is one of
    /// them.
    pub bad: u64,
    /// Mean connect time of established connections, losses included, microseconds; absent without
    /// any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mean_connect_time_us: Option<f64>,
}

/// A difference of two means.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Difference {
    /// Microseconds; negative if the treated arm is faster.
    pub mean_us: f64,
    /// The 95 % interval, microseconds; it holds however often it is looked at.
    pub interval_us: [f64; 2],
}

impl Difference {
    /// The difference of the mean connect times; `None` while an arm has fewer than two.
    pub fn of(connect_time: &Arms<HistogramView>) -> Option<Self> {
        let Arms { treated, control } = connect_time.map(HistogramView::moments);
        let evidence::Difference { mean, interval } = treated?.minus(control?)?;
        Some(Self {
            mean_us: mean,
            interval_us: interval,
        })
    }
}

#[cfg(test)]
mod tests {
    use rto_agent_common::{Statistics, histogram::bucket_of};

    use super::*;

    /// 10,000 connections of 100 us in each arm, and 1,000 of 1 s in the control arm.
    #[test]
    fn connect_time_difference_has_its_interval() {
        let arm = |lost: u64| {
            let mut active = Statistics::default();
            active.path_rtt.buckets[bucket_of(100)] = 10_000;
            active.path_rtt.sum_us = 10_000 * 100;
            active.lossy.buckets[bucket_of(1_000_000)] = lost;
            active.lossy.sum_us = lost * 1_000_000;
            HistogramView::from(&active.connect_times())
        };
        let difference = |control| {
            Difference::of(&Arms {
                treated: arm(0),
                control,
            })
        };
        assert_eq!(difference(HistogramView::default()), None);
        let lossy = difference(arm(1000)).unwrap();
        // 1,000 of 11,000 connections: 90.9 ms, with standard errors of 2.8 and 2.2 ms.
        let [low, high] = lossy.interval_us;
        assert!((lossy.mean_us + 90_900.0).abs() < 100.0, "{lossy:?}");
        assert!(
            (high - low - 2.0 * 3.1 * 3_500.0).abs() < 2_000.0,
            "{lossy:?}"
        );
        let none = difference(arm(0)).unwrap();
        assert!(
            none.interval_us[0] <= 0.0 && none.interval_us[1] >= 0.0,
            "{none:?}"
        );
    }
}
