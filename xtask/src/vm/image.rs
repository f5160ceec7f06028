//! The file system of a machine: an initramfs with busybox, the tests, the programs that they call, the libraries of
//! both, and the kernel's network modules.

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::{PermissionsExt as _, symlink},
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::Context as _;

use super::kernels::Unpacked;
use crate::{
    process::{find, have, run as run_command},
    root,
};

/// Programs that the tests call.
const PROGRAMS: [&str; 9] = [
    "ip", "ss", "nft", "tcpdump", "bpftool", "setpriv", "bash", "unshare", "nsenter",
];
/// Directories of the kernel's modules that machines may need.
const MODULES: [&str; 6] = [
    "kernel/net",
    "kernel/lib",
    "kernel/crypto",
    "kernel/drivers/net",
    "kernel/drivers/block",
    "kernel/drivers/virtio",
];
pub(crate) const BUSYBOX: &str = "/bin/busybox";
/// The directory of programs in the machine: tests search for programs above their own directory.
pub(crate) const PROGRAM_DIR: &str = "/t/debug";
/// Printed by the machine before the exit status of the tests.
pub(crate) const EXIT: &str = "vm-exit-status ";

/// The tests of a machine.
pub(crate) struct Tests<'a> {
    /// The directory of the programs they call.
    pub(crate) programs: &'a Path,
    /// The executable of the tests.
    pub(crate) integration: &'a Path,
    /// Only tests whose name contains one of these.
    pub(crate) filters: &'a [String],
    /// Excludes tests whose name contains one of these.
    pub(crate) left_out: &'a [&'a str],
    /// A kernel of Debian, which must have exactly the declared features.
    pub(crate) is_debian: bool,
}

/// Makes the machine's file system; returns an archive that is removed on drop.
pub(crate) fn initramfs(kernel: &Unpacked, tests: &Tests) -> anyhow::Result<tempfile::TempPath> {
    let built = tests.programs;
    let system = system(
        kernel,
        &[
            (built.join("rto-agent"), "rto-agent"),
            (built.join("rto-workload"), "rto-workload"),
            (built.join("rto-lab"), "rto-lab"),
            (tests.integration.to_owned(), "deps/integration"),
        ],
    )?;
    // Tests read them at the path of the build.
    let sources = system
        .path()
        .join(root().strip_prefix("/").unwrap_or(&root()));
    fs::create_dir_all(sources.join("tests"))?;
    run_command(
        Command::new("cp")
            .arg("-r")
            .args([
                root().join("systemd"),
                root().join("config"),
                root().join("docs"),
            ])
            .arg(&sources),
    )?;
    archive(&system, &test_script(tests))
}

/// A file system without a first program, with everything that the tests and the agent call; removed on drop. Each of
/// these programs gets its name below [`PROGRAM_DIR`].
pub(crate) fn system(
    kernel: &Unpacked,
    programs: &[(PathBuf, &str)],
) -> anyhow::Result<tempfile::TempDir> {
    let dir = tempfile::tempdir_in(root().join("target/vm"))?;
    let top = dir.path();
    for name in [
        "bin", "sbin", "proc", "sys", "dev", "etc", "run", "tmp", "root", "usr/sbin",
    ] {
        fs::create_dir_all(top.join(name))?;
    }
    let mut libraries = BTreeSet::new();
    for program in PROGRAMS {
        let found = find(program).with_context(|| format!("{program} is not installed"))?;
        copy(&found, &top.join("usr/sbin").join(program))?;
        libraries.extend(needed(&found)?);
    }
    for (from, name) in programs {
        let to = top.join(PROGRAM_DIR.trim_start_matches('/')).join(name);
        copy(from, &to)?;
        strip(&to)?;
        libraries.extend(needed(from)?);
    }
    for library in libraries {
        let below = library.strip_prefix("/").unwrap_or(&library);
        copy(&library, &top.join(below))?;
    }
    copy(Path::new(BUSYBOX), &top.join("bin/busybox"))?;
    symlink("/bin/busybox", top.join("sbin/modprobe"))?;
    modules(kernel, top, &top.join("lib/modules"))?;
    fs::write(
        top.join("etc/passwd"),
        "root:x:0:0::/root:/bin/sh\nnobody:x:65534:65534::/:/bin/sh\n",
    )?;
    fs::write(
        top.join("etc/group"),
        "root:x:0:\ndaemon:x:1:\nnogroup:x:65534:\n",
    )?;
    Ok(dir)
}

/// Packs a file system and adds the first program, which mounts and sets up the system, then runs this script, and
/// prints [`EXIT`] and the status. The archive is removed on drop.
pub(crate) fn archive(
    system: &tempfile::TempDir,
    script: &str,
) -> anyhow::Result<tempfile::TempPath> {
    let init = system.path().join("init");
    fs::write(&init, format!("{SET_UP}{script}poweroff -f\n"))?;
    fs::set_permissions(&init, fs::Permissions::from_mode(0o755))?;
    // A separate file, because two machines may have the same kernel.
    let image = tempfile::NamedTempFile::new_in(root().join("target/vm"))?.into_temp_path();
    pack(system.path(), &image)?;
    Ok(image)
}

/// The first lines of the first program.
const SET_UP: &str = "#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/usr/sbin:/bin:/sbin HOME=/root
export RTO_TESTS_REQUIRE_ROOT=1 RTO_TESTS_REPORT=1 RTO_TESTS_EMULATED=1 RUST_BACKTRACE=0
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/pts
mount -t devpts pts /dev/pts
mount -t tmpfs run /run
mount -t securityfs sec /sys/kernel/security
mount -t cgroup2 cg /sys/fs/cgroup
mount -t bpf bpf /sys/fs/bpf
mkdir -p /run/netns
dmesg -n 1
ip link set lo up
echo \"kernel $(uname -r), LSMs $(cat /sys/kernel/security/lsm)\"
";

fn test_script(tests: &Tests) -> String {
    let debian = if tests.is_debian {
        "export RTO_TESTS_DEBIAN_KERNEL=1"
    } else {
        ":"
    };
    let skip: Vec<String> = tests
        .left_out
        .iter()
        .map(|name| format!("--skip '{name}'"))
        .collect();
    // One thread, because the machine is slow.
    format!(
        "for module in veth tun nf_tables nft_limit nft_reject_inet; do modprobe $module; done
{debian}
status=0
for filter in {}; do
  {PROGRAM_DIR}/deps/integration --test-threads 1 --color never {} $filter 2>&1 || status=$?
done
head -1 /proc/stat
echo \"{EXIT}$status\"
",
        filters(tests.filters),
        skip.join(" "),
    )
}

/// The filters as words of the shell; without filters, an empty one, which every name contains.
fn filters(filters: &[String]) -> String {
    let quoted: Vec<String> = filters.iter().map(|f| format!("'{f}'")).collect();
    if quoted.is_empty() {
        "''".to_owned()
    } else {
        quoted.join(" ")
    }
}

/// Copies the kernel's modules, decompressed, and their index to a directory below `top`.
pub(crate) fn modules(kernel: &Unpacked, top: &Path, below: &Path) -> anyhow::Result<()> {
    let (from, to) = (&kernel.modules, below.join(&kernel.version));
    fs::create_dir_all(&to)?;
    for entry in fs::read_dir(from)?.flatten() {
        if entry.file_name().to_string_lossy().starts_with("modules.") {
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
            .arg(&kernel.version),
    )
}

/// Packs a directory into an initramfs.
pub(crate) fn pack(top: &Path, image: &Path) -> anyhow::Result<()> {
    let pack = format!(
        "find . | {BUSYBOX} cpio -o -H newc 2>/dev/null | gzip -1 > '{}'",
        image.display()
    );
    run_command(Command::new("sh").args(["-c", &pack]).current_dir(top))
}

pub(crate) fn copy(from: &Path, to: &Path) -> anyhow::Result<()> {
    if let Some(parent) = to.parent() {
        fs::create_dir_all(parent)?;
    }
    fs::copy(from, to).with_context(|| from.display().to_string())?;
    Ok(())
}

/// Removes debug information, nine tenths of a test program, if strip is installed.
pub(crate) fn strip(program: &Path) -> anyhow::Result<()> {
    if have("strip") {
        run_command(Command::new("strip").arg("--strip-debug").arg(program))?;
    }
    Ok(())
}

/// The shared libraries of a program and the loader; empty if it is static.
fn needed(program: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let listed = Command::new("ldd").arg(program).output()?;
    let text = String::from_utf8_lossy(&listed.stdout).into_owned();
    let paths = text
        .lines()
        .filter_map(|line| line.split_whitespace().find(|word| word.starts_with('/')));
    Ok(paths.map(PathBuf::from).collect())
}
