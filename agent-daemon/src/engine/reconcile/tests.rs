use proptest::prelude::*;
use rto_agent_common::{MAX_POLICIES, Policy};
use rto_agent_core::policy::PolicyName;
use rto_agent_core::{policy::Entry, testing::HOST};

use super::*;
use crate::engine::{
    desired::tests::{NEAR, cidr, desired, entry, files, settings},
    fake::{FakeHost, State, options},
};

fn with_entry(desired: &Desired, text: &str) -> Desired {
    desired.with_entries(&[cidr(text)], &entry("own", None), &settings(50))
}

struct Bed {
    kernel: FakeHost,
    reconciler: Reconciler,
    dir: tempfile::TempDir,
}

fn bed(text: &str) -> Bed {
    let kernel = FakeHost::default();
    let dir = tempfile::tempdir().unwrap();
    let opened = kernel.clone();
    let open: Open = Arc::new(move |options| Ok(opened.open(options)));
    let store = RuntimeStore::new(dir.path());
    let (reconciler, change, _) = Reconciler::start(
        (open, Arc::default()),
        options(),
        desired(text),
        store,
        false,
    )
    .unwrap();
    assert_eq!(
        change.summary.added,
        reconciler.resolved().set.entries.len()
    );
    assert!(kernel.state().attached);
    Bed {
        kernel,
        reconciler,
        dir,
    }
}

impl Bed {
    fn maps(&self) -> MapState {
        self.kernel.state().maps.clone()
    }

    /// Checks that the kernel matches what the reconciler reports.
    fn check(&self) {
        let wanted = &self.reconciler.resolved().maps;
        assert_eq!(self.reconciler.held, self.maps(), "it knows what there is");
        if self.reconciler.in_sync() {
            assert_eq!(self.maps(), *wanted);
        } else {
            assert!(self.reconciler.problems().count() > 0);
        }
    }
}

#[test]
fn a_runtime_entry_is_in_the_kernel_and_on_the_disk() {
    let mut bed = bed(NEAR);
    let next = with_entry(bed.reconciler.desired(), "10.9.0.0/16");
    let change = bed.reconciler.reconcile(next, &Persist::Runtime).unwrap();
    assert_eq!(
        (change.summary.added, change.summary.policies_added),
        (1, 1)
    );
    assert!(
        change.detail.contains("10.9.0.0/16 (policy own"),
        "{change:?}"
    );
    bed.check();
    let saved = RuntimeStore::new(bed.dir.path()).peek().unwrap();
    assert_eq!(saved, bed.reconciler.desired().runtime);
}

#[test]
fn deferred_save_is_in_force_and_saved_later() {
    let mut bed = bed(NEAR);
    let blocked = bed.dir.path().join("manual.json");
    std::fs::create_dir_all(blocked.join("x")).unwrap();
    let next = with_entry(bed.reconciler.desired(), "10.9.0.0/16");
    let change = bed.reconciler.reconcile(next, &Persist::Later).unwrap();
    assert!(change.unsaved.is_some());
    bed.check();
    std::fs::remove_dir_all(&blocked).unwrap();
    bed.reconciler.retry_save();
    assert_eq!(bed.reconciler.store_problem(), None);
    let saved = RuntimeStore::new(bed.dir.path()).peek().unwrap();
    assert_eq!(saved.len(), 1);
}

/// A change of the kernel's maps by another process.
type ForeignChange = fn(&mut State);

#[test]
fn each_kind_of_difference_is_counted_once_and_repaired() {
    let near: PolicyName = "near".parse().unwrap();
    let changes: [(&str, ForeignChange); 7] = [
        ("entry-missing", |state| {
            state.maps.entries.remove(&cidr("10.1.0.0/16"));
        }),
        ("entry-extra", |state| {
            let policy = PolicyName::nameless();
            let location = None;
            state
                .maps
                .entries
                .insert(cidr("10.3.0.0/16"), Entry { policy, location });
        }),
        ("entry-policy", |state| {
            let policy = PolicyName::nameless();
            let location = None;
            state
                .maps
                .entries
                .insert(cidr("fd00:1::/48"), Entry { policy, location });
        }),
        ("policy", |state| {
            let policy = state.maps.policies.values_mut().next().unwrap();
            policy.initial_rto_jiffies = 30_000;
        }),
        ("policy", |state| {
            *state.maps.policies.values_mut().next().unwrap() = Policy::EMPTY;
        }),
        ("statistics", |state| {
            state.without_statistics = state.maps.policies.keys().cloned().collect();
        }),
        ("control-arm", |state| state.control_arm_differs = true),
    ];
    let mut bed = bed(NEAR);
    for (kind, change) in changes {
        let before = bed.maps();
        let count = |bed: &Bed| bed.reconciler.difference_counts().get(kind).copied();
        let counted = count(&bed).unwrap_or(0);
        change(&mut bed.kernel.state());
        let differences = bed.reconciler.verify();
        let counts = BTreeMap::from([(kind.to_owned(), 1)]);
        assert_eq!(differences.counts, counts, "{differences}");
        assert!(!bed.reconciler.in_sync(), "{kind}");
        // The same change is counted once.
        bed.reconciler.verify();
        assert_eq!(count(&bed), Some(counted + 1), "{kind}");
        bed.reconciler.repair();
        assert!(bed.reconciler.in_sync(), "{kind}");
        assert_eq!(bed.maps(), before, "{kind}");
        assert!(bed.kernel.state().without_statistics.is_empty());
        assert!(bed.reconciler.verify().is_empty(), "{kind}");
        bed.check();
    }
    assert_eq!(bed.maps().policies.keys().collect::<Vec<_>>(), [&near]);
}

/// Files with the maximum number of policies; another prefix gives them other names.
fn as_many_policies_as_possible(prefix: &str) -> String {
    let policy = |n: u32| {
        let cidr = format!("10.{}.{}.0/24", n / 256, n % 256);
        format!("[policy.{prefix}{n}]\ninitial_rto = \"100ms\"\ncidrs = [\"{cidr}\"]\n")
    };
    (0..MAX_POLICIES).map(policy).collect()
}

#[test]
fn all_policies_are_replaced_by_as_many_others_again_and_again() {
    let mut bed = bed(&as_many_policies_as_possible("a"));
    for prefix in ["b", "c", "a"] {
        let text = as_many_policies_as_possible(prefix);
        let next = bed.reconciler.desired().with_files(files(&text), 0);
        let change = bed.reconciler.reconcile(next, &Persist::Later).unwrap();
        let summary = change.summary;
        let policies = (summary.policies_added, summary.policies_removed);
        assert_eq!(policies, (MAX_POLICIES as usize, MAX_POLICIES as usize));
        bed.check();
    }
    // One entry more, and the whole change is refused.
    let before = bed.maps();
    let next = with_entry(bed.reconciler.desired(), "192.0.2.0/24");
    let error = bed
        .reconciler
        .reconcile(next, &Persist::Runtime)
        .unwrap_err();
    assert!(error.is_refusal());
    assert_eq!(error.to_string(), "the limit is 1024 policies");
    assert_eq!(bed.maps(), before);
}

#[test]
fn another_host_has_other_values_and_other_defaults() {
    let mut bed = bed(NEAR);
    let host = HostFacts {
        tcp_syn_retries: 3,
        hz: 1000,
        ..HOST
    };
    let next = bed.reconciler.desired().with_host(host);
    let change = bed.reconciler.reconcile(next, &Persist::Later).unwrap();
    assert_eq!(change.summary.policies_changed, 1);
    assert_eq!(bed.kernel.state().host, Some(host.defaults()));
    bed.check();
}

/// Files with some policies and entries.
fn text() -> impl Strategy<Value = String> {
    let policies = prop::collection::btree_map(0u8..4, 1u32..4, 1..4);
    let entries = prop::collection::btree_map(0u8..24, any::<prop::sample::Index>(), 0..20);
    (policies, entries).prop_map(|(policies, entries)| {
        let names: Vec<u8> = policies.keys().copied().collect();
        let mut text = String::new();
        for (name, tens) in policies {
            let cidrs: Vec<String> = entries
                .iter()
                .filter(|(_, index)| *index.get(&names) == name)
                .map(|(net, _)| format!("\"10.{net}.0.0/16\""))
                .collect();
            text.push_str(&format!(
                "[policy.p{name}]\ninitial_rto = \"{tens}00ms\"\ncidrs = [{}]\n",
                cidrs.join(",")
            ));
        }
        text
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// After any failure the maps are unchanged, or the difference is reported and the next repair
    /// corrects it.
    #[test]
    fn any_write_may_fail(
        before in text(),
        after in text(),
        failing in prop::collection::btree_set(1usize..60, 0..4),
        is_blocked in any::<bool>(),
    ) {
        let mut bed = bed(&before);
        if is_blocked {
            // The staged file cannot be committed, so every change has to be rolled back.
            std::fs::create_dir_all(bed.dir.path().join("manual.json/x")).unwrap();
        }
        let maps_before = bed.maps();
        for n in &failing {
            bed.kernel.fail(*n);
        }
        let next = bed.reconciler.desired().with_files(files(&after), 0);
        let wanted = next.clone().resolve().unwrap().maps;
        let persist = if is_blocked { Persist::Runtime } else { Persist::Later };
        let result = bed.reconciler.reconcile(next, &persist);
        bed.check();
        match result {
            Err(EngineError::Unsaved(_)) if is_blocked => {
                prop_assert!(bed.reconciler.in_sync());
                prop_assert_eq!(bed.maps(), maps_before.clone());
            }
            Err(EngineError::NotBack { .. }) if is_blocked => {
                prop_assert!(!bed.reconciler.in_sync());
            }
            Ok(_) => prop_assert_eq!(bed.maps(), wanted.clone()),
            Err(EngineError::Undone(_)) => {
                prop_assert!(bed.reconciler.in_sync());
                prop_assert_eq!(bed.maps(), maps_before.clone());
            }
            Err(EngineError::OutOfSync { .. }) => {
                prop_assert!(!bed.reconciler.in_sync());
            }
            Err(e) => prop_assert!(false, "{e:?}"),
        }
        // All further writes succeed.
        bed.kernel.state().failing.clear();
        bed.reconciler.repair();
        prop_assert!(bed.reconciler.in_sync());
        bed.check();
        let is_before = bed.maps() == maps_before;
        prop_assert!(is_before || bed.maps() == wanted);
    }
}

#[test]
fn the_maps_that_are_left_are_known_until_they_go() {
    let mut bed = bed(NEAR);
    assert!(!bed.reconciler.has_kept_maps());
    // The kernel in memory has no walker.
    assert!(bed.reconciler.unlink_for_restoring(false).is_err());
    assert!(bed.kernel.state().attached);
    assert_eq!(bed.reconciler.leave_maps(), options().pin_dir);
    assert!(bed.reconciler.has_kept_maps());
    assert_eq!(bed.reconciler.held, MapState::default());
}

#[test]
fn detached_maps_are_in_step() {
    let mut bed = bed(NEAR);
    let next = with_entry(bed.reconciler.desired(), "10.9.0.0/16");
    // The first of two writes succeeds, and cannot be undone.
    (2..12).for_each(|n| bed.kernel.fail(n));
    let error = bed.reconciler.reconcile(next, &Persist::Runtime);
    assert!(
        matches!(error, Err(EngineError::OutOfSync { .. })),
        "{error:?}"
    );
    assert!(!bed.reconciler.in_sync());
    bed.reconciler.detach().unwrap();
    assert!(bed.reconciler.in_sync());
    assert_eq!(bed.reconciler.problems().count(), 0);
    assert_eq!(bed.reconciler.held, MapState::default());
}

#[test]
fn reattachment_is_reported() {
    let mut bed = bed(NEAR);
    bed.kernel.state().attached = false;
    let problem = bed.reconciler.reader().unwrap().attachment().problem;
    bed.kernel.fail(1);
    bed.reconciler.repair();
    let failed = bed.reconciler.problems().next().cloned().unwrap();
    assert!(failed.contains("attaching again failed"), "{failed}");
    let change = bed.reconciler.repair().unwrap();
    assert_eq!(
        change.detail,
        format!("attached again: {}", problem.unwrap())
    );
    assert_eq!(bed.reconciler.problems().count(), 0);
    assert!(bed.kernel.state().attached);
    assert!(bed.reconciler.repair().is_none());
}

#[test]
fn full_maps_are_replaced_and_reported_once() {
    let mut bed = bed(&format!("[agent]\nmax_entries = 16\n{NEAR}"));
    assert!(!bed.reconciler.take_renewed());
    let most = bed.reconciler.options.max_entries;
    let text = |entries: u32| {
        let cidrs = (0..entries).map(|n| {
            let address = std::net::Ipv4Addr::from(0x0b00_0000 + (n << 8));
            format!("\"{address}/24\"")
        });
        let cidrs = cidrs.collect::<Vec<_>>().join(",");
        format!(
            "[agent]\nmax_entries = 16\n[policy.near]\ninitial_rto = \"100ms\"\ncidrs = [{cidrs}]\n"
        )
    };
    let next = desired(&text(most + 1));
    bed.reconciler.reconcile(next, &Persist::Later).unwrap();
    bed.check();
    assert!(bed.reconciler.options.max_entries > most);
    assert!(bed.reconciler.take_renewed());
    assert!(!bed.reconciler.take_renewed());
}
