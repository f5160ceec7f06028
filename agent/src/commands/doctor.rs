//! `rto-agent doctor`.

use std::{path::Path, process::ExitCode};

use super::{exit, print, terminal::coloured};
use crate::{
    api::client::Client,
    cli::Doctor,
    config::{AgentConfig, CgroupSetting, Config},
    datapath::{pinned_initial_rto, pinned_program_ids, probe},
    doctor::{Input, Severity, examine, render},
    engine::state_files,
    kernel::{
        cgroup,
        facts::host_facts,
        interference::{self, Verdict},
    },
    policy::{HostFacts, PolicySet, ProbeTarget, units::jiffies_to_usecs},
};

pub(super) fn run(args: &Doctor) -> anyhow::Result<ExitCode> {
    let path = &args.config.config;
    let features = probe::features();
    let facts = host_facts(&features);
    let loaded = match &facts {
        Ok(host) => Config::load(path, host).map_err(anyhow::Error::from),
        Err(e) => Err(anyhow::anyhow!("{e:#}")),
    };
    let agent = match &loaded {
        Ok(config) => config.agent.clone(),
        Err(_) => Config::load_agent(path).unwrap_or_else(|_| AgentConfig::default()),
    };
    let cgroup = args.cgroup.clone().or(match &agent.cgroup {
        CgroupSetting::Auto => None,
        CgroupSetting::Path(path) => Some(path.clone()),
    });
    let ours = pinned_program_ids(&agent.pin_dir);
    let set = loaded.as_ref().ok().map(|config| &config.set);
    let attached_to = cgroup::resolve(cgroup.as_deref()).ok();
    let verdict = match (&attached_to, &facts, set) {
        // Without a program of ours there every timer would be the kernel's own.
        (Some(cgroup), Ok(host), Some(set)) if !ours.is_empty() => {
            probe_timers(cgroup, &agent, set, host)
        }
        _ => None,
    };
    let report = examine(&Input {
        cgroup,
        ours,
        state_files: state_files(&agent),
        pin_dir: agent.pin_dir,
        features: &features,
        verdict,
        set,
        host: facts.as_ref().ok().copied(),
        exposed: loaded.as_ref().map_or(&[], |config| &config.exposed),
        config_error: loaded.as_ref().err().map(ToString::to_string),
    });
    print(args.output.json, &report, || {
        coloured(render(&report), args.color)
    })?;
    Ok(exit(report.worst != Severity::Problem))
}

/// Probes, and lets a daemon know what came of it. `None` if no entry has a timer to look at.
fn probe_timers(
    cgroup: &Path,
    agent: &AgentConfig,
    set: &PolicySet,
    host: &HostFacts,
) -> Option<Verdict> {
    let target = set.probe_target(host)?;
    // What is in force counts, which may be runtime entries, or files that were edited since.
    let jiffies = pinned_initial_rto(&agent.pin_dir, target.address)?;
    let target = ProbeTarget {
        initial_rto_us: jiffies_to_usecs(jiffies.into(), host.hz),
        ..target
    };
    let verdict = interference::probe(cgroup, &target);
    // Without a daemon, or as somebody else than root, there is nobody to tell.
    let _told = Client::new(&agent.socket).post::<()>("/v1/probe", &verdict);
    Some(verdict)
}
