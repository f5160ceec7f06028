//! The static binary of an architecture.

use std::{fs, path::PathBuf};

use super::Release;
use crate::{
    arch::Arch,
    process::{command, need, output, run as run_command},
    tools::{self, cargo},
};

const CARGO_AUDITABLE: &str = "0.7.7";
const CARGO_CYCLONEDX: &str = "0.5.9";

impl Release {
    /// Builds the binary of an architecture. This needs no linker of that architecture: rustc has rust-lld, and start
    /// files and a C library for its musl targets. The binary includes a list of its dependencies (cargo-auditable).
    pub(crate) fn binary(&self, program: &str, arch: Arch) -> anyhow::Result<PathBuf> {
        let sysroot = self.install_target(arch)?;
        let path = tools::ensure("cargo-auditable", CARGO_AUDITABLE, &[], "dist")?;
        // For the assembler of rustls' ring, in rto-lab.
        let compiler = format!("{}-linux-gnu-gcc", arch.rpm());
        if program == "rto-lab" {
            let package = format!("gcc-{}-linux-gnu", arch.rpm().replace('_', "-"));
            need(&[(&compiler, &package)], "rto-lab")?;
        }
        let mut flags = vec![
            "-Clinker=rust-lld".to_owned(),
            "-Clinker-flavor=ld.lld".to_owned(),
            "-Clink-self-contained=yes".to_owned(),
            "-Ctarget-feature=+crt-static".to_owned(),
        ];
        flags.extend(tools::remap(&self.source, &sysroot));
        run_command(
            cargo("auditable build --quiet --locked --profile=dist --package")
                .args([program, "--bin", program, "--target", &arch.target()])
                .current_dir(&self.source)
                .env(format!("CC_{}", arch.target().replace('-', "_")), compiler)
                .env("PATH", path)
                .env("CARGO_TARGET_DIR", &self.build)
                .env("CARGO_ENCODED_RUSTFLAGS", flags.join("\u{1f}"))
                .env("CARGO_INCREMENTAL", "0")
                .env("SOURCE_DATE_EPOCH", &self.epoch),
        )?;
        Ok(self.build.join(arch.target()).join("dist").join(program))
    }

    /// The software bill of materials (`CycloneDX`) of a program of an architecture.
    pub(super) fn sbom(&self, program: &str, arch: Arch) -> anyhow::Result<String> {
        let path = tools::ensure("cargo-cyclonedx", CARGO_CYCLONEDX, &[], "SBOM")?;
        let name = format!("{program}-{}", arch.deb());
        let dir = program.trim_start_matches("rto-");
        run_command(
            cargo("cyclonedx --quiet --format=json --spec-version=1.5 --no-build-deps")
                .arg(format!("--manifest-path={dir}/Cargo.toml"))
                .args(["--target", &arch.target(), "--override-filename", &name])
                .current_dir(&self.source)
                .env("PATH", path)
                .env("SOURCE_DATE_EPOCH", &self.epoch),
        )?;
        // cargo-cyclonedx writes an SBOM for each member of the workspace, next to its manifest.
        let file = format!("{name}.json");
        let sbom = fs::read_to_string(self.source.join(dir).join(&file))?;
        let find = format!("find . -maxdepth 2 -name {file} -delete");
        run_command(command(&find).current_dir(&self.source))?;
        Ok(sbom.replace(&self.source.display().to_string(), "/rto-agent"))
    }

    /// Installs the standard library of a target unless it is installed; returns the toolchain's directory.
    fn install_target(&self, arch: Arch) -> anyhow::Result<PathBuf> {
        let sysroot = output(command("rustc --print sysroot").current_dir(&self.source))?;
        let add = format!("rustup --quiet target add {}", arch.target());
        run_command(command(&add).current_dir(&self.source))?;
        Ok(sysroot.into())
    }
}
