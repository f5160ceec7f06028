//! Changes take effect with the next connection and do not affect connections under way.

use std::os::unix::fs::symlink;

use rto_tests::features::syn_timers;

use crate::prelude::*;

const FAST: Duration = Duration::from_millis(52);

fn fast(cidrs: &str) -> String {
    format!("[policy.fast]\ninitial_rto = \"52ms\"\ncidrs = [{cidrs}]\n")
}

test!(add_and_remove);
fn add_and_remove() -> anyhow::Result<()> {
    let env = silent(&near("\"192.0.2.0/24\""))?;
    expect(&env, KERNEL_RTO)?;
    env.cli(&["add", "10.88.0.0/24", "--policy", "near"])?;
    expect(&env, POLICY_RTO)?;
    env.cli(&["add", "10.88.0.2", "--initial-rto", "50ms"])?;
    expect(&env, FAST)?;
    env.cli(&["remove", "10.88.0.2"])?;
    expect(&env, POLICY_RTO)?;
    env.cli(&["remove", "10.88.0.0/24"])?;
    expect(&env, KERNEL_RTO)
}

test!(reload);
fn reload() -> anyhow::Result<()> {
    let env = silent(&near("\"10.88.0.0/24\""))?;
    expect(&env, POLICY_RTO)?;
    env.configure(&fast("\"10.88.0.0/24\""))?;
    // The daemon may already have noticed the change; after the answer it is active in any case.
    env.cli(&["reload"])?;
    expect(&env, FAST)
}

test!(sighup);
fn sighup() -> anyhow::Result<()> {
    let mut env = silent(&near("\"10.88.0.0/24\""))?;
    env.configure(&fast("\"10.88.0.0/24\""))?;
    env.signal(Signal::SIGHUP)?;
    env.notified("RELOADING=1")?;
    env.notified("READY=1")?;
    expect(&env, FAST)
}

test!(a_connection_keeps_its_policy);
/// The entry is removed while SYNs are being retransmitted: the interval stays, and so does the deadline.
fn a_connection_keeps_its_policy() -> anyhow::Result<()> {
    let env = silent(&near("\"192.0.2.0/24\""))?;
    let address = to(SERVER_V4, PORT);
    let timers = syn_timers(POLICY_RTO, 3)?;
    assert_gaps(&timers, || {
        env.cli(&["add", "10.88.0.0/24", "--policy", "near"])?;
        let capture = Capture::start(&env.net.client, CLIENT_LINK)?;
        let _traffic = env.connect(address)?;
        capture.wait_for(TIMEOUT, |all| syns(all, address).len() >= 2)?;
        env.cli(&["remove", "10.88.0.0/24"])?;
        let all = capture.wait_for(TIMEOUT, |all| syns(all, address).len() >= 4)?;
        Ok(gaps(&syns(&all, address)[..4]))
    })?;
    // A new connection does not have the policy any more.
    expect(&env, KERNEL_RTO)
}

test!(ttl);
fn ttl() -> anyhow::Result<()> {
    let env = silent(&near("\"192.0.2.0/24\""))?;
    let add = |ttl| env.cli(&["add", "10.88.0.0/24", "--policy", "near", "--ttl", ttl]);
    add("1h")?;
    expect(&env, POLICY_RTO)?;
    add("100ms")?;
    env.wait_status("the end of the entry", |status| {
        status["runtime_entries"] == 0
    })?;
    expect(&env, KERNEL_RTO)?;
    env.logs("action=\"expire\" source=\"ttl\"")?;
    Ok(())
}

test!(ttl_ends_without_a_daemon);
/// The program ignores the entry from the next multiple of 2^36 ns of CLOCK_BOOTTIME, at most 69 s later.
fn ttl_ends_without_a_daemon() -> anyhow::Result<()> {
    let mut env = silent(&near("\"192.0.2.0/24\""))?;
    env.cli(&["add", "10.88.0.0/24", "--policy", "near", "--ttl", "10s"])?;
    env.end(Signal::SIGKILL)?;
    expect(&env, POLICY_RTO)?;
    let list = || Ok(env.json(&["list"])?.to_string());
    eventually_seen("its end", TIMEOUT + Duration::from_secs(79), list, |list| {
        !list.contains("10.88.0.0/24")
    })?;
    expect(&env, KERNEL_RTO)?;
    env.start()?;
    let status = env.status()?;
    assert_eq!(status["runtime_entries"], 0, "{status:#}");
    Ok(())
}

test!(saved_entry_survives_restart);
fn saved_entry_survives_restart() -> anyhow::Result<()> {
    let mut env = silent(&near("\"192.0.2.0/24\""))?;
    env.cli(&["add", "10.88.0.0/24", "--initial-rto", "52ms", "--save"])?;
    let file = env.policies_dir().join("50-cli.toml");
    assert!(fs::read_to_string(&file)?.contains("10.88.0.0/24"));
    // This is the message of the reload; the next one must come from the new daemon.
    env.notified("READY=1")?;
    env.end(Signal::SIGTERM)?;
    fs::remove_dir_all(env.dir().join("state"))?;
    env.start()?;
    expect(&env, FAST)?;
    env.cli(&["remove", "10.88.0.0/24", "--save"])?;
    expect(&env, KERNEL_RTO)?;
    // An entry of another file must be edited there.
    env.cli_refuses(
        &["remove", "192.0.2.0/24", "--save"],
        "remove entries of other files by editing those files",
    )?;
    Ok(())
}

test!(saving_keeps_link_owner_mode_and_policies);
fn saving_keeps_link_owner_mode_and_policies() -> anyhow::Result<()> {
    use std::os::unix::fs::{MetadataExt as _, chown, symlink};

    let mut env = TestEnv::with(&near("\"192.0.2.0/24\""))?;
    let (link, file) = (
        env.policies_dir().join("50-cli.toml"),
        env.dir().join("etc/saved"),
    );
    let text = "# Ours.\n[policy.own]\ndescription = \"by hand\"\ninitial_rto = \"52ms\"\n\
                cidrs = [\"10.88.0.0/24\"]\n";
    fs::write(&file, text)?;
    fs::set_permissions(&file, fs::Permissions::from_mode(0o600))?;
    chown(&file, Some(0), Some(12_345))?;
    symlink("../saved", &link)?;
    env.cli(&["reload"])?;
    env.cli(&["remove", "10.88.0.0/24", "--save"])?;
    let saved = || fs::read_to_string(&file);
    ensure!(
        saved()? == text.replace("\"10.88.0.0/24\"", ""),
        "{}",
        saved()?
    );
    env.cli(&["add", "10.88.1.0/24", "--policy", "own", "--save"])?;
    ensure!(
        saved()? == text.replace("10.88.0", "10.88.1"),
        "{}",
        saved()?
    );
    let meta = fs::metadata(&file)?;
    let owner = (meta.mode() & 0o7777, meta.uid(), meta.gid());
    ensure!(
        link.is_symlink() && owner == (0o600, 0, 12_345),
        "{owner:?}"
    );
    env.restart(Signal::SIGKILL)?;
    ensure!(env.json(&["lookup", "10.88.1.1"])?["entry"]["policy"] == "own");
    Ok(())
}

test!(saved_while_a_runtime_entry_overrides);
/// Measured on the wire: what was acknowledged is in force.
fn saved_while_a_runtime_entry_overrides() -> anyhow::Result<()> {
    const CIDR: &str = "10.88.0.0/24";
    let env = silent(&near("\"192.0.2.0/24\""))?;
    env.cli(&["add", CIDR, "--initial-rto", "200ms", "--guard", "off"])?;
    env.cli_says(
        &["add", CIDR, "--initial-rto", "52ms", "--save"],
        "the runtime entry has ended",
    )?;
    expect(&env, FAST)?;
    env.cli(&["remove", CIDR])?;
    expect(&env, KERNEL_RTO)?;
    env.cli_says(
        &["add", CIDR, "--initial-rto", "52ms", "--save"],
        "no longer switched off",
    )?;
    expect(&env, FAST)?;
    env.cli(&["add", CIDR, "--initial-rto", "200ms", "--guard", "off"])?;
    env.cli_says(&["remove", CIDR, "--save"], "1 removed")?;
    expect(&env, KERNEL_RTO)
}

test!(switched_off_and_on_again);
fn switched_off_and_on_again() -> anyhow::Result<()> {
    let env = silent(&near("\"10.88.0.0/24\""))?;
    env.cli_says(&["remove", "10.88.0.0/24"], "--undo")?;
    expect(&env, KERNEL_RTO)?;
    assert_eq!(env.json(&["list"])?["masked"][0], "10.88.0.0/24");
    // A reload of the files must not restore the entry.
    env.cli(&["reload"])?;
    expect(&env, KERNEL_RTO)?;
    env.cli(&["remove", "--undo", "10.88.0.0/24"])?;
    expect(&env, POLICY_RTO)
}

fn noticed(env: &TestEnv) -> anyhow::Result<()> {
    env.wait_status("the new policy", |status| {
        let mut names = status["policies"].as_array().into_iter().flatten();
        names.any(|name| name == "fast")
    })?;
    expect(env, FAST)
}

test!(a_file_edited_in_place);
fn a_file_edited_in_place() -> anyhow::Result<()> {
    let env = silent(&near("\"10.88.0.0/24\""))?;
    env.configure(&fast("\"10.88.0.0/24\""))?;
    noticed(&env)
}

test!(a_file_replaced_by_rename, rename);
fn rename() -> anyhow::Result<()> {
    let env = silent(&near("\"192.0.2.0/24\""))?;
    // Twice: after the first replacement the watch must be on the name, not on the old file.
    for policies in [near("\"10.88.0.0/24\""), fast("\"10.88.0.0/24\"")] {
        let new = env.dir().join("etc/.config.toml.swp");
        fs::write(&new, env.config_text(&policies))?;
        fs::rename(&new, env.config())?;
        thread::sleep(Duration::from_millis(300));
    }
    noticed(&env)
}

test!(list_file_is_watched);
fn list_file_is_watched() -> anyhow::Result<()> {
    let mut env = TestEnv::new()?;
    env.net.black_hole(PORT)?;
    let list = env.dir().join("etc/lists/far.txt");
    fs::create_dir_all(list.parent().context("no directory")?)?;
    fs::write(&list, "192.0.2.0/24\n")?;
    let policies = fast("\"198.51.100.0/24\"") + "cidrs_file = \"lists/far.txt\"\n";
    env.configure(&policies)?;
    env.start()?;
    let new = list.with_extension("new");
    fs::write(&new, "# far\n10.88.0.0/24\n")?;
    fs::rename(&new, &list)?;
    env.wait_status("the new list", |_| {
        let listed = env.cli(&["list"]);
        listed.is_ok_and(|text| text.contains("10.88.0.0/24"))
    })?;
    expect(&env, FAST)?;
    // A download that failed changes nothing.
    fs::write(&list, "")?;
    let refusal = env.cli_fails(&["reload"])?;
    ensure!(
        refusal.contains("far.txt: no line of this file"),
        "{refusal}"
    );
    expect(&env, FAST)
}

test!(a_config_map_swapped_by_symlink);
/// Kubernetes: config.toml -> ..data/config.toml, ..data -> a directory; `..data` is swapped.
fn a_config_map_swapped_by_symlink() -> anyhow::Result<()> {
    let mut env = TestEnv::new()?;
    env.net.black_hole(PORT)?;
    let etc = env.dir().join("etc");
    swap(&env, "..2026_01", &near("\"10.88.0.0/24\""))?;
    symlink("..data/config.toml", etc.join("config.toml"))?;
    env.start()?;
    expect(&env, POLICY_RTO)?;
    swap(&env, "..2026_02", &fast("\"10.88.0.0/24\""))?;
    fs::remove_dir_all(etc.join("..2026_01"))?;
    noticed(&env)
}

/// Switches to a new directory with a configuration, in the way of a Kubernetes ConfigMap.
fn swap(env: &TestEnv, name: &str, policies: &str) -> anyhow::Result<()> {
    let etc = env.dir().join("etc");
    fs::create_dir(etc.join(name))?;
    fs::write(
        etc.join(name).join("config.toml"),
        env.config_text(policies),
    )?;
    symlink(name, etc.join("..data_tmp"))?;
    Ok(fs::rename(etc.join("..data_tmp"), etc.join("..data"))?)
}

test!(change_with_an_error_is_refused_completely);
/// One bad CIDR among good ones: the whole request is rejected.
fn change_with_an_error_is_refused_completely() -> anyhow::Result<()> {
    let env = silent(&near("\"192.0.2.0/24\""))?;
    for (args, message) in [
        (
            &["add", "10.88.0.0/24", "10.88.1.1/24", "--policy", "near"][..],
            "did you mean 10.88.1.0/24?",
        ),
        (
            &["add", "10.88.0.0/24", "--policy", "nowhere"],
            "unknown policy nowhere; the configuration has: near",
        ),
        (&["add", "10.88.0.0/24"], "no policy: give --policy NAME"),
        (
            &["add", "10.88.0.0/24", "--rto-min", "1ms"],
            "must be 2 jiffies to 200ms",
        ),
        (
            &["add", "0.0.0.0/0", "--initial-rto", "100ms"],
            "needs --force",
        ),
        (
            &["remove", "10.88.0.0/24"],
            "there is no entry 10.88.0.0/24",
        ),
    ] {
        env.cli_refuses(args, message)?;
    }
    // The daemon rejects requests of other clients.
    let body = r#"{"cidrs": ["10.88.0.0/24"], "policy": "near", "ttl": "0s"}"#;
    let answer = env.socket_request("POST", "/v1/entries", body)?;
    assert!(
        answer["error"].to_string().contains("--ttl 0s"),
        "{answer:#}"
    );
    assert_eq!(env.status()?["entries"], 1);
    expect(&env, KERNEL_RTO)
}

test!(change_has_one_audit_line);
/// Each line names the client, the change and its source.
fn change_has_one_audit_line() -> anyhow::Result<()> {
    let mut env = TestEnv::new()?;
    env.log_as("json");
    env.configure(&near("\"192.0.2.0/24\""))?;
    env.start()?;
    let lines = |env: &TestEnv| -> anyhow::Result<Vec<Value>> {
        let log = env.log();
        let lines = log.lines().map(serde_json::from_str);
        let lines = lines.collect::<Result<Vec<Value>, _>>()?;
        let is_audit = |line: &Value| line["fields"]["audit"] == true;
        Ok(lines.into_iter().filter(is_audit).collect())
    };
    let fields = |line: &Value| {
        let fields = &line["fields"];
        ["action", "source", "detail"].map(|name| fields[name].as_str().unwrap_or("").to_owned())
    };
    let begun = lines(&env)?;
    assert_eq!(begun.len(), 1, "{begun:#?}");
    assert_eq!(
        fields(&begun[0]),
        [
            "start",
            "start",
            "added policy near (initial_rto 100ms), 192.0.2.0/24 (policy near)"
        ]
    );
    let mut known = 1;
    for (args, wanted) in [
        (
            &["add", "10.1.0.0/24", "10.2.0.0/24", "--policy", "near"][..],
            [
                "add",
                "socket",
                "added 10.1.0.0/24 (policy near, initial_rto 100ms), 10.2.0.0/24 (policy near)",
            ],
        ),
        (
            &["remove", "10.1.0.0/24"],
            ["remove", "socket", "removed 10.1.0.0/24"],
        ),
        (&["reload"], ["reload", "socket", ""]),
        (&["detach"], ["detach", "socket", ""]),
    ] {
        env.cli(args)?;
        let all = lines(&env)?;
        assert_eq!(all.len(), known + 1, "{args:?}: {all:#?}");
        let last = &all[known];
        known += 1;
        assert_eq!(fields(last), wanted, "{last:#}");
        if !wanted[2].is_empty() {
            let message = format!("uid 0 {}", wanted[2]);
            assert_eq!(last["fields"]["message"], message, "{last:#}");
        }
        assert_eq!(last["fields"]["uid"], 0, "{last:#}");
        assert!(last["fields"]["pid"].as_u64() > Some(0), "{last:#}");
    }
    // A rejected request changes nothing and has no line.
    env.cli_fails(&["add", "10.1.0.1/24", "--policy", "near"])?;
    assert_eq!(lines(&env)?.len(), known);
    // A changed file is reloaded without a client, so the line has no uid.
    env.cli(&["attach"])?;
    known = lines(&env)?.len();
    env.configure(&near("\"192.0.2.0/24\", \"198.51.100.0/24\""))?;
    let all = eventually_seen("line", TIMEOUT, || lines(&env), |all| all.len() > known)?;
    let last = &all[known];
    let expected = [
        "reload",
        "file change",
        "added 198.51.100.0/24 (policy near, initial_rto 100ms)",
    ];
    assert_eq!(fields(last), expected, "{last:#}");
    assert!(last["fields"]["uid"].is_null(), "{last:#}");
    Ok(())
}
