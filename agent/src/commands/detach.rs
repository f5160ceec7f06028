//! `rto-agent detach`.

use std::process::ExitCode;

use anyhow::Context as _;

use super::print;
use crate::{
    api::{
        client::{Client, ClientError},
        types::DetachAnswer,
    },
    cli::Detach,
    config::{AgentConfig, Config},
    daemon::lock::InstanceLock,
    engine::remove_pins,
};

pub(super) fn run(args: &Detach) -> anyhow::Result<ExitCode> {
    let agent = agent_config(args)?;
    let socket = args.socket.as_ref().unwrap_or(&agent.socket);
    let answer = match Client::new(socket).post("/v1/detach", &()) {
        Ok(answer) => answer,
        Err(ClientError::NotRunning { .. }) => alone(&agent)?,
        Err(e) => return Err(e.into()),
    };
    print(args.output.json, &answer, || text(&answer))?;
    Ok(ExitCode::SUCCESS)
}

/// A host without configuration can still have pins: then the defaults are meant.
fn agent_config(args: &Detach) -> anyhow::Result<AgentConfig> {
    let path = &args.config.config;
    let mut agent = if path.exists() {
        Config::load_agent(path)?
    } else {
        AgentConfig::default()
    };
    if let Some(pin_dir) = &args.pin_dir {
        agent.pin_dir.clone_from(pin_dir);
    }
    Ok(agent)
}

/// No daemon answers: remove the pins, unless one holds the lock all the same.
fn alone(agent: &AgentConfig) -> anyhow::Result<DetachAnswer> {
    let _lock = InstanceLock::take(&agent.state_dir, &agent.pin_dir)
        .context("no daemon answers at the socket, and yet one seems to run")?;
    let removed = remove_pins(&agent.pin_dir)?;
    Ok(DetachAnswer {
        removed,
        by_daemon: false,
    })
}

fn text(answer: &DetachAnswer) -> String {
    let removed = &answer.removed;
    let mut text = match (removed.links, removed.generations.len()) {
        (0, 0) => "nothing was attached\n".to_owned(),
        (links, sets) => format!("detached: {links} link(s) and {sets} set(s) of maps removed\n"),
    };
    if answer.by_daemon {
        text.push_str(
            "the daemon runs on with nothing in force; rto-agent reload attaches again\n",
        );
    }
    for path in &removed.left {
        text.push_str(&format!("left, not ours: {}\n", path.display()));
    }
    text
}
