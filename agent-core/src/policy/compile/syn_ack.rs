//! The `syn_ack_rto` setting: a shorter SYN-ACK timer with which half-open requests do not end too
//! early; and `mptcp`, which excludes the SYNs of MPTCP sockets.
//!
//! A request lives while the kernel retransmits its SYN-ACK: (2^(n + 1) - 1) times the initial RTO,
//! where n is the listener's TCP_SYNCNT or `net.ipv4.tcp_synack_retries` (`reqsk_timer_handler()`,
//! Linux 6.12). After that, a client whose ACK and data have been lost is reset.

use std::time::Duration;

use rto_agent_common::{SYN_ACK_RETRIES_LEN, policy_flags};
use rto_model::syn::{self, syn_ack_lifetime, syn_ack_rto_auto};

use super::{Compiler, EffectiveSetting, SettingError, auto::KERNELS_OWN};
use crate::policy::{
    Mptcp, Settings, SynAckRto, Timer,
    units::{format_duration, jiffies_duration, quantise, tenths_of_s},
};

impl Compiler<'_> {
    pub(super) fn syn_ack_rto(&mut self, settings: &Settings) {
        match settings.syn_ack_rto {
            SynAckRto::Keep => {
                self.passive = None;
                self.effect("syn_ack_rto", "keep", KERNELS_OWN.to_owned(), None, None);
            }
            SynAckRto::Auto => match self.passive {
                _ if !self.errors.is_empty() => {}
                Some(initial_rto) => self.syn_ack_rto_auto(initial_rto),
                None if settings.initial_rto.is_some() => {
                    self.effect("syn_ack_rto", "auto", KERNELS_OWN.to_owned(), None, None);
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
        self.effects.push(EffectiveSetting {
            setting: "syn_ack_rto".to_owned(),
            asked: asked.to_owned(),
            effective: format_duration(jiffies_duration(jiffies, hz)),
            jiffies: Some(jiffies),
            request_lifetime_ms: Some(lifetime * 1000 / u64::from(hz)),
            note: Some(note),
            ..EffectiveSetting::default()
        });
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
                self.effect("mptcp", "apply", "apply".to_owned(), None, Some(note));
            }
            Mptcp::Apply => self.errors.push(SettingError {
                setting: "mptcp",
                value: settings.mptcp.to_string(),
                reason:
                    "it sets initial_rto and rto_max on MPTCP sockets, but the policy has neither; \
                     add one, for example initial_rto = \"100ms\""
                        .to_owned(),
            }),
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
    use super::*;
    use crate::{
        policy::{
            HostFacts,
            compile::{Compiled, check_prefix_width, compile},
        },
        testing::HOST,
    };

    fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    fn on(host: HostFacts, initial_rto: Option<u64>, syn_ack_rto: SynAckRto) -> Compiled {
        let settings = Settings {
            initial_rto: initial_rto.map(|n| ms(n).into()),
            syn_ack_rto,
            rto_min: Some(ms(50).into()),
            ..Settings::default()
        };
        compile(&"p".parse().unwrap(), &settings, &host).unwrap()
    }

    fn described(compiled: &Compiled) -> Option<String> {
        let mut effects = compiled.effects.iter();
        let effect = effects.find(|effect| effect.setting == "syn_ack_rto")?;
        Some(effect.describe(250))
    }

    #[test]
    fn auto_depends_on_the_retransmissions() {
        let compiled = on(HOST, Some(100), SynAckRto::Auto);
        let expected = [0, 0, 0, 0, 0, 124, 62, 31, 25, 25, 25, 25, 25, 25, 25, 25];
        assert_eq!(compiled.kernel.syn_ack_rto_jiffies, expected);
        assert_eq!(compiled.kernel.initial_rto_jiffies, 25);
        assert!(!compiled.warnings.iter().any(|w| w.contains("syn_ack_rto")));
        assert_eq!(
            described(&compiled).unwrap(),
            "auto -> 496ms, 124 jiffies at HZ=250 (half-open connections are kept for 31.2s with 5 \
             retransmissions; kernel default: 63s)"
        );
        let mut effects = compiled.effects.iter();
        let effect = effects.find(|effect| effect.setting == "syn_ack_rto");
        assert_eq!(effect.unwrap().request_lifetime_ms, Some(63 * 496));
    }

    #[test]
    fn auto_says_what_this_hosts_retransmissions_make_of_it() {
        let with = |tcp_synack_retries, reads_listener| {
            let host = HostFacts {
                tcp_synack_retries,
                reads_listener,
                ..HOST
            };
            described(&on(host, Some(100), SynAckRto::Auto)).unwrap()
        };
        assert!(with(8, true).starts_with("auto -> 100ms, 25 jiffies"));
        assert!(
            with(8, true).ends_with("kept for 51.1s with 8 retransmissions; kernel default: 367s)")
        );
        assert!(with(1, true).starts_with("auto -> 1s, 250 jiffies"));
        assert!(with(1, true).contains("kept for 3s with 1 retransmission;"));
        assert!(with(2, false).contains("kept for 7s with 2 retransmissions; kernel default: 7s)"));
        assert!(with(255, true).starts_with("auto -> 100ms, 25 jiffies"));
        // If the program cannot read the listener's setting, its namespace may have the kernel's 5.
        assert!(
            with(8, false).starts_with("auto -> 496ms"),
            "{}",
            with(8, false)
        );
        assert!(with(8, false).ends_with(
            "kept for 31.2s with 5 retransmissions; kernel default: 63s; 8 are configured here, but on \
             this kernel the program cannot read the number of a request)"
        ));
    }

    #[test]
    fn auto_is_never_shorter_than_initial_rto_and_nothing_without() {
        let compiled = on(HOST, Some(2000), SynAckRto::Auto);
        assert_eq!(
            compiled.kernel.syn_ack_rto_jiffies,
            [500; SYN_ACK_RETRIES_LEN]
        );
        let compiled = on(HOST, Some(1000), SynAckRto::Auto);
        assert_eq!(
            compiled.kernel.syn_ack_rto_jiffies,
            [250; SYN_ACK_RETRIES_LEN]
        );
        let compiled = on(HOST, None, SynAckRto::Auto);
        assert_eq!(
            compiled.kernel.syn_ack_rto_jiffies,
            [0; SYN_ACK_RETRIES_LEN]
        );
        assert_eq!(described(&compiled), None);
    }

    #[test]
    fn keep_and_a_value() {
        let compiled = on(HOST, Some(100), SynAckRto::Keep);
        assert_eq!(
            compiled.kernel.syn_ack_rto_jiffies,
            [0; SYN_ACK_RETRIES_LEN]
        );
        assert_eq!(described(&compiled).unwrap(), "keep -> the kernel's own");

        // An initial_rto is not required.
        let compiled = on(HOST, None, SynAckRto::Fixed(ms(99)));
        assert_eq!(compiled.kernel.initial_rto_jiffies, 0);
        assert_eq!(
            compiled.kernel.syn_ack_rto_jiffies,
            [25; SYN_ACK_RETRIES_LEN]
        );
        assert_eq!(
            described(&compiled).unwrap(),
            "99ms -> 100ms, 25 jiffies at HZ=250 (half-open connections are kept for 6.3s with 5 \
             retransmissions; kernel default: 63s)"
        );
    }

    #[test]
    fn a_value_that_ends_requests_early_is_taken_with_a_warning() {
        let warned = |rto, retries| {
            let host = HostFacts {
                tcp_synack_retries: retries,
                ..HOST
            };
            let compiled = on(host, None, SynAckRto::Fixed(ms(rto)));
            let mut warnings = compiled.warnings.into_iter();
            warnings.find(|warning| warning.contains("syn_ack_rto"))
        };
        assert_eq!(
            warned(100, 5).unwrap(),
            "syn_ack_rto = 100ms: a half-open connection is kept for 6.3s with 5 retransmissions \
             (kernel default: 63s); a client whose ACK and data are lost for longer is reset; \
             syn_ack_rto = \"auto\" keeps it for 31s"
        );
        assert!(warned(400, 2).unwrap().ends_with("keeps it for 7s"));
        // Values as "auto" would choose, and longer ones.
        assert_eq!(warned(493, 5), None);
        assert_eq!(warned(100, 8), None);
        assert_eq!(warned(1000, 0), None);
    }

    #[test]
    fn wide_prefixes_need_force() {
        let wide = "0.0.0.0/0".parse().unwrap();
        let of = |rto, force| Settings {
            syn_ack_rto: SynAckRto::Fixed(ms(rto)),
            force,
            ..Settings::default()
        };
        let error = check_prefix_width(&wide, &of(100, false)).unwrap_err();
        assert_eq!(error.setting, "syn_ack_rto");
        assert!(check_prefix_width(&wide, &of(100, true)).is_ok());
        assert!(check_prefix_width(&wide, &of(200, false)).is_ok());
        assert!(check_prefix_width(&"10.0.0.0/8".parse().unwrap(), &of(100, false)).is_ok());
    }

    #[test]
    fn mptcp_is_a_flag() {
        let flags = |mptcp| {
            let settings = Settings {
                initial_rto: Some(ms(100).into()),
                mptcp,
                ..Settings::default()
            };
            compile(&"p".parse().unwrap(), &settings, &HOST)
                .unwrap()
                .kernel
                .flags
        };
        assert_eq!(flags(Mptcp::Keep) & policy_flags::MPTCP, 0);
        assert_ne!(flags(Mptcp::Apply) & policy_flags::MPTCP, 0);
    }

    proptest::proptest! {
        /// For any listener on any host: no request ends before 31 s, unless it would with the
        /// kernel's own timer.
        #[test]
        fn auto_never_ends_a_request_early(
            initial_rto in 1u64..110_000,
            hz in proptest::sample::select(vec![100u32, 250, 300, 1000]),
        ) {
            let host = HostFacts { hz, ..HOST };
            let compiled = on(host, Some(initial_rto), SynAckRto::Auto);
            let hz = u64::from(hz);
            let rto_max = syn::RTO_MAX_S * hz;
            for (retries, jiffies) in compiled.kernel.syn_ack_rto_jiffies.iter().enumerate() {
                let jiffies = if *jiffies == 0 { hz } else { u64::from(*jiffies) };
                let retries = u8::try_from(retries).unwrap();
                let kernel = syn_ack_lifetime(hz, rto_max, retries);
                let lifetime = syn_ack_lifetime(jiffies, rto_max, retries);
                proptest::prop_assert!(lifetime >= kernel.min(31 * hz));
                proptest::prop_assert!(
                    jiffies >= u64::from(compiled.kernel.initial_rto_jiffies)
                );
            }
        }
    }
}
