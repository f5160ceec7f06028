//! The samples that `top` has of one policy, and the row that shows them.

use std::collections::VecDeque;

use rto_agent_core::{
    policy::PolicyName,
    wire::stats::{DirectionStats, PolicyStats},
};

/// Samples that are kept for the sparkline.
pub(super) const SAMPLES: usize = 60;

/// The start of counts that are not rates.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Scope {
    /// Since the policy was applied (or the boot), as the daemon counts.
    #[default]
    Policy,
    /// Since `top` first saw the policy.
    Top,
}

/// The samples of one policy.
#[derive(Clone, Debug)]
pub(super) struct PolicyHistory {
    first: PolicyStats,
    now: PolicyStats,
    connections_s: Option<f64>,
    aborted_s: Option<f64>,
    past: VecDeque<f64>,
}

impl PolicyHistory {
    /// The history after the first sample, which has no rates yet.
    pub(super) fn new(stats: PolicyStats) -> Self {
        Self {
            first: stats.clone(),
            now: stats,
            connections_s: None,
            aborted_s: None,
            past: VecDeque::new(),
        }
    }

    /// Takes another sample, `took_ms` after the previous one.
    pub(super) fn update(&mut self, stats: PolicyStats, took_ms: u64) {
        let (before, now) = (self.now.treated.total(), stats.treated.total());
        if now.connections < before.connections || now.aborted < before.aborted {
            // The counts restarted: it is another policy of the same name, or the policy was
            // applied again.
            *self = Self {
                past: std::mem::take(&mut self.past),
                ..Self::new(PolicyStats::default())
            };
            self.now = stats;
            return;
        }
        self.now = stats;
        if took_ms == 0 {
            return;
        }
        let since = now.since(&before);
        let per_second = |count: u64| float(count) * 1e3 / float(took_ms);
        let connections_s = per_second(since.connections);
        self.connections_s = Some(connections_s);
        self.aborted_s = Some(per_second(since.aborted));
        self.past.push_back(connections_s);
        if self.past.len() > SAMPLES {
            self.past.pop_front();
        }
    }

    /// Its counts since the start of the scope.
    pub(super) fn stats(&self, scope: Scope) -> PolicyStats {
        match scope {
            Scope::Policy => self.now.clone(),
            Scope::Top => self.now.since(&self.first),
        }
    }

    /// Whether the policy has a control arm.
    pub(super) fn has_control(&self) -> bool {
        self.now.control.is_some()
    }

    pub(super) fn row<'a>(&'a self, name: &'a PolicyName, scope: Scope) -> Row<'a> {
        let now = match scope {
            Scope::Policy => self.now.treated.clone(),
            Scope::Top => self.now.treated.since(&self.first.treated),
        };
        Row {
            name,
            stats: now.total(),
            connects: match now.active.attempts {
                0 => ("passive", now.passive),
                _ => ("active", now.active),
            },
            history: self,
        }
    }
}

/// The columns that can be sorted by, from left to right.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Column {
    Policy,
    ConnectionRate,
    Retransmissions,
    Spurious,
    Bad,
    ConnectP50,
    ConnectP99,
    ConnectP999,
    SrttP50,
    SrttP99,
    AbortedRate,
    Connections,
}

impl Column {
    /// All columns, in the order of the variants, with their titles.
    pub(super) const ALL: [(Self, &str); 12] = [
        (Self::Policy, "POLICY"),
        (Self::ConnectionRate, "CONN/S"),
        (Self::Retransmissions, "RETR%"),
        (Self::Spurious, "SPUR%"),
        (Self::Bad, ">500MS"),
        (Self::ConnectP50, "P50"),
        (Self::ConnectP99, "P99"),
        (Self::ConnectP999, "P99.9"),
        (Self::SrttP50, "RTT P50"),
        (Self::SrttP99, "RTT P99"),
        (Self::AbortedRate, "ABRT/S"),
        (Self::Connections, "CONNS"),
    ];

    /// The column's title.
    pub(super) const fn title(self) -> &'static str {
        Self::ALL[self as usize].1
    }

    /// The next column to sort by.
    pub(super) fn next(self) -> Self {
        Self::ALL[(self as usize + 1) % Self::ALL.len()].0
    }
}

/// One row of the table: a policy's directions together, without the control arm.
#[derive(Clone, Debug)]
pub(super) struct Row<'a> {
    pub(super) name: &'a PolicyName,
    stats: DirectionStats,
    /// Connections the policy opened, or those it accepted if it opened none: only one side can
    /// measure connect().
    connects: (&'static str, DirectionStats),
    history: &'a PolicyHistory,
}

impl Row<'_> {
    /// Connections per second in the last samples, the latest last.
    pub(super) fn past(&self) -> impl DoubleEndedIterator<Item = f64> {
        self.history.past.iter().copied()
    }

    /// A column's number; `None` if it is undefined.
    pub(super) fn value(&self, column: Column) -> Option<f64> {
        let stats = &self.stats;
        let (direction, connects) = &self.connects;
        match column {
            Column::Policy => None,
            Column::ConnectionRate => self.history.connections_s,
            Column::Retransmissions => share(stats.handshake_retransmissions, stats.connections),
            // Per connection, not per retransmission: a good network has so few retransmissions
            // that a share of them means little.
            Column::Spurious => share(stats.spurious, stats.connections),
            Column::Bad => share(connects.bad(direction), connects.connects(direction)),
            Column::ConnectP50 => connects.connect_time.quantile_us(0.5),
            Column::ConnectP99 => connects.connect_time.quantile_us(0.99),
            Column::ConnectP999 => connects.connect_time.quantile_us(0.999),
            Column::SrttP50 => stats.srtt.quantile_us(0.5),
            Column::SrttP99 => stats.srtt.quantile_us(0.99),
            Column::AbortedRate => self.history.aborted_s,
            Column::Connections => Some(float(stats.connections)),
        }
    }
}

/// Infinite if there are only retransmissions: no peer answers.
pub(super) fn share(part: u64, whole: u64) -> Option<f64> {
    (part > 0 || whole > 0).then(|| float(part) / float(whole))
}

#[expect(clippy::cast_precision_loss, reason = "three digits are shown")]
pub(super) fn float(count: u64) -> f64 {
    count as f64
}

#[cfg(test)]
mod tests {
    use rto_agent_core::wire::stats::ArmStats;

    use super::*;

    fn stats(connections: u64, aborted: u64) -> PolicyStats {
        let active = DirectionStats {
            connections,
            aborted,
            ..DirectionStats::default()
        };
        let treated = ArmStats {
            passive: active.clone(),
            active,
            ..ArmStats::default()
        };
        treated.into()
    }

    fn rates(history: &PolicyHistory) -> (Option<f64>, Option<f64>) {
        (history.connections_s, history.aborted_s)
    }

    #[test]
    fn rates_are_of_all_directions_since_the_last_look() {
        let mut history = PolicyHistory::new(stats(100, 7));
        assert_eq!(rates(&history), (None, None));
        history.update(stats(110, 8), 500);
        assert_eq!(rates(&history), (Some(40.0), Some(4.0)));
        history.update(stats(110, 8), 500);
        assert_eq!(rates(&history), (Some(0.0), Some(0.0)));
        assert_eq!(history.past, [40.0, 0.0]);
        let name = "x".parse().unwrap();
        let total = |scope| history.row(&name, scope).value(Column::Connections);
        assert_eq!(total(Scope::Policy), Some(220.0));
        assert_eq!(total(Scope::Top), Some(20.0));
    }

    #[test]
    fn two_looks_at_the_same_time_leave_the_rate() {
        let mut history = PolicyHistory::new(stats(0, 0));
        history.update(stats(2, 0), 1000);
        history.update(stats(4, 0), 0);
        assert_eq!(history.connections_s, Some(4.0));
    }

    #[test]
    fn counts_that_begin_again_have_no_rate() {
        let mut history = PolicyHistory::new(stats(100, 0));
        history.update(stats(200, 0), 1000);
        history.update(stats(3, 0), 1000);
        assert_eq!(rates(&history), (None, None));
        let since = history.stats(Scope::Top).treated.total();
        assert_eq!(since.connections, 6);
        history.update(stats(4, 0), 1000);
        assert_eq!(history.connections_s, Some(2.0));
        assert_eq!(history.past, [200.0, 2.0]);
    }

    #[test]
    fn only_the_last_looks_are_kept() {
        let mut history = PolicyHistory::new(stats(0, 0));
        for n in 1..200 {
            history.update(stats(n, 0), 1000);
        }
        assert_eq!(history.past.len(), SAMPLES);
    }

    #[test]
    fn shares_of_nothing() {
        assert_eq!(share(0, 0), None);
        assert_eq!(share(0, 5), Some(0.0));
        assert_eq!(share(1, 0), Some(f64::INFINITY));
    }
}
