//! Measures HZ, the kernel's jiffies per second. (`getconf CLK_TCK` is USER_HZ instead, which is
//! 100 on every host.)

use std::{
    fs,
    io::{self, Read as _},
    path::Path,
};

use nix::time::{ClockId, clock_getres};

/// Values of `CONFIG_HZ` on the various architectures.
const KNOWN: [u32; 9] = [24, 48, 64, 100, 128, 250, 256, 300, 1000];
const KNOWN_MORE: [u32; 2] = [1024, 1200];

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
    KNOWN.into_iter().chain(KNOWN_MORE).find(near)
}

/// The configured CONFIG_HZ, from `/proc/config.gz` or `/boot/config-<release>`; `None` if the host
/// has neither.
pub fn from_config(root: &Path, release: &str) -> Option<u32> {
    let own = fs::File::open(root.join("proc/config.gz"))
        .ok()
        .and_then(|file| {
            let mut text = String::new();
            flate2::read::GzDecoder::new(file)
                .read_to_string(&mut text)
                .ok()?;
            parse_config(&text)
        });
    let places = [
        format!("boot/config-{release}"),
        format!("lib/modules/{release}/config"),
    ];
    own.or_else(|| {
        places
            .iter()
            .find_map(|place| parse_config(&fs::read_to_string(root.join(place)).ok()?))
    })
}

fn parse_config(text: &str) -> Option<u32> {
    text.lines()
        .find_map(|line| line.strip_prefix("CONFIG_HZ=")?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resolutions() {
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
    fn this_host_has_one() {
        assert!(measure().unwrap() >= 24);
    }

    #[test]
    fn configurations() {
        assert_eq!(
            parse_config("# CONFIG_HZ_100 is not set\nCONFIG_HZ_250=y\nCONFIG_HZ=250\n"),
            Some(250)
        );
        assert_eq!(parse_config("CONFIG_HZ_250=y\n"), None);
    }
}
