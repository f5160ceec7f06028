//! The limit of open files (RLIMIT_NOFILE). Libraries panic if the first few cannot be opened.

use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// Descriptors that the daemon needs: half of them are for clients, the rest for maps, programs and
/// files.
pub const DAEMON: u64 = 1024;
/// Descriptors that any other verb needs.
pub const CLIENT: u64 = 32;

/// Raises this process's limit if necessary and permitted.
///
/// # Errors
///
/// If the limit stays below `needed`; the text names the fix.
pub fn ensure(needed: u64) -> anyhow::Result<()> {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    if soft >= needed {
        return Ok(());
    }
    anyhow::ensure!(
        hard >= needed,
        "this process may have only {hard} open files (RLIMIT_NOFILE), and rto-agent needs \
         {needed}; raise the limit: LimitNOFILE= in a unit, ulimits in a container, ulimit -n \
         {needed} in a shell"
    );
    setrlimit(Resource::RLIMIT_NOFILE, needed, hard)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_descriptors_are_reported() {
        ensure(1).unwrap();
        let error = ensure(u64::MAX - 1).unwrap_err().to_string();
        assert!(error.contains("RLIMIT_NOFILE"), "{error}");
        assert!(error.contains("LimitNOFILE="), "{error}");
    }
}
