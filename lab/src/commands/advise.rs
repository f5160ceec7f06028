//! `rto-lab advise`.

use std::{
    fs::File,
    io::Read as _,
    net::IpAddr,
    os::unix::fs::FileTypeExt as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context as _, bail, ensure};
use clap::Args;
use rto_advice::capture::NamedCapture;
use rto_agent_core::printable;
use rto_testbed::agent::find;

use crate::capture;

/// Maximum size of a capture, which is read into memory.
const LARGEST: u64 = 2 << 30;

/// `rto-lab advise`.
#[derive(Debug, Args)]
pub struct Advise {
    /// A capture (pcap or pcapng) taken on the host that the settings are for: tcpdump -s 128 -w FILE tcp
    #[arg(long, value_name = "FILE")]
    pcap: PathBuf,
    /// Only connections with a peer in this prefix; may be repeated
    #[arg(long, short, value_name = "CIDR")]
    cidr: Vec<String>,
    /// An address of the host where the capture was taken; may be repeated
    #[arg(long, value_name = "ADDRESS")]
    host: Vec<IpAddr>,
    /// Maximum share of spurious retransmissions, 0.001% to 50%
    #[arg(long, value_name = "PERCENT", default_value = "0.1%")]
    spurious: String,
    /// Maximum ACK delay of the peers: their delack_max, or rto_min if that is shorter
    #[arg(long, value_name = "DURATION", default_value = "40ms")]
    peer_delack: String,
    /// The capture has only one in this many packets, drawn at random, as sFlow exports them
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..))]
    sampled: Option<u32>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// The agent's binary, which computes the advice [default: next to this one, or in PATH]
    #[arg(long, value_name = "PATH", env = "RTO_AGENT_BIN")]
    agent: Option<PathBuf>,
}

pub(super) fn run(args: &Advise) -> anyhow::Result<()> {
    let bytes = read_capture(&args.pcap)?;
    let at = || printable::path(&args.pcap);
    let mut capture = capture::read(&bytes).with_context(at)?;
    drop(bytes);
    if let Some(every) = args.sampled {
        capture::retain_sampled(&mut capture, every).with_context(at)?;
    }
    let samples = NamedCapture {
        file: args.pcap.clone(),
        capture,
    };
    let mut command = Command::new(find(args.agent.as_deref())?);
    command.args(["advise", "--samples", "-"]);
    for cidr in &args.cidr {
        command.args(["--cidr", cidr]);
    }
    for host in &args.host {
        command.args(["--host", &host.to_string()]);
    }
    command.args(["--spurious", &args.spurious]);
    command.args(["--peer-delack", &args.peer_delack]);
    command.args(args.json.then_some("--json"));
    let mut agent = command
        .stdin(Stdio::piped())
        .spawn()
        .context("rto-agent advise")?;
    let input = agent.stdin.take().context("rto-agent advise: no input")?;
    // It may fail before it has read everything; its error message is then the error.
    let handed_over = serde_json::to_writer(std::io::BufWriter::new(input), &samples);
    if !agent.wait()?.success() {
        bail!("rto-agent advise failed");
    }
    handed_over.context("rto-agent advise")
}

/// A capture's bytes.
pub(crate) fn read_capture(path: &Path) -> anyhow::Result<Vec<u8>> {
    let at = || printable::path(path);
    let mut file = File::open(path).with_context(at)?;
    let meta = file.metadata().with_context(at)?;
    // Which may never end.
    ensure!(
        !meta.file_type().is_char_device(),
        "{}: a device, not a capture",
        at()
    );
    let mut bytes = Vec::new();
    if meta.len() <= LARGEST {
        bytes.reserve(usize::try_from(meta.len()).unwrap_or(0));
        let mut some = (&mut file).take(LARGEST + 1);
        some.read_to_end(&mut bytes).with_context(at)?;
    }
    ensure!(
        meta.len().max(bytes.len() as u64) <= LARGEST,
        "{}: larger than 2 GiB; pass a part of it (editcap -c 1000000), or capture less of each packet (tcpdump -s 128)",
        at()
    );
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endless_or_oddly_named_capture_is_refused() {
        let error = read_capture(Path::new("/dev/zero"))
            .unwrap_err()
            .to_string();
        assert!(error.contains("a device, not a capture"), "{error}");
        let error = read_capture(Path::new("/no/\u{1b}[31m.pcap")).unwrap_err();
        let error = error.to_string();
        assert!(error.contains("\\u{1b}[31m.pcap"), "{error}");
    }
}
