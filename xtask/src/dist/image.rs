//! The container image: an OCI archive with all architectures.

use std::{fs, path::Path, process::Command};

use super::{Release, VERSION, stage::Stage};
use crate::process::{output, run as run_command};

const NAME: &str = "rto-agent";

/// Makes the image by buildah, whose storage is a temporary one: nothing of the host's is changed.
pub(super) fn make(release: &Release, stages: &[Stage], dist: &Path) -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    let context = dir.path().join("context");
    for stage in stages {
        let of_arch = context.join(stage.arch().deb());
        fs::create_dir_all(&of_arch)?;
        fs::copy(stage.dir().join(NAME), of_arch.join(NAME))?;
    }
    let buildah = |verb: &[&str]| {
        let mut buildah = Command::new("buildah");
        buildah
            .args(["--storage-driver=vfs", "--root"])
            .arg(dir.path().join("storage"))
            .arg("--runroot")
            .arg(dir.path().join("run"))
            .args(verb)
            // Downloads nothing: FROM scratch.
            .env("TMPDIR", dir.path());
        buildah
    };
    let platforms: Vec<String> = stages
        .iter()
        .map(|stage| format!("linux/{}", stage.arch().deb()))
        .collect();
    output(
        buildah(&["build", "--quiet", "--manifest", NAME])
            .arg(format!("--platform={}", platforms.join(",")))
            .arg(format!("--timestamp={}", release.epoch))
            .arg(format!("--build-arg=VERSION={VERSION}"))
            .arg("--file")
            .arg(release.source.join("packaging/Containerfile"))
            .arg(&context),
    )?;
    let layout = dir.path().join("layout");
    output(
        buildah(&["manifest", "push", "--quiet", "--all", NAME])
            .arg(format!("oci:{}:{VERSION}", layout.display())),
    )?;
    // Its own archives (oci-archive:) have the time of their making.
    let archive = dist.join(format!("rto-agent-{VERSION}.oci.tar"));
    release.tar(&layout, ".", &[], &archive)?;
    run_command(&mut buildah(&["rmi", "--all", "--force"])).or(Ok(()))
}
