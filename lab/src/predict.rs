//! Predicts how long connections are idle in disruptions with a setting, compared with the kernel's timers.

use std::{iter, time::Duration};

use rto_model::retransmit::{LinuxTimers, RTO_MIN_US};
use serde::Serialize;

use crate::{
    chart::{Axis, Chart, Series},
    summary::micros,
};

/// Number of points in a curve.
const POINTS: u32 = 400;

/// A disruption: how long a request and response are idle in it, milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Prediction {
    /// Duration of the disruption, milliseconds.
    pub disruption_ms: f64,
    /// Idle time with the kernel's timers, milliseconds.
    pub kernel_ms: f64,
    /// Idle time with the policy, milliseconds.
    pub policy_ms: f64,
    /// Whether the policy is worse by more than a jiffy, which is within chance.
    pub worse: bool,
}

/// When the first retransmissions of a lost request are answered, with one value of rto_min.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Deadline {
    /// The value, milliseconds: whole jiffies.
    pub rto_min_ms: f64,
    /// When its first retransmission is sent at the latest, milliseconds after the request.
    pub retransmission_ms: f64,
    /// When that is answered at the latest.
    pub answer_ms: f64,
    /// Retransmissions that are answered within the deadline.
    pub in_time: usize,
}

/// The rule of deadlines: a server takes this long at most, and an answer is wanted within the deadline. The largest
/// values of rto_min for each number of retransmissions that are in time, from the shortest value on.
pub fn deadlines(kernel: &LinuxTimers, deadline: Duration, service: Duration) -> Vec<Deadline> {
    let jiffies_us = |jiffies: u64| jiffies * 1_000_000 / kernel.hz;
    let after_us = kernel.srtt_us + micros(service);
    let row = |jiffies: u64| {
        let own = kernel.with_rto_min(jiffies_us(jiffies));
        // At the latest, over the positions in the timer wheel's steps.
        let latest_us = |n: usize| {
            let of = |begin| own.times(begin).nth(n).unwrap_or(u64::MAX >> 32);
            jiffies_us((0..512).map(of).max().unwrap_or(0))
        };
        let is_in_time = |n: &usize| latest_us(*n) + after_us <= micros(deadline);
        Deadline {
            rto_min_ms: millis(jiffies_us(jiffies)),
            retransmission_ms: millis(latest_us(0)),
            answer_ms: millis(latest_us(0) + after_us),
            in_time: (0..).take_while(is_in_time).count(),
        }
    };
    let largest = RTO_MIN_US * kernel.hz / 1_000_000;
    let mut rows: Vec<Deadline> = Vec::new();
    for jiffies in 2..=largest {
        let row = row(jiffies);
        let is_last = row.in_time == 0;
        match rows.last_mut() {
            Some(last) if last.in_time == row.in_time => *last = row,
            _ => rows.push(row),
        }
        if is_last {
            break;
        }
    }
    rows
}

/// Predicts for an established connection with one small request at a time and a steady smoothed RTT: all packets are
/// lost from the moment a request is sent. The result is the median over the positions in the timer wheel's steps.
pub fn predict(
    kernel: &LinuxTimers,
    own: &LinuxTimers,
    disruptions: &[Duration],
) -> Vec<Prediction> {
    let jiffy_us = 1_000_000 / kernel.hz.max(1);
    disruptions
        .iter()
        .map(|disruption| {
            let disruption_us = u64::try_from(disruption.as_micros()).unwrap_or(u64::MAX);
            let kernel_us = kernel.median_idle_us(disruption_us);
            let policy_us = own.median_idle_us(disruption_us);
            Prediction {
                disruption_ms: millis(disruption_us),
                kernel_ms: millis(kernel_us),
                policy_ms: millis(policy_us),
                worse: policy_us > kernel_us + jiffy_us,
            }
        })
        .collect()
}

/// 1, 2 and 5 times each power of ten microseconds, between two durations inclusive.
pub fn steps(from: Duration, to: Duration) -> Vec<Duration> {
    let powers = iter::successors(Some(Duration::from_micros(1)), |d| d.checked_mul(10));
    let steps = powers.flat_map(|power| [power, power * 2, power * 5]);
    steps
        .skip_while(|step| *step < from)
        .take_while(|step| *step <= to)
        .collect()
}

/// Disruptions from the smallest to the largest of the given ones, uniformly spaced on a logarithmic axis: timers cause
/// steps that few points would hide.
pub fn between(given: &[Duration]) -> Vec<Duration> {
    let (Some(least), Some(largest)) = (given.iter().min(), given.iter().max()) else {
        return Vec::new();
    };
    let (from, to) = (least.as_secs_f64().ln(), largest.as_secs_f64().ln());
    (0..=POINTS)
        .map(|n| {
            Duration::from_secs_f64((from + (to - from) * f64::from(n) / f64::from(POINTS)).exp())
        })
        .collect()
}

/// Three charts: on logarithmic axes, on linear ones, and the ratio.
pub fn charts(title: &str, predictions: &[Prediction]) -> [Chart; 3] {
    let curve = |name, value: fn(&Prediction) -> f64| {
        let points = predictions.iter().map(|p| (p.disruption_ms, value(p)));
        Series::line(name, points.collect())
    };
    let idle = Chart {
        title: format!("{title}: idle time"),
        x: Axis::ms("lost for"),
        y: Axis::ms("idle time"),
        log_x: true,
        log_y: true,
        series: vec![
            curve("kernel", |p| p.kernel_ms),
            curve("with it", |p| p.policy_ms),
        ],
    };
    let linear = Chart {
        title: "the same on linear axes".to_owned(),
        log_x: false,
        log_y: false,
        ..idle.clone()
    };
    let ratio = Chart {
        title: "ratio: idle time with the setting / with the kernel's own (above 1: worse)"
            .to_owned(),
        y: Axis::number("ratio"),
        log_y: false,
        series: vec![
            curve("1: no difference", |_| 1.0),
            curve("ratio", |p| p.policy_ms / p.kernel_ms),
        ],
        ..idle.clone()
    };
    [idle, linear, ratio]
}

fn millis(us: u64) -> f64 {
    us as f64 / 1000.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chart::svg;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn worse_is_more_than_a_jiffy() {
        let kernel = LinuxTimers::near(250, 100);
        let own = kernel.with_rto_min(50_000);
        // Including values a few jiffies apart.
        let others = [200_000, 204_000, 208_000].map(|us| kernel.with_rto_min(us));
        for own in [own].into_iter().chain(others) {
            for p in predict(&kernel, &own, &steps(MS, 20_000 * MS)) {
                assert_eq!(p.worse, p.policy_ms > p.kernel_ms + 4.0, "{p:?}");
                assert!(p.kernel_ms >= p.disruption_ms && p.policy_ms >= p.disruption_ms);
            }
        }
        let all = predict(&kernel, &own, &[200 * MS, 20 * MS]);
        assert_eq!([all[0].worse, all[1].worse], [true, false]);
    }

    #[test]
    fn steps_are_one_two_and_five() {
        assert_eq!(
            steps(10 * MS, 200 * MS),
            [10 * MS, 20 * MS, 50 * MS, 100 * MS, 200 * MS]
        );
        assert_eq!(steps(15 * MS, 60 * MS), [20 * MS, 50 * MS]);
        assert!(steps(30 * MS, 40 * MS).is_empty());
    }

    #[test]
    fn points_span_least_to_largest() {
        let all = between(&[500 * MS, 10 * MS, 2000 * MS]);
        assert_eq!(all.len(), 401);
        let near = |a: Duration, b: Duration| a.abs_diff(b) < Duration::from_micros(1);
        assert!(near(all[0], 10 * MS) && near(all[400], 2000 * MS));
        assert!(all.is_sorted());
        assert!(between(&[]).is_empty());
    }

    /// The published rule: an answer within 50 ms, 35 ms of service, rto_min of 10 to 15 ms for one retransmission.
    #[test]
    fn deadline_leaves_room_for_retransmissions() {
        let kernel = LinuxTimers::near(1000, 200);
        let rows = deadlines(&kernel, 50 * MS, 35 * MS);
        let one = rows.iter().find(|row| row.in_time == 1).unwrap();
        assert!((10.0..=15.0).contains(&one.rto_min_ms), "{rows:?}");
        assert!(one.answer_ms <= 50.0);
        let none = rows.last().unwrap();
        assert_eq!(none.in_time, 0);
        assert!(none.answer_ms > 50.0);
        assert!(rows.windows(2).all(|two| two[0].in_time > two[1].in_time));
        // At HZ 250 two jiffies are sent after 16 ms, too late.
        let coarse = LinuxTimers::near(250, 200);
        assert_eq!(deadlines(&coarse, 50 * MS, 35 * MS)[0].in_time, 0);
    }

    #[test]
    fn prediction_has_three_charts() {
        let kernel = LinuxTimers::near(250, 100);
        let dense = between(&[10 * MS, 2000 * MS]);
        let all = predict(&kernel, &kernel.with_rto_min(8_000), &dense);
        let charts = charts("rto_min 8ms", &all);
        assert_eq!(charts[0].title, "rto_min 8ms: idle time");
        assert_eq!(charts[1].title, "the same on linear axes");
        let axes = charts.each_ref().map(|chart| (chart.log_x, chart.log_y));
        assert_eq!(axes, [(true, true), (false, false), (true, false)]);
        let text = svg(&charts);
        for label in ["lost for", "idle time", "ratio", "10 ms", "1 s"] {
            assert!(text.contains(&format!(">{label}<")), "{label}: {text}");
        }
    }
}
