//! Lists the entries that a stopped daemon left active, from its pins and its file of runtime
//! entries.

use std::{
    collections::BTreeMap,
    env,
    io::{self, Write as _},
    path::PathBuf,
    process::ExitCode,
};

use anyhow::Context as _;
use rto_agent_common::Policy;
use rto_agent_core::{
    config::{AgentConfig, Config, DEFAULT_CONFIG},
    policy::{Cidr, PolicyName, SETTINGS},
    printable,
};
use rto_agent_daemon::engine::RuntimeStore;
use rto_agent_kernel::{
    datapath::{PinnedMaps, pinned_maps},
    kernel::hz::measure,
};
use serde::Serialize;

use super::{Wanted, hits, rows};
use crate::{
    cli::List,
    client::ClientError,
    commands::{print_table, terminal},
};

/// The exit status of `systemctl status` and LSB init scripts for "not running".
const NOT_RUNNING: u8 = 3;

/// The active entries without a daemon. `--json` prints it; its fields are a subset of a daemon's
/// answer.
#[derive(Serialize)]
struct Left {
    /// False, unlike in a daemon's answer.
    daemon: bool,
    #[serde(serialize_with = "printable::serialize_path")]
    pin_dir: PathBuf,
    policies: BTreeMap<PolicyName, PolicyLeft>,
    entries: Vec<EntryLeft>,
}

#[derive(Serialize)]
struct PolicyLeft {
    /// The timers in the kernel's maps.
    settings: BTreeMap<&'static str, String>,
}

#[derive(Serialize)]
struct EntryLeft {
    cidr: Cidr,
    policy: PolicyName,
    source: SourceLeft,
    hits: u32,
}

/// Without the line of a file, because the file may have changed since.
#[derive(Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
enum SourceLeft {
    File,
    Runtime,
    /// The file of runtime entries cannot be read.
    Unknown,
}

impl SourceLeft {
    fn name(self) -> &'static str {
        match self {
            Self::File => "file",
            Self::Runtime => "runtime",
            Self::Unknown => "-",
        }
    }
}

/// Lists the active entries, with a different exit status, because no daemon keeps them equal to
/// the files. The error goes to stderr; it is the result if no entry is active.
pub(super) fn list(args: &List, wanted: &Wanted, error: ClientError) -> anyhow::Result<ExitCode> {
    let agent = agent_config();
    // The pins of another daemon are unrelated.
    if agent.socket != args.daemon.socket {
        return Err(error.into());
    }
    let found = pinned_maps(&agent.pin_dir).with_context(|| error.to_string())?;
    let Some(found) = found else {
        return Err(error.into());
    };
    let left = Left::of(found, agent, wanted)?;
    print_table(args.daemon.json, &left, args.table, |columns| {
        text(&left, columns)
    })?;
    let text = format!(
        "rto-agent: {error}; the listed entries are kept active by the pins in {} (rto-agent \
         detach removes them)",
        printable::path(&left.pin_dir)
    );
    // If stderr is gone too, the message is lost.
    let text = terminal::wrapped_message(&printable::lines(&text));
    let _ = io::stderr().write_all(text.as_bytes());
    Ok(ExitCode::from(NOT_RUNNING))
}

fn agent_config() -> AgentConfig {
    let config = env::var_os("RTO_AGENT_CONFIG").filter(|config| !config.is_empty());
    let config = config.map_or_else(|| DEFAULT_CONFIG.into(), PathBuf::from);
    Config::load_agent(&config).unwrap_or_default()
}

impl Left {
    fn of(found: PinnedMaps, agent: AgentConfig, wanted: &Wanted) -> anyhow::Result<Self> {
        let runtime = match RuntimeStore::new(&agent.state_dir).peek() {
            Err(e) if wanted.runtime || wanted.file => {
                return Err(e)
                    .context("cannot distinguish runtime entries from entries of the files");
            }
            runtime => runtime.ok(),
        };
        let source_of = |cidr: &Cidr, policy: &PolicyName| match &runtime {
            None => SourceLeft::Unknown,
            Some(runtime) => match runtime.get(cidr) {
                // The policy must match too: an entry of the files may earlier have been a runtime
                // entry of another policy.
                Some(entry) if entry.policy == *policy => SourceLeft::Runtime,
                _ => SourceLeft::File,
            },
        };
        let hz = measure().unwrap_or_default();
        let policies = found.policies.iter().map(|(name, policy)| {
            let settings = settings_of(policy, hz);
            (name.clone(), PolicyLeft { settings })
        });
        let mut policies = policies.collect();
        wanted.keep_policy(&mut policies)?;
        let entries = found.entries.into_iter().filter_map(|entry| {
            let source = source_of(&entry.cidr, &entry.policy);
            let is_runtime = source == SourceLeft::Runtime;
            let is_wanted = wanted.has_entry(&entry.cidr, &entry.policy, is_runtime);
            is_wanted.then_some(EntryLeft {
                cidr: entry.cidr,
                policy: entry.policy,
                source,
                hits: entry.hits,
            })
        });
        Ok(Self {
            daemon: false,
            entries: entries.collect(),
            policies,
            pin_dir: agent.pin_dir,
        })
    }
}

fn text(left: &Left, columns: Option<usize>) -> String {
    if left.entries.is_empty() {
        return "no entries\n".to_owned();
    }
    let cells = |entry: &EntryLeft| {
        [
            entry.cidr.to_string(),
            entry.policy.to_string(),
            entry.source.name().to_owned(),
            hits(entry.hits),
        ]
    };
    let policies = left.policies.iter();
    let settings: BTreeMap<_, _> = policies.map(|(name, left)| (name, left.text())).collect();
    let settings = |entry: &EntryLeft| settings.get(&entry.policy).map_or("", String::as_str);
    let mut text = String::new();
    rows(&mut text, &left.entries, cells, settings, columns);
    text
}

impl PolicyLeft {
    fn text(&self) -> String {
        let one = |(name, value): (&&str, &String)| format!("{name} {value}");
        self.settings.iter().map(one).collect::<Vec<_>>().join(", ")
    }
}

/// The settings that can be read back from the kernel's maps.
fn settings_of(policy: &Policy, hz: u32) -> BTreeMap<&'static str, String> {
    let settings = SETTINGS.iter();
    let found = settings.filter_map(|s| Some((s.key.name, (s.in_kernel)(policy, hz)?)));
    found.collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rto_agent_common::policy_flags;
    use rto_agent_core::policy::Share;
    use rto_agent_daemon::engine::runtime::RuntimeEntries;
    use rto_agent_kernel::datapath::PinnedEntry;

    use super::*;

    fn found() -> PinnedMaps {
        let policy = Policy {
            initial_rto_jiffies: 25,
            rto_min_us: 8000,
            flags: policy_flags::THIN_LINEAR,
            control_below: "0.5%".parse::<Share>().unwrap().below(),
            ..Policy::EMPTY
        };
        let entry = |cidr: &str, hits| PinnedEntry {
            cidr: cidr.parse().unwrap(),
            policy: "near".parse().unwrap(),
            hits,
        };
        PinnedMaps {
            policies: [("near".parse().unwrap(), policy)].into(),
            entries: vec![entry("10.1.0.0/16", 3), entry("10.2.0.0/16", 0)],
        }
    }

    /// An agent's directory with one runtime entry in it.
    fn state(cidr: &str) -> (tempfile::TempDir, AgentConfig) {
        let dir = tempfile::tempdir().unwrap();
        let mut runtime = RuntimeEntries::default();
        let entry =
            serde_json::json!({"policy": "near", "by": {"uid": 0, "pid": 1}, "expires_ms": null});
        let entry = serde_json::from_value(entry).unwrap();
        let settings = rto_agent_core::policy::Settings {
            initial_rto: Some(Duration::from_millis(100).into()),
            ..Default::default()
        };
        runtime.add(&[cidr.parse().unwrap()], &entry, &settings);
        let mut store = RuntimeStore::new(dir.path());
        store.save(&runtime);
        let agent = AgentConfig {
            state_dir: dir.path().to_owned(),
            ..AgentConfig::default()
        };
        (dir, agent)
    }

    #[test]
    fn pinned_entries_have_settings_and_source() {
        let (_dir, agent) = state("10.2.0.0/16");
        let left = |wanted: &Wanted| Left::of(found(), agent.clone(), wanted).unwrap();
        let all = left(&Wanted::default());
        let settings = all.policies.values().next().unwrap();
        let keys: Vec<_> = settings.settings.keys().copied().collect();
        let expected = ["holdout", "initial_rto", "rto_min", "thin_linear"];
        assert_eq!(keys, expected);
        assert_eq!(settings.settings["holdout"], "0.5%");
        assert_eq!(settings.settings["rto_min"], "8ms");
        let lines: Vec<_> = text(&all, Some(40)).lines().map(str::to_owned).collect();
        assert_eq!(lines[0], "CIDR         POLICY  SOURCE   HITS");
        assert_eq!(lines[1], "10.1.0.0/16  near    file     3");
        assert_eq!(lines[2], "10.2.0.0/16  near    runtime  0");
        assert_eq!(lines[3], "(1 column more: --wide)");
        let cidrs = |wanted: &Wanted| {
            let left = left(wanted);
            let cidrs = left.entries.iter().map(|entry| entry.cidr.to_string());
            cidrs.collect::<Vec<_>>()
        };
        let runtime = Wanted {
            runtime: true,
            ..Wanted::default()
        };
        let file = Wanted {
            file: true,
            ..Wanted::default()
        };
        assert_eq!(cidrs(&runtime), ["10.2.0.0/16"]);
        assert_eq!(cidrs(&file), ["10.1.0.0/16"]);
        let unknown = Wanted {
            policy: "unknown".parse().ok(),
            ..Wanted::default()
        };
        assert!(Left::of(found(), agent.clone(), &unknown).is_err());
    }

    #[test]
    fn reading_runtime_entries_moves_no_file() {
        let (dir, agent) = state("10.2.0.0/16");
        let file = dir.path().join("manual.json");
        std::fs::write(&file, "{").unwrap();
        let left = Left::of(found(), agent.clone(), &Wanted::default()).unwrap();
        assert!(text(&left, None).contains("10.1.0.0/16  near    -       3     holdout"));
        let runtime = Wanted {
            runtime: true,
            ..Wanted::default()
        };
        assert!(Left::of(found(), agent, &runtime).is_err());
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "{");
    }
}
