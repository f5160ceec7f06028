//! `cargo xtask demo`: the main job, seen with tcpdump, on this machine and without touching any
//! of its connections: two namespaces, a cgroup of the demo's own, an agent attached to that.

use std::{
    fs,
    io::{BufRead as _, BufReader},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use rto_testbed::process::KillOnDrop;

use crate::{
    process::{is_root, output, run as run_command},
    root, setup,
};

const NEAR: &str = "10.99.0.2";
const FAR: &str = "10.99.1.2";
const PORT: u16 = 9;
/// How many SYNs to show of each connection.
const SYNS: usize = 5;

pub(crate) fn run() -> anyhow::Result<()> {
    setup::run()?;
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    run_command(Command::new(cargo).current_dir(root()).args([
        "build",
        "--quiet",
        "--locked",
        "--package",
        "rto-agent",
        "--package",
        "xtask",
    ]))?;
    if !is_root() {
        // Built as the user; shown as root.
        let myself = std::env::current_exe()?;
        return run_command(Command::new("sudo").arg(myself).arg("demo"));
    }
    let stage = Stage::new()?;
    stage.show()
}

/// What the demo makes, and removes.
struct Stage {
    name: String,
    dir: tempfile::TempDir,
    cgroup: PathBuf,
    agent: PathBuf,
}

impl Stage {
    fn new() -> anyhow::Result<Self> {
        let name = format!("rtodemo-{}", std::process::id());
        let stage = Self {
            cgroup: cgroup2()?.join(&name),
            dir: tempfile::tempdir()?,
            agent: root().join("target/debug/rto-agent"),
            name,
        };
        fs::create_dir(&stage.cgroup)?;
        let (a, b) = (stage.client(), stage.server());
        let lines = [
            format!("netns add {a}"),
            format!("netns add {b}"),
            format!("-n {a} link add demo0 type veth peer name demo1 netns {b}"),
            format!("-n {a} addr add 10.99.0.1/24 dev demo0"),
            format!("-n {a} addr add 10.99.1.1/24 dev demo0"),
            format!("-n {b} addr add {NEAR}/24 dev demo1"),
            format!("-n {b} addr add {FAR}/24 dev demo1"),
            format!("-n {a} link set demo0 up"),
            format!("-n {b} link set demo1 up"),
        ];
        for line in lines {
            run_command(Command::new("ip").args(line.split(' ')))?;
        }
        let drop = format!(
            "add table inet d; add chain inet d in {{ type filter hook input priority 0; }}; \
             add rule inet d in tcp dport {PORT} drop"
        );
        run_command(Command::new("ip").args(["netns", "exec", &b, "nft", &drop]))?;
        fs::write(
            stage.config(),
            format!(
                "[agent]\ncgroup = \"{}\"\npin_dir = \"/sys/fs/bpf/{}\"\nsocket = \"{}\"\nstate_dir = \"{}\"\n\n\
                 [policy.same-zone]\ncidrs = [\"10.99.0.0/24\"]\ninitial_rto = \"100ms\"\n",
                stage.cgroup.display(),
                stage.name,
                stage.socket().display(),
                stage.dir.path().join("state").display(),
            ),
        )?;
        Ok(stage)
    }

    fn show(&self) -> anyhow::Result<()> {
        println!("Two namespaces; {NEAR} and {FAR} drop every SYN (a black hole).\n");
        println!("Without rto-agent, SYNs are sent again after");
        self.gaps(NEAR)?;
        println!("\n# config.toml\n{}", fs::read_to_string(self.config())?);
        let log = fs::File::create(self.dir.path().join("log"))?;
        let mut daemon = KillOnDrop(
            Command::new(&self.agent)
                .args(["run", "--config"])
                .arg(self.config())
                .stderr(log)
                .spawn()?,
        );
        let end = Instant::now() + Duration::from_secs(10);
        while !self.socket().exists()
            || !self
                .cli(&["status"])
                .is_ok_and(|text| text.contains("good"))
        {
            if Instant::now() > end || daemon.0.try_wait()?.is_some() {
                bail!(
                    "the agent did not start:\n{}",
                    fs::read_to_string(self.dir.path().join("log"))?
                );
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        println!("$ rto-agent run &");
        for words in [&["lookup", NEAR][..], &["lookup", FAR]] {
            println!("$ rto-agent {}\n{}", words.join(" "), self.cli(words)?);
        }
        println!("\nWith it");
        self.gaps(NEAR)?;
        self.gaps(FAR)?;
        println!("\n$ rto-agent list\n{}", self.cli(&["list"])?);
        println!("\n$ rto-agent detach\n{}", self.cli(&["detach"])?);
        println!("\nWithout it again");
        self.gaps(NEAR)
    }

    /// Connects, and prints the gaps between the SYNs as tcpdump saw them.
    fn gaps(&self, to: &str) -> anyhow::Result<()> {
        let filter = format!("dst host {to} and tcp[tcpflags] & tcp-syn != 0");
        let mut tcpdump = KillOnDrop(
            self.inside("tcpdump")
                .args([
                    "-i",
                    "demo0",
                    "-n",
                    "-l",
                    "--immediate-mode",
                    "-tt",
                    "-c",
                    &SYNS.to_string(),
                    &filter,
                ])
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()?,
        );
        let stderr = tcpdump.0.stderr.take().context("no stderr")?;
        let mut said = BufReader::new(stderr).lines();
        said.find(|line| line.as_ref().map_or(true, |l| l.contains("listening on")))
            .context("tcpdump did not start")??;
        // In the demo's cgroup: there the agent is attached.
        let script = format!(
            "echo $$ > {}/cgroup.procs; exec ip netns exec {} bash -c 'exec 3<>/dev/tcp/{to}/{PORT}'",
            self.cgroup.display(),
            self.client()
        );
        let _connecting = KillOnDrop(
            Command::new("bash")
                .args(["-c", &script])
                .stderr(Stdio::null())
                .spawn()?,
        );
        let stdout = tcpdump.0.stdout.take().context("no stdout")?;
        let times = BufReader::new(stdout)
            .lines()
            .map(|line| {
                let line = line?;
                let time = line.split(' ').next().unwrap_or_default();
                time.parse::<f64>().with_context(|| line.clone())
            })
            .collect::<anyhow::Result<Vec<f64>>>()?;
        let gaps: Vec<String> = times
            .windows(2)
            .map(|t| format!("{:.0} ms", (t[1] - t[0]) * 1000.0))
            .collect();
        println!("  to {to}: {}", gaps.join(", "));
        Ok(())
    }

    fn cli(&self, words: &[&str]) -> anyhow::Result<String> {
        output(
            Command::new(&self.agent)
                .args(words)
                .env("RTO_AGENT_SOCKET", self.socket())
                .env("RTO_AGENT_CONFIG", self.config())
                .stderr(Stdio::null()),
        )
    }

    fn inside(&self, program: &str) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.client(), program]);
        command
    }

    fn client(&self) -> String {
        format!("{}-a", self.name)
    }

    fn server(&self) -> String {
        format!("{}-b", self.name)
    }

    fn config(&self) -> PathBuf {
        self.dir.path().join("config.toml")
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("socket")
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        for netns in [self.client(), self.server()] {
            let _gone = Command::new("ip").args(["netns", "del", &netns]).output();
        }
        let _gone = fs::remove_dir_all(Path::new("/sys/fs/bpf").join(&self.name));
        let end = Instant::now() + Duration::from_secs(2);
        while fs::remove_dir(&self.cgroup).is_err() && self.cgroup.exists() && Instant::now() < end
        {
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

fn cgroup2() -> anyhow::Result<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mounts")?;
    let mut fields = mounts.lines().map(|line| line.split(' ').skip(1));
    fields
        .find_map(|mut f| {
            let point = f.next()?;
            (f.next()? == "cgroup2").then(|| point.into())
        })
        .context("no cgroup2 hierarchy is mounted; see rto-agent doctor")
}
