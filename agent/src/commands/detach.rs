//! `rto-agent detach` and `attach`.

use std::{path::PathBuf, process::ExitCode, time::Duration};

use anyhow::Context as _;
use rto_agent_core::{
    config::{AgentConfig, Config},
    printable::{self, counted},
    wire::{
        kernel::Removed,
        types::{Caller, ChangeAnswer, DetachAnswer, DetachRequest, NotLasting, WalkView},
    },
};
use rto_agent_daemon::{
    daemon::resolve_cgroup,
    engine::{
        DRAIN_LIMIT, DetachMark, drain, for_restoring, left_draining, remove_kept_pins,
        remove_links, remove_others, remove_pins, walk,
    },
    lock::InstanceLock,
};
use rto_agent_kernel::{
    datapath::{other_programs, walk::Mode},
    kernel::{interference, privileges},
};

use super::{exit, print, print_table, table};
use crate::{
    cli::{Attach, ConfigArg, Detach},
    client::{Client, ClientError},
};

pub(super) fn run(args: &Detach) -> anyhow::Result<ExitCode> {
    let mut agent = agent_config(&args.config)?;
    if let Some(pin_dir) = &args.pin_dir {
        agent.pin_dir.clone_from(pin_dir);
    }
    let socket = args.socket.as_ref().unwrap_or(&agent.socket);
    let request = DetachRequest {
        restore: args.restore,
    };
    let answer = match Client::new(socket).post("/v1/detach", &request) {
        Ok(answer) => answer,
        Err(ClientError::NotRunning { .. }) => alone(&agent, args)?,
        Err(e) => return Err(e.into()),
    };
    let answer = finish(answer, &agent)?;
    print_table(args.output.json, &answer, args.table, |columns| {
        text(&answer, columns)
    })?;
    Ok(exit(answer.kept.is_none()))
}

/// `rto-agent attach`. If no daemon runs, the next start attaches.
pub(super) fn attach(args: &Attach) -> anyhow::Result<ExitCode> {
    let agent = agent_config(&args.config)?;
    let socket = args.socket.as_ref().unwrap_or(&agent.socket);
    let answer = match Client::new(socket).post::<ChangeAnswer>("/v1/attach", &()) {
        Err(ClientError::NotRunning { .. }) => {
            anyhow::ensure!(
                agent.attach,
                "no daemon is running, and attach = false in [agent]: set it to true"
            );
            DetachMark::new(&agent).clear()?;
            ChangeAnswer {
                notes: vec!["no daemon is running; the next start attaches".to_owned()],
                ..ChangeAnswer::default()
            }
        }
        answer => answer?,
    };
    print(args.output.json, &answer, || answer.notes.join("\n") + "\n")
}

fn this_caller() -> Caller {
    Caller {
        uid: nix::unistd::getuid().as_raw(),
        pid: nix::unistd::getpid().as_raw(),
    }
}

/// As root, restores what a daemon without the privileges could not. (Not if a socket in use
/// delayed the daemon: it would delay this process as well.)
fn finish(mut answer: DetachAnswer, agent: &AgentConfig) -> anyhow::Result<DetachAnswer> {
    let (Some(pin_dir), Some(first)) = (answer.kept.clone(), &answer.restored) else {
        return Ok(answer);
    };
    if !answer.by_daemon || first.running || !privileges::has(privileges::cap::SYS_ADMIN) {
        return Ok(answer);
    }
    let walkers = for_restoring(&pin_dir, cgroup_of(agent).as_deref(), Mode::Restore)?;
    if walkers.is_empty() {
        // The daemon's pins are not visible here, because it runs in another mount namespace.
        return Ok(answer);
    }
    let mut second = walk::restore(walkers)?;
    second.add_counts_of(first);
    if second.is_complete() && answer.connecting != 0 {
        // The daemon's program stays for them.
        answer.kept = None;
    } else if second.is_complete()
        && let Some(removed) = remove_kept_pins(&pin_dir)?
    {
        answer.removed = removed;
        // The daemon has already removed its link.
        answer.removed.links = answer.removed.links.max(1);
        answer.kept = None;
    }
    answer.restored = Some(second);
    Ok(answer)
}

/// A host without a configuration can still have pins, in the default directory.
fn agent_config(ConfigArg { config }: &ConfigArg) -> anyhow::Result<AgentConfig> {
    Ok(match config.exists() {
        true => Config::load_agent(config)?,
        false => AgentConfig::default(),
    })
}

/// The cgroup for whose sockets the agent's program ran; `None` if the cgroup is gone.
fn cgroup_of(agent: &AgentConfig) -> Option<PathBuf> {
    resolve_cgroup(None, &agent.cgroup).ok()
}

/// Removes the pins if no daemon answers, unless another process holds the lock.
fn alone(agent: &AgentConfig, args: &Detach) -> anyhow::Result<DetachAnswer> {
    let _lock = InstanceLock::take(&agent.state_dir, &agent.pin_dir)
        .context("no daemon answers at the socket, but one seems to be running")?;
    let not_lasting = DetachMark::new(agent).set(this_caller());
    detach(agent, args, not_lasting)
        .context("the next start attaches no policy until rto-agent attach, but")
}

fn detach(
    agent: &AgentConfig,
    args: &Detach,
    not_lasting: Option<NotLasting>,
) -> anyhow::Result<DetachAnswer> {
    let cgroup = cgroup_of(agent);
    let connecting = drain(&agent.pin_dir, DRAIN_LIMIT)?;
    let mut unlinked = 0;
    let restored = if args.restore {
        let walkers = for_restoring(&agent.pin_dir, cgroup.as_deref(), Mode::Restore)?;
        if connecting == 0 {
            unlinked = remove_links(&agent.pin_dir)?;
        }
        Some(walk::restore(walkers)?)
    } else {
        None
    };
    let complete = restored.as_ref().is_none_or(WalkView::is_complete);
    let mut removed = if complete && connecting == 0 {
        remove_pins(&agent.pin_dir)?
    } else {
        Removed::default()
    };
    removed.links += unlinked;
    let mut answer = DetachAnswer {
        removed,
        by_daemon: false,
        kept: (!complete).then(|| agent.pin_dir.clone()),
        restored,
        connecting,
        notes: (connecting != 0)
            .then(|| left_draining(connecting))
            .into_iter()
            .collect(),
        not_lasting,
    };
    if let Some(cgroup) = cgroup {
        let others = other_programs(&agent.pin_dir, None, &cgroup);
        remove_others(&others, &mut answer);
        // A child left by a killed probe ends by itself a moment later.
        let _ = (0..100).any(|_| {
            interference::sweep(&cgroup) || {
                std::thread::sleep(Duration::from_millis(20));
                false
            }
        });
    }
    Ok(answer)
}

fn text(answer: &DetachAnswer, columns: Option<usize>) -> String {
    let removed = &answer.removed;
    let mut text = match (removed.links, removed.generations.len()) {
        _ if answer.kept.is_some() || answer.connecting != 0 => "detached\n".to_owned(),
        (0, 0) => "nothing was attached\n".to_owned(),
        _ if answer.by_daemon => "detached\n".to_owned(),
        (links, sets) => format!(
            "detached: {} and {} of maps removed\n",
            counted(links, "link", "links"),
            counted(sets, "set", "sets")
        ),
    };
    let what = match answer.by_daemon {
        true => "statistics and learnt values are kept; ",
        false => "",
    };
    text.push_str(&match &answer.not_lasting {
        None => format!("{what}no policy is active until rto-agent attach, also after a restart\n"),
        Some(not_lasting) => format!(
            "{what}no policy is active until rto-agent attach or {}: the detachment cannot be \
             kept: {}\n",
            not_lasting.until, not_lasting.why
        ),
    });
    text.push_str(&table::remarks("note", &answer.notes));
    if let Some(restored) = &answer.restored {
        text.push_str("restored on open sockets:\n");
        text.push_str(&table::walk(restored, columns));
    }
    if let Some(kept) = &answer.kept {
        text.push_str(&format!(
            "some sockets could not be restored: {} is kept; run rto-agent detach --restore as \
             root to finish\n",
            printable::path(kept)
        ));
    }
    for path in &removed.left {
        text.push_str(&format!(
            "left in place, not created by rto-agent: {}\n",
            printable::path(path)
        ));
    }
    text
}
