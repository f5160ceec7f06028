//! The `syn_retries` setting: TCP_SYNCNT, so that connect() gives up no sooner than with the kernel's timers.

use rto_agent_common::{SYN_RETRIES_LEN, policy_flags};
use rto_model::syn::{self, GivesUp, SynTimers};

use super::Compiler;
use crate::policy::{Settings, SynRetries, units::quantise};

impl Compiler<'_> {
    pub(super) fn syn_retries(&mut self, settings: &Settings) {
        match settings.syn_retries {
            SynRetries::Fixed(n) => {
                self.kernel.syn_retries = [n; SYN_RETRIES_LEN];
                self.kernel.flags |= policy_flags::SYN_RETRIES_FIXED;
                self.count_effect("syn_retries", &n.to_string(), n, None);
            }
            SynRetries::Keep => {
                self.effect(
                    "syn_retries",
                    "keep",
                    "the socket's own".to_owned(),
                    None,
                    None,
                );
            }
            SynRetries::Auto => self.syn_retries_auto(settings),
        }
    }

    /// For each TCP_SYNCNT a socket may have, the one that keeps the time to ETIMEDOUT.
    fn syn_retries_auto(&mut self, settings: &Settings) {
        let (hz, linear) = (u64::from(self.host.hz), self.host.tcp_syn_linear_timeouts);
        let initial_rto = self.active.unwrap_or(hz);
        let rto_max = match settings.rto_max {
            Some(rto_max) => quantise(rto_max, self.host.hz).jiffies,
            None => syn::RTO_MAX_S * hz,
        };
        // With the kernel's timers or longer ones nothing gives up sooner.
        if (initial_rto >= hz && rto_max >= syn::RTO_MAX_S * hz) || !self.errors.is_empty() {
            return;
        }
        let own = self.host.tcp_syn_retries;
        let timers = SynTimers {
            initial_rto,
            rto_max,
            syn_retries: own,
            linear_timeouts: linear,
        };
        let kernel = GivesUp::of(SynTimers::kernel(hz, own, linear));
        let ours = GivesUp::of(timers);
        let mut unreached = None;
        for own in 1..=syn::MAX_SYNCNT {
            let found = ours.retries_for(kernel.with(own));
            if !found.reached {
                unreached = unreached.or(Some(own));
            }
            self.kernel.syn_retries[usize::from(own)] = found.syn_retries.max(own);
        }
        let becomes = self.kernel.syn_retries[usize::from(own)];
        let seconds = |jiffies: u64| format!("{}s", jiffies / hz);
        let note = format!(
            "connect() gives up after {}, the kernel's own timers would after {}",
            seconds(ours.with(becomes)),
            seconds(kernel.with(own)),
        );
        self.count_effect("syn_retries", "auto", becomes, Some(&note));
        if let Some(effect) = self.effects.last_mut() {
            effect.host_count = Some(own);
        }
        if unreached.is_some_and(|first| first <= own) {
            self.warnings.push(
                "connect() will give up sooner than with the kernel's own timers: even 127 SYN \
                 retransmissions are not enough; raise initial_rto or rto_max"
                    .to_owned(),
            );
        }
    }
}
