//! What can be said on the command line, and its help. Nothing here does anything.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use crate::{
    policy::{Mptcp, SynAckRto},
    telemetry::LogFormat,
};

/// Per-CIDR TCP retransmission timers for Linux.
///
/// Gives connections to and from listed prefixes their own initial RTO (SYN and SYN-ACK) and
/// other TCP timers, by an eBPF sock_ops program on the root cgroup.
#[derive(Debug, Parser)]
#[command(version, max_term_width = 100, arg_required_else_help = true)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub verb: Verb,
}

/// The verbs.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// The daemon, in the foreground
    Run(Run),
    /// Validate a configuration and print what it would do on this host
    Check(Check),
    /// Add entries, until the boot ends or for good
    Add(Add),
    /// Remove entries, or switch those of the files off
    Remove(Remove),
    /// Entries in force: CIDR, policy, source, settings, hits
    List(Reading),
    /// Which entry a connection to an address takes, and why
    Lookup(Lookup),
    /// What each policy did: connections, retransmissions, handshake and round-trip times
    Stats(Stats),
    /// Retransmissions as they happen
    Watch(Watch),
    /// A live view of what each policy does
    Top(Top),
    /// Attached where, kernel, HZ, last reload, health; exit status 1 if something is amiss
    Status(Reading),
    /// Read the files again; the answer is what changed, or the error
    Reload(Reading),
    /// How long connections would be idle in disruptions, with a setting and without
    Predict(Predict),
    /// Which initial RTO and rto_min would suit what was observed; nothing is changed
    Advise(Advise),
    /// Give sockets that are open already the options of their policies
    Apply(Apply),
    /// Remove every trace from the kernel, daemon or not
    Detach(Detach),
    /// What on this host stands in the way, and how to mend it; exit status 1 on a problem
    Doctor(Doctor),
    /// Completions for a shell, on stdout
    Completions(Completions),
    /// The manual page (roff), on stdout
    Man(Man),
    /// The child process of a probe
    #[command(name = crate::kernel::interference::VERB, hide = true)]
    Probe(Probe),
}

/// Which files.
#[derive(Debug, Args)]
pub struct ConfigArg {
    /// The configuration file; policies.d/*.toml beside it are read as well
    #[arg(long, short, env = "RTO_AGENT_CONFIG", default_value = crate::daemon::DEFAULT_CONFIG)]
    pub config: PathBuf,
}

/// Which daemon.
#[derive(Debug, Args)]
pub struct SocketArg {
    /// The daemon's socket
    #[arg(long, env = "RTO_AGENT_SOCKET", default_value = crate::config::DEFAULT_SOCKET)]
    pub socket: PathBuf,
}

/// For people or for programs.
#[derive(Clone, Copy, Debug, Args)]
pub struct OutputArg {
    /// Print JSON; its fields are documented and stable
    #[arg(long)]
    pub json: bool,
}

/// `rto-agent run`.
#[derive(Debug, Args)]
pub struct Run {
    #[command(flatten)]
    #[expect(missing_docs, reason = "documented at its type")]
    pub config: ConfigArg,
    /// Attach to this cgroup2 directory instead of the configured one
    #[arg(long)]
    pub cgroup: Option<PathBuf>,
    /// Form of the log on stderr; auto means the journal under systemd, else text
    #[arg(long, value_enum, default_value_t)]
    pub log_format: LogFormat,
}

/// `rto-agent check`.
#[derive(Debug, Args)]
pub struct Check {
    #[command(flatten)]
    #[expect(missing_docs, reason = "documented at its type")]
    pub config: ConfigArg,
    #[command(flatten)]
    #[expect(missing_docs, reason = "documented at its type")]
    pub output: OutputArg,
}

/// `rto-agent add`.
#[derive(Debug, Args)]
pub struct Add {
    /// Prefixes; a bare address is one host
    #[arg(required = true, value_name = "CIDR")]
    pub cidrs: Vec<String>,
    /// A policy of the configuration
    #[arg(long, short, value_name = "NAME")]
    pub policy: Option<String>,
    #[command(flatten)]
    #[expect(missing_docs, reason = "documented at its type")]
    pub settings: SettingsArgs,
    /// Remove them again after this time
    #[arg(long, value_name = "DURATION")]
    pub ttl: Option<String>,
    /// Write them to policies.d/50-cli.toml, for good
    #[arg(long)]
    pub save: bool,
    #[command(flatten)]
    #[expect(missing_docs, reason = "documented at its type")]
    pub socket: SocketArg,
    #[command(flatten)]
    #[expect(missing_docs, reason = "documented at its type")]
    pub output: OutputArg,
}

/// Settings of their own for entries added by hand.
#[derive(Debug, Args)]
#[command(next_help_heading = "Settings, instead of --policy")]
pub struct SettingsArgs {
    /// Timeout of the first SYN
    #[arg(long, value_name = "DURATION")]
    pub initial_rto: Option<String>,
    /// Timeout of the first SYN-ACK: auto (as --initial-rto, as far as half-open requests still live 31s),
    /// keep (the kernel's own) or a duration
    #[arg(long, value_name = "DURATION|auto|keep")]
    pub syn_ack_rto: Option<SynAckRto>,
    /// Lower bound of the RTO of an established connection (2 jiffies to 200ms)
    #[arg(long, value_name = "DURATION")]
    pub rto_min: Option<String>,
    /// Lower --rto-min by the smoothed RTT while fewer than 4 segments are outstanding (experimental)
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    pub rto_restart: Option<bool>,
    /// Longest delay of an ACK (2 jiffies to 200ms)
    #[arg(long, value_name = "DURATION")]
    pub delack_max: Option<String>,
    /// Linear instead of exponential backoff for thin streams
    #[arg(long, value_name = "BOOL")]
    pub thin_linear: Option<bool>,
    /// Timeouts in a row before a thin stream's interval doubles, 1 to 6; needs --thin-linear true
    #[arg(long, value_name = "N")]
    pub linear_retries: Option<u8>,
    /// Upper bound of any RTO (1s to 120s, Linux 6.15)
    #[arg(long, value_name = "DURATION")]
    pub rto_max: Option<String>,
    /// How long sent data may stay unacknowledged
    #[arg(long, value_name = "DURATION")]
    pub user_timeout: Option<String>,
    /// SYN retransmissions before connect() gives up: auto, keep or 1 to 127
    #[arg(long, value_name = "N|auto|keep")]
    pub syn_retries: Option<String>,
    /// Whether SYNs of MPTCP sockets get --initial-rto: keep (no) or apply
    #[arg(long, value_name = "keep|apply")]
    pub mptcp: Option<Mptcp>,
    /// Allow an initial RTO below 200ms on a prefix shorter than /8 (IPv4) or /16 (IPv6)
    #[arg(long)]
    pub force: bool,
}

/// `rto-agent remove`.
#[derive(Debug, Args)]
pub struct Remove {
    /// Prefixes, exactly as listed
    #[arg(required = true, value_name = "CIDR")]
    pub cidrs: Vec<String>,
    /// Remove them from policies.d/50-cli.toml
    #[arg(long, conflicts_with = "undo")]
    pub save: bool,
    /// Switch entries of the files on again that were switched off by remove
    #[arg(long)]
    pub undo: bool,
    #[command(flatten)]
    #[expect(missing_docs, reason = "documented at its type")]
    pub socket: SocketArg,
    #[command(flatten)]
    #[expect(missing_docs, reason = "documented at its type")]
    pub output: OutputArg,
}

/// A verb that only reads, or has nothing more to say.
#[derive(Debug, Args)]
pub struct Reading {
    #[command(flatten)]
    #[expect(missing_docs, reason = "documented at its type")]
    pub socket: SocketArg,
    #[command(flatten)]
    #[expect(missing_docs, reason = "documented at its type")]
    pub output: OutputArg,
}

/// `rto-agent stats`.
#[derive(Debug, Args)]
pub struct Stats {
    /// Only this policy ("unlisted": connections that no entry covers)
    #[arg(long, short, value_name = "NAME")]
    pub policy: Option<String>,
    /// Again and again, what came meanwhile: on a terminal in place, with --json a line each
    #[arg(long, short)]
    pub watch: bool,
    /// Time between two looks with --watch
    #[arg(
        long,
        short,
        value_name = "DURATION",
        default_value = "2s",
        requires = "watch"
    )]
    pub interval: String,
    #[command(flatten)]
    #[expect(missing_docs, reason = "documented at its type")]
    pub socket: SocketArg,
    #[command(flatten)]
    #[expect(missing_docs, reason = "documented at its type")]
    pub output: OutputArg,
}

/// `rto-agent watch`.
#[derive(Debug, Args)]
pub struct Watch {
    /// Only connections of this policy ("unlisted": those that no entry covers)
    #[arg(long, short, value_name = "NAME")]
    pub policy: Option<String>,
    /// Only connections with a peer in this prefix; may be given again for others
    #[arg(long, short, value_name = "CIDR")]
    pub cidr: Vec<String>,
    #[command(flatten)]
    #[expect(missing_docs, reason = "documented at its type")]
    pub socket: SocketArg,
    /// Print a JSON object a line; its fields are documented and stable
    #[arg(long)]
    pub json: bool,
}

/// `rto-agent top`.
#[derive(Debug, Args)]
pub struct Top {
    /// Time between two looks
    #[arg(long, short, value_name = "DURATION", default_value = "1s")]
    pub interval: String,
    #[command(flatten)]
    #[expect(missing_docs, reason = "documented at its type")]
    pub socket: SocketArg,
}

/// `rto-agent lookup`.
#[derive(Debug, Args)]
pub struct Lookup {
    /// An IPv4 or IPv6 address
    pub address: String,
    #[command(flatten)]
    #[expect(missing_docs, reason = "documented at its type")]
    pub socket: SocketArg,
    #[command(flatten)]
    #[expect(missing_docs, reason = "documented at its type")]
    pub output: OutputArg,
}

/// `rto-agent predict`.
#[derive(Debug, Args)]
pub struct Predict {
    #[command(flatten)]
    #[expect(missing_docs, reason = "documented at its type")]
    pub config: ConfigArg,
    /// A policy of the configuration; or else the values below
    #[arg(long, short, value_name = "NAME", conflicts_with_all = ["rto_min", "rto_restart", "thin_linear", "linear_retries", "rto_max"])]
    pub policy: Option<String>,
    /// Lower bound of the RTO
    #[arg(long, value_name = "DURATION")]
    pub rto_min: Option<String>,
    /// Lower --rto-min by the smoothed RTT while fewer than 4 segments are outstanding (experimental)
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    pub rto_restart: Option<bool>,
    /// Linear instead of exponential backoff for thin streams
    #[arg(long, value_name = "BOOL")]
    pub thin_linear: Option<bool>,
    /// Timeouts in a row before a thin stream's interval doubles, 1 to 6; needs --thin-linear true
    #[arg(long, value_name = "N")]
    pub linear_retries: Option<u8>,
    /// Upper bound of any RTO
    #[arg(long, value_name = "DURATION")]
    pub rto_max: Option<String>,
    /// Disruptions: durations separated by commas, or a range, of which 1, 2 and 5 of each power of ten
    /// are taken
    #[arg(long, short, value_name = "LIST|FROM..TO", default_value = "10ms..20s")]
    pub disruption: String,
    /// Smoothed round-trip time of the connection
    #[arg(long, value_name = "DURATION", default_value = "200us")]
    pub rtt: String,
    /// Print lines of comma-separated values
    #[arg(long, conflicts_with = "json")]
    pub csv: bool,
    /// Draw it as well: idle time on logarithmic and on linear axes, and the improvement
    #[arg(long, value_name = "FILE.svg|FILE.html")]
    pub chart: Option<PathBuf>,
    #[command(flatten)]
    #[expect(missing_docs, reason = "documented at its type")]
    pub output: OutputArg,
}

/// `rto-agent advise`.
#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("evidence").required(true).args(["target", "policy", "pcap"]))]
pub struct Advise {
    /// An entry, or an address whose entry is meant: what its policy's connections showed
    #[arg(value_name = "CIDR|ADDRESS")]
    pub target: Option<String>,
    /// What this policy's connections showed ("unlisted": those that no entry covers)
    #[arg(long, short, value_name = "NAME")]
    pub policy: Option<String>,
    /// What a packet capture shows (pcap or pcapng), taken on the host that is to have the settings; no daemon
    /// is asked
    #[arg(long, value_name = "FILE")]
    pub pcap: Option<PathBuf>,
    /// Only connections of the capture with a peer in this prefix; may be given again for others
    #[arg(long, short, value_name = "CIDR", conflicts_with_all = ["target", "policy"])]
    pub cidr: Vec<String>,
    /// The share of needless retransmissions that is not to be exceeded, 0.001% to 50%
    #[arg(long, value_name = "PERCENT", default_value = "0.1%")]
    pub spurious: String,
    /// How long the peers delay an ACK: their delack_max, or rto_min if that is shorter
    #[arg(long, value_name = "DURATION", default_value = "40ms")]
    pub peer_delack: String,
    #[command(flatten)]
    #[expect(missing_docs, reason = "documented at its type")]
    pub socket: SocketArg,
    #[command(flatten)]
    #[expect(missing_docs, reason = "documented at its type")]
    pub output: OutputArg,
}

/// `rto-agent detach`.
#[derive(Debug, Args)]
pub struct Detach {
    #[command(flatten)]
    #[expect(missing_docs, reason = "documented at its type")]
    pub config: ConfigArg,
    /// The daemon's socket [default: the configuration's]
    #[arg(long, env = "RTO_AGENT_SOCKET")]
    pub socket: Option<PathBuf>,
    /// The pins' directory [default: the configuration's]
    #[arg(long)]
    pub pin_dir: Option<PathBuf>,
    /// Also give every open socket back the options it had before a policy set them
    #[arg(long)]
    pub restore: bool,
    #[command(flatten)]
    #[expect(missing_docs, reason = "documented at its type")]
    pub output: OutputArg,
}

/// `rto-agent doctor`.
#[derive(Debug, Args)]
pub struct Doctor {
    #[command(flatten)]
    #[expect(missing_docs, reason = "documented at its type")]
    pub config: ConfigArg,
    /// Look at this cgroup2 directory instead of the configured one
    #[arg(long)]
    pub cgroup: Option<PathBuf>,
    #[command(flatten)]
    #[expect(missing_docs, reason = "documented at its type")]
    pub output: OutputArg,
}

/// `rto-agent apply`.
#[derive(Debug, Args)]
pub struct Apply {
    /// Leave sockets alone that have a policy already
    #[arg(long)]
    pub new_only: bool,
    #[command(flatten)]
    #[expect(missing_docs, reason = "documented at its type")]
    pub socket: SocketArg,
    #[command(flatten)]
    #[expect(missing_docs, reason = "documented at its type")]
    pub output: OutputArg,
}

/// The child process of a probe: what it needs is made by its parent.
#[derive(Debug, Args)]
pub struct Probe {
    /// A cgroup to move into
    pub cgroup: PathBuf,
    /// The address to begin a connection to
    pub address: std::net::IpAddr,
}

/// `rto-agent completions`.
#[derive(Debug, Args)]
pub struct Completions {
    /// The shell
    pub shell: clap_complete::Shell,
}

/// `rto-agent man`.
#[derive(Debug, Args)]
pub struct Man {
    /// Page of one verb instead of the whole
    pub verb: Option<String>,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_definitions_hold_together() {
        Cli::command().debug_assert();
    }
}
