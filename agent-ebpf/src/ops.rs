//! Which operations the program handles, decided from three words of the context.

/// `BPF_SOCK_OPS_TIMEOUT_INIT` (include/uapi/linux/bpf.h).
pub const TIMEOUT_INIT: u32 = 1;
/// `BPF_SOCK_OPS_TCP_CONNECT_CB`: used only by the probe. The main program does not need it: the first TIMEOUT_INIT
/// follows immediately, and the program chooses the policy there.
pub const TCP_CONNECT_CB: u32 = 3;
/// `BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB`.
pub const ACTIVE_ESTABLISHED_CB: u32 = 4;
/// `BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB`.
pub const PASSIVE_ESTABLISHED_CB: u32 = 5;
/// `BPF_SOCK_OPS_RTO_CB`.
pub const RTO_CB: u32 = 8;
/// `BPF_SOCK_OPS_RETRANS_CB`.
pub const RETRANS_CB: u32 = 9;

/// `BPF_SOCK_OPS_STATE_CB`.
pub const STATE_CB: u32 = 10;
/// `BPF_SOCK_OPS_RTT_CB`.
pub const RTT_CB: u32 = 12;

/// `BPF_TCP_SYN_SENT`.
pub const SYN_SENT: u32 = 2;
/// `BPF_TCP_SYN_RECV`.
const SYN_RECV: u32 = 3;

/// The program's action for a callback.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Nothing: the program does not handle this operation.
    Leave,
    /// TIMEOUT_INIT of a connecting socket: the kernel asks for the SYN's timeout. It does so before the first SYN,
    /// when the program chooses the policy and sets its options, and again at each SYN timeout
    /// (`retransmits_timed_out()`, Linux 6.12).
    SynTimeout,
    /// The timer of a SYN has fired; the kernel has not retransmitted it yet.
    SynLost,
    /// A SYN was retransmitted, or could not be.
    SynRetransmitted,
    /// TIMEOUT_INIT of a SYN-ACK: of a connection request, or of a full socket in SYN_RECV. The latter is the child
    /// that TCP Fast Open creates before the handshake is complete, or a connecting socket in a simultaneous open.
    SynAckTimeout,
    /// The kernel gives up the attempt, or the application closes the socket, before the connection is established.
    ConnectFailed,
    /// connect() succeeded.
    ActiveEstablished,
    /// A connection was accepted; or a simultaneous open is complete, which the kernel reports the same way
    /// (`tcp_rcv_state_process()`, TCP_SYN_RECV, Linux 6.12).
    PassiveEstablished,
    /// A retransmission timer fired.
    RetransmissionTimeout,
    /// A segment was retransmitted.
    Retransmitted,
    /// The state of the connection changes.
    StateChange,
    /// A round-trip time was measured.
    RttSample,
}

/// Whether the program handles an operation. The program checks this first, so that all others cost only a few
/// instructions.
#[inline(always)]
#[must_use]
pub const fn is_ours(op: u32) -> bool {
    matches!(
        op,
        TIMEOUT_INIT
            | ACTIVE_ESTABLISHED_CB
            | PASSIVE_ESTABLISHED_CB
            | RTO_CB
            | RETRANS_CB
            | STATE_CB
            | RTT_CB
    )
}

/// Chooses the action by the operation, whether the context has a full socket, and that socket's state.
#[inline(always)]
#[must_use]
pub const fn decide(op: u32, is_fullsock: bool, state: u32) -> Action {
    match op {
        TIMEOUT_INIT if is_fullsock && state == SYN_SENT => Action::SynTimeout,
        TIMEOUT_INIT => Action::SynAckTimeout,
        ACTIVE_ESTABLISHED_CB if is_fullsock => Action::ActiveEstablished,
        PASSIVE_ESTABLISHED_CB if is_fullsock => Action::PassiveEstablished,
        RTO_CB if is_fullsock && in_handshake(state) => Action::SynLost,
        RTO_CB if is_fullsock => Action::RetransmissionTimeout,
        RETRANS_CB if is_fullsock && in_handshake(state) => Action::SynRetransmitted,
        RETRANS_CB if is_fullsock => Action::Retransmitted,
        STATE_CB if is_fullsock && in_handshake(state) => Action::ConnectFailed,
        STATE_CB if is_fullsock => Action::StateChange,
        RTT_CB if is_fullsock && !in_handshake(state) => Action::RttSample,
        _ => Action::Leave,
    }
}

/// The state of a connection that has ended (`BPF_TCP_CLOSE`).
const CLOSE: u32 = 7;

/// Whether a change to this state matters: the end of the connection, or the application has closed its side.
#[inline(always)]
#[must_use]
pub const fn is_watched(to: u32) -> bool {
    is_end(to) || has_closed(to)
}

/// Whether the application has closed its side with this change: the socket may send data, but no process holds it.
#[inline(always)]
#[must_use]
pub const fn has_closed(to: u32) -> bool {
    const FIN_WAIT1: u32 = 4;
    const LAST_ACK: u32 = 9;
    matches!(to, FIN_WAIT1 | LAST_ACK)
}

/// Whether a change to this state ends the connection.
#[inline(always)]
#[must_use]
pub const fn is_end(to: u32) -> bool {
    to == CLOSE
}

/// The meaning of a state change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Not counted.
    Other,
    /// The connection ends after both sides have finished.
    Finished,
    /// The connection ends in another way: reset, timed out, or closed with unread data.
    Aborted,
}

/// Classifies a state change by the arguments of STATE_CB, and by whether the peer has acknowledged everything that was
/// sent. In FIN_WAIT2 it has, so the connection counts as finished even if the kernel closes it
/// (`net.ipv4.tcp_fin_timeout`).
#[inline(always)]
#[must_use]
pub const fn change(from: u32, to: u32, is_acknowledged: bool) -> Change {
    const ESTABLISHED: u32 = 1;
    const FIN_WAIT1: u32 = 4;
    const FIN_WAIT2: u32 = 5;
    const TIME_WAIT: u32 = 6;
    const CLOSE_WAIT: u32 = 8;
    const LAST_ACK: u32 = 9;
    const CLOSING: u32 = 11;
    match from {
        _ if !is_end(to) => Change::Other,
        ESTABLISHED | CLOSE_WAIT | FIN_WAIT1 => Change::Aborted,
        LAST_ACK | CLOSING if !is_acknowledged => Change::Aborted,
        FIN_WAIT2 | TIME_WAIT | LAST_ACK | CLOSING => Change::Finished,
        _ => Change::Other,
    }
}

/// Whether the connection is not established yet. Its retransmissions are counted at the SYN timeouts.
const fn in_handshake(state: u32) -> bool {
    state == SYN_SENT || state == SYN_RECV
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEW_SYN_RECV: u32 = 12;

    #[test]
    fn every_other_operation_is_left_alone() {
        for op in (0..64).chain([u32::MAX]) {
            let mut acts = false;
            for full in [false, true] {
                for state in 0..16 {
                    acts |= decide(op, full, state) != Action::Leave;
                }
            }
            assert_eq!(is_ours(op), acts, "op {op}");
        }
    }

    #[test]
    fn timeouts_go_by_the_socket() {
        assert_eq!(decide(TIMEOUT_INIT, true, SYN_SENT), Action::SynTimeout);
        assert_eq!(
            decide(TIMEOUT_INIT, false, NEW_SYN_RECV),
            Action::SynAckTimeout
        );
        // TCP Fast Open with data in the SYN, and a simultaneous open.
        assert_eq!(decide(TIMEOUT_INIT, true, SYN_RECV), Action::SynAckTimeout);
    }

    #[test]
    fn only_full_sockets_take_options() {
        for op in [ACTIVE_ESTABLISHED_CB, PASSIVE_ESTABLISHED_CB] {
            assert_eq!(decide(op, false, SYN_SENT), Action::Leave);
            assert_ne!(decide(op, true, SYN_SENT), Action::Leave);
        }
    }

    #[test]
    fn only_the_end_of_a_connection_is_counted() {
        for from in 0..16 {
            for to in (0..16).filter(|to| *to != CLOSE) {
                assert_eq!(change(from, to, true), Change::Other);
            }
        }
        // Connecting, listening, already closed.
        for from in [0, SYN_SENT, SYN_RECV, CLOSE, 10, NEW_SYN_RECV] {
            assert_eq!(change(from, CLOSE, false), Change::Other);
        }
        assert_eq!(change(1, CLOSE, true), Change::Aborted);
        assert_eq!(change(5, CLOSE, true), Change::Finished);
        for closing in [9, 11] {
            assert_eq!(change(closing, CLOSE, true), Change::Finished);
            // Reset, or timed out, before the peer acknowledged the last data.
            assert_eq!(change(closing, CLOSE, false), Change::Aborted);
        }
    }

    #[test]
    fn the_hook_is_for_established_connections() {
        const ESTABLISHED: u32 = 1;
        assert_eq!(decide(RTO_CB, true, SYN_SENT), Action::SynLost);
        assert_eq!(decide(RTO_CB, true, SYN_RECV), Action::SynLost);
        assert_eq!(
            decide(RTO_CB, true, ESTABLISHED),
            Action::RetransmissionTimeout
        );
        assert_eq!(decide(RTO_CB, false, SYN_SENT), Action::Leave);
        for op in [RETRANS_CB, STATE_CB, RTT_CB] {
            assert_ne!(decide(op, true, ESTABLISHED), Action::Leave);
            assert_eq!(decide(op, false, ESTABLISHED), Action::Leave);
        }
        for state in [SYN_SENT, SYN_RECV] {
            assert_eq!(decide(RTT_CB, true, state), Action::Leave);
            assert_eq!(decide(RETRANS_CB, true, state), Action::SynRetransmitted);
            assert_eq!(decide(STATE_CB, true, state), Action::ConnectFailed);
        }
        assert_eq!(decide(STATE_CB, false, SYN_SENT), Action::Leave);
    }
}
