//! The lab's workloads: the cost of losses without the agent and the gain from each timer, read from the records.

use std::ops::Range;

use crate::prelude::*;

/// Time that processes add to a request on an idle machine, milliseconds, including the computation of a TLS handshake.
const PROCESSES_MS: f64 = 30.0;
/// The RTO for the smoothed RTT of the link: a timer of 200 ms takes 203 ms.
const KERNEL_RTO_MS: f64 = 200.0;
const SYN_RTO: Duration = Duration::from_secs(1);
const SHORT_SYN_RTO: Duration = Duration::from_millis(100);

/// Durations of all requests, milliseconds.
struct Times(Vec<Value>);

impl Times {
    /// Runs a workload with these levels of the factors "timers" and "lost".
    fn of(workload: &str, timers: &[&str], lost: &[&str], args: &[&str]) -> anyhow::Result<Self> {
        Self::measure(("workloads", "workload", workload), timers, lost, args)
    }

    /// Runs an experiment with a level of one factor, and these levels of the factors "timers" and "lost".
    fn measure(
        (experiment, factor, level): (&str, &str, &str),
        timers: &[&str],
        lost: &[&str],
        args: &[&str],
    ) -> anyhow::Result<Self> {
        let out = tempfile::tempdir()?;
        let one = |factor: &str, level: &&str| format!("--only={factor}={level}");
        let mut all = vec![one(factor, &level)];
        all.extend(timers.iter().map(|level| one("timers", level)));
        all.extend(lost.iter().map(|level| one("lost", level)));
        let only: Vec<&str> = all.iter().map(String::as_str).collect();
        quick(experiment, out.path(), &[&only, args].concat())?;
        Self::read(&out.path().join(format!("{experiment}.jsonl")))
    }

    fn read(log: &Path) -> anyhow::Result<Self> {
        let text = fs::read_to_string(log)?;
        let mut records = Vec::new();
        for line in text.lines().skip(1) {
            let line: Value = serde_json::from_str(line)?;
            records.extend(line["records"].as_array().cloned().unwrap_or_default());
        }
        Ok(Self(records))
    }

    /// The durations in a cell, sorted.
    fn at(&self, timers: &str, lost: &str) -> anyhow::Result<Vec<f64>> {
        let is = |record: &&Value| {
            record["factors"]["timers"] == timers && record["factors"]["lost"] == lost
        };
        let lists = self
            .0
            .iter()
            .filter(is)
            .filter_map(|one| one["values"]["time"].as_array());
        let mut all: Vec<f64> = lists.flatten().filter_map(Value::as_f64).collect();
        all.sort_by(f64::total_cmp);
        ensure!(!all.is_empty(), "{timers}, {lost}: nothing was measured");
        Ok(all)
    }

    /// The number of requests in a cell that took at least this long.
    fn slow(&self, timers: &str, lost: &str, least_ms: f64) -> anyhow::Result<usize> {
        Ok(self
            .at(timers, lost)?
            .iter()
            .filter(|ms| **ms >= least_ms)
            .count())
    }
}

fn median(sorted: &[f64]) -> anyhow::Result<f64> {
    sorted.get(sorted.len() / 2).copied().context("no value")
}

/// The range for a timer that fires once: never earlier, and as late as the timer wheel and the machine make it.
fn once(rto: Duration) -> Range<f64> {
    rto.as_secs_f64() * 1e3..latest(rto).as_secs_f64() * 1e3 + PROCESSES_MS
}

/// A workload with one connection per request: a lost first SYN costs the SYN timer, and no other timer helps.
fn handshakes(workload: &str) -> anyhow::Result<()> {
    let (timers, lost) = (
        ["kernel", "initial_rto", "rto_min"],
        ["nothing", "first SYN"],
    );
    let times = Times::of(workload, &timers, &lost, &["--runs", "2"])?;
    for (timers, expected) in [
        ("kernel", once(SYN_RTO)),
        ("initial_rto", once(SHORT_SYN_RTO)),
        ("rto_min", once(SYN_RTO)),
    ] {
        // The control: without loss no request waits for a timer.
        let lossless = median(&times.at(timers, "nothing")?)?;
        ensure!(lossless < PROCESSES_MS, "{timers}: {lossless} without loss");
        let all = times.at(timers, "first SYN")?;
        ensure!(
            all.iter().all(|ms| expected.contains(ms)),
            "{timers}: {all:?} are not all in {expected:?}"
        );
    }
    Ok(())
}

test!(a_tls_handshake_gains_from_initial_rto, || measured(|| {
    handshakes("TLS handshake")
}));
test!(a_health_check_gains_from_initial_rto, || measured(|| {
    handshakes("health check")
}));

/// A workload in which no segment follows a request: a loss waits for the RTO, which only rto_min shortens.
fn gains_from_rto_min(workload: &str) -> anyhow::Result<()> {
    const LOST: &str = "3 % of data";
    let timers = ["kernel", "initial_rto", "rto_min"];
    let times = Times::of(workload, &timers, &["nothing", LOST], &[])?;
    for timers in ["kernel", "initial_rto", "rto_min"] {
        let lossless = times.slow(timers, "nothing", KERNEL_RTO_MS)?;
        ensure!(lossless == 0, "{timers}: {lossless} waited without loss");
    }
    // About 15 of 300 requests lose their last segment or the response's.
    for timers in ["kernel", "initial_rto"] {
        let slow = times.slow(timers, LOST, KERNEL_RTO_MS)?;
        ensure!(slow >= 4, "{timers}: {slow} waited for the RTO");
    }
    let all = times.at("rto_min", LOST)?;
    let slow = times.slow("rto_min", LOST, KERNEL_RTO_MS)?;
    ensure!(
        slow == 0,
        "rto_min: {slow} waited as long: {:?}",
        all.last()
    );
    // Losses occurred nevertheless.
    let again = times.slow("rto_min", LOST, 12.0)?;
    ensure!(again >= 4, "rto_min: {again} were sent again");
    Ok(())
}

test!(request_response_gains_from_rto_min, || measured(|| {
    gains_from_rto_min("request/response")
}));
test!(http1_gains_from_rto_min, || measured(|| {
    gains_from_rto_min("HTTP/1.1")
}));

/// A workload in which more segments follow: they reveal a loss without a timer, so that few requests wait for one.
fn beside_each_other(workload: &str) -> anyhow::Result<()> {
    const LOST: &str = "3 % of data";
    let times = Times::of(workload, &["kernel", "rto_min"], &["nothing", LOST], &[])?;
    for timers in ["kernel", "rto_min"] {
        let lossless = times.slow(timers, "nothing", KERNEL_RTO_MS)?;
        ensure!(lossless == 0, "{timers}: {lossless} waited without loss");
        // Segments were lost nevertheless, and at least a quarter of the late requests did not wait for the kernel's
        // RTO, as all late requests do if no segment follows.
        let lossless = median(&times.at(timers, "nothing")?)?;
        let all = times.at(timers, LOST)?;
        let late: Vec<f64> = all.into_iter().filter(|ms| *ms >= 2.0 * lossless).collect();
        ensure!(late.len() >= 8, "{timers}: {} were late", late.len());
        let quarter = late[late.len() / 4];
        ensure!(quarter < KERNEL_RTO_MS / 2.0, "{timers}: {late:?}");
    }
    // In an outage no segment follows, so the timer ends the wait.
    const OUTAGE: &str = "50-500 ms of all";
    let times = Times::of(workload, &["kernel", "all"], &[OUTAGE], &["--runs", "1"])?;
    for timers in ["kernel", "all"] {
        let all = times.at(timers, OUTAGE)?;
        ensure!(
            all.iter().all(|ms| (250.0..1500.0).contains(ms)),
            "{timers}: {all:?}"
        );
    }
    Ok(())
}

test!(http2_hardly_waits_for_a_timer, || measured(|| {
    beside_each_other("HTTP/2")
}));
test!(a_grpc_stream_hardly_waits_for_a_timer, || measured(|| {
    beside_each_other("gRPC stream")
}));

/// A client that connects for each request, in an outage that is shorter than the kernel's SYN timer: without the agent
/// its connections wait for that timer.
fn a_grpc_client_that_reconnects_gains_from_initial_rto() -> anyhow::Result<()> {
    const OUTAGE: &str = "0.3 s of all";
    let grpc = ("programs", "program", "gRPC, grpcio");
    let timers = ["kernel", "100 ms"];
    let times = Times::measure(grpc, &timers, &["nothing", OUTAGE], &["--runs", "1"])?;
    let slow = |timers, lost| times.slow(timers, lost, 1000.0);
    for timers in timers {
        ensure!(slow(timers, "nothing")? == 0, "{timers}: slow without loss");
    }
    // Six of the connections begin in the outage.
    let [own, with] = [slow("kernel", OUTAGE)?, slow("100 ms", OUTAGE)?];
    ensure!(
        own >= 3 && with == 0,
        "slow: {own} without it, {with} with it"
    );
    Ok(())
}
test!(
    a_grpc_client_that_reconnects_gains_from_initial_rto,
    needs = [GRPC],
    || { measured(a_grpc_client_that_reconnects_gains_from_initial_rto) }
);

test!(
    a_browser_loads_pages_over_new_and_kept_connections,
    needs = [BROWSER],
    || measured(|| {
        let out = tempfile::tempdir()?;
        let pages = ["new", "kept"].map(|by| format!("--only=page=12 objects, Chromium, {by}"));
        let only = ["--only=timers=TLP", "--only=round trip=40", "--runs=2"];
        let path = out.path().to_string_lossy();
        let args = ["pages", "--out", &path, &pages[0], &pages[1]];
        stdout_of("pages", rto_tests::lab::run(&[&args[..], &only].concat())?)?;
        let all = Times::read(&out.path().join("pages.jsonl"))?.0;
        ensure!(all.len() == 4, "{} runs", all.len());
        for record in all {
            let ms = |measure: &str| {
                record["values"][measure]
                    .as_array()
                    .cloned()
                    .unwrap_or_default()
            };
            ensure!(
                ms("time").len() == 12 && ms("page time").len() == 1,
                "{record}"
            );
            // Each of six connections carries two objects, and a new one also its handshake.
            let page = ms("page time")[0].as_f64().context("no time")?;
            let round_trips = if record["factors"]["page"] == "12 objects, Chromium, new" {
                4.0
            } else {
                3.0
            };
            ensure!((round_trips * 40.0..10_000.0).contains(&page), "{record}");
        }
        Ok(())
    })
);
