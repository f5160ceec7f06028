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
    privileges, sysctl,
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

/// Name of the feature: the program can read the listener of a request socket, and socket fields
/// that its context lacks.
pub const READS_LISTENER: &str = "reads-listener";

/// Name of the feature: the kernel runs TIMEOUT_INIT after it has armed a SYN's timer, and the program can read what
/// decides when a SYN is retransmitted.
pub const SYN_SCHEDULE: &str = "syn-schedule";

/// Name of the feature: a program can read TCP_BPF_RTO_MIN and TCP_BPF_DELACK_MAX of a socket.
pub const BPF_TIMERS: &str = "bpf-getsockopt-rto-min";

/// Whether a feature is there, and the evidence.
type Shown = (Presence, String);

/// A feature, and how its presence is determined.
struct Row {
    name: &'static str,
    /// The kernel's version.
    since: &'static str,
    needed_for: &'static str,
    look: fn(&Host<'_>) -> Shown,
}

/// Without these the daemon does not start.
const REQUIRED: [&str; 2] = ["cgroup-bpf-link", "sock_ops-socket-storage"];

const FEATURES: &[Row] = &[
    Row {
        name: "cgroup-bpf-link",
        since: "5.7",
        needed_for: "attaching in addition to other programs",
        look: |host| host.helper(|p| 1 - p.ran),
    },
    Row {
        name: "sock_ops-socket-storage",
        since: "5.10",
        needed_for: "a connection keeps its policy",
        look: |host| host.helper(|p| p.storage),
    },
    Row {
        name: "bpf-rto-min",
        since: "5.10",
        needed_for: "rto_min",
        look: |host| host.set(SockOpt::RtoMin),
    },
    Row {
        name: "bpf-delack-max",
        since: "5.10",
        needed_for: "delack_max",
        look: |host| host.set(SockOpt::DelackMax),
    },
    Row {
        name: BPF_TIMERS,
        since: "6.15",
        needed_for: "connections with rto_min or delack_max need no socket storage until a segment is lost",
        look: |host| {
            host.helper(|p| match p.get[SockOpt::RtoMin as usize] {
                0 => p.get[SockOpt::DelackMax as usize],
                refused => refused,
            })
        },
    },
    Row {
        name: "bpf-thin-linear",
        since: "6.1",
        needed_for: "thin_linear and linear_retries",
        look: |host| host.set(SockOpt::ThinLinear),
    },
    Row {
        name: "tcp-rto-max",
        since: "6.15",
        needed_for: "rto_max",
        look: |host| host.set(SockOpt::RtoMax),
    },
    Row {
        name: "bpf-user-timeout",
        since: "5.10",
        needed_for: "user_timeout",
        look: |host| host.set(SockOpt::UserTimeout),
    },
    Row {
        name: "bpf-syncnt",
        since: "4.14",
        needed_for: "syn_retries",
        look: |host| host.set(SockOpt::SynCnt),
    },
    Row {
        name: SYN_SCHEDULE,
        since: "5.10",
        needed_for: "SYNs follow the kernel's own after an outage (otherwise the interval doubles from initial_rto)",
        look: |host| match host.btf.map(|btf| btf.socket_types().has_syn_timers()) {
            Ok(true) => host.helper(|p| 1 - p.armed),
            Ok(false) => absent("BTF: a structure has an unknown layout"),
            Err(e) => absent(e),
        },
    },
    Row {
        name: "rto-hook",
        since: "4.16",
        needed_for: "linear_retries; counts of RTOs and tail loss probes",
        look: |host| host.helper(|p| p.cb_flags),
    },
    Row {
        name: "rtt-hook",
        since: "5.3",
        needed_for: "rto_restart; smoothed RTTs at an interval, not only at the end of a connection",
        look: |host| host.helper(|p| p.cb_flags),
    },
    Row {
        name: "rto-hook-on-open-sockets",
        since: "6.12",
        needed_for: "linear_retries, rto_restart and statistics of sockets that were already open",
        look: |host| host.set(SockOpt::CbFlags),
    },
    Row {
        name: "tcp-syn-linear-timeouts",
        since: "6.5",
        needed_for: "the first SYN retransmissions (4 by default) keep the initial RTO before it grows",
        look: |_| {
            let value = sysctl::ipv4::<u8>("tcp_syn_linear_timeouts");
            let evidence = "sysctl net.ipv4.tcp_syn_linear_timeouts";
            (present(value.is_some()), evidence.to_owned())
        },
    },
    Row {
        name: "syn-ack-retransmission-timeout",
        since: "5.17 (5.15.y since July 2024)",
        needed_for: "the initial RTO of all SYN-ACKs, not only the first",
        look: |host| match host.btf {
            Ok(btf) => {
                let is_there = btf.has("request_sock", &["timeout"]);
                (present(is_there), "BTF: request_sock.timeout".to_owned())
            }
            Err(e) => (Presence::Unknown, e.to_string()),
        },
    },
    Row {
        name: "btf",
        since: "5.4",
        needed_for: "accepted sockets before their first RTT sample, and open sockets; SYNs of MPTCP and TCP Fast Open \
                     keep the kernel's timer",
        look: |host| match host.btf.map(Btf::offsets) {
            Ok(Ok(_)) => (Presence::Present, "/sys/kernel/btf/vmlinux".to_owned()),
            Ok(Err(e)) => absent(e),
            Err(e) => absent(e),
        },
    },
    // Both functions were added in the same version; without BTF the kernel has no functions that
    // programs can call.
    Row {
        name: READS_LISTENER,
        since: "6.2",
        needed_for: "syn_ack_rto from the SYN-ACK retransmissions of the listener or its network namespace; connections \
                     to a listener with TCP_DEFER_ACCEPT keep the kernel's timer",
        look: |host| match host.btf {
            Ok(btf) if btf.socket_types().listener != 0 => (
                Presence::Present,
                "BTF: bpf_cast_to_kern_ctx, bpf_rdonly_cast".to_owned(),
            ),
            Ok(_) => absent(
                "BTF: bpf_cast_to_kern_ctx or bpf_rdonly_cast is missing, or a structure has an unknown layout",
            ),
            Err(e) => absent(e),
        },
    },
    Row {
        name: "bpf-lsm-cgroup",
        since: "6.0, and \"bpf\" among the active LSMs",
        needed_for: "rto_min on accepted sockets before their first RTT sample",
        look: |host| match (&host.probed.clone, &host.probed.lsm_active) {
            (Ok(()), Ok(())) => (
                Presence::Present,
                "loaded, and \"bpf\" is active".to_owned(),
            ),
            (Ok(()), Err(why)) => absent(why),
            (program, _) => loads(program),
        },
    },
    Row {
        name: "iter-tcp",
        since: "5.15",
        needed_for: "sockets that are already open, and detach --restore",
        look: |host| loads(&host.probed.walk),
    },
];

/// What is known of this kernel.
struct Host<'a> {
    probed: &'a ProbeResults,
    btf: Result<&'a Btf, &'a BtfError>,
}

impl Host<'_> {
    /// A helper's return value in the probe.
    fn helper(&self, answer: impl Fn(&Probe) -> i64) -> Shown {
        match &self.probed.options {
            Ok(probe) => of_answer(answer(probe)),
            // If one feature cannot be probed, the state of the other remains unknown.
            Err(e) if e.presence == Presence::Absent => (Presence::Unknown, e.evidence()),
            Err(e) => (e.presence, e.evidence()),
        }
    }

    /// Whether the probe could set a socket option.
    fn set(&self, option: SockOpt) -> Shown {
        self.helper(|p| p.set[option as usize])
    }
}

/// The features of this kernel, from the probe's results and its BTF.
pub fn evaluate(probed: &ProbeResults, btf: &Result<Arc<Btf>, BtfError>) -> Vec<Feature> {
    let host = Host {
        probed,
        btf: btf.as_deref(),
    };
    let features = FEATURES.iter().map(|row| {
        let (presence, evidence) = (row.look)(&host);
        Feature {
            name: row.name.to_owned(),
            since: row.since.to_owned(),
            presence,
            required: REQUIRED.contains(&row.name),
            settings: settings_with(row.name),
            needed_for: row.needed_for.to_owned(),
            evidence,
        }
    });
    features.collect()
}

/// Whether a program of the probe loads.
fn loads(program: &Result<(), ProbeError>) -> Shown {
    match program {
        Ok(()) => (Presence::Present, "loaded".to_owned()),
        Err(e) => (e.presence, e.evidence()),
    }
}

fn absent(why: impl ToString) -> Shown {
    (Presence::Absent, why.to_string())
}

fn present(there: bool) -> Presence {
    if there {
        Presence::Present
    } else {
        Presence::Absent
    }
}

/// Interprets a helper's return value on the probe's socket.
fn of_answer(answer: i64) -> Shown {
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

    fn probed(options: Result<Probe, ProbeError>) -> ProbeResults {
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
    fn features_follow_probe_results() {
        let mut probe = Probe {
            ran: 1,
            ..Probe::default()
        };
        probe.armed = 1;
        probe.set[SockOpt::RtoMax as usize] = -(Errno::EINVAL as i64);
        probe.set[SockOpt::DelackMax as usize] = -(Errno::EPERM as i64);
        let features = evaluate(&probed(Ok(probe)), &Btf::vmlinux());
        assert_eq!(presence(&features, "cgroup-bpf-link"), Presence::Present);
        assert_eq!(presence(&features, "bpf-rto-min"), Presence::Present);
        assert_eq!(presence(&features, "tcp-rto-max"), Presence::Absent);
        assert_eq!(presence(&features, SYN_SCHEDULE), Presence::Present);
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
        let features = evaluate(&probed(Err(refused())), &Btf::vmlinux());
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
