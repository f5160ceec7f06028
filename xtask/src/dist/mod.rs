//! `cargo xtask dist`: builds a release in target/dist.
//!
//! One static binary per architecture goes into a deb, an rpm, a tar.gz and an OCI archive; the chart, an SBOM and
//! checksums complete the release. The build is reproducible: the same commit results in the same bytes at every path,
//! because all times are the commit's and paths are remapped. `--check` builds another checkout and compares.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, bail, ensure};

use self::stage::{PROGRAMS, Stage};
use crate::{
    arch::Arch,
    process::{command, output, run as run_command, shell},
    root,
};

mod binary;
pub(crate) mod image;
pub(crate) mod stage;

/// The version of the workspace, which this crate shares.
pub(crate) const VERSION: &str = env!("CARGO_PKG_VERSION");
const SUMS: &str = "SHA256SUMS";

/// `cargo xtask dist`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Architectures, with commas between
    #[arg(long, value_enum, value_delimiter = ',', default_value = "amd64,arm64")]
    arch: Vec<Arch>,
    /// Build a second checkout of this commit at another path too, and compare every byte
    #[arg(long)]
    check: bool,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let dist = root().join("target/dist");
    if args.check {
        ensure!(
            output(&mut command("git status --porcelain"))?.is_empty(),
            "--check compares with a checkout of this commit: commit or stash the changes first"
        );
    }
    Release::of(root())?.make(&args.arch, &dist)?;
    println!("{}", fs::read_to_string(dist.join(SUMS))?);
    if args.check {
        check(&args.arch, &dist)?;
    }
    Ok(())
}

/// Fails unless another checkout results in the same files.
fn check(archs: &[Arch], dist: &Path) -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    let other = dir.path().join("checkout");
    println!("building again in {}", other.display());
    run_command(command("git clone --quiet --no-hardlinks").args([&root(), &other]))?;
    let again = dir.path().join("dist");
    Release::of(other)?.make(archs, &again)?;
    let differences = command("diff --brief --recursive")
        .args([dist, &again])
        .status()?;
    if !differences.success() {
        let kept = dir.keep();
        bail!("not the same bytes: compare with {}", kept.display());
    }
    println!("the files are the same, byte for byte");
    Ok(())
}

/// A checkout that is released.
pub(crate) struct Release {
    /// The checkout.
    source: PathBuf,
    /// cargo's target directory, and the files of the packages. It is kept, so that the next build is fast.
    build: PathBuf,
    /// The commit's time, in seconds since 1970.
    epoch: String,
    /// The version of the packages.
    pub(crate) version: String,
}

impl Release {
    /// # Errors
    ///
    /// Without git, `SOURCE_DATE_EPOCH` must provide the time.
    pub(crate) fn of(source: PathBuf) -> anyhow::Result<Self> {
        let epoch = std::env::var("SOURCE_DATE_EPOCH")
            .or_else(|_| output(command("git log -1 --format=%ct").current_dir(&source)))
            .context("the time of the release: is this a git checkout?")?;
        let mut release = Self {
            build: source.join("target/dist-build"),
            source,
            epoch,
            version: VERSION.to_owned(),
        };
        release.version = release.version()?;
        Ok(release)
    }

    /// The workspace's version at a commit with its tag or outside a git checkout. Else a version that is lower, and
    /// higher than that of an earlier commit, so that package managers see an upgrade.
    fn version(&self) -> anyhow::Result<String> {
        let git = |words| output(command(words).current_dir(&self.source));
        let describe = "git describe --always --exclude=* --abbrev=12 --dirty=.dirty";
        let Ok(commit) = git(describe) else {
            return Ok(VERSION.to_owned());
        };
        let tags = git("git tag --points-at=HEAD --list v*")?;
        if tags.is_empty() {
            return self.unreleased(0, &commit);
        }
        ensure!(
            tags.lines()
                .any(|tag| tag.strip_prefix('v') == Some(VERSION)),
            "the commit has the tag {tags}, and Cargo.toml the version {VERSION}"
        );
        Ok(VERSION.to_owned())
    }

    /// The version in names of files, of the chart (Semantic Versioning) and as the image's tag.
    pub(crate) fn tag(&self) -> String {
        match self.version.split_once('~') {
            Some((released, after)) => format!("{released}-{}", after.replace('.', "-")),
            None => self.version.clone(),
        }
    }

    /// A lower version than this one, as of a commit a second earlier.
    pub(crate) fn before(&self) -> anyhow::Result<String> {
        self.unreleased(1, "before")
    }

    fn unreleased(&self, seconds_ago: u64, commit: &str) -> anyhow::Result<String> {
        let at = self.epoch.parse::<u64>()? - seconds_ago;
        let time = date(&at.to_string(), "%Y%m%d%H%M%S")?;
        Ok(format!("{VERSION}~git{time}.{commit}"))
    }

    /// The time of the release.
    fn time(&self) -> anyhow::Result<String> {
        date(&self.epoch, "%Y-%m-%dT%H:%M:%SZ")
    }

    /// Recreates a directory with the files of a release.
    fn make(&self, archs: &[Arch], dist: &Path) -> anyhow::Result<()> {
        let stages = archs
            .iter()
            .map(|arch| Stage::prepare(self, *arch))
            .collect::<anyhow::Result<Vec<_>>>()?;
        if dist.exists() {
            fs::remove_dir_all(dist)?;
        }
        fs::create_dir_all(dist)?;
        for stage in &stages {
            for (program, list) in PROGRAMS {
                for packager in ["deb", "rpm"] {
                    stage.package(list, packager, &self.version, dist)?;
                }
                let sbom = format!("{program}-{}-{}.cdx.json", self.tag(), stage.arch.deb());
                fs::copy(
                    stage.dir.join(format!("{program}.cdx.json")),
                    dist.join(sbom),
                )?;
            }
            stage.tar_gz(dist)?;
        }
        let binary = |stage: &Stage<'_>| (stage.arch, stage.dir.join("rto-agent"));
        image::make(self, &stages.iter().map(binary).collect::<Vec<_>>(), dist)?;
        self.chart(dist)?;
        let sums = output(shell("sha256sum -- *").current_dir(dist))?;
        Ok(fs::write(dist.join(SUMS), sums + "\n")?)
    }

    /// Packs the Helm chart as `helm package` does: without its test values, and with the rules that it links to. It
    /// has the version of the release. Returns the archive.
    pub(crate) fn chart(&self, dist: &Path) -> anyhow::Result<PathBuf> {
        let tag = self.tag();
        let chart = dist.join(format!("rto-agent-chart-{tag}.tgz"));
        let dir = tempfile::tempdir()?;
        let chart_of = self.source.join("charts/rto-agent");
        run_command(command("cp --recursive --dereference").args([&chart_of, dir.path()]))?;
        let file = dir.path().join("rto-agent/Chart.yaml");
        let text = fs::read_to_string(&file)?;
        fs::write(
            &file,
            text.replace(&format!("ersion: {VERSION}\n"), &format!("ersion: {tag}\n")),
        )?;
        self.tar(dir.path(), "rto-agent", &["--exclude=rto-agent/ci"], &chart)?;
        Ok(chart)
    }

    /// Packs a directory of `parent`: sorted, owned by root, with the commit's time.
    fn tar(
        &self,
        parent: &Path,
        name: &str,
        options: &[&str],
        archive: &Path,
    ) -> anyhow::Result<()> {
        let compress = ["--use-compress-program", "gzip -9n"];
        let is_compressed = !archive.extension().is_some_and(|e| e == "tar");
        run_command(
            command("tar --create --sort=name --format=gnu --owner=0 --group=0 --numeric-owner")
                .args(["--mode=u=rwX,go=rX", &format!("--mtime=@{}", self.epoch)])
                .args(compress.iter().filter(|_| is_compressed))
                .args(options)
                .arg("--file")
                .arg(archive)
                .arg("--directory")
                .arg(parent)
                .arg(name),
        )
    }
}

/// A time in UTC, in this format of date(1).
fn date(epoch: &str, format: &str) -> anyhow::Result<String> {
    output(&mut command(&format!(
        "date --utc --date=@{epoch} +{format}"
    )))
}
