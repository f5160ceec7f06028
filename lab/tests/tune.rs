//! Criteria of a self-tuning timer; in release builds with all the prefixes of `rto-lab tune`.

use rto_lab::experiment::tune::{
    criteria::{Criterion, of_orphans, of_outages, of_prefixes, of_saturated, of_step},
    fleet, outages,
    path::Path,
    saturated,
    scenarios::{auto, course, evening, fixed, flapping, step},
};

/// Prefixes of a build without optimisation.
const FEW: usize = 60;
const SECONDS: u32 = 9_000;
/// Connections per second of the steps that are simulated fast enough.
const RATES: [f64; 3] = [1.0, 20.0, 50.0];

fn all_met(criteria: &[Criterion]) {
    assert!(!criteria.is_empty());
    for one in criteria {
        assert!(one.met, "{one:?}");
    }
}

#[test]
fn generated_prefixes_are_tuned() {
    let count = if cfg!(debug_assertions) { FEW } else { 2_000 };
    let prefixes = fleet::run(count, SECONDS, 1);
    assert_eq!(prefixes.len(), count);
    all_met(&of_prefixes(&prefixes));
    // Every prefix with losses gains.
    assert!(prefixes.iter().all(|p| p.saved_ms >= 0.0));
    assert!(prefixes.iter().any(|p| p.saved_ms > 5.0));
}

#[test]
fn rtt_step_is_learnt_within_seconds() {
    let found = step(50.0, auto(), true, 1);
    all_met(&of_step(&found));
    // Also with other seeds.
    for seed in 2..=6 {
        all_met(&of_step(&step(50.0, auto(), true, seed)));
    }
    // The control: a fixed timer stays too short.
    let control = step(50.0, fixed(24), true, 1);
    assert!(
        control.later > 0.99 && control.spurious > 20_000,
        "{}",
        control.spurious
    );
}

#[test]
fn spurious_connections_without_daemon_end_in_fallback() {
    let steps = RATES.map(|per_s| step(per_s, auto(), false, 1));
    all_met(&of_orphans(&steps));
    for one in &steps {
        let fell_back = one.fell_back.unwrap();
        // Connections in flight: a verdict takes four round trips.
        let in_flight = 0.15 * 4.0 * one.per_s;
        // A connection that ends before its first RTT is not judged.
        let limit = 1.25 * fell_back.judged as f64 + 1.5 * in_flight + 2.0;
        assert!((one.spurious as f64) <= limit, "{} {limit}", one.spurious);
        // The kernel's own timer after that.
        let last = one.points.last().unwrap();
        assert_eq!((last.timer_ms, last.spurious), (1_000.0, 0));
    }
}

#[test]
fn metropolitan_network_gains_as_with_a_fixed_timer() {
    let own = course(Path::metro(20.0), auto(), 5_400, 1);
    let control = course(Path::metro(20.0), fixed(100), 5_400, 1);
    assert_eq!(own.spurious, 0.0);
    assert!((40.0..=64.0).contains(&own.timer_ms), "{}", own.timer_ms);
    assert!(
        own.saved_ms > 0.9 * control.saved_ms,
        "{} {}",
        own.saved_ms,
        control.saved_ms
    );
}

#[test]
fn repeated_path_changes_do_no_harm() {
    let own = course(flapping(20.0, 3), auto(), 3 * 3_600, 1);
    assert!(
        own.spurious < 0.001 && own.changes <= 20,
        "{} {}",
        own.spurious,
        own.changes
    );
    let control = course(flapping(20.0, 3), fixed(100), 3 * 3_600, 1);
    assert!(control.spurious > 0.3, "{}", control.spurious);
    let own = course(evening(5.0), auto(), 24 * 3_600, 1);
    assert!(
        own.spurious < 0.0001 && own.worst < 0.005,
        "{} {}",
        own.spurious,
        own.worst
    );
    let control = course(evening(5.0), fixed(52), 24 * 3_600, 1);
    assert!(control.spurious > 0.02, "{}", control.spurious);
}

#[test]
fn fallback_keeps_gain_of_short_outages() {
    let all = outages(1);
    all_met(&of_outages(&all));
    let black_hole = all.last().unwrap().timed;
    assert!(black_hole.bare.outage_syns > 3 * black_hole.kernel.outage_syns / 2);
}

#[test]
fn server_near_its_capacity_gets_over_a_stall() {
    let most_per_s = if cfg!(debug_assertions) {
        1_000.0
    } else {
        10_000.0
    };
    let all = saturated(most_per_s, 1);
    all_met(&of_saturated(&all));
    // The control: without fallbacks, a timer that is too short does harm.
    assert!(
        all.iter()
            .any(|one| one.timed.bare.later_late_share() > 0.5)
    );
}
