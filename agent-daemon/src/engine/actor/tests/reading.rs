//! Snapshots for readers: epochs, statistics, notes.

use std::collections::BTreeMap;

use rto_agent_common::Statistics;
use rto_agent_core::wire::stats::ArmStatistics;

use super::*;
use crate::engine::{desired::tests::desired, snapshot::tests::healthy};

#[test]
fn only_writes_begin_new_epoch() {
    let bed = Bed::checking_health();
    let before = bed.engine.snapshot();
    let seen = || bed.engine.snapshot();
    // A health check and operations that only read.
    bed.until("checked", |_| !Arc::ptr_eq(&seen(), &before));
    bed.verify();
    bed.add(request("10.9.0.1/16")).unwrap_err();
    assert_eq!(seen().epoch, before.epoch);
    bed.add(request("10.9.0.0/16")).unwrap();
    let added = seen().epoch;
    assert!(added > before.epoch);
    bed.detach().unwrap();
    let detached = seen().epoch;
    assert!(detached > added);
    bed.attach().unwrap();
    assert!(seen().epoch > detached);
}

#[test]
fn unreadable_statistics_repeat_previous_values() {
    let (kernel, snapshot) = healthy(desired(NEAR));
    let stats = || {
        // Otherwise a reading that was slow is used again.
        snapshot.shared.statistics.forget();
        snapshot.stats().unwrap()
    };
    let good = stats();
    assert_eq!(good.policies.len(), 1);
    kernel.state().unreadable = true;
    assert_eq!(stats(), good);
    let problems = || status(&snapshot).problems;
    assert!(problems().iter().any(|p| p.contains("out of date")));
    kernel.state().unreadable = false;
    stats();
    assert!(status(&snapshot).healthy);
}

#[test]
fn status_reports_harm_without_reading_statistics() {
    let (kernel, snapshot) = healthy(desired(NEAR));
    let harmed = |spurious_connections| {
        let (mut active, none) = (Statistics::default(), Statistics::default());
        active.counters.untimed = spurious_connections * 5 / 3;
        active.counters.spurious_connections = spurious_connections;
        let statistics = ArmStatistics {
            treated: [active, none, none],
            control: None,
        };
        kernel.state().statistics = BTreeMap::from([(near(), statistics)]);
    };
    harmed(0);
    // The counts of before are not the policy's.
    let snapshot = Arc::new(snapshot);
    snapshot.shared.published(&snapshot);
    harmed(60);
    let shown = || {
        let before = kernel.state().statistics_read;
        let status = status(&snapshot);
        assert_eq!(kernel.state().statistics_read, before);
        (status.healthy, status.problems.concat())
    };
    assert_eq!(shown(), (true, String::new()));
    // The comparison in the background reads the counters too.
    let part = Part {
        cursor: Cursor::default(),
        entries: 1,
    };
    snapshot.compare_in_turn(part).unwrap().unwrap();
    let (healthy, problems) = shown();
    assert!(!healthy && problems.contains("60 of 100 connections"));
    assert!(status(&snapshot).counters_read_at_s.is_some());
    harmed(0);
    snapshot.shared.statistics.forget();
    snapshot.stats().unwrap();
    assert!(shown().0);
}

#[test]
fn statistics_are_never_of_a_change_under_way() {
    let (kernel, snapshot) = healthy(desired(NEAR));
    let good = snapshot.stats().unwrap();
    snapshot.shared.begin();
    // At this moment the slots belong to other policies.
    let policies = std::mem::take(&mut kernel.state().maps.policies);
    assert_eq!(snapshot.stats().unwrap(), good);
    kernel.state().maps.policies = policies;
    let next = Arc::new(Snapshot {
        epoch: snapshot.shared.next_epoch(),
        ..snapshot.clone()
    });
    snapshot.shared.published(&next);
    std::thread::sleep(Duration::from_millis(2));
    // An old snapshot shows the latest comparison.
    assert!(snapshot.stats().unwrap().at_ms > good.at_ms);
}
