//! Answers and keys for the tests.

use std::time::{Duration, Instant};

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use rto_agent_common::{Statistics, histogram::bucket_of};

use super::state::State;
use crate::wire::stats::{ArmStats, PolicyStats, StatsAnswer};

/// An answer with policies that had so many connections.
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

/// A state after one look, at 1 s.
pub(super) fn state(policies: &[(&str, u64)]) -> State {
    let first = answer(1000, policies);
    let socket = "/run/rto-agent/control.sock".to_owned();
    State::new(socket, Duration::from_secs(1), first, Instant::now())
}

/// One more look.
pub(super) fn look(state: &mut State, at_ms: u64, policies: &[(&str, u64)]) {
    state.update(answer(at_ms, policies), Instant::now());
}

/// Policies from top to bottom.
pub(super) fn names(state: &State) -> Vec<&str> {
    state.rows().iter().map(|row| row.name.as_str()).collect()
}

/// The selected one.
pub(super) fn selected(state: &State) -> &str {
    state.selected().map_or("", |index| names(state)[index])
}

/// Presses keys, control characters as a terminal sends them; whether one was the end.
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

/// Counts of a direction with so many connections, taking from `from_us` on.
fn statistics(connections: u64, spurious: u64, from_us: u64) -> Statistics {
    let mut statistics = Statistics::default();
    let counters = &mut statistics.counters;
    counters.connections = connections;
    counters.handshake_retransmissions = connections / 80;
    counters.spurious = spurious;
    counters.aborted = connections / 200;
    for n in 0..connections {
        // Most near one time, some late.
        let us = from_us + (n % 40) * from_us / 20 + n % 97 / 96 * from_us * 30;
        for histogram in [&mut statistics.handshake, &mut statistics.srtt] {
            histogram.sum_us += us;
            histogram.buckets[bucket_of(us)] += 1;
        }
    }
    statistics
}

/// A state with one policy, that has a control arm with so many connections.
pub(super) fn with_control(connections: u64) -> State {
    let mut first = answer(1000, &[]);
    let none = Statistics::default();
    let stats = PolicyStats {
        treated: ArmStats::from(&[statistics(950, 0, 120), none, none]),
        holdout: "5%".parse().ok(),
        control: Some(ArmStats::from(&[
            statistics(connections, 0, 120),
            none,
            none,
        ])),
    };
    first.policies.insert("near".parse().unwrap(), stats);
    let socket = "/run/rto-agent/control.sock".to_owned();
    State::new(socket, Duration::from_secs(1), first, Instant::now())
}

/// A state with all there can be, after 20 looks.
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
