//! Durations on the command line: a typo is a usage error, before any daemon is asked.

use std::time::Duration;

use rto_model::predict;

use crate::{policy::units::parse_duration, wire::ttl::parse_ttl};

/// Longest disruption: no connection waits longer.
const LONGEST_DISRUPTION: Duration = Duration::from_secs(3600);
/// Longest round trip.
const LONGEST_RTT: Duration = Duration::from_secs(60);
/// Longest delay of a peer's ACK (`TCP_DELACK_MAX`).
const LONGEST_DELACK: Duration = Duration::from_millis(200);
/// Times between two looks.
const INTERVALS: std::ops::RangeInclusive<Duration> =
    Duration::from_millis(100)..=Duration::from_secs(3600);

/// The time after which entries are removed again.
pub(super) fn ttl_text(text: &str) -> Result<String, String> {
    parse_ttl(text).map(|_| text.to_owned())
}

/// The time between two looks.
pub(super) fn interval(text: &str) -> Result<Duration, String> {
    let interval = read(text)?;
    if INTERVALS.contains(&interval) {
        Ok(interval)
    } else {
        Err("it can be 100ms to 1h".to_owned())
    }
}

/// A round-trip time.
pub(super) fn rtt(text: &str) -> Result<Duration, String> {
    at_most(text, LONGEST_RTT, "at most 60s")
}

/// How long a peer delays an ACK.
pub(super) fn delack(text: &str) -> Result<Duration, String> {
    let most = "at most 200ms, the longest that Linux delays an ACK";
    at_most(text, LONGEST_DELACK, most)
}

/// Durations of disruptions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disruptions(pub Vec<Duration>);

/// A list, or a range.
pub(super) fn disruptions(text: &str) -> Result<Disruptions, String> {
    let one = |text: &str| {
        let duration = read(text.trim())?;
        if duration.is_zero() || duration > LONGEST_DISRUPTION {
            return Err(format!("{}: more than 0 and at most 1h", text.trim()));
        }
        Ok(duration)
    };
    let Some((from, to)) = text.split_once("..") else {
        let all: Result<_, _> = text.split(',').map(one).collect();
        return all.map(Disruptions);
    };
    let (from, to) = (one(from)?, one(to)?);
    if from > to {
        return Err("the range ends before it begins".to_owned());
    }
    let within = predict::steps(from, to);
    if within.is_empty() {
        let text = "neither 1, 2 nor 5 of any power of ten lies in it; give a list";
        return Err(text.to_owned());
    }
    Ok(Disruptions(within))
}

fn at_most(text: &str, most: Duration, why: &str) -> Result<Duration, String> {
    let duration = read(text)?;
    if duration > most {
        return Err(why.to_owned());
    }
    Ok(duration)
}

fn read(text: &str) -> Result<Duration, String> {
    parse_duration(text).map_err(|e| e.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_and_ranges() {
        let ms = |text: &str| -> Vec<u128> {
            let all = disruptions(text).unwrap().0;
            all.iter().map(Duration::as_millis).collect()
        };
        assert_eq!(ms("10ms, 1s,30ms"), [10, 1000, 30]);
        assert_eq!(ms("10ms..200ms"), [10, 20, 50, 100, 200]);
        assert_eq!(ms("15ms..60ms"), [20, 50]);
        for (text, said) in [
            ("", "is no duration"),
            ("0s", "more than 0"),
            ("2h", "at most 1h"),
            ("1s..10ms", "ends before it begins"),
            ("30ms..40ms", "give a list"),
            ("10", "a unit is missing"),
        ] {
            let error = disruptions(text).unwrap_err();
            assert!(error.contains(said), "{text}: {error}");
        }
    }

    #[test]
    fn values_have_limits() {
        assert_eq!(interval("2s"), Ok(Duration::from_secs(2)));
        assert!(interval("1us").is_err());
        assert_eq!(rtt("200us"), Ok(Duration::from_micros(200)));
        assert!(rtt("2m").is_err());
        assert!(delack("201ms").is_err());
    }
}
