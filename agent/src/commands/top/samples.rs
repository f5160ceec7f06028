//! Sample answers and keys for the tests.

use std::time::{Duration, Instant};

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use rto_agent_common::{Statistics, histogram::bucket_of};
use rto_agent_core::{
    testing::timer,
    wire::{
        experiments::{self, ExperimentsAnswer},
        stats::{ArmStats, PolicyStats, StatsAnswer},
        tune::{BrakesView, TimerKind, TransitionView, TuneAnswer, TunedPolicy, TunedTimer},
    },
};
use rto_agent_daemon::experiment::merged;
use rto_model::tune::{
    experiment::{Arms, Counts, Design, Experiment, Increments, Ramp, Unit},
    tuner::{self, Cause, Evidence, Next, State as TunerState, Transition},
};

use super::state::{Answers, State};

/// An answer with policies that have these numbers of connections.
pub(super) fn answer(at_ms: u64, policies: &[(&str, u64)]) -> StatsAnswer {
    let policies = policies.iter().map(|(name, connections)| {
        let mut stats = PolicyStats::default();
        stats.treated.active.connections = *connections;
        (name.parse().unwrap(), stats)
    });
    StatsAnswer {
        at_ms,
        on: true,
        sampling: 1,
        rtt_sampling: "end".to_owned(),
        policies: policies.collect(),
    }
}

/// A state after one answer, at 1 s.
pub(super) fn state(policies: &[(&str, u64)]) -> State {
    let first = answer(1000, policies);
    let socket = "/run/rto-agent/control.sock".to_owned();
    State::new(socket, Duration::from_secs(1), first, Instant::now())
}

/// Takes one more answer.
pub(super) fn look(state: &mut State, at_ms: u64, policies: &[(&str, u64)]) {
    state.update(answer(at_ms, policies), Instant::now());
}

/// The policies from top to bottom.
pub(super) fn names(state: &State) -> Vec<&str> {
    state.rows().iter().map(|row| row.name.as_str()).collect()
}

/// The selected policy.
pub(super) fn selected(state: &State) -> &str {
    state.selected().map_or("", |index| names(state)[index])
}

/// Presses keys; control characters are what a terminal sends. Returns whether a key ended `top`.
pub(super) fn press(state: &mut State, keys: &str) -> bool {
    keys.chars().any(|key| {
        let (code, modifiers) = match key {
            '\n' => (KeyCode::Enter, KeyModifiers::NONE),
            '\u{8}' => (KeyCode::Backspace, KeyModifiers::NONE),
            '\u{1b}' => (KeyCode::Esc, KeyModifiers::NONE),
            '\u{3}' => (KeyCode::Char('c'), KeyModifiers::CONTROL),
            c => (KeyCode::Char(c), KeyModifiers::NONE),
        };
        state.key(KeyEvent::new(code, modifiers)).is_break()
    })
}

/// Counts of a direction, with connect times from `from_us`.
fn statistics(connections: u64, spurious: u64, from_us: u64) -> Statistics {
    let mut statistics = Statistics::default();
    let counters = &mut statistics.counters;
    counters.attempts = connections;
    counters.late = connections / 100;
    counters.handshake_retransmissions = connections / 80;
    counters.spurious = spurious;
    counters.aborted = connections / 200;
    for n in 0..connections {
        // Most connect times are near each other, some are long.
        let us = from_us + (n % 40) * from_us / 20 + n % 97 / 96 * from_us * 30;
        for histogram in [&mut statistics.path_rtt, &mut statistics.srtt] {
            histogram.sum_us += us;
            histogram.buckets[bucket_of(us)] += 1;
        }
    }
    statistics
}

/// A state with one policy, whose control arm has connections.
pub(super) fn with_control(connections: u64) -> State {
    let mut first = answer(1000, &[]);
    let none = Statistics::default();
    let stats = PolicyStats {
        since_ms: None,
        treated: ArmStats::from(&[statistics(950, 0, 120), none, none]),
        holdout: "5%".parse().ok(),
        control: Some(ArmStats::from(&[
            statistics(connections, 0, 120),
            none,
            none,
        ])),
        ..PolicyStats::default()
    };
    first.policies.insert("near".parse().unwrap(), stats);
    let socket = "/run/rto-agent/control.sock".to_owned();
    State::new(socket, Duration::from_secs(1), first, Instant::now())
}

/// A state in which every part of the view has data, after 20 answers.
pub(super) fn busy() -> State {
    let mut state = state(&[]);
    let mut wave = 0;
    for look in 1..=20 {
        let none = Statistics::default();
        wave += 40 + look % 7 * 25;
        let policies = [
            (
                "near",
                [statistics(wave, 0, 120), statistics(wave / 3, 0, 150), none],
            ),
            (
                "database-replicas-of-the-other-site",
                [
                    statistics(wave * 2, wave * 2 / 81, 21_000),
                    none,
                    statistics(9, 0, 25_000),
                ],
            ),
            ("unmatched", [statistics(look, 0, 900), none, none]),
            ("nothing-yet", [none, none, none]),
        ];
        let policies = policies
            .iter()
            .map(|(name, stats)| (name.parse().unwrap(), ArmStats::from(stats).into()));
        let answer = StatsAnswer {
            policies: policies.collect(),
            ..answer(1000 + look * 1000, &[])
        };
        state.update(answer, Instant::now());
    }
    state
}

/// An experiment with 1,000 connections counted in each arm, some of them with an outcome.
fn experiment(treated: Counts, control: Counts) -> experiments::ExperimentView {
    let design = Design {
        policy: "region".to_owned(),
        settings: "f00d".to_owned(),
        identity: "region".to_owned(),
        seed: 1,
        unit: Unit::Connection,
        ramp: Ramp::try_from(vec![0.5]).unwrap(),
        duration_s: 86_400,
        promote: false,
    };
    let mut experiment = Experiment::start(design, "a".to_owned()).unwrap();
    let increments = Increments {
        counts: Arms { treated, control },
        ..Increments::default()
    };
    experiment.observe(&increments, 1000);
    merged(&experiment, Arms::default())
}

/// A state with answers for the page: policy "near" has a control arm and a learnt timer, "region"
/// has timers of all kinds and an experiment that proved harm, "far" has a frozen learnt timer and
/// a running experiment.
pub(super) fn tuned() -> State {
    let mut state = with_control(50);
    let learning = TunedTimer {
        value_us: None,
        brakes: None,
        evidence: Evidence {
            samples: 120,
            ..Evidence::default()
        },
        next: Next::Learn { samples: 180 },
        ..timer("passive", TunerState::Learning)
    };
    let rto_min = TunedTimer {
        setting: "rto_min".to_owned(),
        value_us: Some(56_000),
        brakes: None,
        next: Next::Nothing,
        ..timer("both", TunerState::Active)
    };
    let blown = TunedTimer {
        kind: TimerKind::Guarded,
        value_us: None,
        configured_us: Some(24_000),
        brakes: None,
        next: Next::HoldEnds { at_ms: 1_540_000 },
        ..timer("active", TunerState::BrakedFuse)
    };
    let sample = timer("passive", TunerState::BrakedBudget);
    let throttled = TunedTimer {
        brakes: sample.brakes.map(|brakes| BrakesView {
            budget_left: 0.43,
            throttled: true,
            ..brakes
        }),
        next: Next::BudgetRefills,
        ..sample
    };
    let frozen = TunedTimer {
        value_us: None,
        brakes: None,
        next: Next::Resume,
        ..timer("active", TunerState::Frozen)
    };
    let lowered = TransitionView {
        setting: "initial_rto".to_owned(),
        direction: "active".to_owned(),
        transition: Transition {
            at_ms: 400_000,
            from: TunerState::Active,
            to: TunerState::Active,
            cause: Cause::WantLower,
            before_us: Some(96_000),
            after_us: Some(48_000),
            evidence: Evidence {
                samples: 4000,
                counts: tuner::Counts {
                    connections: 900,
                    ..tuner::Counts::default()
                },
                ..Evidence::default()
            },
        },
    };
    let of = |timers, transitions| TunedPolicy {
        since_ms: None,
        timers,
        transitions,
        notes: Vec::new(),
    };
    let near = of(
        vec![timer("active", TunerState::Active), learning, rto_min],
        vec![lowered],
    );
    let tune = TuneAnswer {
        at_ms: 1_000_000,
        not_stored: None,
        policies: [
            ("near", near),
            ("region", of(vec![blown, throttled], Vec::new())),
            ("far", of(vec![frozen], Vec::new())),
        ]
        .map(|(name, policy)| (name.parse().unwrap(), policy))
        .into(),
    };
    let counts = |good, spurious| Counts {
        attempts: 1000,
        good,
        spurious,
        ..Counts::default()
    };
    let experiments = ExperimentsAnswer {
        at_s: 1000,
        experiments: [
            ("region", experiment(counts(1000, 300), counts(1000, 0))),
            ("far", experiment(counts(1000, 0), counts(997, 0))),
        ]
        .map(|(name, view)| (name.parse().unwrap(), view))
        .into(),
    };
    state.update_page(Answers { tune, experiments });
    state
}
