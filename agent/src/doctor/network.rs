//! Checks of TCP's sysctls, other programs and routes.

use std::path::Path;

use ipnetwork::IpNetwork;
use rto_agent_core::{
    policy::{PolicySet, units::format_duration},
    wire::kernel::Verdict,
};
use rto_agent_kernel::{
    datapath::{OtherProgram, other_programs},
    kernel::{
        bpf::MAX_PROGRAMS, calls, cgroup, programs, programs::AttachedProgram, sysctl, tcp_metrics,
        tcp_metrics::Metric,
    },
};

use super::{
    Check, Finding,
    routes::{self, LockedRoute, overlap},
    unless_privileged,
};

pub(super) fn sysctls() -> [Finding; 3] {
    const WHY: &str = "the time after which connect() gives up is computed from it; other network \
                       namespaces may have other values";
    let linear = Check("tcp_syn_linear_timeouts", WHY);
    let linear = match sysctl::ipv4::<u8>(linear.0) {
        Some(n) => linear.ok(n.to_string()),
        None => linear.ok("absent (Linux 6.5 and later), treated as 0"),
    };
    let retries = Check("tcp_syn_retries", WHY);
    let retries = match sysctl::ipv4::<u8>(retries.0) {
        Some(n @ 0..=1) => retries.warning(
            format!("{n}: connect() gives up after few SYNs"),
            "sysctl net.ipv4.tcp_syn_retries=6, unless the low value is intended",
        ),
        Some(n) => retries.ok(n.to_string()),
        None => retries.problem("cannot be read", "mount /proc where the agent runs"),
    };
    let thin = thin_linear(
        sysctl::ipv4("tcp_thin_linear_timeouts"),
        sysctl::ipv4("tcp_congestion_control"),
    );
    [linear, thin, retries]
}

/// The kernel uses either the sysctl or the socket's option (`tcp_retransmit_timer()`, Linux 6.12).
/// Under BBR no stream counts as thin (`tcp_stream_is_thin()`), because it keeps the slow start threshold infinite.
fn thin_linear(value: Option<u8>, congestion: Option<String>) -> Finding {
    let check = Check(
        "tcp_thin_linear_timeouts",
        "if it is on, all thin streams use linear timeouts: thin_linear = false and linear_retries \
         have no effect in this network namespace",
    );
    match value {
        Some(0) | None
            if congestion
                .as_ref()
                .is_some_and(|name| name.starts_with("bbr")) =>
        {
            check.ok(
                "off: policies decide; but thin_linear has no effect on connections with BBR, the \
             default of this host",
            )
        }
        Some(0) | None => check.ok("off: policies decide"),
        Some(_) => check.warning(
            "on for every socket",
            "sysctl net.ipv4.tcp_thin_linear_timeouts=0, and thin_linear = true in policies",
        ),
    }
}

const PROGRAMS: Check<'_> = Check(
    "other-programs",
    "programs of child cgroups run before those of parents, then in order of attachment; the last \
     program that writes `reply` wins, and one that returns 0 disables the initial RTO of all",
);

pub(super) fn programs(given: Option<&Path>, ours: &[u32]) -> Vec<Finding> {
    let Ok(cgroup) = cgroup::resolve(given) else {
        return Vec::new();
    };
    let root = cgroup::top_of(&cgroup);
    match programs::in_tree(root, ours) {
        Ok(found) => {
            let foreign = found.iter().filter(|program| !program.ours);
            let sets = |program: &&AttachedProgram| calls::sets_callbacks(program.id) == Some(true);
            let setters: Vec<u32> = foreign.filter(sets).map(|program| program.id).collect();
            others(&found, &setters, &cgroup)
        }
        Err(e) => vec![PROGRAMS.warning(
            format!("{}: cannot be queried: {e}", root.display()),
            unless_privileged("check whether seccomp or an LSM denies bpf(2) to this process"),
        )],
    }
}

/// Programs of other pin directories, which treat the same connections.
pub(super) fn other_agents(given: Option<&Path>, pin_dir: &Path) -> Vec<Finding> {
    let check = Check(
        "other-agents",
        "each program of rto-agent at the cgroup or above it treats every connection, also after \
         this one is detached",
    );
    let Ok(cgroup) = cgroup::resolve(given) else {
        return Vec::new();
    };
    let others = other_programs(pin_dir, None, &cgroup).into_iter();
    let finding = |other: OtherProgram| match other.is_managed {
        true => check.warning(
            other.to_string(),
            "stop its daemon, or give the two separate cgroups",
        ),
        false => check.problem(other.to_string(), "rto-agent detach removes it"),
    };
    others.map(finding).collect()
}

/// Foreign programs: one finding for each that prevents ours from being attached, and one for all
/// programs that run for the same sockets, attached above or below our cgroup. `setters` are the programs that set
/// callback flags, by which ours could lose its own.
fn others(found: &[AttachedProgram], setters: &[u32], cgroup: &Path) -> Vec<Finding> {
    let foreign = found.iter().filter(|program| !program.ours);
    let (related, elsewhere): (Vec<_>, Vec<_>) = foreign.partition(|program| {
        cgroup.starts_with(&program.cgroup) || program.cgroup.starts_with(cgroup)
    });
    let (holding, beside): (Vec<_>, Vec<_>) = related.into_iter().partition(|program| {
        let same_or_above = cgroup.starts_with(&program.cgroup);
        (program.exclusive && same_or_above) || (program.overridable && program.cgroup == cgroup)
    });
    let describe = |program: &AttachedProgram| {
        let name = match program.name.as_str() {
            "" => "(no name)",
            name => name,
        };
        let sets = match setters.contains(&program.id) {
            true => ", sets callback flags",
            false => "",
        };
        format!(
            "{name} (id {}{sets}) at {}",
            program.id,
            program.cgroup.display()
        )
    };
    let exclusive = |program: &AttachedProgram| {
        PROGRAMS.problem(
            format!(
                "{} is attached exclusively, so that no other program can be attached",
                describe(program)
            ),
            "attach it with BPF_F_ALLOW_MULTI or with a link, or set [agent] cgroup to a cgroup \
             without it",
        )
    };
    let mut findings: Vec<Finding> = holding.into_iter().map(exclusive).collect();
    let here = || found.iter().filter(|program| program.cgroup == cgroup);
    if here().count() >= MAX_PROGRAMS && !here().any(|program| program.ours) {
        let place = cgroup.display();
        findings.push(PROGRAMS.problem(
            format!("{MAX_PROGRAMS} programs are attached to {place}, the kernel's limit"),
            "detach one that is not needed (bpftool cgroup detach), or set [agent] cgroup to another one",
        ));
    }
    if !beside.is_empty() {
        let beside: Vec<_> = beside.into_iter().map(describe).collect();
        findings.push(PROGRAMS.warning(
            beside.join(", "),
            "check that each returns 1, writes `reply` only for operations it handles, and adds its \
             callback flags to those that are set; to test: rto-agent lookup, and tcpdump of the SYNs to an address that does not answer",
        ));
    } else if findings.is_empty() {
        let own = found.iter().filter(|program| program.ours).count();
        let elsewhere = match elsewhere.len() {
            0 => String::new(),
            n => format!(", {n} at cgroups that are neither above nor below"),
        };
        findings.push(PROGRAMS.ok(format!("none in addition to {own} of rto-agent{elsewhere}")));
    }
    findings
}

pub(super) fn interference(verdict: &Verdict) -> Finding {
    let check = Check(
        "probe",
        "a test connection in a temporary network namespace and cgroup shows which timer the kernel \
         uses: another sock_ops program can overwrite a policy's timer, and the kernel does not \
         report that",
    );
    let text = verdict.describe();
    match verdict {
        Verdict::Good { .. } => check.ok(text),
        Verdict::Interference { .. } => check.problem(
            text,
            "see other-programs: detach the program that returns 0 or writes `reply` for every \
             operation, or attach rto-agent after it (rto-agent detach, then rto-agent attach)",
        ),
        Verdict::NotProbed { .. } => check.warning(text, "run rto-agent doctor as root"),
    }
}

/// This namespace's default; a policy can raise and lower it (measured on 6.18).
pub(super) fn rto_min_default() -> Finding {
    const KERNEL: u32 = 200_000;
    let check = Check(
        "tcp_rto_min_us",
        "it is the rto_min of connections whose policy sets none, in this network namespace only, \
         and applies when a socket is created",
    );
    match sysctl::ipv4::<u32>(check.0) {
        Some(KERNEL) => check.ok("200ms, the kernel's own"),
        Some(us) => check.warning(
            format!("{us} us instead of the kernel's own 200 ms"),
            "sysctl net.ipv4.tcp_rto_min_us=200000, unless the value is intended; a policy's \
             rto_min overrides it, and detach --restore restores this value (at most 200 ms)",
        ),
        None => check.ok("absent (Linux 6.11 and later), treated as 200ms"),
    }
}

/// Cached round trip times of destinations that a policy with rto_min covers.
pub(super) fn metrics(set: &PolicySet) -> Finding {
    let check = Check(
        "tcp_metrics",
        "a new connection starts with the cached round-trip time and variation of an earlier one: \
         if that was slower, the RTO starts far above rto_min and needs some round trips to fall",
    );
    let cached = match tcp_metrics::all() {
        Ok(cached) => cached,
        Err(e) => {
            let found = format!("the cache cannot be read: {e}");
            return check.warning(found, "inspect it with: ip tcp_metrics show");
        }
    };
    let slow = cached.iter().filter_map(|metric| slow_start(metric, set));
    let slow: Vec<String> = slow.collect();
    let found = match &slow[..] {
        [] => return check.ok(format!("{} cached, none above an rto_min", cached.len())),
        [one] => one.clone(),
        [first, rest @ ..] => format!("{first}; and {} more", rest.len()),
    };
    check.warning(
        found,
        "ip tcp_metrics delete ADDRESS (or flush), or sysctl net.ipv4.tcp_no_metrics_save=1",
    )
}

/// Whether a cached destination makes connections of a policy begin with more than twice its
/// rto_min. (`tcp_init_metrics()`, Linux 6.12: the cached RTT counts, and a variation of at least
/// itself; the RTO is then about three of it.)
fn slow_start(metric: &Metric, set: &PolicySet) -> Option<String> {
    let (entry, policy) = set.entry_for(metric.address)?;
    let rto_min = policy.settings.rto_min?;
    (metric.rtt > rto_min).then(|| {
        format!(
            "{}: a round trip of {} is cached, more than the rto_min {} of policy {}",
            metric.address,
            format_duration(metric.rtt),
            format_duration(rto_min),
            entry.policy
        )
    })
}

const LOCKED: Check<'_> = Check(
    "locked-rto_min",
    "a route's locked rto_min overrides a policy's",
);

pub(super) fn routes(set: Option<&PolicySet>) -> Vec<Finding> {
    let read = || anyhow::Ok((routes::locked()?, routes::all_destinations()?));
    match read() {
        Ok((locked, _)) if locked.is_empty() => vec![LOCKED.ok("no route has a locked rto_min")],
        Ok((locked, all)) => {
            let is_used = |prefix| routes::has_locked(prefix, &all);
            locked
                .iter()
                .map(|route| locked_route(route, set, is_used))
                .collect()
        }
        Err(e) => vec![LOCKED.warning(
            format!("routes cannot be read: {e}"),
            "inspect them with: ip route show table all | grep 'rto_min lock'",
        )],
    }
}

/// `is_used`: whether the kernel uses a route with a locked rto_min for some address of a prefix.
fn locked_route(
    route: &LockedRoute,
    set: Option<&PolicySet>,
    is_used: impl Fn(IpNetwork) -> bool,
) -> Finding {
    let LockedRoute {
        destination,
        table,
        rto_min,
    } = route;
    let text = format!(
        "{destination} (table {table}) has rto_min {} locked",
        format_duration(*rto_min)
    );
    let victim = set.and_then(|set| {
        set.entries.iter().find(|(cidr, entry)| {
            let policy = set.policies.get(entry.policy);
            let common = match cidr.network() {
                network if network.prefix() > destination.prefix() => network,
                _ => *destination,
            };
            policy.is_some_and(|policy| policy.settings.rto_min.is_some())
                && overlap(cidr.network(), *destination)
                && is_used(common)
        })
    });
    match victim {
        Some((cidr, entry)) => LOCKED.problem(
            format!(
                "{text}, which overrides the rto_min of {cidr} (policy {})",
                entry.policy
            ),
            format!(
                "ip route change {destination} ... without rto_min, or remove rto_min from the policy"
            ),
        ),
        None => LOCKED.remark(format!("{text}; no entry with rto_min uses it")),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rto_agent_core::policy::{Entry, Policy, Settings};

    use super::{super::Severity, *};

    fn program(id: u32, cgroup: &str, ours: bool) -> AttachedProgram {
        AttachedProgram {
            id,
            name: format!("p{id}"),
            tag: String::new(),
            verified_instructions: None,
            cgroup: cgroup.into(),
            exclusive: false,
            overridable: false,
            ours,
        }
    }

    #[test]
    fn programs_of_ancestor_cgroups_are_one_warning() {
        let cgroup = Path::new("/c/own");
        let own = program(1, "/c/own", true);
        let elsewhere = [
            own.clone(),
            program(2, "/c/other", false),
            program(3, "/c/other/x", false),
        ];
        let [ok] = &others(&elsewhere, &[], cgroup)[..] else {
            panic!();
        };
        assert_eq!(ok.severity, Severity::Ok);
        assert_eq!(
            ok.found,
            "none in addition to 1 of rto-agent, 2 at cgroups that are neither above nor below"
        );
        let related = [program(4, "/c", false), own, program(5, "/c/own/x", false)];
        let [warning] = &others(&related, &[], cgroup)[..] else {
            panic!();
        };
        assert_eq!(warning.severity, Severity::Warning);
        assert_eq!(warning.found, "p4 (id 4) at /c, p5 (id 5) at /c/own/x");
        let [setter] = &others(&related, &[5], cgroup)[..] else {
            panic!();
        };
        let named = "p4 (id 4) at /c, p5 (id 5, sets callback flags) at /c/own/x";
        assert_eq!(setter.found, named);
    }

    #[test]
    fn cgroup_full_of_programs_is_problem() {
        let cgroup = Path::new("/c");
        let found = |count, ours: u32| {
            let found = (0..count).map(|id| program(id, "/c", id < ours));
            let found: Vec<_> = found.collect();
            let findings = others(&found, &[], cgroup);
            findings.iter().any(|finding| {
                finding.severity == Severity::Problem
                    && finding.found == "64 programs are attached to /c, the kernel's limit"
            })
        };
        assert!(found(64, 0));
        assert!(!found(63, 0) && !found(64, 1));
    }

    #[test]
    fn exclusive_program_is_problem_others_are_notes() {
        let program = |cgroup: &str, exclusive, overridable| AttachedProgram {
            exclusive,
            overridable,
            ..program(7, cgroup, false)
        };
        let severity = |p: AttachedProgram| others(&[p], &[], Path::new("/cg/a"))[0].severity;
        assert_eq!(severity(program("/cg", true, false)), Severity::Problem);
        assert_eq!(severity(program("/cg/a", false, true)), Severity::Problem);
        assert_eq!(severity(program("/cg", false, true)), Severity::Warning);
        assert_eq!(severity(program("/cg/a/b", true, false)), Severity::Warning);
        assert_eq!(severity(program("/cg/a", false, false)), Severity::Warning);
    }

    #[test]
    fn tcp_thin_linear_timeouts_sysctl_is_noted() {
        assert_eq!(thin_linear(Some(0), None).severity, Severity::Ok);
        assert_eq!(thin_linear(None, None).severity, Severity::Ok);
        assert_eq!(thin_linear(Some(1), None).severity, Severity::Warning);
        let bbr = thin_linear(Some(0), Some("bbr".to_owned()));
        assert!(bbr.found.contains("no effect on connections with BBR"));
    }

    #[test]
    fn locked_route_is_problem_where_entry_has_rto_min() {
        let route = LockedRoute {
            destination: "10.1.0.0/16".parse().unwrap(),
            table: 254,
            rto_min: Duration::from_millis(50),
        };
        let mut set = PolicySet::default();
        let name: rto_agent_core::policy::PolicyName = "near".parse().unwrap();
        set.entries.insert(
            "10.0.0.0/8".parse().unwrap(),
            Entry {
                policy: name.clone(),
                location: None,
            },
        );
        let mut settings = Settings {
            initial_rto: Some(Duration::from_millis(100).into()),
            ..Settings::default()
        };
        let severity =
            |set: &PolicySet, is_used: bool| locked_route(&route, Some(set), |_| is_used).severity;
        set.policies
            .insert(name.clone(), Policy::from(settings.clone()));
        assert_eq!(severity(&set, true), Severity::Note);
        settings.rto_min = Some(Duration::from_millis(8));
        set.policies.insert(name, Policy::from(settings));
        assert_eq!(severity(&set, true), Severity::Problem);
        // Longer routes cover the entry.
        assert_eq!(severity(&set, false), Severity::Note);
    }
}
