//! `cargo xtask vm`: integration tests on another kernel, in a small virtual machine.
//!
//! The machine is a Debian kernel and an initramfs made here: busybox, the tests with the programs
//! they call and the libraries these need, and the kernel's network modules. It has no network and
//! no disk. Unless KVM is asked for it is emulated in software: slow, so that tests of short timers may not
//! hold there; the ones that ask the kernel what it did do.

use std::{
    collections::BTreeSet,
    fs,
    io::{BufRead as _, BufReader, Write as _},
    os::unix::fs::{PermissionsExt as _, symlink},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use rto_tests::process::Guard;

use crate::{
    process::{apt_install, find, have, output, run as run_command},
    root, setup, test,
};

/// `cargo xtask vm`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Only tests whose name has this in it
    #[arg(default_value = DEFAULT_FILTER)]
    filter: String,
    /// The kernel: a version of the table in xtask/src/vm.rs
    #[arg(long, default_value = "6.12")]
    kernel: String,
    /// Seconds after which the machine is stopped
    #[arg(long, default_value_t = 600)]
    limit: u64,
    /// A kernel package that is unpacked already (dpkg-deb -x), instead of --kernel
    #[arg(long, value_name = "DIR")]
    unpacked: Option<PathBuf>,
    /// Use KVM (there are hosts that have it and on which it does not work)
    #[arg(long)]
    kvm: bool,
}

/// What no test on this host can show: accepted sockets on a kernel with BPF LSM.
const DEFAULT_FILTER: &str = "an_accepted_socket";

struct Kernel {
    version: &'static str,
    /// Debian's package that depends on the newest of this version.
    package: &'static str,
    /// BPF LSM programs at cgroups (6.0).
    lsm: bool,
}

const KERNELS: [Kernel; 2] = [
    Kernel {
        version: "6.1",
        package: "linux-image-cloud-amd64",
        lsm: true,
    },
    Kernel {
        version: "6.12",
        package: "linux-image-6.12-cloud-amd64",
        lsm: true,
    },
];

/// Programs that the tests call.
const PROGRAMS: [&str; 10] = [
    "ip", "ss", "nft", "tcpdump", "bpftool", "sysctl", "setpriv", "bash", "unshare", "nsenter",
];
/// Directories of the kernel's modules that the tests may need.
const MODULES: [&str; 4] = [
    "kernel/net",
    "kernel/lib",
    "kernel/crypto",
    "kernel/drivers/net",
];
const BUSYBOX: &str = "/bin/busybox";
/// What the machine prints before the tests' exit status.
const EXIT: &str = "vm-exit-status ";

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    setup::run()?;
    install()?;
    let known = KERNELS.iter().find(|k| k.version == args.kernel);
    let (package, has_lsm) = match (&args.unpacked, known) {
        (Some(dir), _) => (dir.clone(), false),
        (None, Some(kernel)) => (unpack(kernel)?, kernel.lsm),
        (None, None) => {
            let known: Vec<_> = KERNELS.iter().map(|k| k.version).collect();
            bail!("no kernel {}; known are {}", args.kernel, known.join(", "))
        }
    };
    test::build_programs()?;
    let integration = test::integration_binary()?;
    let image = initramfs(&package, &integration, has_lsm, &args.filter)?;
    let status = boot(&package, &image, args.kvm, Duration::from_secs(args.limit))?;
    if status != 0 {
        bail!("the tests in the virtual machine ended with status {status}");
    }
    Ok(())
}

fn install() -> anyhow::Result<()> {
    let mut packages = Vec::new();
    if !have("qemu-system-x86_64") {
        packages.extend(["qemu-system-x86", "seabios"]);
    }
    if !Path::new(BUSYBOX).exists() {
        packages.push("busybox-static");
    }
    if packages.is_empty() {
        return Ok(());
    }
    apt_install(&packages, "virtual machines")
}

/// Downloads the kernel's package (apt checks it against the signed index), unless it is there, and
/// unpacks it; the directory.
fn unpack(kernel: &Kernel) -> anyhow::Result<PathBuf> {
    let cache = root().join("target/vm");
    fs::create_dir_all(&cache)?;
    let depends = output(Command::new("apt-cache").args(["depends", kernel.package]))?;
    let package = depends
        .lines()
        .find_map(|line| line.trim().strip_prefix("Depends: "))
        .with_context(|| format!("apt knows no {}: run apt-get update", kernel.package))?
        .to_owned();
    let dir = cache.join(&package);
    if !dir.join("boot").exists() {
        println!("downloading {package}");
        let download = tempfile::tempdir_in(&cache)?;
        run_command(
            Command::new("apt-get")
                .args(["download", "-qq", &package])
                .current_dir(download.path()),
        )?;
        let archive = fs::read_dir(download.path())?
            .flatten()
            .find(|entry| entry.path().extension().is_some_and(|e| e == "deb"))
            .context("apt-get downloaded nothing")?;
        let unpacked = tempfile::tempdir_in(&cache)?;
        run_command(
            Command::new("dpkg-deb")
                .arg("-x")
                .arg(archive.path())
                .arg(unpacked.path()),
        )?;
        fs::rename(unpacked.keep(), &dir)?;
    }
    Ok(dir)
}

/// Makes the machine's file system; the archive's path.
fn initramfs(
    package: &Path,
    integration: &Path,
    has_lsm: bool,
    filter: &str,
) -> anyhow::Result<PathBuf> {
    let dir = tempfile::tempdir()?;
    let top = dir.path();
    for name in [
        "bin",
        "sbin",
        "proc",
        "sys",
        "dev",
        "etc",
        "run",
        "tmp",
        "root",
        "t/debug/deps",
        "usr/sbin",
    ] {
        fs::create_dir_all(top.join(name))?;
    }
    let mut libraries = BTreeSet::new();
    for program in PROGRAMS {
        let found = find(program).with_context(|| format!("{program} is not installed"))?;
        copy(&found, &top.join("usr/sbin").join(program))?;
        libraries.extend(needed(&found)?);
    }
    // Where the tests look for them: above their own directory.
    let built = root().join("target/debug");
    for (from, to) in [
        (built.join("rto-agent"), "t/debug/rto-agent"),
        (built.join("rto-traffic"), "t/debug/rto-traffic"),
        (built.join("rto-lab"), "t/debug/rto-lab"),
        (integration.to_owned(), "t/debug/deps/integration"),
    ] {
        copy(&from, &top.join(to))?;
        strip(&top.join(to))?;
        libraries.extend(needed(&from)?);
    }
    for library in libraries {
        let below = library.strip_prefix("/").unwrap_or(&library);
        copy(&library, &top.join(below))?;
    }
    copy(Path::new(BUSYBOX), &top.join("bin/busybox"))?;
    symlink("/bin/busybox", top.join("sbin/modprobe"))?;
    modules(package, top)?;
    // Read by tests, by the path they were built with.
    let sources = top.join(root().strip_prefix("/").unwrap_or(&root()));
    fs::create_dir_all(sources.join("tests"))?;
    run_command(
        Command::new("cp")
            .arg("-r")
            .arg(root().join("systemd"))
            .arg(&sources),
    )?;
    fs::write(
        top.join("etc/passwd"),
        "root:x:0:0::/root:/bin/sh\nnobody:x:65534:65534::/:/bin/sh\n",
    )?;
    fs::write(top.join("etc/group"), "root:x:0:\nnogroup:x:65534:\n")?;
    let init = top.join("init");
    fs::write(&init, init_script(has_lsm, filter))?;
    fs::set_permissions(&init, fs::Permissions::from_mode(0o755))?;
    let image = root().join("target/vm/initramfs.gz");
    let pack = format!(
        "find . | {BUSYBOX} cpio -o -H newc 2>/dev/null | gzip -1 > '{}'",
        image.display()
    );
    run_command(Command::new("sh").args(["-c", &pack]).current_dir(top))?;
    Ok(image)
}

fn init_script(has_lsm: bool, filter: &str) -> String {
    let expect = if has_lsm {
        "export RTO_TESTS_EXPECT_LSM=1"
    } else {
        ":"
    };
    // One thread: the machine is slow enough without tests beside each other.
    format!(
        "#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/usr/sbin:/bin:/sbin HOME=/root RTO_TESTS_REQUIRE_ROOT=1
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mount -t tmpfs run /run
mount -t tmpfs tmp /tmp
mount -t securityfs sec /sys/kernel/security
mount -t cgroup2 cg /sys/fs/cgroup
mount -t bpf bpf /sys/fs/bpf
mkdir -p /run/netns
dmesg -n 1
ip link set lo up
for module in veth tun nf_tables nft_limit; do modprobe $module; done
echo \"kernel $(uname -r), LSMs $(cat /sys/kernel/security/lsm)\"
{expect}
/t/debug/deps/integration --test-threads 1 '{filter}'
echo \"{EXIT}$?\"
poweroff -f
"
    )
}

/// The modules, decompressed, and their index.
fn modules(package: &Path, top: &Path) -> anyhow::Result<()> {
    let all = package.join("lib/modules");
    let version = fs::read_dir(&all)?
        .flatten()
        .next()
        .context("a kernel without modules")?
        .file_name();
    let (from, to) = (all.join(&version), top.join("lib/modules").join(&version));
    fs::create_dir_all(&to)?;
    for entry in fs::read_dir(&from)?.flatten() {
        if entry.file_type()?.is_file() {
            fs::copy(entry.path(), to.join(entry.file_name()))?;
        }
    }
    for dir in MODULES {
        if from.join(dir).exists() {
            let parent = to.join(dir);
            let parent = parent.parent().unwrap_or(&to);
            fs::create_dir_all(parent)?;
            run_command(Command::new("cp").arg("-r").arg(from.join(dir)).arg(parent))?;
        }
    }
    let decompress = format!("find . -name '*.ko.xz' -exec {BUSYBOX} unxz {{}} +");
    run_command(
        Command::new("sh")
            .args(["-c", &decompress])
            .current_dir(&to),
    )?;
    run_command(
        Command::new(BUSYBOX)
            .args(["depmod", "-b"])
            .arg(top)
            .arg(&version),
    )
}

fn copy(from: &Path, to: &Path) -> anyhow::Result<()> {
    if let Some(parent) = to.parent() {
        fs::create_dir_all(parent)?;
    }
    fs::copy(from, to).with_context(|| from.display().to_string())?;
    Ok(())
}

/// Debug information is nine tenths of a test program; without the tool it just takes longer.
fn strip(program: &Path) -> anyhow::Result<()> {
    if have("strip") {
        run_command(Command::new("strip").arg("--strip-debug").arg(program))?;
    }
    Ok(())
}

/// The libraries a program needs, and the loader; none if it is static.
fn needed(program: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let listed = Command::new("ldd").arg(program).output()?;
    let text = String::from_utf8_lossy(&listed.stdout).into_owned();
    let paths = text
        .lines()
        .filter_map(|line| line.split_whitespace().find(|word| word.starts_with('/')));
    Ok(paths.map(PathBuf::from).collect())
}

/// Boots, shows what the machine prints, and returns the tests' exit status.
fn boot(package: &Path, image: &Path, kvm: bool, limit: Duration) -> anyhow::Result<i32> {
    let kernel = fs::read_dir(package.join("boot"))?
        .flatten()
        .map(|entry| entry.path())
        .find(|path| {
            let name = path.file_name().unwrap_or_default();
            name.to_string_lossy().starts_with("vmlinuz-")
        })
        .context("a package without a kernel")?;
    let mut qemu = Command::new("qemu-system-x86_64");
    if kvm {
        qemu.args(["-accel", "kvm", "-cpu", "host"]);
    } else {
        qemu.args(["-accel", "tcg,thread=multi", "-cpu", "Nehalem"]);
    }
    qemu.args([
        "-nic",
        "none",
        "-m",
        "1024",
        "-smp",
        "2",
        "-nographic",
        "-no-reboot",
    ])
    .arg("-kernel")
    .arg(kernel)
    .arg("-initrd")
    .arg(image)
    .args(["-append", "console=ttyS0 quiet panic=-1"]);
    let mut machine = Guard(
        qemu.stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .context("qemu-system-x86_64")?,
    );
    let stdout = machine.0.stdout.take().context("no stdout")?;
    let (sender, lines) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        for line in BufReader::new(stdout).split(b'\n').map_while(Result::ok) {
            if sender.send(line).is_err() {
                return;
            }
        }
    });
    let end = Instant::now() + limit;
    let mut status = None;
    loop {
        match lines.recv_timeout(end.saturating_duration_since(Instant::now())) {
            Ok(line) => {
                let line = String::from_utf8_lossy(&line);
                let line = line.trim_end_matches('\r');
                println!("{line}");
                std::io::stdout().flush()?;
                if let Some(number) = line.strip_prefix(EXIT) {
                    status = Some(number.trim().parse()?);
                }
            }
            Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => break,
            Err(std::sync::mpsc::RecvTimeoutError::Timeout) => {
                bail!("the virtual machine was not done after {limit:?}")
            }
        }
    }
    status.context("the virtual machine ended without a result")
}
