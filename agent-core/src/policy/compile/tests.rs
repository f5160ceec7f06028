use super::{constraints::lifetime, *};
use crate::{
    policy::{SETTINGS, Terms},
    testing::HOST,
};

/// Settings, as in a configuration file.
pub(super) fn settings(toml: &str) -> Settings {
    toml::from_str(toml).unwrap_or_else(|e| panic!("{toml}: {e}"))
}

/// Compiles settings for a host, with decisions of the daemon.
pub(super) fn on(host: &HostFacts, toml: &str, adjustment: &Adjustment) -> Compiled {
    let compiled = compile_adjusted(&"p".parse().unwrap(), &settings(toml), adjustment, host);
    compiled.unwrap_or_else(|e| panic!("{toml}: {e:?}"))
}

/// Compiles settings for [`HOST`].
pub(super) fn compiled(toml: &str) -> Compiled {
    on(&HOST, toml, &Adjustment::default())
}

/// Why a host refuses settings.
pub(super) fn errors(host: &HostFacts, toml: &str) -> Vec<String> {
    let errors = compile(&"p".parse().unwrap(), &settings(toml), host);
    errors
        .err()
        .unwrap_or_default()
        .iter()
        .map(ToString::to_string)
        .collect()
}

/// The warnings of a policy.
pub(super) fn warnings(compiled: &Compiled) -> Vec<String> {
    compiled.warnings.iter().map(ToString::to_string).collect()
}

/// The effect of a setting in words, if it has one.
pub(super) fn described(compiled: &Compiled, setting: &str) -> Option<String> {
    let effect = compiled
        .effects
        .iter()
        .find(|effect| effect.setting == setting)?;
    Some(effect.describe(HOST.hz))
}

#[test]
fn settings_outside_kernel_limits_are_refused() {
    let refused = [
        "",
        "initial_rto = '0s'",
        "initial_rto = '2m'",
        "rto_min = '4ms'",
        "rto_min = '201ms'",
        "delack_max = '50ms'\nrto_min = '45ms'",
        "rto_max = '999ms'",
        "rto_max = '1s'\ninitial_rto = '2s'",
        "user_timeout = '0s'",
        "delack_max = '20ms'\nrto_min = '20ms'",
        "linear_retries = 7\nthin_linear = true",
        "linear_retries = 1",
        "rto_restart = true\ndelack_max = '20ms'",
        "rto_restart = false",
        "syn_ack_rto = '0s'",
        "syn_ack_rto = 'keep'",
        "syn_ack_rto = '3s'\nrto_max = '2s'",
        "mptcp = 'apply'\nrto_min = '50ms'",
    ];
    let mut all: Vec<_> = refused
        .iter()
        .flat_map(|toml| errors(&HOST, toml))
        .collect();
    let old = HostFacts {
        has_rto_max: false,
        has_bpf_thin_linear: false,
        ..HOST
    };
    all.extend(errors(&old, "rto_max = '2s'\nthin_linear = true"));
    insta::assert_snapshot!(all.join("\n"));
}

/// A policy of `rto-agent add` is described in terms of its options.
#[test]
fn texts_name_keys_or_options() {
    let both = |toml: &str| {
        let compiled = compile(&"p".parse().unwrap(), &settings(toml), &HOST);
        let texts = |terms: Terms| match &compiled {
            Ok(compiled) => {
                let warnings = compiled.warnings.iter();
                warnings.map(|text| text.text(terms).to_owned()).collect()
            }
            Err(errors) => Vec::from_iter(errors.iter().map(|error| error.text(terms))),
        };
        [Terms::File, Terms::Options].map(|terms| format!("  {}", texts(terms).join("\n  ")))
    };
    let all = [
        "rto_min = '100ms'\nlinear_retries = 2",
        "rto_restart = true\ndelack_max = '20ms'",
        "rto_min = '20ms'",
        "syn_ack_rto = '100ms'",
        "rto_min = '100ms'\nguard = 'on'",
        "force = true",
    ];
    let all = all.map(|toml| format!("{}\n{}", toml.replace('\n', "; "), both(toml).join("\n")));
    insta::assert_snapshot!(all.join("\n"));
}

#[test]
fn dangerous_values_warn() {
    let warnings = |cidr: &str, toml: &str| {
        let mut warnings = warnings(&compiled(toml));
        warnings.retain(|text| text.contains("longer than the kernel's own"));
        let short = short_for_width(&cidr.parse().unwrap(), &settings(toml));
        warnings.extend(short.map(|text| text.to_string()));
        warnings
    };
    let short = warnings("10.0.0.0/16", "initial_rto = '19ms'");
    assert!(
        short[0].starts_with("initial_rto = 19ms is very short for 10.0.0.0/16"),
        "{short:?}"
    );
    let long = warnings("10.0.0.0/24", "initial_rto = '1001ms'\nsyn_ack_rto = '2s'");
    assert_eq!(long.len(), 2, "{long:?}");
    for (cidr, toml) in [
        ("10.0.0.0/17", "initial_rto = '4ms'"),
        ("10.0.0.0/8", "initial_rto = '20ms'"),
        ("10.0.0.0/8", "rto_min = '8ms'"),
        ("2001:db8::/33", "initial_rto = '4ms'"),
        ("10.0.0.0/24", "initial_rto = '1s'"),
    ] {
        assert_eq!(warnings(cidr, toml), Vec::<String>::new(), "{cidr} {toml}");
    }
    assert_eq!(warnings("2001:db8::/32", "syn_ack_rto = '4ms'").len(), 1);
}

/// Each setting alone, and all pairs.
#[test]
fn late_or_unreadable_options_need_storage() {
    type Set = fn(&mut KernelPolicy);
    let always: [Set; 5] = [
        |policy| policy.user_timeout_ms = 1,
        |policy| policy.linear_retries = 1,
        |policy| policy.restart_hz = 1,
        |policy| policy.rto_max_ms = 1,
        |policy| policy.flags |= policy_flags::THIN_LINEAR_SET,
    ];
    let timers: [Set; 2] = [
        |policy| policy.rto_min_us = 5,
        |policy| policy.delack_max_us = 5,
    ];
    let never: [Set; 3] = [
        |policy| policy.flags |= policy_flags::IN_USE,
        |policy| policy.initial_rto_jiffies = 5,
        |policy| policy.syn_retries = 5,
    ];
    let blind = HostFacts {
        reads_timers: false,
        ..HOST
    };
    let stored = |chosen: [Set; 2]| {
        let mut policy = KernelPolicy::EMPTY;
        chosen.iter().for_each(|set| set(&mut policy));
        [&HOST, &blind].map(|host| needs_storage(&policy, host))
    };
    let check = |ones: &[Set], others: &[Set], expected| {
        for one in ones {
            for other in others {
                assert_eq!(stored([*one, *other]), expected);
            }
        }
    };
    check(&never, &never, [false, false]);
    check(&timers, &never, [false, true]);
    check(&timers, &timers, [false, true]);
    for others in [&never[..], &timers, &always] {
        check(&always, others, [true, true]);
    }
}

#[test]
fn policy_without_an_effect_is_refused() {
    let sets_nothing = |toml: &str| {
        errors(&HOST, toml)
            .iter()
            .any(|error| error.contains("sets nothing"))
    };
    for nothing in [
        "force = true",
        "syn_retries = 'keep'",
        "syn_retries = 'auto'",
        "mptcp = 'keep'",
        "holdout = '5%'",
        "guard = 'on'",
    ] {
        assert!(sets_nothing(nothing), "{nothing}");
    }
    for something in [
        "syn_retries = 3",
        "delack_max = '8ms'",
        "thin_linear = false",
    ] {
        assert!(!sets_nothing(something), "{something}");
    }
}

#[test]
fn learnt_timer_covers_directions_without_value() {
    for (toml, expected) in [
        ("initial_rto = 'auto'", [true, true]),
        ("initial_rto = '100ms'", [false, false]),
        ("initial_rto = 'auto'\nsyn_ack_rto = 'keep'", [true, false]),
        ("initial_rto = 'auto'\nsyn_ack_rto = '500ms'", [true, false]),
    ] {
        let settings = settings(toml);
        let auto = [settings.auto_initial_rto(), settings.auto_syn_ack_rto()];
        assert_eq!(auto.map(|auto| auto.is_some()), expected, "{toml}");
    }
}

#[test]
fn force_alone_sets_nothing() {
    for (toml, is_empty) in [
        ("", true),
        ("force = true", true),
        ("force = true\nguard = 'on'", false),
    ] {
        assert_eq!(settings(toml).is_empty(), is_empty, "{toml}");
    }
}

#[test]
fn wide_prefixes_need_force() {
    for (cidr, toml, is_accepted) in [
        ("10.0.0.0/8", "initial_rto = '100ms'", true),
        ("10.0.0.0/7", "initial_rto = '100ms'", false),
        ("fd00::/16", "initial_rto = '100ms'", true),
        ("fc00::/7", "initial_rto = '100ms'", false),
        ("0.0.0.0/0", "initial_rto = '100ms'\nforce = true", true),
        ("0.0.0.0/0", "initial_rto = '200ms'", true),
        ("10.0.0.0/8", "initial_rto = 'auto'", true),
        ("0.0.0.0/0", "initial_rto = 'auto,min=200ms'", true),
        ("0.0.0.0/0", "initial_rto = 'auto'\nforce = true", true),
        ("10.0.0.0/8", "syn_ack_rto = '100ms'", true),
        ("0.0.0.0/0", "syn_ack_rto = '100ms'", false),
        ("0.0.0.0/0", "syn_ack_rto = '100ms'\nforce = true", true),
        ("0.0.0.0/0", "syn_ack_rto = '200ms'", true),
    ] {
        let checked = check_prefix_width(&cidr.parse().unwrap(), &settings(toml));
        assert_eq!(checked.is_ok(), is_accepted, "{cidr} {toml}: {checked:?}");
    }
    let learnt = settings("initial_rto = 'auto'");
    let error = check_prefix_width(&"::/0".parse().unwrap(), &learnt).unwrap_err();
    assert_eq!(
        error.to_string(),
        "initial_rto = auto: too short for ::/0: it may become 60ms; below 200ms on a prefix \
         shorter than /16 needs force = true or min = 200ms, because such a wide prefix contains \
         more distant hosts"
    );
}

proptest::proptest! {
    /// Timers are rounded up by less than a jiffy, at any HZ; values out of bounds are refused.
    #[test]
    fn timers_are_never_shorter_than_asked(
        initial in 0u64..130_000_000,
        floor in 0u64..250_000,
        hz in proptest::sample::select(vec![100u32, 250, 300, 1000]),
    ) {
        let host = HostFacts { hz, ..HOST };
        let jiffies = |us: u64| (us * u64::from(hz)).div_ceil(1_000_000);
        let initial_rto = settings(&format!("initial_rto = '{initial}us'"));
        if let Ok(compiled) = compile(&"p".parse().unwrap(), &initial_rto, &host) {
            let got = u64::from(compiled.kernel.initial_rto_jiffies);
            proptest::prop_assert_eq!(got, jiffies(initial));
            // Up to TCP_RTO_MAX.
            proptest::prop_assert!((1..=120 * u64::from(hz)).contains(&got));
        } else {
            proptest::prop_assert!(initial == 0 || initial >= 60_000_000);
        }
        let rto_min = settings(&format!("rto_min = '{floor}us'"));
        if let Ok(compiled) = compile(&"p".parse().unwrap(), &rto_min, &host) {
            // The kernel rounds up once more, to the same jiffies.
            proptest::prop_assert_eq!(
                jiffies(compiled.kernel.rto_min_us.into()),
                jiffies(floor)
            );
            proptest::prop_assert!(jiffies(floor) >= 2 && floor <= 200_000);
        }
    }
}

/// Measured on 6.18: 15.0 s, and 116.5 s with 10 s, as timers fire later than set.
#[test]
fn shorter_rto_max_ends_connections_sooner() {
    let lifetimes = [1, 10].map(|s| lifetime(Duration::from_secs(s)).as_millis());
    assert_eq!(lifetimes, [14_400, 112_600]);
}

#[test]
fn policies_compile_as_in_table() {
    let rows = [
        "initial_rto = '100ms'\nrto_min = '5ms'\ndelack_max = '5ms'\nthin_linear = true\nrto_max = '10s'",
        "rto_min = '100ms'\nrto_restart = true",
        "rto_min = '100ms'\nrto_restart = false",
        "initial_rto = '100ms'\nthin_linear = false",
        "initial_rto = '100ms'\nthin_linear = true\nlinear_retries = 2",
        // No warning at 8 ms, although 2 jiffies are the minimum.
        "rto_min = '12ms'\ndelack_max = '8ms'",
        "rto_min = '8ms'\ndelack_max = '8ms'",
        "initial_rto = '999ms'\nrto_max = '2s'",
        "initial_rto = '1s'\nrto_max = '2s'",
        "initial_rto = '2s'\nrto_max = '2s'",
        "rto_max = '120s'",
        "rto_max = '10s'\nuser_timeout = '924600ms'",
        "initial_rto = '100ms'\nsyn_retries = 'keep'",
        "initial_rto = '100ms'\nsyn_retries = 3",
        "initial_rto = '100ms'\nsyn_retries = 12",
        // Nothing to keep where no timer is shorter.
        "rto_min = '52ms'\ndelack_max = '8ms'\nsyn_retries = 'auto'",
    ];
    let rows = rows.map(|toml| {
        let compiled = compiled(toml);
        let kernel = &compiled.kernel;
        let flags = [
            (policy_flags::THIN_LINEAR_SET, "thin-linear-set"),
            (policy_flags::GIVES_UP_BY_TIMER, "gives-up-by-timer"),
        ];
        let flags = flags.iter().filter(|(flag, _)| kernel.flags & flag != 0);
        let mut lines: Vec<_> = flags.map(|(_, name)| (*name).to_owned()).collect();
        for setting in SETTINGS {
            let value = (setting.in_kernel)(kernel, HOST.hz);
            lines.extend(value.map(|value| format!("in the kernel: {} {value}", setting.key.name)));
        }
        let (restart_hz, retries) = (kernel.restart_hz, kernel.syn_retries);
        lines.push(format!("restart_hz {restart_hz}, syn_retries {retries}"));
        let effects = compiled.effects.iter();
        lines.extend(effects.map(|e| format!("{}: {}", e.setting, e.describe(HOST.hz))));
        lines.extend(
            compiled
                .warnings
                .iter()
                .map(|text| format!("warning: {text}")),
        );
        format!("{}\n  {}", toml.replace('\n', "; "), lines.join("\n  "))
    });
    insta::assert_snapshot!(rows.join("\n"));
}

#[test]
fn thin_linear_with_bbr_warns() {
    let warned = |host: &HostFacts, toml| {
        let compiled = compile(&"p".parse().unwrap(), &settings(toml), host).unwrap();
        warnings(&compiled).iter().any(|text| text.contains("BBR"))
    };
    let bbr = HostFacts {
        is_bbr_default: true,
        ..HOST
    };
    assert!(warned(&bbr, "thin_linear = true"));
    assert!(!warned(&HOST, "thin_linear = true"));
    assert!(!warned(&bbr, "thin_linear = false\ninitial_rto = '100ms'"));
}
