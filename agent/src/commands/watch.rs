//! `rto-agent watch`.

use std::{
    io::{self, Write as _},
    process::ExitCode,
    time::{Duration, UNIX_EPOCH},
};

use rto_agent_core::{
    policy::{Cidr, PolicyName, units::format_duration},
    printable::{self, JsonWriter},
    wire::{
        events::{EventView, StreamItem, TunedEvent},
        stats::Arm,
    },
};

use super::terminal;
use crate::{cli::Watch, client::Client};

pub(super) fn run(args: &Watch) -> anyhow::Result<ExitCode> {
    let client = Client::new(&args.socket.socket);
    let path = path(args)?;
    // With all columns, a line has about 140 characters.
    let brief = terminal::columns(args.table).is_some_and(|columns| columns < 140);
    let mut out = io::stdout().lock();
    if !args.json {
        writeln!(out, "{}", header(brief))?;
        out.flush()?;
    }
    let ended = client.lines(&path, |line| -> anyhow::Result<()> {
        let line: StreamItem = serde_json::from_slice(line)?;
        if args.json {
            serde_json::to_writer(JsonWriter(&mut out), &line).map_err(io::Error::from)?;
            writeln!(out)?;
        } else {
            writeln!(out, "{}", printable::text(&text(&line, brief)))?;
        }
        Ok(out.flush()?)
    });
    match ended {
        Ok(never) => match never {},
        Err(e) => Err(e),
    }
}

fn path(args: &Watch) -> anyhow::Result<String> {
    let mut path = "/v1/events?".to_owned();
    if let Some(policy) = &args.policy {
        // A valid policy name has no character that needs escaping.
        path.push_str(&format!("policy={}&", policy.parse::<PolicyName>()?));
    }
    let cidrs: Result<Vec<Cidr>, _> = args.cidr.iter().map(|text| text.parse()).collect();
    let cidrs: Vec<_> = cidrs?.iter().map(ToString::to_string).collect();
    if !cidrs.is_empty() {
        path.push_str(&format!("cidr={}", cidrs.join(",")));
    }
    Ok(path)
}

fn text(line: &StreamItem, brief: bool) -> String {
    match line {
        StreamItem::Lost { lost } => {
            format!("({lost} events lost: they were faster than this output)")
        }
        StreamItem::Event(event) => event_text(event, brief),
        StreamItem::Verdict(event) => {
            let at = time(event.at_us, brief);
            format!("{at} verdict about {}: {}", event.policy, event.text)
        }
        StreamItem::Tuned(tuned) => tuned_text(tuned, brief),
    }
}

fn header(brief: bool) -> String {
    let peer = if brief { "PEER" } else { "LOCAL > PEER" };
    let process = if brief { "" } else { "PROCESS" };
    let time = if brief { "TIME" } else { "TIME (UTC)" };
    columns(
        brief,
        [
            time, "KIND", "TRY", "TIMER", peer, "STATE", "POLICY", process,
        ],
    )
}

fn tuned_text(tuned: &TunedEvent, brief: bool) -> String {
    let TunedEvent { policy, transition } = tuned;
    let at = time(transition.transition.at_ms.saturating_mul(1000), brief);
    format!("{at}  {policy}: {transition}")
}

fn time(at_us: u64, brief: bool) -> String {
    let at = humantime::format_rfc3339_micros(UNIX_EPOCH + Duration::from_micros(at_us));
    let at = at.to_string();
    match brief {
        // The time of day, to a millisecond.
        true => at[11..23].to_owned(),
        false => at,
    }
}

fn event_text(event: &EventView, brief: bool) -> String {
    let at = time(event.at_us, brief);
    let timer = event.timer_us.map_or_else(
        || "-".to_owned(),
        |us| format_duration(Duration::from_micros(us)),
    );
    let arrow = if event.direction == "passive" {
        "<"
    } else {
        ">"
    };
    let end = |address: std::net::IpAddr, port| std::net::SocketAddr::new(address, port);
    let remote = end(event.remote, event.remote_port);
    let peer = match brief {
        true => format!("{arrow} {remote}"),
        false => format!("{} {arrow} {remote}", end(event.local, event.local_port)),
    };
    let policy = event.policy.as_ref().map_or("(gone)", PolicyName::as_str);
    let policy = match event.arm {
        Arm::Treated => policy.to_owned(),
        Arm::Control => format!("{policy}, {}", event.arm),
    };
    let process = match (&event.process, event.pid) {
        (Some(name), Some(pid)) if !brief => format!("{name}[{pid}]"),
        _ => String::new(),
    };
    let (kind, attempt) = (event.kind.to_string(), event.attempt.to_string());
    columns(
        brief,
        [
            &at,
            &kind,
            &attempt,
            &timer,
            &peer,
            &event.state,
            &policy,
            &process,
        ],
    )
}

/// Cells, padded to their usual widths.
fn columns(brief: bool, cells: [&str; 8]) -> String {
    let [at, kind, attempt, timer, peer, state, policy, process] = cells;
    let (time, ends) = if brief { (12, 23) } else { (27, 45) };
    let line = format!(
        "{at:time$}  {kind:7}  {attempt:>3}  {timer:>6}  {peer:ends$}  {state:8}  {policy:12}  {process}"
    );
    line.trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use rto_agent_core::wire::events::Kind;

    use super::*;

    #[test]
    fn events_are_shown_as_lines() {
        let event = EventView {
            at_us: 1_700_000_000_123_456,
            kind: Kind::Syn,
            attempt: 1,
            timer_us: Some(100_000),
            local: [10, 0, 0, 1].into(),
            local_port: 40_000,
            remote: [10, 0, 0, 2].into(),
            remote_port: 443,
            state: "SYN-SENT".to_owned(),
            policy: Some("near".parse().unwrap()),
            arm: Arm::Treated,
            direction: "active".to_owned(),
            pid: Some(12),
            process: Some("curl".to_owned()),
        };
        let answered = EventView {
            kind: Kind::SynAck,
            attempt: 2,
            timer_us: None,
            direction: "passive".to_owned(),
            local: "fd00::1".parse().unwrap(),
            remote: "fd00::2".parse().unwrap(),
            state: "SYN-RECV".to_owned(),
            policy: None,
            pid: None,
            process: None,
            ..event.clone()
        };
        let control = EventView {
            arm: Arm::Control,
            timer_us: Some(1_000_000),
            ..event.clone()
        };
        let control = text(&StreamItem::Event(control), false);
        assert!(
            control.ends_with("SYN-SENT  near, control  curl[12]"),
            "{control}"
        );
        let lines = [
            StreamItem::Event(event),
            StreamItem::Event(answered),
            StreamItem::Lost { lost: 3 },
        ];
        let all = |brief| {
            let lines = lines.iter().map(|line| text(line, brief));
            let all: Vec<_> = std::iter::once(header(brief)).chain(lines).collect();
            all.join("\n")
        };
        insta::assert_snapshot!("wide", all(false));
        let brief = all(true);
        assert!(brief.lines().all(|line| line.len() <= 80), "{brief}");
        insta::assert_snapshot!("brief", brief);
    }
}
