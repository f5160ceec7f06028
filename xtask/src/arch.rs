//! The architectures of a release.

/// An architecture.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Arch {
    /// x86-64.
    Amd64,
    /// `AArch64`.
    Arm64,
}

impl Arch {
    /// The architecture of this machine.
    pub(crate) fn host() -> Self {
        if cfg!(target_arch = "aarch64") {
            Self::Arm64
        } else {
            Self::Amd64
        }
    }

    /// The architecture's name in Debian and OCI.
    pub(crate) fn deb(self) -> &'static str {
        match self {
            Self::Amd64 => "amd64",
            Self::Arm64 => "arm64",
        }
    }

    /// The architecture's name in rpm, QEMU and the kernel.
    pub(crate) fn rpm(self) -> &'static str {
        match self {
            Self::Amd64 => "x86_64",
            Self::Arm64 => "aarch64",
        }
    }

    /// The Rust target of the static binary.
    pub(crate) fn target(self) -> String {
        format!("{}-unknown-linux-musl", self.rpm())
    }
}
