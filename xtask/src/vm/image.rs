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
use tempfile::{NamedTempFile, TempDir, TempPath};

use super::kernels::Unpacked;
use crate::{
    process::{command, find, have, run as run_command, shell},
    root,
};

/// Programs that the tests call.
const PROGRAMS: [&str; 11] = [
    "ip", "ss", "nft", "tcpdump", "bpftool", "setpriv", "bash", "unshare", "nsenter", "prlimit",
    // That of busybox would call its own unshare(1).
    "sh",
];
/// Directories of the kernel's modules that machines may need.
const MODULES: &str = "kernel/net kernel/lib kernel/crypto kernel/drivers/net kernel/drivers/block \
                       kernel/drivers/virtio";
pub(crate) const BUSYBOX: &str = "/bin/busybox";
/// The directory of programs in the machine: tests search for programs above their own directory.
pub(crate) const PROGRAM_DIR: &str = "/t/debug";
/// Printed by the machine before the exit status of the tests.
pub(crate) const EXIT: &str = "vm-exit-status ";

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

/// The directory of images.
fn images() -> anyhow::Result<PathBuf> {
    let dir = root().join("target/vm");
    fs::create_dir_all(&dir)?;
    Ok(dir)
}

/// A directory for a file system; removed on drop.
pub(crate) fn directory() -> anyhow::Result<TempDir> {
    Ok(TempDir::new_in(images()?)?)
}

/// A file for an image, which no other machine uses; removed on drop.
pub(crate) fn file() -> anyhow::Result<NamedTempFile> {
    Ok(NamedTempFile::new_in(images()?)?)
}

/// A file system without a first program, with everything that the tests and the agent call. Each of these programs
/// gets its name below [`PROGRAM_DIR`].
pub(crate) fn system(kernel: &Unpacked, programs: &[(PathBuf, &str)]) -> anyhow::Result<TempDir> {
    let dir = directory()?;
    let top = dir.path();
    for name in ["proc", "sys", "dev", "run", "tmp", "root", "sbin", "mnt"] {
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
    add(top, &libraries)?;
    copy(Path::new(BUSYBOX), &top.join("bin/busybox"))?;
    symlink("/bin/busybox", top.join("sbin/modprobe"))?;
    modules(kernel, top)?;
    write(
        &top.join("etc/passwd"),
        "root:x:0:0::/root:/bin/sh\nnobody:x:65534:65534::/:/bin/sh\n",
    )?;
    write(
        &top.join("etc/group"),
        "root:x:0:\ndaemon:x:1:\nnogroup:x:65534:\n",
    )?;
    Ok(dir)
}

/// Packs a file system and adds the first program, which mounts and sets up the system, then runs this script.
pub(crate) fn archive(system: &TempDir, script: &str) -> anyhow::Result<TempPath> {
    let init = system.path().join("init");
    write_program(&init, &format!("{SET_UP}{script}poweroff -f\n"))?;
    pack(system.path())
}

/// Copies the kernel's modules, decompressed, and their index to a file system.
pub(crate) fn modules(kernel: &Unpacked, top: &Path) -> anyhow::Result<()> {
    let to = top.join("lib/modules").join(&kernel.version);
    fs::create_dir_all(&to)?;
    let exists = |dir: &&str| kernel.modules.join(dir).exists();
    run_command(
        shell("cp -r --parents -t \"$0\" modules.* \"$@\"")
            .arg(&to)
            .args(MODULES.split(' ').filter(exists))
            .current_dir(&kernel.modules),
    )?;
    let unxz = format!("find . -name *.ko.xz -exec {BUSYBOX} unxz {{}} +");
    run_command(command(&unxz).current_dir(&to))?;
    let depmod = format!("{BUSYBOX} depmod -b . {}", kernel.version);
    run_command(command(&depmod).current_dir(top))
}

/// Packs a directory into an initramfs.
pub(crate) fn pack(top: &Path) -> anyhow::Result<TempPath> {
    let image = file()?.into_temp_path();
    pack_into(top, &image)?;
    Ok(image)
}

pub(crate) fn pack_into(top: &Path, image: &Path) -> anyhow::Result<()> {
    // Not compressed: an emulated CPU takes longer to decompress it than this host to read it.
    let pack = format!(
        "find . | {BUSYBOX} cpio -o -H newc >'{}' 2>/dev/null",
        image.display()
    );
    run_command(shell(&pack).current_dir(top))
}

/// Copies these files, with the directories of their absolute paths, to a directory.
pub(crate) fn add<P: AsRef<Path>>(
    top: &Path,
    files: impl IntoIterator<Item = P>,
) -> anyhow::Result<()> {
    for file in files {
        let mut copy = command("cp -r --dereference --parents --target-directory");
        run_command(copy.args([top, file.as_ref()]))?;
    }
    Ok(())
}

pub(crate) fn copy(from: &Path, to: &Path) -> anyhow::Result<()> {
    create_parent(to)?;
    fs::copy(from, to).with_context(|| from.display().to_string())?;
    Ok(())
}

pub(crate) fn write(path: &Path, text: &str) -> anyhow::Result<()> {
    create_parent(path)?;
    fs::write(path, text).with_context(|| path.display().to_string())
}

/// Writes an executable script.
pub(crate) fn write_program(path: &Path, text: &str) -> anyhow::Result<()> {
    write(path, text)?;
    let mode = fs::Permissions::from_mode(0o755);
    Ok(fs::set_permissions(path, mode)?)
}

fn create_parent(path: &Path) -> anyhow::Result<()> {
    Ok(fs::create_dir_all(path.parent().context("a directory")?)?)
}

/// Removes debug information, nine tenths of a test program, if strip is installed.
pub(crate) fn strip(program: &Path) -> anyhow::Result<()> {
    if have("strip") {
        run_command(command("strip --strip-debug").arg(program))?;
    }
    Ok(())
}

/// The shared libraries of a program and the loader; empty if it is static.
pub(crate) fn needed(program: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let listed = Command::new("ldd").arg(program).output()?;
    let text = String::from_utf8_lossy(&listed.stdout).into_owned();
    let paths = text
        .lines()
        .filter_map(|line| line.split_whitespace().find(|word| word.starts_with('/')));
    Ok(paths.map(PathBuf::from).collect())
}
