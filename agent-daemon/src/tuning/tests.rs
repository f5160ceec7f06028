//! From counters to decisions, without an engine.

use rto_agent_common::{Statistics, histogram::bucket_of};
use rto_agent_core::{policy::Timer, testing::HOST, wire::holdout::Verdict};

use super::{policy::RARELY_MS, *};

/// A host with one policy and growing counters.
struct Bed {
    tuning: Tuning,
    settings: Settings,
    statistics: ArmStatistics,
    fallbacks: [Fallback; 2],
    outage: bool,
    now_ms: u64,
    events: Vec<TunedEvent>,
}

fn name() -> PolicyName {
    "near".parse().unwrap()
}

fn interval_ms(bed: &Bed) -> Option<u64> {
    let interval = bed.tuning.interval()?;
    interval.as_millis().try_into().ok()
}

fn settings(toml: &str) -> Settings {
    toml::from_str(toml).unwrap()
}

impl Bed {
    fn new(toml: &str) -> Self {
        let mut bed = Self {
            tuning: Tuning::default(),
            settings: settings(toml),
            statistics: ArmStatistics {
                treated: [Statistics::default(); 3],
                control: Some([Statistics::default(); 3]),
            },
            fallbacks: Default::default(),
            outage: false,
            now_ms: 1_700_000_000_000,
            events: Vec::new(),
        };
        bed.follow(toml);
        // Earlier counts have no time, so the first reading only sets the baseline.
        bed.step();
        bed
    }

    fn follow(&mut self, toml: &str) {
        self.settings = settings(toml);
        let name = name();
        let policies = BTreeMap::from([(&name, &self.settings)]);
        self.tuning.follow(&policies, &HOST);
    }

    fn adjustment(&self) -> Adjustment {
        let name = name();
        let policies = BTreeMap::from([(&name, &self.settings)]);
        let mut all = Adjustments::new();
        self.tuning.adjust(&policies, &HOST, &mut all);
        all.remove(&name).unwrap_or_default()
    }

    fn now(&self) -> Moment {
        Moment {
            tuner_ms: self.now_ms,
            ..Moment::default()
        }
    }

    fn act(&mut self, action: TuneAction) -> Option<Vec<TunedEvent>> {
        let acted = self.tuning.act(self.now(), &name(), action)?;
        assert_eq!(acted.verdict, None);
        Some(acted.timers)
    }

    fn step(&mut self) {
        self.now_ms += 1000;
        let (now, fallbacks, outage) = (self.now(), self.fallbacks, self.outage);
        let events = self
            .tuning
            .step(now, &name(), &self.statistics, fallbacks, outage);
        self.events.extend(events);
    }

    /// Counts active connections with this path RTT for some seconds, with one step per second.
    /// Like the program, counts spurious copies if the timer in force is too short.
    fn run(&mut self, seconds: u64, us: u64, per_s: u64) {
        for _ in 0..seconds {
            let adjustment = self.adjustment().active;
            let epoch = adjustment.epoch;
            let timer = match adjustment.timer {
                Timer::Value(value) => value,
                Timer::Configured => self.settings.fixed_initial_rto().unwrap_or(SECOND),
                Timer::Kernel => SECOND,
            };
            let active = &mut self.statistics.treated[0];
            active.path_rtt.buckets[bucket_of(us)] += per_s;
            if Duration::from_micros(us) > timer {
                active.counters.retransmitted_handshakes += per_s;
                active.counters.handshake_retransmissions += per_s;
                active.counters.spurious_connections += per_s;
                active.counters.spurious += per_s;
                if epoch != 0 {
                    let fallback = &mut self.fallbacks[0];
                    if fallback.epoch != epoch {
                        (fallback.epoch, fallback.spurious) = (epoch, 0);
                    }
                    for _ in 0..per_s {
                        fallback.spurious += fallback.cost();
                    }
                }
            }
            self.step();
        }
    }

    fn causes(&self) -> Vec<&str> {
        let causes = self
            .events
            .iter()
            .map(|event| event.transition.transition.cause.name());
        causes.collect()
    }

    fn active(&self) -> Timer {
        self.adjustment().active.timer
    }

    fn value_ms(&self) -> Option<u128> {
        match self.active() {
            Timer::Value(value) => Some(value.as_millis()),
            Timer::Configured | Timer::Kernel => None,
        }
    }

    /// Restarts the daemon after `later_ms`, in the same boot or the next.
    fn restart(&mut self, later_ms: u64, same_boot: bool) {
        let at = Moment {
            tuner_ms: self.now_ms,
            boottime_ms: 5_000,
            unix_ms: self.now_ms,
        };
        let text = serde_json::to_string(&self.tuning.stored("boot", at)).unwrap();
        let boot = if same_boot { "boot" } else { "next" };
        let stored: Stored<'_> = serde_json::from_str(&text).unwrap();
        self.now_ms = match same_boot {
            true => stored.now_ms(boot, 5_000 + later_ms, 0),
            false => stored.now_ms(boot, 1, at.unix_ms + later_ms),
        };
        let name = name();
        let policies = BTreeMap::from([(&name, &self.settings)]);
        let now = self.now();
        self.tuning = Tuning::default();
        let events = self.tuning.restore(stored, boot, now, &policies, &HOST);
        self.events.extend(events);
    }
}

const SECOND: Duration = Duration::from_secs(1);
const AUTO: &str = "initial_rto = { auto = true, min = '20ms' }";
const GUARDED: &str = "initial_rto = '24ms'";

/// Fallback (spurious) of an epoch.
fn begun(epoch: u32) -> Fallback {
    Fallback {
        epoch,
        spurious: Fallback::LIMIT + Fallback::BEGUN,
        ..Fallback::default()
    }
}

/// A timer settled at 24 ms.
fn settled() -> Bed {
    let mut bed = Bed::new(AUTO);
    bed.run(700, 9_000, 50);
    assert_eq!(bed.value_ms(), Some(24), "{:?}", bed.events);
    bed.events.clear();
    bed
}

#[test]
fn value_is_learnt_after_300_samples() {
    let mut bed = Bed::new(AUTO);
    assert_eq!(interval_ms(&bed), Some(TICK_MS));
    bed.run(5, 9_000, 50);
    assert_eq!(bed.adjustment(), Adjustment::default());
    bed.run(1, 9_000, 50);
    let adjustment = bed.adjustment();
    assert_eq!(bed.value_ms(), Some(32));
    assert_eq!(adjustment.active.epoch, 1);
    assert_eq!(
        adjustment.passive,
        rto_agent_core::policy::InitialRto::default()
    );
    assert_eq!(bed.causes(), ["enough-samples"]);
    assert!(!bed.events[0].transition.is_warning());
    bed.run(60, 9_000, 50);
    assert_eq!(bed.value_ms(), Some(24));
    assert_eq!(bed.adjustment().active.epoch, 2);
}

#[test]
fn longer_path_raises_the_value_once_or_falls_back() {
    let mut bed = settled();
    // At 6 a second, the value is raised before the fallback begins.
    bed.run(2, 140_000, 6);
    assert_eq!(bed.causes(), ["want-higher"]);
    assert!(
        bed.value_ms().is_some_and(|ms| ms >= 280),
        "{:?}",
        bed.events
    );
    assert!(!bed.events[0].transition.is_warning());
    bed.run(60, 140_000, 50);
    assert_eq!(bed.causes().len(), 1);
    let mut busy = settled();
    busy.run(1, 140_000, 50);
    assert_eq!((busy.causes(), busy.value_ms()), (vec!["spurious"], None));
    let counts = busy.events[0].transition.transition.evidence.counts;
    assert_eq!(counts.spurious, 50);
    assert!(busy.events[0].transition.is_warning());
    // Later transitions do not replace the alarm's evidence.
    busy.run(600, 140_000, 50);
    assert_eq!(busy.causes(), ["spurious", "hold-over"]);
    assert!(busy.value_ms().is_some_and(|ms| ms >= 280));
    let alarm = busy.tuning.view(Moment::default(), &Adjustments::new())[&name()].timers[0].alarm;
    assert_eq!(alarm.map(|alarm| alarm.evidence.counts), Some(counts));
}

#[test]
fn outage_is_reported_until_a_connection_is_established() {
    let mut bed = settled();
    let state = |bed: &Bed| {
        let view = bed.tuning.view(Moment::default(), &Adjustments::new());
        let timer = &view[&name()].timers[0];
        (timer.state.name(), timer.value_us)
    };
    let value = bed.value_ms();
    bed.outage = true;
    bed.step();
    assert_eq!(state(&bed), ("fallback-outage", None));
    // The program gives new connections the kernel's own timer: the policy stays as it is.
    assert_eq!(bed.value_ms(), value);
    bed.outage = false;
    bed.step();
    assert_eq!(state(&bed), ("active", Some(24_000)));
    assert_eq!(bed.causes(), ["outage", "established"]);
    assert!(bed.events[0].transition.is_warning() && !bed.events[1].transition.is_warning());
}

#[test]
fn restart_adds_counts_of_the_pause() {
    let mut bed = settled();
    let before = bed.adjustment();
    bed.restart(30_000, true);
    assert_eq!((bed.adjustment(), bed.events.len()), (before, 0));
    // The path gets longer while the daemon is stopped.
    bed.run(1, 140_000, 6);
    bed.run(1, 140_000, 6);
    bed.events.clear();
    bed.restart(30_000, true);
    assert!(bed.value_ms().is_some_and(|ms| ms >= 280));
}

#[test]
fn fallback_begun_while_daemon_was_away_is_followed() {
    let mut bed = settled();
    let epoch = bed.adjustment().active.epoch;
    bed.fallbacks[0] = begun(epoch);
    bed.restart(600_000, true);
    assert_eq!(bed.value_ms(), Some(24));
    bed.step();
    assert_eq!((bed.value_ms(), bed.causes()), (None, vec!["spurious"]));
    // The hold ends after ten minutes, even over a restart.
    bed.restart(300_000, true);
    bed.run(299, 9_000, 50);
    assert_eq!(bed.value_ms(), None);
    bed.run(1, 9_000, 50);
    assert_eq!(bed.value_ms(), Some(24));
}

#[test]
fn value_survives_boot_within_its_memory() {
    const HOUR_MS: u64 = 3_600_000;
    for (later_ms, same_boot, ms) in [
        (2 * HOUR_MS, true, Some(24)),
        (2 * HOUR_MS, false, Some(24)),
        (30 * HOUR_MS, false, None),
    ] {
        let mut bed = settled();
        bed.restart(later_ms, same_boot);
        assert_eq!(bed.value_ms(), ms);
        let causes = match ms {
            Some(_) => Vec::new(),
            None => vec!["forgotten"; 1],
        };
        assert_eq!(bed.causes(), causes);
    }
}

#[test]
fn clock_set_back_does_not_turn_time_back() {
    let at = Moment {
        tuner_ms: 2_000_000,
        boottime_ms: 1,
        unix_ms: 9_000_000,
    };
    let tuning = Tuning::default();
    let stored = tuning.stored("boot", at);
    assert_eq!(stored.now_ms("next", 77, 1_000), 2_000_000);
    assert_eq!(stored.now_ms("next", 77, 9_000_500), 2_000_500);
    assert_eq!(stored.now_ms("boot", 501, 0), 2_000_500);
    // An empty boot ID counts as another boot.
    let unknown = tuning.stored("", at);
    assert_eq!(unknown.now_ms("", 501, 9_000_500), 2_000_500);
}

#[test]
fn advice_sets_nothing() {
    let mut bed = Bed::new(&format!("{AUTO}\nmode = 'advise'"));
    bed.run(700, 9_000, 50);
    assert_eq!(bed.adjustment(), Adjustment::default());
    let view = &bed.tuning.view(Moment::default(), &Adjustments::new())[&name()];
    let values: Vec<_> = view.timers.iter().map(|timer| timer.value_us).collect();
    assert_eq!(values, [Some(24_000), None]);
}

#[test]
fn guarded_value_is_off_in_fallback() {
    let mut bed = Bed::new(GUARDED);
    assert_eq!(interval_ms(&bed), Some(RARELY_MS));
    bed.fallbacks[0].lost = 1;
    bed.step();
    assert_eq!(interval_ms(&bed), Some(TICK_MS));
    bed.fallbacks[0].lost = 0;
    bed.run(700, 9_000, 50);
    let adjustment = bed.adjustment();
    assert_eq!(adjustment.active.timer, Timer::Configured);
    assert_eq!((adjustment.active.epoch, bed.events.len()), (1, 0));
    bed.run(1, 140_000, 50);
    assert_eq!(
        (bed.active(), bed.adjustment().active.epoch),
        (Timer::Kernel, 0)
    );
    bed.run(600, 9_000, 50);
    assert_eq!(bed.active(), Timer::Configured);
    assert_eq!(bed.causes(), ["spurious", "hold-over"]);
}

/// Harm is proven after ten seconds of evidence.
#[test]
fn proven_harm_is_in_force_until_resumed_without_statistics_too() {
    let toml = "initial_rto = 'auto'\nholdout = '50%'";
    let mut bed = Bed::new(toml);
    let look = |bed: &mut Bed| {
        bed.step();
        let now = bed.now();
        bed.tuning.look(now, &name(), &bed.statistics, None)
    };
    for _ in 0..3 {
        assert_eq!(look(&mut bed), None);
    }
    let control = &mut bed.statistics.control.as_mut().unwrap()[0];
    for (arm, bad) in [(&mut bed.statistics.treated[0], 40), (control, 0)] {
        arm.counters.attempts = 1000;
        arm.counters.untimed = 1000 - bad;
    }
    let verdict = (0..20).find_map(|_| look(&mut bed)).unwrap();
    assert_eq!(verdict.verdict, Verdict::Harm);
    assert!(verdict.text.contains("40 of 1000 with the policy's timers"));
    assert!(bed.tuning.has_changed() && bed.adjustment().harm);
    bed.restart(1000, false);
    assert!(bed.adjustment().harm && bed.tuning.is_harm(&name()));
    // A control arm of another size, or none, does not end it.
    for share in ["holdout = '5%'", ""] {
        bed.follow(&format!("initial_rto = 'auto'\n{share}"));
        assert!(bed.adjustment().harm, "{share}");
    }
    let text = serde_json::to_string(&bed.tuning.stored("b", bed.now())).unwrap();
    let blind = |toml: &str| {
        let mut tuning = Tuning::new(true);
        let (name, settings) = (name(), settings(toml));
        let policies = BTreeMap::from([(&name, &settings)]);
        let stored = serde_json::from_str(&text).unwrap();
        let events = tuning.restore(stored, "b", bed.now(), &policies, &HOST);
        assert!(events.is_empty());
        // Nothing is read.
        assert_eq!((tuning.interval(), tuning.due(u64::MAX).count()), (None, 0));
        tuning.is_harm(&name)
    };
    assert!(blind(toml) && !blind("initial_rto = '100ms'"));
    let resumed = bed.tuning.act(bed.now(), &name(), TuneAction::Resume);
    let ended = resumed.unwrap().verdict.unwrap();
    assert_eq!(ended.verdict, Verdict::NotYet);
    assert!(!bed.adjustment().harm);
}

#[test]
fn changed_settings_end_restored_harm_with_event() {
    let toml = "initial_rto = '100ms'\nholdout = '50%'";
    let bed = Bed::new(toml);
    // Stored by an earlier run.
    let at = bed.now();
    let text = serde_json::to_string(&bed.tuning.stored("b", at)).unwrap();
    let text = text.replace("\"verdict\":\"not-yet\"", "\"verdict\":\"harm\"");
    let restored = |toml: &str| {
        let mut tuning = Tuning::default();
        let (name, settings) = (name(), settings(toml));
        let policies = BTreeMap::from([(&name, &settings)]);
        let stored = serde_json::from_str(&text).unwrap();
        tuning.restore(stored, "b", at, &policies, &HOST);
        tuning
    };
    let mut tuning = restored(toml);
    assert!(tuning.is_harm(&name()));
    let (name, other) = (name(), settings(&toml.replace("100ms", "200ms")));
    let policies = BTreeMap::from([(&name, &other)]);
    assert_eq!(tuning.follow(&policies, &HOST), std::slice::from_ref(&name));
    assert!(tuning.has_changed() && !tuning.is_harm(&name));
    assert!(tuning.follow(&policies, &HOST).is_empty());
    assert!(restored("initial_rto = '100ms'").is_harm(&name));
    assert!(!restored("initial_rto = '200ms'").is_harm(&name));
    // Without a guard there is no fallback.
    assert!(!restored(&format!("{toml}\nguard = 'off'")).is_harm(&name));
}

#[test]
fn learnt_value_without_guard_has_no_epoch() {
    let mut bed = Bed::new(&format!("{AUTO}\nguard = 'off'"));
    bed.run(700, 9_000, 50);
    assert_eq!(
        (bed.value_ms(), bed.adjustment().active.epoch),
        (Some(24), 0)
    );
    // It is raised all the same.
    bed.events.clear();
    bed.outage = true;
    bed.run(1, 140_000, 50);
    assert_eq!(bed.causes(), ["want-higher"]);
}

#[test]
fn adjustment_of_new_settings_is_previewed() {
    let mut bed = settled();
    // A value other than the tuner's current one.
    let name = name();
    let next = settings("initial_rto = '100ms'\nguard = 'on'");
    let policies = BTreeMap::from([(&name, &next)]);
    let mut all = Adjustments::new();
    bed.tuning.adjust(&policies, &HOST, &mut all);
    let previewed = all.remove(&name).unwrap();
    assert_eq!(previewed.active.timer, Timer::Configured);
    // Higher than the epochs that the program has seen.
    assert!(previewed.active.epoch > bed.adjustment().active.epoch);
    bed.follow("initial_rto = '100ms'\nguard = 'on'");
    assert_eq!(bed.adjustment(), previewed);
    bed.follow("delack_max = '20ms'");
    assert_eq!(
        (bed.adjustment(), bed.tuning.interval()),
        (Adjustment::default(), None)
    );
}

#[test]
fn epochs_continue_after_lost_state() {
    let mut bed = Bed::new(AUTO);
    bed.fallbacks[0] = begun(9);
    bed.run(7, 9_000, 50);
    let adjustment = bed.adjustment().active;
    assert_eq!((bed.value_ms(), adjustment.epoch), (Some(32), 11));
    assert_eq!(bed.causes(), ["enough-samples"]);
}

#[test]
fn operator_freezes_resumes_and_resets() {
    let mut bed = settled();
    let events = bed.act(TuneAction::Freeze).unwrap();
    assert_eq!(events.len(), 2);
    assert_eq!(bed.adjustment(), Adjustment::default());
    assert!(bed.tuning.has_changed());
    bed.tuning.was_stored();
    bed.run(100, 9_000, 50);
    assert_eq!(bed.value_ms(), None);
    assert!(bed.act(TuneAction::Resume).is_some());
    assert_eq!(bed.value_ms(), Some(24));
    let epoch = bed.adjustment().active.epoch;
    assert!(bed.act(TuneAction::Reset).is_some());
    bed.run(5, 9_000, 50);
    assert_eq!(bed.value_ms(), None);
    bed.run(1, 9_000, 50);
    assert!(bed.adjustment().active.epoch > epoch);
    let other = "other".parse().unwrap();
    let reset = bed.tuning.act(bed.now(), &other, TuneAction::Reset);
    assert!(reset.is_none());
}

#[test]
fn changed_configured_value_ends_hold() {
    let frozen = |toml: &str| {
        let mut bed = Bed::new(toml);
        bed.act(TuneAction::Freeze).unwrap();
        bed
    };
    let timers = |of: Adjustment| [of.active.timer, of.passive.timer];
    let mut bed = frozen("initial_rto = '600ms'\nguard = 'on'");
    assert_eq!(timers(bed.adjustment()), [Timer::Kernel; 2]);
    bed.settings = settings("initial_rto = '700ms'\nguard = 'on'");
    bed.restart(1000, true);
    assert_eq!(timers(bed.adjustment()), [Timer::Configured; 2]);
    let syn_ack = |ms| format!("{GUARDED}\nsyn_ack_rto = '{ms}ms'");
    let mut bed = frozen(&syn_ack(300));
    bed.follow(&syn_ack(400));
    assert_eq!(timers(bed.adjustment()), [Timer::Kernel, Timer::Configured]);
}

#[test]
fn idle_policy_is_read_by_turns_and_its_fallbacks_each_time() {
    let mut bed = Bed::new(AUTO);
    let due = |bed: &Bed| {
        let due = bed.tuning.due(bed.now_ms);
        due.map(|(_, due)| due).next().unwrap()
    };
    let step = |bed: &mut Bed| {
        let now = bed.now();
        let tuning = &mut bed.tuning;
        tuning.step(now, &name(), &bed.statistics, bed.fallbacks, false);
    };
    step(&mut bed);
    let mut read = 0;
    for _ in 0..100 {
        bed.now_ms += TICK_MS;
        if due(&bed) == Due::Counters {
            step(&mut bed);
            read += 1;
        } else {
            let known = bed.fallbacks;
            assert_eq!(due(&bed), Due::Fallbacks { known });
        }
    }
    assert_eq!(read, 20);
    // The counters of a busy policy are read in each tick.
    for _ in 0..10 {
        bed.statistics.treated[0].counters.untimed += 1;
        step(&mut bed);
        bed.now_ms += TICK_MS;
        assert_eq!(due(&bed), Due::Counters);
    }
}

/// The file of the maximum number of policies can be read back.
#[test]
fn largest_tuning_state_fits_its_file() {
    let mut bed = Bed::new("initial_rto = 'auto'\nholdout = '5%'");
    for _ in 0..27 {
        // Each bucket has counts, and there are as many recent connections as are kept.
        for _ in 0..20 {
            let all = bed.statistics.control.iter_mut().flatten();
            for of_direction in all.chain(&mut bed.statistics.treated) {
                for bucket in 0..rto_agent_common::histogram::BUCKETS {
                    of_direction.path_rtt.buckets[bucket] += 1_000_000_000;
                }
                of_direction.counters.untimed += 1_000_000_000;
            }
            bed.step();
        }
        bed.now_ms += 3_600_000;
    }
    for _ in 0..400 {
        let all = bed.statistics.control.iter_mut().flatten();
        for of_direction in all.chain(&mut bed.statistics.treated) {
            of_direction.path_rtt.buckets[20] += 1;
        }
        bed.step();
    }
    let kept = serde_json::to_string(&bed.tuning.stored("boot", Moment::default())).unwrap();
    let most = u64::from(rto_agent_common::MAX_POLICIES) * kept.len() as u64;
    assert!(most < crate::engine::MAX_STATE_FILE, "{most}");
}
