//! The agent in a container.

use std::{
    os::unix::fs::MetadataExt as _,
    sync::{Mutex, PoisonError},
};

use rto_testbed::cgroup::{self, Cgroup};

use super::doctor::finding;
use crate::prelude::*;

/// No other test has connections to this network: the agent of this test covers the whole host.
const NETWORK: &str = "198.51.100.0/24";
const SERVER: &str = "198.51.100.2";

/// Held by tests that attach to the root of the hierarchy, and by tests that count the programs above a cgroup.
pub(crate) static HIERARCHY_ROOT: Mutex<()> = Mutex::new(());

/// An agent with `cgroup = "auto"`, whose entries no other test uses.
fn env() -> anyhow::Result<TestEnv> {
    let env = TestEnv::new()?;
    env.net.black_hole(PORT)?;
    let (client, server) = (&env.net.client, &env.net.server);
    run(&format!(
        "ip -n {client} addr add 198.51.100.1/24 dev veth-c"
    ))?;
    run(&format!("ip -n {server} addr add {SERVER}/24 dev veth-s"))?;
    let text = env.config_text(&near(&format!("{NETWORK:?}")));
    let own = env.cgroup.path().display().to_string();
    fs::write(env.config(), text.replace(&own, "auto"))?;
    Ok(env)
}

/// A command line that runs a program in a cgroup and mount namespace whose root is `own`, after these shell commands.
fn contained(own: &Cgroup, commands: &str) -> anyhow::Result<Vec<String>> {
    let root = cgroup::root()?;
    let (own, root) = (own.path().display(), root.display());
    // A cgroup2 mount made inside the namespace shows only the namespace's part, which is what a container runtime
    // does. (The kernel refuses to mount the same file system twice at the same place: do_add_mount(), Linux 6.12.)
    let inner = format!(
        "set -e; {commands}; mount -t tmpfs none /mnt; mkdir /mnt/own; mount -t cgroup2 none /mnt/own; \
         mount --bind /mnt/own {root}; umount /mnt/own; exec \"$@\""
    );
    let outer = "echo $$ > \"$1/cgroup.procs\"; inner=$2; shift 2; \
                 exec unshare --cgroup --mount sh -c \"$inner\" sh \"$@\"";
    let words = ["sh", "-c", outer, "sh", &own.to_string(), &inner];
    Ok(words.map(str::to_owned).to_vec())
}

/// The finding of `doctor` about the cgroup, in the container.
fn cgroup_finding(env: &TestEnv, wrapper: &[String]) -> anyhow::Result<Value> {
    let mut command = Command::new(&wrapper[0]);
    command.args(&wrapper[1..]).arg(find(None)?);
    command
        .args(["doctor", "--json", "--config"])
        .arg(env.config());
    let report = serde_json::from_slice(&command.output()?.stdout)?;
    Ok(finding(&report, "cgroup"))
}

fn expect(env: &TestEnv, timer: Duration) -> anyhow::Result<()> {
    env.assert_syn_gap(to(SERVER, PORT), timer)
}

test!(a_container_is_not_taken_for_the_host);
fn a_container_is_not_taken_for_the_host() -> anyhow::Result<()> {
    let own = Cgroup::new()?;
    let mut env = env()?;
    let wrapper = contained(&own, "true")?;
    env.spawn_under(&wrapper)?;
    let status = env.ended()?;
    let logged = env.log();
    ensure!(status.code() == Some(1), "{status}: {logged}");
    assert_says(
        &logged,
        &["is not the root of the cgroup2 hierarchy", "/host/cgroup"],
    );
    ensure!(programs_at(own.path(), SOCK_OPS)?.is_empty());
    let finding = cgroup_finding(&env, &wrapper)?;
    let found = finding["found"].as_str().unwrap_or_default();
    ensure!(
        finding["severity"] == "problem" && found.contains("/host/cgroup"),
        "{finding:#}"
    );
    Ok(())
}

test!(a_container_finds_the_hosts_hierarchy);
/// The host's hierarchy is mounted at another path; a connection of a process outside of the container is covered.
fn a_container_finds_the_hosts_hierarchy() -> anyhow::Result<()> {
    let own = Cgroup::new()?;
    let mut env = env()?;
    expect(&env, KERNEL_RTO)?;
    let host = env.dir().join("host-cgroup");
    fs::create_dir(&host)?;
    let root = cgroup::root()?;
    let bind = format!("mount --bind {} {}", root.display(), host.display());
    let wrapper = contained(&own, &bind)?;

    let _alone = HIERARCHY_ROOT
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    env.start_under(&wrapper)?;
    let status = env.status()?;
    let attachment = &status["attachment"];
    ensure!(
        attachment["attached"] == true
            && attachment["is_root"] == true
            && attachment["cgroup"].as_str().map(Path::new) == Some(&host),
        "{status:#}"
    );
    let unasked = |feature: &&Value| feature["presence"] == "unknown";
    let features = status["features"].as_array().cloned().unwrap_or_default();
    ensure!(!features.iter().any(|f| unasked(&f)), "{features:#?}");
    let program = attachment["program_id"].as_u64().unwrap_or_default();
    ensure!(programs_at(&root, SOCK_OPS)?.contains(&u32::try_from(program)?));
    expect(&env, POLICY_RTO)?;
    let finding = cgroup_finding(&env, &wrapper)?;
    let found = finding["found"].as_str().unwrap_or_default();
    ensure!(
        finding["severity"] == "ok" && found.contains("all sockets of the host"),
        "{finding:#}"
    );
    env.end(Signal::SIGTERM)?;
    expect(&env, KERNEL_RTO)
}

/// A command line that runs a program in an otherwise empty image, as FROM scratch: with the binary, its shared
/// libraries if any, /dev/null, /proc, /sys and one directory of the host.
fn alone_in_its_image(shared: &Path) -> Vec<String> {
    // ldd(1) prints nothing for a static program.
    let inner = format!(
        "set -e; mount -t tmpfs none /mnt; cd /mnt; cp \"$0\" rto-agent; \
         for lib in $(ldd \"$0\" 2>/dev/null | grep -o '/[^ ]*'); do cp -L --parents \"$lib\" .; done; \
         mkdir -p dev proc sys .{shared}; touch dev/null; mount --bind /dev/null dev/null; \
         mount -t proc none proc; mount --rbind /sys sys; \
         mount --bind {shared} .{shared}; test ! -e etc; exec chroot . /rto-agent \"$@\"",
        shared = shared.display()
    );
    let words = ["unshare", "--mount", "sh", "-c", &inner];
    words.map(str::to_owned).to_vec()
}

test!(an_image_of_the_binary_alone, needs = [LDD]);
/// Groups are numeric there, and "root" is a known name. `RTO_AGENT_BIN` can name the binary of a release.
fn an_image_of_the_binary_alone() -> anyhow::Result<()> {
    const GROUP: u32 = 54_321;
    let mut env = TestEnv::new()?;
    env.net.black_hole(PORT)?;
    let policy = near("\"10.88.0.0/24\"");
    let wrapper = alone_in_its_image(env.dir());
    for (setting, gid) in [("", 0), ("group = \"54321\"\n", GROUP)] {
        env.configure(&format!("{setting}{policy}"))?;
        env.start_under(&wrapper)?;
        let socket = fs::metadata(env.socket())?;
        ensure!(socket.gid() == gid, "{}", socket.gid());
        let status = env.wait_status("the probe", |status| status["probe"].is_object())?;
        ensure!(status["healthy"] == true, "{status:#}");
        ensure!(
            !env.log().contains("cannot start the probe"),
            "{}",
            env.log()
        );
        env.assert_syn_gap(to(SERVER_V4, PORT), POLICY_RTO)?;
        env.end(Signal::SIGTERM)?;
        env.assert_syn_gap(to(SERVER_V4, PORT), KERNEL_RTO)?;
    }
    env.configure(&format!("group = \"netops\"\n{policy}"))?;
    env.spawn_under(&wrapper)?;
    ensure!(env.ended()?.code() == Some(1));
    let log = env.log();
    ensure!(log.contains("or give the number of a group"), "{log}");
    Ok(())
}

test!(a_daemon_of_another_pid_namespace_is_named_as_such);
fn a_daemon_of_another_pid_namespace_is_named_as_such() -> anyhow::Result<()> {
    let env = TestEnv::with(&near("\"10.88.0.0/24\""))?;
    let mut second = Command::new("unshare");
    second.args(["--pid", "--fork", "--kill-child", "--mount-proc"]);
    second
        .arg(find(None)?)
        .args(["run", "--config"])
        .arg(env.config());
    let error = refusal(&second.output()?)?;
    ensure!(error.contains("another rto-agent holds"), "{error}");
    Ok(())
}
