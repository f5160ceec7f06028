//! TCP_SYNCNT decisions of the eBPF program.

use crate::{Options, Policy, SYN_RETRIES_LEN};

/// The value TCP_SYNCNT should get on a socket whose own value is `own`; `None` leaves it.
#[inline(always)]
#[must_use]
pub fn wanted(policy: &Policy, own: u32) -> Option<u32> {
    let wanted = u32::from(policy.syn_retries[own as usize & (SYN_RETRIES_LEN - 1)]);
    if wanted == 0 || wanted == own {
        None
    } else {
        Some(wanted)
    }
}

/// A TCP_SYNCNT with which connect() gives up no sooner than the kernel does with `own` retransmissions, where the
/// first timer was `timer_jiffies`, whatever policy it came of.
///
/// With so many more that the timer has doubled beyond the kernel's, every later one lasts as long as the kernel's
/// at the same place. One more, of 16 s or longer, makes up for those that do not double
/// (`net.ipv4.tcp_syn_linear_timeouts`, Linux 6.5, by default 4); with few retransmissions it takes two.
#[inline(always)]
#[must_use]
pub const fn enough(own: u32, timer_jiffies: u32, hz: u32) -> u32 {
    #[expect(clippy::cast_possible_truncation, reason = "128")]
    const MOST: u32 = SYN_RETRIES_LEN as u32 - 1;
    if timer_jiffies == 0 || timer_jiffies >= hz {
        return own;
    }
    // The doublings after which it is no shorter than 1 s, or one more.
    let doublings = (hz / timer_jiffies).ilog2() + 1;
    let more = if own < 3 { 2 } else { 1 };
    let wanted = own.saturating_add(doublings + more);
    if wanted < MOST { wanted } else { MOST }
}

/// The value the socket would have without the program: its own, or its namespace's
/// `tcp_syn_retries`. On a socket that is connected again, what the program set for the former
/// attempt does not count, unless somebody has set another since.
///
/// `in_force` is what the socket says, `None` where the kernel cannot be asked; then it is `host`.
#[inline(always)]
#[must_use]
pub fn own(options: &Options, in_force: Option<u32>, host: u32) -> u32 {
    match in_force {
        Some(value) if is_ours(options, value) => options.syn_retries_before,
        Some(value) => value,
        None if options.syn_retries_set != 0 => options.syn_retries_before,
        None => host,
    }
}

/// The value to give back to a socket the program's value is no longer meant for; `None` leaves
/// it, because the program did not set it or somebody has set another since.
#[inline(always)]
#[must_use]
pub fn to_restore(options: &Options, in_force: Option<u32>) -> Option<u32> {
    if options.syn_retries_set != 0 && in_force.is_none_or(|value| is_ours(options, value)) {
        Some(options.syn_retries_before)
    } else {
        None
    }
}

#[inline(always)]
fn is_ours(options: &Options, value: u32) -> bool {
    options.syn_retries_set != 0 && options.syn_retries_set == value
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOST: u32 = 6;

    fn fresh() -> Options {
        Options::default()
    }

    fn raised() -> Options {
        Options {
            syn_retries_before: 6,
            syn_retries_set: 9,
            ..fresh()
        }
    }

    #[test]
    fn the_table_decides_by_the_sockets_own_value() {
        let mut policy = Policy::EMPTY;
        policy.syn_retries[6] = 9;
        policy.syn_retries[9] = 9;
        assert_eq!(wanted(&policy, 6), Some(9));
        assert_eq!(wanted(&policy, 9), None);
        assert_eq!(wanted(&policy, 3), None);
        // A value no kernel has stays within the table.
        assert_eq!(wanted(&policy, 128 + 6), Some(9));
    }

    /// Jiffies until connect() gives up (`tcp_write_timeout()`, Linux 6.12): retransmissions at the first timer, and
    /// then each after twice the time, up to 120 s.
    fn gives_up(timer: u64, hz: u64, linear: u32, syncnt: u32) -> u64 {
        (0..=syncnt + linear)
            .map(|n| (timer << n.saturating_sub(linear).min(40)).min(120 * hz))
            .sum()
    }

    #[test]
    fn enough_is_never_sooner_than_the_kernel() {
        // Miri takes a thousand times as long.
        let step = if cfg!(miri) { 97 } else { 1 };
        for hz in [100, 250, 300, 1000] {
            for linear in [0, 4, 10] {
                for own in [1, 2, 3, 4, 6, 10, 20] {
                    for timer in (1..hz).step_by(step) {
                        let raised = enough(own, timer, hz);
                        assert!(
                            gives_up(timer.into(), hz.into(), linear, raised)
                                >= gives_up(hz.into(), hz.into(), linear, own),
                            "{own} at {timer} of {hz}, {linear} linear: {raised}"
                        );
                        // With four fewer it would be.
                        assert!(
                            linear != 0
                                || gives_up(timer.into(), hz.into(), 0, raised - 4)
                                    < gives_up(hz.into(), hz.into(), 0, own),
                            "{own} at {timer} of {hz}: {raised}"
                        );
                    }
                    assert_eq!(enough(own, hz, hz), own);
                    assert_eq!(enough(own, 0, hz), own);
                }
            }
        }
        assert_eq!(enough(127, 2, 1000), 127);
        assert_eq!(enough(u32::MAX / 2, 2, 1000), 127);
    }

    #[test]
    fn a_fresh_socket_says_its_own_value() {
        assert_eq!(own(&fresh(), Some(3), HOST), 3);
        assert_eq!(own(&fresh(), None, HOST), HOST);
        assert_eq!(to_restore(&fresh(), Some(3)), None);
        assert_eq!(to_restore(&fresh(), None), None);
    }

    #[test]
    fn what_the_program_set_is_not_the_sockets_own() {
        assert_eq!(own(&raised(), Some(9), HOST), 6);
        assert_eq!(to_restore(&raised(), Some(9)), Some(6));
        // Before Linux 6.1 the socket cannot be asked: the storage remembers.
        assert_eq!(
            own(
                &Options {
                    syn_retries_before: 5,
                    ..raised()
                },
                None,
                HOST
            ),
            5
        );
        assert_eq!(to_restore(&raised(), None), Some(6));
    }

    #[test]
    fn what_somebody_else_set_since_stands() {
        assert_eq!(own(&raised(), Some(2), HOST), 2);
        assert_eq!(to_restore(&raised(), Some(2)), None);
    }
}
