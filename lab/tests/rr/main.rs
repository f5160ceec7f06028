//! `rto-lab rr` over the loopback interface, as a user runs it.

#![expect(clippy::unwrap_used, reason = "a test may fail")]

mod connect;

use std::{
    fs,
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{TcpListener, TcpStream},
    process::{Child, ChildStderr, ChildStdout, Command, Stdio},
    time::{Duration, Instant},
};

use assert_cmd::{assert::OutputAssertExt as _, cargo::cargo_bin};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;

/// JSON output, with live lines on stderr.
const LIVE: [&str; 3] = ["--json", "--interval", "100ms"];

/// Part of a live line with measured transactions.
const MEASURED: &str = ", p50 ";

/// A process that is killed on drop.
struct Running(Child);

impl Running {
    fn start(args: &[&str]) -> Self {
        let mut command = rto_lab(args);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        Self(command.spawn().unwrap())
    }

    /// Waits for a live line with this text (enabled by [`LIVE`]); returns the reader of further lines.
    fn wait_for_line(&mut self, wanted: &str) -> BufReader<ChildStderr> {
        let mut stderr = BufReader::new(self.0.stderr.take().unwrap());
        let mut line = String::new();
        while !line.contains(wanted) {
            line.clear();
            assert!(stderr.read_line(&mut line).unwrap() > 0, "it has ended");
        }
        stderr
    }

    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.0.id().try_into().unwrap()), signal).unwrap();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A server on a free port, its output, and its address.
fn server(on: &str) -> (Running, BufReader<ChildStdout>, String) {
    let mut server = Running::start(&["--server", "--on", on]);
    let mut text = BufReader::new(server.0.stdout.take().unwrap());
    let mut line = String::new();
    text.read_line(&mut line).unwrap();
    let to = line.trim().strip_prefix("listening on ").unwrap();
    let to = to.to_owned();
    (server, text, to)
}

fn rto_lab(args: &[&str]) -> Command {
    let mut command = program("rr");
    command.args(args);
    command
}

/// A command of rto-lab.
fn program(verb: &str) -> Command {
    let mut command = Command::new(cargo_bin!("rto-lab"));
    command.arg(verb);
    command
}

/// The JSON and stderr of a client that must exit with this status.
fn measured(to: &str, args: &[&str], status: i32) -> (Value, String) {
    let all = [&["--connect", to, "--json"], args].concat();
    let output = rto_lab(&all).assert().code(status).get_output().clone();
    let json = serde_json::from_slice(&output.stdout).unwrap();
    (json, String::from_utf8(output.stderr).unwrap())
}

#[test]
fn rr_counts_histograms_and_tcp_info() {
    let (server, mut stdout, to) = server("127.0.0.1:0");
    let args = ["--count", "50", "--connections", "3", "--pause", "2ms"];
    let sizes = ["--request", "100", "--response", "2000"];
    let (json, _) = measured(&to, &[&args[..], &sizes].concat(), 0);
    assert_eq!(json["transactions"], 150);
    assert_eq!(json["latency"]["count"], 150);
    assert_eq!(json["connect"]["count"], 3);
    assert_eq!(
        (&json["request_bytes"], &json["response_bytes"]),
        (&100.into(), &2000.into())
    );
    assert_eq!(
        (&json["test"], &json["ended"]),
        (&"TCP_RR".into(), &"done".into())
    );
    let latency = |name: &str| json["latency"][name].as_f64().unwrap();
    let rising = ["min_us", "p50_us", "p90_us", "p99_us", "p99_9_us", "max_us"].map(latency);
    assert!(rising.is_sorted(), "{json:#}");
    assert!((rising[0]..=rising[5]).contains(&latency("mean_us")));
    // The pause does not count as idle time, but 49 pauses passed.
    assert!(json["elapsed_s"].as_f64().unwrap() >= 0.098, "{json:#}");
    let idle = json["longest_idle"]["us"].as_f64().unwrap();
    assert!(idle + 1.0 >= rising[5] * 0.99, "{json:#}");
    assert_eq!(json["longest_idle"]["unfinished"], false);
    let ends = json["tcp"].as_array().unwrap();
    assert_eq!(ends.len(), 3);
    for end in ends {
        assert!(end["client"]["delivered"].as_u64().unwrap() >= 50, "{end}");
        // The server's responses are acknowledged by the next request.
        assert!(end["server"]["srtt_us"].as_u64().unwrap() > 1000, "{end}");
        assert!(end["client"]["rto_us"].as_u64().unwrap() > 0);
    }

    let (json, _) = measured(&to, &["--count", "20", "--new-connection"], 0);
    assert_eq!(
        (&json["test"], &json["transactions"]),
        (&"TCP_CRR".into(), &20.into())
    );
    assert_eq!(json["connect"]["count"], 20);

    server.signal(Signal::SIGINT);
    let mut rest = String::new();
    stdout.read_to_string(&mut rest).unwrap();
    // One connection only checked whether the server listens.
    assert_eq!(rest, "connections 24, transactions 170\n");
    let mut server = server;
    assert_eq!(server.0.wait().unwrap().code(), Some(0));
}

#[test]
fn rr_resolves_both_families() {
    let (_server, _said, to) = server("[::]:0");
    let port = to.rsplit(':').next().unwrap();
    for host in ["127.0.0.1", "[::1]", "localhost"] {
        let to = format!("{host}:{port}");
        let time = ["--duration", "350ms", "--warmup", "50ms", "--pause", "1ms"];
        let begin = Instant::now();
        let (json, text) = measured(&to, &[&LIVE[1..], &time].concat(), 0);
        let lasted = begin.elapsed().as_secs_f64();
        // On a busy host there are fewer and longer intervals than three.
        assert!(text.contains(MEASURED), "{text}");
        // The warm-up neither shortens the measurement nor counts in it.
        let elapsed = json["elapsed_s"].as_f64().unwrap();
        assert!(
            (0.349..=lasted - 0.049).contains(&elapsed),
            "{lasted} s: {json:#}"
        );
    }
}

#[test]
fn client_without_server_fails() {
    let free = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = free.local_addr().unwrap().to_string();
    drop(free);
    for kind in [&[][..], &["--new-connection"]] {
        let all = [&["--connect", &to], kind].concat();
        let output = rto_lab(&all).assert().code(1).get_output().clone();
        assert!(output.stdout.is_empty());
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(error.contains(&to) && error.contains("refused"), "{error}");
    }
    let error = rto_lab(&["--connect", "no.such.host.invalid"])
        .assert()
        .code(1);
    let error = String::from_utf8(error.get_output().stderr.clone()).unwrap();
    assert!(error.contains("no.such.host.invalid"), "{error}");
}

#[test]
fn peer_silent_closed_or_with_other_protocol_fails() {
    let (silent, _said, to) = server("127.0.0.1:0");
    let begin = Instant::now();
    let args = ["--connect", &to, "--pause", "1ms", "--duration", "1m"];
    let mut client = Running::start(&[&args[..], &LIVE, &["--timeout", "2s"]].concat());
    let _stderr = client.wait_for_line(MEASURED);
    silent.signal(Signal::SIGSTOP);
    let (json, status) = finished(client);
    assert_eq!(status, Some(1), "{json:#}");
    assert!(begin.elapsed() < Duration::from_secs(30));
    assert_eq!(json["ended"], "failed");
    assert!(
        json["reason"].as_str().unwrap().contains("no response for"),
        "{json:#}"
    );
    assert!(json["transactions"].as_u64().unwrap() > 0);
    assert_eq!(json["longest_idle"]["unfinished"], true);
    let idle = json["longest_idle"]["us"].as_u64().unwrap();
    let lasted = begin.elapsed().as_micros();
    assert!((2_000_000..lasted).contains(&idle.into()), "{json:#}");

    let (mut gone, _said, to) = server("127.0.0.1:0");
    let args = ["--connect", &to, "--pause", "1ms", "--duration", "1m"];
    let mut client = Running::start(&[&args[..], &LIVE].concat());
    let _stderr = client.wait_for_line(MEASURED);
    gone.0.kill().unwrap();
    let (json, status) = finished(client);
    assert_eq!(
        (status, &json["ended"]),
        (Some(1), &"failed".into()),
        "{json:#}"
    );
    assert!(json["transactions"].as_u64().unwrap() > 0);

    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = listener.local_addr().unwrap().to_string();
    let peer = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(b"SSH-2.0-none\r\n").unwrap();
        let _ = stream.read(&mut [0; 100]);
        stream
    });
    let (json, text) = measured(&to, &["--duration", "5s"], 1);
    assert!(text.contains("does not speak"), "{text}");
    assert_eq!(json["transactions"], 0);
    peer.join().unwrap();
}

#[test]
fn interrupt_prints_measured_results() {
    let (_server, _said, to) = server("127.0.0.1:0");
    let args = ["--connect", &to, "--pause", "1ms", "--duration", "1m"];
    let mut client = Running::start(&[&args[..], &LIVE].concat());
    let _stderr = client.wait_for_line(MEASURED);
    client.signal(Signal::SIGINT);
    let (json, status) = finished(client);
    assert_eq!(
        (status, &json["ended"]),
        (Some(0), &"interrupted".into()),
        "{json:#}"
    );
    assert!(json["transactions"].as_u64().unwrap() > 0);
    assert!(json["elapsed_s"].as_f64().unwrap() < 30.0);
}

/// A peer that answers this number of one-byte requests, and then runs `then`; returns its address.
fn peer(answers: usize, then: fn(TcpStream)) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = listener.local_addr().unwrap().to_string();
    std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.read_exact(&mut [0; 12]).unwrap();
        for _ in 0..answers {
            stream.read_exact(&mut [0]).unwrap();
            stream.write_all(b"s").unwrap();
        }
        then(stream);
    });
    to
}

fn flood(mut stream: TcpStream) {
    while stream.write_all(&[b's'; 1 << 16]).is_ok() {}
}

fn trickle(mut stream: TcpStream) {
    // Otherwise each byte would wait for a delayed ACK, and the reader's own timeout would pass.
    stream.set_nodelay(true).unwrap();
    while stream.write_all(b"s").is_ok() {
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn peer_that_keeps_sending_at_the_end_is_reported() {
    let begin = Instant::now();
    let (json, text) = measured(&peer(3, flood), &["--count", "3"], 1);
    assert!(text.contains("does not speak"), "{text}");
    assert_eq!(json["transactions"], 3);
    assert_eq!(json["tcp"][0]["server"], Value::Null);

    let (json, text) = measured(&peer(3, trickle), &["--count", "3"], 0);
    assert!(text.contains("not in time"), "{text}");
    let remark = json["remarks"][0].as_str().unwrap();
    assert!(remark.contains("not in time"), "{json:#}");
    assert!(begin.elapsed() < Duration::from_secs(30));
}

#[test]
fn trickled_response_times_out() {
    let long = ["--response", "1000000"];
    let begin = Instant::now();
    let args = [&long[..], &["--timeout", "500ms"]].concat();
    let (_, text) = measured(&peer(0, trickle), &args, 1);
    assert!(text.contains("no response for "), "{text}");
    let args = [&long[..], &["--duration", "500ms"]].concat();
    // No transaction failed, but the time is over.
    let (json, _) = measured(&peer(0, trickle), &args, 1);
    assert_eq!(json["transactions"], 0);
    assert!(begin.elapsed() < Duration::from_secs(30));
}

/// Resident memory of a process, KiB, and its threads.
fn resident(process: &Running) -> (u64, u64) {
    let status = fs::read_to_string(format!("/proc/{}/status", process.0.id())).unwrap();
    let number = |name: &str| {
        let line = status.lines().find(|line| line.starts_with(name)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    };
    (number("VmRSS:"), number("Threads:"))
}

#[test]
fn connections_cost_a_server_little_and_are_limited() {
    const MOST: usize = 100;
    let args = ["--server", "--on", "127.0.0.1:0", "--max-connections"];
    let mut server = Running::start(&[&args[..], &[&MOST.to_string()]].concat());
    let mut text = BufReader::new(server.0.stdout.take().unwrap());
    let mut line = String::new();
    text.read_line(&mut line).unwrap();
    let to = line.trim().strip_prefix("listening on ").unwrap();
    // The longest requests and responses.
    let header = *b"rto1\0\x10\0\0\0\x10\0\0";
    let mut taken: Vec<TcpStream> = (0..MOST)
        .map(|_| {
            let mut stream = TcpStream::connect(to).unwrap();
            stream.write_all(&header).unwrap();
            stream.write_all(&[b'q'; 1000]).unwrap();
            stream
        })
        .collect();
    // Accepted in order: these exceed the limit.
    for _ in 0..20 {
        let mut refused = TcpStream::connect(to).unwrap();
        refused
            .set_read_timeout(Some(Duration::from_secs(10)))
            .unwrap();
        assert_eq!(refused.read(&mut [0]).unwrap(), 0);
    }
    let (kib, threads) = resident(&server);
    assert!(threads <= MOST as u64 + 1, "{threads}");
    assert!(kib < 40 << 10, "{kib} KiB");
    // Accepted connections are answered.
    taken[0].write_all(&vec![b'q'; (1 << 20) - 1000]).unwrap();
    let mut response = vec![0; 1 << 20];
    taken[0].read_exact(&mut response).unwrap();
    assert!(response.iter().all(|byte| *byte == b's'));

    server.signal(Signal::SIGINT);
    let mut rest = String::new();
    text.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("connections refused 20"), "{rest}");
    let mut complaints = String::new();
    let mut stderr = server.0.stderr.take().unwrap();
    stderr.read_to_string(&mut complaints).unwrap();
    let lines = complaints.matches("refused: there are 100").count();
    assert!((1..=10).contains(&lines), "{complaints}");
}

fn finished(mut client: Running) -> (Value, Option<i32>) {
    let mut stdout = client.0.stdout.take().unwrap();
    let mut text = String::new();
    stdout.read_to_string(&mut text).unwrap();
    let status = client.0.wait().unwrap();
    let json = serde_json::from_str(&text).unwrap_or(Value::Null);
    (json, status.code())
}
