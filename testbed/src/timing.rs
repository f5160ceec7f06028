//! How near measured gaps must be to the timers that made them.
//!
//! A gap is never early. It may be late on a machine that does other work as well, so that what is asserted is the
//! share of gaps in time, with a tolerance that an idle machine keeps. Plain timers run in the same moment
//! ([`Control`]): only while they are late as well is there another try with fresh gaps. In a machine that counts
//! instructions nothing else takes the processor: there each gap must be in time, at the first try.

use std::{ops::RangeInclusive, time::Duration};

pub use crate::machine::jiffy;
use crate::{
    control::{Control, Observed},
    emulated,
};

/// Jiffies between a timer's own length and the gap it makes: one because it is rounded up to the next tick, one
/// because it is set somewhere inside a tick (measured on Linux 6.18 for timers of 1 to 25 jiffies).
const TICKS: u32 = 2;
/// From the tick to the packet's timestamp, on an idle machine.
const SOFTIRQ: Duration = Duration::from_millis(1);
/// The least number of gaps to measure. Of a timer that is late half of the time nine of ten are in time once in a
/// hundred tries.
const GAPS: usize = 10;
/// The least number of connections, where each has several gaps.
const CONNECTIONS: usize = 5;
/// Gaps of which one may be late: 90 % must be in time.
const ONE_LATE_OF: usize = 10;
/// Tries, while the machine is late.
const TRIES: usize = 8;

/// A time as the kernel has it: in whole jiffies, rounded up.
#[must_use]
pub fn quantised(asked: Duration) -> Duration {
    let jiffy = jiffy();
    let jiffies = asked.as_nanos().div_ceil(jiffy.as_nanos());
    jiffy * u32::try_from(jiffies).unwrap_or(u32::MAX)
}

/// A timer of this length in whole jiffies, as the kernel has it. (What ss(8) prints is rounded to microseconds.)
#[must_use]
pub fn jiffies(timer: Duration) -> u32 {
    const PRINTED: Duration = Duration::from_micros(1);
    let nanos = timer.saturating_sub(PRINTED).as_nanos();
    u32::try_from(nanos.div_ceil(jiffy().as_nanos())).unwrap_or(u32::MAX)
}

/// The gaps that a timer of this length makes: never shorter, and longer by `TICKS`, `SOFTIRQ` and, from 63
/// jiffies on, the step of the timer wheel's level, 1/8 of the timer at most.
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

/// The longest gap that a timer of this length makes.
#[must_use]
pub fn latest(timer: Duration) -> Duration {
    *range(timer).end()
}

/// The gaps of one connection, and what each of them may be.
#[derive(Clone, Debug)]
pub struct Sample {
    /// One for each gap that is judged.
    pub expected: Vec<RangeInclusive<Duration>>,
    /// As measured; what is beyond those expected is not judged.
    pub gaps: Vec<Duration>,
}

impl Sample {
    /// Gaps made by these timers.
    #[must_use]
    pub fn of_timers(timers: &[Duration], gaps: Vec<Duration>) -> Self {
        let expected = timers.iter().map(|timer| range(*timer)).collect();
        Self { expected, gaps }
    }

    fn judged(&self) -> impl Iterator<Item = (&RangeInclusive<Duration>, Duration)> {
        self.expected.iter().zip(self.gaps.iter().copied())
    }

    /// By how much the earliest is early.
    fn early_by(&self) -> Duration {
        let early = |(expected, gap): (&RangeInclusive<Duration>, Duration)| {
            expected.start().saturating_sub(gap)
        };
        self.judged().map(early).max().unwrap_or_default()
    }
}

/// Asserts that the gaps `measure` gives, one at a time, are made by a timer of this length.
///
/// # Errors
///
/// Those of `measure`.
///
/// # Panics
///
/// As [`assert_samples`].
pub fn assert_gap(
    timer: Duration,
    mut measure: impl FnMut() -> anyhow::Result<Duration>,
) -> anyhow::Result<()> {
    assert_measured(|| Ok((vec![timer], vec![measure()?])))
}

/// Asserts that each of several gaps of a connection is made by its timer, as [`assert_gap`].
///
/// # Errors
///
/// Those of `measure`.
///
/// # Panics
///
/// As [`assert_samples`].
pub fn assert_gaps(
    timers: &[Duration],
    mut measure: impl FnMut() -> anyhow::Result<Vec<Duration>>,
) -> anyhow::Result<()> {
    assert_measured(|| Ok((timers.to_vec(), measure()?)))
}

/// As [`assert_gaps`], where the timers are of the connection that was measured.
///
/// # Errors
///
/// Those of `measure`, which gives the timers and the gaps.
///
/// # Panics
///
/// As [`assert_samples`].
pub fn assert_measured(
    mut measure: impl FnMut() -> anyhow::Result<(Vec<Duration>, Vec<Duration>)>,
) -> anyhow::Result<()> {
    assert_one_by_one(|| {
        let (timers, gaps) = measure()?;
        Ok(Sample::of_timers(&timers, gaps))
    })
}

/// As [`assert_samples`], of connections that are measured one after the other.
///
/// # Errors
///
/// Those of `measure`.
///
/// # Panics
///
/// As [`assert_samples`].
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

/// Asserts that no gap of several connections is early and that nearly all are in time. `measure` is told how many
/// connections to measure at least.
///
/// # Errors
///
/// Those of `measure`.
///
/// # Panics
///
/// If a gap is early, or if too small a share is in time: at once on a machine whose plain timers are in time and whose
/// `jiffies` are not behind, else after eight tries. The message has the numbers of each.
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
    panic!("gaps are not those of their timers:\n{}", tries.join("\n"));
}

/// What was measured at once.
#[derive(Debug)]
struct Try {
    samples: Vec<Sample>,
    control: Observed,
    /// The clock is the processor's own work.
    is_undisturbed: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    InTime,
    /// Not in time, and neither were plain timers.
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
        // By how much is not compared: `jiffies` are looked at once a jiffy, and stand still between two looks as well.
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

    /// The place of each late gap among those of its connection: one timer of several must not always be late.
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
    fn timers_of_100_ms_and_1_s() {
        if jiffy() == Duration::from_millis(4) {
            let ms = Duration::from_millis;
            assert_eq!(range(ms(100)), ms(100)..=ms(109));
            assert_eq!(range(ms(1)), ms(4)..=ms(13));
            assert_eq!(range(ms(1000)), ms(1000)..=ms(1041));
            // As ss(8) prints 51 jiffies.
            assert_eq!(jiffies(Duration::from_secs_f64(0.204)), 51);
        }
        assert!(latest(Duration::from_millis(100)) < Duration::from_millis(200));
    }

    #[test]
    fn one_of_ten_may_be_late_and_none_early() {
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
        // Too few say nothing.
        assert_eq!(times(&right[..9], CALM).verdict(), Verdict::Wrong);
        // Where nothing disturbs, none may be late.
        for (gaps, verdict) in [(right, Verdict::InTime), (late, Verdict::Wrong)] {
            let undisturbed = Try {
                is_undisturbed: true,
                ..times(&gaps, LATE)
            };
            assert_eq!(undisturbed.verdict(), verdict);
        }
    }

    #[test]
    fn one_timer_of_several_must_not_always_be_late() {
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
    fn a_timer_that_is_late_half_of_the_time() {
        let mut n = 0;
        let measure = || {
            n += 1;
            Ok(jiffy() * if n % 2 == 0 { 26 } else { 30 })
        };
        assert_gap(25 * jiffy(), measure).unwrap();
    }
}
