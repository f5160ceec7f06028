//! A TUN device in a namespace.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd},
    process::Command,
};

use anyhow::Context as _;
use tun_rs::{DeviceBuilder, Layer, SyncDevice};

use crate::netns::inside;

/// The device; removed when dropped.
pub(super) struct Tun {
    device: SyncDevice,
    netns: String,
    name: String,
}

impl Tun {
    /// Creates a device without addresses; it is down.
    pub(super) fn new(netns: &str, name: &str) -> anyhow::Result<Self> {
        let device = inside(netns, || {
            let device = DeviceBuilder::new().name(name).layer(Layer::L3);
            let device = device.enable(false).build_sync()?;
            device.set_nonblocking(true)?;
            Ok(device)
        })
        .with_context(|| format!("the TUN device {name} cannot be made"))?;
        Ok(Self {
            device,
            netns: netns.to_owned(),
            name: name.to_owned(),
        })
    }

    /// Reads a packet; returns its length, or `None` if there is no packet.
    pub(super) fn receive(&self, buffer: &mut [u8]) -> io::Result<Option<usize>> {
        match self.device.recv(buffer) {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(None),
            length => length.map(Some),
        }
    }

    /// Writes a packet. It is lost if the device is down or its queue is full, as on any link.
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
        // The device would vanish with its last descriptor, but a child between fork and exec holds a copy of it.
        let _gone = Command::new("ip")
            .args(["-n", &self.netns, "link", "del", &self.name])
            .output();
    }
}
