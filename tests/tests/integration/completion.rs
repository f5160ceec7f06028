//! Completion in the shells themselves: on a terminal, with the Tab key.

use rto_tests::pty::Terminal;

use crate::prelude::*;

const POLICIES: &str = "[policy.near-by]\ninitial_rto = \"100ms\"\ncidrs = [\"10.88.0.0/24\", \"fd88:7::/64\"]\n\
    [policy.other]\ninitial_rto = \"50ms\"\ncidrs = [\"192.0.2.0/24\"]\n";
/// A prompt that contains none of the user's own settings.
const PROMPT: &str = "rto> ";

/// The text typed before Tab, and the line after it.
const LINES: [(&str, &str); 12] = [
    ("rto-agent loo", "rto-agent lookup"),
    ("rto-agent remove --un", "rto-agent remove --undo"),
    ("rto-agent remove 192", "rto-agent remove 192.0.2.0/24"),
    ("rto-agent remove fd88:7", "rto-agent remove fd88:7::/64"),
    (
        "rto-agent add 10.1.0.0/16 --policy nea",
        "rto-agent add 10.1.0.0/16 --policy near-by",
    ),
    (
        "rto-agent add 10.1.0.0/16 --policy=nea",
        "rto-agent add 10.1.0.0/16 --policy=near-by",
    ),
    ("rto-agent stats -p unm", "rto-agent stats -p unmatched"),
    (
        "rto-agent watch --cidr fd",
        "rto-agent watch --cidr fd88:7::/64",
    ),
    (
        "rto-agent add ::1 --syn-ack-rto k",
        "rto-agent add ::1 --syn-ack-rto keep",
    ),
    (
        "rto-agent run --log-format j",
        "rto-agent run --log-format json",
    ),
    ("rto-agent completions fi", "rto-agent completions fish"),
    // Hidden commands are not completed.
    ("rto-agent __pro", "rto-agent __pro"),
];

/// Starts a daemon and a shell with the completion script and its own prompt, and checks all lines.
fn shell(name: &str, arguments: &[&str], setup: &str) -> anyhow::Result<()> {
    let env = TestEnv::with(POLICIES)?;
    let script = env.dir().join("_rto-agent");
    fs::write(&script, env.cli(&["completions", name])?)?;
    let agent = env.command(&[]);
    let bin = Path::new(agent.get_program())
        .parent()
        .context("no folder")?;
    let mut command = Command::new(name);
    command
        .args(arguments)
        .env(
            "PATH",
            format!("{}:{}", bin.display(), std::env::var("PATH")?),
        )
        .env("RTO_AGENT_SOCKET", env.socket())
        .env("HOME", env.dir())
        .env("ZDOTDIR", env.dir())
        .env_remove("XDG_CONFIG_HOME")
        .env("PS1", PROMPT)
        .env("LANG", "C.UTF-8");
    let mut terminal = Terminal::start(command)?;
    let setup = setup.replace("SCRIPT", &script.to_string_lossy());
    terminal.resize(24, 120)?;
    terminal.wait_for("the shell", |screen| !screen.trim().is_empty())?;
    terminal.press(&format!("{setup}\r"))?;
    terminal.wait_for("a prompt", |screen| last(screen) == PROMPT.trim_end())?;
    for (typed, line) in LINES {
        terminal.press(typed)?;
        terminal.wait_for(typed, |screen| screen.contains(typed))?;
        terminal.press("\t")?;
        if typed == line {
            // A completion would appear before the next key is echoed.
            terminal.press("X")?;
            terminal.wait_for("nothing added", |screen| has(screen, &format!("{line}X")))?;
        } else {
            terminal
                .wait_for(line, |screen| has(screen, line))
                .with_context(|| format!("{name}: {typed}"))?;
        }
        // Ctrl-U drops the line, Ctrl-L clears the screen above it (without terminfo it prints one more prompt).
        terminal.press("\u{15}\u{c}")?;
        let is_prompt = |line: &str| ["", PROMPT.trim_end()].contains(&line.trim());
        terminal.wait_for("an empty line", |screen| screen.lines().all(is_prompt))?;
    }
    // With several candidates the shell lists them.
    terminal.press("rto-agent lookup --\t\t")?;
    let screen = terminal.wait_for("options", |screen| screen.contains("--json"))?;
    ensure!(screen.contains("--socket"), "{screen}");
    Ok(())
}

fn last(screen: &str) -> &str {
    screen.trim_end().lines().last().unwrap_or_default().trim()
}

/// Whether the line being typed is this one.
fn has(screen: &str, line: &str) -> bool {
    let typed = screen.lines().filter_map(|l| l.strip_prefix(PROMPT));
    typed.map(str::trim_end).any(|typed| typed == line)
}

test!(in_bash, needs = [BASH]);
fn in_bash() -> anyhow::Result<()> {
    shell(
        "bash",
        &["--norc", "--noprofile", "-i"],
        "source SCRIPT; clear",
    )
}

test!(in_zsh, needs = [ZSH]);
fn in_zsh() -> anyhow::Result<()> {
    // -f: no start-up files of the system or the user.
    let setup = "PS1='rto> '; autoload -Uz compinit; compinit -u -D; source SCRIPT; clear";
    shell("zsh", &["-f", "-i"], setup)
}

test!(in_fish, needs = [FISH]);
fn in_fish() -> anyhow::Result<()> {
    let setup = "function fish_prompt; echo -n 'rto> '; end; set -g fish_greeting; \
                 set -g fish_autosuggestion_enabled 0; source SCRIPT; clear";
    shell("fish", &["--no-config", "--private", "-i"], setup)
}

test!(completion_without_daemon_is_empty);
fn completion_without_daemon_is_empty() -> anyhow::Result<()> {
    let env = TestEnv::new()?;
    let mut command = env.command(&["--", "rto-agent", "remove", ""]);
    command.env("RTO_AGENT_COMPLETE", "fish");
    let output = command.output()?;
    ensure!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout)?;
    ensure!(text.contains("--socket"), "{text}");
    ensure!(text.lines().all(|line| line.starts_with('-')), "{text}");
    ensure!(output.stderr.is_empty(), "{:?}", output.stderr);
    Ok(())
}
