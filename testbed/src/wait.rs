//! Waits for a condition.

use std::{
    fmt::Debug,
    thread,
    time::{Duration, Instant},
};

use anyhow::bail;

/// Longest wait for a condition that holds at once on an idle machine. It asserts nothing about time.
pub const TIMEOUT: Duration = Duration::from_secs(30);
/// Pause between two probes.
const INTERVAL: Duration = Duration::from_millis(20);

/// Probes until there is a value, for at most `timeout`, and returns that value. `what` names it in the error.
/// An error of the probe ends the wait.
pub fn eventually<T>(
    what: &str,
    timeout: Duration,
    mut probe: impl FnMut() -> anyhow::Result<Option<T>>,
) -> anyhow::Result<T> {
    let end = Instant::now() + timeout;
    loop {
        if let Some(value) = probe()? {
            return Ok(value);
        }
        if Instant::now() >= end {
            bail!("no {what} within {timeout:?}");
        }
        thread::sleep(INTERVAL);
    }
}

/// Like [`eventually`], until an observed value satisfies `is`; returns it. The error shows the last one observed.
pub fn eventually_seen<T: Debug>(
    what: &str,
    timeout: Duration,
    mut look: impl FnMut() -> anyhow::Result<T>,
    mut is: impl FnMut(&T) -> bool,
) -> anyhow::Result<T> {
    let mut last = None;
    let found = eventually(what, timeout, || {
        let seen = look()?;
        if is(&seen) {
            return Ok(Some(seen));
        }
        last = Some(seen);
        Ok(None)
    });
    found.map_err(|error| match last {
        Some(last) => error.context(format!("last seen: {last:#?}")),
        None => error,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn eventually_returns_value_error_or_timeout() {
        let mut looks = 0;
        let value = eventually("value", TIMEOUT, || {
            looks += 1;
            Ok((looks == 3).then_some("there"))
        });
        assert_eq!((value.unwrap(), looks), ("there", 3));
        let failed = eventually::<()>("value", TIMEOUT, || bail!("broken")).unwrap_err();
        assert_eq!(failed.to_string(), "broken");
        let none = eventually::<()>("value", Duration::ZERO, || Ok(None)).unwrap_err();
        assert_eq!(none.to_string(), "no value within 0ns");
        let seen = eventually_seen("three", Duration::ZERO, || Ok(2), |n| *n == 3).unwrap_err();
        assert_eq!(format!("{seen:#}"), "last seen: 2: no three within 0ns");
    }
}
