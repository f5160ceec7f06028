//! A minimal Debian with systemd as PID 1 in a virtual machine, and the checks that run in it.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::ensure;

use crate::{
    ebpf::sha256,
    process::{command, is_root, need, run as run_command},
    tools::cached,
    vm::{
        image::{self, write, write_program},
        kernels::{KEYRING, Unpacked},
        machine::Machine,
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

/// The kernel of these systems, as `--kernel` of other commands names it.
pub(crate) const KERNEL: &str = "6.12";
/// Time after which a machine is stopped.
pub(super) const LIMIT: Duration = Duration::from_secs(3600);
/// The boot does not wait for the end of the checks, which wait for the boot.
const CHECK_UNIT: &str = "[Unit]
Description=Checks of the service
[Service]
Type=exec
ExecStart=/usr/local/lib/checks.sh
";

/// The system; files are added to it before it boots.
pub(crate) struct Debian {
    /// The minimal system, as an archive.
    base: PathBuf,
    /// The directory of added files.
    dir: tempfile::TempDir,
}

impl Debian {
    /// A system with these packages (comma-separated) in addition to the minimal base.
    pub(crate) fn new(packages: &str) -> anyhow::Result<Self> {
        Ok(Self {
            base: base(packages)?,
            dir: image::directory()?,
        })
    }

    /// The directory of added files.
    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Packs the system, which runs these checks, after `lib.sh`, when it has booted.
    pub(crate) fn image(
        &self,
        kernel: &Unpacked,
        checks: &str,
    ) -> anyhow::Result<tempfile::TempPath> {
        let top = self.dir();
        system(top, &script(checks))?;
        // As in Debian.
        symlink("usr/lib", top.join("lib"))?;
        fs::create_dir_all(top.join("usr/lib"))?;
        image::modules(kernel, top)?;
        let added = image::pack(top)?;
        // The kernel unpacks consecutive archives into one file system.
        let mut both = image::file()?;
        for part in [self.base.as_path(), &added] {
            io::copy(&mut File::open(part)?, &mut both)?;
        }
        Ok(both.into_temp_path())
    }
}

/// A machine that boots such an image.
pub(crate) fn machine<'a>(kernel: &'a Unpacked, image: &'a Path) -> Machine<'a> {
    println!("booting Linux {} with systemd", kernel.version);
    Machine {
        command_line: "rdinit=/usr/local/lib/init systemd.show_status=0 systemd.unified_cgroup_hierarchy=1",
        ..Machine::new(&kernel.image, image, LIMIT)
    }
}

/// The checks, with the functions that they call.
pub(crate) fn script(checks: &str) -> String {
    format!("{}\n{checks}", include_str!("lib.sh"))
}

/// The minimal Debian as an archive, which is made only once.
fn base(packages: &str) -> anyhow::Result<PathBuf> {
    let hash = sha256(format!("{ARCHIVE} {SUITE} {packages} {UNREAD:?}").as_bytes());
    cached(&format!("debian/{SUITE}-{}.cpio", &hash[..12]), |image| {
        let debootstrap = ("debootstrap", "debootstrap");
        need(&[debootstrap, KEYRING], "a host with systemd")?;
        ensure!(
            is_root(),
            "debootstrap needs root the first time: sudo env PATH=\"$PATH\" HOME=\"$HOME\" cargo xtask ..."
        );
        println!("debootstrap {SUITE} with {packages}");
        let top = image.with_file_name("root");
        let debootstrap = "debootstrap --variant=minbase --force-check-gpg --keyring";
        let options = format!("{} --include={packages} {SUITE}", KEYRING.0);
        let mut debootstrap = command(&format!("{debootstrap}={options}"));
        run_command(debootstrap.arg(&top).arg(ARCHIVE))?;
        run_command(command("rm -rf").args(UNREAD).current_dir(&top))?;
        image::pack_into(&top, image)
    })
}

/// Adds the checks, and the files that the system needs to boot into them.
fn system(top: &Path, checks: &str) -> anyhow::Result<()> {
    write_program(&top.join("usr/local/lib/init"), include_str!("init.sh"))?;
    write(&top.join(UNITS).join("checks.service"), CHECK_UNIT)?;
    enable(top, "multi-user.target", "checks.service")?;
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
    let unit_file = Path::new("/").join(UNITS).join(unit);
    Ok(symlink(unit_file, dir.join(unit))?)
}
