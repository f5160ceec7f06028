use super::{constraints::lifetime, *};
use crate::{
    policy::{Mptcp, SynAckRto, SynRetries},
    testing::HOST,
};

mod retries;

fn ms(n: u64) -> Option<Duration> {
    Some(Duration::from_millis(n))
}

/// A duration for a setting that can be "auto".
fn timer<T: From<Duration>>(n: u64) -> Option<T> {
    Some(Duration::from_millis(n).into())
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
        initial_rto: timer(100),
        rto_min: timer(5),
        delack_max: ms(5),
        thin_linear: Some(true),
        rto_max: ms(10_000),
        ..Settings::default()
    });
    assert_eq!(compiled.kernel.name(), Some("p"));
    assert_eq!(compiled.kernel.initial_rto_jiffies, 25);
    // As getsockopt() will return it.
    assert_eq!(compiled.kernel.rto_min_us, 8_000);
    assert_eq!(compiled.kernel.rto_max_ms, 10_000);
    let flags = compiled.kernel.flags;
    assert_ne!(flags & policy_flags::IN_USE, 0);
    assert_ne!(flags & policy_flags::THIN_LINEAR_SET, 0);
    assert_ne!(flags & policy_flags::THIN_LINEAR, 0);
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
            rto_min: timer(100),
            rto_restart,
            ..Settings::default()
        })
    };
    let on = with(Some(true));
    assert_eq!((on.kernel.restart_hz, on.kernel.rto_min_us), (250, 100_000));
    let effect = on.effects.iter().find(|e| e.setting == "rto_restart");
    assert_eq!(
        effect.unwrap().describe(250),
        "on (rto_min minus the smoothed RTT while fewer than 4 segments are outstanding \
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
fn settings_the_kernel_does_not_take_are_refused() {
    let old = HostFacts {
        has_rto_max: false,
        has_bpf_thin_linear: false,
        ..HOST
    };
    let mut all = Vec::new();
    for settings in [
        Settings::default(),
        Settings {
            initial_rto: timer(0),
            ..Settings::default()
        },
        Settings {
            initial_rto: timer(120_000),
            ..Settings::default()
        },
        Settings {
            rto_min: timer(4),
            ..Settings::default()
        },
        Settings {
            rto_min: timer(201),
            ..Settings::default()
        },
        Settings {
            delack_max: ms(50),
            rto_min: timer(45),
            ..Settings::default()
        },
        Settings {
            rto_max: ms(999),
            ..Settings::default()
        },
        Settings {
            rto_max: ms(1_000),
            initial_rto: timer(2_000),
            ..Settings::default()
        },
        Settings {
            user_timeout: ms(0),
            ..Settings::default()
        },
        Settings {
            delack_max: ms(20),
            rto_min: timer(20),
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
        Settings {
            syn_ack_rto: SynAckRto::Fixed(Duration::ZERO),
            ..Settings::default()
        },
        Settings {
            syn_ack_rto: SynAckRto::Keep,
            ..Settings::default()
        },
        Settings {
            syn_ack_rto: SynAckRto::Fixed(Duration::from_secs(3)),
            rto_max: ms(2_000),
            ..Settings::default()
        },
        Settings {
            mptcp: Mptcp::Apply,
            rto_min: timer(50),
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
fn thin_linear_is_decided_either_way() {
    let flags = |thin_linear| {
        let settings = Settings {
            initial_rto: timer(100),
            thin_linear,
            ..Settings::default()
        };
        let flags = compiled(&settings).kernel.flags;
        assert_ne!(flags & policy_flags::IN_USE, 0);
        let both = [policy_flags::THIN_LINEAR_SET, policy_flags::THIN_LINEAR];
        both.map(|flag| flags & flag != 0)
    };
    assert_eq!(flags(None), [false, false]);
    assert_eq!(flags(Some(false)), [true, false]);
    assert_eq!(flags(Some(true)), [true, true]);
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
    let with = |toml: &str| {
        let settings: Settings = toml::from_str(toml).unwrap();
        let errors = compile(&"p".parse().unwrap(), &settings, &HOST).err();
        errors.is_some_and(|all| all.iter().any(|e| e.reason.contains("sets nothing")))
    };
    for nothing in [
        "",
        "force = true",
        "syn_retries = 'keep'",
        "syn_retries = 'auto'",
        "mptcp = 'keep'",
        "holdout = '5%'",
        "guard = 'on'",
        "rto_restart = false",
    ] {
        assert!(with(nothing), "{nothing}");
    }
    for something in [
        "syn_retries = 3",
        "delack_max = '8ms'",
        "thin_linear = false",
    ] {
        assert!(!with(something), "{something}");
    }
}

#[test]
fn rto_max_may_be_the_timer_and_the_kernels_own() {
    for timer_ms in [1_000, 2_000] {
        let compiled = compiled(&Settings {
            initial_rto: timer(timer_ms),
            rto_max: ms(2_000),
            ..Settings::default()
        });
        assert!(compiled.warnings.iter().any(|w| w.contains("rto_max")));
    }
    let kernels = compiled(&Settings {
        rto_max: ms(120_000),
        ..Settings::default()
    });
    assert_eq!(kernels.warnings, [""; 0]);
}

#[test]
fn an_ack_is_not_delayed_as_long_as_the_timer() {
    let with = |rto_min, delack_max| Settings {
        rto_min: timer(rto_min),
        delack_max: ms(delack_max),
        ..Settings::default()
    };
    // No warning at 8 ms, although 2 jiffies are the minimum.
    assert_eq!(compiled(&with(50, 8)).warnings, [""; 0]);
    assert_eq!(compiled(&with(12, 8)).warnings, [""; 0]);
    let [both] = &compiled(&with(8, 8)).warnings[..] else {
        panic!("a warning")
    };
    assert!(both.contains("both the smallest possible"), "{both}");
    for (rto_min, delack_max) in [(8, 12), (12, 12), (50, 52)] {
        let errors = errors(&with(rto_min, delack_max), &HOST);
        assert!(
            errors[0].contains("causes spurious retransmissions"),
            "{errors:?}"
        );
    }
}

#[test]
fn a_learnt_timer_is_for_both_directions_unless_one_is_given() {
    let is_learnt = |toml: &str| {
        let settings: Settings = toml::from_str(toml).unwrap();
        [settings.auto_initial_rto(), settings.auto_syn_ack_rto()].map(|auto| auto.is_some())
    };
    assert_eq!(is_learnt("initial_rto = 'auto'"), [true, true]);
    assert_eq!(is_learnt("initial_rto = '100ms'"), [false, false]);
    for given in ["keep", "500ms"] {
        let toml = format!("initial_rto = 'auto'\nsyn_ack_rto = '{given}'");
        assert_eq!(is_learnt(&toml), [true, false]);
    }
}

#[test]
fn force_alone_sets_nothing() {
    let forced = Settings {
        force: true,
        ..Settings::default()
    };
    assert!(forced.is_empty() && Settings::default().is_empty());
    let set = Settings {
        delack_max: ms(5),
        ..forced
    };
    assert!(!set.is_empty());
}

#[test]
fn settings_by_counters_need_statistics() {
    let with = |setting: &str| {
        let mut settings = Settings::default();
        match setting {
            "initial_rto" => settings.initial_rto = "auto".parse().ok(),
            "rto_min" => settings.rto_min = "auto".parse().ok(),
            "guard" => settings.guard = "on".parse().ok(),
            _ => settings.initial_rto = timer(100),
        }
        check_is_counted(&settings).map_err(|error| (error.setting, error.value))
    };
    for (setting, value) in [
        ("initial_rto", "auto"),
        ("rto_min", "auto"),
        ("guard", "on"),
    ] {
        assert_eq!(with(setting), Err((setting, value.to_owned())));
    }
    assert_eq!(with("neither"), Ok(()));
}

#[test]
fn a_timer_that_is_none_of_the_kernels_is_told() {
    let note = |rto| {
        let settings = Settings {
            initial_rto: timer(rto),
            rto_max: ms(2_000),
            ..Settings::default()
        };
        let [initial_rto, rto_max] = ["initial_rto", "rto_max"].map(|setting| {
            let effects = compiled(&settings).effects.into_iter();
            let mut one = effects.filter(|effect| effect.setting == setting);
            one.next().unwrap().note
        });
        assert_eq!(rto_max, None);
        initial_rto
    };
    assert_eq!(note(999), None);
    for longer in [1_000, 1_001] {
        let note = note(longer);
        assert_eq!(
            note.as_deref(),
            Some("not shorter than the kernel's own 1s")
        );
    }
}

#[test]
fn user_timeout_is_in_whole_milliseconds() {
    let with = |us| Settings {
        user_timeout: Some(Duration::from_micros(us)),
        ..Settings::default()
    };
    assert_eq!(compiled(&with(30_000_000)).kernel.user_timeout_ms, 30_000);
    assert_eq!(compiled(&with(1_000)).kernel.user_timeout_ms, 1);
    for bad in [1_500, 999, 30_000_001] {
        assert_eq!(errors(&with(bad), &HOST).len(), 1, "{bad}");
    }
}

#[test]
fn an_image_is_whole_or_there_is_none() {
    let path: std::sync::Arc<std::path::Path> = std::path::Path::new("/a.toml").into();
    let mut set = PolicySet::default();
    let add = |set: &mut PolicySet, name: &str, rto: u64| {
        let policy = crate::policy::Policy {
            settings: Settings {
                initial_rto: timer(rto),
                ..Settings::default()
            },
            location: Some(crate::policy::Location {
                path: path.clone(),
                line: 3,
            }),
            ..crate::policy::Policy::default()
        };
        set.policies.insert(name.parse().unwrap(), policy);
    };
    add(&mut set, "near", 100);
    let entry = crate::policy::Entry {
        policy: "near".parse().unwrap(),
        location: None,
    };
    set.entries.insert("10.0.0.0/8".parse().unwrap(), entry);
    let (image, effects) = set.image(&HOST).unwrap();
    assert_eq!(image.entries, set.entries);
    let near: PolicyName = "near".parse().unwrap();
    assert_eq!(image.policies[&near].initial_rto_jiffies, 25);
    assert_eq!(effects[&near][0].setting, "initial_rto");
    add(&mut set, "never", 0);
    let errors = set.image(&HOST).unwrap_err();
    let [error] = &errors[..] else {
        panic!("{errors:?}")
    };
    let text = error.to_string();
    assert!(
        text.starts_with("/a.toml:3: policy never: initial_rto"),
        "{text}"
    );
}

#[test]
fn wide_prefixes_need_force() {
    let short = Settings {
        initial_rto: timer(100),
        ..Settings::default()
    };
    let check = |cidr: &str, settings: &Settings| {
        check_prefix_width(&cidr.parse().unwrap(), settings).is_ok()
    };
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
            initial_rto: timer(200),
            ..short
        }
    ));
    let learnt = |text: &str| Settings {
        initial_rto: text.parse().ok(),
        ..Settings::default()
    };
    assert!(check("10.0.0.0/8", &learnt("auto")));
    assert!(check("0.0.0.0/0", &learnt("auto,min=200ms")));
    let forced = Settings {
        force: true,
        ..learnt("auto")
    };
    assert!(check("0.0.0.0/0", &forced));
    let error = check_prefix_width(&"::/0".parse().unwrap(), &learnt("auto")).unwrap_err();
    assert_eq!(
        error.to_string(),
        "initial_rto = auto: too short for ::/0: it may become 20ms; below 200ms on a prefix \
         shorter than /16 needs force = true or min = 200ms, because such a wide prefix contains \
         more distant hosts"
    );
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
    /// Timers are rounded up by less than a jiffy, at any HZ; values out of bounds are refused.
    #[test]
    fn timers_are_never_shorter_than_asked(
        initial in 0u64..130_000_000,
        floor in 0u64..250_000,
        hz in proptest::sample::select(vec![100u32, 250, 300, 1000]),
    ) {
        let host = HostFacts { hz, ..HOST };
        let jiffies = |us: u64| (us * u64::from(hz)).div_ceil(1_000_000);
        let initial_rto = Settings {
            initial_rto: Some(Duration::from_micros(initial).into()),
            ..Settings::default()
        };
        if let Ok(compiled) = compile(&"p".parse().unwrap(), &initial_rto, &host) {
            let got = u64::from(compiled.kernel.initial_rto_jiffies);
            proptest::prop_assert_eq!(got, jiffies(initial));
            // Up to TCP_RTO_MAX.
            proptest::prop_assert!((1..=120 * u64::from(hz)).contains(&got));
        } else {
            proptest::prop_assert!(initial == 0 || initial >= 60_000_000);
        }
        let rto_min = Settings {
            rto_min: Some(Duration::from_micros(floor).into()),
            ..Settings::default()
        };
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

#[test]
fn a_shorter_rto_max_ends_connections_sooner() {
    let warning = |user_timeout| {
        let settings = Settings {
            rto_max: ms(10_000),
            user_timeout,
            ..Settings::default()
        };
        let mut warnings = compiled(&settings).warnings.into_iter();
        warnings.find(|warning| warning.contains("tcp_retries2"))
    };
    let text = warning(None).unwrap();
    assert!(text.contains("after about 112.6s"), "{text}");
    assert!(text.contains("user_timeout = \"924.6s\""), "{text}");
    assert_eq!(warning(ms(924_600)), None);
    // Measured on 6.18: 15.0 s, and 116.5 s with 10 s, as timers fire later than set.
    assert_eq!(
        lifetime(Duration::from_secs(1)),
        Duration::from_millis(14_400)
    );
}
