//! `cargo xtask demo`: SYN retransmissions of connections to a black hole without and with the agent, as tcpdump sees
//! them, in two network namespaces and a cgroup that are removed afterwards.

use std::{fs, net::SocketAddr, path::Path, time::Duration};

use rto_testbed::{
    capture::{Capture, gaps, syns},
    env::TestEnv,
    netns::{CLIENT_LINK, SERVER_V4, SERVER_V4_OTHER},
    workload::traffic::Traffic,
};

use crate::{process::helper, result::millis};

/// An address that the policy covers, and one that it does not.
const COVERED: &str = SERVER_V4;
const OTHER: &str = SERVER_V4_OTHER;
const PORT: u16 = 9;
/// SYNs shown of each connection.
const SYNS: usize = 5;
/// Enough for the kernel's own timers: 1, 2, 4 and 8 s before Linux 6.5.
const LIMIT: Duration = Duration::from_secs(30);

const POLICY: &str = "\n[policy.same-zone]\ncidrs = [\"10.88.0.0/24\"]\ninitial_rto = \"100ms\"\n";

pub(crate) fn run(programs: &Path) -> anyhow::Result<()> {
    let mut env = TestEnv::of(programs.join("rto-agent"))?;
    env.net.black_hole(PORT)?;
    env.configure(POLICY)?;
    let helper = helper(programs);
    println!("Two namespaces; {COVERED} and {OTHER} drop every SYN (a black hole).\n");
    println!("Without rto-agent, SYNs are retransmitted after");
    show_gaps(&env, &helper, COVERED)?;
    println!("\n# config.toml\n{}", fs::read_to_string(env.config())?);

    env.start()?;
    println!("$ rto-agent run &");
    for address in [COVERED, OTHER] {
        show_verb(&env, &["lookup", address])?;
    }
    println!("\nWith rto-agent");
    for address in [COVERED, OTHER] {
        show_gaps(&env, &helper, address)?;
    }
    println!();
    show_verb(&env, &["list"])?;
    println!();
    show_verb(&env, &["detach"])?;

    println!("\nWithout it again");
    show_gaps(&env, &helper, COVERED)
}

/// Runs a verb of the CLI and shows it as on a terminal.
fn show_verb(env: &TestEnv, words: &[&str]) -> anyhow::Result<()> {
    let output = env.cli(words)?;
    println!("$ rto-agent {}\n{}", words.join(" "), output.trim_end());
    Ok(())
}

/// Connects in the agent's cgroup, and shows the gaps between the SYNs.
fn show_gaps(env: &TestEnv, helper: &Path, address: &str) -> anyhow::Result<()> {
    let to: SocketAddr = format!("{address}:{PORT}").parse()?;
    let capture = Capture::start(&env.net.client, CLIENT_LINK)?;
    let cgroup = Some(env.cgroup.path());
    let _connecting = Traffic::connect_many_by(helper, &env.net.client, cgroup, to, 1)?;
    let segments = capture.wait_for(LIMIT, |all| syns(all, to).len() >= SYNS)?;
    let gaps: Vec<String> = gaps(&syns(&segments, to))
        .into_iter()
        .map(|gap| format!("{:.0} ms", millis(gap)))
        .collect();
    println!("  to {address}: {}", gaps.join(", "));
    Ok(())
}
