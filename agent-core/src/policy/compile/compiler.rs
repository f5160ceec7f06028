//! The compiler of a policy, and what it says about each setting.

use std::time::Duration;

use rto_agent_common::{Policy as KernelPolicy, policy_flags, restart};
use rto_model::syn;
use serde::{Deserialize, Serialize};

use crate::policy::{
    Adjustment, HostFacts, PolicyName, Remark, Terms, Timer,
    units::{format_duration, jiffies_duration, quantise},
};

/// `TCP_TIMEOUT_MIN`, jiffies (include/net/tcp.h, Linux 6.12).
pub(super) const TIMEOUT_MIN: u64 = restart::LEAST_JIFFIES;
/// `TCP_TIMEOUT_INIT`.
pub(super) const KERNEL_INITIAL_RTO: Duration = Duration::from_secs(1);
/// `TCP_RTO_MAX`.
pub(super) const RTO_MAX: Duration = Duration::from_secs(syn::RTO_MAX_S);

/// The effective value of one setting on this host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct EffectiveSetting {
    /// The setting's name in the configuration.
    pub setting: String,
    /// The configured value.
    pub asked: String,
    /// The effective value in the kernel.
    pub effective: String,
    /// In jiffies, for timers that the kernel counts in jiffies.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub jiffies: Option<u64>,
    /// Of `syn_retries` and `linear_retries`: the effective number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub count: Option<u8>,
    /// Of `syn_ack_rto`: how long a half-open connection is kept, milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_lifetime_ms: Option<u64>,
    /// A note.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

impl EffectiveSetting {
    /// Sets the effective timer; `None`: the kernel's own.
    pub(super) fn set_jiffies(&mut self, jiffies: Option<u64>, hz: u32) {
        self.jiffies = jiffies;
        self.effective = match jiffies {
            Some(jiffies) => format_duration(jiffies_duration(jiffies, hz)),
            None => "the kernel's own".to_owned(),
        };
    }

    /// The effective value in words: "5ms -> 8ms, 2 jiffies at HZ=250".
    pub fn describe(&self, hz: u32) -> String {
        let mut text = self.asked.clone();
        if self.effective != self.asked {
            text.push_str(&format!(" -> {}", self.effective));
        }
        if let Some(jiffies) = self.jiffies {
            let plural = if jiffies == 1 { "jiffy" } else { "jiffies" };
            text.push_str(&format!(", {jiffies} {plural} at HZ={hz}"));
        }
        if let Some(note) = &self.note {
            text.push_str(&format!(" ({note})"));
        }
        text
    }
}

/// A setting that this kernel does not support, or that makes no sense.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", self.text(Terms::File))]
pub struct SettingError {
    /// The setting's name in the configuration, and the value given; `None` for the whole policy.
    pub given: Option<(&'static str, String)>,
    /// Why it is refused, and which values are valid.
    pub reason: Remark,
}

impl SettingError {
    /// The error in these terms.
    pub fn text(&self, terms: Terms) -> String {
        let reason = self.reason.text(terms);
        match &self.given {
            Some((key, value)) => format!("{}: {reason}", terms.with(key, value)),
            None => reason.to_owned(),
        }
    }
}

/// A policy that is being compiled. The functions of each setting add to it.
pub(super) struct Compiler<'a> {
    pub(super) host: &'a HostFacts,
    pub(super) adjustment: &'a Adjustment,
    pub(super) kernel: KernelPolicy,
    pub(super) effects: Vec<EffectiveSetting>,
    pub(super) warnings: Vec<Remark>,
    pub(super) errors: Vec<SettingError>,
    /// The initial RTO of connections that this host opens, jiffies; `None`: the kernel's own.
    pub(super) active: Option<u64>,
    /// The SYN-ACK RTO of accepted connections, if half-open requests last long enough with it.
    pub(super) passive: Option<u64>,
}

impl<'a> Compiler<'a> {
    pub(super) fn new(name: &PolicyName, adjustment: &'a Adjustment, host: &'a HostFacts) -> Self {
        Self {
            host,
            adjustment,
            kernel: KernelPolicy {
                name: name.padded(),
                flags: policy_flags::IN_USE,
                repath_jiffies: adjustment.repath_jiffies,
                ..KernelPolicy::EMPTY
            },
            effects: Vec::new(),
            warnings: Vec::new(),
            errors: Vec::new(),
            active: None,
            passive: None,
        }
    }

    /// The timer of a direction, jiffies. The daemon only ever lengthens a configured timer.
    pub(super) fn adjusted(&self, timer: Timer, configured: Option<u64>) -> Option<u64> {
        match timer {
            Timer::Configured => configured,
            Timer::Kernel => None,
            Timer::Value(value) => {
                let jiffies = self.host.initial_rto(value);
                Some(jiffies.max(configured.unwrap_or_default()))
            }
        }
    }

    /// Records the effective timer after a decision of the guard.
    pub(super) fn adjusted_effect(&mut self, setting: &str, asked: &str, jiffies: Option<u64>) {
        let hz = self.host.hz;
        let effect = self.effect(setting, asked);
        effect.set_jiffies(jiffies, hz);
        effect.note = Some("rto-agent tune says why".to_owned());
    }

    /// Warns of a timer that is longer than without the agent.
    pub(super) fn warn_of_long(&mut self, setting: &'static str, asked: Duration) {
        if asked > KERNEL_INITIAL_RTO {
            self.warn(|terms| {
                format!(
                    "{} is longer than the kernel's own 1s: a lost packet costs more than without \
                     the agent",
                    terms.with(setting, format_duration(asked))
                )
            });
        }
    }

    pub(super) fn is_initial_rto(&mut self, setting: &'static str, asked: Duration) -> bool {
        let range = Duration::from_nanos(1)..RTO_MAX;
        let reason = "must be more than 0 and less than 120s";
        self.in_range(setting, asked, range.contains(&asked), reason)
    }

    pub(super) fn in_range(
        &mut self,
        setting: &'static str,
        asked: Duration,
        good: bool,
        reason: impl Into<Remark>,
    ) -> bool {
        if !good {
            self.refuse(setting, format_duration(asked), reason);
        }
        good
    }

    pub(super) fn quantised(&mut self, setting: &'static str, asked: Duration) -> u64 {
        let rounded = quantise(asked, self.host.hz);
        let effective = format_duration(rounded.effective);
        if rounded.effective >= 2 * asked {
            self.warn(|terms| {
                format!(
                    "{} is less than a jiffy, the unit of the kernel's timers: it becomes \
                     {effective}",
                    terms.with(setting, format_duration(asked))
                )
            });
        }
        let effect = self.effect(setting, format_duration(asked));
        effect.effective = effective;
        effect.jiffies = Some(rounded.jiffies);
        rounded.jiffies
    }

    /// Adds an effect: the value that was asked for, until the caller changes it.
    pub(super) fn effect(&mut self, setting: &str, asked: impl ToString) -> &mut EffectiveSetting {
        let asked = asked.to_string();
        self.effects.push(EffectiveSetting {
            setting: setting.to_owned(),
            effective: asked.clone(),
            asked,
            ..EffectiveSetting::default()
        });
        let last = self.effects.len() - 1;
        &mut self.effects[last]
    }

    pub(super) fn warn(&mut self, text: impl Fn(Terms) -> String) {
        self.warnings.push(Remark::new(text));
    }

    pub(super) fn refuse(
        &mut self,
        setting: &'static str,
        value: impl ToString,
        reason: impl Into<Remark>,
    ) {
        self.errors.push(SettingError {
            given: Some((setting, value.to_string())),
            reason: reason.into(),
        });
    }
}
