//! `rto-agent doctor`.

use std::{cmp::Reverse, path::Path, process::ExitCode};

use rto_agent_core::{
    config::{AgentConfig, CgroupSetting, Config},
    policy::{HostFacts, PolicySet, ProbeTarget, units::jiffies_to_usecs},
    printable::counted,
    wire::kernel::{Feature, Presence, Verdict},
};
use rto_agent_daemon::engine::state_files;
use rto_agent_kernel::{
    datapath::{pinned_policy, pinned_program_ids, probe},
    kernel::{cgroup, facts::host_facts, interference},
};

use super::{
    check::host::metrics_behind_unit, exit, known_rtt, print, print_coloured, terminal::wrapped,
};
use crate::{
    cli::{self, Doctor, WideArg},
    client::Client,
    doctor::{
        Finding, Input, Report, Severity, examine,
        self_test::{self, SelfTest},
    },
};

pub(super) fn run(args: &Doctor) -> anyhow::Result<ExitCode> {
    let path = &args.config.config;
    if args.self_test {
        let options: &[_] = if args.output.json { &["--json"] } else { &[] };
        let agent = Config::load_agent(path).unwrap_or_default();
        return self_test::run(options, &agent);
    }
    let features = probe::features();
    let facts = host_facts(&features);
    let loaded = match &facts {
        Ok(host) => Config::load(path, host).map_err(anyhow::Error::from),
        Err(e) => Err(anyhow::anyhow!("{e:#}")),
    };
    let agent = match &loaded {
        Ok(config) => config.agent.clone(),
        Err(_) => Config::load_agent(path).unwrap_or_else(|_| AgentConfig::default()),
    };
    let cgroup = args.cgroup.clone().or(match &agent.cgroup {
        CgroupSetting::Auto => None,
        CgroupSetting::Path(path) => Some(path.clone()),
    });
    let ours = pinned_program_ids(&agent.pin_dir);
    let set = loaded.as_ref().ok().map(|config| &config.set);
    let attached_to = cgroup::resolve(cgroup.as_deref()).ok();
    let verdict = match (&attached_to, &facts, set) {
        // Without our program attached there, every timer would be the kernel's own.
        (Some(cgroup), Ok(host), Some(set)) if !ours.is_empty() => {
            probe_timers(cgroup, &agent, set, host)
        }
        _ => None,
    };
    let short_timers = set.zip(facts.as_ref().ok()).and_then(|(set, host)| {
        let counted = known_rtt::ask(Client::new(&agent.socket))?;
        Some(known_rtt::warnings(set, &counted, host))
    });
    let report = examine(&Input {
        cgroup,
        ours,
        state_files: state_files(&agent),
        pin_dir: agent.pin_dir,
        features: &features,
        verdict,
        set,
        short_timers: short_timers.unwrap_or_default(),
        metrics: metrics_behind_unit(&agent.metrics, Path::new("/")),
        apply_to_open: agent.apply_to_open,
        host: facts.as_ref().ok().copied(),
        exposed: loaded.as_ref().map_or(&[], |config| &config.exposed),
        config_error: loaded.as_ref().err().map(ToString::to_string),
    });
    let wide = WideArg { wide: false };
    print_coloured(args.output.json, &report, args.color, wide, |columns| {
        render(&report, args.verbose, columns)
    })?;
    Ok(exit(report.worst != Severity::Problem))
}

/// Probes the timers, and reports the result to the daemon. `None` if no entry has a timer to
/// probe.
fn probe_timers(
    cgroup: &Path,
    agent: &AgentConfig,
    set: &PolicySet,
    host: &HostFacts,
) -> Option<Verdict> {
    let target = ProbeTarget::configured(set, host)?;
    // Uses the active entries, which can differ from the files: runtime entries, or edits since.
    let policy = pinned_policy(&agent.pin_dir, target.address)?;
    let jiffies = Some(policy.initial_rto_jiffies).filter(|jiffies| *jiffies != 0)?;
    let target = ProbeTarget {
        initial_rto_us: jiffies_to_usecs(jiffies.into(), host.hz),
        ..target
    };
    let verdict = interference::probe(cgroup, &target);
    // Without a daemon, or for a user other than root, the verdict is not reported.
    let _ = Client::new(&agent.socket).post::<()>("/v1/probe", &verdict);
    Some(verdict)
}

/// The child process of `--self-test`.
pub(super) fn self_test(args: &cli::SelfTest) -> anyhow::Result<ExitCode> {
    let report = self_test::child(&args.cgroup)?;
    print(args.output.json, &report, || render_self_test(&report))?;
    Ok(exit(report.passed))
}

fn render_self_test(report: &SelfTest) -> String {
    let mut text = format!(
        "rto-agent {}\nkernel {}, HZ {}\nthe daemon attached its program after {} ms\n",
        report.version, report.kernel, report.hz, report.start_ms
    );
    for program in &report.programs {
        let verified = program.verified_instructions;
        let verified = verified.map_or("an unknown number of".to_owned(), |n| n.to_string());
        let (name, cgroup) = (&program.name, program.cgroup.display());
        text += &format!("program {name}, {verified} instructions verified, at {cgroup}\n");
    }
    let lacks = |feature: &&Feature| feature.presence != Presence::Present;
    for feature in report.features.iter().filter(lacks) {
        let presence = format!("{:?}", feature.presence).to_lowercase();
        text += &format!("{} {presence}: {}\n", feature.name, feature.evidence);
    }
    text += &format!(
        "\n{:34} {:>7} {:>18} {:>11}\n",
        "LOST, TIMER", "FOR", "EXPECTED", "ARRIVED"
    );
    for case in &report.cases {
        let [least, most] = case.expected_ms;
        let measured = case
            .measured_ms
            .map_or("never".to_owned(), |ms| format!("{ms:.1} ms"));
        let verdict = if case.passed { "ok" } else { "FAILED" };
        let why = case.error.as_deref().unwrap_or_default();
        let line = format!(
            "{:34} {:>4} ms {:>18} {measured:>11}  {verdict} {why}",
            case.name,
            case.lost_ms,
            format!("{least:.0} to {most:.0} ms"),
        );
        text += line.trim_end();
        text += "\n";
    }
    let failed = report.cases.iter().filter(|case| !case.passed).count();
    text += &match failed {
        0 => format!(
            "\npassed: {}\n",
            counted(report.cases.len(), "case", "cases")
        ),
        _ => format!("\nFAILED: {failed} of {} cases\n", report.cases.len()),
    };
    text
}

/// The indents of the finding, and of the reason and fix.
const INDENTS: [usize; 2] = [9, 15];

/// Formats the report as text, the worst findings first. Only problems and warnings, unless `verbose`.
fn render(report: &Report, verbose: bool, columns: Option<usize>) -> String {
    let mut text = String::new();
    let shown = |finding: &&Finding| verbose || finding.severity >= Severity::Warning;
    let mut findings: Vec<&Finding> = report.findings.iter().filter(shown).collect();
    findings.sort_by_key(|finding| Reverse(finding.severity));
    for finding in findings {
        let mark = match finding.severity {
            Severity::Ok => "ok     ",
            Severity::Note => "note   ",
            Severity::Warning => "WARNING",
            Severity::Problem => "PROBLEM",
        };
        let mut line = |line: &str, indent| {
            text.push_str(&wrapped(line, indent, columns));
            text.push('\n');
        };
        let [found, more] = INDENTS;
        for (i, part) in finding.found.lines().enumerate() {
            match i {
                0 => line(&format!("{mark}  {}: {part}", finding.id), found),
                _ => line(&format!("{:found$} {part}", ""), found + 1),
            }
        }
        if let Some(fix) = &finding.fix {
            line(&format!("{:found$}why:  {}", "", finding.why), more);
            line(&format!("{:found$}fix:  {fix}", ""), more);
        }
    }
    let count = |severity| {
        let findings = report.findings.iter();
        findings.filter(|f| f.severity == severity).count()
    };
    if !text.is_empty() {
        text.push('\n');
    }
    let rest = format!(
        "{}, {} ok",
        counted(count(Severity::Note), "note", "notes"),
        count(Severity::Ok)
    );
    text.push_str(&format!(
        "kernel {}: {}, {}{}\n",
        report.kernel,
        counted(count(Severity::Problem), "problem", "problems"),
        counted(count(Severity::Warning), "warning", "warnings"),
        match verbose {
            true => format!(", {rest}"),
            false => format!(" ({rest}: --verbose)"),
        }
    ));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doctor_shows_problems_first_in_short_lines() {
        let report = examine(&Input {
            cgroup: Some("/proc".into()),
            pin_dir: "/proc/none".into(),
            config_error: Some("a.toml:1:1: no such key\n  1 | x".to_owned()),
            ..Input::default()
        });
        let text = render(&report, true, Some(72));
        let marks = text.lines().filter_map(|line| match line.get(..7) {
            Some("PROBLEM") => Some(0),
            Some("WARNING") => Some(1),
            Some("note   ") => Some(2),
            Some("ok     ") => Some(3),
            _ => None,
        });
        let marks: Vec<_> = marks.collect();
        assert!(marks.is_sorted() && marks[0] == 0, "{text}");
        assert_eq!(marks.len(), report.findings.len(), "{text}");
        let too_long = |line: &&str| line.chars().count() > 72 && line.trim().contains(' ');
        assert_eq!(text.lines().find(too_long), None);
        assert!(
            text.contains("PROBLEM  bpffs: ") && text.contains("\n         fix:  "),
            "{text}"
        );
        // Without a terminal, lines are not wrapped.
        let brief = render(&report, false, Some(72));
        assert!(
            brief.starts_with("PROBLEM") && !brief.contains("\nok "),
            "{brief}"
        );
        let unbroken = render(&report, true, None);
        assert!(
            unbroken.contains("          1 | x") || unbroken.contains("            1 | x"),
            "{unbroken}"
        );
    }
}
