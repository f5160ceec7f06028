//! `GET /v1/events`: retransmissions and decisions about timers as they happen, one JSON object per
//! line.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use rto_agent_common::{
    address::{AF_INET, AF_INET6},
    direction,
    event::{Event, kind},
};
use rto_model::syn::{MAX_SYNCNT, RTO_MAX_S, syn_ack_schedule};
use serde::{Deserialize, Serialize};

use super::{holdout::Verdict, stats::Arm, tune::TransitionView};
use crate::{
    policy::{Cidr, HostFacts, PolicyName, units::jiffies_to_usecs},
    printable,
};

/// One line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(untagged)]
pub enum StreamItem {
    /// A retransmission.
    Event(EventView),
    /// Retransmissions without details: the buffer was full.
    Lost {
        /// How many.
        lost: u64,
    },
    /// A learnt or guarded timer has changed.
    Tuned(TunedEvent),
    /// A verdict about a policy's timers was reached, or a fallback (harm) ended.
    Verdict(VerdictEvent),
}

/// A transition of a timer that is learnt or guarded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct TunedEvent {
    /// The policy.
    pub policy: PolicyName,
    /// What happened, and the evidence.
    pub transition: TransitionView,
}

/// A verdict about a policy's timers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct VerdictEvent {
    /// When, Unix microseconds.
    pub at_us: u64,
    /// The policy.
    pub policy: PolicyName,
    /// The verdict; "not-yet" after a fallback (harm) has ended.
    pub verdict: Verdict,
    /// The verdict and the counts, in a sentence.
    pub text: String,
}

/// A retransmission.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct EventView {
    /// When, Unix microseconds.
    pub at_us: u64,
    /// What was retransmitted, and why.
    pub kind: Kind,
    /// Which retransmission it is, 1 for the first.
    pub attempt: u32,
    /// The timer that fired, microseconds; absent if none fired, or if it is unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timer_us: Option<u64>,
    /// Local address.
    pub local: IpAddr,
    /// Local port.
    pub local_port: u16,
    /// The peer's address.
    pub remote: IpAddr,
    /// The peer's port.
    pub remote_port: u16,
    /// State of the socket, as ss(8) names it.
    pub state: String,
    /// Policy of the connection; absent if the policy no longer exists.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<PolicyName>,
    /// Arm of the policy; absent for the treated one.
    #[serde(default, skip_serializing_if = "Arm::is_treated")]
    pub arm: Arm,
    /// Which side opened the connection: "active" (this host), "passive" (the peer) or "unknown".
    pub direction: String,
    /// Process that called connect(), if the kernel reports it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// Its name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub process: Option<String>,
}

/// What was retransmitted, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// A SYN.
    Syn,
    /// A SYN-ACK; reported when the connection is established.
    SynAck,
    /// A timeout of an established connection.
    Rto,
    /// A tail loss probe.
    Tlp,
    /// Without a timeout: fast retransmit, RACK.
    Fast,
}

impl std::fmt::Display for Kind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Self::Syn => "SYN",
            Self::SynAck => "SYN-ACK",
            Self::Rto => "RTO",
            Self::Tlp => "TLP",
            Self::Fast => "fast",
        })
    }
}

impl EventView {
    /// Converts an event of the program; `None` if this version does not know its kind or address
    /// family.
    pub fn of(
        event: &Event,
        at_us: u64,
        policy: Option<PolicyName>,
        host: &HostFacts,
    ) -> Option<Self> {
        let kind = match event.kind {
            kind::SYN => Kind::Syn,
            kind::SYN_ACK => Kind::SynAck,
            kind::RTO => Kind::Rto,
            kind::TLP => Kind::Tlp,
            kind::FAST => Kind::Fast,
            _ => return None,
        };
        let process = String::from_utf8_lossy(&event.comm);
        let process = process.trim_end_matches('\0');
        Some(Self {
            at_us,
            kind,
            attempt: event.attempt,
            timer_us: timer(kind, event, host).map(|jiffies| jiffies_to_usecs(jiffies, host.hz)),
            local: address(event.family, &event.local)?,
            local_port: u16::try_from(event.local_port).ok()?,
            remote: address(event.family, &event.remote)?,
            remote_port: u16::try_from(u32::from_be(event.remote_port)).ok()?,
            state: state(event.state),
            policy,
            arm: Arm::of(event.arm),
            direction: match event.direction {
                direction::ACTIVE => "active",
                direction::PASSIVE => "passive",
                _ => "unknown",
            }
            .to_owned(),
            pid: (event.pid != 0).then_some(event.pid),
            process: (!process.is_empty()).then(|| printable::text(process).into_owned()),
        })
    }

    /// Whether the event is of this policy (if given) and its peer is in one of these prefixes (if
    /// any).
    pub fn matches(&self, policy: Option<&PolicyName>, cidrs: &[Cidr]) -> bool {
        policy.is_none_or(|policy| self.policy.as_ref() == Some(policy))
            && (cidrs.is_empty() || cidrs.iter().any(|cidr| cidr.contains(self.remote)))
    }
}

/// The timer that fired, jiffies. For SYN-ACKs the program reports only the first timer, from which
/// the others follow.
fn timer(kind: Kind, event: &Event, host: &HostFacts) -> Option<u64> {
    let hz = u64::from(host.hz);
    let before = usize::try_from(event.attempt.checked_sub(1)?).ok()?;
    let own = u64::from(event.timer_jiffies);
    let initial_rto = if own == 0 { hz } else { own };
    match kind {
        Kind::Rto | Kind::Syn => Some(own),
        Kind::SynAck => {
            let sent = syn_ack_schedule(initial_rto, RTO_MAX_S * hz, MAX_SYNCNT);
            sent.windows(2).nth(before).map(|pair| pair[1] - pair[0])
        }
        Kind::Tlp | Kind::Fast => None,
    }
}

fn address(family: u32, words: &[u32; 4]) -> Option<IpAddr> {
    match family {
        AF_INET => Some(Ipv4Addr::from(words[0].to_ne_bytes()).into()),
        AF_INET6 => {
            // Each word is in network byte order in memory.
            let [a, b, c, d] = words.map(|word| u128::from(u32::from_be(word)));
            let bytes = a << 96 | b << 64 | c << 32 | d;
            Some(IpAddr::from(Ipv6Addr::from_bits(bytes)).to_canonical())
        }
        _ => None,
    }
}

/// The name that ss(8) has for a `BPF_TCP_*` state.
fn state(state: u32) -> String {
    let name = match state {
        1 => "ESTAB",
        2 => "SYN-SENT",
        3 | 12 => "SYN-RECV",
        4 => "FIN-WAIT-1",
        5 => "FIN-WAIT-2",
        6 => "TIME-WAIT",
        7 => "UNCONN",
        8 => "CLOSE-WAIT",
        9 => "LAST-ACK",
        10 => "LISTEN",
        11 => "CLOSING",
        other => return other.to_string(),
    };
    name.to_owned()
}

#[cfg(test)]
mod tests {
    use rto_agent_common::arm;

    use super::*;
    use crate::testing::HOST;

    fn event(kind: u32, attempt: u32, timer_jiffies: u32) -> Event {
        Event {
            kind,
            attempt,
            timer_jiffies,
            family: AF_INET,
            remote: [u32::from_ne_bytes([10, 0, 0, 2]), 9, 9, 9],
            remote_port: 443u32.to_be(),
            local_port: 50_000,
            state: 2,
            ..Event::default()
        }
    }

    fn view(event: &Event) -> EventView {
        EventView::of(event, 0, None, &HOST).unwrap()
    }

    #[test]
    fn timers_of_syn_acks_follow_from_the_first() {
        for (kind, attempt, jiffies, ms) in [
            (kind::SYN, 6, 50, Some(200)),
            (kind::SYN_ACK, 1, 0, Some(1000)),
            (kind::SYN_ACK, 3, 25, Some(400)),
            (kind::RTO, 3, 51, Some(204)),
            (kind::TLP, 1, 0, None),
        ] {
            let timer_us = view(&event(kind, attempt, jiffies)).timer_us;
            assert_eq!(timer_us, ms.map(|ms| ms * 1000), "{kind} {attempt}");
        }
    }

    #[test]
    fn event_addresses_are_shown_with_ports() {
        let v4 = view(&event(kind::SYN, 1, 0));
        assert_eq!(
            (v4.remote.to_string(), v4.remote_port),
            ("10.0.0.2".to_owned(), 443)
        );
        assert_eq!((v4.local_port, v4.state.as_str()), (50_000, "SYN-SENT"));
        let mapped = Event {
            family: AF_INET6,
            remote: [0, 0, 0xffffu32.to_be(), u32::from_ne_bytes([10, 0, 0, 2])],
            ..event(kind::SYN, 1, 0)
        };
        assert_eq!(view(&mapped).remote.to_string(), "10.0.0.2");
        let cidr: Cidr = "10.0.0.0/24".parse().unwrap();
        assert!(v4.matches(None, &[cidr]));
        assert!(!v4.matches(None, &["10.0.1.0/24".parse().unwrap()]));
        assert!(!v4.matches(Some(&"near".parse().unwrap()), &[]));
    }

    #[test]
    fn arm_is_shown_for_control_arms_only() {
        let json = |arm| {
            let event = Event {
                arm,
                ..event(kind::SYN, 1, 25)
            };
            let view = view(&event);
            let json = serde_json::to_value(&view).unwrap();
            assert_eq!(
                serde_json::from_value::<EventView>(json.clone()).unwrap(),
                view
            );
            json.get("arm").cloned()
        };
        assert_eq!(json(arm::treated(7)), None);
        assert_eq!(json(arm::control(7)), Some("control".into()));
    }

    #[test]
    fn unknown_event_fields_are_omitted() {
        assert_eq!(EventView::of(&event(99, 1, 0), 0, None, &HOST), None);
        let strange = Event {
            family: 1,
            ..event(kind::SYN, 1, 0)
        };
        assert_eq!(EventView::of(&strange, 0, None, &HOST), None);
        // Attempts begin at 1: 0 must not cause an underflow.
        assert_eq!(view(&event(kind::SYN, 0, 25)).timer_us, None);
    }
}
