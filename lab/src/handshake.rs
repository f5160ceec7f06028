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

/// How long an event in a handshake takes, milliseconds, with exact timers and without the round-trip time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Prediction {
    /// The event.
    pub event: &'static str,
    /// Its description.
    #[serde(skip)]
    pub text: &'static str,
    /// Whether longer is better.
    #[serde(skip)]
    pub is_lifetime: bool,
    /// With the kernel's timers; absent if the kernel gives up before.
    pub kernel_ms: Option<f64>,
    /// With the policy.
    pub policy_ms: Option<f64>,
}

/// The name and the description of each event, and whether longer is better.
const EVENTS: [(&str, &str, bool); 6] = [
    ("syn-lost-once", "connect: SYN or SYN-ACK lost once", false),
    ("syn-lost-twice", "connect: lost twice", false),
    ("connect-gives-up", "connect: no answer, gives up", true),
    // The peer does not retransmit its SYN earlier.
    ("syn-ack-lost-once", "accept: SYN-ACK lost once", false),
    ("syn-ack-lost-twice", "accept: lost twice", false),
    ("request-dropped", "accept: no ACK, request dropped", true),
];

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

    /// When each of [`EVENTS`] is over, jiffies; `None` if the last retransmission is earlier.
    fn takes(&self) -> [Option<u64>; 6] {
        let (rto, retries) = (self.syn_ack_rto, self.syn_ack_retries);
        let rto_max = RTO_MAX_S * self.hz;
        let syn = self.syn.schedule(Granularity::Exact).sent;
        let syn_ack = syn_ack_schedule(rto, rto_max, retries);
        [
            syn.get(1).copied(),
            syn.get(2).copied(),
            Some(self.gives_up),
            syn_ack.get(1).copied(),
            syn_ack.get(2).copied(),
            Some(syn_ack_lifetime(rto, rto_max, retries)),
        ]
    }

    /// All events, compared with other timers.
    pub fn against(&self, kernel: &Self) -> Vec<Prediction> {
        let ms = |jiffies: u64| jiffies as f64 * 1000.0 / self.hz.max(1) as f64;
        let times = kernel.takes().into_iter().zip(self.takes());
        let all = EVENTS.into_iter().zip(times).map(|(event, times)| {
            let (event, text, is_lifetime) = event;
            Prediction {
                event,
                text,
                is_lifetime,
                kernel_ms: times.0.map(ms),
                policy_ms: times.1.map(ms),
            }
        });
        all.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let ms = all.iter().map(|p| p.kernel_ms.zip(p.policy_ms).unwrap());
        assert_eq!(
            ms.collect::<Vec<_>>(),
            [
                (1000.0, 100.0),
                (2000.0, 200.0),
                (131_000.0, 131_000.0),
                (1000.0, 493.0),
                (3000.0, 1479.0),
                (63_000.0, 31_059.0)
            ]
        );
    }

    #[test]
    fn prediction_without_retransmission_is_absent() {
        let kernel = Handshake::kernel(250, 1, 0, 1);
        let [_, syn_twice, _, once, twice, _] = kernel.takes();
        assert_eq!((syn_twice, once, twice), (None, Some(250), None));
    }
}
