//! The container image: an OCI archive with all architectures.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use super::{Release, VERSION};
use crate::{
    arch::Arch,
    process::{output, run as run_command},
    vm::image::copy,
};

/// Makes the image of these binaries of the agent.
pub(crate) fn make(
    release: &Release,
    binaries: &[(Arch, PathBuf)],
    dist: &Path,
) -> anyhow::Result<()> {
    let image = Image {
        name: "rto-agent",
        containerfile: &release.source.join("packaging/Containerfile"),
        programs: binaries,
    };
    let archive = dist.join(format!("rto-agent-{VERSION}.oci.tar"));
    image.make(release, &archive)
}

/// An image of one program, FROM scratch.
pub(crate) struct Image<'a> {
    /// The program's file name in the build context, below the architecture's directory.
    pub(crate) name: &'a str,
    pub(crate) containerfile: &'a Path,
    pub(crate) programs: &'a [(Arch, PathBuf)],
}

impl Image<'_> {
    /// Makes the archive with buildah, which gets a temporary storage so that it does not change the host.
    pub(crate) fn make(&self, release: &Release, archive: &Path) -> anyhow::Result<()> {
        let dir = tempfile::tempdir()?;
        let context = dir.path().join("context");
        for (arch, program) in self.programs {
            copy(program, &context.join(arch.deb()).join(self.name))?;
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
        let platforms: Vec<String> = self
            .programs
            .iter()
            .map(|(arch, _)| format!("linux/{}", arch.deb()))
            .collect();
        output(
            buildah(&["build", "--quiet", "--manifest", self.name])
                .arg(format!("--platform={}", platforms.join(",")))
                .arg(format!("--timestamp={}", release.epoch))
                .arg(format!("--build-arg=VERSION={VERSION}"))
                .arg("--file")
                .arg(self.containerfile)
                .arg(&context),
        )?;
        let layout = dir.path().join("layout");
        output(
            buildah(&["manifest", "push", "--quiet", "--all", self.name])
                .arg(format!("oci:{}:{VERSION}", layout.display())),
        )?;
        // buildah's own archives (oci-archive:) contain the time of the build.
        release.tar(&layout, ".", &[], archive)?;
        // The temporary directory is removed in any case.
        let _removed = run_command(&mut buildah(&["rmi", "--all", "--force"]));
        Ok(())
    }
}
