//! `cargo xtask node`: tests the Helm chart on a Kubernetes node in a virtual machine. With `--podman` it tests only
//! the container, run by Debian's podman with the settings of the chart.

use std::{fs, time::Duration};

use crate::{
    arch::Arch,
    dist::{Release, VERSION, image},
    host::{
        Checks,
        debian::{Boot, Debian, write, write_program},
    },
    process::{apt_install, have},
    root,
    vm::{self, image::copy, machine::Clock},
};

mod kubernetes;

/// `cargo xtask node`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Run the image with Debian's podman and the settings of the chart, without Kubernetes
    #[arg(long)]
    podman: bool,
    /// Skip the test, with a message, unless Kubernetes has already been built
    #[arg(long, conflicts_with = "podman")]
    if_built: bool,
    /// The kernel: 6.1, 6.12 or newest
    #[arg(long, default_value = "6.12")]
    kernel: String,
    /// Build the agent as `cargo xtask test` does, instead of a release build, which takes longer
    #[arg(long)]
    unoptimised: bool,
    /// Seconds after which the machine is stopped
    #[arg(long, default_value_t = 2700)]
    limit: u64,
}

/// The runtime's packages.
const RUNTIME: &str = "podman,crun,netavark";
const PODMAN_CHECKS: &str = concat!(
    include_str!("container.sh"),
    "\n",
    include_str!("podman.sh")
);
/// Path of the first program.
const INIT: &str = "/usr/local/lib/init";

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    if args.podman {
        return podman(args);
    }
    if args.if_built && !kubernetes::is_built() {
        println!(
            "NOT RUN: the chart on a node of Kubernetes, which has not been built here: cargo xtask node"
        );
        return Ok(());
    }
    kubernetes::run(args)
}

/// A system for a container runtime. systemd creates cgroups for runtimes that request them over D-Bus.
fn debian_with(runtime: &str) -> anyhow::Result<Debian> {
    Debian::new(&format!(
        "systemd,systemd-sysv,dbus,iproute2,apparmor,{runtime}"
    ))
}

fn podman(args: &Args) -> anyhow::Result<()> {
    vm::install()?;
    let debian = debian_with(RUNTIME)?;
    add_image(&debian, args)?;
    write(&debian.dir().join("etc/containers/storage.conf"), STORAGE)?;
    let boot = Boot {
        kernel: &args.kernel,
        init: INIT,
        clock: Clock::Instructions,
        memory_mib: 2048,
        disk: None,
        network: None,
        limit: Duration::from_secs(args.limit),
    };
    debian.run(PODMAN_CHECKS, &boot, &mut Checks::default())
}

/// A storage driver that copies layers; the image has only one.
const STORAGE: &str = "[storage]
driver = \"vfs\"
runroot = \"/run/containers/storage\"
graphroot = \"/var/lib/containers/storage\"
";

/// Adds the image, the binary that it contains, and the first program.
fn add_image(debian: &Debian, args: &Args) -> anyhow::Result<()> {
    if !have("buildah") {
        apt_install(&["buildah"], "the container's image")?;
    }
    let release = Release::of(root())?;
    let binary = release.binary(Arch::host(), args.unoptimised)?;
    let srv = debian.dir().join("srv");
    fs::create_dir_all(&srv)?;
    image::make(&release, &[(Arch::host(), binary.clone())], &srv)?;
    write(&srv.join("version"), VERSION)?;
    copy(&binary, &debian.dir().join("usr/local/bin/rto-agent"))?;
    write_program(
        &debian.dir().join(INIT.trim_start_matches('/')),
        include_str!("init.sh"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::debian::script;

    #[test]
    fn the_scripts_are_such_that_bash_reads() {
        for checks in [PODMAN_CHECKS, kubernetes::CHECKS] {
            let status = std::process::Command::new("bash")
                .args(["-n", "-c", &script(checks)])
                .status();
            assert!(status.unwrap().success());
        }
    }
}
