//! `rto-agent check`.

use std::{collections::BTreeMap, path::PathBuf, process::ExitCode};

use serde::Serialize;

mod fleet;
mod host;

use rto_agent_core::{
    config::{Config, ConfigError, ConfigErrors},
    policy::{HostFacts, PolicyName, compile::EffectiveSetting},
    printable::{self, counted},
};
use rto_agent_kernel::{datapath::probe, kernel::facts::host_facts};

use super::{print, print_coloured, table};
use crate::cli::Check;

/// What `--json` prints.
#[derive(Serialize)]
struct Answer {
    ok: bool,
    errors: Vec<ConfigError>,
    warnings: Vec<String>,
    #[serde(serialize_with = "printable::serialize_paths")]
    files: Vec<PathBuf>,
    host: HostFacts,
    entries: usize,
    policies: BTreeMap<PolicyName, PolicyAnswer>,
}

#[derive(Serialize)]
struct PolicyAnswer {
    entries: usize,
    effects: Vec<EffectiveSetting>,
}

pub(super) fn run(args: &Check) -> anyhow::Result<ExitCode> {
    let host = host_facts(&probe::features())?;
    if let Some(dir) = &args.fleet {
        return fleet::run(dir, &host, args);
    }
    let path = &args.config.config;
    let loaded = Config::load(path, &host).and_then(|mut config| {
        let found = host::look(&config.agent);
        config.warnings.extend(found.notes);
        let errors = found.errors.into_iter();
        let errors: Vec<_> = errors.map(|e| ConfigError::whole(path, e)).collect();
        match errors.is_empty() {
            true => Ok(config),
            false => Err(ConfigErrors(errors)),
        }
    });
    match loaded {
        Ok(config) => {
            let answer = good(config, host);
            print_coloured(args.output.json, &answer, args.color, || text(&answer))
        }
        Err(errors) if args.output.json => {
            print(true, &refused(errors.0, host), String::new)?;
            Ok(ExitCode::FAILURE)
        }
        Err(errors) => Err(errors.into()),
    }
}

const fn refused(errors: Vec<ConfigError>, host: HostFacts) -> Answer {
    Answer {
        ok: false,
        errors,
        warnings: Vec::new(),
        files: Vec::new(),
        host,
        entries: 0,
        policies: BTreeMap::new(),
    }
}

/// The effect of a configuration on the host that it was read for.
fn good(config: Config, host: HostFacts) -> Answer {
    let mut counts: BTreeMap<&PolicyName, usize> = BTreeMap::new();
    for (_, entry) in config.set.entries.iter() {
        *counts.entry(entry.policy).or_default() += 1;
    }
    let policies = config.compiled.iter().map(|(name, compiled)| {
        let entries = counts.get(name).copied().unwrap_or(0);
        let effects = compiled.effects.clone();
        (name.clone(), PolicyAnswer { entries, effects })
    });
    Answer {
        ok: true,
        errors: Vec::new(),
        policies: policies.collect(),
        warnings: config.warnings,
        files: config.files,
        host,
        entries: config.set.entries.len(),
    }
}

fn text(answer: &Answer) -> String {
    let mut text = String::new();
    for (name, policy) in &answer.policies {
        let entries = counted(policy.entries, "entry", "entries");
        text.push_str(&format!("policy {name}: {entries}\n"));
        text.push_str(&table::effects(&policy.effects, answer.host.hz, "  "));
    }
    text.push_str(&table::remarks("warning", &answer.warnings));
    text.push_str(&summary(answer));
    text
}

fn summary(answer: &Answer) -> String {
    format!(
        "good: {}, {}, {}\n",
        counted(answer.entries, "entry", "entries"),
        counted(answer.policies.len(), "policy", "policies"),
        counted(answer.files.len(), "file", "files"),
    )
}
