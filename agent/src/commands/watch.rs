//! `rto-agent watch`.

use std::{
    io::{self, Write as _},
    process::ExitCode,
    time::{Duration, UNIX_EPOCH},
};

use crate::{
    api::client::Client,
    cli::Watch,
    policy::{Cidr, PolicyName, units::format_duration},
    wire::events::{EventView, StreamItem},
};

pub(super) fn run(args: &Watch) -> anyhow::Result<ExitCode> {
    let client = Client::new(&args.socket.socket);
    let path = path(args)?;
    let mut out = io::stdout().lock();
    let ended = client.lines(&path, |line| -> anyhow::Result<()> {
        let line: StreamItem = serde_json::from_slice(line)?;
        if args.json {
            serde_json::to_writer(&mut out, &line).map_err(io::Error::from)?;
            writeln!(out)?;
        } else {
            writeln!(out, "{}", text(&line))?;
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
        // A name that can be one has nothing in it that would have to be escaped.
        path.push_str(&format!("policy={}&", policy.parse::<PolicyName>()?));
    }
    let cidrs: Result<Vec<Cidr>, _> = args.cidr.iter().map(|text| text.parse()).collect();
    let cidrs: Vec<_> = cidrs?.iter().map(ToString::to_string).collect();
    if !cidrs.is_empty() {
        path.push_str(&format!("cidr={}", cidrs.join(",")));
    }
    Ok(path)
}

fn text(line: &StreamItem) -> String {
    match line {
        StreamItem::Lost { lost } => format!("({lost} lost: they came faster than they were read)"),
        StreamItem::Event(event) => event_text(event),
    }
}

fn event_text(event: &EventView) -> String {
    let at = humantime::format_rfc3339_micros(UNIX_EPOCH + Duration::from_micros(event.at_us));
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
    let policy = event.policy.as_ref().map_or("(gone)", PolicyName::as_str);
    let process = match (&event.process, event.pid) {
        (Some(name), Some(pid)) => format!("  {}[{pid}]", printable(name)),
        _ => String::new(),
    };
    format!(
        "{at}  {:7}  #{:<2}  {timer:>6}  {} {arrow} {}  {}  {policy}{process}",
        event.kind,
        event.attempt,
        end(event.local, event.local_port),
        end(event.remote, event.remote_port),
        event.state,
    )
}

/// A process chooses its own name: none that tells the terminal anything.
fn printable(name: &str) -> String {
    name.replace(char::is_control, "?")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::events::Kind;

    #[test]
    fn lines_for_people() {
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
        let lines = [
            StreamItem::Event(event),
            StreamItem::Event(answered),
            StreamItem::Lost { lost: 3 },
        ];
        insta::assert_snapshot!(lines.map(|line| text(&line)).join("\n"));
    }

    #[test]
    fn a_name_does_not_reach_the_terminal_as_it_is() {
        assert_eq!(printable("\u{1b}[2Jx\u{9b}\r\nü"), "?[2Jx???ü");
    }
}
