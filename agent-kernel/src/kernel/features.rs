//! The kernel features that the agent uses, and whether they are available. The running kernel is
//! probed rather than judged by its version: distributions backport features, and lockdown or an
//! LSM can disable them.

use std::sync::Arc;

use nix::errno::Errno;
use rto_agent_common::{Probe, SockOpt};
use rto_agent_core::{
    config::AGENT_KEYS,
    policy::SETTINGS,
    wire::kernel::{Feature, Presence},
};

use super::{
    btf::{Btf, BtfError},
    privileges, sysctl, version,
};

/// Why a probe has no positive result.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct ProbeError {
    /// What it shows about the feature.
    pub presence: Presence,
    /// The error as text; kernel messages may have several lines.
    pub text: String,
}

impl ProbeError {
    /// An error for a probe that was not made, for this reason.
    pub fn not_asked(why: &str) -> Self {
        Self {
            presence: Presence::Unknown,
            text: format!("not queried: {why}"),
        }
    }

    fn evidence(&self) -> String {
        let line = self.text.lines().next().unwrap_or_default();
        match privileges::lockdown(&privileges::securityfs()) {
            Some(state) if state != "none" && self.presence == Presence::Refused => {
                format!("{line} (lockdown: {state})")
            }
            _ => line.to_owned(),
        }
    }
}

/// Results of the probes; see `datapath::probe`.
#[derive(Clone, Debug)]
pub struct ProbeResults {
    /// Return values of bpf_setsockopt and other helpers.
    pub options: Result<Probe, ProbeError>,
    /// Whether the program for accepted sockets loads.
    pub clone: Result<(), ProbeError>,
    /// Whether LSM programs run, or why not.
    pub lsm_active: Result<(), String>,
    /// Whether the iterator over open sockets loads.
    pub walk: Result<(), ProbeError>,
}

impl ProbeResults {
    /// Results for a host on which nothing can be probed.
    pub fn nothing(why: &ProbeError) -> Self {
        Self {
            options: Err(why.clone()),
            clone: Err(why.clone()),
            lsm_active: Err(why.text.clone()),
            walk: Err(why.clone()),
        }
    }
}

/// A feature in this module's tables: name, first version, purpose.
struct Known(&'static str, &'static str, &'static str);

impl Known {
    fn found(&self, presence: Presence, evidence: impl Into<String>) -> Feature {
        Feature {
            name: self.0.to_owned(),
            since: self.1.to_owned(),
            presence,
            required: false,
            settings: settings_with(self.0),
            needed_for: self.2.to_owned(),
            evidence: evidence.into(),
        }
    }
}

/// The settings and keys of `[agent]` that use a feature.
fn settings_with(feature: &str) -> Vec<String> {
    let settings = SETTINGS
        .iter()
        .map(|setting| (setting.key.name, setting.key.features));
    let agent = AGENT_KEYS.iter().map(|key| (key.name, key.features));
    let using = settings
        .chain(agent)
        .filter(|(_, features)| features.contains(&feature));
    using.map(|(name, _)| name.to_owned()).collect()
}

/// The features of this kernel, from the probe's results and its BTF.
pub fn evaluate(asked: &ProbeResults, btf: &Result<Arc<Btf>, BtfError>) -> Vec<Feature> {
    let mut features = options(asked);
    let linear = sysctl::ipv4::<u8>("tcp_syn_linear_timeouts");
    features.push(
        Known(
            "tcp-syn-linear-timeouts",
            "6.5",
            "the first SYN retransmissions (4 by default) keep the initial RTO before it doubles",
        )
        .found(
            present(linear.is_some()),
            "sysctl net.ipv4.tcp_syn_linear_timeouts",
        ),
    );
    let known = Known(
        "syn-ack-retransmission-timeout",
        "5.17 (5.15.y since July 2024)",
        "the initial RTO of all SYN-ACKs, not only the first",
    );
    features.push(match btf {
        Ok(btf) => {
            let there = btf.has("request_sock", &["timeout"]);
            known.found(present(there), "BTF: request_sock.timeout")
        }
        Err(e) => known.found(Presence::Unknown, e.to_string()),
    });
    let known = Known(
        "btf",
        "5.4",
        "accepted sockets before their first RTT sample, and open sockets; SYNs of MPTCP and TCP Fast Open keep the \
         kernel's timer",
    );
    let missing = match btf {
        Ok(btf) => btf.offsets().err().map(|e| e.to_string()),
        Err(e) => Some(e.to_string()),
    };
    features.push(match missing {
        None => known.found(Presence::Present, "/sys/kernel/btf/vmlinux"),
        Some(why) => known.found(Presence::Absent, why),
    });
    features.push(reads_listener(btf));
    features.push(accepted(asked));
    features.push(tells_samples());
    let known = Known(
        "iter-tcp",
        "5.15",
        "sockets that are already open, and detach --restore",
    );
    features.push(match &asked.walk {
        Ok(()) => known.found(Presence::Present, "loaded"),
        Err(e) => known.found(e.presence, e.evidence()),
    });
    features
}

/// Name of the feature: the program can read the listener of a request socket, and socket fields
/// that its context lacks.
pub const READS_LISTENER: &str = "reads-listener";

/// Whether the program can read the kernel's own structs. Both functions were added in the same
/// version; without BTF the kernel has no functions that programs can call.
fn reads_listener(btf: &Result<Arc<Btf>, BtfError>) -> Feature {
    let known = Known(
        READS_LISTENER,
        "6.2",
        "syn_ack_rto from the SYN-ACK retransmissions of the listener or its network namespace; \
         connections to a listener with TCP_DEFER_ACCEPT keep the kernel's timer",
    );
    match btf {
        Ok(btf) if btf.socket_types().listener != 0 => known.found(
            Presence::Present,
            "BTF: bpf_cast_to_kern_ctx, bpf_rdonly_cast",
        ),
        Ok(_) => known.found(
            Presence::Absent,
            "BTF: bpf_cast_to_kern_ctx or bpf_rdonly_cast is missing, or a structure has an \
             unknown layout",
        ),
        Err(e) => known.found(Presence::Absent, e.to_string()),
    }
}

/// Name of the feature: the RTT hook receives the sample as an argument.
pub const RTT_SAMPLES: &str = "rtt-hook-sample";

/// Derived from the version, because only an established connection could show this feature.
fn tells_samples() -> Feature {
    const SINCE: (u32, u32) = (6, 10);
    let known = Known(
        RTT_SAMPLES,
        "6.10",
        "rto_min = \"auto\", which learns from delays of ACKs",
    );
    match version::running() {
        Ok(version) => {
            let presence = present(version.at_least(SINCE));
            known.found(presence, format!("kernel version {version}"))
        }
        Err(e) => known.found(Presence::Unknown, e.to_string()),
    }
}

/// Name of the feature: a program can read TCP_BPF_RTO_MIN and TCP_BPF_DELACK_MAX of a socket.
pub const BPF_TIMERS: &str = "bpf-getsockopt-rto-min";

fn accepted(asked: &ProbeResults) -> Feature {
    let known = Known(
        "bpf-lsm-cgroup",
        "6.0, and \"bpf\" among the active LSMs",
        "rto_min on accepted sockets before their first RTT sample",
    );
    match (&asked.clone, &asked.lsm_active) {
        (Ok(()), Ok(())) => known.found(Presence::Present, "loaded, and \"bpf\" is active"),
        (Ok(()), Err(why)) => known.found(Presence::Absent, why.as_str()),
        (Err(e), _) => known.found(e.presence, e.evidence()),
    }
}

/// Selects one helper's return value from a probe.
type Answer = fn(&Probe) -> i64;

/// Features that the probe's socket shows.
fn options(asked: &ProbeResults) -> Vec<Feature> {
    const ALL: [(Known, Answer, bool); 12] = [
        (
            Known(
                "cgroup-bpf-link",
                "5.7",
                "attaching in addition to other programs",
            ),
            |p| 1 - p.ran,
            true,
        ),
        (
            Known(
                "sock_ops-socket-storage",
                "5.10",
                "a connection keeps its policy",
            ),
            |p| p.storage,
            true,
        ),
        (
            Known("bpf-rto-min", "5.10", "rto_min"),
            |p| p.set[SockOpt::RtoMin as usize],
            false,
        ),
        (
            Known("bpf-delack-max", "5.10", "delack_max"),
            |p| p.set[SockOpt::DelackMax as usize],
            false,
        ),
        (
            Known(
                BPF_TIMERS,
                "6.15",
                "connections with rto_min or delack_max need no socket storage until a segment is \
                 lost",
            ),
            |p| match p.get[SockOpt::RtoMin as usize] {
                0 => p.get[SockOpt::DelackMax as usize],
                refused => refused,
            },
            false,
        ),
        (
            Known("bpf-thin-linear", "6.1", "thin_linear and linear_retries"),
            |p| p.set[SockOpt::ThinLinear as usize],
            false,
        ),
        (
            Known("tcp-rto-max", "6.15", "rto_max"),
            |p| p.set[SockOpt::RtoMax as usize],
            false,
        ),
        (
            Known("bpf-user-timeout", "5.10", "user_timeout"),
            |p| p.set[SockOpt::UserTimeout as usize],
            false,
        ),
        (
            Known("bpf-syncnt", "4.14", "syn_retries"),
            |p| p.set[SockOpt::SynCnt as usize],
            false,
        ),
        (
            Known(
                "rto-hook",
                "4.16",
                "linear_retries; counts of RTOs and tail loss probes",
            ),
            |p| p.cb_flags,
            false,
        ),
        (
            Known(
                "rtt-hook",
                "5.3",
                "rto_restart; smoothed RTTs at an interval, not only at the end of a connection",
            ),
            |p| p.cb_flags,
            false,
        ),
        (
            Known(
                "rto-hook-on-open-sockets",
                "6.12",
                "linear_retries, rto_restart and statistics of sockets that were already open",
            ),
            |p| p.set[SockOpt::CbFlags as usize],
            false,
        ),
    ];
    ALL.into_iter()
        .map(|(known, answer, required)| {
            let (presence, evidence) = match &asked.options {
                Ok(probe) => of_answer(answer(probe)),
                Err(e) => match e.presence {
                    // If one feature cannot be probed, the state of the other remains unknown.
                    Presence::Absent => (Presence::Unknown, e.evidence()),
                    presence => (presence, e.evidence()),
                },
            };
            Feature {
                required,
                ..known.found(presence, evidence)
            }
        })
        .collect()
}

fn present(there: bool) -> Presence {
    if there {
        Presence::Present
    } else {
        Presence::Absent
    }
}

/// Interprets a helper's return value on the probe's socket.
fn of_answer(answer: i64) -> (Presence, String) {
    let errno = Errno::from_raw(i32::try_from(-answer).unwrap_or(0));
    match answer {
        0 => (Presence::Present, "probed".to_owned()),
        _ => match errno {
            Errno::EPERM | Errno::EACCES => (Presence::Refused, format!("probed: {errno}")),
            _ => (Presence::Absent, format!("probed: {errno}")),
        },
    }
}

/// Whether a setting is supported; `None` if that is unknown.
pub fn can_set(features: &[Feature], name: &str) -> Option<bool> {
    let feature = features.iter().find(|f| f.name == name)?;
    match feature.presence {
        Presence::Present => Some(true),
        Presence::Absent | Presence::Refused => Some(false),
        Presence::Unknown => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused() -> ProbeError {
        ProbeError {
            presence: Presence::Refused,
            text: "bpf_prog_load: Operation not permitted\nlog".to_owned(),
        }
    }

    fn asked(options: Result<Probe, ProbeError>) -> ProbeResults {
        ProbeResults {
            options,
            clone: Err(refused()),
            lsm_active: Ok(()),
            walk: Ok(()),
        }
    }

    fn presence(features: &[Feature], name: &str) -> Presence {
        let feature = features.iter().find(|f| f.name == name);
        feature.map_or(Presence::Unknown, |f| f.presence)
    }

    #[test]
    fn features_follow_the_kernels_answers() {
        let mut probe = Probe {
            ran: 1,
            ..Probe::default()
        };
        probe.set[SockOpt::RtoMax as usize] = -(Errno::EINVAL as i64);
        probe.set[SockOpt::DelackMax as usize] = -(Errno::EPERM as i64);
        let features = evaluate(&asked(Ok(probe)), &Btf::vmlinux());
        assert_eq!(presence(&features, "cgroup-bpf-link"), Presence::Present);
        assert_eq!(presence(&features, "bpf-rto-min"), Presence::Present);
        assert_eq!(presence(&features, "tcp-rto-max"), Presence::Absent);
        assert_eq!(presence(&features, "bpf-delack-max"), Presence::Refused);
        assert_eq!(presence(&features, "bpf-lsm-cgroup"), Presence::Refused);
        assert_eq!(presence(&features, "iter-tcp"), Presence::Present);
        assert_eq!(can_set(&features, "tcp-rto-max"), Some(false));
        assert_eq!(can_set(&features, "bpf-thin-linear"), Some(true));
        assert_eq!(can_set(&features, "no such feature"), None);
    }

    #[test]
    fn feature_without_probe_is_unknown() {
        let nothing = ProbeResults::nothing(&ProbeError::not_asked("needs CAP_BPF"));
        let features = evaluate(&nothing, &Btf::vmlinux());
        for name in ["bpf-rto-min", "iter-tcp", "bpf-lsm-cgroup"] {
            assert_eq!(presence(&features, name), Presence::Unknown, "{name}");
        }
        assert_eq!(can_set(&features, "bpf-rto-min"), None);
        // A single refusal is reported as such.
        let features = evaluate(&asked(Err(refused())), &Btf::vmlinux());
        assert_eq!(presence(&features, "bpf-rto-min"), Presence::Refused);
        let evidence = features.iter().find(|f| f.name == "bpf-rto-min");
        assert!(
            evidence
                .unwrap()
                .evidence
                .starts_with("bpf_prog_load: Operation not permitted")
        );
    }

    #[test]
    fn features_of_the_tables_are_probed() {
        let nothing = ProbeResults::nothing(&ProbeError::not_asked("test"));
        let known = evaluate(&nothing, &Btf::vmlinux());
        let settings = SETTINGS.iter().map(|setting| setting.key.features);
        let agent = AGENT_KEYS.iter().map(|key| key.features);
        for feature in settings.chain(agent).flatten() {
            assert!(known.iter().any(|f| f.name == *feature), "{feature}");
        }
    }
}
