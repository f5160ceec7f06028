//! Runs the arm64 binary on an arm64 kernel.

use std::{fs, path::Path, time::Duration};

use super::{
    Checks,
    debian::{write, write_program},
};
use crate::{
    arch::Arch,
    process::{apt_install, have},
    root,
    vm::{
        image, kernels,
        machine::{Clock, Machine},
    },
};

const INIT: &str = include_str!("arm64.sh");

/// Boots a machine whose only programs are busybox and the agent from these packages.
pub(super) fn run(stage: &Path, limit: Duration) -> anyhow::Result<()> {
    if !have("qemu-system-aarch64") {
        apt_install(&["qemu-system-arm"], "an arm64 machine")?;
    }
    let kernel = kernels::unpacked(&kernels::ARM64, false)?;
    let dir = tempfile::tempdir_in(root().join("target/vm"))?;
    let top = dir.path();
    for name in ["proc", "sys", "dev", "run", "tmp"] {
        fs::create_dir_all(top.join(name))?;
    }
    image::copy(
        &kernels::debian("busybox-static", Arch::Arm64)?.join("bin/busybox"),
        &top.join("bin/busybox"),
    )?;
    image::copy(&stage.join("rto-agent"), &top.join("usr/bin/rto-agent"))?;
    image::copy(
        &stage.join("config.toml"),
        &top.join("etc/rto-agent/config.toml"),
    )?;
    write(&top.join("etc/group"), "root:x:0:\n")?;
    write_program(&top.join("init"), INIT)?;
    let initramfs = tempfile::NamedTempFile::new_in(root().join("target/vm"))?.into_temp_path();
    image::pack(top, &initramfs)?;
    let machine = Machine {
        arch: Arch::Arm64,
        kernel: &kernel.image,
        initramfs: &initramfs,
        disk: None,
        network: None,
        clock: Clock::Instructions,
        processors: 1,
        memory_mib: 1024,
        command_line: "",
        limit,
    };
    println!("booting Linux {}", kernel.version);
    Checks::default().boot(&machine)
}
