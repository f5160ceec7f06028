//! The settings of established connections.

use std::{ops::RangeInclusive, time::Duration};

use rto_agent_common::{policy_flags, restart};

use super::compiler::{Compiler, RTO_MAX, TIMEOUT_MIN};
use crate::policy::{
    Remark, Settings,
    units::{format_duration, jiffies_duration, jiffies_to_usecs, quantise},
};

/// `TCP_RTO_MIN` and `TCP_DELACK_MAX`: the largest value TCP_BPF_RTO_MIN and TCP_BPF_DELACK_MAX take.
const BPF_TIMER_MAX: Duration = Duration::from_millis(200);
/// Smallest value of TCP_RTO_MAX_MS.
const RTO_MAX_MIN: Duration = Duration::from_secs(1);
/// 1 to TCP_THIN_LINEAR_RETRIES (include/net/tcp.h, Linux 6.12).
const LINEAR_RETRIES: RangeInclusive<u8> = 1..=6;

/// Compiles the timers of established connections.
pub(super) fn timers(compiler: &mut Compiler<'_>, settings: &Settings) {
    if let Some(asked) = settings.rto_min {
        compiler.kernel.rto_min_us = bpf_timer(compiler, "rto_min", asked);
    }
    if let Some(on) = settings.rto_restart {
        rto_restart(compiler, on, settings.rto_min);
    }
    if let Some(asked) = settings.delack_max {
        compiler.kernel.delack_max_us = bpf_timer(compiler, "delack_max", asked);
    }
    if let Some(asked) = settings.rto_max {
        let range = (RTO_MAX_MIN..=RTO_MAX).contains(&asked) && is_whole_ms(asked);
        let reason = "must be 1s to 120s, in whole milliseconds";
        if !compiler.host.has_rto_max {
            let reason = "this kernel has no TCP_RTO_MAX_MS (Linux 6.15 and later); remove the \
                          setting";
            compiler.in_range("rto_max", asked, false, reason);
        } else if compiler.in_range("rto_max", asked, range, reason) {
            let jiffies = compiler.quantised("rto_max", asked);
            // jiffies_to_msecs() rounds up, unlike jiffies_to_usecs() below.
            let millis = (jiffies * 1_000).div_ceil(u64::from(compiler.host.hz));
            compiler.kernel.rto_max_ms = u32::try_from(millis).unwrap_or(u32::MAX);
        }
    }
}

/// Compiles the other settings of established connections.
pub(super) fn others(compiler: &mut Compiler<'_>, settings: &Settings) {
    if let Some(asked) = settings.user_timeout {
        let range = !asked.is_zero() && asked.as_millis() <= i32::MAX as u128 && is_whole_ms(asked);
        let reason = "must be 1ms to 24 days, in whole milliseconds";
        if compiler.in_range("user_timeout", asked, range, reason) {
            let effect = compiler.effect("user_timeout", format_duration(asked));
            effect.note = Some("once established".to_owned());
            compiler.kernel.user_timeout_ms = milliseconds(asked);
        }
    }
    if let Some(on) = settings.thin_linear {
        if compiler.host.has_bpf_thin_linear {
            let flag = if on { policy_flags::THIN_LINEAR } else { 0 };
            compiler.kernel.flags |= policy_flags::THIN_LINEAR_SET | flag;
            compiler.effect("thin_linear", on);
        } else {
            let reason = "an eBPF program cannot set it on this kernel (Linux 6.1 and later); \
                          remove the setting";
            compiler.refuse("thin_linear", on, reason);
        }
    }
    if let Some(retries) = settings.linear_retries {
        linear_retries(compiler, retries, settings.thin_linear);
    }
}

fn rto_restart(compiler: &mut Compiler<'_>, on: bool, rto_min: Option<Duration>) {
    let note = format!(
        "rto_min minus the smoothed RTT while fewer than {} segments are outstanding \
         (experimental)",
        restart::THRESHOLD
    );
    if !on {
        compiler.effect("rto_restart", "off");
    } else if rto_min.is_some() {
        compiler.kernel.restart_hz = u16::try_from(compiler.host.hz).unwrap_or(u16::MAX);
        compiler.effect("rto_restart", "on").note = Some(note);
    } else {
        let reason = Remark::new(|terms| {
            format!(
                "it lowers {rto_min} by the smoothed RTT, but the policy has no {rto_min}; add \
                 one, for example {}",
                terms.quoted("rto_min", "100ms"),
                rto_min = terms.name("rto_min")
            )
        });
        compiler.refuse("rto_restart", on, reason);
    }
}

fn linear_retries(compiler: &mut Compiler<'_>, retries: u8, thin_linear: Option<bool>) {
    let reason = if !LINEAR_RETRIES.contains(&retries) {
        "must be 1 to 6: after 6 timeouts the kernel itself ends linear mode".into()
    } else if thin_linear != Some(true) {
        Remark::new(|terms| {
            format!(
                "it sets when linear mode ends, but linear mode is not enabled; add {}",
                terms.with("thin_linear", true)
            )
        })
    } else {
        compiler.kernel.linear_retries = retries.into();
        let effect = compiler.effect("linear_retries", retries);
        effect.count = Some(retries);
        effect.note = Some("consecutive timeouts before the interval doubles".to_owned());
        return;
    };
    compiler.refuse("linear_retries", retries, reason);
}

/// TCP_BPF_RTO_MIN and TCP_BPF_DELACK_MAX: `usecs_to_jiffies(value)` must be at least
/// TCP_TIMEOUT_MIN and at most TCP_RTO_MIN (net/core/filter.c, `bpf_sol_tcp_setsockopt()`, 6.12).
fn bpf_timer(compiler: &mut Compiler<'_>, setting: &'static str, asked: Duration) -> u32 {
    let hz = compiler.host.hz;
    let rounded = quantise(asked, hz);
    let good = rounded.jiffies >= TIMEOUT_MIN && asked <= BPF_TIMER_MAX;
    let reason = format!(
        "must be 2 jiffies to 200ms: more than {} at HZ={hz}",
        format_duration(jiffies_duration(TIMEOUT_MIN - 1, hz))
    );
    if !compiler.in_range(setting, asked, good, reason) {
        return 0;
    }
    let jiffies = compiler.quantised(setting, asked);
    // As getsockopt() returns it.
    u32::try_from(jiffies_to_usecs(jiffies, hz)).unwrap_or(u32::MAX)
}

fn is_whole_ms(duration: Duration) -> bool {
    duration.subsec_nanos().is_multiple_of(1_000_000)
}

fn milliseconds(duration: Duration) -> u32 {
    u32::try_from(duration.as_millis()).unwrap_or(u32::MAX)
}
