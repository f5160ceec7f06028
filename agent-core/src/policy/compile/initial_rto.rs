//! The `initial_rto` setting, and how long connect() may take with it after an outage.

use std::time::Duration;

use super::{
    auto::auto_initial_rto,
    compiler::{Compiler, KERNEL_INITIAL_RTO},
};
use crate::policy::{
    Adjustment, InitialRtoSetting, Settings, Timer,
    units::{format_duration, jiffies_duration, quantise},
};

/// Outage durations that are reported separately if the intervals between SYNs double, seconds.
const DOUBLING_S: [u64; 5] = [0, 1, 5, 10, 30];

/// Compiles `initial_rto`.
pub(super) fn initial_rto(compiler: &mut Compiler<'_>, settings: &Settings) {
    match &settings.initial_rto {
        Some(InitialRtoSetting::Fixed(asked)) => fixed(compiler, *asked),
        Some(InitialRtoSetting::Auto(auto)) => auto_initial_rto(compiler, auto, settings),
        None => {}
    }
    let initial_rto = compiler.active.unwrap_or_default();
    compiler.kernel.initial_rto_jiffies = u32::try_from(initial_rto).unwrap_or(u32::MAX);
}

fn fixed(compiler: &mut Compiler<'_>, asked: Duration) {
    if !compiler.is_initial_rto("initial_rto", asked) {
        return;
    }
    let configured = compiler.host.initial_rto(asked);
    let Adjustment {
        active, passive, ..
    } = compiler.adjustment;
    compiler.active = compiler.adjusted(active.timer, Some(configured));
    compiler.passive = compiler.adjusted(passive.timer, Some(configured));
    match active.timer {
        Timer::Configured => fixed_effect(compiler, asked, configured),
        Timer::Kernel | Timer::Value(_) => {
            compiler.adjusted_effect("initial_rto", &format_duration(asked), compiler.active);
        }
    }
}

fn fixed_effect(compiler: &mut Compiler<'_>, asked: Duration, jiffies: u64) {
    let hz = compiler.host.hz;
    let text = format_duration(asked);
    if jiffies > quantise(asked, hz).jiffies {
        let effective = format_duration(jiffies_duration(jiffies, hz));
        compiler.warn(|terms| {
            let asked = terms.with("initial_rto", &text);
            format!("{asked} becomes {effective}: the program keeps two SYNs 10ms apart")
        });
    }
    compiler.warn_of_long("initial_rto", asked);
    let note = if asked >= KERNEL_INITIAL_RTO {
        Some("not shorter than the kernel's own 1s".to_owned())
    } else {
        (jiffies < hz.into()).then(|| outage_note(compiler, jiffies))
    };
    let effect = compiler.effect("initial_rto", text);
    effect.set_jiffies(Some(jiffies), hz);
    effect.note = note;
}

/// When SYNs are retransmitted in an outage, with an initial RTO of fewer jiffies than the kernel's.
fn outage_note(compiler: &Compiler<'_>, rto: u64) -> String {
    if compiler.host.shapes_syns {
        return "SYNs follow the kernel's own after an outage".to_owned();
    }
    let host = compiler.host.syn_schedule();
    let timers = compiler.host.syn_timers(rto);
    let ranges = DOUBLING_S.windows(2).map(|range| {
        let (from, to) = (range[0], range[1]);
        let compared = host.compare(timers, from * 1_000..to * 1_000);
        let [mean, worst] = [compared.mean_ms, compared.worst.later_ms as f64].map(signed_s);
        format!("{from}-{to}s {mean}/{worst}")
    });
    let ranges: Vec<_> = ranges.collect();
    format!(
        "the program cannot shape the interval between SYNs, which doubles (doctor says why): \
         delay of connect() compared with the kernel's own timers, mean/worst by length of the \
         outage: {}",
        ranges.join(", ")
    )
}

fn signed_s(ms: f64) -> String {
    format!("{:+}s", (ms / 10.0).round() / 100.0)
}

#[cfg(test)]
mod tests {
    use super::super::tests::{described, on, warnings};
    use crate::{
        policy::{Adjustment, HostFacts},
        testing::HOST,
    };

    #[test]
    fn notes_say_when_syns_are_retransmitted() {
        let doubling = HostFacts {
            shapes_syns: false,
            ..HOST
        };
        let before_6_15 = HostFacts {
            has_rto_max: false,
            ..HOST
        };
        let mut all = Vec::new();
        for (name, host, toml) in [
            ("", HOST, "initial_rto = '100ms'"),
            (" (before Linux 6.15)", before_6_15, "initial_rto = '100ms'"),
            ("", HOST, "initial_rto = '40ms'"),
            ("", HOST, "initial_rto = '2ms'"),
            ("", HOST, "initial_rto = '998ms'"),
            ("", HOST, "initial_rto = '1s'"),
            (" (without syn-schedule)", doubling, "initial_rto = '100ms'"),
            ("", HOST, "initial_rto = { auto = true, max = '200ms' }"),
            ("", HOST, "rto_min = '60ms'"),
        ] {
            let compiled = on(&host, toml, &Adjustment::default());
            let effect =
                described(&compiled, "initial_rto").or_else(|| described(&compiled, "rto_min"));
            let mut text = format!("{toml}{name}\n{}", effect.unwrap());
            for warning in &compiled.warnings {
                text.push_str(&format!("\nwarning: {warning}"));
            }
            all.push(text);
        }
        insta::assert_snapshot!(all.join("\n\n"));
    }

    #[test]
    fn initial_rto_keeps_syns_ten_milliseconds_apart() {
        for (hz, jiffies) in [(100, 1), (250, 2), (300, 2), (1000, 9)] {
            let host = HostFacts { hz, ..HOST };
            let compiled = on(&host, "initial_rto = '1ms'", &Adjustment::default());
            assert_eq!(compiled.kernel.initial_rto_jiffies, jiffies, "HZ {hz}");
            assert_eq!(compiled.effects[0].jiffies, Some(jiffies.into()), "HZ {hz}");
            let warnings = warnings(&compiled);
            let raised = warnings.iter().any(|text| text.contains("SYNs 10ms apart"));
            assert_eq!(raised, hz != 100, "{warnings:?}");
            // A timer fires a jiffy late at least.
            assert!((jiffies + 1) * 100 >= hz);
        }
    }
}
