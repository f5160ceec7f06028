//! `rto-agent top` on a terminal: what it shows, its keys, and how it leaves the terminal.

use nix::sys::signal::Signal;
use rto_tests::{
    agent::World,
    netns::SERVER_V4,
    pty::Terminal,
    traffic::{Connect, Traffic},
};

use super::{Test, near, to};

pub(super) const TESTS: &[Test] = &[
    ("rates_histograms_and_a_clean_end", shows),
    ("every_end_leaves_the_terminal_as_it_was", ends),
    ("a_daemon_that_hangs_keeps_no_key_waiting", hangs),
    ("a_daemon_that_is_gone_is_told_and_found_again", gone),
    ("without_a_terminal_it_says_so", no_terminal),
];

const PORT: u16 = 4900;

fn world() -> anyhow::Result<(World, Traffic)> {
    let world = World::with(&near("\"10.88.0.0/24\""))?;
    let server = world.serve(to(SERVER_V4, PORT))?;
    Ok((world, server))
}

fn connect(world: &World) -> anyhow::Result<()> {
    let client = world.connect(to(SERVER_V4, PORT), &Connect::default())?;
    assert_eq!(client.outcome()?.result, "connected");
    Ok(())
}

/// `top`, once it shows the policy.
fn top(world: &World) -> anyhow::Result<Terminal> {
    let mut top = world.on_terminal(&["top", "--interval", "200ms"])?;
    top.wait_for("the policy", |screen| rate(screen).is_some())?;
    Ok(top)
}

/// What the row of "near" has as CONN/S.
fn rate(screen: &str) -> Option<&str> {
    let row = screen.lines().find(|line| line.starts_with("near "))?;
    row.split_whitespace().nth(1)
}

fn shows() -> anyhow::Result<()> {
    let (world, _server) = world()?;
    let mut top = top(&world)?;
    for _ in 0..3 {
        connect(&world)?;
    }
    // No other column: none of the connections ends.
    let is_some = |rate: &str| rate.parse().is_ok_and(|rate: f64| rate > 0.0);
    let screen = top.wait_for("a rate", |screen| rate(screen).is_some_and(is_some))?;
    assert!(screen.contains("every 200ms, last look 0s ago"), "{screen}");
    assert!(screen.lines().count() <= 24, "{screen}");
    top.wait_for("an end of it", |screen| rate(screen) == Some("0"))?;
    top.press("\r")?;
    let screen = top.wait_for("the histograms", |screen| screen.contains("Esc back"))?;
    for text in [
        "active: 3 connections, 0 retransmissions (0%)",
        "passive: 3 connections",
        "unknown: none",
        "handshake time p50 ",
        "█",
    ] {
        assert!(screen.contains(text), "{text}:\n{screen}");
    }
    top.press("\u{1b}")?;
    top.wait_for("the table", |screen| rate(screen).is_some())?;
    top.press("/none\r")?;
    top.wait_for("no row", |screen| screen.contains("no policy's name has"))?;
    top.press("/\u{1b}")?;
    top.wait_for("the row again", |screen| rate(screen).is_some())?;
    // So small that nothing fits, and back.
    top.resize(1, 1)?;
    top.wait_for("next to nothing", |screen| screen.trim().len() <= 1)?;
    top.resize(30, 100)?;
    top.wait_for("all columns", |screen| screen.contains("CONNS"))?;
    top.press("q")?;
    let left = top.left()?;
    assert!(left.is_clean(), "{left:?}");
    Ok(())
}

fn ends() -> anyhow::Result<()> {
    let (world, _server) = world()?;
    for key in ["\u{1b}", "\u{3}"] {
        let mut top = top(&world)?;
        top.press(key)?;
        let left = top.left()?;
        assert!(left.is_clean(), "{key:?}: {left:?}");
    }
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP] {
        let top = top(&world)?;
        top.signal(signal)?;
        let left = top.left()?;
        assert!(left.is_clean(), "{signal}: {left:?}");
    }
    Ok(())
}

fn hangs() -> anyhow::Result<()> {
    let (world, _server) = world()?;
    let mut top = top(&world)?;
    world.signal(Signal::SIGSTOP)?;
    top.wait_for("the delay", |screen| screen.contains("no answer for 3s"))?;
    top.press("?")?;
    top.wait_for("the help", |screen| screen.contains("any key closes"))?;
    top.press("x")?;
    top.wait_for("the table", |screen| !screen.contains("any key closes"))?;
    world.signal(Signal::SIGCONT)?;
    top.wait_for("an answer", |screen| screen.contains("last look 0s ago"))?;
    world.signal(Signal::SIGSTOP)?;
    top.press("q")?;
    let left = top.left();
    world.signal(Signal::SIGCONT)?;
    assert!(left?.is_clean());
    Ok(())
}

fn gone() -> anyhow::Result<()> {
    let (mut world, _server) = world()?;
    let mut top = top(&world)?;
    world.end(Signal::SIGTERM)?;
    // The screen may be read halfway through a picture: what belongs together is waited for.
    top.wait_for("the loss", |screen| {
        screen.contains("no answer for")
            && screen.contains("no rto-agent daemon answers at")
            && rate(screen).is_some()
    })?;
    world.start()?;
    top.wait_for("an answer", |screen| {
        screen.contains("last look") && !screen.contains("no rto-agent")
    })?;
    top.press("q")?;
    assert!(top.left()?.is_clean());
    // From the beginning it is an error.
    world.end(Signal::SIGTERM)?;
    let left = world.on_terminal(&["top"])?.left()?;
    assert_eq!(left.status.code(), Some(1));
    assert!(left.settings && left.screen, "{left:?}");
    Ok(())
}

fn no_terminal() -> anyhow::Result<()> {
    let world = World::with(&near("\"10.88.0.0/24\""))?;
    let said = world.cli_fails(&["top"])?;
    assert!(
        said.contains("needs a terminal; rto-agent stats --watch prints"),
        "{said}"
    );
    Ok(())
}
