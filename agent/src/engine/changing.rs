//! A kernel whose writes tell the readers of snapshots that it changes.

use std::sync::Arc;

use rto_agent_common::HostDefaults;

use super::{reconcile::Open, snapshot::Shared};
use crate::{
    datapath::{DatapathError, Found, Kernel, KernelReader, Options, Removed, events, walk},
    policy::plan::{MapState, Plan},
};

struct Changing {
    kernel: Box<dyn Kernel>,
    shared: Arc<Shared>,
}

/// Opens the same kernel; a change of it begins with its first write and ends with the next snapshot.
pub(super) fn told(open: Open, shared: Arc<Shared>) -> Open {
    Arc::new(move |options| {
        let shared = shared.clone();
        shared.begin();
        let kernel = open(options)?;
        Ok(Box::new(Changing { kernel, shared }))
    })
}

impl Kernel for Changing {
    fn options(&self) -> &Options {
        self.kernel.options()
    }

    fn found(&self) -> Found {
        self.kernel.found()
    }

    fn read(&self) -> Result<MapState, DatapathError> {
        self.kernel.read()
    }

    fn apply(
        &mut self,
        room: u32,
        current: &MapState,
        plan: &Plan,
        desired: &MapState,
    ) -> Result<bool, DatapathError> {
        self.shared.begin();
        self.kernel.apply(room, current, plan, desired)
    }

    fn attach(&mut self) -> Result<(), DatapathError> {
        self.shared.begin();
        self.kernel.attach()
    }

    fn reader(&self) -> Arc<dyn KernelReader> {
        self.kernel.reader()
    }

    fn set_host_defaults(&mut self, host: HostDefaults) -> Result<(), DatapathError> {
        self.shared.begin();
        self.kernel.set_host_defaults(host)
    }

    fn retry_statistics(&mut self) {
        if !self.kernel.reader().missing_stats().is_empty() {
            self.shared.begin();
            self.kernel.retry_statistics();
        }
    }

    fn restore_tables(&mut self) -> Result<(), DatapathError> {
        self.shared.begin();
        self.kernel.restore_tables()
    }

    fn events(&self) -> Result<(events::Reader, events::SynAcks), DatapathError> {
        self.kernel.events()
    }

    fn walker(&self, mode: walk::Mode) -> Result<walk::Walker, DatapathError> {
        self.kernel.walker(mode)
    }

    fn unlink(&mut self) -> Result<(), DatapathError> {
        self.shared.begin();
        self.kernel.unlink()
    }

    fn is_unlinked(&self) -> bool {
        self.kernel.is_unlinked()
    }

    fn detach(self: Box<Self>) -> Result<Removed, DatapathError> {
        self.shared.begin();
        self.kernel.detach()
    }
}
