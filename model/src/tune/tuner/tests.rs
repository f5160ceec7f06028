use super::*;

const SETTINGS: Settings = Settings {
    min_us: 20_000,
    ..Settings::new(250)
};
const MINUTE_S: u64 = 60;
const HOUR_S: u64 = 3_600;

struct Host {
    tuner: Tuner,
    now_ms: u64,
    all: Vec<Transition>,
}

impl Host {
    fn new(settings: Settings, configured: Option<u64>) -> Self {
        Self {
            tuner: Tuner::new(settings, configured),
            now_ms: 0,
            all: Vec::new(),
        }
    }

    /// A host that has learnt 20 ms from path RTTs of 10 ms.
    fn settled() -> Self {
        let mut host = Self::new(SETTINGS, None);
        host.run(2 * HOUR_S, &[(10_000, 10)]);
        assert_eq!(host.tuner.jiffies(), Some(5));
        host.all.clear();
        host
    }

    fn step(&mut self, growth: &Growth) -> Option<Transition> {
        self.now_ms += 1_000;
        let transition = self.tuner.step(self.now_ms, growth);
        self.all.extend(transition);
        transition
    }

    /// The samples of each second: microseconds and count.
    fn run(&mut self, seconds: u64, samples: &[(u64, u64)]) {
        let growth = growth(samples);
        for _ in 0..seconds {
            self.step(&growth);
        }
    }

    /// The causes of transitions, and the resulting values in milliseconds; 0 for the kernel's own
    /// timer.
    fn causes(&mut self) -> Vec<(Cause, u64)> {
        let all = std::mem::take(&mut self.all);
        let value = |one: &Transition| (one.cause, one.after_us.unwrap_or(0) / 1000);
        all.iter().map(value).collect()
    }
}

fn growth(samples: &[(u64, u64)]) -> Growth {
    let mut growth = Growth::default();
    for (us, count) in samples {
        growth.samples.add(*us, *count);
        growth.counts.connections += count;
    }
    growth
}

fn spurious() -> Growth {
    Growth {
        spurious: true,
        ..growth(&[(10_000, 10)])
    }
}

#[test]
fn repath_time_follows_the_law_whatever_the_value_is() {
    for configured in [Some(50), Some(5)] {
        let mut host = Host::new(SETTINGS, configured);
        let path = |host: &Host| host.tuner.repath_jiffies();
        host.run(29, &[(20_000, 10)]);
        assert_eq!(path(&host), None);
        host.run(1, &[(20_000, 10)]);
        assert_eq!(path(&host), Some(15));
        host.run(400, &[(20_000, 10)]);
        assert_eq!(path(&host), Some(10));
        // The path has become longer: at once. Shorter again: the hours remember.
        host.run(1, &[(100_000, 300)]);
        let longer = path(&host);
        assert!(longer >= Some(38), "{longer:?}");
        host.run(MINUTE_S, &[(20_000, 10)]);
        assert!(path(&host) >= longer);
        assert_eq!(host.tuner.configured(), configured);
    }
    // Samples beyond the kernel's own first timeout.
    let mut far = Host::new(SETTINGS, Some(50));
    far.run(1, &[(5_000_000, 300)]);
    assert_eq!(far.tuner.repath_jiffies(), Some(250));
    // A learnt value is the law's: its first retransmission may leave the path.
    let mut auto = Host::new(SETTINGS, None);
    auto.run(400, &[(20_000, 10)]);
    assert_eq!(auto.tuner.repath_jiffies(), auto.tuner.jiffies());
    assert_eq!(auto.tuner.jiffies(), Some(10));
}

#[test]
fn value_is_learnt_and_lowered_a_minute_later() {
    let mut host = Host::new(SETTINGS, None);
    host.run(29, &[(20_000, 10)]);
    assert_eq!(host.tuner.next(), Next::Learn { samples: 10 });
    assert_eq!(host.tuner.state(), State::Learning);
    // Three times the largest sample; twice with enough samples.
    host.run(1, &[(20_000, 10)]);
    assert_eq!(host.causes(), [(Cause::EnoughSamples, 60)]);
    assert_eq!(host.tuner.state(), State::Active);
    host.run(400, &[(20_000, 10)]);
    assert_eq!(host.causes(), [(Cause::WantLower, 40)]);
    assert_eq!(host.tuner.next(), Next::Nothing);
    // No value is lowered within a minute after a change.
    let mut busy = Host::new(SETTINGS, None);
    busy.run(1, &[(20_000, 300)]);
    busy.run(MINUTE_S - 1, &[(20_000, 300)]);
    assert_eq!(busy.all.len(), 1);
    let at_ms = 61_000;
    let to_us = 40_000;
    assert_eq!(busy.tuner.next(), Next::Lower { to_us, at_ms });
    busy.run(1, &[(20_000, 300)]);
    assert_eq!(busy.all.len(), 2);
}

#[test]
fn path_without_gain_keeps_the_kernels_timer() {
    let mut host = Host::new(SETTINGS, None);
    host.run(HOUR_S, &[(700_000, 10)]);
    assert_eq!(host.causes(), [(Cause::EnoughSamples, 0)]);
    assert_eq!(host.tuner.next(), Next::NothingToGain);
    assert_eq!(host.tuner.epoch(), 0);
}

#[test]
fn step_between_ticks_raises_once_with_headroom() {
    // RTTs become 15 times as long. In the first second, a tenth to all of the connections have the
    // longer RTT.
    for first in 1..=10 {
        let mut host = Host::settled();
        let long = |n| {
            [
                (140_000, n / 2),
                (150_000, n / 4),
                (160_000, n - n / 2 - n / 4),
            ]
        };
        let partly: Vec<_> = long(5 * first)
            .into_iter()
            .chain([(10_000, 50 - 5 * first)])
            .filter(|(_, count)| *count > 0)
            .collect();
        host.run(1, &partly);
        host.run(9 * MINUTE_S, &long(50));
        let causes = host.causes();
        assert_eq!(causes.len(), 1, "{first}: {causes:?}");
        let (cause, ms) = causes[0];
        assert_eq!(cause, Cause::WantHigher);
        assert!((300..=480).contains(&ms), "{first}: {ms}");
    }
}

#[test]
fn raised_value_is_lowered_an_hour_later() {
    let mut host = Host::settled();
    host.run(MINUTE_S, &[(40_000, 10)]);
    assert_eq!(host.causes(), [(Cause::WantHigher, 120)]);
    host.run(HOUR_S - 1, &[(10_000, 10)]);
    let present = host.tuner.value_us();
    assert!(present >= Some(80_000), "{present:?}");
    // The hour with the slow minute is remembered for a day.
    host.run(2 * HOUR_S, &[(10_000, 10)]);
    assert_eq!(host.tuner.value_us(), Some(80_000));
    host.run(26 * HOUR_S, &[(10_000, 10)]);
    assert_eq!(host.tuner.value_us(), Some(20_000));
}

#[test]
fn slow_path_keeps_kernel_timer() {
    let mut host = Host::settled();
    host.run(MINUTE_S, &[(900_000, 10)]);
    assert_eq!(host.tuner.jiffies(), None);
    assert_eq!(host.tuner.state(), State::Active);
    let (cause, ms) = *host.causes().last().unwrap();
    assert_eq!((cause, ms), (Cause::WantHigher, 0));
}

#[test]
fn fallback_spurious_lasts_ten_minutes() {
    for (configured, ms) in [(None, 20), (Some(6), 24)] {
        let mut host = Host::settled();
        if let Some(jiffies) = configured {
            host = Host::new(SETTINGS, Some(jiffies));
        }
        let epoch = host.tuner.epoch();
        host.run(5, &[(10_000, 10)]);
        let evidence = host.step(&spurious()).unwrap().evidence;
        assert!(evidence.counts.connections >= 60, "{evidence:?}");
        assert_eq!(host.causes(), [(Cause::Spurious, 0)]);
        assert_eq!(host.tuner.state(), State::FallbackSpurious);
        let at_ms = host.now_ms + HOLD_MS;
        assert_eq!(host.tuner.next(), Next::HoldEnds { at_ms });
        // The program's count belongs to the previous epoch; a freeze does not end the hold.
        host.run(299, &[(10_000, 10)]);
        assert!(host.tuner.freeze(host.now_ms).is_some());
        assert_eq!(host.tuner.next(), Next::Resume);
        let resumed = host.tuner.resume(host.now_ms).unwrap();
        assert_eq!(resumed.to, State::FallbackSpurious);
        host.run(300, &[(10_000, 10)]);
        assert_eq!(host.causes(), []);
        host.run(1, &[(10_000, 10)]);
        assert_eq!(host.causes(), [(Cause::HoldOver, ms)]);
        assert_eq!(host.tuner.epoch(), epoch + 2);
        assert_eq!(host.tuner.evidence().counts, Counts::default());
    }
}

#[test]
fn outage_is_reported_and_does_not_hinder_a_raise() {
    let mut host = Host::settled();
    let outage = |us| Growth {
        outage: true,
        ..growth(&[(us, 10)])
    };
    host.step(&outage(10_000));
    assert_eq!(host.causes(), [(Cause::Outage, 20)]);
    assert_eq!(host.tuner.next(), Next::OutageEnds);
    for _ in 0..10 {
        host.step(&outage(50_000));
    }
    let (cause, ms) = host.causes()[0];
    assert!(cause == Cause::WantHigher && ms >= 75, "{cause:?} {ms}");
    assert_eq!(host.tuner.state(), State::FallbackOutage);
    host.run(1, &[(50_000, 10)]);
    assert_eq!(host.causes(), [(Cause::Established, ms)]);
    // Without a value there is nothing to withdraw.
    let mut learning = Host::new(SETTINGS, None);
    assert_eq!(learning.step(&outage(1)), None);
    assert_eq!(learning.step(&spurious()), None);
}

#[test]
fn operator_freezes_and_resumes_value() {
    for (configured, state) in [(None, State::Learning), (Some(6), State::Active)] {
        let mut host = Host::new(SETTINGS, configured);
        let frozen = host.tuner.freeze(1_000).unwrap();
        assert_eq!((frozen.to, frozen.after_us), (State::Frozen, None));
        assert_eq!(host.tuner.freeze(1_000), None);
        host.run(MINUTE_S, &[(10_000, 10)]);
        assert_eq!(host.tuner.jiffies(), None);
        let resumed = host.tuner.resume(host.now_ms).unwrap();
        assert!(resumed.to == State::Active && resumed.after_us.is_some());
        assert_eq!(host.tuner.resume(host.now_ms), None);
        let reset = host.tuner.reset(host.now_ms);
        assert_eq!((reset.to, reset.cause), (state, Cause::Operator));
        assert_eq!(host.tuner.jiffies(), configured);
    }
}

#[test]
fn stored_value_expires_with_its_memory() {
    let day_ms = 24 * HOUR_MS;
    for (away_ms, kept) in [
        (HOUR_MS, true),
        (day_ms - HOUR_MS, true),
        (3 * day_ms, false),
    ] {
        let mut host = Host::settled();
        let text = serde_json::to_string(&host.tuner).unwrap();
        let mut stored: Tuner = serde_json::from_str(&text).unwrap();
        assert_eq!(stored, host.tuner);
        let transition = stored.step(host.now_ms + away_ms, &Growth::default());
        let forgotten = transition.map(|one| (one.to, one.cause));
        let expected = (!kept).then_some((State::Learning, Cause::Forgotten));
        assert_eq!(forgotten, expected, "{away_ms}");
        assert_eq!(stored.jiffies().is_some(), kept);
        // A host without connections keeps its value, and so does a configured timer.
        host.run(30 * HOUR_S, &[]);
        assert_eq!(host.tuner.jiffies(), Some(5));
        let mut fixed = Tuner::new(SETTINGS, Some(6));
        assert_eq!(fixed.step(0, &Growth::default()), None);
        assert_eq!(fixed.step(3 * day_ms, &Growth::default()), None);
    }
}

#[test]
fn configured_value_is_not_lowered_or_raised() {
    let mut host = Host::new(SETTINGS, Some(6));
    host.run(HOUR_S, &[(10_000, 10), (400_000, 1)]);
    assert_eq!(host.causes(), []);
    assert_eq!(host.tuner.next(), Next::Nothing);
    // The value that samples require is shown.
    assert!(host.tuner.evidence().want_us > Some(400_000));
}

#[test]
fn epochs_follow_those_that_the_program_knows() {
    let mut tuner = Tuner::new(SETTINGS, Some(6));
    tuner.skip_epochs(7);
    assert_eq!(tuner.epoch(), 8);
    tuner.skip_epochs(3);
    assert_eq!(tuner.epoch(), 8);
}

#[test]
fn transitions_are_shown() {
    let mut host = Host::settled();
    let transition = host.step(&spurious()).unwrap();
    let text = transition.to_string();
    assert!(
        text.starts_with("active -> fallback (spurious), 20ms -> the kernel's own; 0 of "),
        "{text}"
    );
    assert_eq!(Value(Some(1_500)).to_string(), "1500us");
    for state in State::ALL {
        let json = serde_json::to_value(state).unwrap();
        assert_eq!(json, state.name());
    }
}
