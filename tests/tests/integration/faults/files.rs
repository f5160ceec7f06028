//! File systems that are full, read-only or missing, foreign pins, and files that change faster than they are read.

use rto_agent_common::LAYOUT_VERSION;

use super::{descriptors, desired::names_in, memory_kb};
use crate::prelude::*;

fn env() -> anyhow::Result<TestEnv> {
    let env = TestEnv::new()?;
    env.net.black_hole(PORT)?;
    // Measurements of the black hole would begin a fallback (outage), and the tests do not see pins in the daemon's own
    // mount namespace, where they could end it.
    env.configure(&format!("{}guard = \"off\"\n", near("\"10.88.0.0/24\"")))?;
    Ok(env)
}

/// A command line that runs a daemon in a separate mount namespace, after these shell commands.
fn mounted(commands: &str) -> Vec<String> {
    let script = format!("set -e; {commands}; exec \"$@\"");
    ["unshare", "--mount", "sh", "-c", &script, "sh"]
        .map(str::to_owned)
        .to_vec()
}

/// Starts a daemon that must fail; returns its log.
fn refuses(env: &mut TestEnv, wrapper: &[String]) -> anyhow::Result<String> {
    let before = env.log().len();
    env.spawn_under(wrapper)?;
    let status = env.ended()?;
    let logged = env.log()[before..].to_owned();
    ensure!(status.code() == Some(1), "{status}: {logged}");
    Ok(logged)
}

/// Runs a command in the daemon's mount namespace.
fn inside(env: &TestEnv, command: &str) -> anyhow::Result<()> {
    run(&format!("nsenter -t {} -m {command}", env.pid()?)).map(drop)
}

/// A path as the daemon sees it.
fn seen(env: &TestEnv, path: &Path) -> anyhow::Result<PathBuf> {
    let root = PathBuf::from(format!("/proc/{}/root", env.pid()?));
    Ok(root.join(path.strip_prefix("/")?))
}

const NOT_MOUNTED: &str = "mount -t tmpfs none /sys/fs/bpf";
const READ_ONLY: &str =
    "mount --bind /sys/fs/bpf /sys/fs/bpf; mount -o remount,ro,bind /sys/fs/bpf";

test!(no_bpf_file_system);
/// Without a file system for pins the daemon does not start, and leaves nothing.
fn no_bpf_file_system() -> anyhow::Result<()> {
    let mut env = env()?;
    for (commands, message) in [
        (NOT_MOUNTED, "is not on a BPF file system"),
        (READ_ONLY, "Read-only file system"),
    ] {
        let error = refuses(&mut env, &mounted(commands))?;
        ensure!(
            error.contains(message) && error.contains("mount -t bpf bpf /sys/fs/bpf"),
            "{error}"
        );
        ensure!(links_at(env.cgroup.path())?.is_empty());
        ensure!(!env.pin_dir().exists() && !env.socket().exists());
    }
    env.start()?;
    expect(&env, POLICY_RTO)
}

test!(a_read_only_bpf_file_system);
/// Pinned objects are adopted and changes are made; the daemon reports what it could not remove at its end.
fn a_read_only_bpf_file_system() -> anyhow::Result<()> {
    let mut env = env()?;
    env.start()?;
    env.end(Signal::SIGKILL)?;
    env.start_under(&mounted(READ_ONLY))?;
    let status = env.status()?;
    ensure!(
        status["found_at_start"] == "adopted" && status["healthy"] == true,
        "{status:#}"
    );
    env.cli(&["remove", "10.88.0.0/24"])?;
    expect(&env, KERNEL_RTO)?;
    env.cli(&["remove", "--undo", "10.88.0.0/24"])?;
    let status = env.end(Signal::SIGTERM)?;
    ensure!(status.code() == Some(1), "{status}");
    let log = env.log();
    ensure!(log.contains("Read-only file system"), "{log}");
    // The program is still attached, as the pins exist, but treats no connection. The next daemon adopts it.
    expect(&env, KERNEL_RTO)?;
    env.start()?;
    ensure!(env.status()?["found_at_start"] == "adopted");
    expect(&env, POLICY_RTO)?;
    ensure!(env.end(Signal::SIGTERM)?.code() == Some(0));
    ensure!(!env.pin_dir().exists());
    Ok(())
}

test!(bpf_file_system_is_unmounted_while_running);
/// The daemon holds the link, so the policy stays active without pins; that is reported, and repaired once pins are
/// possible.
fn bpf_file_system_is_unmounted_while_running() -> anyhow::Result<()> {
    let mut env = env()?;
    let mount = "mount -t bpf bpf /sys/fs/bpf";
    env.start_under(&mounted(&format!("{NOT_MOUNTED}; {mount}")))?;
    expect(&env, POLICY_RTO)?;
    inside(&env, "umount -l /sys/fs/bpf")?;
    let loss = "is not on a BPF file system";
    env.wait_status(loss, |status| status["problems"].to_string().contains(loss))?;
    expect(&env, POLICY_RTO)?;
    env.cli(&["remove", "10.88.0.0/24"])?;
    expect(&env, KERNEL_RTO)?;
    env.cli(&["remove", "--undo", "10.88.0.0/24"])?;
    inside(&env, mount)?;
    env.wait_status("the repair", |status| status["healthy"] == true)?;
    ensure!(seen(&env, &env.pin_dir())?.exists());
    expect(&env, POLICY_RTO)?;
    // The former link is released with the file system it was pinned in, when that has no users left.
    await_programs(&env, 1)?;
    ensure!(env.end(Signal::SIGTERM)?.code() == Some(0));
    // Linux 5.10 detaches a link whose pin is gone with a short delay.
    let links = || Ok(links_at(env.cgroup.path())?);
    eventually_seen("end of the link", TIMEOUT, links, Vec::is_empty).map(drop)
}

test!(the_cgroup_is_removed);
/// The loss is reported, and repaired when the cgroup exists again, with changes made in between; without it no daemon
/// starts.
fn the_cgroup_is_removed() -> anyhow::Result<()> {
    let mut env = env()?;
    env.start()?;
    // The probe at the start has a child cgroup for a moment.
    env.wait_status("the probe", |status| status["probe"].is_object())?;
    let path = env.cgroup.path().to_owned();
    fs::remove_dir(&path)?;
    let status = env.wait_status("the loss", |status| status["healthy"] == false)?;
    let problem = status["problems"][0].as_str().unwrap_or_default();
    assert_says(problem, &[&path.display().to_string()]);
    ensure!(env.try_cli(&["status"])?.status.code() == Some(1));
    env.cli(&["remove", "10.88.0.0/24"])?;
    let entry = "add 10.88.0.2 --initial-rto 200ms";
    env.cli(&entry.split(' ').collect::<Vec<_>>())?;
    fs::create_dir(&path)?;
    env.wait_status("the repair", |status| status["healthy"] == true)?;
    expect(&env, POLICY_RTO * 2)?;
    env.wait_status("the probe", |status| status["probe"].is_object())?;
    env.end(Signal::SIGKILL)?;
    let removed = || Ok(fs::remove_dir(&path).ok());
    eventually("end of the cgroup's use", TIMEOUT, removed)?;
    let error = refuses(&mut env, &[])?;
    ensure!(error.contains(&path.display().to_string()), "{error}");
    fs::create_dir(&path)?;
    env.start()?;
    expect(&env, POLICY_RTO * 2)?;
    ensure!(programs_at(&path, SOCK_OPS)?.len() == 1);
    ensure!(names_in(&env.pin_dir())?.len() == 1);
    Ok(())
}

/// A shell command that mounts a small file system.
fn tmpfs(dir: &Path) -> String {
    format!(
        "mount -t tmpfs -o size=128k,mode=755 none {}",
        dir.display()
    )
}

/// More CIDRs than fit into the free part of the last page of a full file system.
fn many_cidrs() -> Vec<String> {
    let cidrs = (0..500).map(|i| format!("10.3.{}.{}", i / 256, i % 256));
    cidrs.collect()
}

fn fill(file: &Path) -> anyhow::Result<()> {
    let mut size = 0;
    let full = (0..10_000).find(|_| {
        size += 4096;
        fs::write(file, vec![0; size]).is_err()
    });
    full.context("it has no end").map(drop)
}

test!(a_full_disk);
/// A change that cannot be saved is rejected: the kernel and the disk are as before.
fn a_full_disk() -> anyhow::Result<()> {
    let mut env = env()?;
    let (state, saved) = (env.dir().join("state"), env.policies_dir());
    fs::create_dir(&state)?;
    env.start_under(&mounted(&format!("{}; {}", tmpfs(&state), tmpfs(&saved))))?;
    env.cli(&["add", "10.1.0.0/24", "--policy", "near"])?;
    env.cli(&["add", "10.2.0.0/24", "--policy", "near", "--save"])?;
    let list = env.json(&["list"])?;
    for (dir, save) in [(&state, false), (&saved, true)] {
        let dir = seen(&env, dir)?;
        let stuffing = dir.join("stuffing");
        fill(&stuffing)?;
        let names = names_in(&dir)?;
        let texts = || names.iter().map(|name| fs::read(dir.join(name))).collect();
        let before: io::Result<Vec<_>> = texts();
        let before = before?;
        let cidrs = many_cidrs();
        let mut add = vec!["add", "--policy", "near"];
        add.extend(cidrs.iter().map(String::as_str));
        if save {
            add.push("--save");
        }
        let error = env.cli_fails(&add)?;
        ensure!(
            error.contains("No space left on device")
                && (error.contains("nothing was changed") || error.contains("nothing was saved")),
            "{error}"
        );
        ensure!(names_in(&dir)? == names, "{:?}", names_in(&dir)?);
        let after: io::Result<Vec<_>> = texts();
        ensure!(after? == before, "{names:?}");
        let now = env.json(&["list"])?;
        ensure!(now == list, "{now:#}");
        ensure!(env.status()?["healthy"] == true);
        // With free space everything works as before.
        fs::remove_file(&stuffing)?;
        env.cli(&add)?;
        // (The status may be one check old while the engine is busy.)
        env.wait_status("all of them", |status| status["entries"] == 503)?;
        let undo: &[&str] = if save {
            &["remove", "--save"]
        } else {
            &["remove"]
        };
        env.cli_of(undo, &cidrs)?;
        ensure!(env.json(&["list"])?["entries"] == list["entries"]);
    }
    expect(&env, POLICY_RTO)?;
    // A start needs no space.
    env.end(Signal::SIGKILL)?;
    let full = format!(
        "head -c 1M /dev/zero > {}/stuffing || true",
        state.display()
    );
    env.start_under(&mounted(&format!("{}; {full}", tmpfs(&state))))?;
    ensure!(env.status()?["healthy"] == true);
    expect(&env, POLICY_RTO)
}

test!(the_end_of_an_entry_on_a_full_disk);
/// The entry expires in time, which is logged once. The file on the disk does not restore it, and is corrected later.
fn the_end_of_an_entry_on_a_full_disk() -> anyhow::Result<()> {
    let mut env = env()?;
    let state = env.dir().join("state");
    fs::create_dir(&state)?;
    env.start_under(&mounted(&tmpfs(&state)))?;
    env.cli_of(&["add", "--policy", "near"], &many_cidrs())?;
    env.cli(&["add", "10.1.0.0/24", "--policy", "near", "--ttl", "3s"])?;
    let dir = seen(&env, &state)?;
    fill(&dir.join("stuffing"))?;
    env.wait_status("the end", |status| status["entries"] == 501)?;
    let count = |log: &str| log.matches("No space left on device").count();
    env.wait_status("another look", |status| status["healthy"] == true)?;
    // Two checks, five seconds apart, try again and log nothing new.
    thread::sleep(Duration::from_secs(11));
    ensure!(count(&env.log()) == 1, "{}", env.log());
    ensure!(fs::read_to_string(dir.join("manual.json"))?.contains("10.1.0.0/24"));
    fs::remove_file(dir.join("stuffing"))?;
    let saved = || Ok(fs::read_to_string(dir.join("manual.json"))?);
    let is_out = |text: &String| !text.contains("10.1.0.0/24");
    eventually_seen("file without the entry", TIMEOUT, saved, is_out)?;
    ensure!(env.status()?["entries"] == 501);
    Ok(())
}

test!(files_that_cannot_be_written);
/// For example files of an image or a ConfigMap: the daemon works, and nothing can be saved.
fn files_that_cannot_be_written() -> anyhow::Result<()> {
    let mut env = env()?;
    let etc = env.dir().join("etc");
    let (etc, bind) = (etc.display(), "mount -o remount,ro,bind");
    env.start_under(&mounted(&format!("mount --bind {etc} {etc}; {bind} {etc}")))?;
    expect(&env, POLICY_RTO)?;
    env.cli(&["add", "10.1.0.0/24", "--policy", "near"])?;
    env.cli_refuses(
        &["add", "10.2.0.0/24", "--policy", "near", "--save"],
        "Read-only file system",
    )?;
    ensure!(env.status()?["entries"] == 2);
    Ok(())
}

test!(another_state_dir);
/// Another `state_dir` is used after the next start; until then the lock is on the former one.
pub(super) fn another_state_dir() -> anyhow::Result<()> {
    let mut env = env()?;
    env.start()?;
    let before = env.config_text(&near("\"10.88.0.0/24\""));
    let after = before.replace("/state\"", "/state-2\"");
    ensure!(before != after);
    fs::write(env.config(), after)?;
    env.cli_says(&["reload"], "state_dir changed")?;
    env.cli(&["add", "10.1.0.0/24", "--policy", "near"])?;
    // Longer than the interval at which saved state is checked.
    thread::sleep(Duration::from_secs(6));
    ensure!(!env.dir().join("state-2").exists());
    ensure!(!env.log().contains("gone"), "{}", env.log());
    let saved = fs::read_to_string(env.dir().join("state/manual.json"))?;
    ensure!(saved.contains("10.1.0.0/24"), "{saved}");
    Ok(())
}

test!(pins_of_others_and_of_other_layouts);
/// Directories named like ours with other content, older and later layouts, and foreign objects.
fn pins_of_others_and_of_other_layouts() -> anyhow::Result<()> {
    let mut env = env()?;
    env.start()?;
    let ours = names_in(&env.pin_dir())?;
    let own = ours
        .first()
        .filter(|_| ours.len() == 1)
        .context("not one")?;
    let (object, rest) = (own.split('-').nth(1), own.rsplit('-').next());
    let (object, capacity) = (object.context("no object")?, rest.context("no capacity")?);
    env.end(Signal::SIGTERM)?;
    let dir = env.pin_dir();
    let map = |dir: &Path, name: &str| {
        run(&format!(
            "bpftool map create {} type hash key 4 value 4 entries 8 name x flags 1",
            dir.join(name).display()
        ))
    };
    // With this program's exact name, but empty; with maps of another type; of an older layout; of a later layout; half
    // built; moved aside.
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
        // A pin named "link" that is not a link.
        map(&dir.join(&name), "link")?;
    }
    await_programs(&env, 0)?;
    let foreign = Foreign::attach(env.cgroup.path(), 60)?;
    fs::create_dir(dir.join("other"))?;
    map(&dir.join("other"), "theirs")?;
    map(&dir, "l4-0000-16")?;
    env.start()?;
    let status = env.status()?;
    ensure!(
        status["found_at_start"] == "replaced" && status["healthy"] == true,
        "{status:#}"
    );
    expect(&env, POLICY_RTO)?;
    let mut left = names_in(&dir)?;
    left.remove(own);
    // Not ours: a directory with another name, and a map where we have directories.
    let others = BTreeSet::from(["l4-0000-16", "other"].map(str::to_owned));
    ensure!(left == others, "{left:?}");
    ensure!(programs_at(env.cgroup.path(), SOCK_OPS)?.len() == 2);
    env.end(Signal::SIGKILL)?;
    env.cli_says(&["detach"], "left in place, not created by rto-agent")?;
    ensure!(names_in(&dir)? == others);
    ensure!(names_in(&dir.join("other"))?.len() == 1);
    await_programs(&env, 1)?;
    drop(foreign);
    Ok(())
}

/// Waits until this number of programs is attached to the cgroup: the kernel detaches a link some time after its last
/// reference is gone.
fn await_programs(env: &TestEnv, count: usize) -> anyhow::Result<()> {
    let programs = || Ok(programs_at(env.cgroup.path(), SOCK_OPS)?);
    let what = format!("{count} programs");
    eventually_seen(&what, TIMEOUT, programs, |all| all.len() == count).map(drop)
}

test!(two_daemons_and_one_set_of_pins);
/// Two daemons that share only pins: the second is refused, even if the first one had to create their directory.
fn two_daemons_and_one_set_of_pins() -> anyhow::Result<()> {
    let mut env = env()?;
    env.start()?;
    let text = env.config_text(&near("\"192.0.2.0/24\""));
    let text = text
        .replace("/state\"", "/state-2\"")
        .replace("control.sock", "2.sock");
    let second = env.dir().join("etc/second.toml");
    fs::write(&second, text)?;
    let error = env.second_is_refused(&second)?;
    let (pid, pins) = (env.pid()?, env.pin_dir());
    let message = format!("another rto-agent (pid {pid}) holds {}", pins.display());
    ensure!(error.contains(&message), "{error}");
    ensure!(!env.dir().join("2.sock").exists());
    ensure!(env.status()?["healthy"] == true);
    expect(&env, POLICY_RTO)
}

test!(a_file_replaced_a_thousand_times);
/// A thousand new files in ten seconds: the last one is loaded, and the daemon answers requests all the time.
fn a_file_replaced_a_thousand_times() -> anyhow::Result<()> {
    const TIMES: u32 = 1000;
    let span = Duration::from_secs(10);
    let mut env = env()?;
    env.start()?;
    let text = |i: u32| {
        let cidrs: Vec<_> = (0..100)
            .map(|k| format!("\"10.{}.{k}.0/24\"", 100 + (i + k) % 50))
            .collect();
        let ms = 100 + i % 100 * 4;
        let policy = format!(
            "[policy.far]\ninitial_rto = \"{ms}ms\"\ncidrs = [{}]\n",
            cidrs.join(",")
        );
        env.config_text(&format!("{}{policy}", near("\"10.88.0.0/24\"")))
    };
    let place = |i: u32| -> anyhow::Result<()> {
        let new = env.dir().join("etc/.new");
        fs::write(&new, text(i))?;
        Ok(fs::rename(&new, env.config())?)
    };
    // The time that the first changes take.
    for i in 0..20 {
        place(i)?;
        env.cli(&["reload"])?;
    }
    let (descriptors_before, memory_before) = (descriptors(&env)?, memory_kb(&env)?);
    let begin = Instant::now();
    let mut slowest = Duration::ZERO;
    for i in 0..TIMES {
        place(i)?;
        if i % 50 == 0 {
            let asked = Instant::now();
            let status = env.socket_request("GET", "/v1/status", "")?;
            ensure!(status["healthy"] == true, "{status:#}");
            slowest = slowest.max(asked.elapsed());
        }
        if i == TIMES / 2 {
            env.cli(&["add", "10.1.0.0/24", "--policy", "near"])?;
        }
        let due = begin + span * (i + 1) / TIMES;
        thread::sleep(due.saturating_duration_since(Instant::now()));
    }
    // The 1,000th differs from all others.
    fs::write(
        env.dir().join("etc/.new"),
        env.config_text(&near("\"10.88.0.0/24\", \"10.200.0.0/24\"")),
    )?;
    fs::rename(env.dir().join("etc/.new"), env.config())?;
    let took = begin.elapsed();
    let last = Instant::now();
    env.wait_status("the last file", |status| status["entries"] == 3)?;
    let noticed = last.elapsed();
    eprintln!(
        "{TIMES} files in {took:?}; status took {slowest:?} at most; the last was in force after {noticed:?}"
    );
    ensure!(took < span * 2 && slowest < Duration::from_secs(2));
    let list = env.cli(&["list"])?;
    assert_says(&list, &["10.200.0.0/24", "10.1.0.0/24"]);
    expect(&env, POLICY_RTO)?;
    let status = env.status()?;
    ensure!(status["last_reload"]["ok"] == true, "{status:#}");
    let is_few = |now: &usize| *now <= descriptors_before + 2;
    eventually_seen("end of descriptors", TIMEOUT, || descriptors(&env), is_few)?;
    let grown = memory_kb(&env)?.saturating_sub(memory_before);
    ensure!(grown < 16 << 10, "it grew by {grown} kB");
    Ok(())
}
