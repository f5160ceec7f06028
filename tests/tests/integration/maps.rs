//! Foreign writes to the kernel's maps and pins: they are detected, reported, counted and repaired.

use rto_agent_common::{
    CONTROL, FIRST_SLOT, HostDefaults, MAX_POLICIES, NO_POLICY, Policy, PolicySlot, arm, direction,
    statistics_key,
};
use rto_tests::pinned::{self, map};

use super::lifecycle::bounded;
use crate::prelude::*;

const ENTRY: (&str, u32) = ("10.88.0.0", 24);

fn env() -> anyhow::Result<TestEnv> {
    silent(&near("\"10.88.0.0/24\", \"10.0.0.0/8\""))
}

fn expect(env: &TestEnv, address: &str) -> anyhow::Result<()> {
    env.assert_syn_gap(to(address, PORT), POLICY_RTO)
}

/// A key of a trie.
fn key((address, length): (&str, u32)) -> anyhow::Result<Vec<u8>> {
    Ok(pinned::trie_key(address.parse()?, length))
}

fn entry(policy: u32) -> Vec<u8> {
    [policy.to_ne_bytes(), 0u32.to_ne_bytes()].concat()
}

fn delete_entry(env: &TestEnv) -> anyhow::Result<()> {
    ensure!(map(env, maps::ENTRIES_V4)?.remove(&key(ENTRY)?)?);
    Ok(())
}

/// Modifies the first policy.
fn write_policy(env: &TestEnv, change: fn(&mut Policy)) -> anyhow::Result<()> {
    let mut slot: PolicySlot = pinned::get(env, maps::POLICIES, FIRST_SLOT)?;
    change(&mut slot.copies[slot.active as usize & 1]);
    pinned::set(env, maps::POLICIES, FIRST_SLOT, &slot)
}

/// Frees the slot of the first policy.
fn free_slot(env: &TestEnv) -> anyhow::Result<()> {
    pinned::set(env, maps::POLICIES, FIRST_SLOT, &PolicySlot::default())
}

fn counted(status: &Value, kind: &str) -> u64 {
    status["map_differences"][kind].as_u64().unwrap_or(0)
}

/// Attempts of the policy's connections.
fn attempts(env: &TestEnv) -> anyhow::Result<u64> {
    let stats = env.json(&["stats"])?;
    let attempts = &stats["policies"]["near"]["active"]["attempts"];
    attempts.as_u64().with_context(|| stats.to_string())
}

/// Applies a foreign change of this kind; `verify` reports it unless the health check was faster, and either repairs
/// it.
fn is_found(
    env: &TestEnv,
    kind: &str,
    change: impl FnOnce(&TestEnv) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let before = counted(&env.status()?, kind);
    change(env).with_context(|| kind.to_owned())?;
    let output = env.try_cli(&["verify", "--json"])?;
    let found: Value = serde_json::from_slice(&output.stdout)?;
    let status = env.status()?;
    ensure!(counted(&status, kind) == before + 1, "{kind}: {status:#}");
    ensure!(status["healthy"] == true, "{kind}: {status:#}");
    if output.status.success() {
        ensure!(found["ok"] == true, "{found:#}");
    } else {
        ensure!(output.status.code() == Some(1), "{}", output.status);
        let first = &found["differences"]["first"][0];
        ensure!(
            first["kind"] == kind && found["repaired"] == true,
            "{found:#}"
        );
    }
    let text = env.cli(&["verify"])?;
    ensure!(
        text == "the kernel's maps contain all 2 entries of 1 policy\n",
        "{text}"
    );
    Ok(())
}

test!(every_difference_is_found_and_repaired);
fn every_difference_is_found_and_repaired() -> anyhow::Result<()> {
    let env = env()?;
    env.wait_status("the probe", |status| status["probe"].is_object())?;
    is_found(&env, "entry-missing", delete_entry)?;
    let foreign = ("10.88.9.0", 24);
    is_found(&env, "entry-extra", |env| {
        Ok(map(env, maps::ENTRIES_V4)?.set(&key(foreign)?, &entry(FIRST_SLOT))?)
    })?;
    ensure!(!map(&env, maps::ENTRIES_V4)?.remove(&key(foreign)?)?);
    // With bits beyond its prefix, which no agent writes.
    is_found(&env, "entry-extra", |env| {
        let key = key(("2001:db8::5", 64))?;
        Ok(map(env, maps::ENTRIES_V6)?.set(&key, &entry(FIRST_SLOT))?)
    })?;
    for slot in [NO_POLICY, FIRST_SLOT + 7, u32::MAX] {
        is_found(&env, "entry-policy", |env| {
            Ok(map(env, maps::ENTRIES_V4)?.set(&key(ENTRY)?, &entry(slot))?)
        })?;
    }
    is_found(&env, "policy", free_slot)?;
    let changes: [fn(&mut Policy); 2] = [
        |policy| policy.initial_rto_jiffies = 30_000,
        |policy| policy.generation = 30_000,
    ];
    for change in changes {
        is_found(&env, "policy", |env| write_policy(env, change))?;
    }
    is_found(&env, "statistics", |env| {
        let key = statistics_key(arm::treated(FIRST_SLOT), direction::ACTIVE);
        ensure!(map(env, maps::STATISTICS)?.remove(&key.to_ne_bytes())?);
        Ok(())
    })?;
    is_found(&env, "control-arm", |env| {
        pinned::set(env, maps::POLICIES, CONTROL, &PolicySlot::default())
    })?;
    is_found(&env, "host-defaults", |env| {
        pinned::set(env, maps::HOST_DEFAULTS, 0, &HostDefaults::default())
    })?;
    expect(&env, SERVER_V4)?;
    // Connections are counted again, and each of the twelve changes was logged.
    ensure!(attempts(&env)? >= 1);
    let log = env.log();
    ensure!(
        log.matches("another process changed").count() >= 12,
        "{log}"
    );
    Ok(())
}

test!(foreign_changes_are_repaired_unasked);
/// The health check finds the difference without a request; connections get their timers again.
fn foreign_changes_are_repaired_unasked() -> anyhow::Result<()> {
    let env = env()?;
    free_slot(&env)?;
    env.wait_status("the policy", |status| counted(status, "policy") == 1)?;
    expect(&env, SERVER_V4)?;
    delete_entry(&env)?;
    env.wait_status("the entry", |status| counted(status, "entry-missing") == 1)?;
    let status = env.status_has(json!({"healthy": true, "in_sync": true}))?;
    ensure!(status["maps_compared_at_s"].is_u64(), "{status:#}");
    env.logs("action=\"repair\" source=\"repair\"")?;
    expect(&env, SERVER_V4)
}

test!(add_and_reload_write_deleted_entries);
fn add_and_reload_write_deleted_entries() -> anyhow::Result<()> {
    let env = env()?;
    let slot = |env: &TestEnv| -> anyhow::Result<Option<Vec<u8>>> {
        let value = map(env, maps::ENTRIES_V4)?.get(&key(ENTRY)?)?;
        Ok(value.map(|value| value[..4].to_vec()))
    };
    let right = slot(&env)?;
    let wrong = |env: &TestEnv| -> anyhow::Result<()> {
        Ok(map(env, maps::ENTRIES_V4)?.set(&key(ENTRY)?, &entry(FIRST_SLOT + 1))?)
    };
    wrong(&env)?;
    env.cli(&["add", "10.88.0.0/24", "--policy", "near"])?;
    ensure!(slot(&env)? == right);
    wrong(&env)?;
    env.cli(&["reload"])?;
    ensure!(slot(&env)? == right);
    free_slot(&env)?;
    env.cli(&["reload"])?;
    expect(&env, SERVER_V4)?;
    free_slot(&env)?;
    env.cli(&["add", "10.77.0.0/16", "--policy", "near"])?;
    // The entry is within another one of the same policy, so a lookup finds that one instead.
    let missing = |env: &TestEnv| Ok(counted(&env.status()?, "entry-missing"));
    let before: anyhow::Result<u64> = missing(&env);
    delete_entry(&env)?;
    env.cli(&["add", "10.88.0.0/24", "--policy", "near"])?;
    ensure!(missing(&env)? == before? + 1, "{}", env.log());
    delete_entry(&env)?;
    env.cli(&["reload"])?;
    expect(&env, SERVER_V4)
}

test!(many_entries_are_compared_part_by_part);
/// Nested prefixes, more than fit into one part, in batches and one by one: no entry is mistaken for a difference, and
/// the real difference is found.
fn many_entries_are_compared_part_by_part() -> anyhow::Result<()> {
    const THIRDS: u32 = 4000;
    for batch in ["on", "off"] {
        let mut env = TestEnv::new()?;
        let mut cidrs = vec!["\"2001:db8::/32\"".to_owned(), "\"11.0.0.0/8\"".to_owned()];
        for n in 0..THIRDS {
            let (high, low) = (n >> 8, n & 0xff);
            cidrs.push(format!("\"11.{high}.{low}.0/24\""));
            cidrs.push(format!("\"11.{high}.{low}.128/25\""));
            cidrs.push(format!("\"2001:db8:{n:x}::/48\""));
        }
        env.configure(&near(&cidrs.join(", ")))?;
        env.start_under(&["env".to_owned(), format!("RTO_AGENT_BATCH={batch}")])?;
        let text = env.cli(&["verify"])?;
        let all = 3 * THIRDS + 2;
        ensure!(
            text == format!("the kernel's maps contain all {all} entries of 1 policy\n"),
            "{text}"
        );
        // The last entry, except for the entry that contains it.
        let last = format!("2001:db8:{:x}::", THIRDS - 1);
        let gone = map(&env, maps::ENTRIES_V6)?.remove(&key((last.as_str(), 48))?)?;
        ensure!(gone);
        let status = env.wait_status("the entry", |status| counted(status, "entry-missing") > 0)?;
        let found = status["map_differences"].to_string();
        ensure!(found == "{\"entry-missing\":1}", "{found}");
        env.cli(&["verify"])?;
    }
    Ok(())
}

fn pins(env: &TestEnv) -> anyhow::Result<Vec<PathBuf>> {
    let entries = fs::read_dir(env.pins()?)?;
    let mut pins: Vec<_> = entries
        .map(|entry| Ok(entry?.path()))
        .collect::<anyhow::Result<_>>()?;
    pins.sort();
    ensure!(pins.len() >= maps::ALL.len() + 2, "{pins:?}");
    Ok(pins)
}

/// Waits until the daemon is healthy and has these pins.
fn await_pins(env: &TestEnv, expected: &[PathBuf]) -> anyhow::Result<()> {
    let seen = || Ok((env.status()?["healthy"] == true, pins(env).ok()));
    let is_good = |(healthy, pins): &(bool, Option<Vec<PathBuf>>)| {
        *healthy && pins.as_deref() == Some(expected)
    };
    eventually_seen("the pins", TIMEOUT, seen, is_good).with_context(|| env.log())?;
    Ok(())
}

test!(verify_checks_each_pin);
/// A missing pin, and a pin of another map, link or program, is reported and pinned again.
fn verify_checks_each_pin() -> anyhow::Result<()> {
    let env = env()?;
    let all = pins(&env)?;
    let trie = map(&env, maps::ENTRIES_V4)?;
    for pin in &all {
        let name = pin.display().to_string();
        fs::remove_file(pin)?;
        let verified = env.json(&["verify"])?;
        let text = verified["problems"][0].as_str().unwrap_or_default();
        // Unless the health check was faster.
        ensure!(
            verified["ok"] == true || text.contains(&name),
            "{name}: {verified:#}"
        );
        await_pins(&env, &all)?;
        env.logs(&format!("the pin {name} is missing"))?;
        fs::remove_file(pin)?;
        trie.twin()?.pin(pin)?;
        env.json(&["verify"])?;
        await_pins(&env, &all)?;
        ensure!(map(&env, maps::ENTRIES_V4)?.id == trie.id);
    }
    expect(&env, SERVER_V4)
}

test!(a_foreign_map_in_a_pins_place_is_not_adopted);
/// A map of the same shape is pinned while no daemon runs; `add` must write to the map that the program reads.
fn a_foreign_map_in_a_pins_place_is_not_adopted() -> anyhow::Result<()> {
    let mut env = silent(&near("\"10.88.0.0/24\""))?;
    let other = to(SERVER_V4_OTHER, PORT);
    for name in [maps::ENTRIES_V4, maps::POLICIES, maps::STATISTICS] {
        expect(&env, SERVER_V4)?;
        let own = map(&env, name)?;
        let set = attempts(&env)?;
        env.end(Signal::SIGKILL)?;
        let pin = env.pins()?.join(name);
        fs::remove_file(&pin)?;
        own.twin()?.pin(&pin)?;
        env.start()?;
        ensure!(map(&env, name)?.id == own.id, "{name}");
        let expected = format!("the pin {} is not the map", pin.display());
        env.logs(&expected)?;
        let status = env.status()?;
        ensure!(status["healthy"] == true, "{status:#}");
        ensure!(attempts(&env)? >= set);
        env.assert_syn_gap(other, KERNEL_RTO)?;
        env.cli(&["add", "10.88.1.0/24", "--policy", "near"])?;
        env.assert_syn_gap(other, POLICY_RTO)?;
        env.cli(&["remove", "10.88.1.0/24"])?;
        ensure!(env.pins().is_ok());
    }
    Ok(())
}

test!(a_foreign_pin_in_the_place_of_a_link_or_program_is_not_adopted);
fn a_foreign_pin_in_the_place_of_a_link_or_program_is_not_adopted() -> anyhow::Result<()> {
    let mut env = env()?;
    let all = pins(&env)?;
    let is_map = |pin: &PathBuf| maps::ALL.iter().any(|name| pin.ends_with(name));
    for pin in all.iter().filter(|pin| !is_map(pin)) {
        let trie = map(&env, maps::ENTRIES_V4)?;
        env.end(Signal::SIGKILL)?;
        fs::remove_file(pin)?;
        trie.twin()?.pin(pin)?;
        env.start()?;
        await_pins(&env, &all)?;
        expect(&env, SERVER_V4)?;
    }
    Ok(())
}

test!(a_foreign_link_is_left_alone_without_cap_sys_admin);
/// A foreign link in the place of the agent's, whether or not the kernel reports program names: it keeps its program
/// through a start, a stop and a detach without a daemon.
fn a_foreign_link_is_left_alone_without_cap_sys_admin() -> anyhow::Result<()> {
    let unit = bounded(&["rto-agent.service"])?;
    for wrapper in [&[][..], &unit] {
        let mut env = env()?;
        let link = env.pins()?.join("link");
        let foreign = Foreign::attach_empty(env.cgroup.path())?;
        let program = u32::try_from(foreign.program_id()?)?;
        let cgroup = env.cgroup.path().to_owned();
        let attached = || programs_at(&cgroup, SOCK_OPS);
        env.end(Signal::SIGKILL)?;
        fs::remove_file(&link)?;
        foreign.pin_link(&link)?;
        env.start_under(wrapper)?;
        expect(&env, SERVER_V4)?;
        let programs = attached()?;
        ensure!(
            programs.len() == 2 && programs[0] == program,
            "{programs:?}, the foreign one is {program}"
        );
        let expected = format!("the pin {} is the link of another program", link.display());
        env.logs(&expected)?;
        // The same while a daemon runs.
        fs::remove_file(&link)?;
        foreign.pin_link(&link)?;
        env.end(Signal::SIGTERM)?;
        ensure!(attached()? == [program], "{:?}", attached()?);
    }
    Ok(())
}

test!(foreign_link_whose_pin_is_its_only_holder_stays);
/// Through a start, a stop, and a detach with and without a daemon.
fn foreign_link_whose_pin_is_its_only_holder_stays() -> anyhow::Result<()> {
    let unit = bounded(&["rto-agent.service"])?;
    for (wrapper, by_daemon) in [(&[][..], true), (&[], false), (&unit, true), (&unit, false)] {
        let mut env = env()?;
        let link = env.pins()?.join("link");
        let foreign = Foreign::attach_empty(env.cgroup.path())?;
        let program = u32::try_from(foreign.program_id()?)?;
        let cgroup = env.cgroup.path().to_owned();
        let attached = || programs_at(&cgroup, SOCK_OPS);
        env.end(Signal::SIGKILL)?;
        fs::remove_file(&link)?;
        foreign.pin_link(&link)?;
        drop(foreign);
        // A link whose pin is unlinked is freed by a worker (bpf_link_put(), 6.18).
        let seen = || Ok(attached()?);
        eventually_seen("the agent's end", TIMEOUT, seen, |seen| *seen == [program])?;
        env.start_under(wrapper)?;
        expect(&env, SERVER_V4)?;
        ensure!(attached()?.contains(&program), "{:?}", attached()?);
        if !by_daemon {
            env.end(Signal::SIGKILL)?;
        }
        env.cli(&["detach"])?;
        ensure!(attached()? == [program], "{:?}", attached()?);
        if by_daemon {
            env.end(Signal::SIGTERM)?;
            ensure!(attached()? == [program], "{:?}", attached()?);
        }
        fs::remove_dir_all(env.pin_dir())?;
    }
    Ok(())
}

/// The largest number of policies, with distinct names.
fn policies(prefix: &str, count: u32) -> String {
    let policy = |n: u32| {
        let cidr = if n == 0 {
            "10.88.0.0/24".to_owned()
        } else {
            format!("11.{}.{}.0/24", n >> 8, n & 0xff)
        };
        format!("[policy.{prefix}{n}]\ninitial_rto = \"100ms\"\ncidrs = [\"{cidr}\"]\n")
    };
    (0..count).map(policy).collect()
}

test!(as_many_policies_as_possible);
/// The largest number can be loaded, and replaced by other policies twice; one more is refused with that number.
fn as_many_policies_as_possible() -> anyhow::Result<()> {
    let mut env = TestEnv::new()?;
    env.net.black_hole(PORT)?;
    env.configure(&policies("x", MAX_POLICIES + 1))?;
    env.cli_refuses(&["check"], "1025 policies: at most 1024 are possible")?;
    env.configure(&policies("a", MAX_POLICIES))?;
    env.cli(&["check"])?;
    env.start()?;
    expect(&env, SERVER_V4)?;
    let ids = |env: &TestEnv| -> anyhow::Result<[u32; 2]> {
        Ok([map(env, maps::POLICIES)?.id, map(env, maps::ENTRIES_V4)?.id])
    };
    let before = ids(&env)?;
    for prefix in ["b", "c"] {
        env.load(&policies(prefix, MAX_POLICIES))?;
        let status = env.status()?;
        ensure!(status["healthy"] == true, "{}", status["problems"]);
        let names = status["policies"].as_array().context("no policies")?;
        ensure!(names.len() == MAX_POLICIES as usize, "{}", names.len());
        let is_new = |name: &Value| name.as_str().is_some_and(|name| name.starts_with(prefix));
        ensure!(names.iter().all(is_new));
        env.cli(&["verify"])?;
    }
    ensure!(ids(&env)? == before);
    env.cli_refuses(
        &["add", "10.99.0.0/24", "--initial-rto", "60ms"],
        "the limit is 1024 policies",
    )?;
    expect(&env, SERVER_V4)
}

test!(a_killed_probe_leaves_nothing_for_long);
/// The next start removes its cgroup, whether or not it has something to probe, and whichever process has the killed
/// daemon's pid.
fn a_killed_probe_leaves_nothing_for_long() -> anyhow::Result<()> {
    let mut env = configured("")?;
    let left = ["4194305", "1"].map(|pid| {
        let name = format!("rto-agent-probe-{pid}");
        env.cgroup.path().join(name)
    });
    left.iter().try_for_each(fs::create_dir)?;
    env.start()?;
    let all_gone = || Ok(left.iter().all(|path| !path.exists()));
    eventually_seen("the end of the cgroups", TIMEOUT, all_gone, |gone| *gone).map(drop)
}
