//! Durations in text form, and in the kernel's jiffies.

use std::time::Duration;

/// The purpose of a duration, for suggestions in errors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    /// A TCP timer.
    Timer,
    /// An interval between two readings.
    Interval,
    /// The lifetime of an entry.
    Lifetime,
}

impl Scale {
    const fn examples(self) -> &'static str {
        match self {
            Self::Timer => "\"5ms\", \"250us\" or \"1s\"",
            Self::Interval => "\"500ms\", \"2s\" or \"1m\"",
            Self::Lifetime => "\"30s\", \"10m\" or \"2h\"",
        }
    }

    const fn unit(self) -> &'static str {
        match self {
            Self::Timer => "ms",
            Self::Interval => "s",
            Self::Lifetime => "m",
        }
    }
}

/// Why a text is an invalid duration.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "invalid duration {text:?}; write a number with a unit, like {examples}{hint}",
    examples = scale.examples()
)]
pub struct DurationError {
    text: String,
    scale: Scale,
    hint: String,
}

/// Reads "5ms", "1s", "250us", "1.5s", "1m 30s".
///
/// # Errors
///
/// If it is not a duration. A number without a unit is refused, as guessing the unit is unsafe.
pub fn parse_duration(text: &str) -> Result<Duration, DurationError> {
    parse_scaled(text, Scale::Timer)
}

/// As [`parse_duration`], for another purpose.
pub fn parse_scaled(text: &str, scale: Scale) -> Result<Duration, DurationError> {
    let trimmed = text.trim();
    let error = |hint: &str| DurationError {
        text: text.to_owned(),
        scale,
        hint: hint.to_owned(),
    };
    if trimmed.parse::<f64>().is_ok() {
        let unit = scale.unit();
        // A fraction is in seconds, in all probability.
        if let Ok(seconds) = trimmed.parse::<f64>()
            && scale == Scale::Timer
            && seconds > 0.0
            && seconds < 10.0
            && trimmed.contains('.')
        {
            let meant = format_duration(Duration::from_secs_f64(seconds));
            return Err(error(&format!(
                ": a unit is missing; did you mean {meant:?} ({trimmed} s)?"
            )));
        }
        return Err(error(&format!(
            ": a unit is missing, perhaps {trimmed}{unit}"
        )));
    }
    // humantime also accepts years, months and days, which are too long for any timer here.
    humantime::parse_duration(trimmed).map_err(|_| error(""))
}

/// The shortest exact text with one unit: "8ms", "1.5s", "250us", "2m", "5h".
pub fn format_duration(duration: Duration) -> String {
    let nanos = duration.as_nanos();
    let units: [(&str, u128); 6] = [
        ("h", 3_600_000_000_000),
        ("m", 60_000_000_000),
        ("s", 1_000_000_000),
        ("ms", 1_000_000),
        ("us", 1_000),
        ("ns", 1),
    ];
    if nanos == 0 {
        return "0s".to_owned();
    }
    for (unit, size) in units {
        if nanos.is_multiple_of(size) && (unit != "m" || nanos >= 2 * size) {
            return format!("{}{unit}", nanos / size);
        }
        // "1.5s" reads better than "1500ms"; "0.0015s" does not.
        let thousandths = size / 1_000;
        let readable = !["h", "m"].contains(&unit) && nanos > size && thousandths > 0;
        if readable && nanos.is_multiple_of(thousandths) {
            let fraction = format!("{:03}", nanos % size / thousandths);
            return format!("{}.{}{unit}", nanos / size, fraction.trim_end_matches('0'));
        }
    }
    format!("{nanos}ns")
}

/// Milliseconds as seconds with one decimal, rounded down: "31.2s", "63s".
pub fn tenths_of_s(ms: u64) -> String {
    match ms / 100 % 10 {
        0 => format!("{}s", ms / 1000),
        tenth => format!("{}.{tenth}s", ms / 1000),
    }
}

/// A duration rounded to jiffies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quantised {
    /// The number of jiffies.
    pub jiffies: u64,
    /// The duration of these jiffies.
    pub effective: Duration,
}

/// Rounds up to whole jiffies, like `usecs_to_jiffies()` and `msecs_to_jiffies()`
/// (kernel/time/time.c, Linux 6.12).
pub fn quantise(duration: Duration, hz: u32) -> Quantised {
    let hz = u128::from(hz.max(1));
    let jiffies = (duration.as_nanos() * hz).div_ceil(1_000_000_000);
    let jiffies = u64::try_from(jiffies).unwrap_or(u64::MAX);
    Quantised {
        jiffies,
        effective: jiffies_duration(jiffies, u32::try_from(hz).unwrap_or(1)),
    }
}

/// Jiffies as the kernel reports them in microseconds: jiffies_to_usecs() rounds down;
/// usecs_to_jiffies() rounds up, to the same jiffies.
pub fn jiffies_to_usecs(jiffies: u64, hz: u32) -> u64 {
    jiffies * 1_000_000 / u64::from(hz)
}

/// The duration of a number of jiffies, exact to the nanosecond.
pub fn jiffies_duration(jiffies: u64, hz: u32) -> Duration {
    let nanos = u128::from(jiffies) * 1_000_000_000 / u128::from(hz.max(1));
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn fraction_without_unit_is_taken_for_seconds() {
        let error = parse_duration("0.1").unwrap_err().to_string();
        assert!(
            error.ends_with("did you mean \"100ms\" (0.1 s)?"),
            "{error}"
        );
    }

    #[test]
    fn durations_are_parsed() {
        for (text, micros) in [
            ("5ms", 5_000),
            ("250us", 250),
            ("1s", 1_000_000),
            ("1.5s", 1_500_000),
            ("0.25ms", 250),
            ("1.5 s", 1_500_000),
            ("2m", 120_000_000),
            ("1s 500ms", 1_500_000),
            (" 10 ms", 10_000),
        ] {
            assert_eq!(
                parse_duration(text),
                Ok(Duration::from_micros(micros)),
                "{text}"
            );
        }
    }

    #[test]
    fn invalid_durations_are_refused() {
        let error = parse_duration("100").unwrap_err().to_string();
        assert!(
            error.ends_with("a unit is missing, perhaps 100ms"),
            "{error}"
        );
        for (scale, message) in [
            (Scale::Interval, "\"1m\": a unit is missing, perhaps 10s"),
            (Scale::Lifetime, "\"2h\": a unit is missing, perhaps 10m"),
        ] {
            let error = parse_scaled("10", scale).unwrap_err().to_string();
            assert!(error.ends_with(message), "{error}");
        }
        for bad in [
            "",
            "ms",
            "-5ms",
            "5 parsecs",
            "1.2.3s",
            "1e3s",
            "NaN",
            "inf",
            "1.0000000001s",
            "1.s",
            ".5s",
        ] {
            assert!(parse_duration(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn durations_print_in_shortest_exact_form() {
        for (micros, text) in [
            (8_000, "8ms"),
            (1_500_000, "1.5s"),
            (250, "250us"),
            (120_000_000, "2m"),
            (60_000_000, "60s"),
            (5_400_000_000, "90m"),
            (18_000_000_000, "5h"),
            (3_334, "3.334ms"),
            (0, "0s"),
        ] {
            assert_eq!(format_duration(Duration::from_micros(micros)), text);
        }
    }

    /// `_usecs_to_jiffies()` (kernel/time/time.c, include/linux/jiffies.h), with its factors by
    /// kernel/time/timeconst.bc; Linux 6.12.
    #[expect(clippy::manual_div_ceil, reason = "as the kernel has it")]
    fn kernel_usecs_to_jiffies(micros: u64, hz: u64) -> u64 {
        const USEC_PER_SEC: u64 = 1_000_000;
        if USEC_PER_SEC.is_multiple_of(hz) {
            let jiffy = USEC_PER_SEC / hz;
            return (micros + jiffy - 1) / jiffy;
        }
        let factor = |shift: u32| (u128::from(hz) << shift).div_ceil(USEC_PER_SEC.into());
        let shift = (0..64).find(|s| factor(*s) >= 1 << 31).unwrap();
        let gcd = |mut a: u64, mut b: u64| {
            while b != 0 {
                (a, b) = (b, a % b);
            }
            a
        };
        let d = u128::from(USEC_PER_SEC / gcd(hz, USEC_PER_SEC));
        let adjust = ((d - 1) << shift) / d;
        u64::try_from((factor(shift) * u128::from(micros) + adjust) >> shift).unwrap()
    }

    proptest! {
        #[test]
        fn printed_duration_is_parsed_again(nanos in 0u64..1 << 60) {
            let duration = Duration::from_nanos(nanos);
            prop_assert_eq!(parse_duration(&format_duration(duration)), Ok(duration));
        }

        #[test]
        fn jiffies_match_kernel_arithmetic(
            micros in 0u64..200_000_000,
            hz in prop::sample::select(vec![100u32, 250, 300, 1000]),
        ) {
            let q = quantise(Duration::from_micros(micros), hz);
            prop_assert_eq!(q.jiffies, kernel_usecs_to_jiffies(micros, hz.into()));
            prop_assert_eq!(q.effective, jiffies_duration(q.jiffies, hz));
        }

        #[test]
        fn jiffies_survive_microseconds(
            jiffies in 0u64..200_000,
            hz in prop::sample::select(vec![100u32, 250, 300, 1000]),
        ) {
            let exact = Duration::from_micros(jiffies_to_usecs(jiffies, hz));
            prop_assert_eq!(quantise(exact, hz).jiffies, jiffies);
            prop_assert_eq!(quantise(jiffies_duration(jiffies, hz), hz).jiffies, jiffies);
        }

        #[test]
        fn arbitrary_duration_never_panics(text in ".{0,30}") {
            let _ = parse_duration(&text);
        }
    }
}
