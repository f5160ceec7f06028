//! Start, kill, restart, stop, detach: the objects that the kernel holds after each.

use rto_testbed::bpf::pinned;

use crate::prelude::*;

mod detachments;
mod long_change;

fn env() -> anyhow::Result<TestEnv> {
    // Without pins, the measurements of the black hole could not end the fallback (outage) that they begin.
    silent(&format!("{}guard = \"off\"\n", near("\"10.88.0.0/24\"")))
}

/// The kernel's ids of the objects that an agent has pinned.
#[derive(Debug, PartialEq, Eq)]
struct Kernel {
    program: i64,
    /// `None`: not checked.
    link: Option<i64>,
    maps: Vec<i64>,
}

fn kernel(env: &TestEnv) -> anyhow::Result<Kernel> {
    let dir = env.pins()?;
    let show = |kind: &str, name: &str| -> anyhow::Result<Value> {
        let path = dir.join(name);
        Ok(serde_json::from_str(&run(&format!(
            "bpftool -j {kind} show pinned {}",
            path.display()
        ))?)?)
    };
    let link = show("link", "link")?;
    let program = link["prog_id"].as_i64().context("no prog_id")?;
    let info: Value = serde_json::from_str(&run(&format!("bpftool -j prog show id {program}"))?)?;
    let maps = info["map_ids"].as_array().context("no map_ids")?;
    Ok(Kernel {
        program,
        link: Some(link["id"].as_i64().context("no link id")?),
        maps: maps.iter().filter_map(Value::as_i64).collect(),
    })
}

/// Asserts that none of these objects exists any more. Waits, because the kernel frees them after an RCU grace period.
fn assert_gone(before: &Kernel) -> anyhow::Result<()> {
    let left = || {
        let mut left = Vec::new();
        let mut ids = vec![("prog", before.program)];
        ids.extend(before.link.map(|id| ("link", id)));
        ids.extend(before.maps.iter().map(|id| ("map", *id)));
        for (kind, id) in ids {
            // bpftool fails with "temporarily unavailable" while another test creates an object.
            let Ok(all) = run(&format!("bpftool -j {kind} show")) else {
                left.push(format!("{kind} {id}, perhaps"));
                continue;
            };
            let all: Value = serde_json::from_str(&all)?;
            if all
                .as_array()
                .is_some_and(|all| all.iter().any(|o| o["id"] == id))
            {
                left.push(format!("{kind} {id}"));
            }
        }
        Ok(left)
    };
    eventually_seen("end of the objects", TIMEOUT, left, Vec::is_empty).map(drop)
}

test!(policies_survive_kill_and_are_adopted);
fn policies_survive_kill_and_are_adopted() -> anyhow::Result<()> {
    let mut env = env()?;
    env.cli(&["add", "10.88.1.0/24", "--initial-rto", "52ms"])?;
    let before = kernel(&env)?;
    env.end(Signal::SIGKILL)?;
    expect(&env, POLICY_RTO)?;
    env.start()?;
    assert_eq!(
        kernel(&env)?,
        before,
        "adopted means: the same program, link and maps"
    );
    assert_eq!(env.status()?["found_at_start"], "adopted");
    expect(&env, POLICY_RTO)?;
    let list = env.json(&["list"])?;
    assert_eq!(
        list["entries"].as_array().map(Vec::len),
        Some(2),
        "{list:#}"
    );
    assert_eq!(list["entries"][1]["source"]["kind"], "runtime");
    // Changes of the files while no daemon ran are reconciled.
    env.end(Signal::SIGKILL)?;
    env.configure(&near("\"10.88.9.0/24\""))?;
    env.start()?;
    expect(&env, KERNEL_RTO)?;
    assert_eq!(kernel(&env)?, before);
    Ok(())
}

test!(detach_lasts_until_attach_and_keeps_counters);
fn detach_lasts_until_attach_and_keeps_counters() -> anyhow::Result<()> {
    let mut env = silent(&format!("on_exit = \"keep\"\n{}", near("\"10.88.0.0/24\"")))?;
    expect(&env, POLICY_RTO)?;
    let attempts = |env: &TestEnv| {
        let near = env.counted("near")?;
        near["active"]["attempts"].as_u64().context("no attempts")
    };
    let counted = attempts(&env)?;
    env.cli_says(&["detach"], "until rto-agent attach")?;
    let is_detached = |env: &TestEnv| -> anyhow::Result<()> {
        expect(env, KERNEL_RTO)?;
        let (status, list) = (env.status()?, env.json(&["list"])?);
        ensure!(status["healthy"] == false && status["attachment"]["attached"] == false);
        ensure!(list["detached_by"]["uid"] == 0 && status["detached_by"]["uid"] == 0);
        ensure!(env.cli(&["list"])?.starts_with("no policy is active"));
        ensure!(attempts(env)? == counted, "{status:#}");
        Ok(())
    };
    is_detached(&env)?;
    ensure!(programs_at(env.cgroup.path(), SOCK_OPS)?.is_empty());
    env.cli(&["reload"])?;
    is_detached(&env)?;
    for signal in [Signal::SIGTERM, Signal::SIGKILL] {
        env.restart(signal)?;
        is_detached(&env)?;
    }
    let mark = env.persistent_dir().join("detached.json");
    let text = fs::read_to_string(&mark)?;
    env.cli(&["attach"])?;
    expect(&env, POLICY_RTO)?;
    ensure!(attempts(&env)? > counted);
    ensure!(env.status()?["healthy"] == true);
    // If a daemon was killed before it had detached the program, the next start completes the detachment.
    env.end(Signal::SIGKILL)?;
    fs::write(&mark, text)?;
    expect(&env, POLICY_RTO)?;
    env.start()?;
    expect(&env, KERNEL_RTO)
}

test!(detach_without_a_daemon);
fn detach_without_a_daemon() -> anyhow::Result<()> {
    let mut env = env()?;
    let before = kernel(&env)?;
    env.end(Signal::SIGKILL)?;
    env.cli_says(&["detach"], "1 link and 1 set")?;
    assert_gone(&before)?;
    assert!(!env.pin_dir().exists());
    expect(&env, KERNEL_RTO)?;
    assert!(env.cli(&["detach"])?.contains("nothing was attached"));
    env.start()?;
    expect(&env, KERNEL_RTO)?;
    env.end(Signal::SIGTERM)?;
    assert!(env.cli(&["attach"])?.contains("the next start attaches"));
    env.start()?;
    expect(&env, POLICY_RTO)
}

test!(stopped_daemon_leaves_nothing);
fn stopped_daemon_leaves_nothing() -> anyhow::Result<()> {
    for signal in [Signal::SIGTERM, Signal::SIGINT] {
        let mut env = env()?;
        let before = kernel(&env)?;
        let status = env.end(signal)?;
        assert_eq!(status.code(), Some(0), "{}", env.log());
        assert_gone(&before)?;
        assert!(!env.pin_dir().exists() && !env.socket().exists());
    }
    Ok(())
}

test!(on_exit_keep);
fn on_exit_keep() -> anyhow::Result<()> {
    let mut env = silent(&format!("on_exit = \"keep\"\n{}", near("\"10.88.0.0/24\"")))?;
    let before = kernel(&env)?;
    assert_eq!(env.end(Signal::SIGTERM)?.code(), Some(0));
    expect(&env, POLICY_RTO)?;
    assert_eq!(kernel(&env)?, before);
    env.cli(&["detach"])?;
    assert_gone(&before)
}

test!(a_restart_by_the_service_managers_descriptor_store_has_no_gap);
/// With `on_exit = "detach"`, the default: the store keeps the program attached while no daemon runs, and drops it at a
/// stop.
fn a_restart_by_the_service_managers_descriptor_store_has_no_gap() -> anyhow::Result<()> {
    let mut env = env()?;
    let counted = |env: &TestEnv| -> anyhow::Result<u64> {
        let near = env.counted("near")?;
        let count = near["active"]["attempts"].as_u64();
        count.with_context(|| format!("{near:#}"))
    };
    let mut prober = env.prober(&[to(SERVER_V4, PORT)], &[POLICY_RTO])?;
    // The control: without a store there is a gap.
    prober.begin()?;
    env.end(Signal::SIGTERM)?;
    expect(&env, KERNEL_RTO)?;
    env.keep_descriptors(64, 64);
    env.start()?;
    ensure!(prober.end()?.wrong > 0, "the control saw no gap");
    let before = kernel(&env)?;
    expect(&env, POLICY_RTO)?;
    for _ in 0..3 {
        let count = counted(&env)?;
        prober.begin()?;
        env.end(Signal::SIGTERM)?;
        assert!(!env.pin_dir().exists(), "{}", env.log());
        expect(&env, POLICY_RTO)?;
        env.start()?;
        let seen = prober.end()?;
        ensure!(seen.wrong == 0 && seen.count > 100, "{seen:?}");
        assert_eq!(kernel(&env)?, before);
        assert_eq!(env.status()?["found_at_start"], "adopted");
        let after = counted(&env)?;
        ensure!(after >= count + seen.count, "{count} + {seen:?}: {after}");
        // Once the objects are pinned again, the store drops them.
        let kept = || env.kept_descriptors();
        eventually_seen("an empty store", TIMEOUT, kept, Vec::is_empty)?;
    }
    env.end(Signal::SIGTERM)?;
    // For a stop, unlike a restart, the service manager drops the descriptors.
    env.keep_descriptors(64, 0);
    assert_gone(&before)?;
    expect(&env, KERNEL_RTO)
}

test!(too_small_descriptor_store_is_reported);
/// A drop-in sets a lower FileDescriptorStoreMax= than the unit's FDSTORE announces.
fn too_small_descriptor_store_is_reported() -> anyhow::Result<()> {
    for keeps in [0, 3] {
        let mut env = env()?;
        env.end(Signal::SIGTERM)?;
        assert!(!env.log().contains("service manager"), "{}", env.log());
        env.keep_descriptors(64, keeps);
        env.start()?;
        let before = kernel(&env)?;
        assert_eq!(env.end(Signal::SIGTERM)?.code(), Some(0));
        let log = env.log();
        assert!(log.contains("no policy is active until the next start: it keeps fewer than"));
        assert!(
            !log.contains("the service manager keeps the active policies"),
            "{log}"
        );
        assert!(env.kept_descriptors()?.is_empty());
        assert_gone(&before)?;
        expect(&env, KERNEL_RTO)?;
    }
    Ok(())
}

test!(the_units_capabilities_suffice);
/// With the systemd unit's capability bounding set and no new privileges: start, change, adopt, stop.
fn the_units_capabilities_suffice() -> anyhow::Result<()> {
    let set = capabilities(&["rto-agent.service"])?;
    let mut env = configured(&near("\"10.88.0.0/24\""))?;
    env.net.black_hole(PORT)?;
    // Each capability is needed (except CHOWN here, because the socket's group is root's).
    for one in set.iter().filter(|cap| *cap != "+chown") {
        let fewer: Vec<String> = set.iter().filter(|cap| *cap != one).cloned().collect();
        assert!(
            env.start_under(&under(&fewer)).is_err(),
            "{one} is not needed"
        );
    }
    env.start_under(&under(&set))?;
    env.cli(&["add", "10.88.1.0/24", "--policy", "near"])?;
    expect(&env, POLICY_RTO)?;
    env.end(Signal::SIGKILL)?;
    env.start_under(&under(&set))?;
    assert_eq!(env.status()?["found_at_start"], "adopted");
    assert_eq!(env.end(Signal::SIGTERM)?.code(), Some(0));
    assert!(!env.pin_dir().exists());
    Ok(())
}

/// The capability bounding set in these files of `systemd/`, as setpriv(1) takes it.
fn capabilities(files: &[&str]) -> anyhow::Result<Vec<String>> {
    let mut set = Vec::new();
    for file in files {
        let path = format!("{}/../systemd/{file}", env!("CARGO_MANIFEST_DIR"));
        let text = fs::read_to_string(path)?.to_lowercase();
        let lines = text.lines();
        let sets = lines.filter_map(|line| line.strip_prefix("capabilityboundingset="));
        let names = sets.flat_map(str::split_whitespace);
        set.extend(names.map(|name| name.replace("cap_", "+")));
    }
    ensure!(!set.is_empty(), "no CapabilityBoundingSet");
    Ok(set)
}

/// A command line that starts a program with only the capabilities in these files of `systemd/`.
pub(crate) fn bounded(files: &[&str]) -> anyhow::Result<Vec<String>> {
    Ok(under(&capabilities(files)?))
}

/// A command line that starts a program with only these capabilities.
fn under(set: &[String]) -> Vec<String> {
    let bounding = format!("--bounding-set=-all,{}", set.join(","));
    // As the unit's LimitMEMLOCK=: before Linux 5.11 maps count against the limit.
    let limit = "ulimit -l unlimited; exec \"$@\"";
    let unit = [
        "bash",
        "-c",
        limit,
        "unit",
        "setpriv",
        "--no-new-privs",
        "--inh-caps=-all",
    ];
    let words = unit.iter().map(ToString::to_string);
    words.chain([bounding]).collect()
}

test!(link_held_by_another_process_is_detached);
/// Removing the pin would leave the link attached. Tests each way to detach, also after the programs' pins are lost.
fn link_held_by_another_process_is_detached() -> anyhow::Result<()> {
    type End = fn(&mut TestEnv) -> anyhow::Result<()>;
    let ends: [End; 4] = [
        |env| env.end(Signal::SIGTERM).map(drop),
        |env| env.cli(&["detach"]).map(drop),
        |env| {
            let restores = !lacks("iter-tcp")?;
            let restore = restores.then_some("--restore");
            env.cli(&Vec::from_iter(["detach"].into_iter().chain(restore)))
                .map(drop)
        },
        |env| {
            let pins = env.pins()?;
            env.end(Signal::SIGKILL)?;
            fs::remove_file(pins.join("program"))?;
            // This pin exists only with BPF LSM.
            let _none = fs::remove_file(pins.join("clone_program"));
            env.cli(&["detach"]).map(drop)
        },
    ];
    for (n, end) in ends.into_iter().enumerate() {
        let mut env = env()?;
        let held = ["link", "clone_link"].map(|name| Some(env.pins().ok()?.join(name)));
        let held = held.map(|path| pinned(&path?).ok());
        ensure!(held[0].is_some(), "{n}: no link");
        let links = links_at(env.cgroup.path())?.len();
        ensure!(links == held.iter().flatten().count(), "{n}: {links} links");
        end(&mut env)?;
        let left = links_at(env.cgroup.path())?;
        ensure!(left.is_empty(), "{n}: {left:?} {}", env.log());
        expect(&env, KERNEL_RTO)?;
    }
    Ok(())
}

test!(service_manager_is_notified, notified);
fn notified() -> anyhow::Result<()> {
    let mut env = env()?;
    env.cli(&["reload"])?;
    let messages = env.notified("RELOADING=1")?.join("\n");
    assert!(messages.contains("MONOTONIC_USEC="), "{messages}");
    env.notified("READY=1")?;
    env.configure("[policy.near]\ninitial_rto = \"1\"\n")?;
    env.notified("STATUS=1 entry of 1 policy active; last reload rejected")?;
    env.signal(Signal::SIGTERM)?;
    env.notified("STOPPING=1")?;
    Ok(())
}

test!(the_socket_is_for_root_and_its_group);
fn the_socket_is_for_root_and_its_group() -> anyhow::Result<()> {
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown};

    let env = env()?;
    let meta = fs::metadata(env.socket())?;
    assert_eq!(
        (meta.mode() & 0o7777, meta.uid(), meta.gid()),
        (0o660, 0, 0)
    );
    // The mode keeps other users out, and the daemon does if the mode was loosened.
    let listed_by_nobody = |groups: &str| -> anyhow::Result<std::process::Output> {
        let mut command = Command::new("setpriv");
        command
            .args(["--reuid=65534", "--regid=65534", groups])
            .arg(find(None)?);
        Ok(command
            .args(["list", "--socket"])
            .arg(env.socket())
            .output()?)
    };
    let as_nobody = || -> anyhow::Result<String> {
        let output = listed_by_nobody("--clear-groups")?;
        assert_eq!(output.status.code(), Some(1));
        Ok(String::from_utf8_lossy(&output.stderr).into_owned())
    };
    fs::set_permissions(env.dir(), fs::Permissions::from_mode(0o755))?;
    let text = as_nobody()?;
    assert!(text.contains("permission denied; only root and"), "{text}");
    fs::set_permissions(env.socket(), fs::Permissions::from_mode(0o666))?;
    let text = as_nobody()?;
    assert_says(&text, &["uid 65534", "neither root nor in the group"]);
    // A member of the socket's group has access: here the group is root's, so this user joins it.
    chown(env.socket(), None, Some(0))?;
    assert!(listed_by_nobody("--groups=0")?.status.success());
    Ok(())
}

test!(another_capacity_keeps_the_entries);
fn another_capacity_keeps_the_entries() -> anyhow::Result<()> {
    let mut env = silent(&format!("max_entries = 100\n{}", near("\"10.88.0.0/24\"")))?;
    let before = kernel(&env)?;
    env.end(Signal::SIGKILL)?;
    // A smaller capacity than the maps have: nothing is re-created.
    env.configure(&format!("max_entries = 50\n{}", near("\"10.88.0.0/24\"")))?;
    env.start()?;
    assert_eq!(kernel(&env)?, before);
    env.end(Signal::SIGKILL)?;
    env.configure(&format!(
        "max_entries = 20000\n{}",
        near("\"10.88.0.0/24\"")
    ))?;
    env.start()?;
    let after = kernel(&env)?;
    assert_ne!(after, before);
    // All maps but the tries are the same.
    let kept = before.maps.iter().filter(|id| after.maps.contains(id));
    assert!(kept.count() > 2, "{before:?} {after:?}");
    let gone = before
        .maps
        .into_iter()
        .filter(|id| !after.maps.contains(id));
    // The link stays, with another program.
    assert_eq!(after.link, before.link);
    let gone = Kernel {
        maps: gone.collect(),
        link: None,
        ..before
    };
    assert!(gone.maps.len() >= 2, "{gone:?}");
    assert_gone(&gone)?;
    expect(&env, POLICY_RTO)
}

test!(maps_that_the_program_has_left_are_not_adopted);
/// As after a kill right after the link got a program with larger tries: the former pins still exist, the link's among
/// them.
fn maps_that_the_program_has_left_are_not_adopted() -> anyhow::Result<()> {
    const ENTRIES: usize = 40;
    let mut env = silent(&format!("max_entries = 8\n{}", near("\"10.88.0.0/24\"")))?;
    let former = env.pins()?;
    let kept = env.pin_dir().join("kept");
    fs::create_dir(&kept)?;
    for pin in fs::read_dir(&former)? {
        let pin = pin?;
        fs::hard_link(pin.path(), kept.join(pin.file_name()))?;
    }
    let cidrs: Vec<String> = (0..ENTRIES).map(|n| format!("10.99.{n}.0/24")).collect();
    env.cli_of(&["add", "--policy", "near"], &cidrs)?;
    env.end(Signal::SIGKILL)?;
    ensure!(!former.exists(), "{}: no growth", former.display());
    fs::rename(&kept, &former)?;
    for entry in fs::read_dir(env.dir().join("state"))? {
        fs::remove_file(entry?.path())?;
    }
    env.start()?;
    kernel(&env)?;
    // The daemon writes to the maps that the program reads.
    let other = to(SERVER_V4_OTHER, PORT);
    env.assert_syn_gap(other, KERNEL_RTO)?;
    env.cli(&["add", "10.88.1.0/24", "--policy", "near"])?;
    env.assert_syn_gap(other, POLICY_RTO)?;
    expect(&env, POLICY_RTO)
}

test!(pins_of_another_layout_are_replaced);
fn pins_of_another_layout_are_replaced() -> anyhow::Result<()> {
    let mut env = env()?;
    let before = kernel(&env)?;
    env.end(Signal::SIGKILL)?;
    fs::rename(env.pins()?, env.pin_dir().join("l99-abcdef-16384"))?;
    // The agent leaves a foreign directory among them alone.
    fs::create_dir(env.pin_dir().join("other"))?;
    env.start()?;
    assert_eq!(env.status()?["found_at_start"], "replaced");
    fs::remove_dir(env.pin_dir().join("other"))?;
    assert_eq!(kernel(&env)?.link, before.link);
    let gone = Kernel {
        link: None,
        ..before
    };
    assert_gone(&gone)?;
    expect(&env, POLICY_RTO)
}
