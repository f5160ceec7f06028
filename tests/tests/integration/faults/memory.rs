//! A memory cgroup with little room: what does not fit is rejected, and the OOM killer never interrupts a change.

use rto_testbed::{cgroup, names};

use super::super::scale;
use crate::prelude::*;

/// Enough for an idle daemon and a small change.
const LITTLE: u64 = 48 << 20;
const ADD: &str = "/v1/entries";
/// CIDRs of a request that needs more memory just to be read: the largest allowed number.
const TOO_LARGE: u32 = 524_288;
/// Entries of a file, or of a request, that need more memory by the daemon's own estimate per entry.
const TOO_MANY: u32 = 400_000;

/// A cgroup of the memory controller, in whichever hierarchy has it; removed when dropped.
struct MemoryCgroup(PathBuf);

impl MemoryCgroup {
    fn with_limit(bytes: u64) -> anyhow::Result<Self> {
        let (hierarchy, limit) = controller()?;
        let group = Self(hierarchy.join(names::unique()));
        fs::create_dir(&group.0)?;
        fs::write(group.0.join(limit), bytes.to_string())?;
        Ok(group)
    }

    /// A command line that starts a program in it.
    fn wrapper(&self) -> Vec<String> {
        let procs = self.0.join("cgroup.procs");
        let script = format!("echo $$ > {} && exec \"$@\"", procs.display());
        ["sh", "-c", &script, "sh"].map(str::to_owned).to_vec()
    }

    /// Number of its processes that the OOM killer has killed.
    fn killed(&self) -> anyhow::Result<u64> {
        let text = ["memory.events", "memory.oom_control"]
            .iter()
            .find_map(|file| fs::read_to_string(self.0.join(file)).ok());
        let text = text.context("neither version's file")?;
        let count = text.lines().find_map(|line| line.strip_prefix("oom_kill "));
        Ok(count.context(text.clone())?.parse()?)
    }
}

impl Drop for MemoryCgroup {
    fn drop(&mut self) {
        let _busy = fs::remove_dir(&self.0);
    }
}

/// The directory for cgroups with a limit, and the name of the limit's file.
fn controller() -> anyhow::Result<(PathBuf, &'static str)> {
    let v1 = Path::new("/sys/fs/cgroup/memory");
    const V1_LIMIT: &str = "memory.limit_in_bytes";
    if v1.join(V1_LIMIT).exists() {
        return Ok((v1.to_owned(), V1_LIMIT));
    }
    let root = cgroup::root()?;
    if !fs::read_to_string(root.join("cgroup.controllers"))?.contains("memory") {
        bail!("no hierarchy has the memory controller");
    }
    // As systemd does; child cgroups without a limit are not affected.
    fs::write(root.join("cgroup.subtree_control"), "+memory")?;
    Ok((root, "memory.max"))
}

fn env() -> anyhow::Result<TestEnv> {
    configured(&near("\"10.88.0.0/24\""))
}

test!(a_start_that_does_not_fit_is_refused);
fn a_start_that_does_not_fit_is_refused() -> anyhow::Result<()> {
    // Declared first, so that it outlives the daemon: a cgroup with processes cannot be removed.
    let group = MemoryCgroup::with_limit(LITTLE)?;
    let mut env = env()?;
    scale::file(&env, TOO_MANY, TOO_MANY)?;
    env.spawn_under(&group.wrapper())?;
    let status = env.ended()?;
    ensure!(status.code() == Some(1), "{status}: {}", env.log());
    let log = env.log();
    for part in [
        "entries of files need about",
        "MemoryMax=",
        "nothing was changed",
    ] {
        ensure!(log.contains(part), "{log}");
    }
    ensure!(group.killed()? == 0);
    ensure!(!env.pin_dir().exists(), "pins are left");
    // A smaller configuration is loaded, beside a daemon without a limit.
    fs::remove_file(env.policies_dir().join("many.toml"))?;
    env.start_under(&group.wrapper())?;
    ensure!(env.status()?["healthy"] == true);
    Ok(())
}

test!(a_change_that_does_not_fit_is_refused);
/// A reload and a request are rejected; the daemon keeps its state.
fn a_change_that_does_not_fit_is_refused() -> anyhow::Result<()> {
    // Declared first, so that it outlives the daemon: a cgroup with processes cannot be removed.
    let group = MemoryCgroup::with_limit(LITTLE)?;
    let mut env = env()?;
    env.start_under(&group.wrapper())?;
    let pid = env.pid()?;
    scale::file(&env, TOO_MANY, TOO_MANY)?;
    env.cli_refuses(&["reload"], "entries of files need about")?;
    fs::remove_file(env.policies_dir().join("many.toml"))?;
    env.cli(&["reload"])?;
    let request = |count| json!({ "cidrs": scale::hosts(count), "policy": "near" }).to_string();
    let connect = || UnixStream::connect(env.socket());
    let refused = |answer: http::Answer, why: &str| {
        let http::Answer { status, body, .. } = answer;
        ensure!(
            status == 422 && body.contains(why),
            "{why}: {status} {body}"
        );
        ensure!(body.contains("of memory, and the memory cgroup"), "{body}");
        Ok(())
    };
    // The body is made before the connection, because a client may be silent for at most 5 s.
    let body = request(TOO_MANY);
    refused(http::request(connect()?, "POST", ADD, &body)?, "")?;
    // Rejected before it is parsed, even if no header states the length.
    let body = request(TOO_LARGE);
    let why = format!("a request of {} bytes need about", body.len());
    refused(http::request(connect()?, "POST", ADD, &body)?, &why)?;
    let mut stream = connect()?;
    http::send_chunked(&mut stream, "POST", ADD, &body, 64 << 10)?;
    refused(http::receive(stream)?, &why)?;
    ensure!(group.killed()? == 0);
    env.status_has(json!({"healthy": true, "entries": 1}))?;
    ensure!(env.pid()? == pid);
    Ok(())
}

test!(leftovers_of_a_killed_start_are_removed);
/// The maps of a killed start take memory that the next start may need.
fn leftovers_of_a_killed_start_are_removed() -> anyhow::Result<()> {
    let mut env = TestEnv::with(&near("\"10.88.0.0/24\""))?;
    let pins = env.pins()?;
    env.end(Signal::SIGKILL)?;
    let unfinished = env.pin_dir().join("staging-1");
    fs::create_dir(&unfinished)?;
    let map = pins.join(maps::STATISTICS);
    let copy = unfinished.join(maps::STATISTICS);
    run(&format!(
        "bpftool map pin pinned {} {}",
        map.display(),
        copy.display()
    ))?;
    env.start()?;
    ensure!(!unfinished.exists(), "{}", env.log());
    ensure!(
        env.pins()? == pins,
        "what is in force was taken for unfinished"
    );
    env.logs("removed unfinished pins")?;
    Ok(())
}
