//! How many files a process may have open (RLIMIT_NOFILE). Where there is no room for the first few, libraries panic.

use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// What the daemon needs: half of it is for clients, the rest for maps, programs and files.
pub const DAEMON: u64 = 1024;
/// What any other verb needs.
pub const CLIENT: u64 = 32;

/// Raises the limit of this process, if it must and may.
///
/// # Errors
///
/// If this many are not available; the text names the fix.
pub fn ensure(needed: u64) -> anyhow::Result<()> {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    if soft >= needed {
        return Ok(());
    }
    anyhow::ensure!(
        hard >= needed,
        "this process may have {hard} files open at once (RLIMIT_NOFILE), and rto-agent needs {needed}; raise it: \
         LimitNOFILE= in a unit, ulimits in a container, ulimit -n {needed} in a shell"
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
