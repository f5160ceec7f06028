//! `cargo xtask node`: the Helm chart on a node of Kubernetes.
//!
//! etcd and the control plane run on this host's loopback interface. The node is a virtual machine with containerd and a
//! kubelet; `kubernetes.sh` runs in it, and calls helm and kubectl there.

use std::{net::TcpListener, path::Path};

use anyhow::Context as _;
use serde_json::json;

use self::control_plane::{ADMIN, ControlPlane, KUBELET};
use super::{Args, KUBERNETES_CHECKS, add_image, debian_with};
use crate::{
    arch::Arch,
    dist::image,
    host::{
        Checks,
        debian::{self, Debian, UNITS},
        disk,
    },
    tools,
    vm::{
        self,
        image::{copy, write},
        kernels,
        machine::{Clock, Machine},
    },
};

mod build;
mod control_plane;

pub(super) use build::is_built;

/// The runtime's packages.
const RUNTIME: &str = "containerd,runc";
/// The address of this host's loopback interface in the machine.
const HOST: &str = "10.0.2.2";
/// Bytes of the disk, which is a sparse file.
const DISK: u64 = 4 << 30;
const CERTIFICATE: &str = "/etc/kubernetes/apiserver.crt";
/// Mounts the disk with the programs, for containerd and the kubelet.
const MOUNT: &str = "mkdir -p /node
mount -t ext4 /dev/vda /node
";

pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    vm::install()?;
    let kubernetes = build::program()?;
    let helm = tools::helm()?;
    let debian = debian_with(RUNTIME)?;
    add_images(&debian, args)?;
    let disk = disk_of(debian.dir(), &kubernetes, &helm)?;
    // Kubernetes normally uses a kubelet's address, but here its name: the node is called localhost.
    let kubelet_port = free_port()?;
    let logs = || {
        let logs = ControlPlane::logs();
        format!("the control plane's logs are in {}", logs.display())
    };
    let control_plane =
        ControlPlane::start(&kubernetes, &helm.join("kubectl")).with_context(logs)?;
    add_node(debian.dir(), &control_plane, kubelet_port)?;
    let network =
        format!("user,model=virtio-net-pci,hostfwd=tcp:127.0.0.1:{kubelet_port}-:{kubelet_port}");
    let kernel = kernels::named(debian::KERNEL, false)?;
    let image = debian.image(&kernel, KUBERNETES_CHECKS)?;
    let machine = Machine {
        // The same clock as the control plane.
        clock: Clock::HOST,
        memory_mib: 3072,
        disk: Some(&disk),
        network: Some(&network),
        ..debian::machine(&kernel, &image)
    };
    Checks::default().boot(&machine).with_context(logs)
}

/// Adds the agent's image, the chart, and the image of the pods' sandboxes, which containerd's configuration names.
fn add_images(debian: &Debian, args: &Args) -> anyhow::Result<()> {
    let release = add_image(debian, args)?;
    let srv = debian.dir().join("srv");
    release.chart(&srv)?;
    let pause = image::Image {
        programs: &[(Arch::host(), vm::image::BUSYBOX.into())],
        path: "busybox",
        // What holds the namespaces of a pod: it waits.
        config: json!({"Entrypoint": ["/busybox", "sleep", "2147483647"]}),
    };
    let tag = release.tag();
    pause.make(&release, &srv.join(format!("pause-{tag}.oci.tar")))?;
    let config = include_str!("containerd.toml").replace("VERSION", &tag);
    write(&debian.dir().join("etc/containerd/config.toml"), &config)
}

/// The disk, with the programs.
fn disk_of(top: &Path, kubernetes: &Path, helm: &Path) -> anyhow::Result<tempfile::TempPath> {
    let dir = vm::image::directory()?;
    let bin = dir.path().join("bin");
    copy(kubernetes, &bin.join("kubernetes"))?;
    for program in ["helm", "kubectl"] {
        copy(&helm.join(program), &bin.join(program))?;
    }
    disk::add(top, dir.path(), DISK, MOUNT)
}

/// Adds the files that make the machine a node of this control plane.
fn add_node(top: &Path, control_plane: &ControlPlane, port: u16) -> anyhow::Result<()> {
    // The kubelet considers a node ready only if it has a pod network, although pods with the node's own network do not
    // need one.
    let network = json!({"cniVersion": "0.4.0", "name": "none", "plugins": [{"type": "loopback"}]});
    let file = top.join("etc/cni/net.d/none.conflist");
    write(&file, &network.to_string())?;
    // The kubelet copies these files into pods.
    write(&top.join("etc/hosts"), "127.0.0.1 localhost\n")?;
    write(&top.join("etc/resolv.conf"), "")?;
    let unit = top.join(UNITS).join("kubelet.service");
    write(&unit, include_str!("kubelet.service"))?;
    let dir = top.join("etc/kubernetes");
    copy(&control_plane.certificate(), &dir.join("apiserver.crt"))?;
    let kubelet = json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        // Only the API server, for `kubectl exec`.
        "authentication": {
            "anonymous": {"enabled": false},
            "webhook": {"enabled": false},
            "x509": {"clientCAFile": CERTIFICATE},
        },
        "authorization": {"mode": "AlwaysAllow"},
        "port": port,
        "cgroupDriver": "systemd",
        "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
        // How soon a changed ConfigMap is mounted; the default is one minute.
        "syncFrequency": "10s",
    });
    write(&dir.join("kubelet.json"), &kubelet.to_string())?;
    for (name, user) in [("kubelet", KUBELET), ("admin", ADMIN)] {
        let config = control_plane.kubeconfig(user, HOST, Path::new(CERTIFICATE));
        write(&dir.join(format!("{name}.kubeconfig")), &config.to_string())?;
    }
    // For the second agent, which runs on the node itself.
    write(
        &top.join("etc/rto-agent/config.toml"),
        "[policy.other]\ncidrs = [\"203.0.113.0/24\"]\ninitial_rto = \"200ms\"\n",
    )
}

/// A free port of the loopback interface.
fn free_port() -> anyhow::Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}
