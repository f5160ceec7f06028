use std::collections::BTreeMap;

use proptest::prelude::*;
use rto_agent_common::{MAX_POLICIES, Policy};
use rto_agent_core::{
    policy::{Entry, HostFacts, PolicyName, plan::MapState},
    testing::HOST,
};

use super::*;
use crate::engine::{
    desired::tests::{NEAR, cidr, desired, entry, files, settings},
    fake::{FakeHost, State},
    handle::{Handle, channels},
    store::RuntimeStore,
};

fn with_entry(desired: &Desired, text: &str) -> Desired {
    desired.with_entries(&[cidr(text)], &entry("own", None), &settings(50))
}

struct Bed {
    kernel: FakeHost,
    engine: Engine,
    dir: tempfile::TempDir,
    _handle: Handle,
}

fn bed(text: &str) -> Bed {
    let kernel = FakeHost::default();
    let dir = tempfile::tempdir().unwrap();
    let opened = kernel.clone();
    let open: Open = Arc::new(move |options| Ok(opened.open(options)));
    let mut config = EngineConfig {
        config: desired(text).files.config.clone(),
        host: HOST,
        ..EngineConfig::for_tests()
    };
    config.config.agent.state_dir = dir.path().join("state");
    config.config.agent.persistent_dir = dir.path().join("lasting");
    let last_good = LastGood::open(&config.config.agent.persistent_dir, &config.config_path);
    let (ends, handle) = channels(&config);
    let engine = Engine::start(open, config, last_good, &ends.sender, ends.snapshots).unwrap();
    assert!(kernel.state().attached);
    let bed = Bed {
        kernel,
        engine,
        dir,
        _handle: handle,
    };
    bed.check();
    bed
}

impl Bed {
    fn maps(&self) -> MapState {
        self.kernel.state().maps.clone()
    }

    fn change(&mut self, next: &Desired, persist: &Persist) -> Result<Change, EngineError> {
        self.engine.change(next, persist, &Source::Host.into())
    }

    fn verify(&mut self) -> rto_agent_core::policy::differences::Differences {
        self.engine.kernel.verify(&self.engine.resolved)
    }

    fn repair(&mut self) -> Option<Change> {
        self.engine.kernel.repair(&self.engine.resolved)
    }

    fn saved(&self) -> RuntimeStore {
        RuntimeStore::new(&self.engine.config.config.agent.state_dir)
    }

    /// A directory in place of the saved runtime entries.
    fn block(&self) -> std::path::PathBuf {
        let blocked = self.dir.path().join("state/manual.json");
        std::fs::create_dir_all(blocked.join("x")).unwrap();
        blocked
    }

    /// Checks that the kernel matches what the engine reports.
    fn check(&self) {
        let kernel = &self.engine.kernel;
        assert_eq!(kernel.maps, self.maps(), "it knows what there is");
        if kernel.out_of_sync.is_none() {
            assert_eq!(self.maps(), self.engine.resolved.maps);
        } else {
            assert!(kernel.problems().count() > 0);
        }
    }
}

#[test]
fn runtime_entry_is_applied_and_stored() {
    let mut bed = bed(NEAR);
    let next = with_entry(bed.engine.desired(), "10.9.0.0/16");
    let change = bed.change(&next, &Persist::Runtime).unwrap();
    assert_eq!(
        (change.summary.added, change.summary.policies_added),
        (1, 1)
    );
    assert!(
        change.detail.contains("10.9.0.0/16 (policy own"),
        "{change:?}"
    );
    bed.check();
    let saved = bed.saved().peek().unwrap();
    assert_eq!(saved, bed.engine.desired().runtime);
}

#[test]
fn deferred_save_is_in_force_and_saved_later() {
    let mut bed = bed(NEAR);
    let blocked = bed.block();
    let next = with_entry(bed.engine.desired(), "10.9.0.0/16");
    let change = bed.change(&next, &Persist::Later).unwrap();
    assert!(change.unsaved.is_some());
    bed.check();
    std::fs::remove_dir_all(&blocked).unwrap();
    let runtime = bed.engine.desired().runtime.clone();
    bed.engine.store.runtime.retry_save(&runtime);
    assert_eq!(bed.engine.store.runtime.problem(), None);
    let saved = bed.saved().peek().unwrap();
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
        let count = |bed: &Bed| bed.engine.kernel.differences.get(kind).copied();
        let counted = count(&bed).unwrap_or(0);
        change(&mut bed.kernel.state());
        let differences = bed.verify();
        let counts = BTreeMap::from([(kind.to_owned(), 1)]);
        assert_eq!(differences.counts, counts, "{differences}");
        assert!(bed.engine.kernel.out_of_sync.is_some(), "{kind}");
        // The same change is counted once.
        bed.verify();
        assert_eq!(count(&bed), Some(counted + 1), "{kind}");
        bed.repair();
        assert!(bed.engine.kernel.out_of_sync.is_none(), "{kind}");
        assert_eq!(bed.maps(), before, "{kind}");
        assert!(bed.kernel.state().without_statistics.is_empty());
        assert!(bed.verify().is_empty(), "{kind}");
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
fn all_policies_can_be_replaced_repeatedly() {
    let mut bed = bed(&as_many_policies_as_possible("a"));
    for prefix in ["b", "c", "a"] {
        let text = as_many_policies_as_possible(prefix);
        let next = bed.engine.desired().with_files(files(&text), 0);
        let change = bed.change(&next, &Persist::Later).unwrap();
        let summary = change.summary;
        let policies = (summary.policies_added, summary.policies_removed);
        assert_eq!(policies, (MAX_POLICIES as usize, MAX_POLICIES as usize));
        bed.check();
    }
    // One entry more, and the whole change is refused.
    let before = bed.maps();
    let next = with_entry(bed.engine.desired(), "192.0.2.0/24");
    let error = bed.change(&next, &Persist::Runtime).unwrap_err();
    assert!(error.is_refusal());
    assert_eq!(error.to_string(), "the limit is 1024 policies");
    assert_eq!(bed.maps(), before);
}

#[test]
fn changed_host_facts_change_policies_and_defaults() {
    let mut bed = bed(NEAR);
    let host = HostFacts {
        tcp_syn_retries: 3,
        hz: 1000,
        ..HOST
    };
    let next = bed.engine.desired().with_host(host);
    let change = bed.change(&next, &Persist::Later).unwrap();
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
    fn change_survives_failure_of_any_write(
        before in text(),
        after in text(),
        failing in prop::collection::btree_set(1usize..60, 0..4),
        is_blocked in any::<bool>(),
    ) {
        let mut bed = bed(&before);
        if is_blocked {
            // The staged file cannot be committed, so every change has to be rolled back.
            bed.block();
        }
        let maps_before = bed.maps();
        for n in &failing {
            bed.kernel.fail(*n);
        }
        let next = bed.engine.desired().with_files(files(&after), 0);
        let wanted = bed.engine.control.adjusted(&next).resolve().unwrap().maps;
        let persist = if is_blocked { Persist::Runtime } else { Persist::Later };
        let result = bed.change(&next, &persist);
        bed.check();
        match result {
            Err(EngineError::Unsaved(_)) if is_blocked => {
                prop_assert!(bed.engine.kernel.out_of_sync.is_none());
                prop_assert_eq!(bed.maps(), maps_before.clone());
            }
            Err(EngineError::NotBack { .. }) if is_blocked => {
                prop_assert!(bed.engine.kernel.out_of_sync.is_some());
            }
            Ok(_) => prop_assert_eq!(bed.maps(), wanted.clone()),
            Err(EngineError::Undone(_)) => {
                prop_assert!(bed.engine.kernel.out_of_sync.is_none());
                prop_assert_eq!(bed.maps(), maps_before.clone());
            }
            Err(EngineError::OutOfSync { .. }) => {
                prop_assert!(bed.engine.kernel.out_of_sync.is_some());
            }
            Err(e) => prop_assert!(false, "{e:?}"),
        }
        // All further writes succeed.
        bed.kernel.state().failing.clear();
        bed.repair();
        prop_assert!(bed.engine.kernel.out_of_sync.is_none());
        bed.check();
        let is_before = bed.maps() == maps_before;
        prop_assert!(is_before || bed.maps() == wanted);
    }
}

#[test]
fn maps_left_for_restore_are_remembered() {
    let mut bed = bed(NEAR);
    assert!(!bed.engine.kernel.has_left_maps);
    // The kernel in memory has no walker.
    assert!(bed.engine.kernel.unlink_for_restoring(false).is_err());
    assert!(bed.kernel.state().attached);
    let pin_dir = bed.engine.kernel.options.pin_dir.clone();
    assert_eq!(bed.engine.kernel.leave_maps(), pin_dir);
    assert!(bed.engine.kernel.has_left_maps);
    assert_eq!(bed.engine.kernel.maps, MapState::default());
}

#[test]
fn detach_ends_out_of_sync() {
    let mut bed = bed(NEAR);
    let next = with_entry(bed.engine.desired(), "10.9.0.0/16");
    // The first of two writes succeeds, and cannot be undone.
    (2..12).for_each(|n| bed.kernel.fail(n));
    let error = bed.change(&next, &Persist::Runtime);
    assert!(
        matches!(error, Err(EngineError::OutOfSync { .. })),
        "{error:?}"
    );
    assert!(bed.engine.kernel.out_of_sync.is_some());
    bed.engine.kernel.detach().unwrap();
    assert!(bed.engine.kernel.out_of_sync.is_none());
    assert_eq!(bed.engine.kernel.problems().count(), 0);
    assert_eq!(bed.engine.kernel.maps, MapState::default());
}

#[test]
fn reattachment_is_reported() {
    let mut bed = bed(NEAR);
    bed.kernel.state().attached = false;
    let problem = bed.engine.kernel.reader().unwrap().attachment().problem;
    bed.kernel.fail(1);
    bed.repair();
    let failed = bed.engine.kernel.problems().next().cloned().unwrap();
    assert!(failed.contains("attaching again failed"), "{failed}");
    let change = bed.repair().unwrap();
    assert_eq!(
        change.detail,
        format!("attached again: {}", problem.unwrap())
    );
    assert_eq!(bed.engine.kernel.problems().count(), 0);
    assert!(bed.kernel.state().attached);
    assert!(bed.repair().is_none());
}

#[test]
fn full_maps_are_replaced_by_larger_ones() {
    let mut bed = bed(&format!("[agent]\nmax_entries = 16\n{NEAR}"));
    let most = bed.engine.kernel.options.max_entries;
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
    bed.change(&next, &Persist::Later).unwrap();
    bed.check();
    assert!(bed.engine.kernel.options.max_entries > most);
}
