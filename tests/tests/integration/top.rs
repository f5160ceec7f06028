//! `rto-agent top` on a terminal: its display, its keys, and the state of the terminal afterwards.

use rto_tests::pty::Terminal;

use crate::prelude::*;

fn env() -> anyhow::Result<(TestEnv, Traffic)> {
    let guarded = near("\"10.88.0.0/24\"").replace("\"off\"", "\"on\"");
    let env = TestEnv::with(&format!("sampling = 1\n{guarded}"))?;
    let server = env.serve(to(SERVER_V4, PORT))?;
    Ok((env, server))
}

fn connect(env: &TestEnv) -> anyhow::Result<()> {
    env.connect_and_close(to(SERVER_V4, PORT))
}

/// Starts `top` and waits until it shows the policy.
fn top(env: &TestEnv) -> anyhow::Result<Terminal> {
    let mut top = Terminal::start(env.command(&["top", "--interval", "200ms"]))?;
    top.wait_for("the policy", |screen| rate(screen).is_some())?;
    Ok(top)
}

/// The CONN/S cell in the row of "near".
fn rate(screen: &str) -> Option<f64> {
    let row = screen.lines().find(|line| line.starts_with("near "))?;
    row.split_whitespace().nth(1)?.parse().ok()
}

/// Whether the statistics of "near" have this number of connections in a direction.
fn has_row(screen: &str, direction: &str, connections: &str) -> bool {
    screen.lines().any(|line| {
        let words: Vec<_> = line.split_whitespace().take(3).collect();
        words == ["near", direction, connections]
    })
}

test!(rates_histograms_and_a_clean_end);
fn rates_histograms_and_a_clean_end() -> anyhow::Result<()> {
    let (env, _server) = env()?;
    let mut top = top(&env)?;
    for _ in 0..3 {
        connect(&env)?;
    }
    // No other column changes, as none of the connections ends.
    let screen = top.wait_for("a rate", |screen| rate(screen) > Some(0.0))?;
    assert!(screen.contains("every 200ms, updated 0s ago"), "{screen}");
    assert!(screen.lines().count() <= 24, "{screen}");
    top.wait_for("an end of it", |screen| rate(screen) == Some(0.0))?;
    top.press("\r")?;
    let screen = top.wait_for("statistics", |screen| screen.contains("Esc back"))?;
    for direction in ["outgoing", "incoming"] {
        assert!(has_row(&screen, direction, "3"), "{screen}");
    }
    top.press("jjjjjjjjjjjjjjjj")?;
    top.wait_for("the histogram", |screen| {
        screen.contains("connect time: 3") && screen.contains("###")
    })?;
    top.press("\u{1b}")?;
    top.wait_for("the table", |screen| rate(screen).is_some())?;
    top.press("u")?;
    let screen = top.wait_for("the timers", |screen| screen.contains("next: "))?;
    assert!(screen.contains("outgoing: 100ms, configured"), "{screen}");
    top.press("\u{1b}")?;
    top.wait_for("the table again", |screen| rate(screen).is_some())?;
    top.press("/none\r")?;
    top.wait_for("no row", |screen| {
        screen.contains("no policy's name contains")
    })?;
    top.press("/\u{1b}")?;
    top.wait_for("the row again", |screen| rate(screen).is_some())?;
    // Resize the terminal so small that nothing fits, and back.
    top.resize(1, 1)?;
    top.wait_for("next to nothing", |screen| screen.trim().len() <= 1)?;
    top.resize(30, 120)?;
    top.wait_for("all columns", |screen| screen.contains("CONNS"))?;
    top.press("q")?;
    let left = top.left()?;
    assert!(left.is_clean(), "{left:?}");
    Ok(())
}

test!(the_selection_follows_its_policy);
/// Rows are sorted by their rates, which change all the time.
fn the_selection_follows_its_policy() -> anyhow::Result<()> {
    let idle = "[policy.idle]\nrto_min = \"100ms\"\n";
    let env = TestEnv::with(&format!("{}{idle}", near("\"10.88.0.0/24\"")))?;
    let _server = env.serve(to(SERVER_V4, PORT))?;
    let at = |screen: &str, name: &str| screen.lines().position(|line| line.starts_with(name));
    let is_first = |screen: &str, first: &str, second: &str| {
        at(screen, first).is_some() && at(screen, first) < at(screen, second)
    };
    let mut top = top(&env)?;
    top.wait_for("names in order", |screen| {
        is_first(screen, "idle ", "near ")
    })?;
    // The first row is "idle"; the other is selected, and moves to the top a moment later.
    top.press("j")?;
    connect(&env)?;
    top.wait_for("a busier one", |screen| is_first(screen, "near ", "idle "))?;
    top.press("\r")?;
    top.wait_for("its statistics", |screen| has_row(screen, "outgoing", "1"))?;
    top.press("\u{1b}")?;
    top.wait_for("the table", |screen| rate(screen).is_some())?;
    // A row hidden by a filter is selected again when the filter is removed.
    top.press("/idle\r")?;
    top.wait_for("one row", |screen| rate(screen).is_none())?;
    top.press("\u{1b}")?;
    top.wait_for("both rows", |screen| rate(screen).is_some())?;
    top.press("\r")?;
    top.wait_for("its statistics", |screen| has_row(screen, "outgoing", "1"))?;
    top.press("q")?;
    assert!(top.left()?.is_clean());
    Ok(())
}

test!(every_end_leaves_the_terminal_as_it_was);
fn every_end_leaves_the_terminal_as_it_was() -> anyhow::Result<()> {
    let (env, _server) = env()?;
    for key in ["\u{1b}", "\u{3}"] {
        let mut top = top(&env)?;
        top.press(key)?;
        let left = top.left()?;
        assert!(left.is_clean(), "{key:?}: {left:?}");
    }
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP] {
        let top = top(&env)?;
        top.signal(signal)?;
        let left = top.left()?;
        assert!(left.is_clean(), "{signal}: {left:?}");
    }
    Ok(())
}

test!(top_accepts_keys_while_daemon_hangs);
fn top_accepts_keys_while_daemon_hangs() -> anyhow::Result<()> {
    let (env, _server) = env()?;
    let mut top = top(&env)?;
    env.signal(Signal::SIGSTOP)?;
    top.wait_for("the delay", |screen| screen.contains("no answer for 3s"))?;
    top.press("?")?;
    top.wait_for("the help", |screen| screen.contains("any key closes"))?;
    top.press("x")?;
    top.wait_for("the table", |screen| !screen.contains("any key closes"))?;
    env.signal(Signal::SIGCONT)?;
    top.wait_for("an answer", |screen| screen.contains("updated 0s ago"))?;
    env.signal(Signal::SIGSTOP)?;
    top.press("q")?;
    let left = top.left();
    env.signal(Signal::SIGCONT)?;
    assert!(left?.is_clean());
    Ok(())
}

test!(top_reports_lost_daemon_and_reconnects);
fn top_reports_lost_daemon_and_reconnects() -> anyhow::Result<()> {
    let (mut env, _server) = env()?;
    let mut top = top(&env)?;
    env.end(Signal::SIGTERM)?;
    // The screen may be read while it is drawn, so both texts must appear together.
    top.wait_for("the loss", |screen| {
        screen.contains("no answer for")
            && screen.contains("no rto-agent daemon answers at")
            && rate(screen).is_some()
    })?;
    env.start()?;
    top.wait_for("an answer", |screen| {
        screen.contains("updated") && !screen.contains("no rto-agent")
    })?;
    top.press("q")?;
    assert!(top.left()?.is_clean());
    // At the start a missing daemon is an error.
    env.end(Signal::SIGTERM)?;
    let left = Terminal::start(env.command(&["top"]))?.left()?;
    assert_eq!(left.status.code(), Some(1));
    assert!(left.settings && left.screen, "{left:?}");
    Ok(())
}

test!(top_without_a_terminal_is_refused);
fn top_without_a_terminal_is_refused() -> anyhow::Result<()> {
    let env = TestEnv::with(&near("\"10.88.0.0/24\""))?;
    env.cli_refuses(
        &["top"],
        "needs a terminal; use rto-agent stats --watch instead",
    )?;
    Ok(())
}
