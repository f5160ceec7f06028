//! Rules between settings.

use std::time::Duration;

use rto_model::syn;

use super::{Compiler, RTO_MAX, SettingError, TIMEOUT_MIN};
use crate::policy::{
    Effect, SETTINGS, Settings,
    units::{format_duration, quantise},
};

/// How long a peer with the kernel's defaults may delay an ACK (`TCP_DELACK_MIN`).
const PEER_DELACK: Duration = Duration::from_millis(40);

impl Compiler<'_> {
    /// Rules between settings.
    pub(super) fn check_constraints(&mut self, settings: &Settings) {
        let hz = self.host.hz;
        if settings.sets_nothing() {
            let alone = SETTINGS
                .iter()
                .filter(|s| s.effect != Effect::Nothing && s.with.is_none());
            let names: Vec<_> = alone.map(|setting| setting.key.name).collect();
            let names = names.join(", ");
            let reason = format!("the policy sets nothing; give it at least one of {names}");
            self.errors.push(SettingError {
                given: None,
                reason,
            });
        }
        if let Some(rto_max) = settings.rto_max {
            for (name, value) in settings
                .fixed_timers()
                .filter(|(_, value)| *value > rto_max)
            {
                let reason = format!("it is below {name} = {}; raise it", format_duration(value));
                self.in_range("rto_max", rto_max, false, &reason);
            }
        }
        if let (Some(rto_min), Some(delack)) = (settings.rto_min, settings.delack_max) {
            let (rto_min_q, delack_q) = (quantise(rto_min, hz), quantise(delack, hz));
            let text = format_duration(rto_min);
            if delack_q.jiffies == TIMEOUT_MIN && rto_min_q.jiffies == TIMEOUT_MIN {
                self.warnings.push(format!(
                    "rto_min = {text} and delack_max = {} are both the smallest possible value: an \
                     ACK may arrive as late as the timeout, so that a segment is sent twice; a \
                     larger rto_min avoids this",
                    format_duration(delack)
                ));
            } else if delack_q.jiffies >= rto_min_q.jiffies {
                let reason = format!(
                    "an ACK that is delayed as long as rto_min = {text} causes spurious \
                     retransmissions of a peer with the same policy; set a shorter delack_max"
                );
                self.in_range("delack_max", delack, false, &reason);
            }
        }
        let bare = settings.rto_min.filter(|_| settings.delack_max.is_none());
        if let Some(rto_min) = bare.filter(|rto_min| *rto_min <= PEER_DELACK) {
            self.warnings.push(format!(
                "rto_min = {} without delack_max: segments to peers that delay ACKs by up to {} \
                 (the default, for example hosts without this policy) will be sent twice; set a \
                 delack_max below it on both ends, or an rto_min above {}",
                format_duration(rto_min),
                format_duration(PEER_DELACK),
                format_duration(PEER_DELACK),
            ));
        } else if let Some(rto_min) = bare.filter(|_| settings.rto_restart == Some(true)) {
            self.warnings.push(format!(
                "rto_restart = true without delack_max: segments to peers that are more than {} \
                 away and delay ACKs by up to {} (the default, for example hosts without this \
                 policy) will be sent twice; set a delack_max on both ends",
                format_duration(rto_min.saturating_sub(PEER_DELACK)),
                format_duration(PEER_DELACK),
            ));
        }
        let capped = settings.rto_max.filter(|rto_max| *rto_max < RTO_MAX);
        if let Some(rto_max) = capped {
            self.warnings.push(format!(
                "rto_max = {}: an established connection without an answer ends after about {} \
                 (net.ipv4.tcp_retries2 = {TCP_RETRIES2}) instead of {} with the kernel's own \
                 rto_max; raise net.ipv4.tcp_retries2",
                format_duration(rto_max),
                format_duration(lifetime(rto_max)),
                format_duration(lifetime(RTO_MAX)),
            ));
        }
        if let Some(user_timeout) = settings.user_timeout {
            self.warnings.push(format!(
                "user_timeout = {}: it also ends a connection whose receiver reads nothing for that \
                 long, and replaces the number of keepalive probes (TCP_KEEPCNT)",
                format_duration(user_timeout),
            ));
        }
        if settings.thin_linear == Some(true) && self.host.is_bbr_default {
            self.warnings.push(
                "thin_linear = true: no effect on connections with BBR, the default of this host \
                 (net.ipv4.tcp_congestion_control), under which no stream counts as thin"
                    .to_owned(),
            );
        }
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
