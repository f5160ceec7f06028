//! Errors between the daemon and the kernel, with their fixes.

use std::{
    error::Error,
    fmt, io,
    path::{Path, PathBuf},
};

use rto_agent_common::{FIRST_SLOT, SLOTS};
use rto_agent_core::{
    policy::{Cidr, PolicyName},
    progress::Stopped,
};

/// An error of the datapath. The text says what failed, why, and how to fix it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DatapathError {
    /// The pin directory cannot be used.
    #[error(
        "cannot use {path} for pins: {cause}; it must be on a BPF file system that root can write \
         to (mount -t bpf bpf /sys/fs/bpf)"
    )]
    PinDir {
        /// The pin directory.
        path: PathBuf,
        /// The error of the system call.
        cause: io::Error,
    },
    /// The object could not be loaded.
    #[error("the kernel rejected the eBPF program: {0}")]
    Load(Cause),
    /// The kernel's types could not be read.
    #[error("the kernel rejected the eBPF program: BTF: {0}")]
    Types(Cause),
    /// The iterator could not be run.
    #[error("the kernel rejected the eBPF program: iterator over TCP sockets: {0}")]
    Iterate(Cause),
    /// The link could not be created.
    #[error("cannot attach to {cgroup}: {cause}")]
    Attach {
        /// The cgroup.
        cgroup: PathBuf,
        /// The cause.
        cause: Cause,
    },
    /// The link could not be created because another program excludes others.
    #[error(
        "cannot attach to {cgroup}: {cause}; another sock_ops program is attached exclusively to \
         this cgroup or one above it; rto-agent doctor names it"
    )]
    Excluded {
        /// The cgroup.
        cgroup: PathBuf,
        /// The cause.
        cause: Cause,
    },
    /// A pin could not be created, moved or removed.
    #[error("pin {path}: {cause}")]
    Pin {
        /// The pin's path.
        path: PathBuf,
        /// The cause.
        cause: Cause,
    },
    /// A map could not be read or opened.
    #[error("map {map}: {cause}")]
    Map {
        /// The map's name.
        map: &'static str,
        /// The cause.
        cause: Cause,
    },
    /// An entry could not be written or removed.
    #[error("entry {cidr}: {}", of_entry(.cause))]
    Entry {
        /// The entry.
        cidr: Cidr,
        /// The error of the system call.
        cause: io::Error,
    },
    /// An entry names a policy that has no slot.
    #[error("entry {cidr} refers to policy {policy}, which is not in the kernel's maps")]
    UnknownPolicy {
        /// The entry.
        cidr: Cidr,
        /// The policy.
        policy: PolicyName,
    },
    /// All slots for policies are in use.
    #[error(
        "no slot left for policy {0}: the kernel's table holds {max} policies",
        max = SLOTS - FIRST_SLOT
    )]
    PolicyTableFull(PolicyName),
    /// The daemon is stopping, so the read or write is unfinished.
    #[error("the daemon is stopping")]
    Stopped,
}

impl From<Stopped> for DatapathError {
    fn from(_: Stopped) -> Self {
        Self::Stopped
    }
}

impl DatapathError {
    /// The errno, if the error comes from the kernel.
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::PinDir { cause, .. } | Self::Entry { cause, .. } => cause.raw_os_error(),
            Self::Load(cause)
            | Self::Types(cause)
            | Self::Iterate(cause)
            | Self::Attach { cause, .. }
            | Self::Excluded { cause, .. }
            | Self::Pin { cause, .. }
            | Self::Map { cause, .. } => cause.errno(),
            Self::UnknownPolicy { .. } | Self::PolicyTableFull(_) | Self::Stopped => None,
        }
    }
}

/// The cause of an error. Its text contains the whole chain on one line, because aya's texts often
/// leave the errno to the source.
#[derive(Debug)]
pub struct Cause(Box<dyn Error + Send + Sync>);

impl Cause {
    /// Wraps another error, or a text.
    pub(super) fn new(cause: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self(cause.into())
    }

    /// The errno of the system call that caused it.
    pub fn errno(&self) -> Option<i32> {
        errno(&*self.0)
    }

    /// The error of this type in the chain.
    pub(super) fn find<E: Error + 'static>(&self) -> Option<&E> {
        let mut error: &(dyn Error + 'static) = &*self.0;
        loop {
            if let Some(found) = error.downcast_ref() {
                return Some(found);
            }
            error = error.source()?;
        }
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        /// Lines shown of a verifier's log, whose end has the reason.
        const END: usize = 8;
        let text = describe(&*self.0);
        let lines: Vec<&str> = text.trim_end().lines().collect();
        match lines.split_first() {
            Some((first, rest)) if rest.len() > END => {
                let end = rest[rest.len() - END..].join("\n");
                write!(f, "{first}\n...\n{end}")
            }
            _ => f.write_str(&text),
        }
    }
}

/// The errno of the system call that caused an error.
pub(super) fn errno(error: &(dyn Error + 'static)) -> Option<i32> {
    let io = error.downcast_ref::<io::Error>();
    io.and_then(io::Error::raw_os_error)
        .or_else(|| error.source().and_then(errno))
}

fn describe(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.contains(&more) {
            text.push_str(": ");
            text.push_str(&more);
        }
        cause = error.source();
    }
    // aya ends the text so if a verifier's log follows.
    if let Some(short) = text.trim_end().strip_suffix(". Verifier output:") {
        text.truncate(short.len());
    }
    text
}

fn of_entry(cause: &io::Error) -> String {
    match cause.raw_os_error() {
        Some(libc::ENOSPC) => "the kernel's map is full".to_owned(),
        Some(libc::ENOMEM) => "the kernel has not enough memory for it".to_owned(),
        _ => cause.to_string(),
    }
}

/// Builds a [`DatapathError::Map`].
pub(super) fn map(
    map: &'static str,
    cause: impl Into<Box<dyn Error + Send + Sync>>,
) -> DatapathError {
    DatapathError::Map {
        map,
        cause: Cause::new(cause),
    }
}

/// Builds a [`DatapathError::Pin`].
pub(super) fn pin_error(path: &Path, cause: impl Error + Send + Sync + 'static) -> DatapathError {
    DatapathError::Pin {
        path: path.to_owned(),
        cause: Cause::new(cause),
    }
}

/// Builds a [`DatapathError::Attach`].
pub(super) fn attach_error(
    cgroup: &Path,
    cause: impl Into<Box<dyn Error + Send + Sync>>,
) -> DatapathError {
    DatapathError::Attach {
        cgroup: cgroup.to_owned(),
        cause: Cause::new(cause),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("bpf_prog_load failed")]
    struct Outer(#[source] io::Error);

    #[test]
    fn error_shows_errno_and_all_causes() {
        let outer = Outer(io::Error::from_raw_os_error(libc::EPERM));
        let error = DatapathError::Excluded {
            cgroup: "/c".into(),
            cause: Cause::new(outer),
        };
        assert_eq!(error.errno(), Some(libc::EPERM));
        let text = error.to_string();
        assert!(
            text.contains("bpf_prog_load failed: Operation not permitted"),
            "{text}"
        );
        assert!(text.contains("attached exclusively"), "{text}");
        assert_eq!(map("M", "in words").errno(), None);
    }

    #[test]
    fn verifier_log_keeps_its_tail() {
        let log: Vec<String> = (0..20).map(|i| format!("line {i}")).collect();
        let text = Cause::new(log.join("\n")).to_string();
        assert!(text.starts_with("line 0\n...\nline 12\n"), "{text}");
        assert!(text.ends_with("line 19"), "{text}");
    }
}
