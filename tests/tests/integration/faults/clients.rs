//! Clients that are slow, silent, many or greedy, and a socket that somebody removed.

use std::{
    fs,
    io::{Read as _, Write as _},
    os::unix::{fs::MetadataExt as _, net::UnixStream},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use nix::sys::signal::Signal;
use rto_agent::wire::bounded::MAX_CIDRS;
use rto_tests::{
    agent::{SOON, World},
    http,
    netns::SERVER_V4,
    traffic::Connect,
};

use super::{
    super::{NEAR, near, security::group_1, to},
    descriptors, memory_kb, peak_memory_kb,
};

const PORT: u16 = 4460;
/// How long a client may be silent, with the look of a busy machine.
const PATIENCE: Duration = Duration::from_secs(15);
/// Longer than anybody should wait for `status` on a busy machine.
const PROMPT: Duration = Duration::from_secs(2);

fn status(world: &World) -> anyhow::Result<Duration> {
    let begin = Instant::now();
    let status = world.socket_request("GET", "/v1/status", "")?;
    ensure!(status["healthy"] == true, "{status:#}");
    Ok(begin.elapsed())
}

fn ask(world: &World, request: &str) -> anyhow::Result<UnixStream> {
    let mut stream = UnixStream::connect(world.socket())?;
    stream.write_all(request.as_bytes())?;
    Ok(stream)
}

/// Those that never send are let go, those that never read hold up nobody.
pub(super) fn silent() -> anyhow::Result<()> {
    let world = World::with(&near("\"10.88.0.0/24\""))?;
    // A list that fits into no socket's buffer.
    let cidrs: Vec<_> = (0..8000u32)
        .map(|i| format!("172.{}.{}.{}", 16 + i / 4096, i / 256 % 16, i % 256))
        .collect();
    let body = serde_json::json!({ "cidrs": cidrs, "policy": "near" }).to_string();
    let added = world.socket_request("POST", "/v1/entries", &body)?;
    ensure!(added["changed"]["added"] == 8000, "{added:#}");
    let before = descriptors(&world)?;
    let mut held = Vec::new();
    for _ in 0..20 {
        // Nothing; half a request; a body that does not come; an answer that nobody reads; lines that
        // nobody reads.
        held.push(UnixStream::connect(world.socket())?);
        held.push(ask(&world, "GET /v1/status HTTP/1.1\r\nho")?);
        held.push(ask(
            &world,
            "POST /v1/entries HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n\
             content-length: 100\r\n\r\n{",
        )?);
        held.push(ask(&world, "GET /v1/entries HTTP/1.1\r\nhost: x\r\n\r\n")?);
        held.push(ask(&world, "GET /v1/events HTTP/1.1\r\nhost: x\r\n\r\n")?);
    }
    for _ in 0..5 {
        let took = status(&world)?;
        ensure!(took < PROMPT, "{took:?}");
        world.cli(&["add", "10.1.0.0/24", "--policy", "near"])?;
        world.cli(&["remove", "10.1.0.0/24"])?;
    }
    // Who has said nothing is let go.
    held[0].set_read_timeout(Some(PATIENCE))?;
    ensure!(held[0].read(&mut [0])? == 0);
    // Watchers are few: the rest is told so.
    for _ in 0..44 {
        held.push(ask(&world, "GET /v1/events HTTP/1.1\r\nhost: x\r\n\r\n")?);
    }
    let end = Instant::now() + SOON;
    loop {
        let stream = UnixStream::connect(world.socket())?;
        stream.set_read_timeout(Some(Duration::from_secs(1)))?;
        // One too many has an answer with an end.
        if let Ok(answer) = http::request(&stream, "GET", "/v1/events", "") {
            ensure!(answer.status == 422, "{answer:?}");
            ensure!(answer.body.contains("64 watch already"), "{answer:?}");
            break;
        }
        ensure!(Instant::now() < end, "no end of watchers");
    }
    drop(held);
    await_descriptors(&world, before)?;
    status(&world)?;
    Ok(())
}

/// Connections end, and so do their descriptors.
fn await_descriptors(world: &World, before: usize) -> anyhow::Result<()> {
    let end = Instant::now() + PATIENCE;
    loop {
        let now = descriptors(world)?;
        // A probe or a watcher's last look may have one open.
        if now <= before + 4 {
            return Ok(());
        }
        ensure!(Instant::now() < end, "{before} descriptors, then {now}");
        thread::sleep(Duration::from_millis(50));
    }
}

/// More than there is room for: each gets its answer, in turn.
pub(super) fn thousand() -> anyhow::Result<()> {
    const CLIENTS: usize = 1000;
    /// As most systems have it, whatever the tests have themselves.
    const DESCRIPTORS: &str = "ulimit -Sn 1024; exec \"$0\" \"$@\"";
    let mut world = World::new()?;
    world.configure(&near("\"10.88.0.0/24\""))?;
    world.start_under(&["bash", "-c", DESCRIPTORS].map(str::to_owned))?;
    status(&world)?;
    let before = descriptors(&world)?;
    let begin = Instant::now();
    let mut clients = Vec::new();
    for i in 0..CLIENTS {
        let path = ["status", "entries", "stats"][i % 3];
        let request = format!("GET /v1/{path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
        clients.push(ask(&world, &request)?);
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
    // The same who say nothing: others wait until the first of these are let go.
    let idle: Vec<_> = (0..CLIENTS)
        .map(|_| UnixStream::connect(world.socket()))
        .collect::<Result<_, _>>()?;
    let took = status(&world)?;
    eprintln!("behind {CLIENTS} silent clients status took {took:?}");
    ensure!(took < PATIENCE * 2, "{took:?}");
    ensure!(descriptors(&world)? < 1000);
    drop(idle);
    await_descriptors(&world, before)
}

/// 100 MB: refused at once where the length is told, and after [`MAX_BODY`] bytes where it is not.
pub(super) fn greedy() -> anyhow::Result<()> {
    const SIZE: usize = 100 << 20;
    let world = World::with(&near("\"10.88.0.0/24\""))?;
    status(&world)?;
    let before = peak_memory_kb(&world)?;
    let head = "POST /v1/entries HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n";
    // Told, and not even sent.
    let mut stream = ask(&world, &format!("{head}content-length: {SIZE}\r\n\r\n"))?;
    stream.set_read_timeout(Some(SOON))?;
    let mut answer = [0; 12];
    stream.read_exact(&mut answer)?;
    ensure!(&answer == b"HTTP/1.1 413", "{answer:?}");
    // Sent all the same, by twelve at once; and in pieces whose sum is not told.
    let piece = vec![b'x'; 1 << 20];
    thread::scope(|scope| -> anyhow::Result<()> {
        let socket = world.socket();
        let piece = &piece;
        let all: Vec<_> = (0..12)
            .map(|i| {
                let socket = socket.clone();
                scope.spawn(move || -> anyhow::Result<String> {
                    let mut stream = UnixStream::connect(socket)?;
                    stream.set_read_timeout(Some(SOON))?;
                    stream.set_write_timeout(Some(SOON))?;
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
                            // It was closed: the answer is there to be read.
                            break;
                        }
                    }
                    let mut answer = Vec::new();
                    let _reset_after_the_answer = stream.read_to_end(&mut answer);
                    Ok(String::from_utf8_lossy(&answer).into_owned())
                })
            })
            .collect();
        let took = status(&world)?;
        ensure!(took < PROMPT, "{took:?}");
        for one in all {
            let answer = one.join().map_err(|_| anyhow::anyhow!("panicked"))??;
            ensure!(answer.starts_with("HTTP/1.1 413 "), "{answer:?}");
        }
        Ok(())
    })?;
    let grown = peak_memory_kb(&world)? - before;
    eprintln!("the daemon's memory grew by {grown} kB at most");
    // Four at a time, of 16 MiB, whose buffers double.
    ensure!(grown < 160 << 10, "{grown} kB");
    ensure!(world.json(&["status"])?["entries"] == 1);
    // A large request that is good is taken.
    let many = vec!["2001:db8:aaaa:bbbb::/64"; MAX_CIDRS];
    let body = serde_json::json!({ "cidrs": many, "policy": "near" }).to_string();
    ensure!(body.len() > 13 << 20);
    let answer = world.socket_request("POST", "/v1/entries", &body)?;
    ensure!(answer["changed"]["added"] == 1, "{answer:#}");
    // Nothing but errors, and more strings than a request may have.
    let errors = serde_json::json!({ "cidrs": vec![""; MAX_CIDRS], "policy": "near" }).to_string();
    let answer = world.socket_request("POST", "/v1/entries", &errors)?;
    let said = answer["error"].as_str().unwrap_or_default();
    ensure!(
        said.ends_with(&format!("... and {} more", MAX_CIDRS - 50)),
        "{answer:#}"
    );
    let body = serde_json::json!({ "cidrs": vec![""; 5 << 20], "policy": "near" }).to_string();
    let answer = world.socket_request("POST", "/v1/entries", &body)?;
    let said = answer["error"].as_str().unwrap_or_default();
    ensure!(said.contains("at most 524288 CIDRs"), "{answer:#}");
    let grown = peak_memory_kb(&world)? - before;
    eprintln!("{grown} kB with lists of CIDRs");
    ensure!(grown < 160 << 10, "{grown} kB");
    Ok(())
}

/// A request for the events' headers alone is none for the events: its connection ends like any other.
pub(super) fn headers_of_events() -> anyhow::Result<()> {
    let world = World::with(&near("\"10.88.0.0/24\""))?;
    let mut stream = ask(&world, "HEAD /v1/events HTTP/1.1\r\nhost: x\r\n\r\n")?;
    stream.set_read_timeout(Some(SOON))?;
    let mut answer = [0; 12];
    stream.read_exact(&mut answer)?;
    ensure!(&answer == b"HTTP/1.1 405", "{answer:?}");
    let status = world.json(&["status"])?;
    ensure!(status["healthy"] == true, "{status:#}");
    Ok(())
}

/// It comes back, with its directory, and the entries by hand with theirs.
pub(super) fn removed_socket() -> anyhow::Result<()> {
    let mut world = World::new()?;
    let run = world.dir().join("run");
    fs::create_dir(&run)?;
    let text = world.config_text(&near("\"10.88.0.0/24\""));
    let text = text.replace(
        &world.socket().display().to_string(),
        &run.join("control.sock").display().to_string(),
    );
    let state = world.dir().join("state");
    let text = text.replace(
        &state.display().to_string(),
        &run.join("state").display().to_string(),
    );
    fs::write(world.config(), text)?;
    world.start()?;
    let socket = run.join("control.sock").display().to_string();
    let there = ["--socket", &socket];
    let with = |args: &[&str]| world.cli(&[args, &there].concat());
    with(&["add", "10.1.0.0/24", "--policy", "near"])?;
    let memory = memory_kb(&world)?;
    for remove_all in [false, true] {
        if remove_all {
            fs::remove_dir_all(&run)?;
        } else {
            fs::remove_file(&socket)?;
        }
        let end = Instant::now() + SOON;
        while UnixStream::connect(&socket).is_err() {
            ensure!(Instant::now() < end, "{}", world.log());
            thread::sleep(Duration::from_millis(20));
        }
        let status = with(&["status", "--json"])?;
        let status: serde_json::Value = serde_json::from_str(&status)?;
        ensure!(
            status["healthy"] == true && status["entries"] == 2,
            "{status:#}"
        );
    }
    ensure!(
        world
            .log()
            .contains("the socket was gone; it is there again")
    );
    ensure!(memory_kb(&world)? < memory + (20 << 10));
    // What was said by hand is saved again before anybody asks, and so is not lost by a kill.
    let saved = run.join("state/manual.json");
    let end = Instant::now() + SOON;
    while !saved.exists() {
        ensure!(Instant::now() < end, "{}", world.log());
        thread::sleep(Duration::from_millis(20));
    }
    // A second daemon is kept out all the same: by the pins.
    let second = std::process::Command::new(rto_tests::agent::binary()?)
        .args(["run", "--config"])
        .arg(world.config())
        .output()?;
    let said = String::from_utf8_lossy(&second.stderr);
    ensure!(second.status.code() == Some(1), "{said}");
    ensure!(said.contains("another rto-agent"), "{said}");
    world.end(Signal::SIGKILL)?;
    world.start()?;
    let list = world.cli(&["list", "--socket", &socket])?;
    ensure!(list.contains("10.1.0.0/24"), "{list}");
    Ok(())
}

/// One that has to be given to another group than the daemon's cannot be made again: that takes a capability
/// that was given up. It says so and goes on; a restart makes it.
pub(super) fn removed_socket_of_a_group() -> anyhow::Result<()> {
    let mut world = World::new()?;
    world.net.black_hole(PORT)?;
    let (group, near) = (group_1()?, near("\"10.88.0.0/24\""));
    world.configure(&format!("group = \"{group}\"\n{near}"))?;
    world.start()?;
    ensure!(fs::metadata(world.socket())?.gid() == 1);
    fs::remove_file(world.socket())?;
    let end = Instant::now() + SOON;
    while !world
        .log()
        .contains("it is gone, and cannot be made again: chgrp")
    {
        ensure!(Instant::now() < end, "{}", world.log());
        thread::sleep(Duration::from_millis(20));
    }
    // Not for whoever comes first, either.
    ensure!(!world.socket().exists());
    world.assert_syn_gap(to(SERVER_V4, PORT), &Connect::default(), NEAR)?;
    ensure!(world.end(Signal::SIGTERM)?.code() == Some(0));
    world.start()?;
    ensure!(fs::metadata(world.socket())?.gid() == 1);
    status(&world).map(drop)
}
