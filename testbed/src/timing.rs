//! Asserts that measured gaps match the timers that caused them.
//!
//! A gap is never too short. It can be too long on a machine with other load, so the assertion is about the share of
//! gaps in time, with a tolerance that an idle machine keeps. Plain timers run during the measurement ([`Control`]); it
//! is repeated only if they are late too. On a machine whose clock counts instructions, nothing else takes the
//! processor, so each gap must be in time at the first attempt.

use std::{ops::RangeInclusive, time::Duration};

pub use crate::machine::jiffy;
use crate::{
    control::{Control, Observed},
    emulated,
};

/// Jiffies that a gap may be longer than its timer: one because the timer is rounded up to the next tick, one because
/// it is set somewhere within a tick (measured on Linux 6.18 for timers of 1 to 25 jiffies).
const TICKS: u32 = 2;
/// From the tick to the packet's timestamp on an idle machine.
const SOFTIRQ: Duration = Duration::from_millis(1);
/// Fewest gaps to measure. If a timer is late half of the time, nine of ten gaps are in time once in a hundred
/// attempts.
const GAPS: usize = 10;
/// Fewest connections, if each has several gaps.
const CONNECTIONS: usize = 5;
/// One gap in this many may be late: 90 % must be in time.
const ONE_LATE_OF: usize = 10;
/// Attempts while the machine is late.
const TRIES: usize = 8;

/// A time in the kernel's resolution: rounded up to whole jiffies.
#[must_use]
pub fn quantised(asked: Duration) -> Duration {
    let jiffy = jiffy();
    let jiffies = asked.as_nanos().div_ceil(jiffy.as_nanos());
    jiffy * u32::try_from(jiffies).unwrap_or(u32::MAX)
}

/// The length of a timer in the kernel's jiffies. (What ss(8) prints is rounded to microseconds.)
#[must_use]
pub fn jiffies(timer: Duration) -> u32 {
    const PRINTED: Duration = Duration::from_micros(1);
    let nanos = timer.saturating_sub(PRINTED).as_nanos();
    u32::try_from(nanos.div_ceil(jiffy().as_nanos())).unwrap_or(u32::MAX)
}

/// The gaps that a timer of this length causes: never shorter, and longer by at most `TICKS`, `SOFTIRQ` and, for timers
/// of 63 jiffies and more, one step of the timer wheel's level, which is at most 1/8 of the timer.
#[must_use]
pub fn range(timer: Duration) -> RangeInclusive<Duration> {
    let jiffies = jiffies(timer);
    let (mut step, mut level_end) = (1, 63);
    while jiffies >= level_end {
        step *= 8;
        level_end *= 8;
    }
    let wheel = if step > 1 { step } else { 0 };
    jiffy() * jiffies..=jiffy() * (jiffies + TICKS + wheel) + SOFTIRQ
}

/// The longest gap that a timer of this length causes.
#[must_use]
pub fn latest(timer: Duration) -> Duration {
    *range(timer).end()
}

/// The gaps of one connection, and the range that each must be in.
#[derive(Clone, Debug)]
pub struct Sample {
    /// The range of each gap that is checked.
    pub expected: Vec<RangeInclusive<Duration>>,
    /// The gaps as measured; those after the expected ones are not checked.
    pub gaps: Vec<Duration>,
}

impl Sample {
    /// Gaps that these timers should cause.
    #[must_use]
    pub fn of_timers(timers: &[Duration], gaps: Vec<Duration>) -> Self {
        let expected = timers.iter().map(|timer| range(*timer)).collect();
        Self { expected, gaps }
    }

    fn judged(&self) -> impl Iterator<Item = (&RangeInclusive<Duration>, Duration)> {
        self.expected.iter().zip(self.gaps.iter().copied())
    }

    /// How much too short the shortest gap is.
    fn early_by(&self) -> Duration {
        let early = |(expected, gap): (&RangeInclusive<Duration>, Duration)| {
            expected.start().saturating_sub(gap)
        };
        self.judged().map(early).max().unwrap_or_default()
    }
}

/// Asserts that a timer of this length causes the gaps that `measure` returns, one at a time.
pub fn assert_gap(
    timer: Duration,
    mut measure: impl FnMut() -> anyhow::Result<Duration>,
) -> anyhow::Result<()> {
    assert_measured(|| Ok((vec![timer], vec![measure()?])))
}

/// Asserts that each of several gaps of a connection matches its timer, as [`assert_gap`] does.
pub fn assert_gaps(
    timers: &[Duration],
    mut measure: impl FnMut() -> anyhow::Result<Vec<Duration>>,
) -> anyhow::Result<()> {
    assert_measured(|| Ok((timers.to_vec(), measure()?)))
}

/// As [`assert_gaps`], if the timers depend on the connection that was measured.
pub fn assert_measured(
    mut measure: impl FnMut() -> anyhow::Result<(Vec<Duration>, Vec<Duration>)>,
) -> anyhow::Result<()> {
    assert_one_by_one(|| {
        let (timers, gaps) = measure()?;
        Ok(Sample::of_timers(&timers, gaps))
    })
}

/// As [`assert_samples`], for connections that are measured one after the other.
pub fn assert_one_by_one(
    mut measure: impl FnMut() -> anyhow::Result<Sample>,
) -> anyhow::Result<()> {
    assert_samples(|_| {
        let mut samples: Vec<Sample> = Vec::new();
        while !is_enough(&samples) {
            samples.push(measure()?);
        }
        Ok(samples)
    })
}

fn is_enough(samples: &[Sample]) -> bool {
    let gaps: usize = samples.iter().map(|sample| sample.expected.len()).sum();
    samples.len() >= CONNECTIONS && gaps >= GAPS
}

/// Asserts that no gap of several connections is too short and that nearly all are in time. `measure` receives the
/// minimum number of connections to measure.
///
/// # Panics
///
/// If a gap is too short, or too few are in time: at once if the plain timers are in time and `jiffies` are not behind,
/// else after eight attempts. The message lists the numbers of each attempt.
pub fn assert_samples(
    mut measure: impl FnMut(usize) -> anyhow::Result<Vec<Sample>>,
) -> anyhow::Result<()> {
    let mut tries: Vec<Try> = Vec::new();
    while tries.len() < TRIES {
        let control = Control::start();
        let samples = measure(GAPS)?;
        let one = Try {
            samples,
            control: control.stop(),
            is_undisturbed: emulated::counts_instructions(),
        };
        let verdict = one.verdict();
        if one.late().count() > 0 {
            eprintln!("timing: {one}");
        }
        if verdict == Verdict::InTime {
            return Ok(());
        }
        tries.push(one);
        if verdict == Verdict::Wrong {
            break;
        }
    }
    let tries: Vec<String> = tries.iter().map(ToString::to_string).collect();
    panic!("the gaps do not match their timers:\n{}", tries.join("\n"));
}

/// One attempt.
#[derive(Debug)]
struct Try {
    samples: Vec<Sample>,
    control: Observed,
    /// Whether the clock counts instructions, so that nothing can disturb the measurement.
    is_undisturbed: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    InTime,
    /// Not in time, but plain timers were late too.
    Disturbed,
    Wrong,
}

impl Try {
    fn verdict(&self) -> Verdict {
        let is_short = |sample: &Sample| sample.gaps.len() < sample.expected.len();
        if !is_enough(&self.samples) || self.samples.iter().any(is_short) {
            return Verdict::Wrong;
        }
        let early = self.early_by();
        let late: Vec<usize> = self.late().collect();
        if self.is_undisturbed {
            return match early.is_zero() && late.is_empty() {
                true => Verdict::InTime,
                false => Verdict::Wrong,
            };
        }
        let in_a_row_late = (0..self.positions())
            .any(|position| late.iter().filter(|at| **at == position).count() > 1);
        if early.is_zero() && !in_a_row_late && late.len() * ONE_LATE_OF <= self.count() {
            return Verdict::InTime;
        }
        // The amounts are not compared: `jiffies` are sampled only once a jiffy, and can stall between two samples.
        if self.control.was_late() || self.control.jiffies_were_behind() {
            return Verdict::Disturbed;
        }
        Verdict::Wrong
    }

    fn positions(&self) -> usize {
        let lengths = self.samples.iter().map(|sample| sample.expected.len());
        lengths.max().unwrap_or(0)
    }

    fn count(&self) -> usize {
        self.samples
            .iter()
            .map(|sample| sample.judged().count())
            .sum()
    }

    /// The position of each late gap in its connection, to detect a timer of several that is always late.
    fn late(&self) -> impl Iterator<Item = usize> {
        let of = |sample: &Sample| {
            let late = sample.judged().enumerate();
            let late = late.filter(|(_, (expected, gap))| gap > expected.end());
            late.map(|(position, _)| position).collect::<Vec<_>>()
        };
        self.samples.iter().flat_map(of)
    }

    fn early_by(&self) -> Duration {
        let early = self.samples.iter().map(Sample::early_by);
        early.max().unwrap_or_default()
    }
}

impl std::fmt::Display for Try {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (count, late) = (self.count(), self.late().count());
        let ms = |time: &Duration| format!("{:.2}", time.as_secs_f64() * 1e3);
        let list = |all: &[Duration]| all.iter().map(ms).collect::<Vec<_>>().join(" ");
        write!(f, "{} of {count} gaps in time", count - late)?;
        if !self.early_by().is_zero() {
            write!(f, ", early by {:?}", self.early_by())?;
        }
        let mut before = None;
        for sample in &self.samples {
            if before != Some(&sample.expected) {
                let expected = sample.expected.iter();
                let expected: Vec<String> = expected
                    .map(|range| format!("{} to {}", ms(range.start()), ms(range.end())))
                    .collect();
                write!(f, "; expected [{}] ms:", expected.join(", "))?;
                before = Some(&sample.expected);
            }
            write!(f, " [{}]", list(&sample.gaps))?;
        }
        write!(f, "; {}", self.control)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LATE: Observed = Observed {
        timers: 100,
        late: 1,
        latest_by: Duration::from_secs(1),
        jiffies_behind: Duration::ZERO,
    };
    const CALM: Observed = Observed {
        late: 0,
        latest_by: Duration::ZERO,
        ..LATE
    };

    fn times(gaps: &[u32], control: Observed) -> Try {
        let timer = 25 * jiffy();
        let sample = |gap: &u32| Sample::of_timers(&[timer], vec![jiffy() * *gap]);
        Try {
            samples: gaps.iter().map(sample).collect(),
            control,
            is_undisturbed: false,
        }
    }

    #[test]
    fn tolerance_follows_the_timer_wheel() {
        if jiffy() == Duration::from_millis(4) {
            let ms = Duration::from_millis;
            assert_eq!(range(ms(100)), ms(100)..=ms(109));
            assert_eq!(range(ms(1)), ms(4)..=ms(13));
            assert_eq!(range(ms(1000)), ms(1000)..=ms(1041));
            // ss(8) prints 51 jiffies like this.
            assert_eq!(jiffies(Duration::from_secs_f64(0.204)), 51);
        }
        assert!(latest(Duration::from_millis(100)) < Duration::from_millis(200));
    }

    #[test]
    fn tolerance_is_one_late_gap_in_ten_and_none_early() {
        let right = [25, 26, 27, 26, 26, 26, 26, 26, 26, 26];
        assert_eq!(times(&right, CALM).verdict(), Verdict::InTime);
        let mut late = right;
        late[3] = 30;
        assert_eq!(times(&late, CALM).verdict(), Verdict::InTime);
        late[7] = 28;
        assert_eq!(times(&late, CALM).verdict(), Verdict::Wrong);
        assert_eq!(times(&late, LATE).verdict(), Verdict::Disturbed);
        let mut early = right;
        early[9] = 24;
        assert_eq!(times(&early, CALM).verdict(), Verdict::Wrong);
        assert_eq!(times(&early, LATE).verdict(), Verdict::Disturbed);
        let behind = Observed {
            jiffies_behind: 2 * jiffy(),
            ..CALM
        };
        assert_eq!(times(&early, behind).verdict(), Verdict::Disturbed);
        // Too few gaps prove nothing.
        assert_eq!(times(&right[..9], CALM).verdict(), Verdict::Wrong);
        // If nothing can disturb the measurement, no gap may be late.
        for (gaps, verdict) in [(right, Verdict::InTime), (late, Verdict::Wrong)] {
            let undisturbed = Try {
                is_undisturbed: true,
                ..times(&gaps, LATE)
            };
            assert_eq!(undisturbed.verdict(), verdict);
        }
    }

    #[test]
    fn timer_that_is_always_late_fails() {
        let sample = |last: u32| {
            let timers = [10, 20, 40].map(|n| n * jiffy());
            let gaps = [11, 21, last].map(|n| n * jiffy());
            Sample::of_timers(&timers, gaps.to_vec())
        };
        let of = |lasts: [u32; 10]| Try {
            samples: lasts.into_iter().map(sample).collect(),
            control: CALM,
            is_undisturbed: false,
        };
        assert_eq!(of([41; 10]).verdict(), Verdict::InTime);
        let mut lasts = [41; 10];
        lasts[0] = 43;
        assert_eq!(of(lasts).verdict(), Verdict::InTime);
        lasts[1] = 43;
        assert_eq!(of(lasts).verdict(), Verdict::Wrong);
    }

    #[test]
    #[should_panic(expected = "5 of 10 gaps in time")]
    fn timer_late_half_of_the_time_passes() {
        let mut n = 0;
        let measure = || {
            n += 1;
            Ok(jiffy() * if n % 2 == 0 { 26 } else { 30 })
        };
        assert_gap(25 * jiffy(), measure).unwrap();
    }
}
