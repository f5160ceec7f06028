//! The container image: an OCI archive with all architectures.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use super::{Release, VERSION};
use crate::{
    arch::Arch,
    process::{output, run as run_command},
};

const NAME: &str = "rto-agent";

/// Makes the image of these binaries by buildah, whose storage is a temporary one: nothing of the host's is changed. The
/// path of the archive.
pub(crate) fn make(
    release: &Release,
    binaries: &[(Arch, PathBuf)],
    dist: &Path,
) -> anyhow::Result<PathBuf> {
    let dir = tempfile::tempdir()?;
    let context = dir.path().join("context");
    for (arch, binary) in binaries {
        let of_arch = context.join(arch.deb());
        fs::create_dir_all(&of_arch)?;
        fs::copy(binary, of_arch.join(NAME))?;
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
    let platforms: Vec<String> = binaries
        .iter()
        .map(|(arch, _)| format!("linux/{}", arch.deb()))
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
    // The temporary directory goes all the same.
    let _removed = run_command(&mut buildah(&["rmi", "--all", "--force"]));
    Ok(archive)
}
