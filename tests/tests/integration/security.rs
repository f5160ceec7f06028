//! The claims of `docs/reference/security.md`.

use std::{
    net::{SocketAddr, TcpStream},
    os::unix::fs::{DirBuilderExt as _, MetadataExt as _, chown, symlink},
};

use crate::prelude::*;

/// CAP_NET_ADMIN, CAP_SYS_PTRACE, CAP_SYS_ADMIN, CAP_PERFMON, CAP_BPF.
const KEPT: u64 = 1 << 12 | 1 << 19 | 1 << 21 | 1 << 38 | 1 << 39;

/// A hexadecimal value in a thread's `/proc/.../status`.
fn field(status: &str, name: &str) -> anyhow::Result<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix(name));
    Ok(u64::from_str_radix(
        line.context("no such line")?.trim(),
        16,
    )?)
}

/// The name of group 1, which every system has and which is not root's.
pub(super) fn group_1() -> anyhow::Result<String> {
    let groups = fs::read_to_string("/etc/group")?;
    let group = groups.lines().find_map(|line| {
        let (name, rest) = line.split_once(':')?;
        (rest.split(':').nth(1) == Some("1")).then(|| name.to_owned())
    });
    group.context("no group 1")
}

test!(unneeded_privileges_are_dropped);
fn unneeded_privileges_are_dropped() -> anyhow::Result<()> {
    let mut env = TestEnv::new()?;
    env.net.black_hole(PORT)?;
    // Giving the socket to a group needs a capability that is dropped after that.
    let group = group_1()?;
    env.configure(&format!(
        "group = \"{group}\"\n{}",
        near("\"10.88.0.0/24\"")
    ))?;
    env.start()?;
    assert_eq!(fs::metadata(env.socket())?.gid(), 1);
    let own = fs::read_to_string("/proc/self/status")?;
    ensure!(
        field(&own, "CapEff:")? & !KEPT != 0,
        "nothing could be given up"
    );
    let check = || -> anyhow::Result<usize> {
        let tasks = fs::read_dir(format!("/proc/{}/task", env.pid()?))?;
        let mut count = 0;
        for task in tasks {
            let status = fs::read_to_string(task?.path().join("status"))?;
            for set in ["CapInh:", "CapPrm:", "CapEff:", "CapBnd:", "CapAmb:"] {
                let there = field(&status, set)?;
                ensure!(there & !KEPT == 0, "{set} {there:x}\n{status}");
            }
            assert_eq!(field(&status, "NoNewPrivs:")?, 1);
            count += 1;
        }
        Ok(count)
    };
    // The engine has a separate thread.
    assert!(check()? >= 2);
    // Everything that may follow later still works.
    env.wait_status("the probe", |status| status["probe"]["verdict"] == "good")?;
    env.cli(&["add", "10.88.1.0/24", "--policy", "near"])?;
    env.cli(&["add", "10.88.2.0/24", "--policy", "near", "--save"])?;
    if lacks("iter-tcp")? {
        env.cli_fails(&["apply"])?;
    } else {
        env.cli(&["apply"])?;
    }
    env.cli(&["detach"])?;
    env.cli(&["attach"])?;
    env.assert_syn_gap(to(SERVER_V4, PORT), POLICY_RTO)?;
    check()?;
    assert_eq!(env.status()?["healthy"], true);
    assert_eq!(env.end(Signal::SIGTERM)?.code(), Some(0));
    assert!(!env.socket().exists() && !env.pin_dir().exists());
    Ok(())
}

/// Starts an agent with one path of its configuration replaced; returns the error.
fn refusal(env: &mut TestEnv, from: &Path, to: &Path) -> anyhow::Result<String> {
    let (from, to) = (from.display().to_string(), to.display().to_string());
    let text = env
        .config_text("")
        .replace(&format!("\"{from}\""), &format!("\"{to}\""));
    ensure!(text.contains(&to), "{text}");
    fs::write(env.config(), text)?;
    env.start_fails()
}

test!(directories_of_others_are_refused);
fn directories_of_others_are_refused() -> anyhow::Result<()> {
    let mut env = TestEnv::new()?;
    let at = |name: &str| -> PathBuf { env.dir().join(name) };
    let (state, socket) = (at("state"), env.socket());
    let (theirs, open, victim) = (at("theirs"), at("open"), at("victim"));
    for dir in [&theirs, &open, &victim] {
        fs::create_dir(dir)?;
    }
    chown(&theirs, Some(NOBODY), None)?;
    fs::set_permissions(&open, fs::Permissions::from_mode(0o777))?;
    let link = open.join("state");
    symlink(&victim, &link)?;
    let (owned, writable) = ("it belongs to uid 65534", "all users can write to it");
    for (from, to, why) in [
        (&state, theirs.clone(), owned),
        (&state, theirs.join("below"), owned),
        (&state, open.clone(), writable),
        (&state, link, writable),
        (&socket, theirs.join("control.sock"), owned),
        (&socket, open.join("control.sock"), writable),
    ] {
        let error = refusal(&mut env, from, &to)?;
        ensure!(error.contains(why), "{}: {error}", to.display());
    }
    assert_eq!(fs::read_dir(&victim)?.count(), 0);
    assert_eq!(fs::read_dir(&theirs)?.count(), 0);
    // A link at the socket's path is not followed, whatever its owner.
    let precious = victim.join("precious");
    fs::write(&precious, "kept")?;
    symlink(&precious, env.socket())?;
    env.configure("")?;
    let error = env.start_fails()?;
    ensure!(error.contains("exists and is not a socket"), "{error}");
    assert_eq!(fs::read_to_string(&precious)?, "kept");
    fs::remove_file(env.socket())?;
    // Without these the daemon starts.
    env.start()
}

/// A planted directory; removed when dropped, also after a panic.
struct Planted(PathBuf);

impl Drop for Planted {
    fn drop(&mut self) {
        let _gone = fs::remove_dir(&self.0);
    }
}

test!(a_planted_pin_directory_is_refused);
fn a_planted_pin_directory_is_refused() -> anyhow::Result<()> {
    let mut env = TestEnv::new()?;
    let planted = Planted(env.pin_dir());
    fs::DirBuilder::new().mode(0o755).create(&planted.0)?;
    chown(&planted.0, Some(NOBODY), None)?;
    env.configure("")?;
    let error = env.start_fails()?;
    assert_says(&error, &["pin_dir", "it belongs to uid 65534"]);
    // Commands that remove pins do not touch it either.
    env.cli_refuses(&["detach"], "it belongs to uid 65534")?;
    assert!(planted.0.is_dir());
    Ok(())
}

test!(metrics_port_serves_nothing_else);
fn metrics_port_serves_nothing_else() -> anyhow::Result<()> {
    let port = std::net::TcpListener::bind("127.0.0.1:0")?
        .local_addr()?
        .port();
    let env = TestEnv::with(&format!(
        "metrics = \"127.0.0.1:{port}\"\n{}",
        near("\"10.88.0.0/24\"")
    ))?;
    let ask = |method: &str, path: &str| -> anyhow::Result<http::Answer> {
        http::request(TcpStream::connect(("127.0.0.1", port))?, method, path, "")
    };
    for path in ["/", "/metrics", "/healthz", "/readyz"] {
        let answer = ask("GET", path)?;
        assert_eq!(answer.status, 200, "{path}");
        for secret in ["10.88.", &env.dir().display().to_string()] {
            ensure!(!answer.body.contains(secret), "{path} shows {secret}");
        }
        for method in ["POST", "PUT", "DELETE"] {
            assert_eq!(ask(method, path)?.status, 405, "{method} {path}");
        }
    }
    for path in [
        "/v1/status",
        "/v1/entries",
        "/v1/events",
        "/v1/detach",
        "/../etc/passwd",
        "/debug/pprof",
    ] {
        for method in ["GET", "POST"] {
            assert_eq!(ask(method, path)?.status, 404, "{method} {path}");
        }
    }
    // The control socket answers the same paths, so they are not just wrong.
    assert_eq!(
        env.socket_request("GET", "/v1/status", "")?["healthy"],
        true
    );
    // The metrics cannot be reached from another network namespace. The control: the same client reaches a listener at
    // this address of its own namespace.
    let there = SocketAddr::from(([127, 0, 0, 1], port));
    let connect = || Traffic::connect(&env.net.client, None, there, Connect::default());
    assert_eq!(connect()?.outcome()?.result, "ECONNREFUSED");
    let _other = Traffic::serve(&env.net.client, None, there)?;
    assert_eq!(connect()?.outcome()?.result, "connected");
    Ok(())
}
