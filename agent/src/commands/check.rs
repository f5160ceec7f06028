//! `rto-agent check`.

use std::process::ExitCode;

use anyhow::Context as _;
use rto_agent_core::{
    config::{Config, ConfigError, ConfigErrors},
    policy::{HostFacts, compile::settings_text},
    printable::counted,
};
use rto_agent_kernel::{
    datapath::probe,
    kernel::{facts::host_facts, hz},
};

mod answer;
mod fleet;
pub(super) mod host;

use self::answer::{Answer, good, refused, summary};
use super::{known_rtt, print, print_coloured, table};
use crate::{
    cli::{Check, WideArg},
    client::Client,
};

pub(super) fn run(args: &Check) -> anyhow::Result<ExitCode> {
    let host = match args.kernel {
        None => host_facts(&probe::features())?,
        Some(kernel) => HostFacts::of_kernel(kernel, hz::measure().context("give --hz")?),
    };
    let host = HostFacts {
        hz: args.hz.unwrap_or(host.hz),
        ..host
    };
    if let Some(dir) = &args.fleet {
        return fleet::run(dir, &host, args);
    }
    let path = &args.config.config;
    let is_here = args.kernel.is_none() && args.hz.is_none();
    let loaded = Config::load(path, &host).and_then(|mut config| {
        if !is_here {
            return Ok(config);
        }
        let counted = known_rtt::ask(Client::new(&config.agent.socket));
        let short = counted.map(|counted| known_rtt::warnings(&config.set, &counted, &host));
        config.warnings.extend(short.into_iter().flatten());
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
            let wide = WideArg { wide: false };
            print_coloured(args.output.json, &answer, args.color, wide, |_| {
                text(&answer, args.verbose)
            })
        }
        Err(errors) if args.output.json => {
            print(true, &refused(errors.0, host), String::new)?;
            Ok(ExitCode::FAILURE)
        }
        Err(errors) => Err(errors.into()),
    }
}

fn text(answer: &Answer, verbose: bool) -> String {
    let mut text = String::new();
    for (name, policy) in &answer.policies {
        let entries = counted(policy.entries, "entry", "entries");
        if verbose {
            text.push_str(&format!("policy {name}: {entries}\n"));
            text.push_str(&table::effects(&policy.effects, answer.host.hz, "  "));
        } else {
            let settings = settings_text(&policy.effects);
            text.push_str(&format!("policy {name}: {entries}; {settings}\n"));
        }
    }
    text.push_str(&table::remarks("warning", &answer.warnings));
    for (name, _) in answer
        .policies
        .iter()
        .filter(|(_, policy)| policy.entries == 0)
    {
        text.push_str(&format!(
            "warning: policy {name} has no cidrs: only entries of rto-agent add use it\n"
        ));
    }
    if !answer.host.shapes_syns && !verbose {
        text.push_str(
            "warning: the interval between SYNs doubles on this kernel (rto-agent doctor says \
             why; check --verbose shows what that costs in outages)\n",
        );
    }
    text.push_str(&summary(answer));
    text
}
