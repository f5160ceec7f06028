//! Shares and times in tables.

/// A share in per cent: "0.12%".
#[expect(clippy::cast_precision_loss, reason = "two digits are shown")]
pub fn share(part: u64, whole: u64) -> String {
    match whole {
        0 => "-".to_owned(),
        _ => format!("{:.2}%", part as f64 * 100.0 / whole as f64),
    }
}

/// A time in three digits, the precision of a histogram: "1.25ms".
pub fn short_us(us: f64) -> String {
    let (value, unit) = match us {
        us if us < 1e3 => (us, "us"),
        us if us < 1e6 => (us / 1e3, "ms"),
        us => (us / 1e6, "s"),
    };
    match value {
        v if v < 10.0 => format!("{v:.2}{unit}"),
        v if v < 100.0 => format!("{v:.1}{unit}"),
        v => format!("{v:.0}{unit}"),
    }
}

/// The same for a number of microseconds.
#[expect(clippy::cast_precision_loss, reason = "three digits are shown")]
pub fn time(us: u64) -> String {
    if us == 0 {
        return "0s".to_owned();
    }
    short_us(us as f64)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use crate::policy::units::parse_duration;

    use super::*;

    #[test]
    fn times_have_three_digits() {
        for (us, text) in [
            (9.0, "9.00us"),
            (100.0, "100us"),
            (1250.0, "1.25ms"),
            (99_900.0, "99.9ms"),
            (2e6, "2.00s"),
        ] {
            assert_eq!(short_us(us), text);
        }
        assert_eq!(
            parse_duration(&short_us(1250.0)),
            Ok(Duration::from_micros(1250))
        );
    }
}
