//! `rto-agent check`.

use std::process::ExitCode;

mod answer;
mod fleet;
mod host;

use rto_agent_core::{
    config::{Config, ConfigError, ConfigErrors},
    printable::counted,
};
use rto_agent_kernel::{datapath::probe, kernel::facts::host_facts};

use self::answer::{Answer, good, refused, summary};
use super::{print, print_coloured, table};
use crate::cli::Check;

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
