//! Build information: version, commit and target.

/// The package version, from Cargo.toml.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The first twelve characters of the commit, with "-dirty" appended if files were changed.
/// "unknown" in builds without optimisation, and if neither a checkout, a tarball nor
/// RTO_AGENT_COMMIT names the commit.
pub const COMMIT: &str = env!("RTO_AGENT_COMMIT");

/// The target triple, as rustc names it.
pub(crate) const TARGET: &str = env!("RTO_AGENT_TARGET");

/// Version, commit and target in one line.
pub const LINE: &str = concat!(
    env!("CARGO_PKG_VERSION"),
    " (commit ",
    env!("RTO_AGENT_COMMIT"),
    ", ",
    env!("RTO_AGENT_TARGET"),
    ")"
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn build_line_has_commit_or_unknown() {
        let hash = COMMIT.strip_suffix("-dirty").unwrap_or(COMMIT);
        let is_hash = hash.len() == 12 && hash.bytes().all(|byte| byte.is_ascii_hexdigit());
        assert!(is_hash || COMMIT == "unknown", "{COMMIT}");
        assert_eq!(TARGET.split('-').nth(2), Some("linux"));
        assert_eq!(LINE, format!("{VERSION} (commit {COMMIT}, {TARGET})"));
    }
}
