//! etcd and the control plane, on the loopback interface.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use serde_json::{Value, json};

use super::{HOST, free_port};
use crate::{
    arch::Arch,
    ebpf::sha256,
    process::{need, output},
    root,
    vm::kernels,
};

/// The processes of the control plane, which the kernel kills when this process ends.
pub(super) struct ControlPlane {
    processes: Vec<(&'static str, Child)>,
    dir: tempfile::TempDir,
    port: u16,
    /// The users' tokens are derived from this secret.
    secret: String,
}

/// Users that the API server knows by a token.
pub(super) const ADMIN: &str = "admin";
pub(super) const KUBELET: &str = "system:node:localhost";
const CONTROLLER_MANAGER: &str = "system:kube-controller-manager";
const SCHEDULER: &str = "system:kube-scheduler";
/// Users with their groups.
const USERS: [(&str, &str); 4] = [
    (ADMIN, "system:masters"),
    (CONTROLLER_MANAGER, ""),
    (SCHEDULER, ""),
    (KUBELET, "system:nodes"),
];

/// Options of the API server. Files are in the directory of the control plane.
const API_SERVER: &str = "
--bind-address=127.0.0.1
--advertise-address=127.0.0.1
--tls-cert-file=apiserver.crt
--tls-private-key-file=apiserver.key
--kubelet-client-certificate=apiserver.crt
--kubelet-client-key=apiserver.key
--kubelet-preferred-address-types=Hostname
--service-account-key-file=accounts.key
--service-account-signing-key-file=accounts.key
--service-account-issuer=https://kubernetes.default.svc
--token-auth-file=tokens.csv
--anonymous-auth=false
--authorization-mode=Node,RBAC
--enable-admission-plugins=NodeRestriction
--service-cluster-ip-range=10.96.0.0/24
--endpoint-reconciler-type=none";
/// Options of the controller manager. An emulated node may be late.
const MANAGER: &str = "
--service-account-private-key-file=accounts.key
--use-service-account-credentials=true
--node-monitor-grace-period=300s
--leader-elect=false
--secure-port=0";
/// Maximum wait until the API server answers.
const READY_LIMIT: Duration = Duration::from_secs(600);

impl ControlPlane {
    /// Starts the control plane and waits until the API server is ready.
    pub(super) fn start(kubernetes: &Path, kubectl: &Path) -> anyhow::Result<Self> {
        need(&[("openssl", "openssl")], "certificates of a control plane")?;
        let etcd = kernels::debian("etcd-server", Arch::host())?.join("usr/bin/etcd");
        fs::create_dir_all(Self::logs())?;
        let mut control_plane = Self {
            dir: tempfile::tempdir()?,
            port: free_port()?,
            secret: String::new(),
            processes: Vec::new(),
        };
        control_plane.credentials()?;
        let [store, peer] =
            [free_port()?, free_port()?].map(|port| format!("http://127.0.0.1:{port}"));
        control_plane.spawn(
            "etcd",
            &etcd,
            &format!(
                "--data-dir etcd --listen-client-urls {store} --advertise-client-urls {store} \
                 --listen-peer-urls {peer}"
            ),
        )?;
        // The node is called localhost, because its kubelet's port is forwarded from there. An endpoint of the API
        // server must not be a loopback address, so there is none.
        let port = control_plane.port;
        let addresses = format!("--etcd-servers={store} --secure-port={port}");
        let options = format!("apiserver {addresses} {API_SERVER}");
        control_plane.spawn("apiserver", kubernetes, &options)?;
        control_plane.wait_until_ready(kubectl)?;
        let config = control_plane.own_kubeconfig(CONTROLLER_MANAGER)?;
        let options = format!("controller-manager --kubeconfig={config} {MANAGER}");
        control_plane.spawn("controller-manager", kubernetes, &options)?;
        let config = control_plane.own_kubeconfig(SCHEDULER)?;
        let options =
            format!("scheduler --kubeconfig={config} --leader-elect=false --secure-port=0");
        control_plane.spawn("scheduler", kubernetes, &options)?;
        Ok(control_plane)
    }

    /// The directory of the control plane's logs.
    pub(super) fn logs() -> PathBuf {
        root().join("target/node")
    }

    /// The self-signed certificate with which the API server serves, and identifies itself to kubelets.
    pub(super) fn certificate(&self) -> PathBuf {
        self.file("apiserver.crt")
    }

    /// A kubeconfig of a user, with the API server's address and the file of its certificate.
    pub(super) fn kubeconfig(&self, user: &str, address: &str, certificate: &Path) -> Value {
        json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": {
                "server": format!("https://{address}:{}", self.port),
                "certificate-authority": certificate,
            }}],
            "users": [{"name": "user", "user": {"token": self.token(user)}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "user"}}],
            "current-context": "test",
        })
    }

    fn token(&self, user: &str) -> String {
        sha256(format!("{user} {}", self.secret).as_bytes())
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The name of a kubeconfig for processes on this host, in the directory of the control plane.
    fn own_kubeconfig(&self, user: &str) -> anyhow::Result<String> {
        let name = format!("{user}.kubeconfig");
        let config = self.kubeconfig(user, "127.0.0.1", &self.certificate());
        fs::write(self.file(&name), config.to_string())?;
        Ok(name)
    }

    /// Creates keys, the certificate and tokens.
    fn credentials(&mut self) -> anyhow::Result<()> {
        self.openssl(&format!(
            "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=kube-apiserver \
             -addext subjectAltName=IP:127.0.0.1,IP:{HOST} -keyout apiserver.key -out apiserver.crt"
        ))?;
        self.openssl("genrsa -out accounts.key 2048")?;
        self.secret = self.openssl("rand -hex 32")?;
        let line = |(name, groups)| format!("{},{name},{name},{groups}\n", self.token(name));
        Ok(fs::write(
            self.file("tokens.csv"),
            USERS.map(line).concat(),
        )?)
    }

    /// Runs openssl with these arguments.
    fn openssl(&self, words: &str) -> anyhow::Result<String> {
        let mut openssl = Command::new("openssl");
        output(openssl.args(words.split(' ')).current_dir(&self.dir))
    }

    /// Starts a program with these words as options and its own log file.
    fn spawn(&mut self, name: &'static str, program: &Path, options: &str) -> anyhow::Result<()> {
        let log = File::create(Self::logs().join(format!("{name}.log")))?;
        let child = Command::new("setpriv")
            .args(["--pdeathsig", "KILL"])
            .arg(program)
            .args(options.split_whitespace())
            .current_dir(&self.dir)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .context(name)?;
        self.processes.push((name, child));
        Ok(())
    }

    fn wait_until_ready(&mut self, kubectl: &Path) -> anyhow::Result<()> {
        let config = self.own_kubeconfig(ADMIN)?;
        let begin = Instant::now();
        while begin.elapsed() < READY_LIMIT {
            let mut ready = Command::new(kubectl);
            ready
                .args(["--kubeconfig", &config, "get", "--raw", "/readyz"])
                .current_dir(&self.dir)
                .stderr(Stdio::null());
            if ready.output().context("kubectl")?.stdout == b"ok" {
                let took = begin.elapsed().as_secs();
                println!("the control plane is ready after {took} s");
                return Ok(());
            }
            self.check_alive()?;
            thread::sleep(Duration::from_millis(500));
        }
        bail!("the API server is not ready after {READY_LIMIT:?}")
    }

    /// Fails if one of the processes has ended.
    fn check_alive(&mut self) -> anyhow::Result<()> {
        for (name, process) in &mut self.processes {
            if let Some(status) = process.try_wait()? {
                bail!("{name}: {status}");
            }
        }
        Ok(())
    }
}
