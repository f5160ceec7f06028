//! File systems that are full, read-only or not there, pins that are somebody else's, files that change
//! faster than they are read.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use nix::sys::signal::Signal;
use rto_agent_common::{LAYOUT_VERSION, maps};
use rto_tests::{
    agent::{SOON, World, binary},
    foreign::Foreign,
    kernel::{SOCK_OPS, links_at, programs_at},
    netns::SERVER_V4,
    process::run,
    traffic::Connect,
};

use super::{
    super::{KERNEL, NEAR, near, to},
    descriptors, memory_kb,
};

const PORT: u16 = 4460;

fn expect(world: &World, timer: Duration) -> anyhow::Result<()> {
    world.assert_syn_gap(to(SERVER_V4, PORT), &Connect::default(), timer)
}

fn world() -> anyhow::Result<World> {
    let world = World::new()?;
    world.net.black_hole(PORT)?;
    world.configure(&near("\"10.88.0.0/24\""))?;
    Ok(world)
}

/// Has a daemon run in a mount namespace of its own, after these shell commands.
fn mounted(commands: &str) -> Vec<String> {
    let script = format!("set -e; {commands}; exec \"$@\"");
    ["unshare", "--mount", "sh", "-c", &script, "sh"]
        .map(str::to_owned)
        .to_vec()
}

/// Starts a daemon that must refuse; what it said.
fn refuses(world: &mut World, wrapper: &[String]) -> anyhow::Result<String> {
    let before = world.log().len();
    world.spawn_under(wrapper)?;
    let status = world.ended()?;
    let said = world.log()[before..].to_owned();
    ensure!(status.code() == Some(1), "{status}: {said}");
    Ok(said)
}

/// Runs a command in the daemon's mount namespace.
fn inside(world: &World, command: &str) -> anyhow::Result<()> {
    run(&format!("nsenter -t {} -m {command}", world.pid()?)).map(drop)
}

/// A path as the daemon sees it.
fn seen(world: &World, path: &Path) -> anyhow::Result<PathBuf> {
    let root = PathBuf::from(format!("/proc/{}/root", world.pid()?));
    Ok(root.join(path.strip_prefix("/")?))
}

const NOT_MOUNTED: &str = "mount -t tmpfs none /sys/fs/bpf";
const READ_ONLY: &str =
    "mount --bind /sys/fs/bpf /sys/fs/bpf; mount -o remount,ro,bind /sys/fs/bpf";

/// Without a place for pins it does not start, and leaves nothing.
pub(super) fn no_bpffs() -> anyhow::Result<()> {
    let mut world = world()?;
    for (commands, message) in [
        (NOT_MOUNTED, "is not on a BPF file system"),
        (READ_ONLY, "Read-only file system"),
    ] {
        let said = refuses(&mut world, &mounted(commands))?;
        ensure!(
            said.contains(message) && said.contains("mount -t bpf bpf /sys/fs/bpf"),
            "{said}"
        );
        ensure!(links_at(world.cgroup.path())?.is_empty());
        ensure!(!world.pin_dir().exists() && !world.socket().exists());
    }
    world.start()?;
    expect(&world, NEAR)
}

/// What is pinned is adopted, changes are taken; what cannot be removed at the end is said.
pub(super) fn read_only_bpffs() -> anyhow::Result<()> {
    let mut world = world()?;
    world.start()?;
    world.end(Signal::SIGKILL)?;
    world.start_under(&mounted(READ_ONLY))?;
    let status = world.json(&["status"])?;
    ensure!(
        status["found_at_start"] == "adopted" && status["healthy"] == true,
        "{status:#}"
    );
    world.cli(&["remove", "10.88.0.0/24"])?;
    expect(&world, KERNEL)?;
    world.cli(&["remove", "--undo", "10.88.0.0/24"])?;
    let status = world.end(Signal::SIGTERM)?;
    ensure!(status.code() == Some(1), "{status}");
    let log = world.log();
    ensure!(log.contains("Read-only file system"), "{log}");
    // Still in force, as the pins are: the next one takes it over.
    expect(&world, NEAR)?;
    world.start()?;
    ensure!(world.json(&["status"])?["found_at_start"] == "adopted");
    ensure!(world.end(Signal::SIGTERM)?.code() == Some(0));
    ensure!(!world.pin_dir().exists());
    Ok(())
}

/// The daemon holds the link: in force without pins, said, and mended once there is a place for them.
pub(super) fn bpffs_unmounted() -> anyhow::Result<()> {
    let mut world = world()?;
    let mount = "mount -t bpf bpf /sys/fs/bpf";
    world.start_under(&mounted(&format!("{NOT_MOUNTED}; {mount}")))?;
    expect(&world, NEAR)?;
    inside(&world, "umount -l /sys/fs/bpf")?;
    let loss = "is not on a BPF file system";
    world.wait_status(loss, |status| status["problems"].to_string().contains(loss))?;
    expect(&world, NEAR)?;
    world.cli(&["remove", "10.88.0.0/24"])?;
    expect(&world, KERNEL)?;
    world.cli(&["remove", "--undo", "10.88.0.0/24"])?;
    inside(&world, mount)?;
    world.wait_status("the repair", |status| status["healthy"] == true)?;
    ensure!(seen(&world, &world.pin_dir())?.exists());
    expect(&world, NEAR)?;
    // The former link goes with the file system it was pinned in, once nobody holds that.
    let end = Instant::now() + SOON;
    while programs_at(world.cgroup.path(), SOCK_OPS)?.len() != 1 {
        ensure!(Instant::now() < end, "two programs");
        thread::sleep(Duration::from_millis(20));
    }
    ensure!(world.end(Signal::SIGTERM)?.code() == Some(0));
    // Linux 5.10 takes a link whose pin is gone off a moment later.
    let end = Instant::now() + SOON;
    while !links_at(world.cgroup.path())?.is_empty() {
        ensure!(Instant::now() < end, "still linked");
        thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// Said, and mended once it is there again, with what changed meanwhile; without it there is no start.
pub(super) fn no_cgroup() -> anyhow::Result<()> {
    let mut world = world()?;
    world.start()?;
    // The probe at the start has a cgroup below for a moment.
    world.wait_status("the probe", |status| status["probe"].is_object())?;
    let path = world.cgroup.path().to_owned();
    fs::remove_dir(&path)?;
    world.wait_status("the loss", |status| status["healthy"] == false)?;
    world.cli(&["remove", "10.88.0.0/24"])?;
    world.cli(&["add", "10.88.0.2", "--initial-rto", "200ms"])?;
    fs::create_dir(&path)?;
    world.wait_status("the repair", |status| status["healthy"] == true)?;
    expect(&world, NEAR * 2)?;
    world.wait_status("the probe", |status| status["probe"].is_object())?;
    world.end(Signal::SIGKILL)?;
    let removed = || fs::remove_dir(&path).is_ok();
    let end = Instant::now() + SOON;
    while !removed() {
        ensure!(Instant::now() < end, "{} is in use", path.display());
        thread::sleep(Duration::from_millis(10));
    }
    let said = refuses(&mut world, &[])?;
    ensure!(said.contains(&path.display().to_string()), "{said}");
    fs::create_dir(&path)?;
    world.start()?;
    expect(&world, NEAR * 2)?;
    ensure!(programs_at(&path, SOCK_OPS)?.len() == 1);
    ensure!(names_in(&world.pin_dir())?.len() == 1);
    Ok(())
}

fn names_in(dir: &Path) -> anyhow::Result<Vec<String>> {
    let entries = fs::read_dir(dir)?.map(|e| Ok(e?.file_name().to_string_lossy().into_owned()));
    let mut names = entries.collect::<anyhow::Result<Vec<_>>>()?;
    names.sort();
    Ok(names)
}

/// Takes all that is left of a file system.
fn fill(file: &Path) -> anyhow::Result<()> {
    let mut size = 0;
    let full = (0..10_000).find(|_| {
        size += 4096;
        fs::write(file, vec![0; size]).is_err()
    });
    full.context("it has no end").map(drop)
}

/// What cannot be saved is refused as a whole: in the kernel and on the disk all is as before.
pub(super) fn disk_full() -> anyhow::Result<()> {
    let mut world = world()?;
    let (state, saved) = (world.dir().join("state"), world.policies_dir());
    fs::create_dir(&state)?;
    let tmpfs = |dir: &Path| {
        format!(
            "mount -t tmpfs -o size=128k,mode=755 none {}",
            dir.display()
        )
    };
    world.start_under(&mounted(&format!("{}; {}", tmpfs(&state), tmpfs(&saved))))?;
    world.cli(&["add", "10.1.0.0/24", "--policy", "near"])?;
    world.cli(&["add", "10.2.0.0/24", "--policy", "near", "--save"])?;
    let list = world.json(&["list"])?;
    for (dir, save) in [(&state, false), (&saved, true)] {
        let dir = seen(&world, dir)?;
        let stuffing = dir.join("stuffing");
        fill(&stuffing)?;
        let names = names_in(&dir)?;
        let texts: Vec<_> = names
            .iter()
            .map(|n| fs::read(dir.join(n)))
            .collect::<Result<_, _>>()?;
        // As many as do not fit into what is left of the last page.
        let cidrs: Vec<String> = (0..500)
            .map(|i| format!("10.3.{}.{}", i / 256, i % 256))
            .collect();
        let mut add = vec!["add", "--policy", "near"];
        let mut remove = vec!["remove"];
        add.extend(cidrs.iter().map(String::as_str));
        remove.push(if save { "10.2.0.0/24" } else { "10.1.0.0/24" });
        if save {
            add.push("--save");
        }
        let said = world.cli_fails(&add)?;
        ensure!(
            said.contains("No space left on device")
                && (said.contains("nothing was changed") || said.contains("nothing was saved")),
            "{said}"
        );
        ensure!(names_in(&dir)? == names, "{:?}", names_in(&dir)?);
        for (name, text) in names.iter().zip(&texts) {
            ensure!(fs::read(dir.join(name))? == *text, "{name} was changed");
        }
        let now = world.json(&["list"])?;
        ensure!(now == list, "{now:#}");
        ensure!(world.json(&["status"])?["healthy"] == true);
        // Room again: as if nothing had been.
        fs::remove_file(&stuffing)?;
        world.cli(&add)?;
        // (status may be a look old while the engine is busy.)
        world.wait_status("all of them", |status| status["entries"] == 503)?;
        let mut undo = vec!["remove"];
        undo.extend(cidrs.iter().map(String::as_str));
        if save {
            undo.push("--save");
        }
        world.cli(&undo)?;
        ensure!(world.json(&["list"])?["entries"] == list["entries"]);
    }
    expect(&world, NEAR)?;
    // A start needs no room.
    world.end(Signal::SIGKILL)?;
    let full = format!(
        "head -c 1M /dev/zero > {}/stuffing || true",
        state.display()
    );
    world.start_under(&mounted(&format!("{}; {full}", tmpfs(&state))))?;
    ensure!(world.json(&["status"])?["healthy"] == true);
    expect(&world, NEAR)
}

/// It ends in time, said once; what is on the disk does not bring it back, and is made good later.
pub(super) fn expiry_with_a_full_disk() -> anyhow::Result<()> {
    let mut world = world()?;
    let state = world.dir().join("state");
    fs::create_dir(&state)?;
    let tmpfs = format!(
        "mount -t tmpfs -o size=128k,mode=755 none {}",
        state.display()
    );
    world.start_under(&mounted(&tmpfs))?;
    // More than there is room for beside the stuffing.
    let cidrs: Vec<String> = (0..500)
        .map(|i| format!("10.3.{}.{}", i / 256, i % 256))
        .collect();
    let mut add = vec!["add", "--policy", "near"];
    add.extend(cidrs.iter().map(String::as_str));
    world.cli(&add)?;
    world.cli(&["add", "10.1.0.0/24", "--policy", "near", "--ttl", "3s"])?;
    let dir = seen(&world, &state)?;
    fill(&dir.join("stuffing"))?;
    world.wait_status("the end", |status| status["entries"] == 501)?;
    let said = |log: &str| log.matches("No space left on device").count();
    world.wait_status("another look", |status| status["healthy"] == true)?;
    // Two looks of five seconds each try again, and say nothing new.
    thread::sleep(Duration::from_secs(11));
    ensure!(said(&world.log()) == 1, "{}", world.log());
    ensure!(fs::read_to_string(dir.join("manual.json"))?.contains("10.1.0.0/24"));
    fs::remove_file(dir.join("stuffing"))?;
    let end = Instant::now() + SOON;
    while fs::read_to_string(dir.join("manual.json"))?.contains("10.1.0.0/24") {
        ensure!(Instant::now() < end, "it was not saved again");
        thread::sleep(Duration::from_millis(100));
    }
    ensure!(world.json(&["status"])?["entries"] == 501);
    Ok(())
}

/// As where the files come from an image or a ConfigMap: it starts and works, and nothing can be saved.
pub(super) fn read_only_files() -> anyhow::Result<()> {
    let mut world = world()?;
    let etc = world.dir().join("etc");
    let (etc, bind) = (etc.display(), "mount -o remount,ro,bind");
    world.start_under(&mounted(&format!("mount --bind {etc} {etc}; {bind} {etc}")))?;
    expect(&world, NEAR)?;
    world.cli(&["add", "10.1.0.0/24", "--policy", "near"])?;
    let said = world.cli_fails(&["add", "10.2.0.0/24", "--policy", "near", "--save"])?;
    ensure!(said.contains("Read-only file system"), "{said}");
    ensure!(world.json(&["status"])?["entries"] == 2);
    Ok(())
}

/// Another `state_dir` is used from the next start on: until then the lock is on the former one.
pub(super) fn another_state_dir() -> anyhow::Result<()> {
    let mut world = world()?;
    world.start()?;
    let before = world.config_text(&near("\"10.88.0.0/24\""));
    let after = before.replace("/state\"", "/state-2\"");
    ensure!(before != after);
    fs::write(world.config(), after)?;
    let said = world.cli(&["reload"])?;
    ensure!(said.contains("state_dir changed"), "{said}");
    world.cli(&["add", "10.1.0.0/24", "--policy", "near"])?;
    // Past a look at what is saved.
    thread::sleep(Duration::from_secs(6));
    ensure!(!world.dir().join("state-2").exists());
    ensure!(!world.log().contains("gone"), "{}", world.log());
    let saved = fs::read_to_string(world.dir().join("state/manual.json"))?;
    ensure!(saved.contains("10.1.0.0/24"), "{saved}");
    Ok(())
}

/// Directories with names as ours and other things in them, older and later layouts, and things of
/// somebody else.
pub(super) fn foreign_pins() -> anyhow::Result<()> {
    let mut world = world()?;
    world.start()?;
    let ours = names_in(&world.pin_dir())?;
    ensure!(ours.len() == 1, "{ours:?}");
    let (object, rest) = (ours[0].split('-').nth(1), ours[0].rsplit('-').next());
    let (object, capacity) = (object.context("no object")?, rest.context("no capacity")?);
    world.end(Signal::SIGTERM)?;
    let dir = world.pin_dir();
    let map = |dir: &Path, name: &str| {
        run(&format!(
            "bpftool map create {} type hash key 4 value 4 entries 8 name x flags 1",
            dir.join(name).display()
        ))
    };
    // With this program's very name, but empty; with maps of another kind; of an older layout; of a later
    // one; half built; moved aside.
    let older = LAYOUT_VERSION - 1;
    for name in [
        format!("l{LAYOUT_VERSION}-{object}-{capacity}"),
        format!("l{LAYOUT_VERSION}-abcdef-17"),
        format!("l{older}-{object}-{capacity}"),
        "l99-abcdef-3".to_owned(),
        "staging-7".to_owned(),
        format!("old-7-l{older}-{object}-{capacity}"),
    ] {
        fs::create_dir_all(dir.join(&name))?;
        for name_of_map in maps::ALL {
            map(&dir.join(&name), name_of_map)?;
        }
        // A link that is none.
        map(&dir.join(&name), "link")?;
    }
    await_programs(&world, 0)?;
    let foreign = Foreign::attach(world.cgroup.path(), 60)?;
    fs::create_dir(dir.join("somebody"))?;
    map(&dir.join("somebody"), "theirs")?;
    map(&dir, "l4-0000-16")?;
    world.start()?;
    let status = world.json(&["status"])?;
    ensure!(
        status["found_at_start"] == "replaced" && status["healthy"] == true,
        "{status:#}"
    );
    expect(&world, NEAR)?;
    let mut left = names_in(&dir)?;
    left.retain(|name| *name != ours[0]);
    // Not ours: a directory of another name, and a map where we have directories.
    ensure!(left == ["l4-0000-16", "somebody"], "{left:?}");
    ensure!(programs_at(world.cgroup.path(), SOCK_OPS)?.len() == 2);
    let said = world.cli(&["detach"])?;
    ensure!(said.contains("left, not ours"), "{said}");
    ensure!(names_in(&dir)? == ["l4-0000-16", "somebody"]);
    ensure!(names_in(&dir.join("somebody"))? == ["theirs"]);
    await_programs(&world, 1)?;
    drop(foreign);
    Ok(())
}

/// Waits until so many programs are at the cgroup: the kernel takes a link out of force some time after its last
/// handle.
fn await_programs(world: &World, count: usize) -> anyhow::Result<()> {
    let end = Instant::now() + SOON;
    loop {
        let programs = programs_at(world.cgroup.path(), SOCK_OPS)?;
        if programs.len() == count {
            return Ok(());
        }
        ensure!(Instant::now() < end, "{programs:?} instead of {count}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// Two daemons that share pins and nothing else: the second is refused, also where the first one made
/// the directory for them.
pub(super) fn shared_pins() -> anyhow::Result<()> {
    let mut world = world()?;
    world.start()?;
    let text = world.config_text(&near("\"192.0.2.0/24\""));
    let text = text
        .replace("/state\"", "/state-2\"")
        .replace("control.sock", "2.sock");
    let second = world.dir().join("etc/second.toml");
    fs::write(&second, text)?;
    let output = Command::new(binary()?)
        .args(["run", "--config"])
        .arg(&second)
        .output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.code() == Some(1), "{said}");
    let (pid, pins) = (world.pid()?, world.pin_dir());
    let message = format!("another rto-agent (pid {pid}) holds {}", pins.display());
    ensure!(said.contains(&message), "{said}");
    ensure!(!world.dir().join("2.sock").exists());
    ensure!(world.json(&["status"])?["healthy"] == true);
    expect(&world, NEAR)
}

/// A thousand new files in ten seconds: the last one wins, and meanwhile the daemon answers.
pub(super) fn replaced_often() -> anyhow::Result<()> {
    const TIMES: u32 = 1000;
    let span = Duration::from_secs(10);
    let mut world = world()?;
    world.start()?;
    let text = |i: u32| {
        let cidrs: Vec<_> = (0..100)
            .map(|k| format!("\"10.{}.{k}.0/24\"", 100 + (i + k) % 50))
            .collect();
        let ms = 100 + i % 100 * 4;
        let policy = format!(
            "[policy.far]\ninitial_rto = \"{ms}ms\"\ncidrs = [{}]\n",
            cidrs.join(",")
        );
        world.config_text(&format!("{}{policy}", near("\"10.88.0.0/24\"")))
    };
    let place = |i: u32| -> anyhow::Result<()> {
        let new = world.dir().join("etc/.new");
        fs::write(&new, text(i))?;
        Ok(fs::rename(&new, world.config())?)
    };
    // What the first changes take is taken.
    for i in 0..20 {
        place(i)?;
        world.cli(&["reload"])?;
    }
    let (descriptors_before, memory_before) = (descriptors(&world)?, memory_kb(&world)?);
    let begin = Instant::now();
    let mut slowest = Duration::ZERO;
    for i in 0..TIMES {
        place(i)?;
        if i % 50 == 0 {
            let asked = Instant::now();
            let status = world.socket_request("GET", "/v1/status", "")?;
            ensure!(status["healthy"] == true, "{status:#}");
            slowest = slowest.max(asked.elapsed());
        }
        if i == TIMES / 2 {
            world.cli(&["add", "10.1.0.0/24", "--policy", "near"])?;
        }
        let due = begin + span * (i + 1) / TIMES;
        thread::sleep(due.saturating_duration_since(Instant::now()));
    }
    // The 1,000th is none of the others'.
    fs::write(
        world.dir().join("etc/.new"),
        world.config_text(&near("\"10.88.0.0/24\", \"10.200.0.0/24\"")),
    )?;
    fs::rename(world.dir().join("etc/.new"), world.config())?;
    let took = begin.elapsed();
    let last = Instant::now();
    world.wait_status("the last file", |status| status["entries"] == 3)?;
    let noticed = last.elapsed();
    eprintln!(
        "{TIMES} files in {took:?}; status took {slowest:?} at most; the last was in force after {noticed:?}"
    );
    ensure!(took < span * 2 && slowest < Duration::from_secs(2));
    let list = world.cli(&["list"])?;
    ensure!(
        list.contains("10.200.0.0/24") && list.contains("10.1.0.0/24"),
        "{list}"
    );
    expect(&world, NEAR)?;
    let status = world.json(&["status"])?;
    ensure!(status["last_reload"]["ok"] == true, "{status:#}");
    let end = Instant::now() + SOON;
    while descriptors(&world)? > descriptors_before + 2 {
        ensure!(Instant::now() < end, "{} descriptors", descriptors(&world)?);
        thread::sleep(Duration::from_millis(50));
    }
    let grown = memory_kb(&world)?.saturating_sub(memory_before);
    ensure!(grown < 16 << 10, "it grew by {grown} kB");
    Ok(())
}
