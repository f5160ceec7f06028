//! TCP's sysctls, other programs, routes.

use std::path::Path;

use super::{Finding, Severity};
use crate::{
    kernel::{
        cgroup, programs,
        programs::AttachedProgram,
        routes::{self, LockedRoute, overlap},
        sysctl,
    },
    policy::{PolicySet, units::format_duration},
};

pub(super) fn sysctls(findings: &mut Vec<Finding>) {
    const WHY: &str = "with it connect()'s time to give up is computed; other network namespaces \
                       may have other values";
    findings.push(match sysctl::ipv4::<u8>("tcp_syn_linear_timeouts") {
        Some(n) => Finding::ok("tcp_syn_linear_timeouts", n.to_string(), WHY),
        None => Finding::ok(
            "tcp_syn_linear_timeouts",
            "not there (Linux 6.5), which counts as 0",
            WHY,
        ),
    });
    findings.push(match sysctl::ipv4::<u8>("tcp_syn_retries") {
        Some(n @ 0..=1) => Finding::bad(
            "tcp_syn_retries",
            Severity::Warning,
            format!("{n}: connect() gives up after few SYNs"),
            WHY,
            "sysctl net.ipv4.tcp_syn_retries=6 unless this is meant",
        ),
        Some(n) => Finding::ok("tcp_syn_retries", n.to_string(), WHY),
        None => Finding::bad(
            "tcp_syn_retries",
            Severity::Problem,
            "cannot be read",
            WHY,
            "mount /proc where the agent runs",
        ),
    });
}

pub(super) fn programs(given: Option<&Path>, ours: &[u32], findings: &mut Vec<Finding>) {
    const WHY: &str = "programs run child before parent, then in order of attachment, and the last \
                       to write `reply` wins; one that returns 0 turns the initial RTO off for all";
    let Ok(cgroup) = cgroup::resolve(given) else {
        return;
    };
    let root = cgroup::resolve(None).unwrap_or_else(|_| cgroup.clone());
    let found = match programs::in_tree(&root, ours) {
        Ok(found) => found,
        Err(e) => {
            findings.push(Finding::bad(
                "other-programs",
                Severity::Warning,
                format!("{}: cannot be asked: {e}", root.display()),
                WHY,
                "run as root",
            ));
            return;
        }
    };
    let foreign: Vec<&AttachedProgram> = found.iter().filter(|p| !p.ours).collect();
    if foreign.is_empty() {
        let own = found.len();
        findings.push(Finding::ok(
            "other-programs",
            format!("none beside {own} of ours"),
            WHY,
        ));
    }
    for program in foreign {
        findings.push(judge(program, &cgroup, WHY));
    }
}

fn judge(program: &AttachedProgram, cgroup: &Path, why: &'static str) -> Finding {
    let AttachedProgram { id, name, .. } = program;
    let place = program.cgroup.display();
    let name = if name.is_empty() { "(no name)" } else { name };
    let same_or_above = cgroup.starts_with(&program.cgroup);
    let same = cgroup == program.cgroup;
    if (program.exclusive && same_or_above) || (program.overridable && same) {
        return Finding::bad(
            "other-programs",
            Severity::Problem,
            format!(
                "{name} (id {id}) at {place} is attached so that no other program may be beside it"
            ),
            why,
            "attach it with BPF_F_ALLOW_MULTI or by a link, or set [agent] cgroup to one it does not hold",
        );
    }
    Finding::bad(
        "other-programs",
        Severity::Warning,
        format!("{name} (id {id}) at {place}"),
        why,
        "see that it returns 1 and writes `reply` only where it means to; try: rto-agent lookup, \
         tcpdump on a SYN to a black hole",
    )
}

pub(super) fn routes(set: Option<&PolicySet>, findings: &mut Vec<Finding>) {
    const WHY: &str = "a route's locked rto_min overrides a policy's";
    let locked = match routes::locked() {
        Ok(locked) => locked,
        Err(e) => {
            findings.push(Finding::bad(
                "locked-rto_min",
                Severity::Warning,
                format!("routes cannot be read: {e}"),
                WHY,
                "look with: ip route show table all | grep 'rto_min lock'",
            ));
            return;
        }
    };
    if locked.is_empty() {
        findings.push(Finding::ok("locked-rto_min", "no route has one", WHY));
    }
    findings.extend(locked.iter().map(|route| locked_route(route, set, WHY)));
}

fn locked_route(route: &LockedRoute, set: Option<&PolicySet>, why: &'static str) -> Finding {
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
        set.entries.iter().find_map(|(cidr, entry)| {
            set.policies.get(&entry.policy)?.settings.rto_min?;
            overlap(cidr.network(), *destination)
                .then(|| format!("{cidr} (policy {})", entry.policy))
        })
    });
    let mend =
        format!("ip route change {destination} ... without rto_min, or leave rto_min to the route");
    match victim {
        Some(entry) => Finding::bad(
            "locked-rto_min",
            Severity::Problem,
            format!("{text}, which overrides the rto_min of {entry}"),
            why,
            mend,
        ),
        None => Finding::bad(
            "locked-rto_min",
            Severity::Warning,
            format!("{text}; no entry with rto_min overlaps it"),
            why,
            mend,
        ),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::policy::{Entry, Policy, Settings};

    #[test]
    fn exclusive_programs_stand_in_the_way_others_are_told() {
        let program = |cgroup: &str, exclusive, overridable| AttachedProgram {
            id: 7,
            name: "other".to_owned(),
            tag: String::new(),
            cgroup: cgroup.into(),
            exclusive,
            overridable,
            ours: false,
        };
        let severity = |p: AttachedProgram| judge(&p, Path::new("/cg/a"), "why").severity;
        assert_eq!(severity(program("/cg", true, false)), Severity::Problem);
        assert_eq!(severity(program("/cg/a", false, true)), Severity::Problem);
        assert_eq!(severity(program("/cg", false, true)), Severity::Warning);
        assert_eq!(severity(program("/cg/a/b", true, false)), Severity::Warning);
        assert_eq!(severity(program("/cg/a", false, false)), Severity::Warning);
    }

    #[test]
    fn a_locked_route_is_a_problem_where_an_entry_has_rto_min() {
        let route = LockedRoute {
            destination: "10.1.0.0/16".parse().unwrap(),
            table: 254,
            rto_min: Duration::from_millis(50),
        };
        let mut set = PolicySet::default();
        let name: crate::policy::PolicyName = "near".parse().unwrap();
        set.entries.insert(
            "10.0.0.0/8".parse().unwrap(),
            Entry {
                policy: name.clone(),
                location: None,
            },
        );
        let mut settings = Settings {
            initial_rto: Some(Duration::from_millis(100)),
            ..Settings::default()
        };
        let severity = |set: &PolicySet| locked_route(&route, Some(set), "why").severity;
        set.policies.insert(
            name.clone(),
            Policy {
                settings: settings.clone(),
                location: None,
            },
        );
        assert_eq!(severity(&set), Severity::Warning);
        settings.rto_min = Some(Duration::from_millis(8));
        set.policies.insert(
            name,
            Policy {
                settings,
                location: None,
            },
        );
        assert_eq!(severity(&set), Severity::Problem);
    }
}
