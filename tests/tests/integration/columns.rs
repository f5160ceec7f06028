//! What the verbs print on a terminal of 80 columns. `top` and `watch` have tests of their own.

use rto_testbed::workload::arrivals::{Arrivals, Clients};
use rto_tests::{path::Path as Link, pty::Terminal};

use crate::prelude::*;

const COLUMNS: usize = 80;
/// A policy's name of almost the greatest length.
const LONG: &str = "the-whole-data-centre-in-frankfurt-and-everything-beside-it";
const V6: &str = "2001:db8:1234:5678:9abc:def0:1234:5678";

/// Policies with a long name and address, a learnt timer, a control arm, and a timer that is shorter than its path.
fn policies() -> String {
    format!(
        "sampling = 1\ncount_unmatched = true\n\
         [policy.{LONG}]\ncidrs = [\"10.0.0.0/8\", \"{V6}\"]\ninitial_rto = \"15ms\"\nrto_min = \"20ms\"\n\
         [policy.learnt]\ncidrs = [\"10.88.1.0/24\"]\ninitial_rto = \"auto\"\n\
         [policy.compared]\ncidrs = [\"10.88.0.0/24\", \"fd88::/64\"]\ninitial_rto = \"100ms\"\nholdout = \"20%\"\n\
         [policy.short]\ncidrs = [\"10.89.0.0/24\"]\ninitial_rto = \"40ms\"\n"
    )
}

/// The daemon with these policies, after connections to all of their peers.
fn busy() -> anyhow::Result<Link> {
    const RTT: Duration = Duration::from_millis(150);
    const CONNECTIONS: u32 = 400;
    let path = Link::new(TestEnv::with(&policies())?, RTT)?;
    let mut slow = path.clients(50, 5, TIMEOUT)?;
    slow.begin(100)?;
    let env = &path.env;
    for address in [SERVER_V4, SERVER_V4_OTHER, SERVER_V6] {
        let address = to(address, PORT);
        let _server = env.echo_server(address)?;
        let clients = Clients::new(address, Duration::from_millis(1));
        let mut clients = Arrivals::start(&env.net.client, Some(env.cgroup.path()), &clients)?;
        clients.begin(CONNECTIONS)?;
        clients.done()?;
    }
    slow.done()?;
    env.wait_status("the fallback", |status| status["healthy"] == false)?;
    Ok(path)
}

test!(verbs_fit_80_columns_without_broken_values);
fn verbs_fit_80_columns_without_broken_values() -> anyhow::Result<()> {
    let path = busy()?;
    let long = format!("stats --policy {LONG}");
    let lookup = format!("lookup {SERVER_V4} {SERVER_V6} 10.89.0.2 10.1.1.1 192.0.2.1 {V6}");
    let add = format!("add 2001:db8:1234:5678:9abc:def0:1234:5679 --policy {LONG} --ttl 10m");
    let lines = [
        "check",
        "check --verbose",
        "add 10.7.0.0/24 --initial-rto 60ms",
        &add,
        "list",
        &lookup,
        "stats",
        "stats --all",
        "stats --policy compared",
        &long,
        "tune",
        "status",
        "reload --dry-run",
        "reload",
        "verify",
        "advise 10.88.0.0/24",
        "advise --policy short",
        "advise --policy unmatched",
        "discover",
        "apply",
        "doctor",
        "doctor --verbose",
        "doctor --self-test",
        "explain :1",
        "stats --policy none",
        "remove 10.88.1.0/24",
        "tune freeze learnt",
        "detach --restore",
        "list",
        "status",
        "attach",
        "add 10.7.0.0/33",
        "no-such-verb",
    ];
    for line in lines {
        let args: Vec<&str> = line.split(' ').collect();
        let piped = || -> anyhow::Result<String> {
            let output = path.env.try_cli(&args)?;
            let [out, err] = [output.stdout, output.stderr];
            Ok(format!(
                "{}{}",
                String::from_utf8_lossy(&out),
                String::from_utf8_lossy(&err)
            ))
        };
        loop {
            let wide = if changes(line) { None } else { Some(piped()?) };
            let printed = Terminal::all_printed(path.env.command(&args))?;
            let checked =
                check(&printed, wide.as_deref()).with_context(|| format!("{line}:\n{printed}"));
            let Err(error) = checked else { break };
            // `doctor` also lists the host's other programs, such as probes that come and go.
            let is_same =
                wide.is_none_or(|wide| piped().is_ok_and(|now| shape(&now) == shape(&wide)));
            if is_same || !line.starts_with("doctor") {
                return Err(error);
            }
        }
    }
    Ok(())
}

test!(help_fits_80_columns);
fn help_fits_80_columns() -> anyhow::Result<()> {
    let env = TestEnv::new()?;
    let help = env.cli(&["--help"])?;
    let verbs = help.lines().filter_map(|line| {
        let verb = line.strip_prefix("  ")?.split(' ').next()?;
        verb.starts_with(|c: char| c.is_ascii_lowercase())
            .then_some(verb)
    });
    let verbs: Vec<_> = verbs.filter(|verb| *verb != "help").collect();
    ensure!(verbs.len() > 20, "{help}");
    for verb in verbs {
        let printed = Terminal::all_printed(env.command(&[verb, "--help"]))?;
        check(&printed, None).with_context(|| verb.to_owned())?;
        let examples = printed.split("Examples:\n").nth(1).context("no examples")?;
        let broken = examples
            .lines()
            .find(|line| !line.starts_with("  rto-agent"));
        ensure!(broken.is_none(), "{examples}");
    }
    Ok(())
}

/// Whether the line changes what the next one prints.
fn changes(line: &str) -> bool {
    let verb = line.split(' ').next().unwrap_or_default();
    ["add", "remove", "reload", "detach", "attach", "apply"].contains(&verb)
        || line.starts_with("tune freeze")
        // Measured anew each time.
        || line.contains("--self-test")
}

/// No line is wider than the terminal, each word is one of those without a terminal, and no name is internal.
fn check(printed: &str, wide: Option<&str>) -> anyhow::Result<()> {
    ensure!(!printed.trim().is_empty(), "nothing was printed");
    let is_wide = |line: &&str| line.chars().count() > COLUMNS;
    let too_wide = printed.lines().find(is_wide);
    ensure!(too_wide.is_none(), "too wide: {too_wide:?}");
    let words: BTreeSet<String> = wide
        .into_iter()
        .flat_map(str::split_whitespace)
        .map(shape)
        .collect();
    for line in printed
        .lines()
        .filter(|line| !line.ends_with("more: --wide)"))
    {
        for word in line.split_whitespace().filter(|word| *word != "…") {
            let is_whole = wide.is_none() || words.contains(&shape(word));
            ensure!(is_whole && !word.contains('…'), "broken: {word} of {line}");
        }
        let internal = ["active  ", "passive", "(s)", "(es)"]
            .into_iter()
            .find(|name| line.contains(name));
        ensure!(internal.is_none(), "{internal:?}: {line}");
    }
    Ok(())
}

/// A word with its digits left out, because times go on.
fn shape(word: &str) -> String {
    let mut shape = String::new();
    for c in word.chars() {
        match c.is_ascii_digit() {
            true if shape.ends_with('#') => {}
            true => shape.push('#'),
            false => shape.push(c),
        }
    }
    shape
}
