//! TCP_SYNCNT decisions of the eBPF program.

use crate::{Policy, SYN_RETRIES_LEN, SocketState};

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

/// The value the socket would have without the program: its own, or its namespace's
/// `tcp_syn_retries`. On a socket that is connected again, what the program set for the former
/// attempt does not count, unless somebody has set another since.
///
/// `in_force` is what the socket says, `None` where the kernel cannot be asked; then it is `host`.
#[inline(always)]
#[must_use]
pub fn own(state: &SocketState, in_force: Option<u32>, host: u32) -> u32 {
    match in_force {
        Some(value) if is_ours(state, value) => state.syn_retries_before,
        Some(value) => value,
        None if state.syn_retries_set != 0 => state.syn_retries_before,
        None => host,
    }
}

/// The value to give back to a socket the program's value is no longer meant for; `None` leaves
/// it, because the program did not set it or somebody has set another since.
#[inline(always)]
#[must_use]
pub fn to_restore(state: &SocketState, in_force: Option<u32>) -> Option<u32> {
    if state.syn_retries_set != 0 && in_force.is_none_or(|value| is_ours(state, value)) {
        Some(state.syn_retries_before)
    } else {
        None
    }
}

#[inline(always)]
fn is_ours(state: &SocketState, value: u32) -> bool {
    state.syn_retries_set != 0 && state.syn_retries_set == value
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOST: u32 = 6;
    fn fresh() -> SocketState {
        SocketState {
            policy: 2,
            generation: 1,
            initial_rto_jiffies: 25,
            ..SocketState::default()
        }
    }

    fn raised() -> SocketState {
        SocketState {
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
                &SocketState {
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
