//! `rto-agent status`.

use std::{process::ExitCode, time::Duration};

use super::{print, table};
use crate::{
    api::{client::Client, types::StatusAnswer},
    cli::Reading,
};

pub(super) fn run(args: &Reading) -> anyhow::Result<ExitCode> {
    let answer: StatusAnswer = Client::new(&args.socket.socket).get("/v1/status")?;
    print(args.output.json, &answer, || text(&answer))?;
    Ok(if answer.healthy {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn text(status: &StatusAnswer) -> String {
    let uptime = humantime::format_duration(Duration::from_secs(status.uptime_s));
    let attachment = &status.attachment;
    let attached = match attachment.program_id {
        Some(id) if attachment.attached => {
            format!("yes, {} (program {id})", attachment.cgroup.display())
        }
        _ => format!(
            "NO: {}",
            attachment
                .problem
                .as_deref()
                .unwrap_or("the program is not in force")
        ),
    };
    let reload = &status.last_reload;
    let ago = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap_or_default()
        .as_secs()
        .saturating_sub(reload.at_s);
    let ago = humantime::format_duration(Duration::from_secs(ago));
    let outcome = if reload.ok { "good" } else { "REFUSED" };
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
                "NOT GOOD".to_owned()
            },
        ),
        ("attached", attached),
        ("kernel", status.kernel.clone()),
        (
            "host",
            format!(
                "HZ {}, tcp_syn_retries {}, tcp_syn_linear_timeouts {}",
                host.hz, host.tcp_syn_retries, host.tcp_syn_linear_timeouts
            ),
        ),
        (
            "entries",
            format!(
                "{} of {} ({} by hand){}",
                status.entries,
                status.max_entries,
                status.entries_by_hand,
                if status.in_sync {
                    ""
                } else {
                    ", OUT OF STEP with the kernel"
                }
            ),
        ),
        (
            "configuration",
            format!(
                "{}, {outcome}, {ago} ago ({})",
                status.config.display(),
                reload.cause
            ),
        ),
    ];
    let mut text: String = lines
        .iter()
        .map(|(name, value)| format!("{name:13}  {value}\n"))
        .collect();
    if !status.policies.is_empty() {
        let mut rows = table::new([
            "POLICY",
            "CONNECTED",
            "ACCEPTED",
            "SYN SET",
            "SYN AGAIN",
            "SYN-ACK SET",
            "SYN-ACK AGAIN",
        ]);
        for (name, c) in &status.policies {
            rows.add_row([
                name.to_string(),
                c.established_active.to_string(),
                c.established_passive.to_string(),
                c.syn_timeouts_set.to_string(),
                c.syn_retransmissions.to_string(),
                c.syn_ack_timeouts_set.to_string(),
                c.syn_ack_retransmissions.to_string(),
            ]);
        }
        text.push('\n');
        text.push_str(&table::text(&rows));
    }
    for problem in status.problems.iter().chain(&reload.errors) {
        text.push_str(&format!("\nproblem: {problem}\n"));
    }
    for warning in &status.warnings {
        text.push_str(&format!("\nwarning: {warning}\n"));
    }
    text
}
