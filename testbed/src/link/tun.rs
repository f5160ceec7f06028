//! A TUN device in a namespace.

use std::{
    fs::File,
    io,
    os::fd::{AsFd, BorrowedFd},
    panic,
    process::Command,
    thread,
};

use anyhow::Context as _;
use nix::sched::{CloneFlags, setns};
use tun_rs::{DeviceBuilder, Layer, SyncDevice};

/// The device; it vanishes when it is dropped.
pub(super) struct Tun {
    device: SyncDevice,
    netns: String,
    name: String,
}

impl Tun {
    /// Makes one, without address, and down.
    pub(super) fn new(netns: &str, name: &str) -> anyhow::Result<Self> {
        // A thread of its own, because the one that asks has to stay in its namespace.
        let device = thread::scope(|scope| {
            scope
                .spawn(|| -> anyhow::Result<SyncDevice> {
                    let namespace = File::open(format!("/run/netns/{netns}"))?;
                    setns(namespace, CloneFlags::CLONE_NEWNET)?;
                    let device = DeviceBuilder::new().name(name).layer(Layer::L3);
                    let device = device.enable(false).build_sync()?;
                    device.set_nonblocking(true)?;
                    Ok(device)
                })
                .join()
                .unwrap_or_else(|panic| panic::resume_unwind(panic))
        })
        .with_context(|| format!("the TUN device {name} in {netns} cannot be made"))?;
        Ok(Self {
            device,
            netns: netns.to_owned(),
            name: name.to_owned(),
        })
    }

    /// The next packet's length, if there is one.
    pub(super) fn receive(&self, buffer: &mut [u8]) -> io::Result<Option<usize>> {
        match self.device.recv(buffer) {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(None),
            length => length.map(Some),
        }
    }

    /// Lost if the device is down or its queue full, as on any link.
    pub(super) fn send(&self, packet: &[u8]) -> bool {
        self.device.send(packet).is_ok()
    }
}

impl AsFd for Tun {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.device.as_fd()
    }
}

impl Drop for Tun {
    fn drop(&mut self) {
        // It would go with its last descriptor, but a child that has just been forked has that as well
        // until it execs.
        let _gone = Command::new("ip")
            .args(["-n", &self.netns, "link", "del", &self.name])
            .output();
    }
}
