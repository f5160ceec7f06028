//! Connections, descriptors and headers up to their limits and beyond.

use std::{
    io::{BufRead as _, BufReader},
    os::unix::process::CommandExt as _,
    process::Stdio,
};

use super::{
    super::{
        faults::clients::{ensure_prompt, status},
        security::group_1,
    },
    Victim,
};
use crate::prelude::*;

/// Opens connections that send nothing, or the head or the body of a request slowly, prints how many were refused, and
/// replaces each one that is closed.
const SLOW: &str = r#"
import select, socket, sys
path, count = sys.argv[1], int(sys.argv[2])
BEGUN = [
    b"",
    b"GET /v1/status HTTP/1.1\r\nx: ",
    b"POST /v1/entries HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n{",
]
opened = 0
def connect():
    global opened
    s = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    s.connect(path)
    kind = opened % 3
    opened += 1
    drip(s, BEGUN[kind])
    poll.register(s.fileno(), select.POLLIN)
    return s.fileno(), (s, kind)
def drip(s, data):
    try:
        s.send(data)
    except OSError:
        pass
poll = select.poll()
held = dict(connect() for _ in range(count))
refused, polls = 0, 0
while not refused and polls < 60:
    polls += 1
    for fd, _ in poll.poll(1000):
        try:
            refused += held[fd][0].recv(12) == b"HTTP/1.1 503"
        except OSError:
            pass
print(refused, flush=True)
poll.register(0, select.POLLIN)
while True:
    # A byte a second; silent ones stay silent.
    for s, kind in held.values():
        if kind:
            drip(s, b" ")
    for fd, _ in poll.poll(1000):
        if fd == 0:
            sys.exit()
        poll.unregister(fd)
        held.pop(fd)[0].close()
        held.update([connect()])
"#;

test!(
    a_member_of_the_group_does_not_keep_root_out,
    needs = [PYTHON3]
);
fn a_member_of_the_group_does_not_keep_root_out() -> anyhow::Result<()> {
    let env = TestEnv::with(&format!(
        "group = \"{}\"\n{}",
        group_1()?,
        near("\"10.88.0.0/24\"")
    ))?;
    fs::set_permissions(env.dir(), fs::Permissions::from_mode(0o755))?;
    let victim = Victim::of(env)?;
    let env = &victim.env;
    let mut members = Vec::new();
    for uid in [NOBODY, NOBODY - 1] {
        let child = Command::new("python3")
            .args(["-c", SLOW])
            .arg(env.socket())
            .arg("512")
            .uid(uid)
            .gid(1)
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn();
        let mut child = KillOnDrop(child?);
        let stdout = child.0.stdout.take().context("no stdout")?;
        let mut refused = String::new();
        BufReader::new(stdout).read_line(&mut refused)?;
        ensure!(refused.trim().parse::<u32>()? > 0, "none was refused");
        members.push(child);
    }
    let took: anyhow::Result<_> = (0..20).map(|_| status(env)).collect();
    ensure_prompt(took?)?;
    env.cli(&["add", "10.1.0.0/24", "--policy", "near"])?;
    env.cli(&["remove", "10.1.0.0/24"])?;
    let log = env.log();
    assert_says(&log, &["connections are refused: the last 128 connections"]);
    drop(members);
    victim.is_well(1)
}

test!(headers_have_a_limit);
fn headers_have_a_limit() -> anyhow::Result<()> {
    let victim = Victim::new()?;
    let many: String = (0..200).map(|i| format!("x-{i}: y\r\n")).collect();
    let long = format!("x: {}\r\n", "y".repeat(1 << 20));
    for headers in [many, long] {
        let mut stream = UnixStream::connect(victim.env.socket())?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        let text = format!("GET /v1/status HTTP/1.1\r\nhost: x\r\n{headers}\r\n");
        // The daemon may close the connection before everything is sent.
        let _closed = stream.write_all(text.as_bytes());
        let mut answer = [0; 12];
        stream.read_exact(&mut answer)?;
        ensure!(&answer == b"HTTP/1.1 431", "{answer:?}");
    }
    victim.is_well(1)
}

test!(bodies_that_come_late);
/// Many clients send one byte each in turn: other clients are answered, and so are these in the end.
fn bodies_that_come_late() -> anyhow::Result<()> {
    const CLIENTS: usize = 60;
    let victim = Victim::new()?;
    let mut clients = Vec::new();
    for i in 0..CLIENTS {
        let body = format!("{{\"cidrs\":[\"10.91.{i}.0/24\"],\"policy\":\"near\"}}");
        let stream = UnixStream::connect(victim.env.socket())?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        let head = format!(
            "POST /v1/entries HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\
             content-type: application/json\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        (&stream).write_all(head.as_bytes())?;
        clients.push((stream, body));
    }
    let longest = clients.iter().map(|(_, body)| body.len()).max();
    for at in 0..longest.unwrap_or(0) {
        for (stream, body) in &clients {
            if let Some(byte) = body.as_bytes().get(at) {
                let mut stream = stream;
                stream.write_all(&[*byte])?;
            }
        }
        if at % 10 == 0 {
            let status = victim.env.socket_request("GET", "/v1/status", "")?;
            ensure!(status["healthy"] == true, "{status:#}");
        }
    }
    for (stream, body) in clients {
        let answer = http::receive(stream)?;
        ensure!(answer.status == 200, "{body}: {answer:?}");
    }
    victim.is_well(1 + CLIENTS)
}

test!(too_few_descriptors_are_an_error);
/// In situations where libraries would panic.
fn too_few_descriptors_are_an_error() -> anyhow::Result<()> {
    let env = configured(&near("\"10.88.0.0/24\""))?;
    let config = env.config().display().to_string();
    for (limit, verb, needed) in [
        ("8", &["run", "--config", &config][..], 32),
        ("100", &["run", "--config", &config], 1024),
        ("8", &["check", "--config", &config], 32),
        ("6", &["status"], 32),
    ] {
        let output = Command::new("bash")
            .args(["-c", &format!("ulimit -n {limit}; exec \"$0\" \"$@\"")])
            .arg(find(None)?)
            .args(verb)
            .env("RTO_AGENT_SOCKET", env.socket())
            .stdin(Stdio::null())
            .output()?;
        let error = refusal(&output)?;
        let wanted = format!("{limit} open files (RLIMIT_NOFILE), and rto-agent needs {needed}");
        ensure!(error.contains(&wanted), "{verb:?}: {error}");
        ensure!(!error.contains("panicked"), "{verb:?}: {error}");
    }
    ensure!(!env.pin_dir().exists());
    Ok(())
}
