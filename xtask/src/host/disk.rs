//! A disk for data that must survive a reboot; all other files of the machine are in memory.

use std::{os::unix::fs::symlink, path::Path};

use super::debian::{UNITS, enable, write, write_program};
use crate::{root, vm::image};

/// Mounts the disk before services start.
const UNIT: &str = "[Unit]
Description=The disk
DefaultDependencies=no
Before=local-fs.target
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/usr/local/lib/disk.sh
";
pub(super) const KEEP: &str = "#!/bin/bash -e
modprobe virtio_pci || true
modprobe virtio_blk
mkdir -p /kept /var/lib/rto-agent
is_blank() { [[ $(head -c 1M /dev/vda | tr -d '\\0' | wc -c) == 0 ]]; }
if is_blank; then
  mke2fs -q -t ext4 /dev/vda
  mount -t ext4 /dev/vda /kept
  cp -a /etc/rto-agent /kept/etc
  mkdir /kept/lib
else
  mount -t ext4 /dev/vda /kept
fi
mount --bind /kept/etc /etc/rto-agent
mount --bind /kept/lib /var/lib/rto-agent
";
/// Bytes of the disk.
const DISK: u64 = 64 << 20;

/// Creates an empty disk, and adds the unit that mounts it to the system.
pub(super) fn add(top: &Path) -> anyhow::Result<tempfile::TempPath> {
    mount(top, KEEP)?;
    let disk = tempfile::NamedTempFile::new_in(root().join("target/vm"))?;
    disk.as_file().set_len(DISK)?;
    Ok(disk.into_temp_path())
}

/// Adds the unit that mounts the disk early in the boot with this script.
pub(crate) fn mount(top: &Path, script: &str) -> anyhow::Result<()> {
    modprobe(top)?;
    write_program(&top.join("usr/local/lib/disk.sh"), script)?;
    write(&top.join(UNITS).join("disk.service"), UNIT)?;
    enable(top, "local-fs.target", "disk.service")
}

/// Adds modprobe, which Debian's minimal base lacks; the kernel calls it as well.
fn modprobe(top: &Path) -> anyhow::Result<()> {
    image::copy(Path::new(image::BUSYBOX), &top.join("usr/sbin/busybox"))?;
    Ok(symlink("busybox", top.join("usr/sbin/modprobe"))?)
}
