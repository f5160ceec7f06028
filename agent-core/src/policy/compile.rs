//! Compiles a policy for this host: checks it against the kernel's limits, rounds as the kernel
//! does, and produces the form that the eBPF program reads.

use std::time::Duration;

use rto_agent_common::{Policy as KernelPolicy, policy_flags};

use self::compiler::Compiler;
pub use self::compiler::{EffectiveSetting, SettingError};
use super::{
    Adjustment, Cidr, Guard, HostFacts, InitialRtoSetting, PolicyName, Remark, Settings, Terms,
    units::{format_duration, jiffies_to_usecs, tenths_of_s},
};

mod auto;
mod compiler;
mod connection;
mod constraints;
mod holdout;
mod initial_rto;
mod syn_ack;
mod syn_retries;

/// A shorter initial RTO on a very wide prefix needs `force`: round trips between continents come
/// close to it.
const WIDE_INITIAL_RTO: Duration = Duration::from_millis(200);
const WIDE_V4: u8 = 8;
const WIDE_V6: u8 = 16;

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
    let mut compiler = Compiler::new(name, adjustment, host);
    auto::guard(&mut compiler, settings);
    initial_rto::initial_rto(&mut compiler, settings);
    connection::timers(&mut compiler, settings);
    syn_ack::syn_ack_rto(&mut compiler, settings);
    connection::others(&mut compiler, settings);
    syn_ack::mptcp(&mut compiler, settings);
    constraints::check_constraints(&mut compiler, settings);
    syn_retries::syn_retries(&mut compiler, settings);
    holdout::control_arm(&mut compiler, name, settings);
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
    let later = policy.user_timeout_ms | policy.linear_retries | u32::from(policy.restart_hz);
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
    // `least`: of a learnt value.
    let too_short = |setting, value: String, least: Option<Duration>| SettingError {
        given: Some((setting, value)),
        reason: Remark::new(|terms| {
            let becomes = least.map(|least| format!("it may become {}; ", format_duration(least)));
            let or = least.map(|_| match terms {
                Terms::File => format!(" or min = {bound}"),
                Terms::Options => format!(" or {} auto,min={bound}", terms.name(setting)),
            });
            format!(
                "too short for {cidr}: {}below {bound} on a prefix shorter than /{narrowest} needs \
                 {}{}, because such a wide prefix contains more distant hosts",
                becomes.unwrap_or_default(),
                terms.with("force", true),
                or.unwrap_or_default()
            )
        }),
    };
    // (An automatic syn_ack_rto is no shorter than initial_rto.)
    for (setting, rto) in settings.fixed_timers() {
        if setting != "rto_min" && rto < WIDE_INITIAL_RTO {
            return Err(too_short(setting, format_duration(rto), None));
        }
    }
    if let Some(auto) = settings.auto_initial_rto()
        && auto.least() < WIDE_INITIAL_RTO
    {
        let value = InitialRtoSetting::Auto(*auto).to_string();
        return Err(too_short("initial_rto", value, Some(auto.least())));
    }
    Ok(())
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
