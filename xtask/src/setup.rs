//! `cargo xtask setup`: installs system packages for tests and the demo.

use std::{fs, path::Path};

use crate::process::{as_root, have, need, run as run_command};

/// Renders the lab's reports; a download of 100 MB, without a window system.
const BROWSER: &str = "chromium-headless-shell";
const BPFTOOL: &str = "bpftool";
/// A program, and the Debian package it comes in.
const PROGRAMS: [(&str, &str); 14] = [
    ("ip", "iproute2"),
    ("nft", "nftables"),
    ("tcpdump", "tcpdump"),
    (BPFTOOL, BPFTOOL),
    ("setpriv", "util-linux"),
    ("systemd-analyze", "systemd"),
    ("zsh", "zsh"),
    ("fish", "fish"),
    ("promtool", "prometheus"),
    ("nginx", "nginx-light"),
    ("apache2", "apache2-bin"),
    ("ping", "iputils-ping"),
    (BROWSER, BROWSER),
    (
        "/usr/lib/python3/dist-packages/grpc/__init__.py",
        "python3-grpcio",
    ),
];

/// Announces and installs missing packages, and mounts the BPF file system.
pub(crate) fn run() -> anyhow::Result<()> {
    let mut programs = PROGRAMS.to_vec();
    if is_ubuntu() {
        // Ubuntu has bpftool in the kernel's tools, and no browser in a package: the test that needs one is ignored.
        programs.retain(|(program, _)| ![BPFTOOL, BROWSER].contains(program));
        programs.extend(["linux-tools-common", "linux-tools-generic"].map(|name| (BPFTOOL, name)));
    }
    need(&programs, "tests and demo")?;
    mount_bpffs()
}

/// Installs a C compiler for BPF: the benchmarks compile the programs that the agent is compared with.
pub(crate) fn clang() -> anyhow::Result<()> {
    let program = if have("clang") { "clang" } else { "clang-19" };
    let why = "C programs that the agent is compared with";
    need(&[(program, "clang-19")], why)
}

fn is_ubuntu() -> bool {
    fs::read_to_string("/etc/os-release").is_ok_and(|text| text.lines().any(|l| l == "ID=ubuntu"))
}

fn mount_bpffs() -> anyhow::Result<()> {
    let mounts = fs::read_to_string("/proc/self/mounts")?;
    if mounts.contains(" bpf rw") || !Path::new("/sys/fs/bpf").is_dir() {
        return Ok(());
    }
    println!("mounting the BPF file system at /sys/fs/bpf");
    run_command(as_root("mount").args(["-t", "bpf", "bpf", "/sys/fs/bpf"]))
}
