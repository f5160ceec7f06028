//! What the daemon computes without asking the kernel: reading a configuration, planning a change, compiling a
//! policy, and showing statistics. `cargo xtask bench pure` runs it.
#![expect(clippy::expect_used, reason = "a bench may end so")]

use std::{fmt::Write as _, fs, hint::black_box};

use criterion::{Criterion, criterion_group, criterion_main};
use rto_agent_common::{
    Statistics,
    histogram::{BUCKETS, bucket_of},
};
use rto_agent_core::{
    config::Config,
    policy::{
        Entries, PolicyName,
        compile::compile,
        entries::Builder,
        plan::{MapState, Plan},
    },
    testing::HOST,
    wire::{
        stats::{ArmStats, PolicyStats, StatsAnswer},
        types::StatusAnswer,
    },
};
use rto_agent_daemon::telemetry::metrics;
use serde_json::json;

const SETTINGS: &str = "initial_rto = \"100ms\"\nrto_min = \"20ms\"\ndelack_max = \"8ms\"\n\
     thin_linear = true\nrto_max = \"10s\"\nsyn_retries = \"auto\"\n";

/// A configuration of `count` /24 and /64 in policies of 64.
fn text(entries: u32) -> String {
    let mut text = String::new();
    for policy in 0..entries.div_ceil(64) {
        let cidrs = (policy * 64..entries.min((policy + 1) * 64)).map(|n| match n % 2 {
            0 => format!("\"10.{}.{}.0/24\"", n >> 8, n & 0xff),
            _ => format!("\"fd00:0:{n:x}::/64\""),
        });
        let cidrs = cidrs.collect::<Vec<_>>().join(", ");
        writeln!(text, "[policy.p{policy}]\ncidrs = [{cidrs}]\n{SETTINGS}").expect("a string");
    }
    text
}

fn load(text: &str) -> Config {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("config.toml");
    fs::write(&path, text).expect("written");
    Config::load(&path, &HOST).expect("a good file")
}

fn config(c: &mut Criterion) {
    for (name, entries) in [("config_1k", 1_000), ("config_16k", 16_000)] {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("config.toml");
        fs::write(&path, text(entries)).expect("written");
        c.bench_function(name, |b| {
            b.iter(|| Config::load(black_box(&path), &HOST).expect("a good file"));
        });
    }
}

/// A thousand lists on one line each, around a long one.
fn lists(c: &mut Criterion) {
    let small = text(64_000);
    let half = small.len() / 2 + small[small.len() / 2..].find("[policy").expect("a policy");
    let items = (0..200_000u32)
        .map(|n| format!("  \"11.{}.{}.{}/32\",\n", n >> 16, n >> 8 & 0xff, n & 0xff));
    let items: String = items.collect();
    let large = format!("[policy.large]\ncidrs = [\n{items}]\n{SETTINGS}\n");
    let text = format!("{}{large}{}", &small[..half], &small[half..]);
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("config.toml");
    fs::write(&path, text).expect("written");
    c.bench_function("config_1000_lists", |b| {
        b.iter(|| Config::load(black_box(&path), &HOST).expect("a good file"));
    });
}

fn plans(c: &mut Criterion) {
    let before = load(&text(16_000)).maps();
    // As after a reload: a copy shares everything, and there is nothing to compare.
    let same = load(&text(16_000)).maps();
    c.bench_function("plan_same", |b| {
        b.iter(|| Plan::between(black_box(&before), black_box(&same)));
    });
    let after = MapState {
        entries: without_every_16th(&before.entries),
        ..before.clone()
    };
    c.bench_function("plan_changed", |b| {
        b.iter(|| Plan::between(black_box(&before), black_box(&after)));
    });
    let set = load(&text(1_000)).set;
    let (name, policy) = set.policies.first_key_value().expect("a policy");
    c.bench_function("compile", |b| {
        b.iter(|| compile(black_box(name), black_box(&policy.settings), &HOST).expect("compiles"));
    });
}

fn without_every_16th(entries: &Entries) -> Entries {
    let mut builder = Builder::default();
    for (n, (cidr, entry)) in entries.iter().enumerate() {
        if n % 16 != 0 {
            let policy = builder.policy(entry.policy);
            builder.push(cidr, policy, None);
        }
    }
    builder.build().0
}

/// Statistics of `count` policies, with counts in every other bucket.
fn stats(policies: usize) -> StatsAnswer {
    let mut one = Statistics::default();
    one.counters.attempts = 123_456;
    for histogram in [&mut one.path_rtt, &mut one.srtt] {
        histogram.sum_us = 1_234_567;
        for bucket in (0..BUCKETS).step_by(2) {
            histogram.buckets[bucket] = 1000;
        }
    }
    let stats = PolicyStats::from(ArmStats::from(&[one, one, Statistics::default()]));
    let named = |n| format!("p{n}").parse::<PolicyName>().expect("a name");
    StatsAnswer {
        at_ms: 1,
        on: true,
        sampling: 256,
        rtt_sampling: "end".to_owned(),
        policies: (0..policies).map(|n| (named(n), stats.clone())).collect(),
    }
}

fn status() -> StatusAnswer {
    let family = json!({"ipv4": 1, "ipv6": 1});
    serde_json::from_value(json!({
        "version": "0", "commit": "", "target": "", "pid": 1, "uptime_s": 1, "healthy": true, "problems": [],
        "warnings": [], "attachment": {"attached": true, "problem": null, "cgroup": "/", "is_root": true, "program_id": 1},
        "found_at_start": "nothing", "in_sync": true, "map_differences": {}, "kernel": "6.12", "host": HOST,
        "config": "/", "pin_dir": "/", "entries": 2, "runtime_entries": 0, "runtime_entries_left_out": 0,
        "entries_of": {"file": family, "runtime": family}, "max_entries": 16384,
        "policies": [],
        "last_reload": {"at_s": 1, "cause": "start", "ok": true}, "holdouts": {},
        "dropped": {"log": 0, "service_manager": 0}, "foreign_programs": 0, "features": [],
    }))
    .expect("a status")
}

fn statistics(c: &mut Criterion) {
    // A spread that no branch predictor learns.
    let times: Vec<u64> = (0..1024u64)
        .map(|n| n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (38 + n % 16))
        .collect();
    c.bench_function("histogram_1024", |b| {
        b.iter(|| {
            times
                .iter()
                .map(|us| bucket_of(black_box(*us)))
                .sum::<usize>()
        });
    });
    let (stats, status) = (stats(32), status());
    let tuned = rto_agent_core::wire::tune::TuneAnswer::default();
    c.bench_function("stats_json_32", |b| {
        b.iter(|| serde_json::to_string(black_box(&stats)).expect("a string"));
    });
    c.bench_function("metrics_32", |b| {
        b.iter(|| {
            let scrape = metrics::Scrape {
                status: black_box(&status),
                stats: black_box(&stats),
                tuned: &tuned,
                runs: None,
                in_detail: true,
            };
            metrics::render(scrape).expect("a string")
        });
    });
}

criterion_group!(pure, config, lists, plans, statistics);
criterion_main!(pure);
