//! A disk; all other files of a machine are in memory.

use std::{os::unix::fs::symlink, path::Path, process::Command};

use super::debian::{UNITS, enable};
use crate::{
    process::{find, need, run as run_command},
    vm::image::{self, write, write_program},
};

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
const MODPROBE: &str = "#!/bin/bash -e
modprobe virtio_pci || true
modprobe virtio_blk
";

/// Creates a disk of this many bytes, a sparse file, with the files of a directory. The system mounts it early in the
/// boot with this script.
pub(crate) fn add(
    top: &Path,
    files: &Path,
    bytes: u64,
    mount: &str,
) -> anyhow::Result<tempfile::TempPath> {
    need(&[("mke2fs", "e2fsprogs")], "the machine's disk")?;
    let disk = image::file()?;
    disk.as_file().set_len(bytes)?;
    let mut mke2fs = Command::new(find("mke2fs").unwrap_or_default());
    mke2fs.args(["-q", "-t", "ext4", "-d"]);
    run_command(mke2fs.args([files, disk.path()]))?;
    // Debian's minimal base lacks modprobe; the kernel calls it as well.
    image::copy(Path::new(image::BUSYBOX), &top.join("usr/sbin/busybox"))?;
    symlink("busybox", top.join("usr/sbin/modprobe"))?;
    let script = format!("{MODPROBE}{mount}");
    write_program(&top.join("usr/local/lib/disk.sh"), &script)?;
    write(&top.join(UNITS).join("disk.service"), UNIT)?;
    enable(top, "local-fs.target", "disk.service")?;
    Ok(disk.into_temp_path())
}
