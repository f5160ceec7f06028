//! `rto-agent apply` and `watch`: what is done with connections that are open.

use std::sync::Arc;

use rto_agent_core::{
    policy::PolicyName,
    wire::{
        events::StreamItem,
        types::{ApplyRequest, Caller, WalkView},
    },
};
use rto_agent_kernel::datapath::walk::Mode;
use tokio::sync::broadcast;

use super::{
    audit::Cause,
    change::Engine,
    error::{EngineError, refused},
};

/// `rto-agent apply`.
pub(super) fn walk(
    engine: &mut Engine,
    request: &ApplyRequest,
    by: Caller,
) -> Result<WalkView, EngineError> {
    if engine.walks.is_running() {
        return refused("open sockets are already being walked; see rto-agent status");
    }
    let mode = if request.new_only {
        Mode::ApplyToNew
    } else {
        Mode::Apply
    };
    engine.begin_walk(mode, &Cause::request(by))
}

/// `rto-agent watch`.
pub(super) fn watch(
    engine: &mut Engine,
    policy: Option<&PolicyName>,
) -> Result<broadcast::Receiver<Arc<StreamItem>>, EngineError> {
    let agent = &engine.config.config.agent;
    if !agent.statistics {
        return refused("no statistics: statistics = false in [agent]");
    }
    let policies = &engine.resolved.set.policies;
    if let Some(policy) = policy {
        let unmatched = agent.count_unmatched.then(PolicyName::unmatched);
        let known = || policies.keys().chain(&unmatched);
        if !known().any(|known| known == policy) {
            let known: Vec<_> = known().map(PolicyName::as_str).collect();
            return refused(format!(
                "no active policy {policy}; active policies: {}",
                known.join(", ")
            ));
        }
    }
    let host = &engine.resolved.desired.host;
    engine.events.subscribe(engine.kernel.kernel(), host)
}
