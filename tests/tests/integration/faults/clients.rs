//! Clients that are slow, silent, numerous or greedy, and a socket that was removed.

use std::os::unix::fs::MetadataExt as _;

use rto_agent_core::wire::bounded::MAX_CIDRS;

use super::{super::security::group_1, descriptors, memory_kb, peak_memory_kb};
use crate::prelude::*;

/// Longest time until a silent client is disconnected, on a busy machine too.
const PATIENCE: Duration = Duration::from_secs(15);
/// Shorter than the time after which silent clients are disconnected (5 s).
const PROMPT: Duration = Duration::from_secs(4);

/// Asserts that these requests did not have to wait for others: most were answered before silent clients are
/// disconnected. If requests have to wait for that, all of them do; on a busy machine a single one may wait as long for
/// a processor.
pub(crate) fn ensure_prompt(mut took: Vec<Duration>) -> anyhow::Result<()> {
    took.sort_unstable();
    let median = took.get(took.len() / 2).context("no request")?;
    ensure!(*median < PROMPT, "{took:?}");
    Ok(())
}

pub(crate) fn status(env: &TestEnv) -> anyhow::Result<Duration> {
    let begin = Instant::now();
    let status = env.socket_request("GET", "/v1/status", "")?;
    ensure!(status["healthy"] == true, "{status:#}");
    Ok(begin.elapsed())
}

fn ask(env: &TestEnv, request: &str) -> anyhow::Result<UnixStream> {
    let mut stream = UnixStream::connect(env.socket())?;
    stream.write_all(request.as_bytes())?;
    Ok(stream)
}

test!(silent_clients_delay_no_other_client);
/// Clients that never send are disconnected; clients that never read delay no other client.
fn silent_clients_delay_no_other_client() -> anyhow::Result<()> {
    let env = TestEnv::with(&near("\"10.88.0.0/24\""))?;
    // A list that does not fit into a socket's buffer.
    let cidrs: Vec<_> = (0..8000u32)
        .map(|i| format!("172.{}.{}.{}", 16 + i / 4096, i / 256 % 16, i % 256))
        .collect();
    let body = serde_json::json!({ "cidrs": cidrs, "policy": "near" }).to_string();
    let added = env.socket_request("POST", "/v1/entries", &body)?;
    ensure!(added["changed"]["added"] == 8000, "{added:#}");
    let before = descriptors(&env)?;
    let mut held = Vec::new();
    for _ in 0..20 {
        // Nothing; half a request; a body that does not arrive; an answer that is not read; events that are not read.
        held.push(UnixStream::connect(env.socket())?);
        held.push(ask(&env, "GET /v1/status HTTP/1.1\r\nho")?);
        held.push(ask(
            &env,
            "POST /v1/entries HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n\
             content-length: 100\r\n\r\n{",
        )?);
        held.push(ask(&env, "GET /v1/entries HTTP/1.1\r\nhost: x\r\n\r\n")?);
        held.push(ask(&env, "GET /v1/events HTTP/1.1\r\nhost: x\r\n\r\n")?);
    }
    let mut took = Vec::new();
    for _ in 0..5 {
        took.push(status(&env)?);
        env.cli(&["add", "10.1.0.0/24", "--policy", "near"])?;
        env.cli(&["remove", "10.1.0.0/24"])?;
    }
    ensure_prompt(took)?;
    // A client that sends nothing is disconnected.
    held[0].set_read_timeout(Some(PATIENCE))?;
    ensure!(held[0].read(&mut [0])? == 0);
    // The number of watchers is limited; further ones get an error.
    for _ in 0..44 {
        held.push(ask(&env, "GET /v1/events HTTP/1.1\r\nhost: x\r\n\r\n")?);
    }
    let answer = eventually("end of watchers", TIMEOUT, || {
        let stream = UnixStream::connect(env.socket())?;
        stream.set_read_timeout(Some(Duration::from_secs(1)))?;
        // A watcher beyond the limit gets an answer that ends.
        Ok(http::request(&stream, "GET", "/v1/events", "").ok())
    })?;
    ensure!(answer.status == 422, "{answer:?}");
    ensure!(
        answer.body.contains("64 clients watch already"),
        "{answer:?}"
    );
    drop(held);
    await_descriptors(&env, before)?;
    status(&env)?;
    Ok(())
}

/// Waits until connections have ended and their descriptors are closed.
fn await_descriptors(env: &TestEnv, before: usize) -> anyhow::Result<()> {
    // A probe or a last check for a watcher may hold some open.
    let is_few = |now: &usize| *now <= before + 4;
    let what = format!("return to {before} descriptors");
    eventually_seen(&what, PATIENCE, || descriptors(env), is_few).map(drop)
}

test!(a_thousand_clients_at_once);
/// More than the daemon can hold: each gets its answer in turn.
fn a_thousand_clients_at_once() -> anyhow::Result<()> {
    const CLIENTS: usize = 1000;
    /// The default of most systems, whatever limit the tests themselves have.
    const DESCRIPTORS: &str = "ulimit -Sn 1024; exec \"$0\" \"$@\"";
    let mut env = configured(&near("\"10.88.0.0/24\""))?;
    env.start_under(&["bash", "-c", DESCRIPTORS].map(str::to_owned))?;
    status(&env)?;
    let before = descriptors(&env)?;
    let begin = Instant::now();
    let mut clients = Vec::new();
    for i in 0..CLIENTS {
        let path = ["status", "entries", "stats"][i % 3];
        let request = format!("GET /v1/{path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
        clients.push(ask(&env, &request)?);
    }
    for (i, client) in clients.iter_mut().enumerate() {
        client.set_read_timeout(Some(PATIENCE))?;
        let mut text = String::new();
        client
            .read_to_string(&mut text)
            .with_context(|| format!("client {i}"))?;
        ensure!(text.starts_with("HTTP/1.1 200 "), "client {i}: {text}");
    }
    eprintln!(
        "{CLIENTS} clients were answered within {:?}",
        begin.elapsed()
    );
    drop(clients);
    // The same number of silent clients: others wait until the first of these are disconnected.
    let idle: Vec<_> = (0..CLIENTS)
        .map(|_| UnixStream::connect(env.socket()))
        .collect::<Result<_, _>>()?;
    let took = status(&env)?;
    eprintln!("behind {CLIENTS} silent clients status took {took:?}");
    ensure!(took < PATIENCE * 2, "{took:?}");
    ensure!(descriptors(&env)? < 1000);
    drop(idle);
    await_descriptors(&env, before)
}

test!(a_request_of_100_mb);
/// 100 MB: rejected at once if a header states the length, and after [`MAX_BODY`] bytes if not.
fn a_request_of_100_mb() -> anyhow::Result<()> {
    const SIZE: usize = 100 << 20;
    let env = TestEnv::with(&near("\"10.88.0.0/24\""))?;
    status(&env)?;
    let before = peak_memory_kb(&env)?;
    let head = "POST /v1/entries HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n";
    // Stated, but not sent.
    let mut stream = ask(&env, &format!("{head}content-length: {SIZE}\r\n\r\n"))?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    let mut answer = [0; 12];
    stream.read_exact(&mut answer)?;
    ensure!(&answer == b"HTTP/1.1 413", "{answer:?}");
    // Sent nevertheless, by twelve clients at once; and in chunks whose total is not stated.
    let piece = vec![b'x'; 1 << 20];
    thread::scope(|scope| -> anyhow::Result<()> {
        let socket = env.socket();
        let piece = &piece;
        let all: Vec<_> = (0..12)
            .map(|i| {
                let socket = socket.clone();
                scope.spawn(move || -> anyhow::Result<String> {
                    let mut stream = UnixStream::connect(socket)?;
                    stream.set_read_timeout(Some(TIMEOUT))?;
                    stream.set_write_timeout(Some(TIMEOUT))?;
                    let chunked = i % 2 == 0;
                    let length = if chunked {
                        "transfer-encoding: chunked".to_owned()
                    } else {
                        format!("content-length: {SIZE}")
                    };
                    write!(stream, "{head}{length}\r\n\r\n")?;
                    for _ in 0..SIZE / piece.len() {
                        let size = format!("{:x}\r\n", piece.len());
                        let parts: &[&[u8]] = if chunked {
                            &[size.as_bytes(), piece, b"\r\n"]
                        } else {
                            &[piece]
                        };
                        if parts.iter().any(|part| stream.write_all(part).is_err()) {
                            // The daemon has closed its end; the answer can still be read.
                            break;
                        }
                    }
                    let mut answer = Vec::new();
                    let _reset_after_the_answer = stream.read_to_end(&mut answer);
                    Ok(String::from_utf8_lossy(&answer).into_owned())
                })
            })
            .collect();
        let took: anyhow::Result<_> = (0..5).map(|_| status(&env)).collect();
        ensure_prompt(took?)?;
        for one in all {
            let answer = one.join().map_err(|_| anyhow::anyhow!("panicked"))??;
            ensure!(answer.starts_with("HTTP/1.1 413 "), "{answer:?}");
        }
        Ok(())
    })?;
    let grown = peak_memory_kb(&env)? - before;
    eprintln!("the daemon's memory grew by {grown} kB at most");
    // Two at a time, of 32 MiB, whose buffers double.
    ensure!(grown < 160 << 10, "{grown} kB");
    ensure!(env.status()?["entries"] == 1);
    // A large valid request is accepted.
    let many = vec!["2001:db8:aaaa:bbbb::/64"; MAX_CIDRS];
    let body = serde_json::json!({ "cidrs": many, "policy": "near" }).to_string();
    ensure!(body.len() > 13 << 20);
    let answer = env.socket_request("POST", "/v1/entries", &body)?;
    ensure!(answer["changed"]["added"] == 1, "{answer:#}");
    // Only errors, and more strings than a request may have.
    let errors = serde_json::json!({ "cidrs": vec![""; MAX_CIDRS], "policy": "near" }).to_string();
    let answer = env.socket_request("POST", "/v1/entries", &errors)?;
    let text = answer["error"].as_str().unwrap_or_default();
    ensure!(
        text.ends_with(&format!("... and {} more", MAX_CIDRS - 50)),
        "{answer:#}"
    );
    let body = serde_json::json!({ "cidrs": vec![""; 5 << 20], "policy": "near" }).to_string();
    let answer = env.socket_request("POST", "/v1/entries", &body)?;
    let text = answer["error"].as_str().unwrap_or_default();
    ensure!(text.contains("at most 524288 CIDRs"), "{answer:#}");
    let grown = peak_memory_kb(&env)? - before;
    eprintln!("{grown} kB with lists of CIDRs");
    ensure!(grown < 160 << 10, "{grown} kB");
    Ok(())
}

test!(head_request_does_not_subscribe_to_events);
/// A HEAD request for the events does not subscribe to them: its connection ends like any other.
fn head_request_does_not_subscribe_to_events() -> anyhow::Result<()> {
    let env = TestEnv::with(&near("\"10.88.0.0/24\""))?;
    let mut stream = ask(&env, "HEAD /v1/events HTTP/1.1\r\nhost: x\r\n\r\n")?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    let mut answer = [0; 12];
    stream.read_exact(&mut answer)?;
    ensure!(&answer == b"HTTP/1.1 405", "{answer:?}");
    let status = env.status()?;
    ensure!(status["healthy"] == true, "{status:#}");
    Ok(())
}

test!(the_sockets_directory_is_removed);
/// The socket comes back with its directory, and the runtime entries with theirs.
fn the_sockets_directory_is_removed() -> anyhow::Result<()> {
    let mut env = TestEnv::new()?;
    let run = env.dir().join("run");
    fs::create_dir(&run)?;
    let text = env.config_text(&near("\"10.88.0.0/24\""));
    let text = text.replace(
        &env.socket().display().to_string(),
        &run.join("control.sock").display().to_string(),
    );
    let state = env.dir().join("state");
    let text = text.replace(
        &state.display().to_string(),
        &run.join("state").display().to_string(),
    );
    fs::write(env.config(), text)?;
    env.start()?;
    let socket = run.join("control.sock").display().to_string();
    let there = ["--socket", &socket];
    let with = |args: &[&str]| env.cli(&[args, &there].concat());
    with(&["add", "10.1.0.0/24", "--policy", "near"])?;
    let memory = memory_kb(&env)?;
    for remove_all in [false, true] {
        if remove_all {
            fs::remove_dir_all(&run)?;
        } else {
            fs::remove_file(&socket)?;
        }
        eventually("socket", TIMEOUT, || Ok(UnixStream::connect(&socket).ok()))?;
        let status = with(&["status", "--json"])?;
        let status: Value = serde_json::from_str(&status)?;
        assert_has(&status, json!({"healthy": true, "entries": 2}));
    }
    env.logs("the socket was removed, and has been created again")?;
    ensure!(memory_kb(&env)? < memory + (20 << 10));
    // Runtime entries are saved again without a request, so that a kill cannot lose them.
    let saved = run.join("state/manual.json");
    eventually("file of runtime entries", TIMEOUT, || {
        Ok(saved.exists().then_some(()))
    })?;
    // A second daemon is still kept out: by the lock on the pins.
    env.second_is_refused(&env.config())?;
    env.restart(Signal::SIGKILL)?;
    env.cli_says(&["list", "--socket", &socket], "10.1.0.0/24")
}

test!(the_socket_of_a_group_is_removed);
/// A socket that must belong to another group than the daemon's cannot be created again: that needs a capability that
/// the daemon has dropped. It logs that and continues; a restart creates the socket.
fn the_socket_of_a_group_is_removed() -> anyhow::Result<()> {
    let mut env = TestEnv::new()?;
    env.net.black_hole(PORT)?;
    let (group, near) = (group_1()?, near("\"10.88.0.0/24\""));
    env.configure(&format!("group = \"{group}\"\n{near}"))?;
    env.start()?;
    ensure!(fs::metadata(env.socket())?.gid() == 1);
    fs::remove_file(env.socket())?;
    let expected = "it was removed, and cannot be created again: chgrp";
    env.wait_log(expected)?;
    // The daemon does not create a socket with another group either.
    ensure!(!env.socket().exists());
    env.assert_syn_gap(to(SERVER_V4, PORT), POLICY_RTO)?;
    ensure!(env.end(Signal::SIGTERM)?.code() == Some(0));
    env.start()?;
    ensure!(fs::metadata(env.socket())?.gid() == 1);
    status(&env).map(drop)
}
