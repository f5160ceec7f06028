//! Measures HZ, the kernel's jiffies per second. (`getconf CLK_TCK` is USER_HZ instead, which is
//! 100 on every host.)

use std::io;

use nix::time::{ClockId, clock_getres};

/// Values of `CONFIG_HZ` on the various architectures.
const KNOWN: [u32; 11] = [24, 48, 64, 100, 128, 250, 256, 300, 1000, 1024, 1200];

/// Measures HZ: the resolution of CLOCK_MONOTONIC_COARSE is one jiffy (`posix_get_coarse_res()`:
/// `KTIME_LOW_RES`, kernel/time/posix-timers.c, Linux 6.12).
pub fn measure() -> io::Result<u32> {
    let resolution = clock_getres(ClockId::CLOCK_MONOTONIC_COARSE)?;
    let nanos = u64::try_from(std::time::Duration::from(resolution).as_nanos()).unwrap_or(u64::MAX);
    from_resolution(nanos).ok_or_else(|| {
        io::Error::other(format!(
            "CLOCK_MONOTONIC_COARSE has a resolution of {nanos} ns, which matches no HZ"
        ))
    })
}

fn from_resolution(nanos: u64) -> Option<u32> {
    let near = |hz: &u32| (1_000_000_000 / u64::from(*hz)).abs_diff(nanos) <= nanos / 1000;
    KNOWN.into_iter().find(near)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hz_is_derived_from_clock_resolution() {
        for (nanos, hz) in [
            (4_000_000, 250),
            (1_000_000, 1000),
            (3_333_333, 300),
            (10_000_000, 100),
        ] {
            assert_eq!(from_resolution(nanos), Some(hz));
        }
        assert_eq!(from_resolution(1), None);
    }

    #[test]
    fn hz_of_this_host_is_measured() {
        assert!(measure().unwrap() >= 24);
    }
}
