//! `cargo xtask setup`: installs system packages for tests and the demo.

use std::{fs, path::Path};

use crate::process::{apt_install, as_root, have, run as run_command};

/// Renders the lab's reports; a download of 100 MB, without a window system.
const BROWSER: &str = "chromium-headless-shell";
/// A program, and the Debian package it comes in.
const PROGRAMS: [(&str, &str); 10] = [
    ("ip", "iproute2"),
    ("nft", "nftables"),
    ("tcpdump", "tcpdump"),
    ("bpftool", "bpftool"),
    ("setpriv", "util-linux"),
    ("systemd-analyze", "systemd"),
    ("zsh", "zsh"),
    ("fish", "fish"),
    ("promtool", "prometheus"),
    (BROWSER, BROWSER),
];

/// Announces and installs missing packages, and mounts the BPF file system.
pub(crate) fn run() -> anyhow::Result<()> {
    let mut packages: Vec<&str> = PROGRAMS
        .iter()
        .filter(|(program, _)| !have(program))
        .map(|(_, package)| *package)
        .collect();
    if packages.contains(&"bpftool") && is_ubuntu() {
        // Ubuntu keeps bpftool among the kernel's tools.
        packages.retain(|package| *package != "bpftool");
        packages.extend(["linux-tools-common", "linux-tools-generic"]);
    }
    if is_ubuntu() {
        // Ubuntu has no such package: the test that needs it is ignored there.
        packages.retain(|package| *package != BROWSER);
    }
    if !packages.is_empty() {
        apt_install(&packages, "tests and demo")?;
    }
    mount_bpffs()
}

/// Installs a C compiler for BPF: the benchmarks compile the programs that the agent is compared with.
pub(crate) fn clang() -> anyhow::Result<()> {
    if have("clang-19") || have("clang") {
        return Ok(());
    }
    apt_install(&["clang-19"], "C programs that the agent is compared with")
}

fn is_ubuntu() -> bool {
    fs::read_to_string("/etc/os-release").is_ok_and(|text| text.lines().any(|l| l == "ID=ubuntu"))
}

fn mount_bpffs() -> anyhow::Result<()> {
    let mounts = fs::read_to_string("/proc/self/mounts")?;
    let mounted = mounts
        .lines()
        .any(|line| line.split(' ').nth(2) == Some("bpf"));
    if mounted || !Path::new("/sys/fs/bpf").is_dir() {
        return Ok(());
    }
    println!("mounting the BPF file system at /sys/fs/bpf");
    run_command(as_root("mount").args(["-t", "bpf", "bpf", "/sys/fs/bpf"]))
}
