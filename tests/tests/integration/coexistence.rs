//! Another sock_ops program on the same host keeps working.

use std::sync::atomic::{AtomicBool, Ordering};

use super::doctor::finding;
use crate::prelude::*;

const FOREIGN_JIFFIES: i32 = 60;

fn foreign_timer() -> Duration {
    jiffy() * FOREIGN_JIFFIES.unsigned_abs()
}

fn expect(env: &TestEnv, address: &str, timer: Duration) -> anyhow::Result<()> {
    env.assert_syn_gap(to(address, PORT), timer)
}

test!(a_foreign_program_decides_where_no_entry_does);
fn a_foreign_program_decides_where_no_entry_does() -> anyhow::Result<()> {
    let mut env = TestEnv::new()?;
    env.net.black_hole(PORT)?;
    let foreign = Foreign::attach(env.cgroup.path(), FOREIGN_JIFFIES)?;
    // The control: the foreign program works.
    expect(&env, SERVER_V4, foreign_timer())?;
    env.configure(&near("\"10.88.0.0/24\""))?;
    env.start()?;
    // Ours runs after it and decides, but only where an entry matches.
    expect(&env, SERVER_V4, POLICY_RTO)?;
    expect(&env, SERVER_V4_OTHER, foreign_timer())?;
    env.cli(&["detach"])?;
    expect(&env, SERVER_V4, foreign_timer())?;
    drop(foreign);
    expect(&env, SERVER_V4, KERNEL_RTO)
}

test!(a_foreign_program_attached_later_has_the_last_word);
/// The kernel runs programs in the order in which they were attached, which an agent cannot change.
fn a_foreign_program_attached_later_has_the_last_word() -> anyhow::Result<()> {
    let env = silent(&near("\"10.88.0.0/24\""))?;
    expect(&env, SERVER_V4, POLICY_RTO)?;
    let _foreign = Foreign::attach(env.cgroup.path(), FOREIGN_JIFFIES)?;
    expect(&env, SERVER_V4, foreign_timer())?;
    // But doctor reports it.
    let report = env.json(&["doctor"])?;
    let found = finding(&report, "other-programs")["found"].to_string();
    let cgroup = env.cgroup.path().display().to_string();
    assert_says(&found, &["rtot_foreign", &cgroup]);
    Ok(())
}

/// Our program, followed by a foreign one.
struct InFront {
    env: TestEnv,
    foreign: Foreign,
}

impl InFront {
    fn new(config: &str) -> anyhow::Result<Self> {
        let env = silent(config)?;
        let foreign = Foreign::attach(env.cgroup.path(), FOREIGN_JIFFIES)?;
        // The control: the last program decides.
        expect(&env, SERVER_V4, foreign_timer())?;
        Ok(Self { env, foreign })
    }

    /// Replaces our program and asserts that at every moment exactly two programs are attached, the foreign one last.
    fn replaced(
        &mut self,
        replace: impl FnOnce(&mut TestEnv) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let foreign = u32::try_from(self.foreign.program_id()?)?;
        let cgroup = self.env.cgroup.path().to_owned();
        let before = programs_at(&cgroup, SOCK_OPS)?;
        let done = AtomicBool::new(false);
        let look = || {
            let mut seen = BTreeSet::new();
            while !done.load(Ordering::Relaxed) {
                seen.insert(programs_at(&cgroup, SOCK_OPS)?);
            }
            Ok(seen)
        };
        let (seen, ()) = rto_tests::beside(look, || {
            let replaced = replace(&mut self.env);
            done.store(true, Ordering::Relaxed);
            replaced
        })?;
        let after = programs_at(&cgroup, SOCK_OPS)?;
        assert_ne!(before, after, "the program was not replaced");
        for programs in seen.iter().chain([&before, &after]) {
            assert_eq!(
                (programs.len(), programs.last()),
                (2, Some(&foreign)),
                "{seen:?}"
            );
        }
        expect(&self.env, SERVER_V4, foreign_timer())
    }
}

test!(an_upgrade_keeps_its_place);
/// The statistics mode is part of the program, so another choice loads another program over the same maps.
fn an_upgrade_keeps_its_place() -> anyhow::Result<()> {
    let config = |statistics: bool| {
        let policy = near("\"10.88.0.0/24\"");
        format!("on_exit = \"keep\"\nstatistics = {statistics}\n{policy}")
    };
    let mut hosts = InFront::new(&config(true))?;
    hosts.env.configure(&config(false))?;
    hosts.env.end(Signal::SIGTERM)?;
    hosts.replaced(|env| env.start())?;
    let status = hosts.env.status()?;
    assert_eq!(status["found_at_start"], "maps-kept", "{status:#}");
    Ok(())
}

test!(growth_keeps_its_place);
fn growth_keeps_its_place() -> anyhow::Result<()> {
    const ENTRIES: usize = 40;
    let policy = near("\"10.88.0.0/24\"");
    let mut hosts = InFront::new(&format!("max_entries = 8\n{policy}"))?;
    let cidrs: Vec<String> = (0..ENTRIES).map(|n| format!("10.99.{n}.0/24")).collect();
    hosts.replaced(|env| env.cli_of(&["add", "--policy", "near"], &cidrs).map(drop))
}

test!(a_repair_keeps_its_place);
/// Only the pins are lost: the link stays attached and is kept.
fn a_repair_keeps_its_place() -> anyhow::Result<()> {
    let mut hosts = InFront::new(&near("\"10.88.0.0/24\""))?;
    hosts.replaced(|env| {
        let former = env.status()?["attachment"]["program_id"].clone();
        fs::remove_dir_all(env.pin_dir())?;
        env.wait_status("the repair", |status| {
            status["healthy"] == true && status["attachment"]["program_id"] != former
        })?;
        // The agent is healthy once the program is active; the pins get their final name right after that.
        let seen = || Ok(env.pins().is_ok_and(|pins| pins.is_dir()));
        eventually_seen("the pins", TIMEOUT, seen, |there| *there)?;
        Ok(())
    })
}

test!(a_probe_is_good_and_in_no_count);
fn a_probe_is_good_and_in_no_count() -> anyhow::Result<()> {
    for (cidr, address) in [
        ("10.88.0.0/24", "10.88.0.1"),
        ("fd88::/64", "fd88::1"),
        ("0.0.0.0/0", "192.0.2.1"),
    ] {
        let env = TestEnv::with(&near(&format!("\"{cidr}\"")))?;
        let status = env.wait_status("the daemon's probe", |status| status["probe"].is_object())?;
        let probe = &status["probe"];
        assert_eq!(probe["verdict"], "good", "{probe:#}");
        assert_eq!(probe["address"], address, "{probe:#}");
        assert_eq!(probe["by"], "the daemon");
        let finding = finding(&env.json(&["doctor"])?, "probe");
        assert_eq!(finding["severity"], "ok", "{finding:#}");
        let status = env.status()?;
        let by = status["probe"]["by"].as_str().unwrap_or_default();
        assert!(by.starts_with("doctor, uid 0"), "{by}");
        // Two probes and no connection.
        let policy = env.counted("near")?;
        assert_eq!(policy["attempts"], 0, "{policy:#}");
        assert_eq!(env.json(&["list"])?["entries"][0]["hits"], 0);
        // The probes have left nothing.
        let below = fs::read_dir(env.cgroup.path())?.flatten();
        let dirs = below.filter(|entry| entry.path().is_dir()).count();
        assert_eq!(dirs, 0);
    }
    Ok(())
}

test!(a_probe_finds_a_program_that_returns_0, || {
    assert_interference(KERNEL_RTO, Foreign::attach_rejecting)
});
test!(a_probe_finds_a_program_that_overwrites, || {
    assert_interference(foreign_timer(), |cgroup| {
        Foreign::attach(cgroup, FOREIGN_JIFFIES)
    })
});
fn assert_interference(
    found: Duration,
    attach: fn(&Path) -> io::Result<Foreign>,
) -> anyhow::Result<()> {
    let env = TestEnv::with(&near("\"10.88.0.0/24\""))?;
    env.wait_status("a good probe", |status| {
        status["probe"]["verdict"] == "good"
    })?;
    let foreign = attach(env.cgroup.path())?;
    // The daemon notices the other program and probes again.
    let status = env.wait_status("interference", |status| {
        status["probe"]["verdict"] == "interference"
    })?;
    let probe = &status["probe"];
    assert_eq!(probe["expected_us"], 100_000, "{probe:#}");
    assert_eq!(
        probe["found_us"].as_u64(),
        u64::try_from(found.as_micros()).ok()
    );
    assert!(status["warnings"].to_string().contains("INTERFERENCE"));
    assert!(env.cli(&["status"])?.contains("INTERFERENCE"));
    // The verdict is right.
    env.net.black_hole(PORT)?;
    expect(&env, SERVER_V4, found)?;
    let finding = finding(&env.json(&["doctor"])?, "probe");
    assert_eq!(finding["severity"], "problem", "{finding:#}");
    drop(foreign);
    env.wait_status("good again", |status| status["probe"]["verdict"] == "good")?;
    Ok(())
}

test!(other_cgroups_are_left_alone);
fn other_cgroups_are_left_alone() -> anyhow::Result<()> {
    let env = silent(&near("\"10.88.0.0/24\""))?;
    expect(&env, SERVER_V4, POLICY_RTO)?;
    let other = TestEnv::new()?;
    other.net.black_hole(PORT)?;
    expect(&other, SERVER_V4, KERNEL_RTO)
}
