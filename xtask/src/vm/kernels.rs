//! Debian's kernels, downloaded by an apt with its own configuration, and unpacked.
//!
//! A security update replaces a package in the archive, so no hash can be pinned here. Instead the newest package of a
//! series is used, and apt verifies its SHA-256 against the index signed with Debian's keys.

use std::{
    cmp::Ordering,
    fs::{self, File},
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, bail};

use crate::{
    arch::Arch,
    process::{apt_install, output, run as run_command},
    tools,
};

/// A kernel that the tests run on.
#[derive(Debug)]
pub(crate) struct Kernel {
    /// The name in `--kernel`.
    pub(crate) name: &'static str,
    /// The part after "linux-image-" in the names of its packages.
    series: &'static str,
    /// The archive and the suite.
    source: (&'static str, &'static str),
    arch: Arch,
}

const DEBIAN: &str = "http://deb.debian.org/debian";
const SECURITY: &str = "http://deb.debian.org/debian-security";
pub(crate) const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// The newest kernel of any series.
pub(super) const NEWEST: &str = "newest";
/// Prefix of the names of kernel packages.
const PACKAGE: &str = "linux-image-";

impl Kernel {
    /// Whether a release belongs to this series; "newest" has none.
    pub(super) fn is_of_series(&self, version: &str) -> bool {
        !self.series.is_empty() && version.starts_with(self.series)
    }
}

/// The kernels of the matrix.
pub(crate) const KERNELS: [Kernel; 4] = [
    Kernel {
        name: "5.10",
        series: "5.10.",
        source: (SECURITY, "bullseye-security"),
        arch: Arch::Amd64,
    },
    Kernel {
        name: "6.1",
        series: "6.1.",
        source: (SECURITY, "bookworm-security"),
        arch: Arch::Amd64,
    },
    Kernel {
        name: "6.12",
        series: "6.12.",
        source: (SECURITY, "bookworm-security"),
        arch: Arch::Amd64,
    },
    Kernel {
        name: NEWEST,
        series: "",
        source: (DEBIAN, "sid"),
        arch: Arch::Amd64,
    },
];

/// A kernel of another architecture.
pub(crate) const ARM64: Kernel = Kernel {
    name: "6.12-arm64",
    series: "6.12.",
    source: (SECURITY, "bookworm-security"),
    arch: Arch::Arm64,
};

/// The kernels that `--kernel` names: one, several separated by commas, or all.
pub(crate) fn named(names: &str) -> anyhow::Result<Vec<&'static Kernel>> {
    if names == "all" {
        return Ok(KERNELS.iter().collect());
    }
    let one = |name: &str| {
        KERNELS.iter().find(|k| k.name == name).with_context(|| {
            let known: Vec<_> = KERNELS.iter().map(|k| k.name).collect();
            format!("no kernel {name}; known are all, {}", known.join(", "))
        })
    };
    names.split(',').map(one).collect()
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
        let modules = ["lib/modules", "usr/lib/modules"].map(|below| dir.join(below));
        let all = modules.iter().find_map(|all| fs::read_dir(all).ok());
        let modules = all
            .and_then(|mut all| all.find_map(Result::ok))
            .with_context(|| format!("{}: a kernel without modules", dir.display()))?;
        let version = modules.file_name().to_string_lossy().into_owned();
        let modules = modules.path();
        // Since 7.0 Debian ships the kernel next to its modules.
        let images = [
            dir.join("boot").join(format!("vmlinuz-{version}")),
            modules.join("vmlinuz"),
        ];
        let image = images.into_iter().find(|image| image.exists());
        let image = image.with_context(|| format!("{}: no kernel", dir.display()))?;
        Ok(Self {
            version,
            image,
            modules,
        })
    }
}

/// The unpacked kernel; downloaded if it is not cached, or if `refresh` asks for a newer one.
pub(crate) fn unpacked(kernel: &Kernel, refresh: bool) -> anyhow::Result<Unpacked> {
    let cache = tools::cache()?.join("kernels").join(kernel.name);
    fs::create_dir_all(&cache)?;
    // Without the lock, the unfinished download of another process would be removed.
    let lock = File::create(cache.with_extension("lock"))?;
    lock.lock()?;
    match cached(&cache)? {
        Some(package) if !refresh => Unpacked::at(&cache.join(package)),
        _ => Unpacked::at(&download(kernel, &cache)?),
    }
}

/// The newest unpacked package. Removes the remains of interrupted downloads.
fn cached(cache: &Path) -> anyhow::Result<Option<String>> {
    let names = fs::read_dir(cache)?
        .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
        .collect::<anyhow::Result<Vec<String>>>()?;
    let (packages, left): (Vec<String>, Vec<String>) = names
        .into_iter()
        .partition(|name| name.starts_with(PACKAGE));
    for name in left {
        fs::remove_dir_all(cache.join(name))?;
    }
    Ok(packages.into_iter().max_by(|a, b| natural(a, b)))
}

fn download(kernel: &Kernel, cache: &Path) -> anyhow::Result<PathBuf> {
    let (archive, suite) = kernel.source;
    println!(
        "linux {}: asking {archive} for the newest of {suite}",
        kernel.name
    );
    let apt = Apt::of(archive, suite, kernel.arch)?;
    let prefix = format!("{PACKAGE}{}", kernel.series);
    let names = output(apt.command("apt-cache").args(["pkgnames", &prefix]))?;
    let package = newest(&prefix, kernel.arch, &names).with_context(|| {
        format!(
            "{suite} of {archive} has no {prefix}*-cloud-{} any more: change KERNELS in \
             xtask/src/vm/kernels.rs, or unpack one of snapshot.debian.org and give it with --unpacked",
            kernel.arch.deb()
        )
    })?;
    let dir = cache.join(&package);
    if dir.exists() {
        return Ok(dir);
    }
    // Newer kernels have two packages of the same version: the kernel, and its modules.
    let abi = package.trim_start_matches("linux-image");
    let depends = output(apt.command("apt-cache").args(["depends", &package]))?;
    let parts = depends
        .lines()
        .filter_map(|line| line.trim().strip_prefix("Depends: "))
        .filter(|part| part.ends_with(abi));
    let into = tempfile::tempdir_in(cache)?;
    run_command(
        apt.command("apt-get")
            .args(["download", "-qq", &package])
            .args(parts)
            .current_dir(into.path()),
    )?;
    let unpacked = tempfile::tempdir_in(cache)?;
    unpack(into.path(), unpacked.path())?;
    Unpacked::at(unpacked.path())?;
    fs::rename(unpacked.keep(), &dir)?;
    println!("linux {}: {package}", kernel.name);
    Ok(dir)
}

/// A directory with an unpacked Debian package, which is downloaded if it is not cached.
pub(crate) fn debian(package: &str, arch: Arch) -> anyhow::Result<PathBuf> {
    let vm = tools::cache()?.join("debian");
    fs::create_dir_all(&vm)?;
    let dir = vm.join(format!("{package}-{}", arch.deb()));
    if dir.exists() {
        return Ok(dir);
    }
    let apt = Apt::of(DEBIAN, "bookworm", arch)?;
    let into = tempfile::tempdir_in(&vm)?;
    run_command(
        apt.command("apt-get")
            .args(["download", "-qq", package])
            .current_dir(into.path()),
    )?;
    let unpacked = tempfile::tempdir_in(&vm)?;
    unpack(into.path(), unpacked.path())?;
    fs::rename(unpacked.keep(), &dir)?;
    Ok(dir)
}

/// Unpacks the packages of a directory.
fn unpack(packages: &Path, into: &Path) -> anyhow::Result<()> {
    for archive in fs::read_dir(packages)?.flatten() {
        run_command(
            Command::new("dpkg-deb")
                .arg("-x")
                .arg(archive.path())
                .arg(into),
        )?;
    }
    Ok(())
}

/// The newest package of a series in apt's list.
fn newest(prefix: &str, arch: Arch, names: &str) -> Option<String> {
    let suffix = format!("-cloud-{}", arch.deb());
    names
        .lines()
        .filter(|name| {
            name.ends_with(&suffix)
                && name.starts_with(prefix)
                && name[PACKAGE.len()..].starts_with(|c: char| c.is_ascii_digit())
                // "linux-image-6.12-cloud-amd64" depends on the newest kernel, but does not contain one.
                && name.matches('.').count() > 1
        })
        .max_by(|a, b| natural(a, b))
        .map(str::to_owned)
}

/// Compares numbers in names by their value: 9 before 10.
fn natural(a: &str, b: &str) -> Ordering {
    let numbers = |name: &str| -> Vec<u64> {
        name.split(|c: char| !c.is_ascii_digit())
            .filter_map(|part| part.parse().ok())
            .collect()
    };
    numbers(a).cmp(&numbers(b))
}

/// Installs Debian's keys, which verify its packages.
pub(crate) fn install_keyring() -> anyhow::Result<()> {
    if Path::new(KEYRING).exists() {
        return Ok(());
    }
    apt_install(&["debian-archive-keyring"], "packages of Debian")
}

/// An apt with only one suite, independent of this host's configuration, which it does not change.
pub(crate) struct Apt {
    dir: tempfile::TempDir,
    arch: Arch,
}

impl Apt {
    pub(crate) fn of(archive: &str, suite: &str, arch: Arch) -> anyhow::Result<Self> {
        install_keyring()?;
        let apt = Self {
            dir: tempfile::tempdir()?,
            arch,
        };
        for below in ["state/lists/partial", "cache/archives/partial"] {
            fs::create_dir_all(apt.dir.path().join(below))?;
        }
        fs::write(
            apt.dir.path().join("sources.list"),
            format!("deb [signed-by={KEYRING}] {archive} {suite} main\n"),
        )?;
        if run_command(apt.command("apt-get").args(["update", "-qq"])).is_err() {
            bail!("cannot reach {suite} of {archive}; a kernel unpacked by hand: --unpacked");
        }
        Ok(apt)
    }

    /// One of apt's programs.
    pub(crate) fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        let dir = self.dir.path();
        for (key, below) in [
            ("Dir::Etc::sourcelist", "sources.list"),
            ("Dir::State", "state"),
            ("Dir::Cache", "cache"),
        ] {
            command
                .arg("-o")
                .arg(format!("{key}={}", dir.join(below).display()));
        }
        for option in [
            "Dir::Etc::sourceparts=/dev/null",
            "Dir::State::status=/dev/null",
            &format!("APT::Architecture={}", self.arch.deb()),
            &format!("APT::Architectures={}", self.arch.deb()),
            "APT::Sandbox::User=root",
            "Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false",
        ] {
            command.args(["-o", option]);
        }
        command
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_of_a_series() {
        let names = "linux-image-6.12-cloud-amd64\nlinux-image-6.12.100+deb12-cloud-amd64\n\
                     linux-image-6.12.99+deb12-cloud-amd64\nlinux-image-cloud-amd64\n\
                     linux-image-6.12.117+deb12-rt-amd64\n";
        for prefix in ["linux-image-6.12.", "linux-image-"] {
            assert_eq!(
                newest(prefix, Arch::Amd64, names).as_deref(),
                Some("linux-image-6.12.100+deb12-cloud-amd64")
            );
        }
        assert_eq!(newest("linux-image-5.10.", Arch::Amd64, names), None);
    }

    #[test]
    fn interrupted_download_is_not_used_as_kernel() {
        let cache = tempfile::tempdir().unwrap();
        assert_eq!(cached(cache.path()).unwrap(), None);
        for dir in [".tmp9zZ999", "linux-image-6.1.0-9", "linux-image-6.1.0-56"] {
            fs::create_dir(cache.path().join(dir)).unwrap();
        }
        let newest = cached(cache.path()).unwrap();
        assert_eq!(newest.as_deref(), Some("linux-image-6.1.0-56"));
        assert!(!cache.path().join(".tmp9zZ999").exists());
    }

    #[test]
    fn kernels_by_name() {
        let names = |text: &str| -> Vec<&str> {
            named(text).map_or(Vec::new(), |all| all.iter().map(|k| k.name).collect())
        };
        assert_eq!(names("6.1,newest"), ["6.1", "newest"]);
        assert_eq!(names("all").len(), KERNELS.len());
        assert!(names("6.2").is_empty());
    }
}
