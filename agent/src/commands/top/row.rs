//! The rows of the table of policies, and its columns.

use rto_agent_core::{
    figures::short_us,
    policy::PolicyName,
    wire::stats::{ArmStats, DirectionStats},
};

/// One row of the table: a policy's directions together, without the control arm.
#[derive(Clone, Debug)]
pub(super) struct Row<'a> {
    pub(super) name: &'a PolicyName,
    total: DirectionStats,
    /// Connections the policy opened, or those it accepted if it opened none: only one side can
    /// measure connect().
    connects: (&'static str, DirectionStats),
    /// Connections established and aborted per second since the previous answer.
    rates: Option<[f64; 2]>,
}

/// A column of the table.
pub(super) struct Column {
    pub(super) title: &'static str,
    pub(super) width: usize,
    /// `None` if it is undefined.
    pub(super) value: fn(&Row<'_>) -> Option<f64>,
    pub(super) text: fn(f64) -> String,
}

pub(super) const COLUMNS: [Column; 12] = [
    column("POLICY", 0, |_| None, count),
    column("CONN/S", 6, |row| Some(row.rates?[0]), rate),
    column(
        "RETR%",
        6,
        |row| row.share(row.total.handshake_retransmissions),
        percent,
    ),
    // Per connection, not per retransmission: a good network has so few retransmissions that a
    // share of them means little.
    column(
        "SPUR%",
        6,
        |row| row.share(row.total.spurious_connections),
        percent,
    ),
    column(">500MS", 6, bad, percent),
    column("P50", 6, |row| row.connect_us(0.5), short_us),
    column("P99", 6, |row| row.connect_us(0.99), short_us),
    column("P99.9", 6, |row| row.connect_us(0.999), short_us),
    column("RTT P50", 7, |row| row.srtt_us(0.5), short_us),
    column("RTT P99", 7, |row| row.srtt_us(0.99), short_us),
    column("ABRT/S", 6, |row| Some(row.rates?[1]), rate),
    column("CONNS", 8, |row| Some(float(row.total.connections)), count),
];
/// Columns by importance, for a terminal without room for all of them.
pub(super) const IMPORTANCE: [usize; 12] = [0, 1, 2, 3, 4, 6, 7, 5, 9, 10, 8, 11];
pub(super) const POLICY: usize = 0;
pub(super) const CONNECTION_RATE: usize = 1;
pub(super) const SPURIOUS: usize = 3;

const fn column(
    title: &'static str,
    width: usize,
    value: fn(&Row<'_>) -> Option<f64>,
    text: fn(f64) -> String,
) -> Column {
    Column {
        title,
        width,
        value,
        text,
    }
}

impl<'a> Row<'a> {
    /// `since`: the growth since the previous answer, and in how many milliseconds.
    pub(super) fn new(name: &'a PolicyName, arm: ArmStats, since: Option<(ArmStats, u64)>) -> Self {
        let rates = since
            .filter(|(_, took_ms)| *took_ms > 0)
            .map(|(grown, took_ms)| {
                let grown = grown.total();
                [grown.connections, grown.aborted].map(|count| float(count) * 1e3 / float(took_ms))
            });
        Self {
            name,
            total: arm.total(),
            connects: match arm.active.attempts {
                0 => ("passive", arm.passive),
                _ => ("active", arm.active),
            },
            rates,
        }
    }

    fn connect_us(&self, part: f64) -> Option<f64> {
        self.connects.1.connect_time.quantile_us(part)
    }

    fn srtt_us(&self, part: f64) -> Option<f64> {
        self.total.srtt.quantile_us(part)
    }

    fn share(&self, part: u64) -> Option<f64> {
        share(part, self.total.connections)
    }
}

fn bad(row: &Row<'_>) -> Option<f64> {
    let (direction, connects) = &row.connects;
    share(connects.bad(direction), connects.connects(direction))
}

/// Infinite if there are only retransmissions: no peer answers.
fn share(part: u64, whole: u64) -> Option<f64> {
    (part > 0 || whole > 0).then(|| float(part) / float(whole))
}

fn percent(share: f64) -> String {
    match share {
        share if share < 9.995 => format!("{:.2}%", share * 100.0),
        _ => ">999%".to_owned(),
    }
}

fn count(value: f64) -> String {
    format!("{value:.0}")
}

fn rate(value: f64) -> String {
    format!("{value:.1}")
}

#[expect(clippy::cast_precision_loss, reason = "few digits are shown")]
fn float(count: u64) -> f64 {
    count as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn share_of_zero_is_none() {
        assert_eq!(share(0, 0), None);
        assert_eq!(share(0, 5), Some(0.0));
        assert_eq!(share(1, 0).map(percent).as_deref(), Some(">999%"));
    }
}
