//! Sample answers and keys for the tests.

use std::time::{Duration, Instant};

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use rto_agent_common::{Statistics, histogram::bucket_of};
use rto_agent_core::wire::stats::{ArmStats, PolicyStats, StatsAnswer};

use super::state::{Answers, State};

/// Answers with policies that have these statistics.
fn of<'a>(at_ms: u64, policies: impl IntoIterator<Item = (&'a str, PolicyStats)>) -> Answers {
    let policies = policies.into_iter();
    let stats = StatsAnswer {
        at_ms,
        on: true,
        sampling: 1,
        rtt_sampling: "end".to_owned(),
        policies: policies
            .map(|(name, stats)| (name.parse().unwrap(), stats))
            .collect(),
    };
    Answers {
        stats,
        ..Answers::default()
    }
}

/// Answers with policies that have these numbers of connections.
pub(super) fn answers(at_ms: u64, policies: &[(&str, u64)]) -> Answers {
    let policies = policies.iter().map(|(name, connections)| {
        let mut stats = PolicyStats::default();
        stats.treated.active.connections = *connections;
        (*name, stats)
    });
    of(at_ms, policies)
}

/// A state after one answer, at 1 s.
pub(super) fn state(policies: &[(&str, u64)]) -> State {
    let first = answers(1000, policies);
    let socket = "/run/rto-agent/control.sock".to_owned();
    State::new(socket, Duration::from_secs(1), first, Instant::now())
}

/// Takes one more answer.
pub(super) fn look(state: &mut State, at_ms: u64, policies: &[(&str, u64)]) {
    state.update(answers(at_ms, policies), Instant::now());
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
    counters.spurious_connections = spurious;
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

/// A state in which every part of the view has data, after two answers.
pub(super) fn busy() -> State {
    let mut state = state(&[]);
    for look in 1..=2 {
        let none = Statistics::default();
        let policies = [
            (
                "near",
                [
                    statistics(look * 1000, 0, 120),
                    statistics(look * 300, 0, 150),
                    none,
                ],
            ),
            (
                "database-replicas-of-the-other-site",
                [
                    statistics(look * 2025, look * 25, 21_000),
                    none,
                    statistics(9, 0, 25_000),
                ],
            ),
            ("unmatched", [statistics(look, 0, 900), none, none]),
            ("nothing-yet", [none, none, none]),
        ];
        let policies = policies.iter();
        let policies = policies.map(|(name, stats)| (*name, ArmStats::from(stats).into()));
        state.update(of(1000 + look * 1000, policies), Instant::now());
    }
    state
}
