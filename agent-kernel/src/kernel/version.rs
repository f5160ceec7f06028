//! The running kernel's release.

use std::{fmt, str::FromStr};

/// A kernel version. Distribution suffixes ("6.1.0-44-cloud-amd64") are kept only for display.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelVersion {
    /// Major and minor version, on which features depend.
    pub number: (u32, u32),
    release: String,
}

/// The oldest supported kernel: it has BPF_SOCK_OPS with socket storage, links, and the options the
/// agent sets.
pub const MINIMUM: (u32, u32) = (5, 10);

/// The running kernel's version.
pub fn running() -> anyhow::Result<KernelVersion> {
    let name = nix::sys::utsname::uname()?;
    name.release().to_string_lossy().parse()
}

impl KernelVersion {
    /// Whether it is this version or a later one.
    pub fn at_least(&self, number: (u32, u32)) -> bool {
        self.number >= number
    }
}

impl FromStr for KernelVersion {
    type Err = anyhow::Error;

    fn from_str(release: &str) -> anyhow::Result<Self> {
        let numbers = release.split(|c: char| !c.is_ascii_digit());
        let mut numbers = numbers.map_while(|n| n.parse().ok());
        let (Some(major), Some(minor)) = (numbers.next(), numbers.next()) else {
            anyhow::bail!("kernel release {release:?} does not begin with two numbers");
        };
        Ok(Self {
            number: (major, minor),
            release: release.to_owned(),
        })
    }
}

impl fmt::Display for KernelVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.release)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distribution_releases_are_parsed() {
        for (release, number) in [
            ("6.18.44-fc-v669", (6, 18)),
            ("6.1.0-44-cloud-amd64", (6, 1)),
            ("5.15.0-1053-aws", (5, 15)),
            ("5.14.0-427.el9.x86_64", (5, 14)),
            ("7.0-rc3", (7, 0)),
            ("6.8.12+", (6, 8)),
        ] {
            let version: KernelVersion = release.parse().unwrap();
            assert_eq!(version.number, number, "{release}");
            assert_eq!(version.to_string(), release);
        }
        assert!("linux".parse::<KernelVersion>().is_err());
    }
}
