//! The cost of lost SYNs and SYN-ACKs with a policy, compared with the kernel's timers.

use rto_model::syn::{Granularity, RTO_MAX_S, SynTimers, syn_ack_lifetime, syn_ack_schedule};
use serde::Serialize;

/// The timers of handshakes on a host, in both directions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Handshake {
    /// Jiffies per second.
    pub hz: u64,
    /// Timers of connections that the host opens.
    pub syn: SynTimers,
    /// When connect() gives up, jiffies since the first SYN: the agent keeps the kernel's time unless a policy sets
    /// `syn_retries`.
    pub gives_up: u64,
    /// The initial RTO of SYN-ACKs, jiffies.
    pub syn_ack_rto: u64,
    /// `net.ipv4.tcp_synack_retries`.
    pub syn_ack_retries: u8,
}

/// An event in a handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Event {
    /// connect(): the SYN, or its SYN-ACK, is lost once.
    SynLostOnce,
    /// connect(): the first two SYNs or SYN-ACKs are lost.
    SynLostTwice,
    /// connect(): there is no answer, until ETIMEDOUT.
    ConnectGivesUp,
    /// accept(): the SYN-ACK is lost once, and the peer does not retransmit its SYN earlier.
    SynAckLostOnce,
    /// accept(): the first two SYN-ACKs are lost.
    SynAckLostTwice,
    /// accept(): the peer never answers, until the half-open request is dropped.
    RequestDropped,
}

impl Event {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::SynLostOnce,
        Self::SynLostTwice,
        Self::ConnectGivesUp,
        Self::SynAckLostOnce,
        Self::SynAckLostTwice,
        Self::RequestDropped,
    ];

    /// A description.
    pub const fn text(self) -> &'static str {
        match self {
            Self::SynLostOnce => "connect: SYN or SYN-ACK lost once",
            Self::SynLostTwice => "connect: lost twice",
            Self::ConnectGivesUp => "connect: no answer, gives up",
            Self::SynAckLostOnce => "accept: SYN-ACK lost once",
            Self::SynAckLostTwice => "accept: lost twice",
            Self::RequestDropped => "accept: no ACK, request dropped",
        }
    }

    /// Whether longer is better.
    pub const fn is_lifetime(self) -> bool {
        matches!(self, Self::ConnectGivesUp | Self::RequestDropped)
    }
}

/// The duration of an event, milliseconds, with exact timers and without the round-trip time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Prediction {
    /// The event.
    pub event: Event,
    /// With the kernel's timers; absent if the kernel gives up before.
    pub kernel_ms: Option<f64>,
    /// With the policy.
    pub policy_ms: Option<f64>,
}

impl Handshake {
    /// The kernel's timers: 1 s for SYN and SYN-ACK.
    pub fn kernel(hz: u64, syn_retries: u8, linear_timeouts: u8, syn_ack_retries: u8) -> Self {
        let syn = SynTimers::kernel(hz, syn_retries, linear_timeouts);
        Self {
            hz,
            syn,
            gives_up: syn.gives_up(),
            syn_ack_rto: hz,
            syn_ack_retries,
        }
    }

    /// When an event is over, jiffies; `None` if the last retransmission is earlier.
    pub fn takes(&self, event: Event) -> Option<u64> {
        let rto_max = RTO_MAX_S * self.hz;
        let syn = || self.syn.schedule(Granularity::Exact);
        let syn_ack = || syn_ack_schedule(self.syn_ack_rto, rto_max, self.syn_ack_retries);
        match event {
            Event::SynLostOnce => syn().sent.get(1).copied(),
            Event::SynLostTwice => syn().sent.get(2).copied(),
            Event::ConnectGivesUp => Some(self.gives_up),
            Event::SynAckLostOnce => syn_ack().get(1).copied(),
            Event::SynAckLostTwice => syn_ack().get(2).copied(),
            Event::RequestDropped => Some(syn_ack_lifetime(
                self.syn_ack_rto,
                rto_max,
                self.syn_ack_retries,
            )),
        }
    }

    /// All events, compared with other timers.
    pub fn against(&self, kernel: &Self) -> Vec<Prediction> {
        let ms = |jiffies: u64| jiffies as f64 * 1000.0 / self.hz.max(1) as f64;
        let one = |event| Prediction {
            event,
            kernel_ms: kernel.takes(event).map(ms),
            policy_ms: self.takes(event).map(ms),
        };
        Event::ALL.map(one).to_vec()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn event_texts_differ_and_two_are_lifetimes() {
        let texts: std::collections::BTreeSet<_> = Event::ALL.map(Event::text).into();
        assert_eq!(texts.len(), Event::ALL.len());
        let lifetimes = Event::ALL.into_iter().filter(|event| event.is_lifetime());
        let lifetimes: Vec<&str> = lifetimes.map(Event::text).collect();
        assert_eq!(
            lifetimes,
            [
                "connect: no answer, gives up",
                "accept: no ACK, request dropped"
            ]
        );
    }

    #[test]
    fn policy_of_100_ms_with_kernel_defaults() {
        let kernel = Handshake::kernel(1000, 6, 4, 5);
        let policy = Handshake {
            syn: SynTimers {
                initial_rto: 100,
                ..kernel.syn
            },
            syn_ack_rto: 493,
            ..kernel
        };
        let all = policy.against(&kernel);
        let ms: Vec<_> = all
            .iter()
            .map(|p| (p.kernel_ms.unwrap(), p.policy_ms.unwrap()))
            .collect();
        assert_eq!(ms[0], (1000.0, 100.0));
        assert_eq!(ms[1], (2000.0, 200.0));
        assert_eq!(ms[2], (131_000.0, 131_000.0));
        assert_eq!(ms[3], (1000.0, 493.0));
        assert_eq!(ms[4], (3000.0, 1479.0));
        assert_eq!(ms[5], (63_000.0, 31_059.0));
    }

    #[test]
    fn prediction_without_retransmission_is_absent() {
        let kernel = Handshake::kernel(250, 1, 0, 1);
        assert_eq!(kernel.takes(Event::SynLostTwice), None);
        assert_eq!(kernel.takes(Event::SynAckLostTwice), None);
        assert_eq!(kernel.takes(Event::SynAckLostOnce), Some(250));
    }
}
