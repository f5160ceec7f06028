//! The kernel; readers of snapshots learn of its changes.

use std::{ops::Deref, sync::Arc};

use super::{reconcile::Open, snapshot::Shared};
use crate::datapath::{DatapathError, Kernel, Options, Removed};

/// An open kernel. Anybody may read it; writes go through [`SharedKernel::change`].
pub(super) struct SharedKernel {
    kernel: Box<dyn Kernel>,
    shared: Arc<Shared>,
}

impl SharedKernel {
    /// Opens it, which may write already.
    pub(super) fn open(
        open: &Open,
        options: Options,
        shared: Arc<Shared>,
    ) -> Result<Self, DatapathError> {
        shared.begin();
        let kernel = open(options)?;
        Ok(Self { kernel, shared })
    }

    /// For a change of it, which begins with this and ends with the next snapshot.
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
