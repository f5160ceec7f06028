//! `rto-agent status`.

use std::{process::ExitCode, time::Duration};

use rto_agent_core::{
    printable::{self, counted},
    wire::{
        kernel::{Feature, Presence},
        types::{StatusAnswer, WalkView, now_s},
    },
};

use super::{exit, holdout, print_coloured, terminal::wrapped};
use crate::{
    cli::{Status, WideArg},
    client::Client,
};

/// The column where values begin.
const INDENT: usize = 15;

pub(super) fn run(args: &Status) -> anyhow::Result<ExitCode> {
    let answer: StatusAnswer = Client::new(&args.daemon.socket).get("/v1/status")?;
    let wide = WideArg { wide: false };
    print_coloured(args.daemon.json, &answer, args.color, wide, |columns| {
        text(&answer, columns)
    })?;
    Ok(exit(answer.healthy || args.alive))
}

fn text(status: &StatusAnswer, columns: Option<usize>) -> String {
    let uptime = humantime::format_duration(Duration::from_secs(status.uptime_s));
    let attachment = &status.attachment;
    let attached = match attachment.program_id {
        Some(id) if attachment.attached => {
            let extent = if attachment.is_root {
                "every socket of the host"
            } else {
                "sockets of this cgroup and those below"
            };
            let cgroup = printable::path(&attachment.cgroup);
            format!("yes, {cgroup}: {extent} (program {id})")
        }
        _ => format!(
            "NO: {}",
            attachment
                .problem
                .as_deref()
                .unwrap_or("the program is not attached")
        ),
    };
    let reload = &status.last_reload;
    let ago = since(reload.at_s);
    let outcome = if reload.ok { "good" } else { "REFUSED" };
    let last_good = reload.kept_at_s.map(|at_s| {
        let ago = since(at_s);
        format!("; the last good configuration, saved {ago} ago, is active")
    });
    let last_good = last_good.unwrap_or_default();
    let host = &status.host;
    let lines = [
        (
            "rto-agent",
            format!("{}, pid {}, up {uptime}", status.version, status.pid),
        ),
        (
            "health",
            if status.healthy {
                "good".to_owned()
            } else {
                "PROBLEM".to_owned()
            },
        ),
        ("attached", attached),
        ("kernel", status.kernel.clone()),
        (
            "host",
            format!(
                "HZ {}, tcp_syn_retries {}, tcp_syn_linear_timeouts {}, tcp_synack_retries {}",
                host.hz,
                host.tcp_syn_retries,
                host.tcp_syn_linear_timeouts,
                host.tcp_synack_retries
            ),
        ),
        (
            "entries",
            format!(
                "{} of {} ({} runtime){}",
                status.entries,
                status.max_entries,
                status.runtime_entries,
                if status.in_sync {
                    ""
                } else {
                    ", OUT OF SYNC with the kernel"
                }
            ),
        ),
        (
            "configuration",
            format!(
                "{}, {outcome}, {ago} ago ({}){last_good}",
                printable::path(&status.config),
                reload.cause
            ),
        ),
    ];
    let probe = status.probe.as_ref().map(|probe| {
        let ago = since(probe.at_s);
        (
            "probe",
            format!("{}, {ago} ago ({})", probe.verdict.describe(), probe.by),
        )
    });
    let walk = status
        .open_sockets
        .as_ref()
        .map(|walk| ("open sockets", walked(walk)));
    let absent = ("kernel lacks", lacking(&status.features));
    let tuning = status.tuning.iter().map(|line| ("tuning", line.clone()));
    let holdouts = status.holdouts.iter().map(|(policy, holdout)| {
        let bad = holdout.arms.map(holdout::connects);
        let text = &holdout.text;
        let ratio = holdout::ratio(holdout.evidence.ratio).map(|ratio| format!("; {ratio}"));
        let text = format!(
            "policy {policy}, {}: {text}; treated: {}; control: {}{}",
            holdout.share,
            bad.treated,
            bad.control,
            ratio.unwrap_or_default()
        );
        ("holdout", text)
    });
    let more = probe.into_iter().chain(walk).chain(tuning);
    let more = more.chain(holdouts);
    let more = more.chain((!absent.1.is_empty()).then_some(absent));
    let mut text: String = lines
        .into_iter()
        .chain(more)
        .map(|(name, value)| {
            let line = format!("{name:13}  {value}");
            wrapped(&line, INDENT, columns) + "\n"
        })
        .collect();
    let problems = status.problems.iter().chain(&reload.errors);
    let problems = problems.map(|problem| format!("\nproblem: {problem}"));
    let warnings = status.warnings.iter();
    let warnings = warnings.map(|warning| format!("\nwarning: {warning}"));
    for paragraph in problems.chain(warnings) {
        // Errors of files quote a line, with a mark below it.
        for line in paragraph.lines() {
            text.push_str(&wrapped(line, 0, columns));
            text.push('\n');
        }
    }
    text
}

fn since(at_s: u64) -> String {
    let ago = Duration::from_secs(now_s().saturating_sub(at_s));
    humantime::format_duration(ago).to_string()
}

fn walked(walk: &WalkView) -> String {
    let changed: u64 = walk.policies.values().map(|p| p.changed).sum();
    let (done, all) = (walk.namespaces_done, walk.namespaces);
    let state = if walk.running {
        "walk in progress: "
    } else {
        ""
    };
    let first = walk
        .problems
        .iter()
        .chain(walk.skipped.iter().map(|s| &s.reason));
    let problem = first.take(1).map(|text| format!("; {text}"));
    let problem: String = problem.collect();
    format!(
        "{state}{changed} changed in {done} of {}, {} ago ({}){problem}",
        counted(all, "network namespace", "network namespaces"),
        since(walk.began_at_s),
        walk.cause
    )
}

/// What the kernel lacks, and since which version it has it.
fn lacking(features: &[Feature]) -> String {
    let lacking = features.iter().filter(|f| f.presence != Presence::Present);
    let lacking = lacking.map(|f| {
        let what = match &*f.name {
            "bpf-getsockopt-rto-min" => "reading a socket's rto_min",
            "syn-schedule" => "SYN schedule",
            "rto-hook-on-open-sockets" => "RTO hook on open sockets",
            "tcp-syn-linear-timeouts" => "linear SYN timeouts",
            "syn-ack-retransmission-timeout" => "timer of the second and later SYN-ACKs",
            "btf" => "type information",
            "reads-listener" => "reading a listener's options",
            "bpf-lsm-cgroup" => "accepted-socket hook",
            "iter-tcp" => "access to open sockets",
            _ => &f.needed_for,
        };
        match f.presence {
            Presence::Refused => format!("{what} (refused)"),
            Presence::Unknown => format!("{what} (unknown)"),
            Presence::Absent | Presence::Present => format!("{what} ({})", f.since),
        }
    });
    lacking.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_features_are_named_in_words() {
        let feature = |name: &str, needed_for: &str, since: &str, presence| Feature {
            name: name.to_owned(),
            since: since.to_owned(),
            presence,
            required: false,
            settings: Vec::new(),
            needed_for: needed_for.to_owned(),
            evidence: String::new(),
        };
        let features = [
            feature("btf", "", "5.4", Presence::Present),
            feature("tcp-rto-max", "rto_max", "6.15", Presence::Absent),
            feature("bpf-lsm-cgroup", "rto_min on ...", "6.0", Presence::Refused),
        ];
        assert_eq!(
            lacking(&features),
            "rto_max (6.15), accepted-socket hook (refused)"
        );
        assert_eq!(lacking(&features[..1]), "");
    }
}
