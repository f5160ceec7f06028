//! Values on the command line: a typo is a usage error, before any daemon is asked.

use std::{ops::RangeInclusive, time::Duration};

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use rto_agent_core::{
    policy::units::{Scale, parse_scaled},
    wire::ttl::parse_ttl,
};
use rto_agent_daemon::telemetry::LogFormat;
use rto_agent_kernel::kernel::version::{self, KernelVersion};

/// Longest delay of a peer's ACK (`TCP_DELACK_MAX`).
const LONGEST_DELACK: Duration = Duration::from_millis(200);
/// Times between two looks.
const INTERVALS: RangeInclusive<Duration> = Duration::from_millis(100)..=Duration::from_secs(3600);
/// Metrics are rarely kept beyond a year; below a minute there are not two scrapes.
const RANGES: RangeInclusive<Duration> =
    Duration::from_secs(60)..=Duration::from_secs(365 * 86_400);

/// The value of `--log-format`.
pub(super) fn log_format() -> impl TypedValueParser<Value = LogFormat> {
    let values = [
        (
            "auto",
            "The journal if stderr is connected to it, else text",
        ),
        ("text", "Lines of text"),
        ("json", "One JSON object per line"),
    ];
    let values = values.map(|(name, help)| PossibleValue::new(name).help(help));
    PossibleValuesParser::new(values).map(|name| match &*name {
        "json" => LogFormat::Json,
        "text" => LogFormat::Text,
        _ => LogFormat::Auto,
    })
}

/// The kernel of other hosts.
pub(super) fn kernel(text: &str) -> Result<(u32, u32), String> {
    let version: KernelVersion = text
        .parse()
        .map_err(|_| "write a version, for example 5.14".to_owned())?;
    let (major, minor) = version::MINIMUM;
    match version.at_least(version::MINIMUM) {
        true => Ok(version.number),
        false => Err(format!("rto-agent needs Linux {major}.{minor} or later")),
    }
}

/// CONFIG_HZ of other hosts.
pub(super) fn hz() -> impl TypedValueParser<Value = u32> {
    PossibleValuesParser::new(["100", "250", "300", "1000"]).try_map(|hz| hz.parse())
}

/// The time after which entries are removed again.
pub(super) fn ttl_text(text: &str) -> Result<String, String> {
    parse_ttl(text).map(|_| text.to_owned())
}

/// The time between two looks.
pub(super) fn interval(text: &str) -> Result<Duration, String> {
    within(text, Scale::Interval, &INTERVALS, "must be 100ms to 1h")
}

/// How far metrics are looked back at.
pub(super) fn range(text: &str) -> Result<Duration, String> {
    within(text, Scale::Lifetime, &RANGES, "must be 1m to 365 days")
}

/// How long a peer delays an ACK.
pub(super) fn delack(text: &str) -> Result<Duration, String> {
    let delay = read(text, Scale::Timer)?;
    if delay > LONGEST_DELACK {
        return Err("must be at most 200ms, the longest time that Linux delays an ACK".to_owned());
    }
    Ok(delay)
}

fn within(
    text: &str,
    scale: Scale,
    bounds: &RangeInclusive<Duration>,
    else_say: &str,
) -> Result<Duration, String> {
    let value = read(text, scale)?;
    match bounds.contains(&value) {
        true => Ok(value),
        false => Err(else_say.to_owned()),
    }
}

fn read(text: &str, scale: Scale) -> Result<Duration, String> {
    parse_scaled(text, scale).map_err(|e| e.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn option_values_have_limits() {
        assert_eq!(interval("2s"), Ok(Duration::from_secs(2)));
        assert!(interval("1us").is_err());
        assert!(delack("201ms").is_err());
        assert_eq!(range("1d"), Ok(Duration::from_secs(86_400)));
        assert!(range("30s").is_err());
    }
}
