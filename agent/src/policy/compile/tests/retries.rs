//! `syn_retries`, as it becomes TCP_SYNCNT.

use rto_model::syn::SynTimers;

use super::*;

#[test]
fn auto_never_gives_up_sooner_and_respects_an_applications_own_choice() {
    for rto in [4, 8, 20, 100, 200, 500] {
        let table = compiled(&Settings {
            initial_rto: timer(rto),
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
            // One doubling later at most: an application that wants to give up soon still does.
            assert!(
                ours.gives_up() <= 2 * kernel.gives_up() + 1,
                "{rto} ms, {own}"
            );
            let one_less = SynTimers {
                syn_retries: ours.syn_retries - 1,
                ..ours
            };
            assert!(
                ours.syn_retries == own || one_less.gives_up() < kernel.gives_up(),
                "{rto} ms, {own}"
            );
        }
    }
}

#[test]
fn auto_touches_nothing_where_nothing_is_shorter() {
    for settings in [
        Settings {
            initial_rto: timer(1000),
            ..Settings::default()
        },
        Settings {
            rto_min: timer(50),
            ..Settings::default()
        },
    ] {
        assert_eq!(compiled(&settings).kernel.syn_retries, [0; SYN_RETRIES_LEN]);
    }
}

#[test]
fn keep_and_fixed() {
    let with = |syn_retries| {
        let kernel = compiled(&Settings {
            initial_rto: timer(100),
            syn_retries,
            ..Settings::default()
        })
        .kernel;
        (kernel.syn_retries, kernel.flags)
    };
    assert_eq!(with(SynRetries::Keep).0, [0; SYN_RETRIES_LEN]);
    assert_eq!(with(SynRetries::Fixed(3)).0, [3; SYN_RETRIES_LEN]);
    let fixed = policy_flags::SYN_RETRIES_FIXED;
    assert_eq!(
        with(SynRetries::Keep).1 | fixed,
        with(SynRetries::Fixed(3)).1
    );
    assert_eq!(with(SynRetries::Auto).1 & fixed, 0);
}

#[test]
fn a_warning_where_even_the_most_retransmissions_are_not_enough() {
    let warned = |tcp_syn_retries| {
        let host = HostFacts {
            tcp_syn_retries,
            ..HOST
        };
        let settings = Settings {
            initial_rto: timer(100),
            rto_max: ms(1_000),
            user_timeout: ms(900_000),
            ..Settings::default()
        };
        let compiled = compile(&"p".parse().unwrap(), &settings, &host).unwrap();
        let is_it = |w: &String| w.contains("even 127 SYN");
        compiled.warnings.iter().any(is_it)
    };
    // 67 s by the kernel's own timers: 127 of at most 1 s do. 131 s are not reached, which is of no interest where a
    // socket would have to ask for them.
    assert!(!warned(5));
    assert!(warned(6));
}
