//! A path that has become longer.

use super::*;

#[test]
fn connections_after_an_alarm_raise_the_value_again() {
    let mut host = Host::steady();
    // The path steps to 150 ms, and those on their way took 80.
    let growth = host.growth(80_000, 10);
    let _decision = host.step(&growth);
    assert_eq!(
        (host.value(), host.tuner.phase()),
        (Some(60), Phase::Backoff)
    );
    // One of three hundred proves nothing.
    host.run(1, 150_000, 1);
    assert_eq!(host.value(), Some(60));
    host.run(4, 150_000, 50);
    assert_eq!(host.value(), Some(113));
    assert_eq!(host.causes(), [Cause::Alarm, Cause::WantHigher]);
    // The timer is still twice as long as these.
    host.run(2, 200_000, 50);
    assert_eq!(host.all.len(), 2);
    // Once enough are judged, a timer that holds is long enough.
    host.run(6, 150_000, 50);
    host.run(2, 250_000, 50);
    assert_eq!(host.all.len(), 2);
}

#[test]
fn a_path_that_is_another_one_gets_its_headroom_before_an_alarm() {
    let mut host = Host::steady();
    let value = host.value().unwrap();
    // Five connections whose verdicts are still to come: no alarm. One and a half times 80 ms alone would be 30 jiffies.
    let seen = host.growth(80_000, 5);
    let _decision = host.step(&Growth {
        spurious: 0,
        ..seen
    });
    assert!(value * 2 <= 30, "{value}");
    assert_eq!(host.causes(), [Cause::WantHigher]);
    assert_eq!(host.value(), Some(60));
    // Three times 400 ms would be no timer at all.
    let seen = host.growth(400_000, 5);
    let _decision = host.step(&Growth {
        spurious: 0,
        ..seen
    });
    assert_eq!(host.value(), Some(150));
}
