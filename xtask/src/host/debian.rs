//! A minimal Debian with systemd as PID 1 in a virtual machine, and the checks that run in it.

use std::{
    fs,
    os::unix::fs::{PermissionsExt as _, symlink},
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, bail};

use super::Checks;
use crate::{
    arch::Arch,
    ebpf::sha256,
    process::{apt_install, as_root, have, is_root},
    root, tools,
    vm::{
        image, kernels,
        machine::{Clock, Machine},
    },
};

/// The release of Debian. Its C library must not be older than the C library that the agent is linked with.
const SUITE: &str = "bookworm";
const ARCHIVE: &str = "http://deb.debian.org/debian";
/// The directory of units.
pub(crate) const UNITS: &str = "etc/systemd/system";
/// Directories that the machine does not need; its file system is in memory.
const UNREAD: [&str; 7] = [
    "usr/share/doc",
    "usr/share/man",
    "usr/share/locale",
    "usr/share/i18n",
    "usr/share/zoneinfo",
    "var/cache/apt",
    "var/lib/apt",
];

const CHECK_UNIT: &str = "[Unit]
Description=Checks of the service
[Service]
Type=oneshot
ExecStart=/usr/local/lib/checks.sh
";
/// Starts the checks after the boot, not as a part of it.
const CHECK_TIMER: &str = "[Unit]
Description=Checks after the boot
[Timer]
OnStartupSec=1s
Unit=checks.service
[Install]
WantedBy=timers.target
";

/// The system; files are added to it before it boots.
pub(crate) struct Debian {
    /// The minimal system, as an archive.
    base: PathBuf,
    /// The directory of added files.
    dir: tempfile::TempDir,
}

/// Boot options.
pub(crate) struct Boot<'a> {
    /// The kernel's name in `--kernel`.
    pub(crate) kernel: &'a str,
    /// The first program.
    pub(crate) init: &'a str,
    pub(crate) clock: Clock,
    pub(crate) memory_mib: u32,
    /// A raw image: `/dev/vda`.
    pub(crate) disk: Option<&'a Path>,
    /// The argument of QEMU's `-nic`; without it there is no network.
    pub(crate) network: Option<&'a str>,
    pub(crate) limit: Duration,
}

impl Debian {
    /// A system with these packages (comma-separated) in addition to the minimal base.
    pub(crate) fn new(packages: &str) -> anyhow::Result<Self> {
        fs::create_dir_all(root().join("target/vm"))?;
        Ok(Self {
            base: base(packages)?,
            dir: tempfile::tempdir_in(root().join("target/vm"))?,
        })
    }

    /// The directory of added files.
    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Boots the system and runs these checks, after `lib.sh`.
    pub(crate) fn run(
        &self,
        checks: &str,
        boot: &Boot<'_>,
        results: &mut Checks,
    ) -> anyhow::Result<()> {
        let kernel = kernels::named(boot.kernel)?
            .pop()
            .context("which kernel?")?;
        let kernel = kernels::unpacked(kernel, false)?;
        system(self.dir(), &script(checks))?;
        let added = packed(self.dir(), &kernel)?;
        // The kernel unpacks consecutive archives into one file system.
        let image = tempfile::NamedTempFile::new_in(root().join("target/vm"))?.into_temp_path();
        let mut both = fs::File::create(&image)?;
        for part in [&self.base, &added.to_path_buf()] {
            std::io::copy(&mut fs::File::open(part)?, &mut both)?;
        }
        let machine = Machine {
            arch: Arch::Amd64,
            kernel: &kernel.image,
            initramfs: &image,
            disk: boot.disk,
            network: boot.network,
            clock: boot.clock,
            processors: 2,
            memory_mib: boot.memory_mib,
            command_line: &format!(
                "rdinit={} systemd.show_status=0 systemd.unified_cgroup_hierarchy=1",
                boot.init
            ),
            limit: boot.limit,
        };
        println!("booting Linux {} with systemd", kernel.version);
        results.boot(&machine)
    }
}

/// The checks, with the functions that they call.
pub(crate) fn script(checks: &str) -> String {
    format!("{}\n{checks}", include_str!("lib.sh"))
}

/// The minimal Debian as an archive, which is made only once.
fn base(packages: &str) -> anyhow::Result<PathBuf> {
    let hash = sha256(format!("{ARCHIVE} {SUITE} {packages} {UNREAD:?}").as_bytes());
    let cache = tools::cache()?.join("debian");
    let image = cache.join(format!("{SUITE}-{}.cpio.gz", &hash[..12]));
    if image.exists() {
        return Ok(image);
    }
    if !have("debootstrap") {
        apt_install(&["debootstrap"], "a host with systemd")?;
    }
    kernels::install_keyring()?;
    if !is_root() {
        bail!(
            "debootstrap needs root the first time: sudo env PATH=\"$PATH\" HOME=\"$HOME\" cargo xtask ..."
        );
    }
    println!("debootstrap {SUITE} with {packages}");
    fs::create_dir_all(&cache)?;
    let dir = tempfile::tempdir_in(&cache)?;
    let top = dir.path().join("root");
    let log = dir.path().join("log");
    let status = as_root("debootstrap")
        .args(["--variant=minbase", "--force-check-gpg"])
        .arg(format!("--keyring={}", kernels::KEYRING))
        .args([&format!("--include={packages}"), SUITE])
        .arg(&top)
        .arg(ARCHIVE)
        .stdout(fs::File::create(&log)?)
        .status()?;
    if !status.success() {
        bail!("debootstrap: {status}\n{}", fs::read_to_string(&log)?);
    }
    for below in UNREAD {
        let path = top.join(below);
        if path.exists() {
            fs::remove_dir_all(&path)?;
        }
    }
    let unfinished = dir.path().join("image");
    image::pack(&top, &unfinished)?;
    fs::rename(&unfinished, &image)?;
    Ok(image)
}

/// Adds the checks, and the files that the system needs to boot into them.
fn system(top: &Path, checks: &str) -> anyhow::Result<()> {
    write(&top.join(UNITS).join("checks.service"), CHECK_UNIT)?;
    write(&top.join(UNITS).join("checks.timer"), CHECK_TIMER)?;
    enable(top, "timers.target", "checks.timer")?;
    write_program(&top.join("usr/local/lib/checks.sh"), checks)?;
    write(&top.join("etc/hostname"), "rto-agent-checks\n")?;
    // Without this file systemd assumes a first boot, and asks questions.
    write(
        &top.join("etc/machine-id"),
        "0123456789abcdef0123456789abcdef\n",
    )?;
    write(&top.join("etc/fstab"), "# The file system is in memory.\n")
}

/// Enables a unit as `systemctl enable` does.
pub(crate) fn enable(top: &Path, target: &str, unit: &str) -> anyhow::Result<()> {
    let dir = top.join(UNITS).join(format!("{target}.wants"));
    fs::create_dir_all(&dir)?;
    Ok(symlink(
        Path::new("/").join(UNITS).join(unit),
        dir.join(unit),
    )?)
}

/// The archive of these files and the kernel's modules.
fn packed(top: &Path, kernel: &kernels::Unpacked) -> anyhow::Result<tempfile::TempPath> {
    // usr/lib: Debian's /lib is a link.
    let modules = top.join("usr/lib/modules");
    symlink("usr/lib", top.join("lib"))?;
    image::modules(kernel, top, &modules)?;
    fs::remove_file(top.join("lib"))?;
    let archive = tempfile::NamedTempFile::new_in(root().join("target/vm"))?.into_temp_path();
    image::pack(top, &archive)?;
    Ok(archive)
}

pub(crate) fn write(path: &Path, text: &str) -> anyhow::Result<()> {
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent)?;
    }
    fs::write(path, text).with_context(|| path.display().to_string())
}

/// Writes an executable script.
pub(crate) fn write_program(path: &Path, text: &str) -> anyhow::Result<()> {
    write(path, text)?;
    Ok(fs::set_permissions(
        path,
        fs::Permissions::from_mode(0o755),
    )?)
}
