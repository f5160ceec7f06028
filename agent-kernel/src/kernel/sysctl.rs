//! TCP's and MPTCP's sysctls of this process's network namespace.

use std::{fs, path::Path, str::FromStr};

const IPV4: &str = "/proc/sys/net/ipv4";
const MPTCP: &str = "/proc/sys/net/mptcp";

/// Reads `net.ipv4.<name>`; `None` if this kernel does not have it.
pub fn ipv4<T: FromStr>(name: &str) -> Option<T> {
    read(Path::new(IPV4), name)
}

/// Reads `net.mptcp.<name>`; `None` if this kernel does not have it.
pub fn mptcp<T: FromStr>(name: &str) -> Option<T> {
    read(Path::new(MPTCP), name)
}

fn read<T: FromStr>(dir: &Path, name: &str) -> Option<T> {
    fs::read_to_string(dir.join(name)).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_sysctl_value_is_none() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("tcp_syn_retries"), "6\n").unwrap();
        fs::write(dir.path().join("odd"), "x\n").unwrap();
        assert_eq!(read::<u8>(dir.path(), "tcp_syn_retries"), Some(6));
        assert_eq!(read::<u8>(dir.path(), "odd"), None);
        assert_eq!(read::<u8>(dir.path(), "absent"), None);
    }
}
