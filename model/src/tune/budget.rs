//! The size of the program's budget for retransmissions (`rto_agent_common::brake`).

/// The smallest budget, retransmissions.
pub const LEAST: u32 = 50;
/// The largest budget, retransmissions: the program counts tenths in an `i32`.
pub const MOST: u32 = 1 << 24;
/// A budget covers the connections of at least this time, seconds.
const SECONDS: u64 = 4;

/// The budget, in retransmissions, for a peak rate of connections per second. It has eight sizes
/// per power of two, because each change is written to the program.
pub fn for_peak(peak_per_s: u64) -> u32 {
    let wanted = u32::try_from(peak_per_s.saturating_mul(SECONDS)).unwrap_or(MOST);
    match wanted {
        ..=LEAST => LEAST,
        MOST.. => MOST,
        _ => wanted.next_multiple_of(wanted.next_power_of_two() / 16),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budgets_are_an_eighth_apart() {
        for (peak_per_s, budget) in [
            (0, 50),
            (12, 50),
            (13, 52),
            (16, 64),
            (17, 72),
            (100, 416),
            (u64::MAX, MOST),
        ] {
            assert_eq!(for_peak(peak_per_s), budget, "{peak_per_s}");
        }
    }
}
