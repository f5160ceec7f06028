//! Checks that the kernel is as desired, as other processes change it, and repairs what is not.

use std::{sync::Arc, time::Instant};

use rto_agent_core::{
    policy::{Cidr, HostFacts, PolicyName, ProbeTarget, differences::Differences},
    wire::types::{VerifyAnswer, now_s},
};
use rto_agent_kernel::{datapath::left_set, kernel::facts::host_facts};
use tracing::{error, info, warn};

use super::{
    audit::{Cause, Source},
    change::{Engine, Persist},
    comparison::answer,
};

/// Repairs what other processes changed, retries what failed, and looks for changes of the host.
pub(super) fn check(engine: &mut Engine) {
    engine.events.end_if_unwatched();
    let desired = &engine.resolved.desired;
    engine.store.retry(&desired.runtime, engine.detachment.by);
    if engine.detachment.by.is_some() {
        look_at_programs(engine);
        engine.publish();
        return;
    }
    repair(engine);
    consider_probe(engine);
    look_at_schedules(engine);
    match host_facts(&engine.config.features) {
        Ok(host) if host != engine.desired().host => take_host(engine, host),
        Ok(_) => engine.problems.host = Default::default(),
        Err(e) => warn!("{e}"),
    }
    engine.publish();
    compare_next(engine);
}

fn take_host(engine: &mut Engine, host: HostFacts) {
    // Set even if the policies cannot be computed for the new settings.
    engine.kernel.set_host_defaults(host);
    let next = engine.desired().with_host(host);
    let changed = engine.change(&next, &Persist::Later, &Source::Host.into());
    if changed.is_ok() {
        info!(?host, "the host's TCP settings changed");
    }
    let problem = changed.err().map(|e| {
        format!("the host's TCP settings changed, and the policies could not be updated: {e}")
    });
    let known = &mut engine.problems.host;
    known.becomes(problem, |text| error!("{text}"));
}

/// Reports a kernel on which options of a moment stayed on a socket.
fn look_at_schedules(engine: &mut Engine) {
    let found = left_set(&engine.kernel.options.pin_dir).unwrap_or_default();
    let text = (found != 0).then(|| {
        format!(
            "{found} sockets kept a TCP_USER_TIMEOUT of the SYN schedule: this kernel or another program does not \
             let the program take it back, so SYNs have the kernel's doubling from initial_rto on"
        )
    });
    let known = &mut engine.problems.unshaped;
    known.becomes(text, |text| warn!("{text}"));
}

/// Updates which programs are attached at the cgroup and above.
pub(super) fn look_at_programs(engine: &mut Engine) {
    let own = engine.kernel.reader();
    let own = own.and_then(|reader| reader.attachment().program_id);
    let options = &engine.kernel.options;
    engine.probing.look(&options.cgroup, &options.pin_dir, own);
}

/// Begins a probe if one is needed.
pub(super) fn consider_probe(engine: &mut Engine) {
    look_at_programs(engine);
    if engine.detachment.by.is_none() {
        let resolved = &engine.resolved;
        let in_force = |name: &PolicyName| {
            let jiffies = resolved.policies.get(name)?.kernel.initial_rto_jiffies;
            (jiffies != 0).then_some(u64::from(jiffies))
        };
        let host = &resolved.desired.host;
        let target = ProbeTarget::by(&resolved.set, host, in_force);
        let cgroup = &engine.kernel.options.cgroup;
        engine.probing.consider(cgroup, target);
    }
}

/// Compares the kernel with the desired state and repairs differences. The caller publishes.
pub(super) fn verify(engine: &mut Engine) -> VerifyAnswer {
    let (begin, at_s) = (Instant::now(), now_s());
    let resolved = engine.resolved.clone();
    let Some(reader) = engine.attached_reader() else {
        let problem = engine.kernel.detached(engine.connecting()).problem;
        let problems = Vec::from_iter(problem);
        let is_attached = engine.detachment.by.is_none();
        let repaired = is_attached && engine.kernel.problems().next().is_none();
        return answer(&resolved, Differences::default(), problems, repaired);
    };
    let mut problems = Vec::from_iter(reader.attachment().problem);
    let differences = engine.kernel.verify(&resolved);
    if !problems.is_empty() || engine.kernel.out_of_sync.is_some() {
        repair(engine);
    }
    let repaired = engine.kernel.problems().next().is_none();
    problems.extend(engine.kernel.problems().cloned());
    engine.comparing.all_compared(at_s, begin.elapsed());
    answer(&resolved, differences, problems, repaired)
}

/// Repairs changes that other processes made to these entries. Called before a change, as its plan
/// assumes that the maps hold what was last written.
pub(super) fn verify_entries(engine: &mut Engine, cidrs: &[Cidr], policy: &PolicyName) {
    let maps = &engine.resolved.maps;
    let reader = engine.attached_reader();
    let found = reader.map(|reader| reader.finds(maps, cidrs, policy));
    if matches!(found, Some(Ok(false))) && engine.detachment.restoring.is_none() {
        verify(engine);
    }
}

/// Begins to compare the next part of the kernel's maps.
pub(super) fn compare_next(engine: &mut Engine) {
    let snapshot: Arc<_> = engine.snapshots.borrow().clone();
    engine.comparing.consider(&snapshot);
}

/// Attaches again if necessary, and rewrites what differs. The caller publishes.
fn repair(engine: &mut Engine) {
    let Some(change) = engine.kernel.repair(&engine.resolved) else {
        return;
    };
    engine.probing.invalidate();
    let cause = Cause::from(Source::Repair);
    cause.audit(&change);
    // Connections may have begun without a policy while detached.
    engine.apply_to_open(&cause);
}
