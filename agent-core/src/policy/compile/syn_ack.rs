//! The `syn_ack_rto` setting: a shorter SYN-ACK timer with which half-open requests do not end too
//! early; and `mptcp`, which excludes the SYNs of MPTCP sockets.
//!
//! A request lives while the kernel retransmits its SYN-ACK: (2^(n + 1) - 1) times the initial RTO,
//! where n is the listener's TCP_SYNCNT or `net.ipv4.tcp_synack_retries` (`reqsk_timer_handler()`,
//! Linux 6.12). After that, a client whose ACK and data have been lost is reset.

use std::time::Duration;

use rto_agent_common::{SYN_ACK_RETRIES_LEN, policy_flags};
use rto_model::syn::{self, syn_ack_lifetime, syn_ack_rto_auto};

use super::compiler::Compiler;
use crate::policy::{
    Mptcp, Remark, Settings, SynAckRto, Timer,
    units::{format_duration, quantise, tenths_of_s},
};

pub(super) fn syn_ack_rto(compiler: &mut Compiler<'_>, settings: &Settings) {
    match settings.syn_ack_rto {
        SynAckRto::Keep => {
            compiler.passive = None;
            compiler.effect("syn_ack_rto", "keep").set_jiffies(None, 0);
        }
        SynAckRto::Auto => match compiler.passive {
            _ if !compiler.errors.is_empty() => {}
            Some(initial_rto) => automatic(compiler, initial_rto),
            None if settings.initial_rto.is_some() => {
                compiler.effect("syn_ack_rto", "auto").set_jiffies(None, 0);
            }
            None => {}
        },
        SynAckRto::Fixed(asked) => {
            if compiler.is_initial_rto("syn_ack_rto", asked) {
                fixed(compiler, asked);
            }
        }
    }
}

fn fixed(compiler: &mut Compiler<'_>, asked: Duration) {
    let configured = quantise(asked, compiler.host.hz).jiffies;
    let timer = compiler.adjustment.passive.timer;
    // The value learnt for "auto" does not apply to a fixed setting.
    compiler.passive = None;
    let text = format_duration(asked);
    let Some(jiffies) = compiler.adjusted(timer, Some(configured)) else {
        compiler.adjusted_effect("syn_ack_rto", &text, None);
        return;
    };
    let in_kernel = u32::try_from(jiffies).unwrap_or(u32::MAX);
    compiler.kernel.syn_ack_rto_jiffies = [in_kernel; SYN_ACK_RETRIES_LEN];
    syn_ack_effect(compiler, &text, jiffies);
    if timer == Timer::Configured {
        compiler.warn_of_long("syn_ack_rto", asked);
        warn_of_short_requests(compiler, asked, jiffies);
    }
}

fn automatic(compiler: &mut Compiler<'_>, initial_rto: u64) {
    let hz = u64::from(compiler.host.hz);
    let of = |retries: u8| syn_ack_rto_auto(initial_rto, hz, retries);
    for (retries, slot) in compiler.kernel.syn_ack_rto_jiffies.iter_mut().enumerate() {
        let jiffies = of(u8::try_from(retries).unwrap_or(u8::MAX));
        // The kernel's own timer needs no setting, unless it was requested.
        *slot = match jiffies == hz && initial_rto != hz {
            true => 0,
            false => u32::try_from(jiffies).unwrap_or(u32::MAX),
        };
    }
    // The table's last slot applies to more retransmissions as well.
    let most = u8::try_from(SYN_ACK_RETRIES_LEN - 1).unwrap_or(u8::MAX);
    let retries = compiler.host.syn_ack_retries().min(most);
    syn_ack_effect(compiler, "auto", of(retries));
}

fn syn_ack_effect(compiler: &mut Compiler<'_>, asked: &str, jiffies: u64) {
    let hz = compiler.host.hz;
    let retries = compiler.host.syn_ack_retries();
    let lifetime = request_lifetime(compiler, jiffies, retries);
    let mut note = format!(
        "half-open connections are kept for {} with {}; kernel default: {}",
        seconds(lifetime, hz),
        retransmissions(retries),
        seconds(request_lifetime(compiler, hz.into(), retries), hz),
    );
    if retries < compiler.host.tcp_synack_retries {
        note.push_str(&format!(
            "; {} are configured here, but on this kernel the program cannot read the number \
             of a request",
            compiler.host.tcp_synack_retries
        ));
    }
    let effect = compiler.effect("syn_ack_rto", asked);
    effect.set_jiffies(Some(jiffies), hz);
    effect.request_lifetime_ms = Some(lifetime * 1000 / u64::from(hz));
    effect.note = Some(note);
}

fn warn_of_short_requests(compiler: &mut Compiler<'_>, asked: Duration, jiffies: u64) {
    let hz = compiler.host.hz;
    let retries = compiler.host.syn_ack_retries();
    let lifetime = request_lifetime(compiler, jiffies, retries);
    let kernel = request_lifetime(compiler, hz.into(), retries);
    let wanted = kernel.min(syn::SYN_ACK_LIFETIME_S * u64::from(hz));
    if lifetime < wanted {
        compiler.warn(|terms| {
            format!(
                "{}: a half-open connection is kept for {} with {} (kernel default: {}); a \
                 client whose ACK and data are lost for longer is reset; {} keeps it for {}",
                terms.with("syn_ack_rto", format_duration(asked)),
                seconds(lifetime, hz),
                retransmissions(retries),
                seconds(kernel, hz),
                terms.quoted("syn_ack_rto", "auto"),
                seconds(wanted, hz),
            )
        });
    }
}

fn request_lifetime(compiler: &Compiler<'_>, initial_rto: u64, retries: u8) -> u64 {
    syn_ack_lifetime(
        initial_rto,
        syn::RTO_MAX_S * u64::from(compiler.host.hz),
        retries,
    )
}

pub(super) fn mptcp(compiler: &mut Compiler<'_>, settings: &Settings) {
    match settings.mptcp {
        Mptcp::Keep => {}
        Mptcp::Apply if settings.initial_rto.is_some() || settings.rto_max.is_some() => {
            compiler.kernel.flags |= policy_flags::MPTCP;
            let note = "MPTCP sockets also get initial_rto and rto_max";
            compiler.effect("mptcp", "apply").note = Some(note.to_owned());
        }
        Mptcp::Apply => {
            let reason = Remark::new(|terms| {
                format!(
                    "it sets {} and {} on MPTCP sockets, but the policy has neither; add one, \
                     for example {}",
                    terms.name("initial_rto"),
                    terms.name("rto_max"),
                    terms.quoted("initial_rto", "100ms")
                )
            });
            compiler.refuse("mptcp", settings.mptcp, reason);
        }
    }
}

fn seconds(jiffies: u64, hz: u32) -> String {
    tenths_of_s(jiffies * 1000 / u64::from(hz))
}

fn retransmissions(retries: u8) -> String {
    let plural = if retries == 1 { "" } else { "s" };
    format!("{retries} retransmission{plural}")
}

#[cfg(test)]
mod tests {
    use super::{
        super::tests::{compiled, described, on, warnings},
        *,
    };
    use crate::{
        policy::{Adjustment, HostFacts},
        testing::HOST,
    };

    #[test]
    fn syn_ack_timers_and_lifetimes_are_those_of_the_table() {
        let rows = [
            ("initial_rto = '100ms'", 5, true),
            ("initial_rto = '100ms'", 8, true),
            ("initial_rto = '100ms'", 1, true),
            ("initial_rto = '100ms'", 2, false),
            ("initial_rto = '100ms'", 255, true),
            // If the program cannot read the listener's setting, its namespace may have the
            // kernel's 5.
            ("initial_rto = '100ms'", 8, false),
            // Never shorter than initial_rto, and nothing without it.
            ("initial_rto = '2s'", 5, true),
            ("initial_rto = '1s'", 5, true),
            ("rto_min = '50ms'", 5, true),
            ("initial_rto = '100ms'\nsyn_ack_rto = 'keep'", 5, true),
            ("syn_ack_rto = '99ms'", 5, true),
            ("syn_ack_rto = '400ms'", 2, true),
            // Values as "auto" would choose, and longer ones.
            ("syn_ack_rto = '493ms'", 5, true),
            ("syn_ack_rto = '100ms'", 8, true),
            ("syn_ack_rto = '1s'", 0, true),
        ];
        let rows = rows.map(|(toml, tcp_synack_retries, reads_listener)| {
            let host = HostFacts {
                tcp_synack_retries,
                reads_listener,
                ..HOST
            };
            let compiled = on(&host, toml, &Adjustment::default());
            let effect = described(&compiled, "syn_ack_rto");
            let mut warnings = warnings(&compiled);
            warnings.retain(|warning| warning.contains("syn_ack_rto"));
            let lines: Vec<_> = effect
                .iter()
                .chain(&warnings)
                .map(|l| format!("\n  {l}"))
                .collect();
            let toml = toml.replace('\n', "; ");
            let jiffies = compiled.kernel.syn_ack_rto_jiffies;
            let lifetimes = compiled
                .effects
                .iter()
                .filter_map(|e| e.request_lifetime_ms);
            let lifetimes: Vec<_> = lifetimes.collect();
            format!(
                "{toml}, {tcp_synack_retries} retransmissions, read: {reads_listener}: \
                 {jiffies:?}, {lifetimes:?} ms{}",
                lines.concat()
            )
        });
        insta::assert_snapshot!(rows.join("\n"));
    }

    #[test]
    fn mptcp_is_a_flag() {
        for (mptcp, flag) in [("keep", 0), ("apply", policy_flags::MPTCP)] {
            let compiled = compiled(&format!("initial_rto = '100ms'\nmptcp = '{mptcp}'"));
            assert_eq!(compiled.kernel.flags & policy_flags::MPTCP, flag);
        }
    }
}
