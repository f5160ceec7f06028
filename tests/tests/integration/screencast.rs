//! The screencast of the README: a first look at the agent, recorded from the binary on a terminal of 80 columns.
//!
//! `UPDATE=1` rewrites the page and `docs/screencast.cast` (asciicast v2).

use std::iter;

use rto_tests::pty::Terminal;

use crate::prelude::*;

const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../README.md");
const CAST: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/screencast.cast");
const BEGIN: &str = "<!-- screencast -->\n\n```console\n";
const END: &str = "```\n\n<!-- end of the screencast -->\n";

const CONNECTIONS: u64 = 3;

/// The usual directory of the configuration.
const ETC: &str = "/etc/rto-agent";
const POLICY: &str = "[policy.same-zone]\ncidrs = [\"10.88.0.0/24\"]\ninitial_rto = \"100ms\"\n";

test!(the_readme_shows_what_the_binary_prints);
fn the_readme_shows_what_the_binary_prints() -> anyhow::Result<()> {
    let recorded = record()?;
    let page = fs::read_to_string(PAGE)?;
    let (before, rest) = page.split_once(BEGIN).context("no screencast")?;
    let (shown, after) = rest.split_once(END).context("no end of it")?;
    if std::env::var_os("UPDATE").is_some() {
        fs::write(PAGE, format!("{before}{BEGIN}{recorded}{END}{after}"))?;
        fs::write(CAST, cast(&recorded)?)?;
        return Ok(());
    }
    assert_eq!(
        comparable(&recorded),
        comparable(shown),
        "UPDATE=1 records it again; recorded:\n{recorded}"
    );
    assert_eq!(fs::read_to_string(CAST)?, cast(shown)?, "UPDATE=1");
    Ok(())
}

/// The output of the lines, one after the other.
fn record() -> anyhow::Result<String> {
    let mut screen = Screen::new()?;
    screen.run("rto-agent check")?;
    screen.start()?;
    screen.run(&format!("rto-agent lookup {SERVER_V4}"))?;
    screen.connect()?;
    screen.run("rto-agent stats")?;
    Ok(screen.shown)
}

struct Screen {
    env: TestEnv,
    shown: String,
}

impl Screen {
    fn new() -> anyhow::Result<Self> {
        let env = TestEnv::new()?;
        // All connections are sampled, so that a few are enough to show times.
        env.configure("sampling = 1\n")?;
        fs::write(env.policies_dir().join("10-zone.toml"), POLICY)?;
        let shown = String::new();
        Ok(Self { env, shown })
    }

    /// The directory of the configuration; [`ETC`] is shown instead.
    fn etc(&self) -> anyhow::Result<String> {
        let config = self.env.config();
        let dir = config.parent().and_then(Path::to_str);
        Ok(dir.context("its name")?.to_owned())
    }

    /// Runs a shell command line.
    fn run(&mut self, line: &str) -> anyhow::Result<()> {
        let agent = self.env.command(&[]);
        let programs = Path::new(agent.get_program()).parent();
        let programs = programs.context("no directory")?.display();
        let variables = agent.get_envs();
        let mut command = Command::new("sh");
        command
            .args(["-c", &line.replace(ETC, &self.etc()?)])
            .envs(variables.filter_map(|(name, value)| Some((name, value?))))
            .env("PATH", format!("{programs}:/usr/sbin:/usr/bin:/sbin:/bin"));
        let printed = Terminal::start(command)?.printed()?;
        self.show(line, &printed.replace(&self.etc()?, ETC));
        Ok(())
    }

    fn start(&mut self) -> anyhow::Result<()> {
        self.env.start()?;
        self.show("rto-agent run 2>>/var/log/rto-agent.log &", "");
        Ok(())
    }

    fn show(&mut self, line: &str, printed: &str) {
        let gap = if self.shown.is_empty() { "" } else { "\n" };
        let end = if printed.is_empty() { "" } else { "\n" };
        self.shown += &format!("{gap}$ {line}\n{printed}{end}");
    }

    /// Makes connections that the policy covers, and waits until they are counted.
    fn connect(&mut self) -> anyhow::Result<()> {
        let server = to(SERVER_V4, PORT);
        let _server = self.env.serve(server)?;
        for _ in 0..CONNECTIONS {
            self.env.connect_and_close(server)?;
        }
        let counted = |stats: &Value| {
            let policy = &stats["policies"]["same-zone"];
            ["active", "passive"].iter().all(|direction| {
                let direction = &policy[direction];
                direction["connections"] == CONNECTIONS
                    && direction["connect_time"]["count"] == CONNECTIONS
            })
        };
        let stats = || self.env.json(&["stats"]);
        eventually_seen("their statistics", TIMEOUT, stats, counted)?;
        Ok(())
    }
}

/// The parts that are the same on every kernel and however busy the host is: without settings that follow the host,
/// jiffies, measured times, and the word that the edge of the terminal cuts.
fn comparable(text: &str) -> Vec<String> {
    let lines = text.lines().map(str::trim_start);
    let lines = lines.filter(|line| !line.starts_with("syn_"));
    let line = |line: &str| {
        let is_measured = line.contains(" outgoing ") || line.contains(" incoming ");
        if let Some((value, _)) = line.split_once(" at HZ=") {
            let without_jiffies = value.rsplit_once(", ");
            return without_jiffies.map_or(value, |(value, _)| value).to_owned();
        }
        let words = line.split_whitespace();
        let words = words.filter(|word| !word.ends_with('…'));
        let words = words.map(|word| match is_measured && is_time(word) {
            true => "#",
            false => word,
        });
        words.collect::<Vec<_>>().join(" ")
    };
    lines.map(line).collect()
}

/// Whether a word is a measured time, or the sign for a missing one.
fn is_time(word: &str) -> bool {
    let number = word.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    word == "-" || (number.len() < word.len() && number.parse::<f64>().is_ok())
}

/// A recording for `asciinema play`: input appears letter by letter, the output after it at once.
fn cast(shown: &str) -> anyhow::Result<String> {
    const LETTER_MS: u32 = 40;
    const LINE_MS: u32 = 20;
    const READING_MS: u32 = 1500;
    let mut at_ms = 0;
    let mut events = Vec::new();
    for line in shown.lines() {
        let mut event = |after_ms: u32, text: &str| -> anyhow::Result<()> {
            at_ms += after_ms;
            let at = f64::from(at_ms) / 1000.0;
            events.push(serde_json::to_string(&(at, "o", text))?);
            Ok(())
        };
        match line.strip_prefix("$ ") {
            None => event(LINE_MS, &format!("{line}\r\n"))?,
            Some(typed) => {
                event(READING_MS, "$ ")?;
                for letter in typed.chars() {
                    event(LETTER_MS, &letter.to_string())?;
                }
                event(LETTER_MS, "\r\n")?;
            }
        }
    }
    let header = serde_json::json!({
        "version": 2, "width": 80, "height": 24, "title": "A first look at rto-agent"
    });
    let all: Vec<String> = iter::once(header.to_string()).chain(events).collect();
    Ok(all.join("\n") + "\n")
}
