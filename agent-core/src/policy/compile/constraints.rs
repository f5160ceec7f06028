//! Rules between settings.

use std::time::Duration;

use rto_model::syn;

use super::compiler::{Compiler, RTO_MAX, SettingError, TIMEOUT_MIN};
use crate::policy::{
    Effect, Remark, SETTINGS, Settings,
    units::{format_duration, quantise},
};

/// How long a peer with the kernel's defaults may delay an ACK (`TCP_DELACK_MIN`).
const PEER_DELACK: Duration = Duration::from_millis(40);

/// Rules between settings.
pub(super) fn check_constraints(compiler: &mut Compiler<'_>, settings: &Settings) {
    let hz = compiler.host.hz;
    if settings.sets_nothing() {
        let alone = SETTINGS
            .iter()
            .filter(|s| s.effect != Effect::Nothing && s.with.is_none());
        let keys: Vec<_> = alone.map(|setting| setting.key.name).collect();
        let reason = Remark::new(|terms| {
            let names: Vec<_> = keys.iter().map(|key| terms.name(key)).collect();
            let names = names.join(", ");
            format!("the policy sets nothing; give it at least one of {names}")
        });
        compiler.errors.push(SettingError {
            given: None,
            reason,
        });
    }
    if let Some(rto_max) = settings.rto_max {
        for (name, value) in settings
            .fixed_timers()
            .filter(|(_, value)| *value > rto_max)
        {
            let reason = Remark::new(|terms| {
                let value = terms.with(name, format_duration(value));
                format!("it is below {value}; raise it")
            });
            compiler.in_range("rto_max", rto_max, false, reason);
        }
    }
    if let (Some(rto_min), Some(delack)) = (settings.rto_min, settings.delack_max) {
        let (rto_min_q, delack_q) = (quantise(rto_min, hz), quantise(delack, hz));
        if delack_q.jiffies == TIMEOUT_MIN && rto_min_q.jiffies == TIMEOUT_MIN {
            compiler.warn(|terms| {
                format!(
                    "{} and {} are both the smallest possible value: an ACK may arrive as late \
                     as the timeout, so that a segment is sent twice; a larger {} avoids this",
                    terms.with("rto_min", format_duration(rto_min)),
                    terms.with("delack_max", format_duration(delack)),
                    terms.name("rto_min")
                )
            });
        } else if delack_q.jiffies >= rto_min_q.jiffies {
            let reason = Remark::new(|terms| {
                format!(
                    "an ACK that is delayed as long as {} causes spurious retransmissions of a \
                     peer with the same policy; set a shorter {}",
                    terms.with("rto_min", format_duration(rto_min)),
                    terms.name("delack_max")
                )
            });
            compiler.in_range("delack_max", delack, false, reason);
        }
    }
    let bare = settings.rto_min.filter(|_| settings.delack_max.is_none());
    if let Some(rto_min) = bare.filter(|rto_min| *rto_min <= PEER_DELACK) {
        compiler.warn(|terms| {
            format!(
                "{} without {delack_max}: segments to peers that delay ACKs by up to {delay} \
                 (the default, for example hosts without this policy) will be sent twice; set \
                 a {delack_max} below it on both ends, or an {} above {delay}",
                terms.with("rto_min", format_duration(rto_min)),
                terms.name("rto_min"),
                delack_max = terms.name("delack_max"),
                delay = format_duration(PEER_DELACK),
            )
        });
    } else if let Some(rto_min) = bare.filter(|_| settings.rto_restart == Some(true)) {
        compiler.warn(|terms| {
            format!(
                "{} without {delack_max}: segments to peers that are more than {} away and \
                 delay ACKs by up to {} (the default, for example hosts without this policy) \
                 will be sent twice; set a {delack_max} on both ends",
                terms.with("rto_restart", true),
                format_duration(rto_min.saturating_sub(PEER_DELACK)),
                format_duration(PEER_DELACK),
                delack_max = terms.name("delack_max"),
            )
        });
    }
    let capped = settings.rto_max.filter(|rto_max| *rto_max < RTO_MAX);
    if let Some(rto_max) = capped {
        compiler.warn(|terms| {
            format!(
                "{}: an established connection without an answer ends after about {} \
                 (net.ipv4.tcp_retries2 = {TCP_RETRIES2}) instead of {} with the kernel's own \
                 {}; raise net.ipv4.tcp_retries2",
                terms.with("rto_max", format_duration(rto_max)),
                format_duration(lifetime(rto_max)),
                format_duration(lifetime(RTO_MAX)),
                terms.name("rto_max"),
            )
        });
    }
    if let Some(user_timeout) = settings.user_timeout {
        compiler.warn(|terms| {
            format!(
                "{}: it also ends a connection whose receiver reads nothing for that long, and \
                 replaces the number of keepalive probes (TCP_KEEPCNT)",
                terms.with("user_timeout", format_duration(user_timeout)),
            )
        });
    }
    if settings.thin_linear == Some(true) && compiler.host.is_bbr_default {
        compiler.warn(|terms| {
            format!(
                "{}: no effect on connections with BBR, the default of this host \
                 (net.ipv4.tcp_congestion_control), under which no stream counts as thin",
                terms.with("thin_linear", true)
            )
        });
    }
}

/// The kernel's default of net.ipv4.tcp_retries2.
const TCP_RETRIES2: u8 = 15;

/// How long an established connection waits for an ACK (`retransmits_timed_out()`, which starts at
/// TCP_RTO_MIN).
pub(super) fn lifetime(rto_max: Duration) -> Duration {
    const RTO_MIN_MS: u64 = 200;
    let rto_max_ms = u64::try_from(rto_max.as_millis()).unwrap_or(u64::MAX);
    Duration::from_millis(syn::model_timeout(RTO_MIN_MS, rto_max_ms, TCP_RETRIES2))
}
