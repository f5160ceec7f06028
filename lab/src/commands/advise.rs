//! `rto-lab advise`.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context as _, bail, ensure};
use clap::Args;
use rto_model::capture::{self, NamedCapture};
use rto_testbed::agent::find;

/// Largest capture: it is read as a whole.
const LARGEST: u64 = 2 << 30;

/// `rto-lab advise`.
#[derive(Debug, Args)]
pub struct Advise {
    /// A capture (pcap or pcapng) of the host that is to have the settings: tcpdump -s 128 -w FILE tcp
    #[arg(long, value_name = "FILE")]
    pcap: PathBuf,
    /// Only connections with a peer in this prefix; may be given again for others
    #[arg(long, short, value_name = "CIDR")]
    cidr: Vec<String>,
    /// The share of spurious retransmissions that is not to be exceeded, 0.001% to 50%
    #[arg(long, value_name = "PERCENT", default_value = "0.1%")]
    spurious: String,
    /// How long the peers delay an ACK: their delack_max, or rto_min if that is shorter
    #[arg(long, value_name = "DURATION", default_value = "40ms")]
    peer_delack: String,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// The agent's binary, which gives the advice [default: beside this one, or on the path]
    #[arg(long, value_name = "PATH", env = "RTO_AGENT_BIN")]
    agent: Option<PathBuf>,
}

pub(super) fn run(args: &Advise) -> anyhow::Result<()> {
    let bytes = read_capture(&args.pcap)?;
    let at = || args.pcap.display().to_string();
    let samples = NamedCapture {
        file: args.pcap.clone(),
        capture: capture::read(&bytes).with_context(at)?,
    };
    drop(bytes);
    let mut command = Command::new(find(args.agent.as_deref())?);
    command.args(["advise", "--samples", "-"]);
    for cidr in &args.cidr {
        command.args(["--cidr", cidr]);
    }
    command.args(["--spurious", &args.spurious]);
    command.args(["--peer-delack", &args.peer_delack]);
    command.args(args.json.then_some("--json"));
    let mut agent = command
        .stdin(Stdio::piped())
        .spawn()
        .context("rto-agent advise")?;
    let input = agent.stdin.take().context("rto-agent advise: no input")?;
    // It may refuse before it has read all; what it says then is the error.
    let handed_over = serde_json::to_writer(std::io::BufWriter::new(input), &samples);
    if !agent.wait()?.success() {
        bail!("rto-agent advise failed");
    }
    handed_over.context("rto-agent advise")
}

/// A capture's bytes.
pub(crate) fn read_capture(path: &Path) -> anyhow::Result<Vec<u8>> {
    let at = || path.display().to_string();
    let length = fs::metadata(path).with_context(at)?.len();
    ensure!(
        length <= LARGEST,
        "{}: more than 2 GiB; give a part of it (editcap -c 1000000), or capture less of each packet (tcpdump -s 128)",
        path.display()
    );
    fs::read(path).with_context(at)
}
