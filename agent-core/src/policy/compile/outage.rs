//! How late connections may be after an outage.

use std::time::Duration;

use rto_model::outage::{
    Comparison, DATA_OUTAGES_MS, IN_STEP_LATE, IN_STEP_MS, compare_rto_min, first_from, in_step,
    nearest, rto_min_in_step,
};

use super::{Compiler, EffectiveSetting, KERNEL_INITIAL_RTO};
use crate::policy::{
    AutoInitialRto, Settings, Timer,
    units::{format_duration, jiffies_duration, quantise},
};

/// Outage durations that are reported separately if the interval cannot be capped, seconds.
const UNCAPPED_S: [u64; 5] = [0, 1, 5, 10, 30];

impl Compiler<'_> {
    /// Notes how late connect() and data may be, and warns if an initial RTO is not in step.
    pub(super) fn note_outages(&mut self, settings: &Settings) {
        let hz = self.host.hz.into();
        let configured = self.adjustment.active.timer == Timer::Configured;
        let initial_rto = settings.fixed_initial_rto();
        if let Some(asked) = initial_rto.filter(|rto| configured && *rto < KERNEL_INITIAL_RTO) {
            let rto = quantise(asked, self.host.hz).jiffies;
            if rto > 0 && rto < hz {
                self.note_syn(asked, rto);
            }
        }
        if let Some(auto) = settings.auto_initial_rto() {
            self.check_auto_in_step(auto);
        }
        let rto_min = settings.rto_min.filter(|_| self.kernel.rto_min_us != 0);
        if let Some(asked) = rto_min {
            let jiffies = quantise(asked, self.host.hz).jiffies;
            let compared = compare_rto_min(hz, jiffies);
            if compared.late >= IN_STEP_LATE {
                let near = self.near(&rto_min_in_step(hz), jiffies);
                let late = Self::late(&compared, DATA_OUTAGES_MS.end);
                self.add_note(
                    "rto_min",
                    &format!("not in step with the kernel's own timer: data is late {late}{near}"),
                );
            }
        }
    }

    fn note_syn(&mut self, asked: Duration, rto: u64) {
        let host = self.host.syn_schedule();
        let timers = self.host.syn_timers(rto);
        if !self.host.has_rto_max {
            let ranges = UNCAPPED_S.windows(2).map(|range| {
                let (from, to) = (range[0], range[1]);
                let compared = host.compare(timers, from * 1_000..to * 1_000);
                let [mean, worst] =
                    [compared.mean_ms, compared.worst.later_ms as f64].map(signed_s);
                format!("{from}-{to}s {mean}/{worst}")
            });
            let ranges: Vec<_> = ranges.collect();
            let note = format!(
                "this kernel cannot cap the interval (Linux 6.15 and later): delay of connect() \
                 compared with the kernel's own timers, mean/worst by length of the outage: {}",
                ranges.join(", ")
            );
            self.add_note("initial_rto", &note);
            return;
        }
        let compared = host.compare(timers, 0..IN_STEP_MS);
        let late = Self::late(&compared, IN_STEP_MS);
        if compared.late < IN_STEP_LATE {
            let worst = match compared.worst_late.later_ms {
                0 => String::new(),
                _ => format!("; connect() is late {late}"),
            };
            self.add_note(
                "initial_rto",
                &format!("in step with the kernel's own SYNs{worst}"),
            );
            return;
        }
        let near = self.near(&host.in_step(), rto);
        let note =
            format!("not in step with the kernel's own SYNs: connect() is late {late}{near}");
        self.add_note("initial_rto", &note);
        self.warnings.push(format!(
            "initial_rto = {} is not in step with the kernel's own SYNs: connect() is late {late}{near}",
            format_duration(asked)
        ));
    }

    /// "in 8.5% of outages up to 30s, by at most 0.77s (outages of 10.89s to 11.15s)". Late means
    /// later than with the kernel's own timers by more than max(0.25 s, 5 % of the outage), or 0.3
    /// s for data.
    fn late(compared: &Comparison, up_to_ms: u64) -> String {
        let worst = compared.worst_late;
        let (from, to) = (seconds(worst.from_ms), seconds(worst.to_ms));
        let outages = if from == to {
            from
        } else {
            format!("{from} to {to}")
        };
        format!(
            "in {}% of outages up to {}, by at most {} (outages of {outages})",
            (compared.late * 1_000.0).round() / 10.0,
            seconds(up_to_ms),
            seconds(worst.later_ms),
        )
    }

    /// "; 32ms and 56ms are in step". In whole milliseconds if those round up to the same jiffies.
    fn near(&self, values: &[u64], jiffies: u64) -> String {
        let hz = self.host.hz;
        let text = |jiffies| {
            let exact = jiffies_duration(jiffies, hz);
            let whole = Duration::from_millis(u64::try_from(exact.as_millis()).unwrap_or(u64::MAX));
            let is_same = quantise(whole, hz).jiffies == jiffies;
            format_duration(if is_same { whole } else { exact })
        };
        match nearest(values, jiffies) {
            (Some(below), Some(above)) => {
                format!("; {} and {} are in step", text(below), text(above))
            }
            (Some(one), None) | (None, Some(one)) => format!("; {} is in step", text(one)),
            (None, None) => String::new(),
        }
    }

    /// Warns if no value in the range of "auto" is in step.
    fn check_auto_in_step(&mut self, auto: &AutoInitialRto) {
        let Some(linear_timeouts) = self.host.in_step() else {
            return;
        };
        let hz = self.host.hz;
        let [least, largest] =
            [auto.least(), auto.largest()].map(|value| quantise(value, hz).jiffies);
        let in_step = in_step(hz.into(), linear_timeouts);
        if least <= largest
            && largest < u64::from(hz)
            && first_from(&in_step, least).is_none_or(|value| value > largest)
        {
            let near = self.near(&in_step, least);
            self.warnings.push(format!(
                "initial_rto: no value from {} to {} is in step with the kernel's own SYNs, so \
                 connect() may be late after an outage{near}",
                format_duration(auto.least()),
                format_duration(auto.largest()),
            ));
        }
    }

    fn add_note(&mut self, setting: &str, note: &str) {
        let mut effects = self.effects.iter_mut();
        if let Some(EffectiveSetting { note: known, .. }) =
            effects.find(|effect| effect.setting == setting)
        {
            *known = Some(match known.take() {
                Some(known) => format!("{known}; {note}"),
                None => note.to_owned(),
            });
        }
    }
}

/// Milliseconds as seconds with up to two decimals.
fn seconds(ms: u64) -> String {
    format!("{}s", (ms as f64 / 10.0).round() / 100.0)
}

fn signed_s(ms: f64) -> String {
    format!("{:+}s", (ms / 10.0).round() / 100.0)
}

#[cfg(test)]
mod tests {
    use rto_agent_common::syn;
    use rto_model::{
        outage::{Host, Timers},
        wheel,
    };

    use super::super::{
        Compiled,
        tests::{described, on},
    };
    use crate::{
        policy::{Adjustment, HostFacts},
        testing::HOST,
    };

    fn with(host: &HostFacts, toml: &str) -> Compiled {
        on(host, toml, &Adjustment::default())
    }

    fn text(compiled: &Compiled) -> String {
        let effect = described(compiled, "initial_rto").or_else(|| described(compiled, "rto_min"));
        let warnings = compiled
            .warnings
            .iter()
            .map(|text| format!("\nwarning: {text}"));
        std::iter::once(effect.unwrap()).chain(warnings).collect()
    }

    #[test]
    fn notes_say_how_late_connections_may_be() {
        let old = HostFacts {
            has_rto_max: false,
            ..HOST
        };
        let mut all = Vec::new();
        for (host, toml) in [
            (HOST, "initial_rto = '100ms'"),
            (HOST, "initial_rto = '16ms'"),
            (HOST, "initial_rto = '40ms'"),
            (HOST, "initial_rto = '2ms'"),
            (HOST, "initial_rto = '998ms'"),
            (HOST, "initial_rto = '1s'"),
            (old, "initial_rto = '100ms'"),
            (
                HOST,
                "initial_rto = { auto = true, min = '64ms', max = '96ms' }",
            ),
            (HOST, "initial_rto = { auto = true, max = '200ms' }"),
            (
                old,
                "initial_rto = { auto = true, min = '64ms', max = '96ms' }",
            ),
            (HOST, "rto_min = '100ms'"),
            (HOST, "rto_min = '60ms'"),
            (HOST, "rto_min = '8ms'\ndelack_max = '5ms'"),
        ] {
            let before = if host.has_rto_max {
                ""
            } else {
                " (before Linux 6.15)"
            };
            all.push(format!(
                "{}{before}\n{}",
                toml.replace('\n', "; "),
                text(&with(&host, toml))
            ));
        }
        insta::assert_snapshot!(all.join("\n\n"));
    }

    /// The values that the tuning guide recommends.
    #[test]
    fn recommended_values_have_no_warning_at_any_hz() {
        for hz in [100, 250, 300, 1000] {
            let host = HostFacts { hz, ..HOST };
            for initial_rto in ["60ms", "100ms", "300ms"] {
                let toml = format!("initial_rto = '{initial_rto}'\nsyn_ack_rto = 'keep'");
                let compiled = with(&host, &toml);
                assert_eq!(
                    compiled.warnings,
                    Vec::<String>::new(),
                    "{initial_rto}, HZ {hz}"
                );
            }
        }
        for (hz, rto_min) in [
            (250, "48ms"),
            (1000, "24ms"),
            (250, "100ms"),
            (1000, "100ms"),
        ] {
            let host = HostFacts { hz, ..HOST };
            let compiled = with(&host, &format!("rto_min = '{rto_min}'\ndelack_max = '5ms'"));
            assert_eq!(compiled.effects[0].note, None, "{rto_min}, HZ {hz}");
        }
    }

    #[test]
    fn values_named_as_nearest_are_in_step() {
        for hz in [100, 250, 300, 1000] {
            let host = HostFacts { hz, ..HOST };
            let warnings = with(&host, "initial_rto = '40ms'").warnings;
            let near = warnings.iter().find_map(|w| w.split_once("); "));
            let near = near.unwrap().1.strip_suffix(" are in step").unwrap();
            for value in near.split(" and ") {
                let warnings = with(&host, &format!("initial_rto = '{value}'")).warnings;
                assert!(
                    !warnings.iter().any(|w| w.contains("not in step")),
                    "{value}, HZ {hz}"
                );
            }
        }
    }

    /// `check` describes the schedule that the program produces.
    #[test]
    fn modelled_schedule_is_the_programs() {
        for (hz, linear_timeouts, rto) in [(250, 4, 25), (250, 0, 10), (1000, 1, 20), (100, 4, 2)] {
            let kernel = syn::Timeouts {
                initial_rto_ms: syn::KERNEL_RTO_MS,
                retries: 6,
                linear: linear_timeouts.into(),
                rto_max_ms: 120_000,
            };
            let host = Host {
                hz: hz.into(),
                linear_timeouts,
                syn_retries: 6,
            };
            let modelled = host.syns(Timers::Capped(rto), 0).sent;
            let (mut now, mut interval) = (0, rto);
            for (n, sent) in modelled.iter().skip(1).enumerate() {
                now = wheel::fires_at(now, interval);
                assert_eq!(now, *sent, "copy {n} of {rto} jiffies, HZ {hz}");
                let cap_ms = kernel.cap_ms(now * 1_000 / host.hz, hz);
                let cap = u64::from(cap_ms) * host.hz / 1_000;
                let doubles = n >= linear_timeouts.into();
                interval = cap.min(if doubles { interval * 2 } else { interval });
            }
        }
    }
}
