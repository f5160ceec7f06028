//! `rto-agent status`.

use std::{process::ExitCode, time::Duration};

use rto_agent_core::{
    printable::{self, counted},
    wire::{
        kernel::{Feature, Presence, RtoMinTiming},
        types::{StatusAnswer, WalkView, now_s},
    },
};

use super::{
    exit, holdout, print_coloured,
    terminal::{self, wrapped},
};
use crate::{
    cli::{Status, WideArg},
    client::Client,
};

/// The column where values begin.
const INDENT: usize = 15;

pub(super) fn run(args: &Status) -> anyhow::Result<ExitCode> {
    let answer: StatusAnswer = Client::new(&args.daemon.socket).get("/v1/status")?;
    print_coloured(args.daemon.json, &answer, args.color, || {
        text(&answer, terminal::columns(WideArg { wide: false }))
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
    let kept = reload.kept_at_s.map(|at_s| {
        let ago = since(at_s);
        format!("; the last good configuration, saved {ago} ago, is active")
    });
    let kept = kept.unwrap_or_default();
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
        ("accepted", accepted(attachment.accepted.as_ref())),
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
                "{}, {outcome}, {ago} ago ({}){kept}",
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
    let absent = ("not possible", lacking(&status.features));
    let tuning = status.tuning.iter().map(|line| ("tuning", line.clone()));
    let holdouts = status.holdouts.iter().map(|(policy, holdout)| {
        let bad = holdout.arms.map(holdout::connects);
        let text = &holdout.text;
        let ratio = holdout::ratio(holdout.evidence.ratio);
        let text = format!(
            "policy {policy}, {}: {text}; treated: {}; control: {}; {ratio}",
            holdout.share, bad.treated, bad.control
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

fn accepted(accepted: Option<&RtoMinTiming>) -> String {
    match accepted {
        None => "nothing attached".to_owned(),
        Some(RtoMinTiming::BeforeFirstSample) => {
            "rto_min is set before the first RTT sample (BPF LSM)".to_owned()
        }
        Some(RtoMinTiming::AfterFirstSample { reason }) => format!(
            "rto_min is set after the first RTT sample; the RTO falls to it by a quarter of the \
             excess per round trip ({})",
            reason.lines().next().unwrap_or_default()
        ),
    }
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

/// Settings that this kernel does not support, or only in part.
fn lacking(features: &[Feature]) -> String {
    let lacking = features.iter().filter(|f| f.presence != Presence::Present);
    let lacking = lacking.map(|f| {
        let presence = match f.presence {
            Presence::Refused => " (refused)",
            Presence::Unknown => " (unknown)",
            Presence::Absent | Presence::Present => "",
        };
        format!("{}{presence}", f.needed_for)
    });
    lacking.collect::<Vec<_>>().join("; ")
}
