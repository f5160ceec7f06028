//! Sockets that were open before a policy covered them, and giving back what was set.

use std::{os::unix::net::UnixStream, time::Duration};

use rto_tests::{
    agent::World,
    features::lacks,
    held::Held,
    http,
    netns::{SERVER_V4, SERVER_V4_OTHER, sysctl},
    talk::{self, Talk, option},
    timing::jiffy,
    traffic::{Connect, Traffic},
};
use serde_json::Value;

use super::{
    Test,
    established::{policy, reno},
    to,
};

pub(super) const TESTS: &[Test] = &[
    ("apply_reaches_sockets_of_two_namespaces", apply),
    ("apply_to_open_does_so_by_itself", by_itself),
    (
        "each_change_that_covers_sockets_is_followed_by_a_walk",
        followed,
    ),
    (
        "a_sysctl_that_changes_a_policy_is_followed_by_a_walk",
        followed_sysctl,
    ),
    ("sockets_of_other_cgroups_are_left_alone", other_cgroup),
    ("sockets_with_a_policy_are_kept_unless_asked", kept),
    ("a_larger_rto_min_is_not_claimed_to_raise_the_rto", raised),
    ("detach_restore_gives_back_what_was_there", restore),
    ("detach_restore_without_a_daemon", restore_alone),
    ("detach_restore_is_finished_by_root", restore_bounded),
    (
        "detach_restore_and_more_entries_meanwhile",
        restore_meanwhile,
    ),
    (
        "detach_restore_reaches_handshakes_and_former_policies",
        restore_all,
    ),
    ("without_restore_sockets_keep_their_options", detach_only),
    ("namespaces_that_cannot_be_entered_are_said", no_privileges),
    ("with_the_drop_in_all_namespaces_are_reached", drop_in),
];

const PORT: u16 = 4400;
const NO_PAUSE: Duration = Duration::ZERO;
/// Round trips after which an RTO has sunk to its minimum.
const MANY: usize = 40;
const OTHERS: &str = "[policy.other]\ninitial_rto = \"100ms\"\ncidrs = [\"10.77.0.0/24\"]\n";

struct Pair {
    talk: Talk,
    _server: Traffic,
}

fn begin(world: &World, options: talk::Options) -> anyhow::Result<Pair> {
    reno(world)?;
    let server = world.answer(to(SERVER_V4, PORT))?;
    let mut talk = world.talk(to(SERVER_V4, PORT), options)?;
    talk.rounds(5, NO_PAUSE)?;
    Ok(Pair {
        talk,
        _server: server,
    })
}

/// RTO of the client's and of the server's socket, after many round trips.
fn rtos(world: &World, pair: &mut Pair) -> anyhow::Result<[Duration; 2]> {
    pair.talk.rounds(MANY, NO_PAUSE)?;
    Ok([
        talk::rto(&world.net.client, &format!("dport = :{PORT}"))?,
        talk::rto(&world.net.server, &format!("sport = :{PORT}"))?,
    ])
}

fn are_short(rtos: [Duration; 2]) -> bool {
    rtos.iter().all(|rto| *rto <= 5 * jiffy())
}

fn are_kernels(rtos: [Duration; 2]) -> bool {
    rtos.iter().all(|rto| *rto >= Duration::from_millis(200))
}

fn plain() -> talk::Options {
    talk::Options::default()
}

fn apply() -> anyhow::Result<()> {
    let world = World::with(OTHERS)?;
    let mut pair = begin(&world, plain())?;
    world.cli(&[
        "add",
        "10.88.0.0/24",
        "--rto-min",
        "8ms",
        "--user-timeout",
        "30s",
    ])?;
    // The control: an entry alone does not touch them.
    let before = rtos(&world, &mut pair)?;
    assert!(are_kernels(before), "{before:?}");
    let walk = world.json(&["apply"])?;
    let (_, counts) = only_policy(&walk);
    assert_eq!(counts["seen"], 2, "{walk:#}");
    assert_eq!(counts["changed"], 2, "{walk:#}");
    assert_eq!(counts["refused"], 0, "{walk:#}");
    assert!(walk["namespaces_done"].as_u64() >= Some(2), "{walk:#}");
    assert!(
        walk["notes"].to_string().contains("about 20 round trips"),
        "{walk:#}"
    );
    let after = rtos(&world, &mut pair)?;
    assert!(are_short(after), "{after:?}");
    assert_eq!(pair.talk.option(option::USER_TIMEOUT)?, 30_000);
    // They are counted, and in the RTO hook as well.
    let status = world.json(&["status"])?;
    let (name, _) = only_policy(&walk);
    let policy = &status["policies"][name];
    assert_eq!(policy["open_sockets"], 2, "{policy:#}");
    if lacks("rto-hook-on-open-sockets")? {
        assert!(walk["notes"].to_string().contains("Linux 6.12"), "{walk:#}");
        return Ok(());
    }
    world.net.black_hole(PORT)?;
    pair.talk.send(talk::REQUEST)?;
    let name = name.to_owned();
    world.wait_status("a timeout of the open socket", |status| {
        let policy = &status["policies"][&name];
        policy["rtos"][1] == 1 && policy["tail_loss_probes"] == 1
    })?;
    Ok(())
}

fn only_policy(walk: &Value) -> (&str, &Value) {
    let policies = walk["policies"].as_object();
    let mut policies = policies.into_iter().flatten();
    match (policies.next(), policies.next()) {
        (Some((name, counts)), None) => (name, counts),
        _ => ("", &Value::Null),
    }
}

fn by_itself() -> anyhow::Result<()> {
    let mut world = World::new()?;
    let mut pair = begin(&world, plain())?;
    // At the start,
    world.configure(&format!(
        "apply_to_open = true\n{}",
        policy("rto_min = \"8ms\"")
    ))?;
    world.start()?;
    world.wait_status("the walk", |status| {
        status["policies"]["near"]["open_sockets"] == 2
            && status["open_sockets"]["running"] == false
    })?;
    let after = rtos(&world, &mut pair)?;
    assert!(are_short(after), "{after:?}");
    // and when an entry comes to cover others.
    let _server = world.answer(to(SERVER_V4_OTHER, PORT + 1))?;
    let _other = world.talk(to(SERVER_V4_OTHER, PORT + 1), plain())?;
    world.cli(&["add", "10.88.1.0/24", "--policy", "near"])?;
    world.wait_status("another walk", |status| {
        status["policies"]["near"]["open_sockets"] == 4
    })?;
    Ok(())
}

/// Also where an entry comes back into force, by whatever way.
fn followed() -> anyhow::Result<()> {
    const CIDR: &str = "10.88.0.0/24";
    let mut world = World::new()?;
    let near = policy("initial_rto = \"100ms\"\nrto_min = \"8ms\"");
    world.configure(&format!("apply_to_open = true\n{near}"))?;
    world.start()?;
    world.cli(&["remove", CIDR])?;
    let mut pair = begin(&world, plain())?;
    let before = rtos(&world, &mut pair)?;
    assert!(are_kernels(before), "{before:?}");
    world.cli(&["remove", "--undo", CIDR])?;
    world.wait_status("the walk after remove --undo", |status| {
        status["policies"]["near"]["open_sockets"] == 2
    })?;
    let after = rtos(&world, &mut pair)?;
    assert!(are_short(after), "{after:?}");
    world.cli(&["add", CIDR, "--rto-min", "50ms", "--ttl", "1s"])?;
    world.wait_status("the walk after the end of an entry", |status| {
        caused_by(status, "ttl")
    })?;
    Ok(())
}

fn followed_sysctl() -> anyhow::Result<()> {
    let mut world = World::new()?;
    let near = policy("initial_rto = \"100ms\"");
    world.configure(&format!("apply_to_open = true\n{near}"))?;
    // Sysctls of its own.
    let namespace = format!("--net=/run/netns/{}", world.net.client);
    world.start_under(&["nsenter".to_owned(), namespace])?;
    world.wait_status("the walk at the start", |status| caused_by(status, "start"))?;
    sysctl(&world.net.client, "net.ipv4.tcp_syn_linear_timeouts", "1")?;
    world.wait_status("the walk after a sysctl", |status| {
        status["host"]["tcp_syn_linear_timeouts"] == 1 && caused_by(status, "host")
    })?;
    Ok(())
}

/// Whether a walk has ended that was due to this.
fn caused_by(status: &Value, cause: &str) -> bool {
    let walk = &status["open_sockets"];
    walk["cause"] == cause && walk["running"] == false
}

fn other_cgroup() -> anyhow::Result<()> {
    let world = World::with(&policy("rto_min = \"8ms\""))?;
    reno(&world)?;
    let other = rto_tests::cgroup::Cgroup::new()?;
    let to = to(SERVER_V4, PORT);
    let server = Traffic::answer(&world.net.server, Some(other.path()), to, false)?;
    let mut pair = Pair {
        talk: Talk::to(&world.net.client, Some(other.path()), to, plain())?,
        _server: server,
    };
    let walk = world.json(&["apply"])?;
    assert_eq!(walk["policies"], serde_json::json!({}), "{walk:#}");
    assert_eq!(walk["uncovered"], 0, "{walk:#}");
    let after = rtos(&world, &mut pair)?;
    assert!(are_kernels(after), "{after:?}");
    Ok(())
}

fn kept() -> anyhow::Result<()> {
    let world = World::with(&policy("rto_min = \"50ms\"\nuser_timeout = \"30s\""))?;
    let mut pair = begin(&world, plain())?;
    world.configure(&policy("rto_min = \"8ms\"\nuser_timeout = \"40s\""))?;
    world.cli(&["reload"])?;
    let walk = world.json(&["apply", "--new-only"])?;
    let (_, counts) = only_policy(&walk);
    assert_eq!(
        (&counts["kept"], &counts["changed"]),
        (&2.into(), &0.into())
    );
    assert_eq!(pair.talk.option(option::USER_TIMEOUT)?, 30_000);
    let walk = world.json(&["apply"])?;
    let (_, counts) = only_policy(&walk);
    assert_eq!(
        (&counts["kept"], &counts["changed"]),
        (&0.into(), &2.into())
    );
    assert_eq!(pair.talk.option(option::USER_TIMEOUT)?, 40_000);
    let after = rtos(&world, &mut pair)?;
    assert!(are_short(after), "{after:?}");
    Ok(())
}

/// The kernel takes the value and leaves the RTO where it was: `apply` must say so.
fn raised() -> anyhow::Result<()> {
    let world = World::with(&policy("rto_min = \"8ms\""))?;
    let mut pair = begin(&world, plain())?;
    let before = rtos(&world, &mut pair)?;
    assert!(are_short(before), "{before:?}");
    world.configure(&policy("rto_min = \"150ms\""))?;
    world.cli(&["reload"])?;
    let text = world.cli(&["apply"])?;
    assert!(text.contains("a higher one does not raise it"), "{text}");
    let after = rtos(&world, &mut pair)?;
    assert!(are_short(after), "{after:?}");
    Ok(())
}

/// An application's own choices, which must survive.
const OWN_USER_TIMEOUT: Duration = Duration::from_secs(7);

const RESTORED: &str =
    "rto_min = \"8ms\"\ndelack_max = \"8ms\"\nthin_linear = true\nuser_timeout = \"30s\"";

fn begin_own(world: &World) -> anyhow::Result<Pair> {
    let own = talk::Options {
        user_timeout: Some(OWN_USER_TIMEOUT),
        ..plain()
    };
    begin(world, own)
}

fn restore_world() -> anyhow::Result<(World, Pair)> {
    let world = World::with(&policy(RESTORED))?;
    let mut pair = begin_own(&world)?;
    assert_eq!(pair.talk.option(option::USER_TIMEOUT)?, 30_000);
    assert_eq!(pair.talk.option(option::THIN_LINEAR)?, 1);
    Ok((world, pair))
}

fn assert_restored(pair: &mut Pair) -> anyhow::Result<()> {
    assert_eq!(pair.talk.option(option::USER_TIMEOUT)?, 7_000);
    assert_eq!(pair.talk.option(option::THIN_LINEAR)?, 0);
    // Linux 6.15 tells these as well.
    if let Ok(rto_min) = pair.talk.option(option::RTO_MIN_US) {
        assert_eq!(rto_min, 200_000);
        assert_eq!(pair.talk.option(option::DELACK_MAX_US)?, 200_000);
    }
    Ok(())
}

fn restore() -> anyhow::Result<()> {
    let (world, mut pair) = restore_world()?;
    let answer = world.json(&["detach", "--restore"])?;
    let (name, counts) = only_policy(&answer["restored"]);
    assert_eq!(
        (name, &counts["changed"]),
        ("near", &2.into()),
        "{answer:#}"
    );
    assert_eq!(counts["refused"], 0, "{answer:#}");
    assert_eq!(answer["removed"]["links"], 1, "{answer:#}");
    assert!(!world.pin_dir().exists());
    assert_restored(&mut pair)?;
    // New connections are nobody's, and attaching again works.
    world.cli(&["reload"])?;
    assert_eq!(world.json(&["status"])?["healthy"], true);
    Ok(())
}

fn restore_alone() -> anyhow::Result<()> {
    let (mut world, mut pair) = restore_world()?;
    world.end(nix::sys::signal::Signal::SIGKILL)?;
    let text = world.cli(&["detach", "--restore"])?;
    assert!(text.contains("given back to open sockets"), "{text}");
    assert!(text.contains("detached: 1 link(s) and 1 set(s)"), "{text}");
    assert_restored(&mut pair)?;
    assert!(!world.pin_dir().exists());
    Ok(())
}

/// The daemon with the unit's capabilities does what it can and keeps the maps; root's command
/// does the rest.
fn restore_bounded() -> anyhow::Result<()> {
    let mut world = World::new()?;
    world.configure(&policy(RESTORED))?;
    world.start_under(&bounded(&["rto-agent.service"])?)?;
    let mut pair = begin_own(&world)?;
    let mut alone = world.socket_request("POST", "/v1/detach", "{\"restore\":true}")?;
    let kept = alone["kept"].take();
    assert_eq!(kept, world.pin_dir().display().to_string(), "{alone:#}");
    assert!(world.pin_dir().exists());
    assert_eq!(pair.talk.option(option::USER_TIMEOUT)?, 30_000);
    // Out of force all the same; and asked again, or stopped, it does not forget.
    assert_eq!(world.json(&["status"])?["attachment"]["attached"], false);
    let again = world.socket_request("POST", "/v1/detach", "{\"restore\":true}")?;
    assert!(again["kept"].is_string(), "{again:#}");
    world.end(nix::sys::signal::Signal::SIGTERM)?;
    assert!(world.pin_dir().exists());
    // Nor does another start: the sockets are still known.
    world.start_under(&bounded(&["rto-agent.service"])?)?;
    assert_eq!(world.json(&["status"])?["found_at_start"], "maps-kept");
    world.end(nix::sys::signal::Signal::SIGKILL)?;
    let answer = world.json(&["detach", "--restore"])?;
    assert!(answer["kept"].is_null(), "{answer:#}");
    assert_restored(&mut pair)?;
    assert!(!world.pin_dir().exists());
    drop(pair);
    // And in one go.
    world.start_under(&bounded(&["rto-agent.service"])?)?;
    let mut pair = begin_own(&world)?;
    let answer = world.json(&["detach", "--restore"])?;
    let (_, counts) = only_policy(&answer["restored"]);
    assert_eq!(counts["changed"], 2, "{answer:#}");
    assert!(answer["kept"].is_null(), "{answer:#}");
    assert_restored(&mut pair)?;
    assert!(!world.pin_dir().exists());
    Ok(())
}

/// What sockets had is known by the maps; entries that they have no room for do not take their place.
fn restore_meanwhile() -> anyhow::Result<()> {
    let mut world = World::new()?;
    world.configure(&format!("max_entries = 2\n{}", policy(RESTORED)))?;
    world.start_under(&bounded(&["rto-agent.service"])?)?;
    let mut pair = begin_own(&world)?;
    assert_eq!(pair.talk.option(option::USER_TIMEOUT)?, 30_000);
    // It is in the daemon's own namespace, the one that it can walk over; the pair is not.
    let held = Held::new()?;
    let socket = world.socket();
    let detached = std::thread::scope(|scope| {
        let detaching = scope.spawn(|| {
            let stream = UnixStream::connect(socket)?;
            let answer = http::request(stream, "POST", "/v1/detach", "{\"restore\":true}")?;
            anyhow::Ok(serde_json::from_str::<Value>(&answer.body)?)
        });
        let meanwhile = || {
            world.wait_status("the detachment", |s| s["attachment"]["attached"] == false)?;
            let add = ["add", "10.1.0.0/16", "10.2.0.0/16", "--policy", "near"];
            let added = world.cli(&add);
            anyhow::ensure!(!detaching.is_finished(), "the socket was not held");
            added
        };
        let added = meanwhile();
        drop(held);
        let detached = detaching.join();
        added?;
        detached.map_err(|_| anyhow::anyhow!("who detaches died"))?
    })?;
    assert!(detached["kept"].is_string(), "{detached:#}");
    world.end(nix::sys::signal::Signal::SIGKILL)?;
    let answer = world.json(&["detach", "--restore"])?;
    assert!(answer["kept"].is_null(), "{answer:#}");
    assert_restored(&mut pair)?;
    drop(pair);
    // With the next reload, or start, there is room for them.
    world.start()?;
    let status = world.json(&["status"])?;
    assert_eq!(status["entries"], 4, "{status:#}");
    assert_eq!(status["healthy"], true, "{status:#}");
    Ok(())
}

fn restore_all() -> anyhow::Result<()> {
    let (world, mut pair) = restore_world()?;
    // Its policy goes while it lives; and another connection is still in its handshake.
    world.configure("[policy.later]\nrto_min = \"50ms\"\ncidrs = [\"10.88.1.0/24\"]\n")?;
    world.cli(&["reload"])?;
    world.net.server_drops(&format!("tcp dport {}", PORT + 1))?;
    let connecting = world.connect(to(SERVER_V4_OTHER, PORT + 1), &Connect::default())?;
    std::thread::sleep(Duration::from_millis(100));
    let answer = world.json(&["detach", "--restore"])?;
    let restored = &answer["restored"];
    assert_eq!(restored["former"]["changed"], 2, "{answer:#}");
    let (name, counts) = only_policy(restored);
    assert_eq!(
        (name, &counts["changed"]),
        ("later", &1.into()),
        "{answer:#}"
    );
    drop(connecting);
    world.net.drop_nothing()?;
    assert_restored(&mut pair)
}

fn detach_only() -> anyhow::Result<()> {
    let (world, mut pair) = restore_world()?;
    world.cli(&["detach"])?;
    assert_eq!(pair.talk.option(option::USER_TIMEOUT)?, 30_000);
    Ok(())
}

/// With the capabilities of the unit only its own namespace can be walked, and it says so.
fn no_privileges() -> anyhow::Result<()> {
    let mut world = World::new()?;
    world.configure(&policy("initial_rto = \"100ms\"\nrto_min = \"8ms\""))?;
    world.start_under(&bounded(&["rto-agent.service"])?)?;
    let _pair = begin(&world, plain())?;
    let output = world.try_cli(&["apply"])?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("CAP_SYS_ADMIN"), "{text}");
    // Nor can it probe, which is said as well.
    let status = world.wait_status("the probe", |status| status["probe"].is_object())?;
    assert_eq!(status["probe"]["verdict"], "not-probed", "{status:#}");
    assert_eq!(status["healthy"], true, "{status:#}");
    Ok(())
}

/// With those of the drop-in as well, all of them.
fn drop_in() -> anyhow::Result<()> {
    let mut world = World::new()?;
    world.configure(&policy("initial_rto = \"100ms\"\nrto_min = \"8ms\""))?;
    world.start_under(&bounded(&["rto-agent.service", "open-sockets.conf"])?)?;
    let _pair = begin(&world, plain())?;
    let walk = world.json(&["apply"])?;
    assert_eq!(walk["skipped"], serde_json::json!([]), "{walk:#}");
    assert_eq!(walk["problems"], serde_json::json!([]), "{walk:#}");
    let (_, counts) = only_policy(&walk);
    assert_eq!(counts["seen"], 2, "{walk:#}");
    let status = world.wait_status("the probe", |status| status["probe"].is_object())?;
    assert_eq!(status["probe"]["verdict"], "good", "{status:#}");
    Ok(())
}

/// The command that starts a daemon with the capabilities of files in `systemd/` and no others.
fn bounded(files: &[&str]) -> anyhow::Result<Vec<String>> {
    let mut set = vec!["--bounding-set=-all".to_owned()];
    for file in files {
        let path = format!("{}/../systemd/{file}", env!("CARGO_MANIFEST_DIR"));
        let text = std::fs::read_to_string(path)?;
        let lines = text.lines();
        let sets = lines.filter_map(|line| line.strip_prefix("CapabilityBoundingSet="));
        for name in sets.flat_map(str::split_whitespace) {
            set.push(name.to_lowercase().replace("cap_", "+"));
        }
    }
    let words = ["setpriv", "--no-new-privs", "--inh-caps=-all"];
    let words = words.into_iter().map(ToOwned::to_owned);
    Ok(words.chain([set.join(",")]).collect())
}
