//! The `syn_retries` setting: when connect() gives up. The program converts it to a
//! TCP_SYNCNT at a connection's first loss.

use rto_agent_common::policy_flags;
use rto_model::syn::{self, SynTimers};

use super::compiler::Compiler;
use crate::policy::{Settings, SynRetries, units::quantise};

pub(super) fn syn_retries(compiler: &mut Compiler<'_>, settings: &Settings) {
    let hz = u64::from(compiler.host.hz);
    let rto_max = match settings.rto_max {
        Some(rto_max) => quantise(rto_max, compiler.host.hz).jiffies,
        None => syn::RTO_MAX_S * hz,
    };
    let own = compiler.host.tcp_syn_retries;
    let kernel = SynTimers::kernel(hz, own, compiler.host.tcp_syn_linear_timeouts);
    let timers = SynTimers {
        initial_rto: compiler.active.unwrap_or(hz),
        rto_max,
        ..kernel
    };
    let seconds = |timers: SynTimers| format!("{}s", timers.gives_up() / hz);
    let without = seconds(kernel);
    let (asked, effective, count, timers) = match settings.syn_retries {
        SynRetries::Fixed(n) => {
            compiler.kernel.syn_retries = n.into();
            let timers = SynTimers {
                syn_retries: n,
                ..timers
            };
            (n.to_string(), n.to_string(), Some(n), timers)
        }
        SynRetries::Keep => (
            "keep".to_owned(),
            "the socket's own".to_owned(),
            None,
            timers,
        ),
        // With the kernel's timers or longer ones, connect() does not give up earlier.
        SynRetries::Auto
            if (timers.initial_rto >= hz && rto_max >= kernel.rto_max)
                || !compiler.errors.is_empty() =>
        {
            return;
        }
        SynRetries::Auto => {
            let note = format!("connect() gives up after {without}, as without the agent");
            compiler.effect("syn_retries", "auto").note = Some(note);
            return;
        }
    };
    compiler.kernel.flags |= policy_flags::GIVES_UP_BY_TIMER;
    let note = format!(
        "connect() gives up after {}; without the agent after {without}",
        seconds(timers)
    );
    let effect = compiler.effect("syn_retries", &asked);
    effect.effective = effective;
    effect.count = count;
    effect.note = Some(note);
    if timers.gives_up() < kernel.gives_up() {
        let gives_up = seconds(timers);
        compiler.warn(|terms| {
            let asked = terms.with("syn_retries", &asked);
            format!(
                "{asked}: connect() gives up after {gives_up} instead of {without}; \"auto\" \
                 keeps the kernel's time"
            )
        });
    }
}
