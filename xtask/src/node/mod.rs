//! `cargo xtask node`: tests the Helm chart on a Kubernetes node in a virtual machine. With `--podman` it tests only
//! the container, run by Debian's podman with the settings of the chart.

use std::fs;

use crate::{
    arch::Arch,
    dist::{Release, image},
    host::{
        Checks,
        debian::{self, Debian},
    },
    root, test,
    vm::{
        self,
        image::{copy, strip, write},
        kernels,
    },
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
    /// Use the agent of `cargo xtask test`, with its shared libraries, instead of a static release build
    #[arg(long)]
    unoptimised: bool,
}

/// The runtime's packages.
const RUNTIME: &str = "podman,crun,netavark";
pub(crate) const PODMAN_CHECKS: &str = concat!(
    include_str!("container.sh"),
    "\n",
    include_str!("podman.sh")
);
pub(crate) const KUBERNETES_CHECKS: &str = concat!(
    include_str!("container.sh"),
    "\n",
    include_str!("kubernetes.sh")
);
/// A storage driver that copies layers; the image has only one.
const STORAGE: &str = "[storage]
driver = \"vfs\"
runroot = \"/run/containers/storage\"
graphroot = \"/var/lib/containers/storage\"
";

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
    let kernel = kernels::named(debian::KERNEL, false)?;
    let image = debian.image(&kernel, PODMAN_CHECKS)?;
    Checks::default().boot(&debian::machine(&kernel, &image))
}

/// Adds the binary, and an image that contains it. Returns the release that the image is of.
fn add_image(debian: &Debian, args: &Args) -> anyhow::Result<Release> {
    let release = Release::of(root())?;
    let built = if args.unoptimised {
        test::build_programs()?;
        root().join("target/debug/rto-agent")
    } else {
        release.binary("rto-agent", Arch::host())?
    };
    let binary = debian.dir().join("usr/local/bin/rto-agent");
    copy(&built, &binary)?;
    strip(&binary)?;
    let srv = debian.dir().join("srv");
    fs::create_dir_all(&srv)?;
    image::make(&release, &[(Arch::host(), binary)], &srv)?;
    write(&srv.join("version"), &release.tag())?;
    Ok(release)
}
