//! Start, death, restart, stop, detach: the kernel holds what it should at each moment.

use std::{
    fs,
    io::Write as _,
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use nix::{
    sys::{signal::Signal, stat::Mode},
    unistd::mkfifo,
};
use rto_tests::{
    agent::{SOON, World, binary},
    netns::{SERVER_V4, SERVER_V4_OTHER},
    process::run,
    traffic::Connect,
};
use serde_json::Value;

use super::{KERNEL, NEAR, Test, near, to};

pub(super) const TESTS: &[Test] = &[
    ("killed_it_stays_in_force_and_is_adopted", killed),
    ("detach_leaves_nothing", detach),
    ("detach_without_a_daemon", detach_alone),
    ("stopped_it_leaves_nothing", stopped),
    ("on_exit_keep", keep),
    ("the_units_capabilities_suffice", unit_capabilities),
    ("two_starts_at_once", two_starts),
    ("service_manager_is_told", notified),
    ("the_watchdog_hears_of_a_long_change", long_change),
    ("the_watchdog_hears_nothing_of_a_stuck_one", stuck_change),
    ("the_socket_is_for_root_and_its_group", socket_mode),
    ("a_vanished_cgroup_is_said_and_mended", vanished_cgroup),
    ("lost_pins_are_said_and_mended", lost_pins),
    ("another_capacity_keeps_the_entries", capacity),
    ("maps_that_the_program_has_left_are_not_adopted", left_maps),
    ("pins_of_another_layout_are_replaced", other_layout),
];

const PORT: u16 = 4400;

fn expect(world: &World, timer: Duration) -> anyhow::Result<()> {
    world.assert_syn_gap(to(SERVER_V4, PORT), &Connect::default(), timer)
}

fn world() -> anyhow::Result<World> {
    let world = World::with(&near("\"10.88.0.0/24\""))?;
    world.net.black_hole(PORT)?;
    Ok(world)
}

/// A daemon that is at a change, for as long as it pleases whoever writes its file.
fn endless_change(timeout: Duration) -> anyhow::Result<(World, fs::File, Vec<u8>)> {
    let mut world = World::new()?;
    world.net.black_hole(PORT)?;
    world.configure(&near("\"10.88.0.0/24\""))?;
    let timeout = format!("WATCHDOG_USEC={}", timeout.as_micros());
    world.start_under(&["env".to_owned(), timeout])?;
    let regular = fs::read(world.config())?;
    let pipe = world.dir().join("pipe");
    mkfifo(&pipe, Mode::S_IRUSR | Mode::S_IWUSR)?;
    fs::rename(&pipe, world.config())?;
    // Once the daemon reads.
    let end = fs::File::options().write(true).open(world.config())?;
    Ok((world, end, regular))
}

/// A change that takes longer than WATCHDOG_USEC, and gets on: here it reads a line now and then.
fn long_change() -> anyhow::Result<()> {
    const TIMEOUT: Duration = Duration::from_secs(4);
    let (mut world, mut end, regular) = endless_change(TIMEOUT)?;
    let begin = Instant::now();
    while begin.elapsed() < 3 * TIMEOUT {
        let heard = Instant::now();
        end.write_all(b"# more\n")?;
        world.notified("WATCHDOG=1")?;
        ensure!(heard.elapsed() < TIMEOUT, "{:?}", heard.elapsed());
    }
    end.write_all(&regular)?;
    let pipe = world.dir().join("pipe");
    fs::write(&pipe, regular)?;
    fs::rename(&pipe, world.config())?;
    drop(end);
    world.wait_status("the end of the change", |status| status["healthy"] == true)?;
    expect(&world, NEAR)
}

/// One that does not get on: the watchdog hears nothing for as long as it takes to notice, whoever else asks meanwhile.
fn stuck_change() -> anyhow::Result<()> {
    const TIMEOUT: Duration = Duration::from_secs(2);
    let (mut world, end, _) = endless_change(TIMEOUT)?;
    let limit = Instant::now() + SOON;
    let mut heard = Instant::now();
    let mut times = 0;
    while heard.elapsed() < TIMEOUT {
        ensure!(Instant::now() < limit, "it was answered for {times} times");
        // Answered by others than the engine.
        world.cli(&["list"])?;
        if world.has_notified("WATCHDOG=1")? {
            heard = Instant::now();
            times += 1;
        }
    }
    // It goes on where the change does.
    drop(end);
    world.notified("WATCHDOG=1")?;
    Ok(())
}

/// The kernel's ids of what an agent has pinned: program, link, maps.
#[derive(Debug, PartialEq, Eq)]
struct Kernel {
    program: i64,
    /// Where it should be another.
    link: Option<i64>,
    maps: Vec<i64>,
}

fn kernel(world: &World) -> anyhow::Result<Kernel> {
    let dirs: Vec<_> = fs::read_dir(world.pin_dir())?.collect::<Result<_, _>>()?;
    anyhow::ensure!(dirs.len() == 1, "not one set of pins: {dirs:?}");
    let dir = dirs[0].path();
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

/// Which of these still exist. Freed objects go after an RCU grace period: a short wait.
fn still_there(before: &Kernel) -> anyhow::Result<Vec<String>> {
    let mut left = Vec::new();
    for _ in 0..100 {
        left.clear();
        let mut ids = vec![("prog", before.program)];
        ids.extend(before.link.map(|id| ("link", id)));
        ids.extend(before.maps.iter().map(|id| ("map", *id)));
        for (kind, id) in ids {
            // Of one that another test is just making it says "temporarily unavailable".
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
        if left.is_empty() {
            break;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(left)
}

fn killed() -> anyhow::Result<()> {
    let mut world = world()?;
    world.cli(&["add", "10.88.1.0/24", "--initial-rto", "52ms"])?;
    let before = kernel(&world)?;
    world.end(Signal::SIGKILL)?;
    expect(&world, NEAR)?;
    world.start()?;
    assert_eq!(
        kernel(&world)?,
        before,
        "adopted means: the same program, link and maps"
    );
    assert_eq!(world.json(&["status"])?["found_at_start"], "adopted");
    expect(&world, NEAR)?;
    let list = world.json(&["list"])?;
    assert_eq!(
        list["entries"].as_array().map(Vec::len),
        Some(2),
        "{list:#}"
    );
    assert_eq!(list["entries"][1]["source"]["kind"], "manual");
    // What changed in the files while it was dead is reconciled.
    world.end(Signal::SIGKILL)?;
    world.configure(&near("\"10.88.9.0/24\""))?;
    world.start()?;
    expect(&world, KERNEL)?;
    assert_eq!(kernel(&world)?, before);
    Ok(())
}

fn detach() -> anyhow::Result<()> {
    let world = world()?;
    let before = kernel(&world)?;
    let said = world.cli(&["detach"])?;
    assert!(said.contains("1 link(s) and 1 set(s)"), "{said}");
    assert_eq!(still_there(&before)?, Vec::<String>::new());
    assert!(!world.pin_dir().exists());
    expect(&world, KERNEL)?;
    // The daemon runs on and says so; a changed file does not attach, asking for it does.
    let status = world.json(&["status"])?;
    assert_eq!(
        (&status["healthy"], &status["detached_by"]["uid"]),
        (&false.into(), &0.into())
    );
    world.cli(&["reload"])?;
    expect(&world, NEAR)?;
    Ok(())
}

fn detach_alone() -> anyhow::Result<()> {
    let mut world = world()?;
    let before = kernel(&world)?;
    world.end(Signal::SIGKILL)?;
    let said = world.cli(&["detach"])?;
    assert!(said.contains("1 link(s) and 1 set(s)"), "{said}");
    assert_eq!(still_there(&before)?, Vec::<String>::new());
    assert!(!world.pin_dir().exists());
    expect(&world, KERNEL)?;
    assert!(world.cli(&["detach"])?.contains("nothing was attached"));
    Ok(())
}

fn stopped() -> anyhow::Result<()> {
    for signal in [Signal::SIGTERM, Signal::SIGINT] {
        let mut world = world()?;
        let before = kernel(&world)?;
        let status = world.end(signal)?;
        assert_eq!(status.code(), Some(0), "{}", world.log());
        assert_eq!(still_there(&before)?, Vec::<String>::new());
        assert!(!world.pin_dir().exists() && !world.socket().exists());
    }
    Ok(())
}

fn keep() -> anyhow::Result<()> {
    let mut world = World::new()?;
    world.net.black_hole(PORT)?;
    world.configure(&format!("on_exit = \"keep\"\n{}", near("\"10.88.0.0/24\"")))?;
    world.start()?;
    let before = kernel(&world)?;
    assert_eq!(world.end(Signal::SIGTERM)?.code(), Some(0));
    expect(&world, NEAR)?;
    assert_eq!(kernel(&world)?, before);
    world.cli(&["detach"])?;
    assert_eq!(still_there(&before)?, Vec::<String>::new());
    Ok(())
}

/// With the systemd unit's capability bounding set and no new privileges: start, change, adopt, stop.
fn unit_capabilities() -> anyhow::Result<()> {
    let unit = concat!(env!("CARGO_MANIFEST_DIR"), "/../systemd/rto-agent.service");
    let unit = fs::read_to_string(unit)?;
    let set = unit
        .lines()
        .find_map(|line| line.strip_prefix("CapabilityBoundingSet="));
    let set = set.context("no CapabilityBoundingSet")?.to_lowercase();
    let set: Vec<String> = set
        .split_whitespace()
        .map(|cap| cap.replace("cap_", "+"))
        .collect();
    let under = |set: &[String]| {
        let bounding = format!("--bounding-set=-all,{}", set.join(","));
        // As LimitMEMLOCK: before Linux 5.11 maps count against it.
        let limit = "ulimit -l unlimited; exec \"$@\"";
        let unit = ["bash", "-c", limit, "unit", "setpriv", "--no-new-privs"];
        let mut wrapper: Vec<String> = unit.map(str::to_owned).to_vec();
        wrapper.push(bounding);
        wrapper
    };
    let mut world = World::new()?;
    world.net.black_hole(PORT)?;
    world.configure(&near("\"10.88.0.0/24\""))?;
    // Each of them is needed (the socket's group is root's here, so CHOWN is not).
    for one in set.iter().filter(|cap| *cap != "+chown") {
        let fewer: Vec<String> = set.iter().filter(|cap| *cap != one).cloned().collect();
        assert!(
            world.start_under(&under(&fewer)).is_err(),
            "{one} is not needed"
        );
    }
    world.start_under(&under(&set))?;
    world.cli(&["add", "10.88.1.0/24", "--policy", "near"])?;
    expect(&world, NEAR)?;
    world.end(Signal::SIGKILL)?;
    world.start_under(&under(&set))?;
    assert_eq!(world.json(&["status"])?["found_at_start"], "adopted");
    assert_eq!(world.end(Signal::SIGTERM)?.code(), Some(0));
    assert!(!world.pin_dir().exists());
    Ok(())
}

fn two_starts() -> anyhow::Result<()> {
    let world = world()?;
    let second = Command::new(binary()?)
        .arg("run")
        .arg("--config")
        .arg(world.config())
        .output()?;
    let said = String::from_utf8_lossy(&second.stderr);
    assert_eq!(second.status.code(), Some(1), "{said}");
    assert!(
        said.contains(&format!("another rto-agent (pid {}) holds", world.pid()?)),
        "{said}"
    );
    // The first is none the worse for it.
    assert_eq!(world.json(&["status"])?["healthy"], true);
    expect(&world, NEAR)?;
    Ok(())
}

fn notified() -> anyhow::Result<()> {
    let mut world = world()?;
    world.cli(&["reload"])?;
    let messages = world.notified("RELOADING=1")?.join("\n");
    assert!(messages.contains("MONOTONIC_USEC="), "{messages}");
    world.notified("READY=1")?;
    world.configure("[policy.near]\ninitial_rto = \"1\"\n")?;
    world.notified("STATUS=1 entries of 1 policies in force; last reload refused")?;
    world.signal(Signal::SIGTERM)?;
    world.notified("STOPPING=1")?;
    Ok(())
}

fn socket_mode() -> anyhow::Result<()> {
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown};

    let world = world()?;
    let meta = fs::metadata(world.socket())?;
    assert_eq!(
        (meta.mode() & 0o7777, meta.uid(), meta.gid()),
        (0o660, 0, 0)
    );
    // Another user is kept out by the mode, and by the daemon where somebody loosened it.
    let as_nobody = || -> anyhow::Result<String> {
        let mut command = rto_tests::process::command_in(None, None, "setpriv")?;
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]);
        command
            .arg(binary()?)
            .args(["list", "--socket"])
            .arg(world.socket());
        let output = command.output()?;
        assert_eq!(output.status.code(), Some(1));
        Ok(String::from_utf8_lossy(&output.stderr).into_owned())
    };
    fs::set_permissions(world.dir(), fs::Permissions::from_mode(0o755))?;
    let said = as_nobody()?;
    assert!(
        said.contains("permission denied; the socket is for root"),
        "{said}"
    );
    fs::set_permissions(world.socket(), fs::Permissions::from_mode(0o666))?;
    let said = as_nobody()?;
    assert!(
        said.contains("uid 65534") && said.contains("neither root nor in the group"),
        "{said}"
    );
    // A member of the socket's group gets in: here the group is root's, so give nobody that one.
    chown(world.socket(), None, Some(0))?;
    let mut member = rto_tests::process::command_in(None, None, "setpriv")?;
    member.args(["--reuid=65534", "--regid=65534", "--groups=0"]);
    member
        .arg(binary()?)
        .args(["list", "--socket"])
        .arg(world.socket());
    assert!(member.output()?.status.success());
    Ok(())
}

fn vanished_cgroup() -> anyhow::Result<()> {
    let world = world()?;
    // The probe at the start has a cgroup below for a moment.
    world.wait_status("the probe", |status| status["probe"].is_object())?;
    fs::remove_dir(world.cgroup.path())?;
    let status = world.wait_status("the loss", |status| status["healthy"] == false)?;
    let problem = status["problems"][0].as_str().unwrap_or_default();
    assert!(
        problem.contains(&world.cgroup.path().display().to_string()),
        "{status:#}"
    );
    assert!(world.try_cli(&["status"])?.status.code() == Some(1));
    fs::create_dir(world.cgroup.path())?;
    world.wait_status("the repair", |status| status["healthy"] == true)?;
    expect(&world, NEAR)?;
    kernel(&world)?;
    Ok(())
}

fn lost_pins() -> anyhow::Result<()> {
    let world = world()?;
    fs::remove_dir_all(world.pin_dir())?;
    // Still in force: the daemon holds the link.
    expect(&world, NEAR)?;
    world.wait_status("the repair", |status| {
        status["healthy"] == true && world.pin_dir().exists()
    })?;
    kernel(&world)?;
    expect(&world, NEAR)?;
    Ok(())
}

fn capacity() -> anyhow::Result<()> {
    let mut world = world()?;
    let before = kernel(&world)?;
    world.end(Signal::SIGKILL)?;
    // Less room than there is: nothing is made anew for that.
    world.configure(&format!("max_entries = 50\n{}", near("\"10.88.0.0/24\"")))?;
    world.start()?;
    assert_eq!(kernel(&world)?, before);
    world.end(Signal::SIGKILL)?;
    world.configure(&format!(
        "max_entries = 20000\n{}",
        near("\"10.88.0.0/24\"")
    ))?;
    world.start()?;
    let after = kernel(&world)?;
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
    assert_eq!(still_there(&gone)?, Vec::<String>::new());
    expect(&world, NEAR)?;
    Ok(())
}

/// Killed right after a program over larger tries has taken the former one's place in its link: the former pins are
/// still there, and among them the link.
fn left_maps() -> anyhow::Result<()> {
    const ENTRIES: usize = 40;
    let mut world = World::new()?;
    world.net.black_hole(PORT)?;
    world.configure(&format!("max_entries = 8\n{}", near("\"10.88.0.0/24\"")))?;
    world.start()?;
    let former = world.pins()?;
    let kept = world.pin_dir().join("kept");
    fs::create_dir(&kept)?;
    for pin in fs::read_dir(&former)? {
        let pin = pin?;
        fs::hard_link(pin.path(), kept.join(pin.file_name()))?;
    }
    let cidrs: Vec<String> = (0..ENTRIES).map(|n| format!("10.99.{n}.0/24")).collect();
    let add = ["add", "--policy", "near"].into_iter();
    world.cli(
        &add.chain(cidrs.iter().map(String::as_str))
            .collect::<Vec<_>>(),
    )?;
    world.end(Signal::SIGKILL)?;
    ensure!(!former.exists(), "{}: no growth", former.display());
    fs::rename(&kept, &former)?;
    for entry in fs::read_dir(world.dir().join("state"))? {
        fs::remove_file(entry?.path())?;
    }
    world.start()?;
    kernel(&world)?;
    // What the daemon writes is what the program reads.
    let other = to(SERVER_V4_OTHER, PORT);
    world.assert_syn_gap(other, &Connect::default(), KERNEL)?;
    world.cli(&["add", "10.88.1.0/24", "--policy", "near"])?;
    world.assert_syn_gap(other, &Connect::default(), NEAR)?;
    expect(&world, NEAR)
}

fn other_layout() -> anyhow::Result<()> {
    let mut world = world()?;
    let before = kernel(&world)?;
    world.end(Signal::SIGKILL)?;
    let ours = fs::read_dir(world.pin_dir())?
        .next()
        .context("no pins")??
        .path();
    fs::rename(&ours, world.pin_dir().join("l99-abcdef-16384"))?;
    // Somebody else's directory among them is none of our business.
    fs::create_dir(world.pin_dir().join("somebody"))?;
    world.start()?;
    assert_eq!(world.json(&["status"])?["found_at_start"], "replaced");
    fs::remove_dir(world.pin_dir().join("somebody"))?;
    assert_eq!(kernel(&world)?.link, before.link);
    let gone = Kernel {
        link: None,
        ..before
    };
    assert_eq!(still_there(&gone)?, Vec::<String>::new());
    expect(&world, NEAR)?;
    Ok(())
}
