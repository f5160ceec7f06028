//! Compiles a policy for this host: checks it against the kernel's limits, rounds as the kernel
//! does, and produces the form that the eBPF program reads.

use std::time::Duration;

use rto_agent_common::{Policy as KernelPolicy, policy_flags, restart};
use rto_model::syn;
use serde::{Deserialize, Serialize};

use super::{
    Adjustment, Cidr, Guard, HostFacts, InitialRtoSetting, PolicyName, Remark, Settings, Terms,
    Timer,
    units::{format_duration, jiffies_duration, jiffies_to_usecs, quantise, tenths_of_s},
};

mod auto;
mod constraints;
mod holdout;
mod outage;
mod syn_ack;
mod syn_retries;

/// `TCP_TIMEOUT_MIN`, jiffies (include/net/tcp.h, Linux 6.12).
const TIMEOUT_MIN: u64 = restart::LEAST_JIFFIES;
/// `TCP_RTO_MIN` and `TCP_DELACK_MAX`: the largest value TCP_BPF_RTO_MIN and TCP_BPF_DELACK_MAX take.
const BPF_TIMER_MAX: Duration = Duration::from_millis(200);
/// `TCP_TIMEOUT_INIT`.
const KERNEL_INITIAL_RTO: Duration = Duration::from_secs(1);
/// `TCP_RTO_MAX`.
const RTO_MAX: Duration = Duration::from_secs(syn::RTO_MAX_S);
/// Smallest value of TCP_RTO_MAX_MS.
const RTO_MAX_MIN: Duration = Duration::from_secs(1);
/// 1 to TCP_THIN_LINEAR_RETRIES (include/net/tcp.h, Linux 6.12).
const LINEAR_RETRIES: std::ops::RangeInclusive<u8> = 1..=6;
/// A shorter initial RTO on a very wide prefix needs `force`: round trips between continents come
/// close to it.
const WIDE_INITIAL_RTO: Duration = Duration::from_millis(200);
const WIDE_V4: u8 = 8;
const WIDE_V6: u8 = 16;

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

/// A policy's settings in words, without defaults: "initial_rto 5ms->8ms, rto_min 20ms".
pub fn settings_text(effects: &[EffectiveSetting]) -> String {
    let is_default = |effect: &&EffectiveSetting| {
        effect.asked == "auto" && ["syn_ack_rto", "syn_retries"].contains(&&*effect.setting)
    };
    let one = |e: &EffectiveSetting| {
        let value = if e.asked == e.effective {
            e.asked.clone()
        } else if e.asked == "auto" {
            format!("auto ({})", e.effective)
        } else {
            format!("{}->{}", e.asked, e.effective)
        };
        let lifetime = e.request_lifetime_ms;
        let lifetime = lifetime.map(|ms| format!(" (half-open for {})", tenths_of_s(ms)));
        format!("{} {value}{}", e.setting, lifetime.unwrap_or_default())
    };
    let given = effects.iter().filter(|effect| !is_default(effect));
    given.map(one).collect::<Vec<_>>().join(", ")
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

/// A policy ready for the kernel.
#[derive(Clone, Debug)]
pub struct Compiled {
    /// For the `POLICIES` map; its generation is 0.
    pub kernel: KernelPolicy,
    /// The effective value of each setting.
    pub effects: Vec<EffectiveSetting>,
    /// Settings that are valid, but probably not intended.
    pub warnings: Vec<Remark>,
}

/// Compiles a policy for a host.
pub fn compile(
    name: &PolicyName,
    settings: &Settings,
    host: &HostFacts,
) -> Result<Compiled, Vec<SettingError>> {
    compile_adjusted(name, settings, &Adjustment::default(), host)
}

/// As [`compile`], with the daemon's decisions about the policy.
pub fn compile_adjusted(
    name: &PolicyName,
    settings: &Settings,
    adjustment: &Adjustment,
    host: &HostFacts,
) -> Result<Compiled, Vec<SettingError>> {
    let mut compiler = Compiler {
        host,
        adjustment,
        kernel: KernelPolicy {
            name: name.padded(),
            flags: policy_flags::IN_USE,
            ..KernelPolicy::EMPTY
        },
        effects: Vec::new(),
        warnings: Vec::new(),
        errors: Vec::new(),
        active: None,
        passive: None,
    };
    compiler.guard(settings);
    compiler.timers(settings);
    compiler.syn_ack_rto(settings);
    compiler.others(settings);
    compiler.mptcp(settings);
    compiler.check_constraints(settings);
    compiler.syn_retries(settings);
    compiler.control_arm(name, settings);
    if compiler.errors.is_empty() {
        let initial_rto = compiler.active.unwrap_or(host.hz.into());
        let initial_rto_us = jiffies_to_usecs(initial_rto, host.hz);
        compiler.kernel.initial_rto_us = u32::try_from(initial_rto_us).unwrap_or(u32::MAX);
        if needs_storage(&compiler.kernel, host) {
            compiler.kernel.flags |= policy_flags::STORED;
        }
        Ok(Compiled {
            kernel: compiler.kernel,
            effects: compiler.effects,
            warnings: compiler.warnings,
        })
    } else {
        Err(compiler.errors)
    }
}

/// Whether each connection needs socket storage from the start: for options that are set later, or
/// whose previous values the program cannot read.
fn needs_storage(policy: &KernelPolicy, host: &HostFacts) -> bool {
    let later = policy.user_timeout_ms | policy.linear_retries | policy.restart_hz;
    let others = policy.rto_max_ms | (policy.flags & policy_flags::THIN_LINEAR_SET);
    let timers = policy.rto_min_us | policy.delack_max_us;
    later | others != 0 || (timers != 0 && !host.reads_timers)
}

/// The warning about a control arm while statistics are off, if the settings have one.
pub fn uncounted_holdout(settings: &Settings) -> Option<Remark> {
    let share = settings.holdout?;
    Some(Remark::new(|terms| {
        format!(
            "{} has no use while statistics = false in [agent]: the control arm loses the policy's \
             settings, and nothing is counted",
            terms.with("holdout", share)
        )
    }))
}

/// Refuses settings that need counters while statistics are off.
pub fn check_is_counted(settings: &Settings) -> Result<(), SettingError> {
    let automatic = [
        ("initial_rto", settings.auto_initial_rto().map(|_| "auto")),
        ("guard", (settings.guard == Some(Guard::On)).then_some("on")),
    ];
    match automatic
        .into_iter()
        .find_map(|(setting, value)| Some((setting, value?)))
    {
        Some((setting, value)) => Err(SettingError {
            given: Some((setting, value.to_owned())),
            reason: "it needs the policy's statistics, which are off (statistics = false in \
                     [agent]); set statistics = true"
                .into(),
        }),
        None => Ok(()),
    }
}

/// A shorter timer on a wide prefix is probably shorter than the path to some of its hosts: round trips between the
/// zones of a region take up to some milliseconds, and a busy host answers late.
const SHORT: Duration = Duration::from_millis(20);
/// Prefixes up to this length count as wide for [`SHORT`].
const MANY_HOSTS_V4: u8 = 16;
const MANY_HOSTS_V6: u8 = 32;

/// The warning about a timer of a handshake that is very short for a wide prefix.
pub fn short_for_width(cidr: &Cidr, settings: &Settings) -> Option<Remark> {
    let widest = if cidr.is_ipv4() {
        MANY_HOSTS_V4
    } else {
        MANY_HOSTS_V6
    };
    if cidr.prefix() > widest {
        return None;
    }
    let mut timers = settings.fixed_timers();
    let (setting, rto) = timers.find(|(setting, rto)| *setting != "rto_min" && *rto < SHORT)?;
    Some(Remark::new(|terms| {
        format!(
            "{} is very short for {cidr}: a host of such a wide prefix whose path RTT is longer \
             gets every SYN twice; set \"auto\", or use narrower prefixes",
            terms.with(setting, format_duration(rto))
        )
    }))
}

/// Refuses a short initial RTO on a prefix so wide that some hosts are far away, unless forced.
pub fn check_prefix_width(cidr: &Cidr, settings: &Settings) -> Result<(), SettingError> {
    let narrowest = if cidr.is_ipv4() { WIDE_V4 } else { WIDE_V6 };
    if settings.force || cidr.prefix() >= narrowest {
        return Ok(());
    }
    let bound = format_duration(WIDE_INITIAL_RTO);
    let too_short = |setting, value: String, becomes: &str, or: &str| SettingError {
        given: Some((setting, value)),
        reason: Remark::new(|terms| {
            format!(
                "too short for {cidr}: {becomes}below {bound} on a prefix shorter than \
                 /{narrowest} needs {}{or}, because such a wide prefix contains more distant hosts",
                terms.with("force", true)
            )
        }),
    };
    // (An automatic syn_ack_rto is no shorter than initial_rto.)
    for (setting, rto) in settings.fixed_timers() {
        if setting != "rto_min" && rto < WIDE_INITIAL_RTO {
            return Err(too_short(setting, format_duration(rto), "", ""));
        }
    }
    if let Some(auto) = settings.auto_initial_rto()
        && auto.least() < WIDE_INITIAL_RTO
    {
        let becomes = format!("it may become {}; ", format_duration(auto.least()));
        let value = InitialRtoSetting::Auto(*auto).to_string();
        let or = format!(" or min = {bound}");
        return Err(too_short("initial_rto", value, &becomes, &or));
    }
    Ok(())
}

struct Compiler<'a> {
    host: &'a HostFacts,
    adjustment: &'a Adjustment,
    kernel: KernelPolicy,
    effects: Vec<EffectiveSetting>,
    warnings: Vec<Remark>,
    errors: Vec<SettingError>,
    /// The initial RTO of connections that this host opens, jiffies; `None`: the kernel's own.
    active: Option<u64>,
    /// The SYN-ACK RTO of accepted connections, if half-open requests last long enough with it.
    passive: Option<u64>,
}

impl Compiler<'_> {
    fn timers(&mut self, settings: &Settings) {
        match &settings.initial_rto {
            Some(InitialRtoSetting::Fixed(asked)) => self.initial_rto(*asked),
            Some(InitialRtoSetting::Auto(auto)) => self.auto_initial_rto(auto, settings),
            None => {}
        }
        let initial_rto = self.active.unwrap_or_default();
        self.kernel.initial_rto_jiffies = u32::try_from(initial_rto).unwrap_or(u32::MAX);
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
            let reason = "must be 1s to 120s, in whole milliseconds";
            if !self.host.has_rto_max {
                let reason = "this kernel has no TCP_RTO_MAX_MS (Linux 6.15 and later); remove the \
                              setting";
                self.in_range("rto_max", asked, false, reason);
            } else if self.in_range("rto_max", asked, range, reason) {
                let jiffies = self.quantised("rto_max", asked);
                // jiffies_to_msecs() rounds up, unlike jiffies_to_usecs() below.
                let millis = (jiffies * 1_000).div_ceil(u64::from(self.host.hz));
                self.kernel.rto_max_ms = u32::try_from(millis).unwrap_or(u32::MAX);
            }
        }
    }

    fn initial_rto(&mut self, asked: Duration) {
        if !self.is_initial_rto("initial_rto", asked) {
            return;
        }
        let configured = self.host.initial_rto(asked);
        let Adjustment {
            active, passive, ..
        } = self.adjustment;
        self.active = self.adjusted(active.timer, Some(configured));
        self.passive = self.adjusted(passive.timer, Some(configured));
        match active.timer {
            Timer::Configured => self.initial_rto_effect(asked, configured),
            Timer::Kernel | Timer::Value(_) => {
                self.adjusted_effect("initial_rto", &format_duration(asked), self.active);
            }
        }
    }

    fn initial_rto_effect(&mut self, asked: Duration, jiffies: u64) {
        let hz = self.host.hz;
        let text = format_duration(asked);
        if jiffies > quantise(asked, hz).jiffies {
            let effective = format_duration(jiffies_duration(jiffies, hz));
            self.warn(|terms| {
                let asked = terms.with("initial_rto", &text);
                format!("{asked} becomes {effective}: the program keeps two SYNs 10ms apart")
            });
        }
        self.warn_of_long("initial_rto", asked);
        let note = if asked >= KERNEL_INITIAL_RTO {
            Some("not shorter than the kernel's own 1s".to_owned())
        } else {
            (jiffies < hz.into()).then(|| self.outage_note(jiffies))
        };
        let effect = self.effect("initial_rto", text);
        effect.set_jiffies(Some(jiffies), hz);
        effect.note = note;
    }

    /// Warns of a timer that is longer than without the agent.
    fn warn_of_long(&mut self, setting: &'static str, asked: Duration) {
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

    fn is_initial_rto(&mut self, setting: &'static str, asked: Duration) -> bool {
        let range = Duration::from_nanos(1)..RTO_MAX;
        let reason = "must be more than 0 and less than 120s";
        self.in_range(setting, asked, range.contains(&asked), reason)
    }

    fn others(&mut self, settings: &Settings) {
        if let Some(asked) = settings.user_timeout {
            let range =
                !asked.is_zero() && asked.as_millis() <= i32::MAX as u128 && is_whole_ms(asked);
            let reason = "must be 1ms to 24 days, in whole milliseconds";
            if self.in_range("user_timeout", asked, range, reason) {
                let effect = self.effect("user_timeout", format_duration(asked));
                effect.note = Some("once established".to_owned());
                self.kernel.user_timeout_ms = milliseconds(asked);
            }
        }
        if let Some(on) = settings.thin_linear {
            if self.host.has_bpf_thin_linear {
                let flag = if on { policy_flags::THIN_LINEAR } else { 0 };
                self.kernel.flags |= policy_flags::THIN_LINEAR_SET | flag;
                self.effect("thin_linear", on);
            } else {
                let reason = "an eBPF program cannot set it on this kernel (Linux 6.1 and later); \
                              remove the setting";
                self.refuse("thin_linear", on, reason);
            }
        }
        if let Some(retries) = settings.linear_retries {
            self.linear_retries(retries, settings.thin_linear);
        }
    }

    fn rto_restart(&mut self, on: bool, rto_min: Option<Duration>) {
        let note = format!(
            "rto_min minus the smoothed RTT while fewer than {} segments are outstanding \
             (experimental)",
            restart::THRESHOLD
        );
        if !on {
            self.effect("rto_restart", "off");
        } else if rto_min.is_some() {
            self.kernel.restart_hz = self.host.hz;
            self.effect("rto_restart", "on").note = Some(note);
        } else {
            let reason = Remark::new(|terms| {
                format!(
                    "it lowers {rto_min} by the smoothed RTT, but the policy has no {rto_min}; add \
                     one, for example {}",
                    terms.quoted("rto_min", "100ms"),
                    rto_min = terms.name("rto_min")
                )
            });
            self.refuse("rto_restart", on, reason);
        }
    }

    fn linear_retries(&mut self, retries: u8, thin_linear: Option<bool>) {
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
            self.kernel.linear_retries = retries.into();
            let effect = self.effect("linear_retries", retries);
            effect.count = Some(retries);
            effect.note = Some("consecutive timeouts before the interval doubles".to_owned());
            return;
        };
        self.refuse("linear_retries", retries, reason);
    }

    /// TCP_BPF_RTO_MIN and TCP_BPF_DELACK_MAX: `usecs_to_jiffies(value)` must be at least
    /// TCP_TIMEOUT_MIN and at most TCP_RTO_MIN (net/core/filter.c, `bpf_sol_tcp_setsockopt()`, 6.12).
    fn bpf_timer(&mut self, setting: &'static str, asked: Duration) -> u32 {
        let hz = self.host.hz;
        let rounded = quantise(asked, hz);
        let good = rounded.jiffies >= TIMEOUT_MIN && asked <= BPF_TIMER_MAX;
        let reason = format!(
            "must be 2 jiffies to 200ms: more than {} at HZ={hz}",
            format_duration(jiffies_duration(TIMEOUT_MIN - 1, hz))
        );
        if !self.in_range(setting, asked, good, reason) {
            return 0;
        }
        let jiffies = self.quantised(setting, asked);
        // As getsockopt() returns it.
        u32::try_from(jiffies_to_usecs(jiffies, hz)).unwrap_or(u32::MAX)
    }

    fn in_range(
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

    fn quantised(&mut self, setting: &'static str, asked: Duration) -> u64 {
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
    fn effect(&mut self, setting: &str, asked: impl ToString) -> &mut EffectiveSetting {
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

    fn warn(&mut self, text: impl Fn(Terms) -> String) {
        self.warnings.push(Remark::new(text));
    }

    fn refuse(&mut self, setting: &'static str, value: impl ToString, reason: impl Into<Remark>) {
        self.errors.push(SettingError {
            given: Some((setting, value.to_string())),
            reason: reason.into(),
        });
    }
}

fn is_whole_ms(duration: Duration) -> bool {
    duration.subsec_nanos().is_multiple_of(1_000_000)
}

fn milliseconds(duration: Duration) -> u32 {
    u32::try_from(duration.as_millis()).unwrap_or(u32::MAX)
}

/// A policy that this host does not support, for callers without line numbers.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}policy {policy}: {error}", location.as_ref().map(|at| format!("{at}: ")).unwrap_or_default())]
pub struct PolicyError {
    /// The policy.
    pub policy: PolicyName,
    /// Where the policy is defined, if in a file.
    pub location: Option<super::Location>,
    /// What is wrong.
    pub error: SettingError,
}

#[cfg(test)]
mod tests;
