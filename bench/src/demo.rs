//! `cargo xtask demo`: duration of connect() through outages without and with the agent, in two temporary network
//! namespaces and a temporary cgroup.

use std::{
    fs,
    net::{Ipv4Addr, SocketAddr},
    path::Path,
    time::Duration,
};

use rto_testbed::{
    env::TestEnv,
    netns::{Lost, SERVER_V4, SERVER_V4_OTHER, lose_handshakes},
    workload::{
        Program,
        attempts::{Attempts, Own},
        traffic::Traffic,
    },
};

use crate::{process::helper, result::millis};

/// An address that the policy covers, and one that it does not cover.
const COVERED: &str = SERVER_V4;
const OTHER: &str = SERVER_V4_OTHER;
const PORT: u16 = 9;
/// Durations for which SYNs are lost, milliseconds; each connect() has one of them.
const OUTAGES_MS: [u16; 6] = [100, 300, 600, 900, 1400, 2600];

const POLICY: &str = "\n[policy.same-zone]\ncidrs = [\"10.88.0.0/24\"]\ninitial_rto = \"100ms\"\n";

pub(crate) fn run(programs: &Path) -> anyhow::Result<()> {
    let mut env = TestEnv::of(programs.join("rto-agent"))?;
    env.configure(POLICY)?;
    let program = Program::at(&helper(programs));
    let on = SocketAddr::from((Ipv4Addr::UNSPECIFIED, PORT));
    let _server = Traffic::serve(&env.net.server, None, on)?;
    println!(
        "Two namespaces. Connections to a server lose all SYNs for some time, each for another:\n"
    );
    show("SYNs lost for", OUTAGES_MS.map(|ms| format!("{ms} ms")));
    println!("Without rto-agent, connect() takes");
    // Different ports, because ports of closed connections are still in use (TIME_WAIT).
    let mut ports = 1_000..;
    let mut connect = |env: &TestEnv, address: &str| connect(env, &program, address, &mut ports);
    connect(&env, COVERED)?;
    println!("\n# config.toml\n{}", fs::read_to_string(env.config())?);

    env.start()?;
    println!("$ rto-agent run &");
    for address in [COVERED, OTHER] {
        show_verb(&env, &["lookup", address])?;
    }
    println!("\nWith rto-agent");
    for address in [COVERED, OTHER] {
        connect(&env, address)?;
    }
    println!();
    show_verb(&env, &["list"])?;
    println!();
    show_verb(&env, &["detach"])?;

    println!("\nWithout it again");
    connect(&env, COVERED)
}

/// Runs a verb of the CLI and shows it as on a terminal.
fn show_verb(env: &TestEnv, words: &[&str]) -> anyhow::Result<()> {
    let output = env.cli(words)?;
    println!("$ rto-agent {}\n{}", words.join(" "), output.trim_end());
    Ok(())
}

/// Connects through all outages at once in the agent's cgroup, and prints the durations.
fn connect(
    env: &TestEnv,
    program: &Program,
    address: &str,
    ports: &mut impl Iterator<Item = u16>,
) -> anyhow::Result<()> {
    let outages = OUTAGES_MS.map(|ms| Duration::from_millis(ms.into()));
    let each = outages.into_iter().zip(ports);
    let each: Vec<_> = each
        .map(|(outage, port)| (port, Lost::Syns, outage))
        .collect();
    lose_handshakes(&env.net.client, &env.net.server, &each)?;
    let to = format!("{address}:{PORT}").parse()?;
    let ends = each
        .iter()
        .map(|(port, ..)| (Some((Ipv4Addr::UNSPECIFIED, *port).into()), to));
    let ends = vec![ends.collect()];
    let cgroup = Some(env.cgroup.path());
    let mut attempts = Attempts::load(program, &env.net.client, cgroup, ends, Own::new())?;
    attempts.start()?;
    let outcomes = attempts.outcomes()?;
    let took = outcomes
        .iter()
        .map(|one| format!("{:.0} ms", millis(one.took)));
    show(&format!("to {address}"), took);
    Ok(())
}

fn show(name: &str, cells: impl IntoIterator<Item = String>) {
    let cells = cells.into_iter().map(|cell| format!("{cell:>9}"));
    println!("  {name:14}{}", cells.collect::<String>());
}
