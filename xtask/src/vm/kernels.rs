//! Debian's kernels, downloaded by an apt with its own configuration, and unpacked.
//!
//! A security update replaces a package in the archive, so no hash can be pinned here. Instead the newest package of a
//! series is used, and apt verifies its SHA-256 against the index signed with Debian's keys.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::Context as _;

use crate::{
    arch::Arch,
    process::{command, need, output, run as run_command},
    tools::{self, cached},
};

/// A kernel that the tests run on.
#[derive(Debug)]
pub(crate) struct Kernel {
    /// The name in `--kernel`.
    pub(crate) name: &'static str,
    /// The beginning of its releases; empty for the newest kernel of any series.
    series: &'static str,
    /// The archive and the suite.
    source: &'static str,
    /// The package that depends on the newest kernel of the series.
    package: &'static str,
}

const BULLSEYE: &str = "http://deb.debian.org/debian-security bullseye-security";
const BOOKWORM: &str = "http://deb.debian.org/debian-security bookworm-security";
const SID: &str = "http://deb.debian.org/debian sid";
/// The source of other packages.
const PACKAGES: &str = "http://deb.debian.org/debian bookworm";
/// Debian's keys, and the package that has them.
pub(crate) const KEYRING: (&str, &str) = (
    "/usr/share/keyrings/debian-archive-keyring.gpg",
    "debian-archive-keyring",
);
/// Prefix of the names of kernel packages.
const PACKAGE: &str = "linux-image-";

impl Kernel {
    const fn new(
        name: &'static str,
        series: &'static str,
        source: &'static str,
        package: &'static str,
    ) -> Self {
        Self {
            name,
            series,
            source,
            package,
        }
    }

    /// The index in [`KERNELS`] of the kernel with this release. The newest one is the last, and has any release.
    pub(super) fn index_of(release: &str) -> usize {
        let is_of = |kernel: &Self| release.starts_with(kernel.series);
        KERNELS.iter().position(is_of).unwrap_or(KERNELS.len())
    }
}

/// The kernels of the matrix.
pub(crate) const KERNELS: [Kernel; 4] = [
    Kernel::new("5.10", "5.10.", BULLSEYE, "linux-image-cloud-amd64"),
    Kernel::new("6.1", "6.1.", BOOKWORM, "linux-image-cloud-amd64"),
    Kernel::new("6.12", "6.12.", BOOKWORM, "linux-image-6.12-cloud-amd64"),
    Kernel::new("newest", "", SID, "linux-image-cloud-amd64"),
];

/// The kernel with this name in `--kernel`.
pub(crate) fn named(name: &str, refresh: bool) -> anyhow::Result<Unpacked> {
    let known = KERNELS.map(|kernel| kernel.name).join(", ");
    let kernel = KERNELS.iter().find(|kernel| kernel.name == name);
    let kernel = kernel.with_context(|| format!("no kernel {name}; known are {known}"))?;
    unpacked(kernel, Arch::Amd64, refresh)
}

/// A kernel of another architecture.
pub(crate) fn arm64() -> anyhow::Result<Unpacked> {
    let package = "linux-image-6.12-cloud-arm64";
    let kernel = Kernel::new("6.12-arm64", "6.12.", BOOKWORM, package);
    unpacked(&kernel, Arch::Arm64, false)
}

pub(crate) struct Unpacked {
    /// The kernel's release.
    pub(crate) version: String,
    /// The file of the kernel.
    pub(crate) image: PathBuf,
    /// The directory of its modules.
    pub(crate) modules: PathBuf,
}

impl Unpacked {
    /// The kernel in a directory where its packages were unpacked (dpkg-deb -x).
    pub(crate) fn at(dir: &Path) -> anyhow::Result<Self> {
        let all = ["lib/modules", "usr/lib/modules"].map(|below| dir.join(below));
        let modules = all
            .iter()
            .filter_map(|all| fs::read_dir(all).ok())
            .find_map(|mut all| all.next()?.ok())
            .with_context(|| format!("{}: a kernel without modules", dir.display()))?;
        let version = modules.file_name().to_string_lossy().into_owned();
        let modules = modules.path();
        // Since 7.0 Debian ships the kernel next to its modules.
        let images = [
            dir.join(format!("boot/vmlinuz-{version}")),
            modules.join("vmlinuz"),
        ];
        let image = images.into_iter().find(|image| image.exists());
        Ok(Self {
            image: image.with_context(|| format!("{}: no kernel", dir.display()))?,
            version,
            modules,
        })
    }
}

/// The unpacked kernel; downloaded if it is not cached, or if `refresh` asks for a newer one.
fn unpacked(kernel: &Kernel, arch: Arch, refresh: bool) -> anyhow::Result<Unpacked> {
    let name = format!("kernels/linux-{}", kernel.name);
    let current = tools::cache()?.join(&name);
    let former = current.with_extension("former");
    let replaces = refresh && current.exists();
    if replaces {
        fs::rename(&current, &former)?;
    }
    let made = cached(&name, |dir| download(kernel, arch, dir));
    if replaces && made.is_err() {
        fs::rename(&former, &current)?;
    } else if replaces {
        fs::remove_dir_all(&former)?;
    }
    Unpacked::at(&made?)
}

fn download(kernel: &Kernel, arch: Arch, dir: &Path) -> anyhow::Result<()> {
    let source = kernel.source;
    println!("linux {}: asking for the newest of {source}", kernel.name);
    let apt = Apt::of(source, arch)?;
    let prefix = format!("{PACKAGE}{}", kernel.series);
    let mut newest = apt.dependencies(kernel.package)?.into_iter();
    let package = newest
        .find(|name| name.starts_with(&prefix))
        .with_context(|| {
            format!(
                "{} of {source} depends on no {prefix}* any more: change KERNELS in xtask/src/vm/kernels.rs, or \
                 unpack one of snapshot.debian.org (dpkg-deb -x) into kernels/linux-{} of the cache",
                kernel.package, kernel.name
            )
        })?;
    // Newer kernels have two packages of the same version: the kernel, and its modules.
    let abi = package.trim_start_matches("linux-image");
    let mut packages = apt.dependencies(&package)?;
    packages.retain(|part| part.ends_with(abi));
    packages.push(package.clone());
    println!("linux {}: {package}", kernel.name);
    apt.unpack(&packages, dir)
}

/// A directory with an unpacked Debian package, which is downloaded if it is not cached.
pub(crate) fn debian(package: &str, arch: Arch) -> anyhow::Result<PathBuf> {
    cached(&format!("debian/{package}-{}", arch.deb()), |dir| {
        Apt::of(PACKAGES, arch)?.unpack(&[package.to_owned()], dir)
    })
}

/// An apt with only one suite, independent of this host's configuration, which it does not change.
struct Apt {
    dir: tempfile::TempDir,
}

impl Apt {
    fn of(source: &str, arch: Arch) -> anyhow::Result<Self> {
        need(&[KEYRING], "packages of Debian")?;
        let apt = Self {
            dir: tempfile::tempdir()?,
        };
        let (top, arch) = (apt.dir.path(), arch.deb());
        for below in ["state/lists/partial", "cache/archives/partial"] {
            fs::create_dir_all(top.join(below))?;
        }
        let sources = format!("deb [signed-by={}] {source} main\n", KEYRING.0);
        fs::write(top.join("sources.list"), sources)?;
        let config = format!(
            r#"Dir::Etc::SourceList "{0}/sources.list";
Dir::Etc::SourceParts "/dev/null";
Dir::State "{0}/state";
Dir::State::Status "/dev/null";
Dir::Cache "{0}/cache";
APT::Architecture "{arch}";
APT::Architectures "{arch}";
APT::Sandbox::User "root";
Acquire::IndexTargets::deb::DEP-11::DefaultEnabled "false";
"#,
            top.display()
        );
        fs::write(top.join("apt.conf"), config)?;
        run_command(apt.command("apt-get").args(["update", "-qq"]))
            .with_context(|| format!("cannot reach {source}"))?;
        Ok(apt)
    }

    /// One of apt's programs.
    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        let config = self.dir.path().join("apt.conf");
        command.arg("-c").arg(config).current_dir(&self.dir);
        command
    }

    fn dependencies(&self, package: &str) -> anyhow::Result<Vec<String>> {
        let listed = output(self.command("apt-cache").args(["depends", package]))?;
        let names = listed
            .lines()
            .filter_map(|line| line.trim().strip_prefix("Depends: "));
        Ok(names.map(str::to_owned).collect())
    }

    /// Downloads packages and unpacks them into a directory.
    fn unpack(&self, packages: &[String], to: &Path) -> anyhow::Result<()> {
        let mut download = self.command("apt-get");
        run_command(download.args(["download", "-qq"]).args(packages))?;
        for file in fs::read_dir(&self.dir)? {
            let path = file?.path();
            if path.extension().is_some_and(|kind| kind == "deb") {
                run_command(command("dpkg-deb -x").args([&path, to]))?;
            }
        }
        Ok(())
    }
}
