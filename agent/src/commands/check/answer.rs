//! What `check` knows about a configuration.

use std::{collections::BTreeMap, path::PathBuf};

use rto_agent_core::{
    config::{Config, ConfigError},
    policy::{HostFacts, PolicyName, compile::EffectiveSetting},
    printable::{self, counted},
};
use serde::Serialize;

/// What `--json` prints.
#[derive(Serialize)]
pub(super) struct Answer {
    pub(super) ok: bool,
    pub(super) errors: Vec<ConfigError>,
    pub(super) warnings: Vec<String>,
    #[serde(serialize_with = "printable::serialize_paths")]
    pub(super) files: Vec<PathBuf>,
    pub(super) host: HostFacts,
    pub(super) entries: usize,
    pub(super) policies: BTreeMap<PolicyName, PolicyAnswer>,
}

#[derive(Serialize)]
pub(super) struct PolicyAnswer {
    pub(super) entries: usize,
    pub(super) effects: Vec<EffectiveSetting>,
}

pub(super) const fn refused(errors: Vec<ConfigError>, host: HostFacts) -> Answer {
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
pub(super) fn good(config: Config, host: HostFacts) -> Answer {
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

pub(super) fn summary(answer: &Answer) -> String {
    format!(
        "good: {}, {}, {}\n",
        counted(answer.entries, "entry", "entries"),
        counted(answer.policies.len(), "policy", "policies"),
        counted(answer.files.len(), "file", "files"),
    )
}
