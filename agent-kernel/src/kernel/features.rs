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

/// The features of this kernel, from the probe's results and its BTF.
pub fn evaluate(asked: &ProbeResults, btf: &Result<Arc<Btf>, BtfError>) -> Vec<Feature> {
    let helper = |answer: &dyn Fn(&Probe) -> i64| match &asked.options {
        Ok(probe) => of_answer(answer(probe)),
        // If one feature cannot be probed, the state of the other remains unknown.
        Err(e) if e.presence == Presence::Absent => (Presence::Unknown, e.evidence()),
        Err(e) => (e.presence, e.evidence()),
    };
    let set = |option: SockOpt| helper(&|p| p.set[option as usize]);
    let loads = |program: &Result<(), ProbeError>| match program {
        Ok(()) => (Presence::Present, "loaded".to_owned()),
        Err(e) => (e.presence, e.evidence()),
    };
    let feature = |name: &str, since: &str, needed_for: &str, shown: Shown| Feature {
        name: name.to_owned(),
        since: since.to_owned(),
        presence: shown.0,
        required: ["cgroup-bpf-link", "sock_ops-socket-storage"].contains(&name),
        settings: settings_with(name),
        needed_for: needed_for.to_owned(),
        evidence: shown.1,
    };
    vec![
        feature(
            "cgroup-bpf-link",
            "5.7",
            "attaching in addition to other programs",
            helper(&|p| 1 - p.ran),
        ),
        feature(
            "sock_ops-socket-storage",
            "5.10",
            "a connection keeps its policy",
            helper(&|p| p.storage),
        ),
        feature("bpf-rto-min", "5.10", "rto_min", set(SockOpt::RtoMin)),
        feature(
            "bpf-delack-max",
            "5.10",
            "delack_max",
            set(SockOpt::DelackMax),
        ),
        feature(
            BPF_TIMERS,
            "6.15",
            "connections with rto_min or delack_max need no socket storage until a segment is lost",
            helper(&|p| match p.get[SockOpt::RtoMin as usize] {
                0 => p.get[SockOpt::DelackMax as usize],
                refused => refused,
            }),
        ),
        feature(
            "bpf-thin-linear",
            "6.1",
            "thin_linear and linear_retries",
            set(SockOpt::ThinLinear),
        ),
        feature("tcp-rto-max", "6.15", "rto_max", set(SockOpt::RtoMax)),
        feature(
            "bpf-user-timeout",
            "5.10",
            "user_timeout",
            set(SockOpt::UserTimeout),
        ),
        feature("bpf-syncnt", "4.14", "syn_retries", set(SockOpt::SynCnt)),
        feature(
            SYN_SCHEDULE,
            "5.10",
            "SYNs follow the kernel's own after an outage (otherwise the interval doubles from initial_rto)",
            match btf.as_ref().map(|btf| btf.socket_types().has_syn_timers()) {
                Ok(true) => helper(&|p| 1 - p.armed),
                Ok(false) => (
                    Presence::Absent,
                    "BTF: a structure has an unknown layout".to_owned(),
                ),
                Err(e) => (Presence::Absent, e.to_string()),
            },
        ),
        feature(
            "rto-hook",
            "4.16",
            "linear_retries; counts of RTOs and tail loss probes",
            helper(&|p| p.cb_flags),
        ),
        feature(
            "rtt-hook",
            "5.3",
            "rto_restart; smoothed RTTs at an interval, not only at the end of a connection",
            helper(&|p| p.cb_flags),
        ),
        feature(
            "rto-hook-on-open-sockets",
            "6.12",
            "linear_retries, rto_restart and statistics of sockets that were already open",
            set(SockOpt::CbFlags),
        ),
        feature(
            "tcp-syn-linear-timeouts",
            "6.5",
            "the first SYN retransmissions (4 by default) keep the initial RTO before it grows",
            (
                present(sysctl::ipv4::<u8>("tcp_syn_linear_timeouts").is_some()),
                "sysctl net.ipv4.tcp_syn_linear_timeouts".to_owned(),
            ),
        ),
        feature(
            "syn-ack-retransmission-timeout",
            "5.17 (5.15.y since July 2024)",
            "the initial RTO of all SYN-ACKs, not only the first",
            match btf {
                Ok(btf) => (
                    present(btf.has("request_sock", &["timeout"])),
                    "BTF: request_sock.timeout".to_owned(),
                ),
                Err(e) => (Presence::Unknown, e.to_string()),
            },
        ),
        feature(
            "btf",
            "5.4",
            "accepted sockets before their first RTT sample, and open sockets; SYNs of MPTCP and \
             TCP Fast Open keep the kernel's timer",
            match btf.as_ref().map(|btf| btf.offsets()) {
                Ok(Ok(_)) => (Presence::Present, "/sys/kernel/btf/vmlinux".to_owned()),
                Ok(Err(e)) => (Presence::Absent, e.to_string()),
                Err(e) => (Presence::Absent, e.to_string()),
            },
        ),
        // Both functions were added in the same version; without BTF the kernel has no functions
        // that programs can call.
        feature(
            READS_LISTENER,
            "6.2",
            "syn_ack_rto from the SYN-ACK retransmissions of the listener or its network \
             namespace; connections to a listener with TCP_DEFER_ACCEPT keep the kernel's timer",
            match btf {
                Ok(btf) if btf.socket_types().listener != 0 => (
                    Presence::Present,
                    "BTF: bpf_cast_to_kern_ctx, bpf_rdonly_cast".to_owned(),
                ),
                Ok(_) => (
                    Presence::Absent,
                    "BTF: bpf_cast_to_kern_ctx or bpf_rdonly_cast is missing, or a structure has \
                     an unknown layout"
                        .to_owned(),
                ),
                Err(e) => (Presence::Absent, e.to_string()),
            },
        ),
        feature(
            "bpf-lsm-cgroup",
            "6.0, and \"bpf\" among the active LSMs",
            "rto_min on accepted sockets before their first RTT sample",
            match (&asked.clone, &asked.lsm_active) {
                (Ok(()), Ok(())) => (
                    Presence::Present,
                    "loaded, and \"bpf\" is active".to_owned(),
                ),
                (Ok(()), Err(why)) => (Presence::Absent, why.clone()),
                (program, _) => loads(program),
            },
        ),
        feature(
            "iter-tcp",
            "5.15",
            "sockets that are already open, and detach --restore",
            loads(&asked.walk),
        ),
    ]
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
        probe.armed = 1;
        probe.set[SockOpt::RtoMax as usize] = -(Errno::EINVAL as i64);
        probe.set[SockOpt::DelackMax as usize] = -(Errno::EPERM as i64);
        let features = evaluate(&asked(Ok(probe)), &Btf::vmlinux());
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
