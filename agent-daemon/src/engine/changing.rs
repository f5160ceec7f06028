//! The kernel, with its changes announced to readers of snapshots.

use std::{ops::Deref, sync::Arc};

use rto_agent_core::wire::kernel::Removed;
use rto_agent_kernel::datapath::{DatapathError, Kernel, Options};

use super::snapshot::Shared;

/// Opens the kernel.
pub type Open = Arc<dyn Fn(Options) -> Result<Box<dyn Kernel>, DatapathError> + Send + Sync>;

/// An open kernel. Reads are free; writes go through [`SharedKernel::change`].
pub(super) struct SharedKernel {
    kernel: Box<dyn Kernel>,
    shared: Arc<Shared>,
}

impl SharedKernel {
    /// Opens the kernel. Opening may already write.
    pub(super) fn open(
        open: &Open,
        options: Options,
        shared: Arc<Shared>,
    ) -> Result<Self, DatapathError> {
        shared.begin();
        let kernel = open(options)?;
        Ok(Self { kernel, shared })
    }

    /// Begins a change, which ends with the next snapshot.
    pub(super) fn change(&mut self) -> &mut dyn Kernel {
        self.shared.begin();
        self.kernel.as_mut()
    }

    /// See [`Kernel::detach`].
    pub(super) fn detach(self) -> Result<Removed, DatapathError> {
        self.shared.begin();
        self.kernel.detach()
    }
}

impl Deref for SharedKernel {
    type Target = dyn Kernel;

    fn deref(&self) -> &Self::Target {
        self.kernel.as_ref()
    }
}
