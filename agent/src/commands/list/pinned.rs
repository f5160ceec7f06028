//! What a daemon that is gone has left in force, by its pins.

use std::{
    env,
    io::{self, Write as _},
    path::{Path, PathBuf},
    process::ExitCode,
};

use rto_agent_common::{Policy, policy_flags};

use super::{Wanted, hits, row};
use crate::{
    api::client::ClientError,
    config::{Config, DEFAULT_CONFIG},
    datapath::{PinnedMaps, pinned_maps},
    kernel::hz::measure,
    policy::units::{format_duration, jiffies_duration},
    printable,
};

const HEADER: [&str; 3] = ["CIDR", "POLICY", "HITS"];

/// Lists it, if there is any: an error all the same, as nobody keeps it in step with the files.
pub(super) fn list(
    socket: &Path,
    wanted: &Wanted,
    columns: Option<usize>,
    error: ClientError,
) -> anyhow::Result<ExitCode> {
    let config =
        env::var_os("RTO_AGENT_CONFIG").map_or_else(|| DEFAULT_CONFIG.into(), PathBuf::from);
    let agent = Config::load_agent(&config).unwrap_or_default();
    // The pins of another daemon say nothing of this one.
    let found = (agent.socket == socket).then(|| pinned_maps(&agent.pin_dir));
    let Some(mut found) = found.flatten() else {
        return Err(error.into());
    };
    found
        .entries
        .retain(|entry| wanted.has_entry(&entry.cidr, &entry.policy));
    let hz = measure().unwrap_or_default();
    io::stdout()
        .lock()
        .write_all(text(&found, hz, columns).as_bytes())?;
    anyhow::bail!(
        "{error}; what is listed is in force by the pins in {} (rto-agent detach removes it)",
        printable::path(&agent.pin_dir)
    )
}

fn text(found: &PinnedMaps, hz: u32, columns: Option<usize>) -> String {
    let cells = found.entries.iter().map(|entry| {
        let cells = [
            entry.cidr.to_string(),
            entry.policy.to_string(),
            hits(entry.hits),
        ];
        let settings = found.policies.get(&entry.policy);
        (
            cells,
            settings.map(|p| settings_of(p, hz)).unwrap_or_default(),
        )
    });
    let cells: Vec<_> = cells.collect();
    let mut widths = HEADER.map(str::len);
    for (cells, _) in &cells {
        for (width, cell) in widths.iter_mut().zip(cells) {
            *width = cell.len().max(*width);
        }
    }
    let mut text = String::new();
    row(&mut text, widths, HEADER, "SETTINGS", columns);
    for (cells, settings) in &cells {
        let cells = cells.each_ref().map(String::as_str);
        row(&mut text, widths, cells, settings, columns);
    }
    text
}

/// The timers that the kernel has.
fn settings_of(policy: &Policy, hz: u32) -> String {
    let us = |us: u32| std::time::Duration::from_micros(us.into());
    let ms = |ms: u32| std::time::Duration::from_millis(ms.into());
    let initial_rto = jiffies_duration(policy.initial_rto_jiffies.into(), hz);
    let timers = [
        ("initial_rto", initial_rto),
        ("rto_min", us(policy.rto_min_us)),
        ("delack_max", us(policy.delack_max_us)),
        ("rto_max", ms(policy.rto_max_ms)),
        ("user_timeout", ms(policy.user_timeout_ms)),
    ];
    let timers = timers.into_iter().filter(|(_, value)| !value.is_zero());
    let timers = timers.map(|(name, value)| format!("{name} {}", format_duration(value)));
    let is_thin = policy.flags & policy_flags::THIN_LINEAR != 0;
    let thin = is_thin.then(|| "thin_linear true".to_owned());
    timers.chain(thin).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::datapath::PinnedEntry;

    #[test]
    fn as_the_kernel_has_it() {
        let policy = Policy {
            initial_rto_jiffies: 25,
            rto_min_us: 8000,
            flags: policy_flags::THIN_LINEAR,
            ..Policy::EMPTY
        };
        let found = PinnedMaps {
            policies: [("near".parse().unwrap(), policy)].into(),
            entries: vec![PinnedEntry {
                cidr: "10.1.0.0/16".parse().unwrap(),
                policy: "near".parse().unwrap(),
                hits: 3,
            }],
        };
        assert_eq!(
            text(&found, 250, None),
            "CIDR         POLICY  HITS  SETTINGS\n\
             10.1.0.0/16  near    3     initial_rto 100ms, rto_min 8ms, thin_linear true\n"
        );
    }
}
