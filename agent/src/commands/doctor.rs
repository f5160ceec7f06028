//! `rto-agent doctor`.

use std::process::ExitCode;

use super::print;
use crate::{
    cli::Doctor,
    config::{AgentConfig, CgroupSetting, Config},
    datapath::pinned_program_ids,
    doctor::{Input, Severity, examine, render},
    kernel::facts::host_facts,
};

pub(super) fn run(args: &Doctor) -> anyhow::Result<ExitCode> {
    let path = &args.config.config;
    let loaded = host_facts().and_then(|host| Ok(Config::load(path, &host)?));
    let agent = match &loaded {
        Ok(config) => config.agent.clone(),
        Err(_) => Config::load_agent(path).unwrap_or_else(|_| AgentConfig::default()),
    };
    let cgroup = args.cgroup.clone().or(match &agent.cgroup {
        CgroupSetting::Auto => None,
        CgroupSetting::Path(path) => Some(path.clone()),
    });
    let report = examine(&Input {
        cgroup,
        ours: pinned_program_ids(&agent.pin_dir),
        pin_dir: agent.pin_dir,
        set: loaded.as_ref().ok().map(|config| &config.set),
        config_error: loaded.as_ref().err().map(ToString::to_string),
    });
    print(args.output.json, &report, || render(&report))?;
    Ok(if report.worst == Severity::Problem {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    })
}
