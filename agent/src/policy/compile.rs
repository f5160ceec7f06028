//! What a policy becomes on this host: checked against what its kernel takes, rounded as it
//! rounds, and in the form the eBPF program reads.

use std::{collections::BTreeMap, str::FromStr, time::Duration};

use rto_agent_common::{Policy as KernelPolicy, SYN_RETRIES_LEN, policy_flags, restart};
use rto_model::syn::{self, GivesUp, SynTimers};
use serde::{Deserialize, Serialize};

use super::{
    Cidr, HostFacts, PolicyName, PolicySet, Settings, SynRetries,
    gain::gains,
    plan::Image,
    units::{format_duration, jiffies_duration, jiffies_to_usecs, quantise},
};

/// `TCP_TIMEOUT_MIN`, jiffies (include/net/tcp.h, Linux 6.12).
const TIMEOUT_MIN: u64 = restart::LEAST_JIFFIES;
/// `TCP_RTO_MIN` and `TCP_DELACK_MAX`: the largest value TCP_BPF_RTO_MIN and TCP_BPF_DELACK_MAX take.
const BPF_TIMER_MAX: Duration = Duration::from_millis(200);
/// `TCP_TIMEOUT_INIT`.
const KERNEL_INITIAL_RTO: Duration = Duration::from_secs(1);
/// `TCP_RTO_MAX`.
const RTO_MAX: Duration = Duration::from_secs(syn::RTO_MAX_S);
/// Least value of TCP_RTO_MAX_MS.
const RTO_MAX_MIN: Duration = Duration::from_secs(1);
/// 1 to TCP_THIN_LINEAR_RETRIES (include/net/tcp.h, Linux 6.12).
const LINEAR_RETRIES: std::ops::RangeInclusive<u8> = 1..=6;
/// What a peer with the kernel's defaults may delay an ACK by (`TCP_DELACK_MIN`).
const PEER_DELACK: Duration = Duration::from_millis(40);
/// Below this an initial RTO on a very wide prefix needs `force`: round trips across continents
/// come near it.
const WIDE_INITIAL_RTO: Duration = Duration::from_millis(200);
const WIDE_V4: u8 = 8;
const WIDE_V6: u8 = 16;

/// What one setting becomes on this host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Effect {
    /// The setting's name in the configuration.
    pub setting: String,
    /// As given.
    pub asked: String,
    /// As the kernel will have it.
    pub effective: String,
    /// In jiffies, where the kernel counts it so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub jiffies: Option<u64>,
    /// What more there is to say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

impl Effect {
    /// For people: "5ms -> 8ms, 2 jiffies at HZ=250".
    #[must_use]
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

/// A setting this kernel, or reason, does not allow.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}{reason}", if setting.is_empty() { String::new() } else { format!("{setting} = {value}: ") })]
pub struct SettingError {
    /// The setting's name in the configuration; empty if it is the policy as a whole.
    pub setting: &'static str,
    /// The value given.
    pub value: String,
    /// Why not, and what would do.
    pub reason: String,
}

/// A policy ready for the kernel.
#[derive(Clone, Debug)]
pub struct Compiled {
    /// For the `POLICIES` map; its generation is 0.
    pub kernel: KernelPolicy,
    /// What each setting becomes.
    pub effects: Vec<Effect>,
    /// Allowed, but probably not meant.
    pub warnings: Vec<String>,
}

/// Computes a policy for a host.
///
/// # Errors
///
/// Every setting that cannot be had, with the reason.
pub fn compile(
    name: &PolicyName,
    settings: &Settings,
    host: &HostFacts,
) -> Result<Compiled, Vec<SettingError>> {
    let mut compiler = Compiler {
        host,
        kernel: KernelPolicy {
            name: name.padded(),
            ..KernelPolicy::EMPTY
        },
        effects: Vec::new(),
        warnings: Vec::new(),
        errors: Vec::new(),
    };
    compiler.timers(settings);
    compiler.others(settings);
    compiler.together(settings);
    compiler.syn_retries(settings);
    if compiler.errors.is_empty() {
        let (initial_rto_us, gain_us) = gains(&compiler.kernel, host);
        compiler.kernel.initial_rto_us = initial_rto_us;
        compiler.kernel.gain_us = gain_us;
        let Compiler {
            kernel,
            effects,
            warnings,
            ..
        } = compiler;
        Ok(Compiled {
            kernel,
            effects,
            warnings,
        })
    } else {
        Err(compiler.errors)
    }
}

/// Refuses a short initial RTO on a prefix so wide that it cannot all be near, unless forced.
///
/// # Errors
///
/// If it needs `force` and does not have it.
pub fn check_force(cidr: &Cidr, settings: &Settings) -> Result<(), SettingError> {
    let narrowest = if cidr.is_ipv4() { WIDE_V4 } else { WIDE_V6 };
    match settings.initial_rto {
        Some(rto) if rto < WIDE_INITIAL_RTO && cidr.prefix() < narrowest && !settings.force => {
            Err(SettingError {
                setting: "initial_rto",
                value: format_duration(rto),
                reason: format!(
                    "too short for {cidr}: below {} on a prefix shorter than /{narrowest} needs \
                     force = true, because so wide a prefix reaches hosts farther away than that",
                    format_duration(WIDE_INITIAL_RTO)
                ),
            })
        }
        _ => Ok(()),
    }
}

struct Compiler<'a> {
    host: &'a HostFacts,
    kernel: KernelPolicy,
    effects: Vec<Effect>,
    warnings: Vec<String>,
    errors: Vec<SettingError>,
}

impl Compiler<'_> {
    fn timers(&mut self, settings: &Settings) {
        if let Some(asked) = settings.initial_rto {
            let range = Duration::from_nanos(1)..RTO_MAX;
            let reason = "the kernel takes more than 0 and less than 120s";
            if self.in_range("initial_rto", asked, range.contains(&asked), reason) {
                let jiffies = self.quantised("initial_rto", asked);
                self.kernel.initial_rto_jiffies = u32::try_from(jiffies).unwrap_or(u32::MAX);
            }
        }
        if let Some(asked) = settings.rto_min {
            self.kernel.rto_min_us = self.bpf_timer("rto_min", asked);
        }
        if let Some(on) = settings.rto_restart {
            self.rto_restart(on, settings.rto_min);
        }
        if let Some(asked) = settings.delack_max {
            self.kernel.delack_max_us = self.bpf_timer("delack_max", asked);
        }
        if let Some(asked) = settings.rto_max {
            let range = (RTO_MAX_MIN..=RTO_MAX).contains(&asked) && is_whole_ms(asked);
            let reason = "the kernel takes 1s to 120s, in whole milliseconds";
            if !self.host.has_rto_max {
                let reason = "this kernel has no TCP_RTO_MAX_MS (Linux 6.15 and later)";
                self.in_range("rto_max", asked, false, reason);
            } else if self.in_range("rto_max", asked, range, reason) {
                let jiffies = self.quantised("rto_max", asked);
                // jiffies_to_msecs() rounds up, unlike jiffies_to_usecs() below.
                let millis = (jiffies * 1_000).div_ceil(u64::from(self.host.hz));
                self.kernel.rto_max_ms = u32::try_from(millis).unwrap_or(u32::MAX);
            }
        }
    }

    fn others(&mut self, settings: &Settings) {
        if let Some(asked) = settings.user_timeout {
            let range =
                !asked.is_zero() && asked.as_millis() <= i32::MAX as u128 && is_whole_ms(asked);
            let reason = "the kernel takes 1ms to 24 days, in whole milliseconds";
            if self.in_range("user_timeout", asked, range, reason) {
                let text = format_duration(asked);
                self.effect(
                    "user_timeout",
                    &text,
                    text.clone(),
                    None,
                    Some("once established"),
                );
                self.kernel.user_timeout_ms = milliseconds(asked);
            }
        }
        if let Some(on) = settings.thin_linear {
            if self.host.has_bpf_thin_linear {
                let flag = if on { policy_flags::THIN_LINEAR } else { 0 };
                self.kernel.flags |= policy_flags::THIN_LINEAR_SET | flag;
                self.effect("thin_linear", &on.to_string(), on.to_string(), None, None);
            } else {
                self.errors.push(SettingError {
                    setting: "thin_linear",
                    value: on.to_string(),
                    reason: "this kernel does not let an eBPF program set it (Linux 6.1 and later)"
                        .to_owned(),
                });
            }
        }
        if let Some(retries) = settings.linear_retries {
            self.linear_retries(retries, settings.thin_linear);
        }
    }

    fn rto_restart(&mut self, on: bool, rto_min: Option<Duration>) {
        let note = format!(
            "rto_min less the smoothed RTT while fewer than {} segments are outstanding \
             (experimental)",
            restart::THRESHOLD
        );
        match rto_min {
            _ if !on => self.effect("rto_restart", "off", "off".to_owned(), None, None),
            Some(_) => {
                self.kernel.restart_hz = self.host.hz;
                self.effect("rto_restart", "on", "on".to_owned(), None, Some(&note));
            }
            None => self.errors.push(SettingError {
                setting: "rto_restart",
                value: on.to_string(),
                reason: "it lowers rto_min by the smoothed RTT, and the policy has none; add \
                         rto_min, like rto_min = \"100ms\""
                    .to_owned(),
            }),
        }
    }

    fn linear_retries(&mut self, retries: u8, thin_linear: Option<bool>) {
        let reason = if !LINEAR_RETRIES.contains(&retries) {
            "it can be 1 to 6: after 6 timeouts the kernel itself ends linear mode"
        } else if thin_linear != Some(true) {
            "it says when linear mode ends, which thin_linear = true begins; add that"
        } else {
            self.kernel.linear_retries = retries.into();
            let text = retries.to_string();
            let note = "timeouts in a row before the interval doubles";
            self.effect("linear_retries", &text, text.clone(), None, Some(note));
            return;
        };
        self.errors.push(SettingError {
            setting: "linear_retries",
            value: retries.to_string(),
            reason: reason.to_owned(),
        });
    }

    /// TCP_BPF_RTO_MIN and TCP_BPF_DELACK_MAX: `usecs_to_jiffies(value)` must be at least
    /// TCP_TIMEOUT_MIN and at most TCP_RTO_MIN (net/core/filter.c, `bpf_sol_tcp_setsockopt()`, 6.12).
    fn bpf_timer(&mut self, setting: &'static str, asked: Duration) -> u32 {
        let hz = self.host.hz;
        let rounded = quantise(asked, hz);
        let good = rounded.jiffies >= TIMEOUT_MIN && asked <= BPF_TIMER_MAX;
        let reason = format!(
            "the kernel takes 2 jiffies to 200ms: at HZ={hz}, more than {}",
            format_duration(jiffies_duration(TIMEOUT_MIN - 1, hz))
        );
        if !self.in_range(setting, asked, good, &reason) {
            return 0;
        }
        let jiffies = self.quantised(setting, asked);
        // As the kernel tells it when it is asked for the option.
        u32::try_from(jiffies_to_usecs(jiffies, hz)).unwrap_or(u32::MAX)
    }

    /// Rules between settings.
    fn together(&mut self, settings: &Settings) {
        let hz = self.host.hz;
        if *settings
            == (Settings {
                syn_retries: settings.syn_retries,
                force: settings.force,
                rto_restart: settings.rto_restart.filter(|on| !on),
                ..Settings::default()
            })
            && !matches!(settings.syn_retries, SynRetries::Fixed(_))
        {
            self.errors.push(SettingError {
                setting: "",
                value: String::new(),
                reason: "the policy sets nothing; give it at least one of initial_rto, rto_min, \
                         delack_max, thin_linear, rto_max, user_timeout, syn_retries"
                    .to_owned(),
            });
        }
        if let Some(rto_max) = settings.rto_max {
            for (name, value) in [
                ("initial_rto", settings.initial_rto),
                ("rto_min", settings.rto_min),
            ] {
                if let Some(value) = value.filter(|value| *value > rto_max) {
                    let reason =
                        format!("it is below {name} = {}; raise it", format_duration(value));
                    self.in_range("rto_max", rto_max, false, &reason);
                }
            }
        }
        if let (Some(rto_min), Some(delack)) = (settings.rto_min, settings.delack_max) {
            let (rto_min_q, delack_q) = (quantise(rto_min, hz), quantise(delack, hz));
            let text = format_duration(rto_min);
            if delack_q.jiffies == TIMEOUT_MIN && rto_min_q.jiffies == TIMEOUT_MIN {
                self.warnings.push(format!(
                    "rto_min = {text} and delack_max = {} are both the least the kernel takes: \
                     an ACK may come as late as the timeout, and the segment be sent twice; a \
                     larger rto_min avoids it",
                    format_duration(delack)
                ));
            } else if delack_q.jiffies >= rto_min_q.jiffies {
                let reason = format!(
                    "an ACK delayed as long as rto_min = {text} makes a peer with the same policy \
                     retransmit for nothing; make it shorter"
                );
                self.in_range("delack_max", delack, false, &reason);
            }
        }
        let bare = settings.rto_min.filter(|_| settings.delack_max.is_none());
        if let Some(rto_min) = bare.filter(|rto_min| *rto_min <= PEER_DELACK) {
            self.warnings.push(format!(
                "rto_min = {} without delack_max: peers that delay ACKs by up to {} (the default; \
                 a host without this policy) will be sent segments twice; give both ends a \
                 delack_max below it, or choose more than {}",
                format_duration(rto_min),
                format_duration(PEER_DELACK),
                format_duration(PEER_DELACK),
            ));
        } else if let Some(rto_min) = bare.filter(|_| settings.rto_restart == Some(true)) {
            self.warnings.push(format!(
                "rto_restart = true without delack_max: peers that are more than {} away and delay \
                 ACKs by up to {} (the default; a host without this policy) will be sent segments \
                 twice; give both ends a delack_max",
                format_duration(rto_min.saturating_sub(PEER_DELACK)),
                format_duration(PEER_DELACK),
            ));
        }
    }

    fn syn_retries(&mut self, settings: &Settings) {
        match settings.syn_retries {
            SynRetries::Fixed(n) => {
                self.kernel.syn_retries = [n; SYN_RETRIES_LEN];
                self.effect("syn_retries", &n.to_string(), n.to_string(), None, None);
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
        let initial_rto = match settings.initial_rto {
            Some(rto) => quantise(rto, self.host.hz).jiffies,
            None => hz,
        };
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
        self.effect(
            "syn_retries",
            "auto",
            format!("{becomes} instead of {own}"),
            None,
            Some(&note),
        );
        if unreached.is_some_and(|first| first <= own) {
            self.warnings.push(
                "connect() will give up sooner than with the kernel's own timers: even 127 SYN \
                 retransmissions are not enough; raise initial_rto or rto_max"
                    .to_owned(),
            );
        }
    }

    fn in_range(
        &mut self,
        setting: &'static str,
        asked: Duration,
        good: bool,
        reason: &str,
    ) -> bool {
        if !good {
            let value = format_duration(asked);
            self.errors.push(SettingError {
                setting,
                value,
                reason: reason.to_owned(),
            });
        }
        good
    }

    fn quantised(&mut self, setting: &str, asked: Duration) -> u64 {
        let rounded = quantise(asked, self.host.hz);
        let effective = format_duration(rounded.effective);
        let note = match (setting, asked < KERNEL_INITIAL_RTO) {
            ("initial_rto", false) => Some("not below the kernel's own 1s"),
            _ => None,
        };
        self.effect(
            setting,
            &format_duration(asked),
            effective,
            Some(rounded.jiffies),
            note,
        );
        rounded.jiffies
    }

    fn effect(
        &mut self,
        setting: &str,
        asked: &str,
        effective: String,
        jiffies: Option<u64>,
        note: Option<&str>,
    ) {
        self.effects.push(Effect {
            setting: setting.to_owned(),
            asked: asked.to_owned(),
            effective,
            jiffies,
            note: note.map(ToOwned::to_owned),
        });
    }
}

fn is_whole_ms(duration: Duration) -> bool {
    duration.subsec_nanos().is_multiple_of(1_000_000)
}

fn milliseconds(duration: Duration) -> u32 {
    u32::try_from(duration.as_millis()).unwrap_or(u32::MAX)
}

/// A policy that cannot be had, for callers that know no line numbers.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}policy {policy}: {error}", location.as_ref().map(|at| format!("{at}: ")).unwrap_or_default())]
pub struct PolicyError {
    /// The policy.
    pub policy: PolicyName,
    /// Where it stands, if in a file.
    pub location: Option<super::Location>,
    /// What is wrong.
    pub error: SettingError,
}

/// What each value of each policy becomes.
pub type Effects = BTreeMap<PolicyName, Vec<Effect>>;

impl PolicySet {
    /// What the kernel's maps should hold for this set on this host, and what each value becomes.
    ///
    /// # Errors
    ///
    /// Every setting of every policy that cannot be had.
    pub fn image(&self, host: &HostFacts) -> Result<(Image, Effects), Vec<PolicyError>> {
        let mut image = Image::default();
        let mut effects = BTreeMap::new();
        let mut errors = Vec::new();
        for (name, policy) in &self.policies {
            match compile(name, &policy.settings, host) {
                Ok(compiled) => {
                    image.policies.insert(name.clone(), compiled.kernel);
                    effects.insert(name.clone(), compiled.effects);
                }
                Err(all) => errors.extend(all.into_iter().map(|error| PolicyError {
                    policy: name.clone(),
                    location: policy.location.clone(),
                    error,
                })),
            }
        }
        if !errors.is_empty() {
            return Err(errors);
        }
        image.entries = self.entries.clone();
        Ok((image, effects))
    }
}

impl FromStr for SynRetries {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "keep" => Ok(Self::Keep),
            number => match number.parse::<u8>() {
                Ok(n) if (1..=syn::MAX_SYNCNT).contains(&n) => Ok(Self::Fixed(n)),
                _ => Err(format!(
                    "{text:?} is neither \"auto\", \"keep\" nor a number from 1 to 127"
                )),
            },
        }
    }
}

impl std::fmt::Display for SynRetries {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Keep => f.write_str("keep"),
            Self::Fixed(n) => n.fmt(f),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A host with everything, at HZ 250.
    pub(crate) const HOST: HostFacts = HostFacts {
        hz: 250,
        tcp_syn_retries: 6,
        tcp_syn_linear_timeouts: 4,
        has_rto_max: true,
        has_bpf_thin_linear: true,
    };

    fn ms(n: u64) -> Option<Duration> {
        Some(Duration::from_millis(n))
    }

    fn compiled(settings: &Settings) -> Compiled {
        compile(&"p".parse().unwrap(), settings, &HOST).unwrap()
    }

    fn errors(settings: &Settings, host: &HostFacts) -> Vec<String> {
        let errors = compile(&"p".parse().unwrap(), settings, host).unwrap_err();
        errors.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_full_policy_at_hz_250() {
        let compiled = compiled(&Settings {
            initial_rto: ms(100),
            rto_min: ms(5),
            delack_max: ms(5),
            thin_linear: Some(true),
            rto_max: ms(10_000),
            ..Settings::default()
        });
        assert_eq!(compiled.kernel.name(), Some("p"));
        assert_eq!(compiled.kernel.initial_rto_jiffies, 25);
        // As the kernel will tell it when it is asked for the option.
        assert_eq!(compiled.kernel.rto_min_us, 8_000);
        assert_eq!(compiled.kernel.rto_max_ms, 10_000);
        let texts: Vec<String> = compiled.effects.iter().map(|e| e.describe(250)).collect();
        assert!(
            texts.contains(&"5ms -> 8ms, 2 jiffies at HZ=250".to_owned()),
            "{texts:?}"
        );
        assert!(compiled.warnings[0].contains("rto_min = 5ms"));
    }

    #[test]
    fn rto_restart_is_for_a_policy_with_an_rto_min() {
        let with = |rto_restart| {
            compiled(&Settings {
                rto_min: ms(100),
                rto_restart,
                ..Settings::default()
            })
        };
        let on = with(Some(true));
        assert_eq!((on.kernel.restart_hz, on.kernel.rto_min_us), (250, 100_000));
        let effect = on.effects.iter().find(|e| e.setting == "rto_restart");
        assert_eq!(
            effect.unwrap().describe(250),
            "on (rto_min less the smoothed RTT while fewer than 4 segments are outstanding \
             (experimental))"
        );
        assert!(on.warnings[0].contains("more than 60ms away"), "{on:?}");
        for off in [None, Some(false)] {
            let off = with(off);
            assert_eq!(off.kernel.restart_hz, 0);
            assert!(off.warnings.is_empty(), "{off:?}");
        }
    }

    #[test]
    fn auto_never_gives_up_sooner_and_respects_an_applications_own_choice() {
        for rto in [4, 8, 20, 100, 200, 500] {
            let table = compiled(&Settings {
                initial_rto: ms(rto),
                ..Settings::default()
            })
            .kernel
            .syn_retries;
            assert_eq!(table[0], 0);
            let jiffies = quantise(Duration::from_millis(rto), 250).jiffies;
            for own in 1..=40u8 {
                let kernel = SynTimers::kernel(250, own, 4);
                let ours = SynTimers {
                    initial_rto: jiffies,
                    syn_retries: table[usize::from(own)],
                    ..kernel
                };
                assert!(ours.gives_up() >= kernel.gives_up(), "{rto} ms, {own}");
                // One doubling later at the most: an application that wants to give up soon still does.
                assert!(
                    ours.gives_up() <= 2 * kernel.gives_up() + 1,
                    "{rto} ms, {own}"
                );
            }
        }
    }

    #[test]
    fn auto_touches_nothing_where_nothing_is_shorter() {
        for settings in [
            Settings {
                initial_rto: ms(1000),
                ..Settings::default()
            },
            Settings {
                rto_min: ms(50),
                ..Settings::default()
            },
        ] {
            assert_eq!(compiled(&settings).kernel.syn_retries, [0; SYN_RETRIES_LEN]);
        }
    }

    #[test]
    fn keep_and_fixed() {
        let with = |syn_retries| {
            compiled(&Settings {
                initial_rto: ms(100),
                syn_retries,
                ..Settings::default()
            })
            .kernel
            .syn_retries
        };
        assert_eq!(with(SynRetries::Keep), [0; SYN_RETRIES_LEN]);
        assert_eq!(with(SynRetries::Fixed(3)), [3; SYN_RETRIES_LEN]);
    }

    #[test]
    fn what_the_kernel_does_not_take() {
        let old = HostFacts {
            has_rto_max: false,
            has_bpf_thin_linear: false,
            ..HOST
        };
        let mut all = Vec::new();
        for settings in [
            Settings::default(),
            Settings {
                initial_rto: ms(0),
                ..Settings::default()
            },
            Settings {
                initial_rto: ms(120_000),
                ..Settings::default()
            },
            Settings {
                rto_min: ms(4),
                ..Settings::default()
            },
            Settings {
                rto_min: ms(201),
                ..Settings::default()
            },
            Settings {
                delack_max: ms(50),
                rto_min: ms(45),
                ..Settings::default()
            },
            Settings {
                rto_max: ms(999),
                ..Settings::default()
            },
            Settings {
                rto_max: ms(1_000),
                initial_rto: ms(2_000),
                ..Settings::default()
            },
            Settings {
                user_timeout: ms(0),
                ..Settings::default()
            },
            Settings {
                delack_max: ms(20),
                rto_min: ms(20),
                ..Settings::default()
            },
            Settings {
                linear_retries: Some(7),
                thin_linear: Some(true),
                ..Settings::default()
            },
            Settings {
                linear_retries: Some(1),
                ..Settings::default()
            },
            Settings {
                rto_restart: Some(true),
                delack_max: ms(20),
                ..Settings::default()
            },
            Settings {
                rto_restart: Some(false),
                ..Settings::default()
            },
        ] {
            all.extend(errors(&settings, &HOST));
        }
        let settings = Settings {
            rto_max: ms(2_000),
            thin_linear: Some(true),
            ..Settings::default()
        };
        all.extend(errors(&settings, &old));
        insta::assert_snapshot!(all.join("\n"));
    }

    #[test]
    fn wide_prefixes_need_force() {
        let short = Settings {
            initial_rto: ms(100),
            ..Settings::default()
        };
        let check =
            |cidr: &str, settings: &Settings| check_force(&cidr.parse().unwrap(), settings).is_ok();
        assert!(check("10.0.0.0/8", &short));
        assert!(!check("10.0.0.0/7", &short));
        assert!(check("fd00::/16", &short));
        assert!(!check("fc00::/7", &short));
        assert!(check(
            "0.0.0.0/0",
            &Settings {
                force: true,
                ..short.clone()
            }
        ));
        assert!(check(
            "0.0.0.0/0",
            &Settings {
                initial_rto: ms(200),
                ..short
            }
        ));
    }

    #[test]
    fn syn_retries_texts() {
        for text in ["auto", "keep", "1", "127"] {
            assert_eq!(text.parse::<SynRetries>().unwrap().to_string(), text);
        }
        for bad in ["0", "128", "-1", "Auto", ""] {
            assert!(bad.parse::<SynRetries>().is_err(), "{bad}");
        }
    }

    proptest::proptest! {
        /// Rounded up, by less than a jiffy, whatever HZ is; what is out of bounds is refused.
        #[test]
        fn timers_are_never_shorter_than_asked(
            initial in 0u64..130_000_000,
            floor in 0u64..250_000,
            hz in proptest::sample::select(vec![100u32, 250, 300, 1000]),
        ) {
            let host = HostFacts { hz, ..HOST };
            let jiffies = |us: u64| (us * u64::from(hz)).div_ceil(1_000_000);
            let initial_rto = Settings {
                initial_rto: Some(Duration::from_micros(initial)),
                ..Settings::default()
            };
            if let Ok(compiled) = compile(&"p".parse().unwrap(), &initial_rto, &host) {
                let got = u64::from(compiled.kernel.initial_rto_jiffies);
                proptest::prop_assert_eq!(got, jiffies(initial));
                proptest::prop_assert!((1..120 * u64::from(hz)).contains(&got));
            } else {
                proptest::prop_assert!(initial == 0 || initial >= 60_000_000);
            }
            let rto_min = Settings {
                rto_min: Some(Duration::from_micros(floor)),
                ..Settings::default()
            };
            if let Ok(compiled) = compile(&"p".parse().unwrap(), &rto_min, &host) {
                // The kernel rounds it up once more, to the same.
                proptest::prop_assert_eq!(
                    jiffies(compiled.kernel.rto_min_us.into()),
                    jiffies(floor)
                );
                proptest::prop_assert!(jiffies(floor) >= 2 && floor <= 200_000);
            }
        }
    }
}
