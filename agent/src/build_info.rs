//! What was built: version, commit, target.

/// The version.
pub(crate) const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The commit it was built from, twelve characters, "-dirty" behind it if files were changed; "unknown" where neither a
/// checkout nor a tarball nor RTO_AGENT_COMMIT tells, and in builds without optimisation.
pub(crate) const COMMIT: &str = env!("RTO_AGENT_COMMIT");

/// What it was built for, as rustc names it.
pub(crate) const TARGET: &str = env!("RTO_AGENT_TARGET");

/// All of it in one line.
pub(crate) const LINE: &str = concat!(
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
    fn the_commit_is_one_or_unknown() {
        let hash = COMMIT.strip_suffix("-dirty").unwrap_or(COMMIT);
        let is_hash = hash.len() == 12 && hash.bytes().all(|byte| byte.is_ascii_hexdigit());
        assert!(is_hash || COMMIT == "unknown", "{COMMIT}");
        assert_eq!(TARGET.split('-').nth(2), Some("linux"));
        assert_eq!(LINE, format!("{VERSION} (commit {COMMIT}, {TARGET})"));
    }
}
