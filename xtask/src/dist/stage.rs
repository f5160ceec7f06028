//! The files of the packages of one architecture, and the packages.

use std::{
    ffi::OsStr,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::Context as _;

use super::Release;
use crate::{
    arch::Arch,
    process::{command, need, output, run as run_command, shell},
    tools,
};

/// A directory with the files of the packages.
pub(crate) struct Stage<'a> {
    release: &'a Release,
    pub(super) arch: Arch,
    pub(crate) dir: PathBuf,
}

const UNIT: &str = "systemd/rto-agent.service";

/// Files copied from the checkout.
const FILES: [&str; 8] = [
    "config/config.toml",
    "LICENSE-APACHE",
    "LICENSE-MIT",
    "README.md",
    "packaging/sysusers.conf",
    "packaging/deb",
    "packaging/rpm",
    "packaging/nfpm.yaml",
];
/// Files copied from the checkout, which the packages have in /usr/share/doc/rto-agent/examples.
const EXAMPLES: [&str; 4] = [
    "config/grafana/rto-agent.json",
    "config/prometheus/alerts.yml",
    "config/prometheus/recording.yml",
    "systemd/open-sockets.conf",
];
/// Files with words that Cargo.toml defines.
const TEMPLATES: [&str; 3] = ["nfpm.yaml", "nfpm-lab.yaml", "copyright"];
const WORDS: [(&str, &str); 3] = [
    ("@MAINTAINER@", env!("CARGO_PKG_AUTHORS")),
    ("@HOMEPAGE@", env!("CARGO_PKG_REPOSITORY")),
    ("@LICENSE@", env!("CARGO_PKG_LICENSE")),
];
/// The host of the repository in Cargo.toml until there is one.
const PLACEHOLDER: &str = "example.invalid";
/// The programs, each with its list of nfpm.
pub(crate) const PROGRAMS: [(&str, &str); 2] =
    [("rto-agent", "nfpm.yaml"), ("rto-lab", "nfpm-lab.yaml")];

/// Contents of the archive for an installation without a package, in addition to the programs and the examples.
const IN_TAR: &str =
    "config.toml sysusers.conf man completions LICENSE-APACHE LICENSE-MIT README.md";

impl<'a> Stage<'a> {
    /// Builds the files of the packages.
    pub(crate) fn prepare(release: &'a Release, arch: Arch) -> anyhow::Result<Self> {
        let dir = release.build.join("stage").join(arch.deb());
        if dir.exists() {
            fs::remove_dir_all(&dir)?;
        }
        for below in ["completions", "man", "examples"] {
            fs::create_dir_all(dir.join(below))?;
        }
        let stage = Self { release, arch, dir };
        let source = |file: &str| release.source.join(file);
        stage.copy(&FILES.map(source), &stage.dir)?;
        stage.copy(&EXAMPLES.map(source), &stage.dir.join("examples"))?;
        for name in TEMPLATES {
            let text = fs::read_to_string(source("packaging").join(name))?;
            let (_, homepage) = WORDS[1];
            let lines = text.split_inclusive('\n');
            // No link to a repository that does not exist.
            let lines = lines
                .filter(|line| !(homepage.contains(PLACEHOLDER) && line.starts_with("homepage:")));
            let text: String = lines.collect();
            let filled = WORDS
                .iter()
                .fold(text, |text, (word, is)| text.replace(word, is));
            stage.write(name, &filled)?;
        }
        stage.copy(&[source("CHANGELOG.md")], &stage.dir.join("changelog"))?;
        let unit = fs::read_to_string(source(UNIT))?;
        let unit = unit.replace("/usr/local/bin/", "/usr/bin/");
        stage.write("rto-agent.service", &unit)?;
        for (program, _) in PROGRAMS {
            let binary = release.binary(program, arch)?;
            stage.copy(&[binary], &stage.dir)?;
            let sbom = release.sbom(program, arch)?;
            stage.write(&format!("{program}.cdx.json"), &sbom)?;
            stage.manual(program, &release.binary(program, Arch::host())?)?;
        }
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

    /// Makes a package by a list of nfpm, and returns its path.
    pub(crate) fn package(
        &self,
        list: &str,
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
        let message = output(
            Command::new(python.join("nfpm"))
                .args(["package", "--config", list, "--packager", packager])
                .arg("--target")
                .arg(into)
                .current_dir(&self.dir)
                .env("ARCH", arch)
                .env("VERSION", version)
                .env("SOURCE_DATE_EPOCH", &self.release.epoch),
        )?;
        let created = message
            .lines()
            .find_map(|l| l.strip_prefix("created package: "));
        Ok(created.context("nfpm names no package")?.into())
    }

    /// Packs the files for an installation without a package.
    pub(super) fn tar_gz(&self, into: &Path) -> anyhow::Result<()> {
        let name = format!("rto-agent-{}-linux-{}", self.release.tag(), self.arch.deb());
        let parent = tempfile::tempdir()?;
        let top = parent.path().join(&name);
        fs::create_dir(&top)?;
        let programs = PROGRAMS.iter().map(|(program, _)| *program);
        let files = programs
            .chain(IN_TAR.split(' '))
            .map(|file| self.dir.join(file));
        self.copy(&files.collect::<Vec<_>>(), &top)?;
        let examples = fs::read_dir(self.dir.join("examples"))?;
        let examples = examples.map(|file| Ok(file?.path()));
        self.copy(&examples.collect::<std::io::Result<Vec<_>>>()?, &top)?;
        // The unit in the sources names the binary's path of an installation without a package.
        self.copy(&[self.release.source.join(UNIT)], &top)?;
        let archive = into.join(format!("{name}.tar.gz"));
        self.release.tar(parent.path(), &name, &[], &archive)
    }

    /// Generates manual pages and completions with a program that runs here.
    fn manual(&self, program: &str, binary: &Path) -> anyhow::Result<()> {
        let man = self.dir.join("man");
        if program != "rto-agent" {
            need(&[("help2man", "help2man")], "its manual page")?;
            let page = man.join(format!("{program}.1"));
            return run_command(
                command("help2man --no-info --name")
                    .arg("measures TCP retransmission timers on emulated links")
                    .arg("--output")
                    .args([page.as_path(), binary])
                    .env("SOURCE_DATE_EPOCH", &self.release.epoch),
            );
        }
        need(&[("lowdown", "lowdown")], "the manual page of the file")?;
        let page = "sed -f packaging/config-man.sed docs/operate/configuration.md | \
                    lowdown -s -Tman -Mtitle=rto-agent-config -Msection=5 --nroff-nolinks";
        let page = output(shell(page).current_dir(&self.release.source))?;
        self.write("man/rto-agent-config.5", &format!("{page}\n"))?;
        run_command(Command::new(binary).args(["man", "--dir"]).arg(man))?;
        for shell in ["bash", "zsh", "fish"] {
            let script = output(Command::new(binary).args(["completions", shell]))?;
            self.write(&format!("completions/{shell}"), &format!("{script}\n"))?;
        }
        Ok(())
    }

    /// Adds changelogs, and the files that packages compress.
    fn compressed(&self) -> anyhow::Result<()> {
        let (version, [(_, maintainer), ..]) = (&self.release.version, WORDS);
        let date = self.release.time()?;
        self.write(
            "changelog.yaml",
            &format!(
                "- semver: {version}\n  date: {date}\n  packager: {maintainer}\n  \
                 deb: {{urgency: medium, distributions: [unstable]}}\n  changes:\n    \
                 - note: Changes are in changelog.gz.\n"
            ),
        )?;
        // Compressed copies of the SBOMs, which are also released uncompressed.
        let compress = "gzip -9n man/* changelog && gzip -9nk *.cdx.json";
        run_command(shell(compress).current_dir(&self.dir))
    }

    /// Adds manual pages and examples to nfpm's lists: an rpm marks such files, and nfpm supports no pattern for them.
    fn documentation(&self) -> anyhow::Result<()> {
        let mut files = Vec::new();
        for dir in ["man", "examples"] {
            for file in fs::read_dir(self.dir.join(dir))? {
                files.push(format!("{dir}/{}", file?.file_name().display()));
            }
        }
        files.sort();
        for (program, list) in PROGRAMS {
            let list = self.dir.join(list);
            let mut text = fs::read_to_string(&list)?;
            for file in &files {
                let (to, is_own) = match file.strip_prefix("man/") {
                    // "rto-agent-add.1.gz"
                    Some(page) => {
                        let section = page.trim_end_matches(".gz").chars().last();
                        let section = section.unwrap_or_default();
                        (
                            format!("man/man{section}/{page}"),
                            page.starts_with(program),
                        )
                    }
                    None => (format!("doc/rto-agent/{file}"), program == "rto-agent"),
                };
                for packager in ["deb", "rpm, type: doc"].iter().filter(|_| is_own) {
                    text += &format!(
                        "  - {{src: {file}, dst: /usr/share/{to}, packager: {packager}}}\n"
                    );
                }
            }
            fs::write(list, text)?;
        }
        Ok(())
    }

    /// Sets modes and times that do not depend on this host.
    fn normalise(&self) -> anyhow::Result<()> {
        let touch = format!("touch --no-dereference --date=@{}", self.release.epoch);
        let script = format!("chmod -R u=rwX,go=rX . && find . -exec {touch} {{}} +");
        run_command(shell(&script).current_dir(&self.dir))
    }

    fn copy(&self, from: &[impl AsRef<OsStr>], to: &Path) -> anyhow::Result<()> {
        run_command(Command::new("cp").arg("-a").args(from).arg(to))
    }

    fn write(&self, to: &str, text: &str) -> anyhow::Result<()> {
        fs::write(self.dir.join(to), text).with_context(|| to.to_owned())
    }
}
