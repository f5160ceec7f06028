//! Tens of thousands of entries: batches, growth, and answers during changes. (A million: `cargo xtask bench scale`.)

use std::{
    fmt::Write as _,
    os::fd::AsFd as _,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
};

use nix::time::clock_getcpuclockid;
use rto_agent_kernel::kernel::lpm_batch::{LpmKey, Trie, is_unsupported};
use rto_testbed::trie::{Tries, VALUE_SIZE};
use rto_tests::{features, pinned::map};

use super::faults::peak_memory_kb;
use crate::prelude::*;

const MANY: u32 = 50_000;

/// Writes `count` prefixes of the policy "near" to a file of policies.d; those after the first `same` are new each
/// time.
pub(super) fn file(env: &TestEnv, count: u32, same: u32) -> anyhow::Result<()> {
    let mut text = "[policy.near]\ncidrs = [\n".to_owned();
    for i in 0..count {
        writeln!(text, "\"{}\",", prefix(i, i < same))?;
    }
    text.push_str("]\n");
    let temporary = env.dir().join("new.toml");
    fs::write(&temporary, text)?;
    Ok(fs::rename(temporary, env.policies_dir().join("many.toml"))?)
}

/// Writes `count` prefixes of the policy "near" to a list that a file of policies.d names.
pub(super) fn list(env: &TestEnv, count: u32) -> anyhow::Result<()> {
    let mut text = String::new();
    for i in 0..count {
        writeln!(text, "{}", prefix(i, true))?;
    }
    fs::write(env.policies_dir().join("many.txt"), text)?;
    let policy = "[policy.near]\ncidrs_file = \"many.txt\"\n";
    Ok(fs::write(env.policies_dir().join("many.toml"), policy)?)
}

/// A prefix of either address family.
fn prefix(i: u32, is_same: bool) -> String {
    let (high, low) = (i >> 8, i & 0xff);
    match (i.is_multiple_of(2), is_same) {
        (true, true) => format!("11.{}.{}.{low}/32", high >> 8, high & 0xff),
        (true, false) => format!("12.{}.{}.{low}/32", high >> 8, high & 0xff),
        (false, true) => format!("2001:db8:{high:x}:{low:x}::/64"),
        (false, false) => format!("2001:db9:{high:x}:{low:x}::/64"),
    }
}

/// `count` other prefixes, for a request.
pub(super) fn hosts(count: u32) -> Vec<String> {
    let host = |i: u32| format!("11.{}.{}.{}/32", i >> 16, i >> 8 & 0xff, i & 0xff);
    (0..count).map(host).collect()
}

fn env(settings: &str) -> anyhow::Result<TestEnv> {
    let env = TestEnv::new()?;
    env.net.black_hole(PORT)?;
    env.configure(&format!("{settings}{}", near("\"10.88.0.0/24\"")))?;
    Ok(env)
}

/// The numbers of entries that the last start added, changed and removed.
fn reconciled(env: &TestEnv) -> anyhow::Result<String> {
    let log = env.log();
    let line = log.lines().rfind(|line| line.contains("action=\"start\""));
    let line = line.with_context(|| log.clone())?;
    let words = line.split_whitespace();
    let numbers = words.filter(|word| {
        ["added=", "changed=", "removed="]
            .iter()
            .any(|name| word.starts_with(name))
    });
    Ok(numbers.collect::<Vec<_>>().join(" "))
}

/// Asserts that one reload made this change, and no other changed anything. The daemon may have noticed the file before
/// or after the request: its log has the change once in any case, and perhaps a reload that changed nothing.
fn assert_reloaded(env: &TestEnv, expected: &str) {
    let log = env.log();
    let reloads = log
        .lines()
        .filter(|line| line.contains("action=\"reload\""));
    let changes: Vec<&str> = reloads
        .filter(|line| line.contains("added=") && !line.contains("added=0 changed=0 removed=0"))
        .collect();
    assert_eq!(changes.len(), 1, "{log}");
    assert!(changes[0].contains(expected), "{}", changes[0]);
}

fn expect_many(env: &TestEnv, count: u32) -> anyhow::Result<()> {
    env.status_has(json!({"entries": count + 1, "healthy": true}))?;
    let list = env.json(&["list"])?;
    let entries = list["entries"].as_array().context("no entries")?;
    assert_eq!(entries.len(), count as usize + 1);
    assert_eq!(entries[0]["cidr"], "10.88.0.0/24");
    for (address, cidr) in [
        ("11.0.1.2", "11.0.1.2/32"),
        ("2001:db8:1:3::7", "2001:db8:1:3::/64"),
        ("10.88.0.2", "10.88.0.0/24"),
    ] {
        let lookup = env.json(&["lookup", address])?;
        assert_eq!(lookup["entry"]["cidr"], cidr, "{lookup:#}");
    }
    let lookup = env.json(&["lookup", "11.0.1.3"])?;
    assert_eq!(lookup["entry"], Value::Null, "{lookup:#}");
    let text = env.cli(&["list"])?;
    assert_eq!(text.lines().count(), count as usize + 2);
    Ok(())
}

/// A daemon that finds the entries of another one compares all of them.
fn filled(wrapper: &[&str]) -> anyhow::Result<()> {
    let mut env = env("max_entries = 60000\n")?;
    file(&env, MANY, MANY)?;
    let wrapper: Vec<String> = wrapper.iter().map(ToString::to_string).collect();
    env.start_under(&wrapper)?;
    assert_eq!(reconciled(&env)?, "added=50001 changed=0 removed=0");
    expect_many(&env, MANY)?;
    env.assert_syn_gap(to(SERVER_V4, PORT), POLICY_RTO)?;
    file(&env, MANY, MANY - 10_000)?;
    env.json(&["reload"])?;
    assert_reloaded(&env, "added=10000 changed=0 removed=10000");
    env.restart(Signal::SIGKILL)?;
    assert_eq!(env.status()?["found_at_start"], "adopted");
    assert_eq!(reconciled(&env)?, "added=0 changed=0 removed=0");
    let one_by_one = env.log().contains("entries are written one by one");
    assert_eq!(one_by_one, !has_batches()?, "{}", env.log());
    env.cli(&["detach"])?;
    env.assert_syn_gap(to(SERVER_V4, PORT), KERNEL_RTO)
}

test!(many_by_batches);
fn many_by_batches() -> anyhow::Result<()> {
    filled(&[])
}

/// The first version whose LPM tries support batches.
const BATCHES: (u32, u32) = (5, 13);

/// Entries of a private trie.
const COUNT: u8 = 100;

fn key(i: u8) -> LpmKey<4> {
    LpmKey {
        length: 32,
        data: [10, 0, 0, i],
    }
}

/// A view of the trie, which `tries` must outlive.
fn trie(tries: &Tries) -> Trie<'_, 4, u64> {
    assert_eq!(size_of::<u64>(), VALUE_SIZE as usize);
    // SAFETY: keys of eight bytes, values of VALUE_SIZE.
    unsafe { Trie::new(tries.v4()) }
}

/// The results of the three batch commands.
fn tried(trie: &Trie<'_, 4, u64>) -> [io::Result<()>; 3] {
    let (mut read, mut read_values) = (vec![key(0); 60], vec![0; 60]);
    [
        trie.update_batch(&[key(1)], &[1]),
        trie.lookup_batch(None, &mut read, &mut read_values)
            .map(drop),
        trie.delete_batch(&[key(1)]),
    ]
}

/// Whether LPM tries support batches: since Linux 5.13, and earlier on kernels with a backport, which Debian's do not
/// have.
pub(super) fn has_batches() -> anyhow::Result<bool> {
    if features::version()? >= BATCHES {
        return Ok(true);
    }
    let tries = Tries::new(COUNT.into())?;
    Ok(tried(&trie(&tries)).iter().any(Result::is_ok))
}

/// Asserts that all three commands are refused as unknown, which holds for Debian's kernels.
pub(super) fn assert_no_batches() -> anyhow::Result<()> {
    let tries = Tries::new(COUNT.into())?;
    for refused in tried(&trie(&tries)) {
        let error = refused.err().context("it is not refused")?;
        anyhow::ensure!(is_unsupported(&error), "{error}");
    }
    Ok(())
}

test!(batch_support_is_detected, needs = [LPM_BATCHES]);
/// Each of the three commands, through the agent's own functions, on a private trie.
fn batch_support_is_detected() -> anyhow::Result<()> {
    let tries = Tries::new(COUNT.into())?;
    let trie = trie(&tries);
    let keys: Vec<LpmKey<4>> = (0..COUNT).map(key).collect();
    let values: Vec<u64> = (0..COUNT).map(u64::from).collect();
    // More than half of the entries, so that reading needs two batches.
    let (mut read, mut read_values) = (vec![key(0); 60], vec![0; 60]);
    trie.update_batch(&keys, &values)?;
    assert_eq!(trie.lookup(&key(7))?, Some(7));
    let mut found = Vec::new();
    let mut cursor = None;
    loop {
        let (count, next) = trie.lookup_batch(cursor, &mut read, &mut read_values)?;
        found.extend(
            read.iter()
                .zip(&read_values)
                .take(count)
                .map(|(k, v)| (k.data[3], *v)),
        );
        cursor = next;
        if cursor.is_none() {
            break;
        }
    }
    found.sort_unstable();
    let all: Vec<(u8, u64)> = (0..COUNT).map(|i| (i, i.into())).collect();
    assert_eq!(found, all);
    trie.delete_batch(&keys)?;
    assert_eq!(trie.next_key(None)?, None);
    // An invalid request is not mistaken for a missing feature.
    let stderr = io::stderr();
    // SAFETY: nothing is read or written, as the kernel refuses a file that is not a map.
    let none: Trie<'_, 4, u64> = unsafe { Trie::new(stderr.as_fd()) };
    let error = none.delete_batch(&keys).err().context("it is no map")?;
    assert!(!is_unsupported(&error), "{error}");
    Ok(())
}

test!(many_one_by_one, entries_without_batches);
/// As on kernels whose LPM tries do not support batches (before 5.13).
fn entries_without_batches() -> anyhow::Result<()> {
    filled(&["env", "RTO_AGENT_BATCH=off"])
}

test!(a_reload_writes_what_changed, reload);
fn reload() -> anyhow::Result<()> {
    let mut env = env("max_entries = 60000\n")?;
    file(&env, MANY, MANY)?;
    env.start()?;
    let before = env.status()?["attachment"]["program_id"].clone();
    // One in a hundred.
    file(&env, MANY, MANY - MANY / 100)?;
    env.json(&["reload"])?;
    assert_reloaded(&env, "added=500 changed=0 removed=500");
    expect_many(&env, MANY)?;
    let after = env.status()?["attachment"]["program_id"].clone();
    assert_eq!(before, after);
    Ok(())
}

test!(daemon_answers_while_loading, answers);
fn answers() -> anyhow::Result<()> {
    let many = scaled("entries", 6 * MANY, MANY);
    let mut env = env("max_entries = 300001\n")?;
    file(&env, many, many)?;
    let socket = env.socket();
    let ready = AtomicBool::new(false);
    let begin = Instant::now();
    let ask = || {
        let mut answers = Vec::new();
        while !ready.load(Ordering::Relaxed) {
            let begin = Instant::now();
            if let Ok(stream) = UnixStream::connect(&socket) {
                let answer = http::request(stream, "GET", "/v1/status", "")?;
                let took = begin.elapsed();
                answers.push((took, serde_json::from_str::<Value>(&answer.body)?));
            }
            thread::sleep(Duration::from_millis(5));
        }
        Ok(answers)
    };
    let (answers, ()) = rto_tests::beside(ask, || {
        let started = env.start();
        ready.store(true, Ordering::Relaxed);
        started
    })?;
    // Before it was ready it reported that.
    let (_, first) = answers.first().context("no answer")?;
    assert_eq!(first["healthy"], false, "{first:#}");
    assert_eq!(first["problems"][0], "starting", "{first:#}");
    // An answer that waited until everything was loaded would have taken most of that time.
    let loaded = begin.elapsed();
    let slowest = answers.iter().map(|(took, _)| *took).max();
    assert!(slowest < Some(loaded / 2), "{slowest:?} of {loaded:?}");
    Ok(())
}

test!(fifty_lists_at_once);
/// The lists use as much memory as two of them.
fn fifty_lists_at_once() -> anyhow::Result<()> {
    const LISTED: u32 = 20_000;
    // All texts together are 160 MB. Measured: 1.5 to 2.3 MB, and 5 MB if all are sent at the same time.
    const MOST_KB: u64 = 8 << 10;
    let mut env = env("max_entries = 60000\n")?;
    file(&env, LISTED, LISTED)?;
    env.start()?;
    let begin = || -> anyhow::Result<UnixStream> {
        let stream = UnixStream::connect(env.socket())?;
        http::send(&stream, "GET", "/v1/entries", "")?;
        Ok(stream)
    };
    let ensure_all = |stream: UnixStream| -> anyhow::Result<()> {
        let answer = http::receive(stream)?;
        assert_eq!(answer.status, 200, "{}", answer.head);
        let listed = answer.body.matches("\"cidr\"").count();
        anyhow::ensure!(listed == LISTED as usize + 1, "{listed} entries");
        Ok(())
    };
    // Resets the peak of the start (proc_pid_clear_refs(5)).
    fs::write(format!("/proc/{}/clear_refs", env.pid()?), "5")?;
    ensure_all(begin()?)?;
    let before = peak_memory_kb(&env)?;
    // All lists are requested before any is read.
    let begun: anyhow::Result<Vec<_>> = (0..50).map(|_| begin()).collect();
    thread::scope(|scope| {
        let lists = begun?.into_iter();
        let reading: Vec<_> = lists.map(|list| scope.spawn(|| ensure_all(list))).collect();
        let mut read = reading.into_iter().map(thread::ScopedJoinHandle::join);
        read.try_for_each(|read| read.map_err(|_| anyhow::anyhow!("who reads died"))?)
    })?;
    let more = peak_memory_kb(&env)? - before;
    assert!(more < MOST_KB, "{more} kB more");
    Ok(())
}

test!(unread_list_is_given_up);
/// Lists that are not read delay no other client: another list arrives although none of the four has been read.
fn unread_list_is_given_up() -> anyhow::Result<()> {
    let mut env = env("max_entries = 60000\n")?;
    file(&env, MANY, MANY)?;
    env.start()?;
    let mut unread = Vec::new();
    for _ in 0..4 {
        let mut stream = UnixStream::connect(env.socket())?;
        stream.write_all(b"GET /v1/entries HTTP/1.1\r\nhost: x\r\n\r\n")?;
        unread.push(stream);
    }
    // Wait until they have begun.
    thread::sleep(Duration::from_millis(500));
    let list = env.json(&["list"])?;
    let entries = list["entries"].as_array().map(Vec::len);
    assert_eq!(entries, Some(MANY as usize + 1));
    // A partial list is recognisable: the last chunk is missing.
    for mut stream in unread.into_iter().take(2) {
        let mut text = Vec::new();
        let _cut = stream.read_to_end(&mut text);
        assert!(!text.ends_with(b"0\r\n\r\n"));
    }
    Ok(())
}

/// The ids of the tries, and of two maps that are not replaced.
fn ids(env: &TestEnv) -> anyhow::Result<[u32; 3]> {
    Ok([
        map(env, maps::ENTRIES_V4)?.id,
        map(env, maps::STATISTICS)?.id,
        map(env, maps::SOCKETS)?.id,
    ])
}

fn hits(env: &TestEnv) -> anyhow::Result<u64> {
    let lookup = env.json(&["lookup", SERVER_V4])?;
    assert_eq!(lookup["entry"]["cidr"], "10.88.0.0/24", "{lookup:#}");
    lookup["entry"]["hits"].as_u64().context("no hits")
}

test!(add_grows_the_maps);
/// The tries are replaced by larger ones, and everything else stays: counters, policies, hits of entries.
fn add_grows_the_maps() -> anyhow::Result<()> {
    let mut env = env("max_entries = 2\n")?;
    env.start()?;
    let address = to(SERVER_V4, PORT);
    env.assert_syn_gap(address, POLICY_RTO)?;
    let (before, decided) = (ids(&env)?, hits(&env)?);
    assert!(decided > 0);
    env.cli(&["add", "10.1.0.0/16", "10.2.0.0/16", "--policy", "near"])?;
    let after = ids(&env)?;
    assert_ne!(before[0], after[0]);
    assert_eq!(before[1..], after[1..]);
    assert_eq!(hits(&env)?, decided);
    env.status_has(json!({"max_entries": 4, "entries": 3, "healthy": true}))?;
    assert!(env.counted("near")?["active"]["attempts"].as_u64() >= Some(1));
    env.assert_syn_gap(address, POLICY_RTO)?;
    // There is room for one more.
    env.cli(&["add", "10.3.0.0/16", "--policy", "near"])?;
    assert_eq!(ids(&env)?, after);
    // A later daemon needs the same room, and finds it.
    env.restart(Signal::SIGKILL)?;
    assert_eq!(ids(&env)?, after);
    assert_eq!(env.status()?["found_at_start"], "adopted");
    Ok(())
}

test!(restart_keeps_size_of_grown_maps);
/// The maps keep their size even if they have room for more than the entries. New tries keep the hits of the former
/// ones.
fn restart_keeps_size_of_grown_maps() -> anyhow::Result<()> {
    let mut env = env("max_entries = 2\n")?;
    env.start()?;
    let address = to(SERVER_V4, PORT);
    env.assert_syn_gap(address, POLICY_RTO)?;
    env.cli(&["add", "10.1.0.0/16", "10.2.0.0/16", "--policy", "near"])?;
    env.cli(&["remove", "10.1.0.0/16", "10.2.0.0/16"])?;
    let (before, decided) = (ids(&env)?, hits(&env)?);
    assert!(decided > 0);
    env.restart(Signal::SIGKILL)?;
    env.status_has(json!({"found_at_start": "adopted", "max_entries": 4}))?;
    assert_eq!(ids(&env)?, before);
    assert_eq!(hits(&env)?, decided);
    env.end(Signal::SIGKILL)?;
    env.configure(&format!("max_entries = 100\n{}", near("\"10.88.0.0/24\"")))?;
    env.start()?;
    env.status_has(json!({"found_at_start": "maps-kept", "max_entries": 100}))?;
    let after = ids(&env)?;
    assert_ne!(after[0], before[0]);
    assert_eq!(after[1..], before[1..]);
    assert_eq!(hits(&env)?, decided);
    // An entry that is removed and added again starts at 0.
    let rest = "\"10.1.0.0/16\"";
    env.load(&format!("max_entries = 100\n{}", near(rest)))?;
    env.load(&format!("max_entries = 100\n{}", near("\"10.88.0.0/24\"")))?;
    assert_eq!(hits(&env)?, 0);
    Ok(())
}

test!(start_replaces_full_table_of_killed_daemon);
/// As after a kill in the middle of a replacement: the new entries do not fit beside the old ones.
fn start_replaces_full_table_of_killed_daemon() -> anyhow::Result<()> {
    let list = |second: u8| {
        let cidrs = (0..7).map(|i| format!("\"10.{second}.{i}.0/24\", "));
        format!(
            "max_entries = 8\n{}",
            near(&format!("{}\"10.88.0.0/24\"", cidrs.collect::<String>()))
        )
    };
    let mut env = silent(&list(1))?;
    let address = to(SERVER_V4, PORT);
    env.assert_syn_gap(address, POLICY_RTO)?;
    let (before, decided) = (ids(&env)?, hits(&env)?);
    env.end(Signal::SIGKILL)?;
    let id = &before[0];
    for i in 0..7 {
        // Only their presence matters, not their policy's slot.
        let key = format!("24 0 0 0 10 2 {i} 0");
        run(&format!(
            "bpftool map update id {id} key {key} value 1 0 0 0 0 0 0 0"
        ))?;
    }
    env.configure(&list(3))?;
    env.start()?;
    env.status_has(json!({"healthy": true, "entries": 8, "max_entries": 8}))?;
    let after = ids(&env)?;
    assert_ne!(after[0], before[0]);
    assert_eq!(after[1..], before[1..]);
    assert_eq!(hits(&env)?, decided);
    env.assert_syn_gap(address, POLICY_RTO)?;
    // After that everything works as usual.
    env.load(&list(4))?;
    assert_eq!(ids(&env)?, after);
    Ok(())
}

test!(reload_grows_the_maps);
fn reload_grows_the_maps() -> anyhow::Result<()> {
    let mut env = env("max_entries = 100\n")?;
    file(&env, 50, 50)?;
    env.start()?;
    let room = |env: &TestEnv| anyhow::Ok(env.status()?["max_entries"].clone());
    assert_eq!(room(&env)?, 100);
    // Because of the number of entries.
    file(&env, MANY, MANY)?;
    env.cli(&["reload"])?;
    expect_many(&env, MANY)?;
    assert_eq!(room(&env)?, 65_536);
    // Because of the configuration.
    env.configure(&format!(
        "max_entries = 70000\n{}",
        near("\"10.88.0.0/24\"")
    ))?;
    let reload = env.json(&["reload"])?;
    assert_eq!(reload["notes"], Value::Array(Vec::new()), "{reload:#}");
    assert_eq!(room(&env)?, 70_000);
    expect_many(&env, MANY)?;
    env.assert_syn_gap(to(SERVER_V4, PORT), POLICY_RTO)
}

test!(policies_stay_active_while_maps_grow);
fn policies_stay_active_while_maps_grow() -> anyhow::Result<()> {
    let mut env = env("max_entries = 2\n")?;
    env.start()?;
    // From 2 to 512 and more: ten times new maps and a new program.
    let adds = (1..600u32).step_by(60).map(|begin| {
        let cidrs: Vec<String> = (begin..begin + 60)
            .map(|i| format!("10.{}.{}.0/24", 100 + i / 256, i % 256))
            .collect();
        let mut args = vec!["add", "--policy", "near"];
        args.extend(cidrs.iter().map(String::as_str));
        env.command(&args)
    });
    let adds: Vec<Command> = adds.collect();
    let done = AtomicBool::new(false);
    let measured = AtomicUsize::new(0);
    let grow = || {
        // Each change is made while a connection that began after the previous change is measured.
        let grown = adds.into_iter().enumerate().try_for_each(|(n, mut add)| {
            eventually("a measured connection", TIMEOUT, || {
                Ok((measured.load(Ordering::Relaxed) >= n).then_some(()))
            })?;
            let output = add.output()?;
            ensure!(output.status.success(), "{output:?}");
            Ok(())
        });
        done.store(true, Ordering::Relaxed);
        grown
    };
    rto_tests::beside(grow, || {
        while !done.load(Ordering::Relaxed) {
            let gap = env.syn_gaps(to(SERVER_V4, PORT), 1)?[0];
            // Only whether it has the policy, not how exact the timer is.
            assert!(gap > POLICY_RTO / 2 && gap < KERNEL_RTO / 2, "{gap:?}");
            measured.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    })?;
    env.status_has(json!({"entries": 601, "max_entries": 1024}))?;
    Ok(())
}

test!(large_requests_take_time_in_proportion);
/// A regression test: four times as many entries once took 16 times as long to add and remove at run time, and in a
/// file. CPU time of the daemon is measured, which other programs do not prolong.
fn large_requests_take_time_in_proportion() -> anyhow::Result<()> {
    const FEW: u32 = 4_000;
    /// Largest ratio of the time for four times as many entries to the time for the few.
    const MOST: u32 = 8;
    const TRIES: usize = 5;
    let env = TestEnv::with(&near("\"10.88.0.0/24\""))?;
    let timed = |count: u32, path: &str, save: bool| -> anyhow::Result<Duration> {
        let cidrs = (0..count).map(|i| format!("11.{}.{}.0/24", i >> 8, i & 0xff));
        let cidrs: Vec<String> = cidrs.collect();
        let mut body = serde_json::json!({ "cidrs": cidrs, "save": save });
        if path == "/v1/entries" {
            body["policy"] = "near".into();
        }
        let clock = clock_getcpuclockid(env.pid()?)?;
        let begin = Duration::from(clock.now()?);
        env.socket_request("POST", path, &body.to_string())?;
        Ok(Duration::from(clock.now()?) - begin)
    };
    for save in [false, true] {
        let mut ratios = Vec::new();
        let mut shortest = [[Duration::MAX; 2]; 2];
        for _ in 0..TRIES {
            for (shortest, count) in shortest.iter_mut().zip([FEW, 4 * FEW]) {
                for (shortest, path) in shortest.iter_mut().zip(["", "/remove"]) {
                    let took = timed(count, &format!("/v1/entries{path}"), save)?;
                    *shortest = took.min(*shortest);
                }
            }
        }
        let [few, many] = shortest;
        for (few, many) in few.into_iter().zip(many) {
            ratios.push(many.div_duration_f64(few));
            assert!(many < few * MOST, "save: {save}; {few:?}, {many:?}");
        }
        eprintln!(
            "save: {save}; add and remove of four times as many take {ratios:.1?} times as long"
        );
    }
    Ok(())
}
