//! Discovery from made-up counts, as text and as JSON.

use rto_agent_common::histogram::{Histogram, bucket_of};
use rto_agent_core::{config::Config, testing::HOST, wire::discover::PrefixStats};

use super::*;
use crate::cli::{DaemonArgs, WideArg};

const AT_MS: u64 = 1_700_000_000_000;

fn args(limit: u32) -> Discover {
    Discover {
        limit,
        table: WideArg { wide: true },
        daemon: DaemonArgs {
            socket: "/s".into(),
            json: false,
        },
    }
}

/// A prefix with handshake times near this one.
fn prefix(prefix: &str, samples: u64, us: u64, recovered: u64) -> PrefixStats {
    let mut times = Histogram::default();
    for us in (0..samples).map(|n| us + n % (us / 4)) {
        times.buckets[bucket_of(us)] += 1;
        times.sum_us += us;
    }
    PrefixStats {
        prefix: prefix.parse().unwrap(),
        connections: samples + recovered,
        recovered,
        handshake: (&times).into(),
    }
}

fn answer(days: u64) -> DiscoverAnswer {
    DiscoverAnswer {
        at_ms: AT_MS,
        since_ms: AT_MS - days * DAY_MS,
        one_in: 16,
        covered: 2,
        prefixes: vec![
            // Two similar prefixes of one route.
            prefix("10.1.0.0/24", 4_000, 800, 20),
            prefix("10.1.9.0/24", 400, 900, 5),
            // Two halves of a prefix.
            prefix("10.7.0.0/24", 2_000, 30_000, 40),
            prefix("10.7.1.0/24", 2_000, 32_000, 10),
            prefix("127.0.0.0/24", 5_000, 30, 0),
            // No losses.
            prefix("192.0.2.0/24", 1_000, 700, 0),
            // A path RTT too long for a shorter timer.
            prefix("198.51.100.0/24", 3_500, 600_000, 9),
            // Too few samples.
            prefix("203.0.113.0/24", 120, 9_000, 30),
            prefix("2001:db8::/48", 299, 9_000, 2),
        ],
    }
}

fn found(answer: &DiscoverAnswer, limit: u32) -> Discovery {
    let routes = ["10.1.0.0/16", "10.0.0.0/7"].map(|route| route.parse().unwrap());
    // The route is too wide for an entry: the neighbours in it are merged as without a route.
    discovery(answer, &args(limit), &routes.into(), &HOST)
}

#[test]
fn prefixes_are_ranked() {
    let discovery = found(&answer(2), 20);
    insta::assert_snapshot!("ranked", text::text(&discovery, None));
    insta::assert_json_snapshot!("ranked_json", discovery);
}

#[test]
fn savings_are_per_day() {
    let saved = |days| found(&answer(days), 1).prefixes[0].saved_s_per_day;
    let first = found(&answer(1), 1);
    let one = &first.prefixes[0];
    assert_eq!(
        (one.cidr.to_string().as_str(), one.lost),
        ("10.7.0.0/23", 800)
    );
    let us = one.initial_rto_us.unwrap();
    assert_eq!(us, 84_000);
    // 50 losses in one of 16 connections, at 95 % at most 65; each would cost 1 s less 84 ms.
    let most = 16.0 * (50f64.sqrt() + 1.0).powi(2) * 0.916;
    assert!((saved(1).independent - most).abs() < 1e-6);
    assert!((saved(4).independent - most / 4.0).abs() < 1e-6);
    // In outages a loss saves less, and nothing where the interval doubles.
    let Saved { outages, .. } = saved(1);
    assert!((50.0..500.0).contains(&outages), "{outages}");
    let doubling = HostFacts {
        shapes_syns: false,
        ..HOST
    };
    let doubling = discovery(&answer(1), &args(1), &BTreeSet::new(), &doubling);
    assert!(doubling.prefixes[0].saved_s_per_day.outages < 0.0);
}

/// Paths of 3 ms. Of one, 1 % of the packets are lost each way, which costs 18 ms a connection.
#[test]
fn lossy_prefix_is_first_with_its_gain() {
    const CONNECTIONS: u64 = 5_000;
    let lost = CONNECTIONS / 50;
    let answer = DiscoverAnswer {
        prefixes: vec![
            prefix("10.1.0.0/24", CONNECTIONS, 3_000, 0),
            prefix("10.7.0.0/24", CONNECTIONS - lost, 3_000, lost),
        ],
        ..answer(1)
    };
    let found = discovery(&answer, &args(20), &BTreeSet::new(), &HOST).prefixes;
    let [lossy, clean] = &found[..] else {
        panic!("{}", found.len());
    };
    assert_eq!(lossy.cidr.to_string(), "10.7.0.0/24");
    let connections = lossy.connections as f64;
    let saved_ms = lossy.saved_s_per_day.independent * 1e3 / connections;
    assert!((saved_ms / 18.0 - 1.0).abs() < 1.0 / 3.0, "{saved_ms}");
    for one in [lossy, clean] {
        let us = one.initial_rto_us.unwrap();
        assert!((60_000..=100_000).contains(&us), "{us}");
    }
    assert!(!clean.saves());
}

#[test]
fn snippet_is_valid_configuration() {
    let snippet = found(&answer(2), 20).snippet.unwrap();
    let config = Config::from_text("config.toml".as_ref(), snippet, &HOST).unwrap();
    let cidrs: Vec<_> = config
        .set
        .entries
        .keys()
        .map(|cidr| cidr.to_string())
        .collect();
    assert_eq!(cidrs, ["10.1.0.0/16", "10.7.0.0/23"]);
    // The snippet contains only the prefixes that are shown.
    let snippet = found(&answer(2), 1).snippet.unwrap();
    assert!(!snippet.contains("10.1.0.0/16"), "{snippet}");
}

#[test]
fn short_observation_warns_unless_empty() {
    let mut young = answer(2);
    young.since_ms = AT_MS - 5 * 60_000;
    let discovery = found(&young, 20);
    assert_eq!(
        discovery.warnings,
        ["counted for only 5m: SAVED A DAY is extrapolated"]
    );
    let none = DiscoverAnswer {
        prefixes: Vec::new(),
        ..young
    };
    let text = text::text(&found(&none, 20), None);
    assert!(text.contains("no connection was counted"), "{text}");
}
