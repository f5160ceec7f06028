//! etcd and the control plane, on the loopback interface.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use serde_json::{Value, json};

use super::{HOST, free_port};
use crate::{
    arch::Arch,
    ebpf::sha256,
    process::{KillOnDrop, need, output},
    root,
    vm::kernels,
};

/// The processes of the control plane, which end when it is dropped.
pub(super) struct ControlPlane {
    // Dropped before their directory is removed.
    processes: Vec<(&'static str, KillOnDrop)>,
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

const LOOPBACK: &str = "127.0.0.1";
/// Files: the API server's key and certificate, the key of service accounts, and the tokens of the users.
const KEY: &str = "apiserver.key";
const CERTIFICATE: &str = "apiserver.crt";
const ACCOUNTS_KEY: &str = "accounts.key";
const TOKENS: &str = "tokens.csv";
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
        let store = control_plane.etcd(&etcd)?;
        control_plane.api_server(kubernetes, &store)?;
        control_plane.wait_until_ready(kubectl)?;
        control_plane.controllers(kubernetes)?;
        Ok(control_plane)
    }

    /// The directory of the control plane's logs.
    pub(super) fn logs() -> PathBuf {
        root().join("target/node")
    }

    /// The self-signed certificate with which the API server serves, and identifies itself to kubelets.
    pub(super) fn certificate(&self) -> PathBuf {
        self.file(CERTIFICATE)
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

    /// A kubeconfig for processes on this host.
    fn own_kubeconfig(&self, user: &str) -> anyhow::Result<PathBuf> {
        let path = self.file(&format!("{user}.kubeconfig"));
        let config = self.kubeconfig(user, LOOPBACK, &self.certificate());
        fs::write(&path, config.to_string())?;
        Ok(path)
    }

    /// Creates keys, the certificate and tokens.
    fn credentials(&mut self) -> anyhow::Result<()> {
        let names = format!("subjectAltName=IP:{LOOPBACK},IP:{HOST}");
        self.openssl(&format!(
            "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=kube-apiserver -addext {names} -keyout {KEY} -out {CERTIFICATE}"
        ))?;
        self.openssl(&format!("genrsa -out {ACCOUNTS_KEY} 2048"))?;
        self.secret = self.openssl("rand -hex 32")?;
        let line = |(name, groups)| format!("{},{name},{name},{groups}\n", self.token(name));
        Ok(fs::write(self.file(TOKENS), USERS.map(line).concat())?)
    }

    /// Runs openssl with these arguments.
    fn openssl(&self, words: &str) -> anyhow::Result<String> {
        let mut openssl = Command::new("openssl");
        output(openssl.args(words.split(' ')).current_dir(&self.dir))
    }

    /// Starts etcd and returns its address.
    fn etcd(&mut self, program: &Path) -> anyhow::Result<String> {
        let [client, peer] =
            [free_port()?, free_port()?].map(|port| format!("http://{LOOPBACK}:{port}"));
        let mut etcd = self.command("etcd", program)?;
        etcd.args(["--data-dir", "etcd"])
            .args(["--listen-client-urls", &client])
            .args(["--advertise-client-urls", &client])
            .args(["--listen-peer-urls", &peer]);
        self.spawn("etcd", etcd)?;
        Ok(client)
    }

    fn api_server(&mut self, program: &Path, etcd: &str) -> anyhow::Result<()> {
        let mut server = self.command("apiserver", program)?;
        server
            .arg("apiserver")
            .arg(format!("--etcd-servers={etcd}"))
            .arg(format!("--bind-address={LOOPBACK}"))
            .arg(format!("--advertise-address={LOOPBACK}"))
            .arg(format!("--secure-port={}", self.port))
            .args([
                &format!("--tls-cert-file={CERTIFICATE}"),
                &format!("--tls-private-key-file={KEY}"),
                &format!("--kubelet-client-certificate={CERTIFICATE}"),
                &format!("--kubelet-client-key={KEY}"),
            ])
            // The node is called localhost, because its kubelet's port is forwarded from there.
            .arg("--kubelet-preferred-address-types=Hostname")
            .args([
                &format!("--service-account-key-file={ACCOUNTS_KEY}"),
                &format!("--service-account-signing-key-file={ACCOUNTS_KEY}"),
                "--service-account-issuer=https://kubernetes.default.svc",
            ])
            .arg(format!("--token-auth-file={TOKENS}"))
            .arg("--anonymous-auth=false")
            .arg("--authorization-mode=Node,RBAC")
            .arg("--enable-admission-plugins=NodeRestriction")
            .arg("--service-cluster-ip-range=10.96.0.0/24")
            // An endpoint of the API server must not be a loopback address.
            .arg("--endpoint-reconciler-type=none");
        self.spawn("apiserver", server)
    }

    fn controllers(&mut self, program: &Path) -> anyhow::Result<()> {
        let name = "controller-manager";
        let mut manager = self.command(name, program)?;
        manager
            .arg(name)
            .arg("--kubeconfig")
            .arg(self.own_kubeconfig(CONTROLLER_MANAGER)?)
            .arg(format!("--service-account-private-key-file={ACCOUNTS_KEY}"))
            .arg("--use-service-account-credentials=true")
            // An emulated node may be late.
            .arg("--node-monitor-grace-period=300s")
            .args(["--leader-elect=false", "--secure-port=0"]);
        self.spawn(name, manager)?;
        let name = "scheduler";
        let mut scheduler = self.command(name, program)?;
        scheduler
            .arg(name)
            .arg("--kubeconfig")
            .arg(self.own_kubeconfig(SCHEDULER)?)
            .args(["--leader-elect=false", "--secure-port=0"]);
        self.spawn(name, scheduler)
    }

    /// A command with its own log file, which the kernel kills if this process dies.
    fn command(&self, name: &str, program: &Path) -> anyhow::Result<Command> {
        let log = File::create(Self::logs().join(format!("{name}.log")))?;
        let mut command = Command::new("setpriv");
        command
            .args(["--pdeathsig", "KILL"])
            .arg(program)
            .current_dir(&self.dir)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log);
        Ok(command)
    }

    fn spawn(&mut self, name: &'static str, mut command: Command) -> anyhow::Result<()> {
        let child = command.spawn().with_context(|| name.to_owned())?;
        self.processes.push((name, KillOnDrop(child)));
        Ok(())
    }

    fn wait_until_ready(&mut self, kubectl: &Path) -> anyhow::Result<()> {
        let config = self.own_kubeconfig(ADMIN)?;
        let begin = Instant::now();
        loop {
            let mut ready = Command::new(kubectl);
            ready
                .arg("--kubeconfig")
                .arg(&config)
                .args(["get", "--raw", "/readyz"])
                .stderr(Stdio::null());
            if ready.output().context("kubectl")?.stdout == b"ok" {
                println!(
                    "the control plane is ready after {} s",
                    begin.elapsed().as_secs()
                );
                return Ok(());
            }
            self.check_alive()?;
            if begin.elapsed() > READY_LIMIT {
                bail!(
                    "the API server is not ready after {READY_LIMIT:?}: see {}",
                    Self::logs().display()
                );
            }
            std::thread::sleep(Duration::from_millis(500));
        }
    }

    /// Fails if one of the processes has ended.
    fn check_alive(&mut self) -> anyhow::Result<()> {
        for (name, process) in &mut self.processes {
            if let Some(status) = process.0.try_wait()? {
                bail!(
                    "{name}: {status}: see {}",
                    Self::logs().join(format!("{name}.log")).display()
                );
            }
        }
        Ok(())
    }
}
