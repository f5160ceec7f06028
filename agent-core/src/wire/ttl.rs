//! The lifetime of an entry with a `--ttl`.

use std::time::Duration;

use crate::policy::units::{Scale, parse_scaled};

/// Longest lifetime: a more permanent entry belongs in a file.
pub const MAX_TTL: Duration = Duration::from_secs(366 * 24 * 3600);

/// Parses the lifetime of an entry: more than 0, at most a year.
pub fn parse_ttl(text: &str) -> Result<Duration, String> {
    let ttl = parse_scaled(text, Scale::Lifetime).map_err(|e| e.to_string())?;
    if ttl.is_zero() || ttl > MAX_TTL {
        return Err(format!("{text}: must be more than 0 and at most a year"));
    }
    Ok(ttl)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ttl_is_more_than_zero_and_at_most_a_year() {
        assert_eq!(parse_ttl("10m"), Ok(Duration::from_secs(600)));
        for text in ["0s", "367d", "10", ""] {
            assert!(parse_ttl(text).is_err(), "{text}");
        }
    }
}
