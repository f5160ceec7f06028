//! Which operations concern the program, decided from three words of the context.

/// `BPF_SOCK_OPS_TIMEOUT_INIT` (include/uapi/linux/bpf.h).
pub const TIMEOUT_INIT: u32 = 1;
/// `BPF_SOCK_OPS_TCP_CONNECT_CB`: of the probe alone. The first TIMEOUT_INIT comes right after it, and decides
/// over the connection at once.
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
const SYN_SENT: u32 = 2;
/// `BPF_TCP_SYN_RECV`.
const SYN_RECV: u32 = 3;

/// What to do for a callback.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Nothing: not ours.
    Leave,
    /// The timeout of a connecting socket's SYN is asked for: before the first SYN, when the policy is chosen and its
    /// options are set, and again by the kernel at each SYN timeout (`retransmits_timed_out()`, Linux 6.12).
    SynTimeout,
    /// The timer of a SYN has fired, and nothing was retransmitted yet.
    SynLost,
    /// The timeout of a SYN-ACK is asked for: of a connection request, or of a full socket in
    /// SYN_RECV. The latter is the child that TCP Fast Open makes before the handshake is over, or
    /// a connecting socket whose SYN crossed its peer's.
    SynAckTimeout,
    /// A connecting socket gives up, or is closed.
    ConnectFailed,
    /// connect() succeeded.
    ActiveEstablished,
    /// A connection was accepted; or SYNs crossed and the handshake is over, which the kernel
    /// reports the same way (`tcp_rcv_state_process()`, TCP_SYN_RECV, Linux 6.12).
    PassiveEstablished,
    /// A retransmission timer fired.
    RetransmissionTimeout,
    /// A segment was sent again.
    Retransmitted,
    /// The state of the connection changes.
    StateChange,
    /// A round-trip time was measured.
    RttSample,
}

/// Whether an operation number is one of those above: the first thing the program asks, so
/// that all others cost a few instructions.
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

/// Decides on the operation, whether the context has a full socket, and that socket's state.
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
        RETRANS_CB if is_fullsock && !in_handshake(state) => Action::Retransmitted,
        STATE_CB if is_fullsock && state == SYN_SENT => Action::ConnectFailed,
        STATE_CB if is_fullsock && !in_handshake(state) => Action::StateChange,
        RTT_CB if is_fullsock && !in_handshake(state) => Action::RttSample,
        _ => Action::Leave,
    }
}

/// The state of a connection that ends (`BPF_TCP_CLOSE`).
const CLOSE: u32 = 7;

/// Whether a connection that gets into this state has ended.
#[inline(always)]
#[must_use]
pub const fn is_end(to: u32) -> bool {
    to == CLOSE
}

/// What a change of state means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Nothing that is counted.
    Other,
    /// The connection ends, both sides having finished.
    Finished,
    /// The connection ends otherwise: reset, timed out, or closed with data unread.
    Aborted,
}

/// Decides on a change of state (the arguments of STATE_CB), and on whether the peer has acknowledged
/// all that was sent. In FIN_WAIT2 it has: the kernel ends such a connection by itself after a while.
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

/// What a socket retransmits before it is established is counted by the timeouts of its SYN.
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
        // TCP Fast Open with data in the SYN, and crossed SYNs.
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
        // Connecting, listening, closed already.
        for from in [0, SYN_SENT, SYN_RECV, CLOSE, 10, NEW_SYN_RECV] {
            assert_eq!(change(from, CLOSE, false), Change::Other);
        }
        assert_eq!(change(1, CLOSE, true), Change::Aborted);
        assert_eq!(change(5, CLOSE, true), Change::Finished);
        for closing in [9, 11] {
            assert_eq!(change(closing, CLOSE, true), Change::Finished);
            // Reset, or given up, before the last of it was acknowledged.
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
            assert_eq!(decide(op, true, SYN_RECV), Action::Leave);
        }
        for op in [RETRANS_CB, RTT_CB] {
            assert_eq!(decide(op, true, SYN_SENT), Action::Leave);
        }
        assert_eq!(decide(STATE_CB, true, SYN_SENT), Action::ConnectFailed);
        assert_eq!(decide(STATE_CB, false, SYN_SENT), Action::Leave);
    }
}
