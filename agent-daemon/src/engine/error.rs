//! Why a request was not carried out.

use std::io;

use rto_agent_core::{
    config::{ConfigErrors, save::SaveError},
    policy::compile::PolicyError,
    printable,
    progress::Stopped,
};
use rto_agent_kernel::{datapath::DatapathError, kernel::bpf::MAX_PROGRAMS};

/// Why a request was not carried out. The text is shown to the user.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// The request is wrong; nothing changed.
    #[error("{0}")]
    Refused(String),
    /// The files are wrong; nothing changed.
    #[error(transparent)]
    Config(#[from] ConfigErrors),
    /// This host does not support these policies; nothing changed.
    #[error("{}", lines(.0))]
    Policies(Vec<PolicyError>),
    /// A file of saved entries cannot be edited; nothing changed.
    #[error(transparent)]
    Save(#[from] SaveError),
    /// A change could not be written to disk; nothing changed.
    #[error("{0}; nothing was changed")]
    Unsaved(io::Error),
    /// A kernel operation failed.
    #[error("{}", in_words(.0))]
    Kernel(DatapathError),
    /// The statistics cannot be read.
    #[error(transparent)]
    Statistics(#[from] std::sync::Arc<DatapathError>),
    /// The kernel refused a change; the parts already applied were undone.
    #[error("{}; nothing was changed", in_words(.0))]
    Undone(DatapathError),
    /// The kernel refused a change, and the rollback failed; `status` shows it until it is
    /// repaired.
    #[error(
        "{}; the rollback failed as well: {undo}\n{state}; the daemon retries every few seconds, \
         see rto-agent status", in_words(.cause)
    )]
    OutOfSync {
        /// Why the kernel refused the change.
        cause: DatapathError,
        /// Why the rollback failed.
        undo: DatapathError,
        /// What the kernel holds now.
        state: String,
    },
    /// The kernel has a change that could not be saved, and the rollback failed.
    #[error(
        "{unsaved}; the change is active in the kernel, and its rollback failed: {back}\nthe \
         daemon retries the rollback every few seconds, see rto-agent status"
    )]
    NotBack {
        /// Why the change could not be saved.
        unsaved: io::Error,
        /// Why the rollback failed.
        back: String,
    },
    /// The configuration was rejected.
    #[error("{0}\nthe last good configuration stays active")]
    NotReloaded(Box<EngineError>),
    /// A thread could not be started.
    #[error("cannot start a thread: {0}")]
    Thread(io::Error),
    /// The daemon is stopping.
    #[error("the daemon is stopping")]
    Stopping,
    /// The daemon is stopping, and has left a change unfinished.
    #[error(
        "the daemon is stopping, and the change is unfinished; the next start reconciles the \
         kernel's maps with the files and the saved runtime entries"
    )]
    Interrupted,
}

/// Refuses a request.
pub(super) fn refused<T>(why: impl Into<String>) -> Result<T, EngineError> {
    Err(EngineError::Refused(why.into()))
}

impl From<DatapathError> for EngineError {
    /// Not `#[from]`: the error would become a source, and its text would appear twice.
    fn from(error: DatapathError) -> Self {
        Self::Kernel(error)
    }
}

impl From<Stopped> for EngineError {
    fn from(_: Stopped) -> Self {
        Self::Interrupted
    }
}

impl EngineError {
    /// The errno of the kernel's answer, if that is the cause.
    #[must_use]
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::Kernel(error) | Self::Undone(error) => error.errno(),
            Self::OutOfSync { cause, .. } => cause.errno(),
            Self::Statistics(error) => error.errno(),
            Self::Unsaved(error) | Self::Thread(error) => error.raw_os_error(),
            Self::NotReloaded(error) => error.errno(),
            _ => None,
        }
    }

    /// Whether the request is at fault, not the host.
    #[must_use]
    pub fn is_refusal(&self) -> bool {
        match self {
            Self::Refused(_) | Self::Config(_) | Self::Policies(_) | Self::Save(_) => true,
            Self::NotReloaded(error) => error.is_refusal(),
            _ => false,
        }
    }

    /// Whether the change was interrupted because the daemon is stopping.
    #[must_use]
    pub fn is_interrupted(&self) -> bool {
        match self {
            Self::Interrupted | Self::Kernel(DatapathError::Stopped) => true,
            Self::NotReloaded(error) => error.is_interrupted(),
            _ => false,
        }
    }
}

/// The error in words, where the errno has a meaning of its own here.
fn in_words(error: &DatapathError) -> String {
    match error {
        // "Argument list too long" (`__cgroup_bpf_attach()`, 6.12).
        DatapathError::Attach { cgroup, cause } if cause.errno() == Some(libc::E2BIG) => format!(
            "cannot attach to {}: {MAX_PROGRAMS} programs are attached there, the kernel's limit; detach one that is \
             not needed (see rto-agent doctor), or set [agent] cgroup to another one",
            printable::path(cgroup)
        ),
        other => other.to_string(),
    }
}

fn lines(errors: &[PolicyError]) -> String {
    let lines: Vec<String> = errors.iter().map(ToString::to_string).collect();
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn denied() -> io::Error {
        io::Error::from_raw_os_error(libc::EACCES)
    }

    fn kernel() -> DatapathError {
        DatapathError::PinDir {
            path: "/sys/fs/bpf".into(),
            cause: denied(),
        }
    }

    /// A reload's error exposes its cause, to callers that use the errno or distinguish client and
    /// server errors.
    #[test]
    fn reload_error_has_class_of_its_cause() {
        type Case = (fn() -> EngineError, [bool; 3]);
        let errors: [Case; 8] = [
            (|| EngineError::Kernel(kernel()), [true, false, false]),
            (|| EngineError::Undone(kernel()), [true, false, false]),
            (
                || EngineError::Statistics(kernel().into()),
                [true, false, false],
            ),
            (|| EngineError::Unsaved(denied()), [true, false, false]),
            (
                || EngineError::Refused("no".to_owned()),
                [false, true, false],
            ),
            (|| EngineError::Policies(Vec::new()), [false, true, false]),
            (|| EngineError::Interrupted, [false, false, true]),
            (
                || EngineError::Kernel(DatapathError::Stopped),
                [false, false, true],
            ),
        ];
        for (error, is) in errors {
            for error in [error(), EngineError::NotReloaded(Box::new(error()))] {
                let (errno, [kernel, refusal, interrupted]) = (error.errno(), is);
                assert_eq!(errno, kernel.then_some(libc::EACCES), "{error:?}");
                assert_eq!(error.is_refusal(), refusal, "{error:?}");
                assert_eq!(error.is_interrupted(), interrupted, "{error:?}");
            }
        }
        let undone = EngineError::OutOfSync {
            cause: kernel(),
            undo: DatapathError::Stopped,
            state: String::new(),
        };
        assert_eq!(undone.errno(), Some(libc::EACCES));
        assert!(!undone.is_refusal());
    }
}
