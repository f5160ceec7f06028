//! Snapshots for readers: epochs, statistics, notes.

use std::collections::BTreeMap;

use rto_agent_common::Statistics;
use rto_agent_core::wire::stats::ArmStatistics;

use super::*;

#[test]
fn only_what_writes_begins_another_epoch() {
    let bed = Bed::ready();
    let before = bed.engine.snapshot();
    let seen = || bed.engine.snapshot();
    // A health check and operations that only read.
    let limit = Instant::now() + 12 * HEALTH_INTERVAL;
    let mut ticks = bed.engine.snapshots();
    ticks.mark_unchanged();
    while !ticks.has_changed().unwrap() {
        assert!(Instant::now() < limit, "no health check");
        std::thread::sleep(Duration::from_millis(50));
    }
    bed.call(Message::Verify).unwrap();
    bed.add(request("10.9.0.1/16")).unwrap_err();
    assert_eq!(seen().epoch, before.epoch);
    bed.add(request("10.9.0.0/16")).unwrap();
    let added = seen().epoch;
    assert!(added > before.epoch);
    let detach = DetachRequest::default();
    bed.call(|reply| Message::Detach(detach, BY, reply))
        .unwrap();
    let detached = seen().epoch;
    assert!(detached > added);
    bed.call(|reply| Message::Attach(BY, reply)).unwrap();
    assert!(seen().epoch > detached);
    bed.stop();
}

#[test]
fn statistics_of_before_are_told_where_they_cannot_be_read() {
    let bed = Bed::ready();
    let snapshot = bed.engine.snapshot();
    let good = snapshot.stats().unwrap();
    assert_eq!(good.policies.len(), 1);
    bed.kernel.state().unreadable = true;
    assert_eq!(snapshot.stats().unwrap(), good);
    let problems = || snapshot.status().problems;
    assert!(problems().iter().any(|p| p.contains("out of date")));
    bed.kernel.state().unreadable = false;
    snapshot.stats().unwrap();
    assert!(snapshot.status().healthy);
    bed.stop();
}

#[test]
fn status_reports_harm_without_reading_statistics() {
    let bed = Bed::ready();
    let snapshot = bed.engine.snapshot();
    let harmed = |spurious_connections| {
        let (mut active, none) = (Statistics::default(), Statistics::default());
        active.counters.untimed = 100;
        active.counters.spurious_connections = spurious_connections;
        let statistics = ArmStatistics {
            treated: [active, none, none],
            control: None,
        };
        let all = BTreeMap::from([(near(), statistics)]);
        bed.kernel.state().statistics = all;
    };
    harmed(60);
    let status = || {
        let before = bed.kernel.state().statistics_read;
        let status = snapshot.status();
        assert_eq!(bed.kernel.state().statistics_read, before);
        (status.healthy, status.problems.concat())
    };
    assert_eq!(status(), (true, String::new()));
    // The comparison in the background reads the counters too.
    snapshot.compare_part(Cursor::default(), 1).unwrap();
    let (healthy, problems) = status();
    assert!(!healthy && problems.contains("60 of 100 connections"));
    assert!(snapshot.status().counters_read_at_s.is_some());
    harmed(0);
    snapshot.stats().unwrap();
    assert!(status().0);
    bed.stop();
}

#[test]
fn statistics_are_never_of_a_change_under_way() {
    let bed = Bed::ready();
    let snapshot = bed.engine.snapshot();
    let good = snapshot.stats().unwrap();
    snapshot.shared.begin();
    // At this moment the slots belong to other policies.
    let policies = std::mem::take(&mut bed.kernel.state().maps.policies);
    assert_eq!(snapshot.stats().unwrap(), good);
    bed.kernel.state().maps.policies = policies;
    bed.call(Message::Verify).unwrap();
    // An old snapshot shows the latest comparison.
    bed.add(request("10.9.0.0/16")).unwrap();
    std::thread::sleep(Duration::from_millis(2));
    assert!(snapshot.stats().unwrap().at_ms > good.at_ms);
    bed.stop();
}

#[test]
fn of_many_notes_the_first_are_told() {
    let bed = Bed::new();
    let path = bed.dir.path().join("config.toml");
    let text = fs::read_to_string(&path).unwrap();
    let cidrs: Vec<String> = (0..60).map(|i| format!("10.9.{i}.0/24")).collect();
    let list = cidrs.join("\", \"");
    fs::write(
        &path,
        text.replace("cidrs = [", &format!("cidrs = [\"{list}\", ")),
    )
    .unwrap();
    bed.call(|reply| Message::Reload(ReloadRequest::default(), BY, reply))
        .unwrap();
    let remove = RemoveRequest {
        cidrs,
        ..RemoveRequest::default()
    };
    let answer = bed
        .call(|reply| Message::Remove(remove, BY, reply))
        .unwrap();
    assert_eq!(answer.changed.removed, 60);
    assert_eq!(answer.notes.len(), 51);
    assert_eq!(answer.notes[50], "... and 10 more");
    bed.stop();
}
