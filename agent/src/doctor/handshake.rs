//! Checks why a policy has less than its full effect on handshakes, or its short timers do harm:
//! SYN-ACK retransmissions, MPTCP, TCP Fast Open, and listeners with their own options.

use std::{
    collections::BTreeSet,
    net::{IpAddr, Ipv6Addr, SocketAddr},
    time::Duration,
};

use ipnetwork::IpNetwork;
use rto_agent_core::{
    policy::{
        AutoInitialRto, Cidr, HostFacts, Mptcp, PolicyName, PolicySet, Settings, SynAckRto,
        units::{format_duration, jiffies_duration, quantise, tenths_of_s},
    },
    printable::counted,
};
use rto_agent_kernel::kernel::{features::can_set, sysctl};
use rto_model::syn::{self, syn_ack_lifetime, syn_ack_rto_auto};

use super::{Check, Finding, Input, firewall, list, listeners, unless_privileged};

/// More retransmissions gain nothing: even with the shortest timer, 12 of them use the whole
/// lifetime.
const MOST_RETRIES: u8 = 15;
/// Assumed for a learnt timer, whose value `doctor` does not know.
const OFTEN_LEARNT: Duration = Duration::from_millis(100);

pub(super) fn findings(input: &Input<'_>) -> Vec<Finding> {
    let (Some(set), Some(host)) = (input.set, &input.host) else {
        return Vec::new();
    };
    let mut findings = vec![syn_ack_retries(set, host)];
    let has_btf = can_set(input.features, "btf") == Some(true);
    findings.extend(mptcp(set, has_btf, &MptcpSysctls::here()));
    let timeout = sysctl::ipv4("tcp_fastopen_blackhole_timeout_sec");
    findings.extend(fast_open(set, has_btf, timeout));
    let limit_ms = sysctl::ipv4("tcp_invalid_ratelimit");
    findings.extend(duplicate_syns(set, &listeners::here(), limit_ms));
    if shortened(set).next().is_some() {
        findings.push(firewall::syn_limits());
    }
    if !host.reads_listener && sets_syn_acks(set) {
        findings.push(match listeners::with_options() {
            Ok(found) => own_options(&found, host),
            Err(e) => LISTENERS.warning(
                format!("cannot be read: {e}"),
                unless_privileged(
                    "check whether seccomp or an LSM denies netlink (sock_diag) to this process",
                ),
            ),
        });
    }
    findings
}

/// The names of the policies for which a condition holds.
fn named<'a>(
    set: &'a PolicySet,
    is: impl Fn(&Settings) -> bool + 'a,
) -> impl Iterator<Item = &'a PolicyName> {
    let policies = set.policies.iter();
    policies
        .filter(move |(_, policy)| is(&policy.settings))
        .map(|(name, _)| name)
}

fn shortened(set: &PolicySet) -> impl Iterator<Item = &PolicyName> {
    named(set, |settings| settings.initial_rto.is_some())
}

fn sets_syn_acks(set: &PolicySet) -> bool {
    let sets = |settings: &Settings| match settings.syn_ack_rto {
        SynAckRto::Auto => settings.initial_rto.is_some(),
        SynAckRto::Fixed(_) => true,
        SynAckRto::Keep => false,
    };
    named(set, sets).next().is_some()
}

/// A policy whose SYN-ACK timer is longer than its initial RTO.
struct Limited<'a> {
    name: &'a PolicyName,
    /// Jiffies.
    initial_rto: u64,
    /// Jiffies.
    syn_ack_rto: u64,
    /// The number of retransmissions with which the SYN-ACK timer is not longer.
    enough: u8,
}

fn limited<'a>(set: &'a PolicySet, host: &HostFacts) -> Vec<Limited<'a>> {
    let hz = u64::from(host.hz);
    let policies = set.policies.iter().filter_map(|(name, policy)| {
        let SynAckRto::Auto = policy.settings.syn_ack_rto else {
            return None;
        };
        let initial_rto = quantise(policy.settings.fixed_initial_rto()?, host.hz).jiffies;
        let syn_ack_rto = syn_ack_rto_auto(initial_rto, hz, host.syn_ack_retries());
        let of = |retries: &u8| syn_ack_rto_auto(initial_rto, hz, *retries) == initial_rto;
        (syn_ack_rto > initial_rto).then(|| Limited {
            name,
            initial_rto,
            syn_ack_rto,
            enough: (0..=MOST_RETRIES).find(of).unwrap_or(MOST_RETRIES),
        })
    });
    policies.collect()
}

/// Reports policies that the number of SYN-ACK retransmissions limits, and what more
/// retransmissions would cost.
fn syn_ack_retries(set: &PolicySet, host: &HostFacts) -> Finding {
    let check = Check(
        "tcp_synack_retries",
        "a half-open connection ends after this number of SYN-ACK retransmissions: syn_ack_rto = \
         \"auto\" is short, but long enough to keep half-open connections for 31s",
    );
    let retries = host.tcp_synack_retries;
    let limited = limited(set, host);
    let Some(enough) = limited.iter().map(|one| one.enough).max() else {
        return check.ok(retries.to_string());
    };
    let text = |jiffies| format_duration(jiffies_duration(jiffies, host.hz));
    let policies = limited.iter().map(|one| {
        let (is, wanted) = (text(one.syn_ack_rto), text(one.initial_rto));
        format!("{} {is} instead of {wanted}", one.name)
    });
    let found = format!(
        "{retries}: SYN-ACKs get a longer timer than SYNs: {}",
        list(policies)
    );
    let hz = u64::from(host.hz);
    let lifetime =
        |rto, retries| tenths_of_s(syn_ack_lifetime(rto, syn::RTO_MAX_S * hz, retries) * 1000 / hz);
    let shortest = limited
        .iter()
        .map(|one| one.initial_rto)
        .min()
        .unwrap_or(hz);
    // The kernel's default is enough for the purpose of "auto", so this is no warning.
    let fix = if host.reads_listener {
        format!(
            "sysctl net.ipv4.tcp_synack_retries={enough} in each network namespace with listeners \
             gives {}. The cost: half-open connections of peers without a policy, including \
             spoofed ones, are kept for {} instead of {} and get {enough} SYN-ACK retransmissions \
             instead of {retries}. Where the server speaks first and the last ACK of handshakes is \
             lost, a shorter timer ends between those of the kernel and may accept later. \
             TCP_SYNCNT = {enough} on a listener does the same for that \
             listener only; syn_ack_rto = \"keep\" leaves the kernel's SYN-ACK timer",
            text(shortest),
            lifetime(hz, enough),
            lifetime(hz, retries),
        )
    } else {
        format!(
            "use Linux 6.2 or later with BTF, where the program reads tcp_synack_retries of the \
             listener's namespace; on this kernel it assumes {}",
            host.syn_ack_retries(),
        )
    };
    check.note(found, fix)
}

/// MPTCP's sysctls; `None` if this kernel does not have them.
struct MptcpSysctls {
    enabled: bool,
    /// `net.mptcp.syn_retrans_before_tcp_fallback`.
    retransmissions: Option<u32>,
    /// `net.mptcp.blackhole_timeout`, seconds.
    blackhole_timeout: Option<u32>,
}

impl MptcpSysctls {
    fn here() -> Self {
        Self {
            enabled: sysctl::mptcp::<u8>("enabled") == Some(1),
            retransmissions: sysctl::mptcp("syn_retrans_before_tcp_fallback"),
            blackhole_timeout: sysctl::mptcp("blackhole_timeout"),
        }
    }
}

/// Whether short SYN timers can make MPTCP fall back to TCP.
fn mptcp(set: &PolicySet, has_btf: bool, mptcp: &MptcpSysctls) -> Option<Finding> {
    let check = Check(
        "mptcp",
        "after a few SYN timeouts MPTCP falls back to TCP, and the kernel then disables MPTCP for a \
         while: with a short initial_rto a moment of loss is enough",
    );
    let shortened = list(shortened(set).map(ToString::to_string));
    if !mptcp.enabled || shortened.is_empty() {
        return None;
    }
    let applied = named(set, |settings| settings.mptcp == Mptcp::Apply);
    let applied = list(applied.map(ToString::to_string));
    let retransmissions = match mptcp.retransmissions {
        Some(n) => format!("after {n} SYN timeouts (net.mptcp.syn_retrans_before_tcp_fallback)"),
        None => "after a few SYN timeouts".to_owned(),
    };
    let lasts = match mptcp.blackhole_timeout {
        Some(0) => ", for that connection only (net.mptcp.blackhole_timeout = 0)".to_owned(),
        Some(s) => format!(", and is then disabled for {s}s (net.mptcp.blackhole_timeout)"),
        None => String::new(),
    };
    let (who, fix) = match has_btf {
        true if applied.is_empty() => {
            return Some(check.ok("SYNs of MPTCP sockets keep the kernel's timer"));
        }
        true => (
            format!("SYNs of MPTCP sockets get the initial_rto of {applied}"),
            "set mptcp = \"keep\" in the policy",
        ),
        false => (
            format!(
                "without BTF the program cannot recognise MPTCP sockets: their SYNs get the \
                 initial_rto of {shortened}"
            ),
            "use a kernel with CONFIG_DEBUG_INFO_BTF",
        ),
    };
    Some(check.warning(
        format!("{who}; MPTCP falls back to TCP {retransmissions}{lasts}"),
        format!(
            "{fix}; or, if this kernel has it, sysctl net.mptcp.blackhole_timeout=0, so that a \
             fallback affects only one connection"
        ),
    ))
}

/// Whether short SYN timers can make the kernel disable TCP Fast Open.
fn fast_open(set: &PolicySet, has_btf: bool, timeout_s: Option<u32>) -> Option<Finding> {
    let check = Check(
        "tcp_fastopen_blackhole_timeout_sec",
        "after SYN timeouts with TCP Fast Open the kernel disables it for this time, and longer each \
         time: with a short initial_rto a moment of loss is enough",
    );
    let timeout_s = timeout_s.filter(|timeout| *timeout != 0)?;
    let policies = list(shortened(set).map(ToString::to_string));
    if policies.is_empty() {
        return None;
    }
    Some(match has_btf {
        true => check.ok(format!(
            "{timeout_s}: connections that use TCP Fast Open keep the kernel's timers"
        )),
        false => check.warning(
            format!(
                "{timeout_s}: without BTF the program cannot recognise SYNs with TCP Fast Open: \
                 they get the initial_rto of {policies}"
            ),
            "sysctl net.ipv4.tcp_fastopen_blackhole_timeout_sec=0 (the default since Linux 5.14), \
             or use a kernel with CONFIG_DEBUG_INFO_BTF",
        ),
    })
}

/// Whether lost SYN-ACKs may delay covered peers with an agent of their own more than peers without
/// one.
fn duplicate_syns(
    set: &PolicySet,
    listening: &[SocketAddr],
    limit_ms: Option<u64>,
) -> Option<Finding> {
    let check = Check(
        "tcp_invalid_ratelimit",
        "the kernel answers retransmitted SYNs at most once per this interval, and each answer \
         restarts the SYN-ACK timer: if SYN-ACKs are lost for about a second, a peer whose own agent \
         sets a short initial_rto connects up to 0.25s later than without it",
    );
    let limit = Duration::from_millis(limit_ms?);
    let reachable = |cidr: &Cidr| listening.iter().any(|on| may_reach(cidr.network(), on));
    let policies: BTreeSet<&PolicyName> = set
        .entries
        .iter()
        .filter(|(cidr, _)| reachable(cidr))
        .map(|(_, entry)| entry.policy)
        .collect();
    let timers = policies.into_iter().filter_map(|name| {
        let settings = &set.policies.get(name)?.settings;
        let learnt = |auto: &AutoInitialRto| auto.min.unwrap_or(OFTEN_LEARNT);
        settings
            .fixed_initial_rto()
            .or_else(|| settings.auto_initial_rto().map(learnt))
    });
    let shortest = timers.min()?;
    let text = format_duration(limit);
    if limit <= shortest {
        return Some(check.ok(text));
    }
    let ms = shortest.as_millis().max(1);
    Some(check.note(
        format!(
            "{text}, and peers covered by an entry with an initial_rto of {} may connect",
            format_duration(shortest)
        ),
        format!(
            "sysctl net.ipv4.tcp_invalid_ratelimit={ms} in each network namespace with listeners: \
             duplicates are answered at once. The cost: out-of-window segments and retransmitted SYNs, including spoofed ones, are \
             answered up to {} times a second per connection instead of {}",
            1000_u128.div_ceil(ms),
            1000_u128.div_ceil(limit.as_millis().max(1)),
        ),
    ))
}

/// Whether a listener accepts connections from a prefix. A listener on a loopback address accepts
/// only local ones.
fn may_reach(from: IpNetwork, listener: &SocketAddr) -> bool {
    let address = listener.ip().to_canonical();
    // A listener on the unspecified address of IPv6 accepts IPv4 as well.
    let is_dual = address == IpAddr::V6(Ipv6Addr::UNSPECIFIED);
    let same_family = is_dual || address.is_ipv4() == from.is_ipv4();
    same_family && (!address.is_loopback() || from.contains(address))
}

const LISTENERS: Check<'_> = Check(
    "listeners",
    "on this kernel the program cannot read the options of a listener: a shorter SYN-ACK timer \
     shortens TCP_DEFER_ACCEPT in proportion, and a smaller TCP_SYNCNT ends half-open connections \
     early",
);

/// Reports listeners whose options the program cannot see on this kernel.
fn own_options(found: &listeners::Found, host: &HostFacts) -> Finding {
    let fewer = |retries: u8| retries < host.syn_ack_retries();
    let harmed = found
        .listeners
        .iter()
        .filter(|one| one.defer_accept_s != 0 || one.syn_retries.is_some_and(fewer));
    let harmed: Vec<String> = harmed.map(ToString::to_string).collect();
    let none = format!(
        "none of {} uses TCP_DEFER_ACCEPT or a smaller TCP_SYNCNT",
        found.seen
    );
    let hidden = match found.hidden_processes {
        0 => String::new(),
        hidden => format!(
            "; {} could not be inspected",
            counted(hidden, "process", "processes")
        ),
    };
    match (harmed.is_empty(), found.hidden_processes) {
        (true, 0) => LISTENERS.ok(none),
        (true, _) => LISTENERS.warning(
            none + &hidden,
            unless_privileged("run doctor in the host's PID namespace, with CAP_SYS_PTRACE"),
        ),
        (false, _) => LISTENERS.warning(
            format!("with their own SYN-ACK timing: {}{hidden}", list(harmed)),
            "set syn_ack_rto = \"keep\" for their peers, or use Linux 6.2 or later with BTF",
        ),
    }
}

#[cfg(test)]
mod tests {
    use rto_agent_core::{
        policy::{Entry, Policy},
        testing::HOST,
    };

    use super::{super::Severity, *};

    const OLD: HostFacts = HostFacts {
        reads_listener: false,
        ..HOST
    };

    fn set(policies: &[(&str, Settings)]) -> PolicySet {
        let mut set = PolicySet::default();
        for (name, settings) in policies {
            let policy = Policy::from(settings.clone());
            set.policies.insert(name.parse().unwrap(), policy);
        }
        set
    }

    fn near(syn_ack_rto: SynAckRto, mptcp: Mptcp) -> PolicySet {
        set(&[(
            "near",
            Settings {
                initial_rto: Some(Duration::from_millis(100).into()),
                syn_ack_rto,
                mptcp,
                ..Settings::default()
            },
        )])
    }

    fn auto() -> PolicySet {
        near(SynAckRto::Auto, Mptcp::Keep)
    }

    #[test]
    fn limiting_syn_ack_retries_show_cost_of_raise() {
        let finding = syn_ack_retries(&auto(), &HOST);
        assert_eq!(finding.severity, Severity::Note);
        assert_eq!(
            finding.found,
            "5: SYN-ACKs get a longer timer than SYNs: near 496ms instead of 100ms"
        );
        let fix = finding.fix.unwrap();
        for part in [
            "net.ipv4.tcp_synack_retries=8 in each network namespace",
            "gives 100ms",
            "are kept for 367s instead of 63s and get 8 SYN-ACK retransmissions instead of 5",
        ] {
            assert!(fix.contains(part), "{fix}");
        }
        let enough = HostFacts {
            tcp_synack_retries: 8,
            ..HOST
        };
        assert_eq!(syn_ack_retries(&auto(), &enough).severity, Severity::Ok);
        for own in [
            SynAckRto::Keep,
            SynAckRto::Fixed(Duration::from_millis(100)),
        ] {
            let finding = syn_ack_retries(&near(own, Mptcp::Keep), &HOST);
            assert_eq!(finding.severity, Severity::Ok);
        }
    }

    #[test]
    fn syn_ack_retries_beyond_the_default_do_not_help() {
        let more = HostFacts {
            tcp_synack_retries: 8,
            ..OLD
        };
        let finding = syn_ack_retries(&auto(), &more);
        assert!(finding.found.starts_with("8: SYN-ACKs"), "{finding:?}");
        let fix = finding.fix.unwrap();
        assert!(fix.contains("assumes 5"), "{fix}");
        // Half-open connections would be kept for 6.3 s only.
        assert!(!fix.contains("syn_ack_rto ="), "{fix}");
    }

    #[test]
    fn ratelimit_above_timer_is_noted_for_covered_peers() {
        let mut set = auto();
        let entry = Entry {
            policy: "near".parse().unwrap(),
            location: None,
        };
        set.entries.insert("10.0.0.0/8".parse().unwrap(), entry);
        let finding = |listening: &[&str], limit_ms| {
            let listening: Vec<SocketAddr> =
                listening.iter().map(|on| on.parse().unwrap()).collect();
            duplicate_syns(&set, &listening, limit_ms)
        };
        for reached in [
            "0.0.0.0:80",
            "[::]:80",
            "[::ffff:10.0.0.1]:80",
            "192.0.2.1:80",
        ] {
            let found = finding(&[reached], Some(500)).unwrap();
            assert_eq!(found.severity, Severity::Note, "{reached}");
            assert!(found.found.starts_with("500ms, "), "{found:?}");
            let fix = found.fix.unwrap();
            for part in [
                "tcp_invalid_ratelimit=100",
                "up to 10 times a second",
                "instead of 2",
            ] {
                assert!(fix.contains(part), "{fix}");
            }
        }
        for limit_ms in [0, 100] {
            let found = finding(&["0.0.0.0:80"], Some(limit_ms)).unwrap();
            assert_eq!(found.severity, Severity::Ok);
        }
        assert_eq!(
            finding(&["127.0.0.1:80", "[::1]:80", "[2001:db8::1]:80"], Some(500)),
            None
        );
        assert_eq!(finding(&[], Some(500)), None);
        assert_eq!(finding(&["0.0.0.0:80"], None), None);
    }

    #[test]
    fn early_mptcp_fallback_is_noted() {
        let on = MptcpSysctls {
            enabled: true,
            retransmissions: Some(2),
            blackhole_timeout: Some(3600),
        };
        let severity =
            |set: &PolicySet, has_btf: bool| mptcp(set, has_btf, &on).map(|f| f.severity);
        let apply = near(SynAckRto::Auto, Mptcp::Apply);
        assert_eq!(severity(&auto(), true), Some(Severity::Ok));
        assert_eq!(severity(&apply, true), Some(Severity::Warning));
        assert_eq!(severity(&auto(), false), Some(Severity::Warning));
        assert_eq!(severity(&set(&[]), true), None);
        let off = MptcpSysctls {
            enabled: false,
            ..on
        };
        assert!(mptcp(&apply, true, &off).is_none());
        let found = mptcp(&apply, true, &on).unwrap().found;
        assert!(
            found.contains("near")
                && found.contains("after 2 SYN timeouts")
                && found.contains("3600s"),
            "{found}"
        );
    }

    #[test]
    fn fast_open_without_btf_warns() {
        assert!(fast_open(&auto(), true, Some(0)).is_none());
        assert!(fast_open(&auto(), true, None).is_none());
        assert!(fast_open(&set(&[]), false, Some(3600)).is_none());
        let severity = |has_btf| fast_open(&auto(), has_btf, Some(3600)).unwrap().severity;
        assert_eq!(severity(true), Severity::Ok);
        assert_eq!(severity(false), Severity::Warning);
    }

    #[test]
    fn listeners_with_options_are_named() {
        let listener = |defer_accept_s, syn_retries| listeners::Listener {
            address: "127.0.0.1:80".parse().unwrap(),
            pid: 7,
            name: "httpd".to_owned(),
            defer_accept_s,
            syn_retries,
        };
        let found = |listeners: Vec<listeners::Listener>, hidden_processes| listeners::Found {
            listeners,
            seen: 3,
            hidden_processes,
        };
        assert_eq!(own_options(&found(vec![], 0), &OLD).severity, Severity::Ok);
        // More retransmissions than expected do no harm.
        let more = found(vec![listener(0, Some(8))], 0);
        assert_eq!(own_options(&more, &OLD).severity, Severity::Ok);
        let both = found(vec![listener(7, None), listener(0, Some(2))], 1);
        let finding = own_options(&both, &OLD);
        assert_eq!(
            finding.found,
            "with their own SYN-ACK timing: 127.0.0.1:80 of httpd (pid 7), TCP_DEFER_ACCEPT 7 s, \
             127.0.0.1:80 of httpd (pid 7), TCP_SYNCNT 2; 1 process could not be inspected"
        );
        let hidden = own_options(&found(vec![], 2), &OLD);
        let fix = hidden.fix.unwrap();
        assert!(
            fix.contains("root") || fix.contains("CAP_SYS_PTRACE"),
            "{fix}"
        );
    }
}
