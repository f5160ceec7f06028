//! The `syn_ack_rto` setting: a shorter SYN-ACK timer with which half-open requests do not end too
//! early; and `mptcp`, which excludes the SYNs of MPTCP sockets.
//!
//! A request lives while the kernel retransmits its SYN-ACK: (2^(n + 1) - 1) times the initial RTO,
//! where n is the listener's TCP_SYNCNT or `net.ipv4.tcp_synack_retries` (`reqsk_timer_handler()`,
//! Linux 6.12). After that, a client whose ACK and data have been lost is reset.

use std::time::Duration;

use rto_agent_common::{SYN_ACK_RETRIES_LEN, policy_flags};
use rto_model::syn::{self, syn_ack_lifetime, syn_ack_rto_auto};

use super::Compiler;
use crate::policy::{
    Mptcp, Settings, SynAckRto, Timer,
    units::{format_duration, quantise, tenths_of_s},
};

impl Compiler<'_> {
    pub(super) fn syn_ack_rto(&mut self, settings: &Settings) {
        match settings.syn_ack_rto {
            SynAckRto::Keep => {
                self.passive = None;
                self.effect("syn_ack_rto", "keep").set_jiffies(None, 0);
            }
            SynAckRto::Auto => match self.passive {
                _ if !self.errors.is_empty() => {}
                Some(initial_rto) => self.syn_ack_rto_auto(initial_rto),
                None if settings.initial_rto.is_some() => {
                    self.effect("syn_ack_rto", "auto").set_jiffies(None, 0);
                }
                None => {}
            },
            SynAckRto::Fixed(asked) => {
                if self.is_initial_rto("syn_ack_rto", asked) {
                    self.syn_ack_rto_fixed(asked);
                }
            }
        }
    }

    fn syn_ack_rto_fixed(&mut self, asked: Duration) {
        let configured = quantise(asked, self.host.hz).jiffies;
        let timer = self.adjustment.passive.timer;
        // The value learnt for "auto" does not apply to a fixed setting.
        self.passive = None;
        let text = format_duration(asked);
        let Some(jiffies) = self.adjusted(timer, Some(configured)) else {
            self.adjusted_effect("syn_ack_rto", &text, None);
            return;
        };
        let in_kernel = u32::try_from(jiffies).unwrap_or(u32::MAX);
        self.kernel.syn_ack_rto_jiffies = [in_kernel; SYN_ACK_RETRIES_LEN];
        self.syn_ack_effect(&text, jiffies);
        if timer == Timer::Configured {
            self.warn_of_short_requests(asked, jiffies);
        }
    }

    fn syn_ack_rto_auto(&mut self, initial_rto: u64) {
        let hz = u64::from(self.host.hz);
        let of = |retries: u8| syn_ack_rto_auto(initial_rto, hz, retries);
        for (retries, slot) in self.kernel.syn_ack_rto_jiffies.iter_mut().enumerate() {
            let jiffies = of(u8::try_from(retries).unwrap_or(u8::MAX));
            // The kernel's own timer needs no setting, unless it was requested.
            *slot = match jiffies == hz && initial_rto != hz {
                true => 0,
                false => u32::try_from(jiffies).unwrap_or(u32::MAX),
            };
        }
        // The table's last slot applies to more retransmissions as well.
        let most = u8::try_from(SYN_ACK_RETRIES_LEN - 1).unwrap_or(u8::MAX);
        self.syn_ack_effect("auto", of(self.host.syn_ack_retries().min(most)));
    }

    fn syn_ack_effect(&mut self, asked: &str, jiffies: u64) {
        let hz = self.host.hz;
        let retries = self.host.syn_ack_retries();
        let lifetime = self.request_lifetime(jiffies, retries);
        let mut note = format!(
            "half-open connections are kept for {} with {}; kernel default: {}",
            seconds(lifetime, hz),
            retransmissions(retries),
            seconds(self.request_lifetime(hz.into(), retries), hz),
        );
        if retries < self.host.tcp_synack_retries {
            note.push_str(&format!(
                "; {} are configured here, but on this kernel the program cannot read the number \
                 of a request",
                self.host.tcp_synack_retries
            ));
        }
        let effect = self.effect("syn_ack_rto", asked);
        effect.set_jiffies(Some(jiffies), hz);
        effect.request_lifetime_ms = Some(lifetime * 1000 / u64::from(hz));
        effect.note = Some(note);
    }

    fn warn_of_short_requests(&mut self, asked: Duration, jiffies: u64) {
        let hz = self.host.hz;
        let retries = self.host.syn_ack_retries();
        let lifetime = self.request_lifetime(jiffies, retries);
        let kernel = self.request_lifetime(hz.into(), retries);
        let wanted = kernel.min(syn::SYN_ACK_LIFETIME_S * u64::from(hz));
        if lifetime < wanted {
            self.warnings.push(format!(
                "syn_ack_rto = {}: a half-open connection is kept for {} with {} (kernel default: {}); \
                 a client whose ACK and data are lost for longer is reset; syn_ack_rto = \"auto\" \
                 keeps it for {}",
                format_duration(asked),
                seconds(lifetime, hz),
                retransmissions(retries),
                seconds(kernel, hz),
                seconds(wanted, hz),
            ));
        }
    }

    fn request_lifetime(&self, initial_rto: u64, retries: u8) -> u64 {
        syn_ack_lifetime(
            initial_rto,
            syn::RTO_MAX_S * u64::from(self.host.hz),
            retries,
        )
    }

    pub(super) fn mptcp(&mut self, settings: &Settings) {
        match settings.mptcp {
            Mptcp::Keep => {}
            Mptcp::Apply if settings.initial_rto.is_some() || settings.rto_max.is_some() => {
                self.kernel.flags |= policy_flags::MPTCP;
                let note = "MPTCP sockets also get initial_rto and rto_max";
                self.effect("mptcp", "apply").note = Some(note.to_owned());
            }
            Mptcp::Apply => self.refuse(
                "mptcp",
                settings.mptcp,
                "it sets initial_rto and rto_max on MPTCP sockets, but the policy has neither; \
                 add one, for example initial_rto = \"100ms\"",
            ),
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
        super::{
            Compiled,
            tests::{compiled, described, on},
        },
        *,
    };
    use crate::{
        policy::{Adjustment, HostFacts},
        testing::HOST,
    };

    fn with(host: &HostFacts, toml: &str) -> Compiled {
        on(host, toml, &Adjustment::default())
    }

    fn syn_ack_rto(compiled: &Compiled) -> String {
        described(compiled, "syn_ack_rto").unwrap_or_default()
    }

    #[test]
    fn auto_depends_on_the_retransmissions() {
        let compiled = compiled("initial_rto = '100ms'");
        let expected = [0, 0, 0, 0, 0, 124, 62, 31, 25, 25, 25, 25, 25, 25, 25, 25];
        assert_eq!(compiled.kernel.syn_ack_rto_jiffies, expected);
        assert_eq!(compiled.kernel.initial_rto_jiffies, 25);
        assert!(!compiled.warnings.iter().any(|w| w.contains("syn_ack_rto")));
        assert_eq!(
            syn_ack_rto(&compiled),
            "auto -> 496ms, 124 jiffies at HZ=250 (half-open connections are kept for 31.2s with 5 \
             retransmissions; kernel default: 63s)"
        );
        let mut lifetimes = compiled
            .effects
            .iter()
            .filter_map(|e| e.request_lifetime_ms);
        assert_eq!(lifetimes.next(), Some(63 * 496));
    }

    #[test]
    fn auto_says_what_this_hosts_retransmissions_make_of_it() {
        for (tcp_synack_retries, reads_listener, begin, end) in [
            (
                8,
                true,
                "100ms",
                "51.1s with 8 retransmissions; kernel default: 367s)",
            ),
            (
                1,
                true,
                "1s",
                "3s with 1 retransmission; kernel default: 3s)",
            ),
            (
                2,
                false,
                "1s",
                "7s with 2 retransmissions; kernel default: 7s)",
            ),
            (255, true, "100ms", ""),
            // If the program cannot read the listener's setting, its namespace may have the
            // kernel's 5.
            (
                8,
                false,
                "496ms",
                "31.2s with 5 retransmissions; kernel default: 63s; 8 are configured here, but on \
                 this kernel the program cannot read the number of a request)",
            ),
        ] {
            let host = HostFacts {
                tcp_synack_retries,
                reads_listener,
                ..HOST
            };
            let text = syn_ack_rto(&with(&host, "initial_rto = '100ms'"));
            assert!(text.starts_with(&format!("auto -> {begin}, ")), "{text}");
            assert!(text.ends_with(end), "{text}");
        }
    }

    #[test]
    fn auto_is_never_shorter_than_initial_rto_and_nothing_without() {
        for (toml, jiffies) in [
            ("initial_rto = '2s'", 500),
            ("initial_rto = '1s'", 250),
            ("rto_min = '50ms'", 0),
        ] {
            let compiled = compiled(toml);
            let expected = [jiffies; SYN_ACK_RETRIES_LEN];
            assert_eq!(compiled.kernel.syn_ack_rto_jiffies, expected, "{toml}");
            assert_eq!(syn_ack_rto(&compiled).is_empty(), jiffies == 0, "{toml}");
        }
    }

    #[test]
    fn keep_and_a_value() {
        let keep = compiled("initial_rto = '100ms'\nsyn_ack_rto = 'keep'");
        assert_eq!(keep.kernel.syn_ack_rto_jiffies, [0; SYN_ACK_RETRIES_LEN]);
        assert_eq!(syn_ack_rto(&keep), "keep -> the kernel's own");
        // An initial_rto is not required.
        let value = compiled("syn_ack_rto = '99ms'");
        assert_eq!(value.kernel.initial_rto_jiffies, 0);
        assert_eq!(value.kernel.syn_ack_rto_jiffies, [25; SYN_ACK_RETRIES_LEN]);
        assert_eq!(
            syn_ack_rto(&value),
            "99ms -> 100ms, 25 jiffies at HZ=250 (half-open connections are kept for 6.3s with 5 \
             retransmissions; kernel default: 63s)"
        );
    }

    #[test]
    fn value_that_ends_requests_early_is_taken_with_a_warning() {
        let warned = |rto_ms, tcp_synack_retries| {
            let host = HostFacts {
                tcp_synack_retries,
                ..HOST
            };
            let compiled = with(&host, &format!("syn_ack_rto = '{rto_ms}ms'"));
            compiled.warnings.concat()
        };
        assert_eq!(
            warned(100, 5),
            "syn_ack_rto = 100ms: a half-open connection is kept for 6.3s with 5 retransmissions \
             (kernel default: 63s); a client whose ACK and data are lost for longer is reset; \
             syn_ack_rto = \"auto\" keeps it for 31s"
        );
        assert!(warned(400, 2).ends_with("keeps it for 7s"));
        // Values as "auto" would choose, and longer ones.
        for (rto_ms, retries) in [(493, 5), (100, 8), (1000, 0)] {
            assert_eq!(warned(rto_ms, retries), "");
        }
    }

    #[test]
    fn mptcp_is_a_flag() {
        for (mptcp, flag) in [("keep", 0), ("apply", policy_flags::MPTCP)] {
            let compiled = compiled(&format!("initial_rto = '100ms'\nmptcp = '{mptcp}'"));
            assert_eq!(compiled.kernel.flags & policy_flags::MPTCP, flag);
        }
    }
}
