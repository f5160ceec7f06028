//! The files of the packages of one architecture, and the packages.

use std::{
    ffi::OsStr,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::Context as _;

use super::{Release, VERSION};
use crate::{
    arch::Arch,
    process::{output, run as run_command},
    tools,
};

/// A directory with the files of the packages.
pub(crate) struct Stage<'a> {
    release: &'a Release,
    pub(super) arch: Arch,
    pub(crate) dir: PathBuf,
}

const UNIT: &str = "systemd/rto-agent.service";
const MAINTAINER: &str = "The rto-agent authors <maintainers@example.invalid>";

/// Files copied from the checkout.
const FILES: [&str; 12] = [
    "config/config.toml",
    "config/prometheus/alerts.yml",
    "config/prometheus/recording.yml",
    "systemd/open-sockets.conf",
    "LICENSE-APACHE",
    "LICENSE-MIT",
    "README.md",
    "packaging/nfpm.yaml",
    "packaging/sysusers.conf",
    "packaging/copyright",
    "packaging/deb",
    "packaging/rpm",
];

/// Contents of the archive for an installation without a package.
const IN_TAR: &str = "rto-agent open-sockets.conf config.toml alerts.yml recording.yml sysusers.conf man completions \
                      LICENSE-APACHE LICENSE-MIT README.md";

impl<'a> Stage<'a> {
    /// Builds the files of the packages.
    pub(crate) fn prepare(release: &'a Release, arch: Arch) -> anyhow::Result<Self> {
        let dir = release.build.join("stage").join(arch.deb());
        if dir.exists() {
            fs::remove_dir_all(&dir)?;
        }
        for below in ["completions", "man"] {
            fs::create_dir_all(dir.join(below))?;
        }
        let stage = Self { release, arch, dir };
        stage.copy(&FILES.map(|file| release.source.join(file)), &stage.dir)?;
        stage.copy(&[release.binary(arch, false)?], &stage.dir)?;
        let changelog = release.source.join("CHANGELOG.md");
        stage.copy(&[changelog], &stage.dir.join("changelog"))?;
        let unit = fs::read_to_string(release.source.join(UNIT))?;
        stage.write(
            "rto-agent.service",
            &unit.replace("/usr/local/bin/", "/usr/bin/"),
        )?;
        stage.manual()?;
        stage.write("rto-agent.cdx.json", &release.sbom(arch)?)?;
        stage.compressed()?;
        stage.documentation()?;
        stage.normalise()?;
        Ok(stage)
    }

    /// Another directory with the same files, which may then be changed.
    pub(crate) fn copy_to(&self, dir: PathBuf) -> anyhow::Result<Self> {
        self.copy(&[&self.dir], &dir)?;
        Ok(Self {
            release: self.release,
            arch: self.arch,
            dir,
        })
    }

    /// Makes a package and returns its path.
    pub(crate) fn package(
        &self,
        packager: &str,
        version: &str,
        into: &Path,
    ) -> anyhow::Result<PathBuf> {
        let requirements = self.release.source.join("packaging/requirements.txt");
        let requirements = requirements.to_str().context("path is not UTF-8")?;
        let options = ["--require-hashes", "--only-binary=:all:", "--requirement"];
        let hashed = [&options[..], &[requirements]].concat();
        let python = tools::python("nfpm", &hashed, "packages")?.join("bin");
        let arch = match packager {
            "rpm" => self.arch.rpm(),
            _ => self.arch.deb(),
        };
        let said = output(
            Command::new(python.join("nfpm"))
                .args(["package", "--packager", packager, "--target"])
                .arg(into)
                .current_dir(&self.dir)
                .env("ARCH", arch)
                .env("VERSION", version)
                .env("SOURCE_DATE_EPOCH", &self.release.epoch),
        )?;
        let created = said
            .lines()
            .find_map(|l| l.strip_prefix("created package: "));
        Ok(created.context("nfpm names no package")?.into())
    }

    /// Packs the files for an installation without a package.
    pub(super) fn tar_gz(&self, into: &Path) -> anyhow::Result<()> {
        let name = format!("rto-agent-{VERSION}-linux-{}", self.arch.deb());
        let parent = tempfile::tempdir()?;
        let top = parent.path().join(&name);
        fs::create_dir(&top)?;
        let files: Vec<PathBuf> = IN_TAR.split(' ').map(|file| self.dir.join(file)).collect();
        self.copy(&files, &top)?;
        // The unit in the sources names the binary's path of an installation without a package.
        self.copy(&[self.release.source.join(UNIT)], &top)?;
        let archive = into.join(format!("{name}.tar.gz"));
        self.release.tar(parent.path(), &name, &[], &archive)
    }

    /// Generates a manual page for each command, and completions, with a binary that runs here.
    fn manual(&self) -> anyhow::Result<()> {
        let agent = self.release.binary(Arch::host(), false)?;
        let man = self.dir.join("man");
        run_command(Command::new(&agent).args(["man", "--dir"]).arg(man))?;
        for shell in ["bash", "zsh", "fish"] {
            let script = output(Command::new(&agent).args(["completions", shell]))?;
            self.write(&format!("completions/{shell}"), &format!("{script}\n"))?;
        }
        Ok(())
    }

    /// Adds changelogs, and the files that packages compress.
    fn compressed(&self) -> anyhow::Result<()> {
        let time = format!("--date=@{}", self.release.epoch);
        let date = output(Command::new("date").args(["--utc", "--iso-8601=seconds", &time]))?;
        self.write(
            "changelog.yaml",
            &format!(
                "- semver: {VERSION}\n  date: {date}\n  packager: {MAINTAINER}\n  \
                 deb: {{urgency: medium, distributions: [unstable]}}\n  changes:\n    \
                 - note: Changes are in changelog.gz.\n"
            ),
        )?;
        // A compressed copy of the SBOM, which is also released uncompressed.
        let compress = "gzip -9n man/*.1 changelog && gzip -9nk rto-agent.cdx.json";
        let mut sh = Command::new("sh");
        run_command(sh.args(["-c", compress]).current_dir(&self.dir))
    }

    /// Adds each manual page to nfpm's list: an rpm marks such files, and nfpm supports no pattern for them.
    fn documentation(&self) -> anyhow::Result<()> {
        let config = self.dir.join("nfpm.yaml");
        let mut text = fs::read_to_string(&config)?;
        let pages = output(Command::new("ls").arg(self.dir.join("man")))?;
        for page in pages.lines() {
            for packager in ["packager: deb", "packager: rpm, type: doc"] {
                text += &format!(
                    "  - {{src: man/{page}, dst: /usr/share/man/man1/{page}, {packager}}}\n"
                );
            }
        }
        Ok(fs::write(config, text)?)
    }

    /// Sets modes and times that do not depend on this host.
    fn normalise(&self) -> anyhow::Result<()> {
        let mut chmod = Command::new("chmod");
        run_command(chmod.args(["-R", "u=rwX,go=rX"]).arg(&self.dir))?;
        run_command(
            Command::new("find")
                .arg(&self.dir)
                .args(["-exec", "touch", "--no-dereference"])
                .arg(format!("--date=@{}", self.release.epoch))
                .args(["{}", "+"]),
        )
    }

    fn copy(&self, from: &[impl AsRef<OsStr>], to: &Path) -> anyhow::Result<()> {
        run_command(Command::new("cp").arg("-a").args(from).arg(to))
    }

    fn write(&self, to: &str, text: &str) -> anyhow::Result<()> {
        fs::write(self.dir.join(to), text).with_context(|| to.to_owned())
    }
}
