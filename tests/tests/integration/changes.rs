//! Changes take effect with the next connection, and leave those under way alone.

use std::{fs, os::unix::fs::symlink, time::Duration};

use nix::sys::signal::Signal;
use rto_tests::{
    agent::{SOON, World},
    capture::{Capture, gaps, syns},
    features::syn_timers,
    netns::{CLIENT_LINK, SERVER_V4},
    timing::assert_gaps,
    traffic::Connect,
};
use serde_json::Value;

use super::{KERNEL, NEAR, Test, near, to};

pub(super) const TESTS: &[Test] = &[
    ("add_and_remove", add_remove),
    ("reload", reload),
    ("sighup", sighup),
    ("a_connection_keeps_its_policy", keeps),
    ("ttl", ttl),
    ("saved_for_good", saved),
    ("switched_off_and_on_again", masked),
    ("a_file_edited_in_place", in_place),
    ("a_file_replaced_by_rename", rename),
    ("a_config_map_swapped_by_symlink", config_map),
    ("refused_as_a_whole", refused),
    ("options_before_the_verb", before_the_verb),
    ("one_audit_line_a_change", audit),
];

const PORT: u16 = 4300;
const FAST: Duration = Duration::from_millis(52);

fn expect(world: &World, timer: Duration) -> anyhow::Result<()> {
    world.assert_syn_gap(to(SERVER_V4, PORT), &Connect::default(), timer)
}

fn world(policies: &str) -> anyhow::Result<World> {
    let world = World::with(policies)?;
    world.net.black_hole(PORT)?;
    Ok(world)
}

fn fast(cidrs: &str) -> String {
    format!("[policy.fast]\ninitial_rto = \"52ms\"\ncidrs = [{cidrs}]\n")
}

fn add_remove() -> anyhow::Result<()> {
    let world = world(&near("\"192.0.2.0/24\""))?;
    expect(&world, KERNEL)?;
    world.cli(&["add", "10.88.0.0/24", "--policy", "near"])?;
    expect(&world, NEAR)?;
    world.cli(&["add", "10.88.0.2", "--initial-rto", "50ms"])?;
    expect(&world, FAST)?;
    world.cli(&["remove", "10.88.0.2"])?;
    expect(&world, NEAR)?;
    world.cli(&["remove", "10.88.0.0/24"])?;
    expect(&world, KERNEL)?;
    Ok(())
}

fn reload() -> anyhow::Result<()> {
    let world = world(&near("\"10.88.0.0/24\""))?;
    expect(&world, NEAR)?;
    world.configure(&fast("\"10.88.0.0/24\""))?;
    // It may have noticed by itself already; after the answer it is in force in any case.
    world.cli(&["reload"])?;
    expect(&world, FAST)?;
    Ok(())
}

fn sighup() -> anyhow::Result<()> {
    let mut world = world(&near("\"10.88.0.0/24\""))?;
    world.configure(&fast("\"10.88.0.0/24\""))?;
    world.signal(Signal::SIGHUP)?;
    world.notified("RELOADING=1")?;
    world.notified("READY=1")?;
    expect(&world, FAST)?;
    Ok(())
}

/// The entry goes while SYNs are being sent again: the interval stays, and so does the deadline.
fn keeps() -> anyhow::Result<()> {
    let world = world(&near("\"192.0.2.0/24\""))?;
    let address = to(SERVER_V4, PORT);
    let timers = syn_timers(NEAR, 6)?;
    assert_gaps(&timers, || {
        world.cli(&["add", "10.88.0.0/24", "--policy", "near"])?;
        let capture = Capture::start(&world.net.client, CLIENT_LINK)?;
        let _traffic = world.connect(address, &Connect::default())?;
        capture.wait_for(SOON, |all| syns(all, address).len() >= 2)?;
        world.cli(&["remove", "10.88.0.0/24"])?;
        let all = capture.wait_for(SOON, |all| syns(all, address).len() >= 7)?;
        Ok(gaps(&syns(&all, address)))
    })?;
    // A new one does not have it any more.
    expect(&world, KERNEL)?;
    Ok(())
}

fn ttl() -> anyhow::Result<()> {
    let world = world(&near("\"192.0.2.0/24\""))?;
    world.cli(&["add", "10.88.0.0/24", "--policy", "near", "--ttl", "1500ms"])?;
    expect(&world, NEAR)?;
    world.wait_status("the end of the entry", |status| {
        status["entries_by_hand"] == 0
    })?;
    expect(&world, KERNEL)?;
    assert!(
        world.log().contains("action=\"expire\" source=\"ttl\""),
        "{}",
        world.log()
    );
    Ok(())
}

fn saved() -> anyhow::Result<()> {
    let mut world = world(&near("\"192.0.2.0/24\""))?;
    world.cli(&["add", "10.88.0.0/24", "--initial-rto", "52ms", "--save"])?;
    let file = world.policies_dir().join("50-cli.toml");
    assert!(fs::read_to_string(&file)?.contains("10.88.0.0/24"));
    // That of the reload; the next is to be that of the new daemon.
    world.notified("READY=1")?;
    world.end(Signal::SIGTERM)?;
    fs::remove_dir_all(world.dir().join("state"))?;
    world.start()?;
    expect(&world, FAST)?;
    world.cli(&["remove", "10.88.0.0/24", "--save"])?;
    expect(&world, KERNEL)?;
    // What is in another file is edited there.
    let said = world.cli_fails(&["remove", "192.0.2.0/24", "--save"])?;
    assert!(
        said.contains("entries of other files are removed there"),
        "{said}"
    );
    Ok(())
}

fn masked() -> anyhow::Result<()> {
    let world = world(&near("\"10.88.0.0/24\""))?;
    let said = world.cli(&["remove", "10.88.0.0/24"])?;
    assert!(said.contains("--undo"), "{said}");
    expect(&world, KERNEL)?;
    assert_eq!(world.json(&["list"])?["masked"][0], "10.88.0.0/24");
    // A reload of the files does not bring it back by the way.
    world.cli(&["reload"])?;
    expect(&world, KERNEL)?;
    world.cli(&["remove", "--undo", "10.88.0.0/24"])?;
    expect(&world, NEAR)?;
    Ok(())
}

fn noticed(world: &World) -> anyhow::Result<()> {
    world.wait_status("the new policy", |status| {
        !status["policies"]["fast"].is_null()
    })?;
    expect(world, FAST)?;
    Ok(())
}

fn in_place() -> anyhow::Result<()> {
    let world = world(&near("\"10.88.0.0/24\""))?;
    world.configure(&fast("\"10.88.0.0/24\""))?;
    noticed(&world)
}

fn rename() -> anyhow::Result<()> {
    let world = world(&near("\"192.0.2.0/24\""))?;
    // Twice: after the first swap the watch must be on the name, not on the old file.
    for policies in [near("\"10.88.0.0/24\""), fast("\"10.88.0.0/24\"")] {
        let new = world.dir().join("etc/.config.toml.swp");
        fs::write(&new, world.config_text(&policies))?;
        fs::rename(&new, world.config())?;
        std::thread::sleep(Duration::from_millis(300));
    }
    noticed(&world)
}

/// Kubernetes: config.toml -> ..data/config.toml, ..data -> a directory; `..data` is swapped.
fn config_map() -> anyhow::Result<()> {
    let mut world = World::new()?;
    world.net.black_hole(PORT)?;
    let etc = world.dir().join("etc");
    swap(&world, "..2026_01", &near("\"10.88.0.0/24\""))?;
    symlink("..data/config.toml", etc.join("config.toml"))?;
    world.start()?;
    expect(&world, NEAR)?;
    swap(&world, "..2026_02", &fast("\"10.88.0.0/24\""))?;
    fs::remove_dir_all(etc.join("..2026_01"))?;
    noticed(&world)
}

/// Makes a new directory with a configuration the ConfigMap's.
fn swap(world: &World, name: &str, policies: &str) -> anyhow::Result<()> {
    let etc = world.dir().join("etc");
    fs::create_dir(etc.join(name))?;
    fs::write(
        etc.join(name).join("config.toml"),
        world.config_text(policies),
    )?;
    symlink(name, etc.join("..data_tmp"))?;
    Ok(fs::rename(etc.join("..data_tmp"), etc.join("..data"))?)
}

/// One bad CIDR among good ones: nothing of the request is taken.
fn refused() -> anyhow::Result<()> {
    let world = world(&near("\"192.0.2.0/24\""))?;
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
            "the kernel takes 2 jiffies to 200ms",
        ),
        (
            &["add", "0.0.0.0/0", "--initial-rto", "100ms"],
            "needs force = true",
        ),
        (
            &["remove", "10.88.0.0/24"],
            "there is no entry 10.88.0.0/24",
        ),
        (&["lookup", "example.org"], "is no IPv4 or IPv6 address"),
    ] {
        let said = world.cli_fails(args)?;
        assert!(said.contains(message), "{args:?} said {said}");
    }
    for (args, message) in [
        (["--initial-rto", "100"], "a unit is missing"),
        (["--ttl", "0s"], "more than 0 and at most a year"),
    ] {
        let said = world.usage_error(&[&["add", "10.88.0.0/24"][..], &args].concat())?;
        assert!(said.contains(message), "{args:?} said {said}");
    }
    // Another client is refused by the daemon.
    let body = r#"{"cidrs": ["10.88.0.0/24"], "policy": "near", "ttl": "0s"}"#;
    let answer = world.socket_request("POST", "/v1/entries", body)?;
    assert!(
        answer["error"].to_string().contains("--ttl 0s"),
        "{answer:#}"
    );
    assert_eq!(world.json(&["status"])?["entries"], 1);
    expect(&world, KERNEL)?;
    Ok(())
}

/// `--socket` and `--json` mean before the verb what they mean after it; what is wrong is told before anybody is asked.
fn before_the_verb() -> anyhow::Result<()> {
    const NOBODY: &str = "/nonexistent/control.sock";
    let world = world(&near("\"192.0.2.0/24\""))?;
    let socket = world.socket().display().to_string();
    let run = |args: &[&str]| -> anyhow::Result<std::process::Output> {
        // Who is not told another socket has this one.
        let mut command = world.command(args);
        Ok(command.env("RTO_AGENT_SOCKET", NOBODY).output()?)
    };
    let text = |output: &std::process::Output| String::from_utf8_lossy(&output.stdout).into_owned();
    let listed = run(&["--socket", &socket, "--json", "list"])?;
    let list: Value = serde_json::from_slice(&listed.stdout)?;
    assert_eq!(list["entries"][0]["cidr"], "192.0.2.0/24", "{list:#}");
    let after = run(&["list", "--socket", &socket, "--json"])?;
    assert_eq!(text(&listed), text(&after));
    // The control.
    assert_eq!(run(&["--json", "list"])?.status.code(), Some(1));
    for args in [
        &["--json", "run"][..],
        &["--socket", &socket, "check"],
        &["add", "10.1.0.0/24", "--initial-rto", "100"],
        &["stats", "--watch", "--interval", "1"],
    ] {
        let output = run(args)?;
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {said}");
        assert!(!said.contains("no rto-agent daemon answers"), "{said}");
    }
    Ok(())
}

/// Who, what, from which source.
fn audit() -> anyhow::Result<()> {
    let mut world = World::new()?;
    world.log_as("json");
    world.configure(&near("\"192.0.2.0/24\""))?;
    world.start()?;
    let lines = |world: &World| -> anyhow::Result<Vec<Value>> {
        let log = world.log();
        let lines = log.lines().map(serde_json::from_str);
        let lines = lines.collect::<Result<Vec<Value>, _>>()?;
        let is_audit = |line: &Value| line["fields"]["audit"] == true;
        Ok(lines.into_iter().filter(is_audit).collect())
    };
    let fields = |line: &Value| {
        let fields = &line["fields"];
        ["action", "source", "detail"].map(|name| fields[name].as_str().unwrap_or("").to_owned())
    };
    let begun = lines(&world)?;
    assert_eq!(begun.len(), 1, "{begun:#?}");
    assert_eq!(
        fields(&begun[0]),
        ["start", "start", "+policy near, +192.0.2.0/24 near"]
    );
    let mut known = 1;
    for (args, said) in [
        (
            &["add", "10.1.0.0/24", "10.2.0.0/24", "--policy", "near"][..],
            ["add", "socket", "+10.1.0.0/24 near, +10.2.0.0/24 near"],
        ),
        (
            &["remove", "10.1.0.0/24"],
            ["remove", "socket", "-10.1.0.0/24"],
        ),
        (&["reload"], ["reload", "socket", ""]),
        (&["detach"], ["detach", "socket", ""]),
    ] {
        world.cli(args)?;
        let all = lines(&world)?;
        assert_eq!(all.len(), known + 1, "{args:?}: {all:#?}");
        let last = &all[known];
        known += 1;
        assert_eq!(fields(last), said, "{last:#}");
        assert_eq!(last["fields"]["uid"], 0, "{last:#}");
        assert!(last["fields"]["pid"].as_u64() > Some(0), "{last:#}");
    }
    // What is refused changes nothing, and is no line.
    world.cli_fails(&["add", "10.1.0.1/24", "--policy", "near"])?;
    assert_eq!(lines(&world)?.len(), known);
    // By a file, by nobody.
    world.cli(&["reload"])?;
    known = lines(&world)?.len();
    world.configure(&near("\"192.0.2.0/24\", \"198.51.100.0/24\""))?;
    let end = std::time::Instant::now() + SOON;
    while lines(&world)?.len() == known {
        anyhow::ensure!(std::time::Instant::now() < end, "{}", world.log());
        std::thread::sleep(Duration::from_millis(20));
    }
    let last = &lines(&world)?[known];
    let expected = ["reload", "file change", "+198.51.100.0/24 near"];
    assert_eq!(fields(last), expected, "{last:#}");
    assert!(last["fields"]["uid"].is_null(), "{last:#}");
    Ok(())
}
