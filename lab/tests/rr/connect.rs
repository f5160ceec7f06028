//! `rto-lab connect` over the loopback interface, as a user runs it, and the records that it and `rto-lab rr` keep.

use std::{fs, net::TcpListener, path::Path, process::Command};

use assert_cmd::assert::OutputAssertExt as _;
use serde_json::Value;

use super::{program, server};

fn rto_lab(args: &[&str]) -> Command {
    let mut command = program(args[0]);
    command.args(&args[1..]);
    command
}

/// Its JSON output.
fn json(args: &[&str]) -> Value {
    let output = rto_lab(args).assert().success().get_output().clone();
    serde_json::from_slice(&output.stdout).unwrap()
}

/// The lines of a log: its manifest, and its records.
fn log(path: &Path) -> (Value, Vec<Value>) {
    let text = fs::read_to_string(path).unwrap();
    let mut lines = text
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap());
    let manifest = lines.next().unwrap();
    let records = lines.flat_map(|line| line["records"].as_array().unwrap().clone());
    (manifest, records.collect())
}

#[test]
fn connect_measures_any_server() {
    // It never calls accept(): the kernel completes the handshakes.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = listener.local_addr().unwrap().to_string();
    let out = json(&["connect", &to, "--count", "100", "--json"]);
    assert_eq!(
        (&out["test"], &out["ended"]),
        (&"TCP_CC".into(), &"done".into())
    );
    assert_eq!(out["latency"]["count"], 100);
    let us = |name: &str| out["latency"][name].as_f64().unwrap();
    assert!(
        ["p50_us", "p90_us", "p99_us", "max_us"].map(us).is_sorted(),
        "{out:#}"
    );
    let number = |name: &str| out[name].as_f64().unwrap();
    let counted = number("transactions_per_s") * number("elapsed_s");
    assert!((99.0..=101.0).contains(&counted), "{out:#}");
    let message = rto_lab(&["connect", &to, "--count", "3"])
        .assert()
        .success();
    let text = String::from_utf8(message.get_output().stdout.clone()).unwrap();
    assert!(
        text.contains("TCP_CC to") && text.contains("handshake "),
        "{text}"
    );
    // Each connection was reset, so none is in TIME_WAIT at this end.
    let sockets = fs::read_to_string("/proc/net/tcp").unwrap();
    let port = format!(":{:04X}", listener.local_addr().unwrap().port());
    let in_time_wait = |line: &&str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        words[2].ends_with(&port) && words[3] == "06"
    };
    assert_eq!(sockets.lines().skip(1).filter(in_time_wait).count(), 0);
    drop(listener);
    // Nothing is recorded before the measurement.
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().display().to_string();
    rto_lab(&["connect", &to, "--out", &out]).assert().code(1);
    assert!(!dir.path().join("connect.jsonl").exists());
    let message = rto_lab(&["connect", &to, "--json"]).assert().code(1);
    let message = String::from_utf8(message.get_output().stderr.clone()).unwrap();
    assert!(message.contains("refused"), "{message}");
}

#[test]
fn records_of_rr_and_connect_have_hosts_and_compare() {
    let (_server, _said, to) = server("127.0.0.1:0");
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("a");
    let [one, other] = ["a", "b"].map(|name| dir.path().join(name).display().to_string());
    let rr = [
        "rr",
        "--connect",
        &to,
        "--pause",
        "1ms",
        "--count",
        "50",
        "--json",
    ];
    let connect = ["connect", &to, "--pause", "1ms", "--count", "50", "--json"];
    for dir in [&one, &other] {
        json(&[&rr[..], &["--out", dir]].concat());
        json(&[&connect[..], &["--out", dir]].concat());
    }
    for (name, test) in [("rr", "TCP_RR"), ("connect", "TCP_CC")] {
        let (manifest, records) = log(&out.join(format!("{name}.jsonl")));
        let hosts = manifest["hosts"].as_array().unwrap();
        assert_eq!(
            (&hosts[0][0], &hosts[1][0]),
            (&"client".into(), &"server".into())
        );
        for host in hosts {
            let facts = &host[1];
            assert_eq!(
                (&facts["device"], &facts["mtu"]),
                (&"lo".into(), &65536.into())
            );
            assert!(
                facts["sysctls"]["tcp_congestion_control"].is_string(),
                "{facts:#}"
            );
            assert!(facts["machine"]["hz"].is_u64(), "{facts:#}");
        }
        let values = |measure: &str| -> usize {
            let of = records
                .iter()
                .filter_map(|one| one["values"][measure].as_array());
            of.map(Vec::len).sum()
        };
        assert_eq!(values("time"), 50, "{records:#?}");
        assert!(
            values("rate") >= 1 && records[0]["factors"]["test"] == test,
            "{records:#?}"
        );
    }
    // Another call adds to it; one with another plan does not.
    rto_lab(&[&connect[..], &["--out", &one]].concat())
        .assert()
        .success();
    let (_, records) = log(&out.join("connect.jsonl"));
    let mut runs: Vec<_> = records
        .iter()
        .map(|one| one["run"].as_u64().unwrap())
        .collect();
    runs.dedup();
    assert_eq!(runs.len(), records.len(), "{runs:?}");
    // In consecutive order of time.
    let ends = records
        .iter()
        .map(|one| one["values"]["elapsed"][0].as_f64().unwrap());
    assert!(ends.is_sorted(), "{records:#?}");
    let page = fs::read_to_string(out.join("connect.html")).unwrap();
    assert!(page.contains("elapsed, s"), "{page}");
    let wider = [&connect[..], &["--connections", "2", "--out", &one]].concat();
    let message = rto_lab(&wider).assert().code(1).get_output().clone();
    assert!(
        String::from_utf8(message.stderr)
            .unwrap()
            .contains("--fresh")
    );
    rto_lab(&[&wider[..], &["--fresh"]].concat())
        .assert()
        .success();

    fs::remove_file(out.join("rr.html")).unwrap();
    let message = rto_lab(&["report", &one])
        .assert()
        .success()
        .get_output()
        .clone();
    let text = String::from_utf8(message.stdout).unwrap();
    assert!(text.contains("server, device: lo"), "{text}");
    assert!(text.contains("TCP_RR") && text.contains("TCP_CC"), "{text}");
    assert!(out.join("rr.html").exists());
    let compared = dir.path().join("c").display().to_string();
    let message = rto_lab(&["compare", &one, &other, "--out", &compared]).assert();
    let text = String::from_utf8(message.success().get_output().stdout.clone()).unwrap();
    assert!(
        text.contains("no different") && text.contains("95 % interval"),
        "{text}"
    );
}

#[test]
fn server_of_another_kind_has_no_host_facts() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = listener.local_addr().unwrap().to_string();
    // It answers like a web server, and closes.
    std::thread::spawn(move || {
        use std::io::Write as _;
        for stream in listener.incoming() {
            let _ = stream
                .unwrap()
                .write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n");
        }
    });
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().display().to_string();
    json(&["connect", &to, "--count", "20", "--json", "--out", &out]);
    let (manifest, records) = log(&dir.path().join("connect.jsonl"));
    assert_eq!(manifest["hosts"].as_array().unwrap().len(), 1);
    assert_eq!(manifest["hosts"][0][0], "client");
    assert!(!records.is_empty());
    let text = fs::read_to_string(dir.path().join("connect.md")).unwrap();
    assert!(text.contains("no rto-lab rr --server"), "{text}");
}
