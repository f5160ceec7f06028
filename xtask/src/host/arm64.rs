//! Runs the arm64 binary on an arm64 kernel.

use std::{fs, path::Path};

use super::{Checks, debian::LIMIT};
use crate::{
    arch::Arch,
    process::need,
    vm::{
        image::{self, copy, write},
        kernels,
        machine::Machine,
    },
};

/// Boots a machine whose only programs are busybox and the agent from these packages.
pub(super) fn run(stage: &Path) -> anyhow::Result<()> {
    let qemu = ("qemu-system-aarch64", "qemu-system-arm");
    need(&[qemu], "an arm64 machine")?;
    let kernel = kernels::arm64()?;
    let dir = image::directory()?;
    let top = dir.path();
    for name in ["proc", "sys", "dev", "run", "tmp"] {
        fs::create_dir_all(top.join(name))?;
    }
    let busybox = kernels::debian("busybox-static", Arch::Arm64)?;
    copy(&busybox.join("bin/busybox"), &top.join("bin/busybox"))?;
    copy(&stage.join("rto-agent"), &top.join("usr/sbin/rto-agent"))?;
    let config = stage.join("config.toml");
    copy(&config, &top.join("etc/rto-agent/config.toml"))?;
    write(&top.join("etc/group"), "root:x:0:\n")?;
    let initramfs = image::archive(&dir, include_str!("arm64.sh"))?;
    let machine = Machine {
        arch: Arch::Arm64,
        processors: 1,
        memory_mib: 1024,
        ..Machine::new(&kernel.image, &initramfs, LIMIT)
    };
    println!("booting Linux {}", kernel.version);
    Checks::default().boot(&machine)
}
