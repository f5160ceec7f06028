//! The command line and its help. Only defines and parses it.

use std::{net::IpAddr, path::PathBuf, time::Duration};

use clap::{Args, Parser, Subcommand};

mod examples;
mod parse;
mod settings;
mod values;

use rto_agent_daemon::{build_info, telemetry::LogFormat};

pub use self::settings::SettingsArgs;

/// Per-CIDR TCP retransmission timers for Linux.
///
/// Sets the initial RTO (of SYNs and SYN-ACKs) and other TCP timers of connections to and from
/// listed prefixes, with an eBPF sock_ops program on the root cgroup.
#[derive(Debug, Parser)]
#[command(version, long_version = build_info::LINE, max_term_width = 100, arg_required_else_help = true)]
pub struct Cli {
    #[command(flatten)]
    pub(crate) before: BeforeVerb,
    /// What to do.
    #[command(subcommand)]
    pub verb: Verb,
}

/// Options that may stand before the verb as well as after it. [`Cli::parse_args`] moves them there, so that a verb
/// without such an option refuses it, and conflicts are detected (clap's global arguments do
/// neither).
#[derive(Debug, Args)]
pub struct BeforeVerb {
    /// The daemon's socket; may also follow a verb that talks to the daemon
    #[arg(long)]
    pub(crate) socket: Option<PathBuf>,
    /// Print JSON; may also follow a verb that supports it
    #[arg(long)]
    pub(crate) json: bool,
}

/// The verbs.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Run the daemon in the foreground
    #[command(after_long_help = examples::RUN)]
    Run(Run),
    /// Validate a configuration and print what it would do on this host
    #[command(after_long_help = examples::CHECK)]
    Check(Check),
    /// Add entries, until the next reboot or permanently
    #[command(after_long_help = examples::ADD)]
    Add(Add),
    /// Remove runtime entries, or switch off entries of the configuration files
    #[command(after_long_help = examples::REMOVE)]
    Remove(Remove),
    /// List active entries: CIDR, policy, source, settings, hits; exit status 3 if no daemon
    /// maintains them
    #[command(after_long_help = examples::LIST)]
    List(List),
    /// Show which entry a connection to an address uses, and why
    #[command(after_long_help = examples::LOOKUP)]
    Lookup(Lookup),
    /// Show the entries, current timers and retransmissions of open connections
    #[command(after_long_help = examples::EXPLAIN)]
    Explain(Explain),
    /// Show statistics per policy: connections, retransmissions, handshake and round-trip times
    #[command(after_long_help = examples::STATS)]
    Stats(Stats),
    /// Print retransmissions as they happen
    #[command(after_long_help = examples::WATCH)]
    Watch(Watch),
    /// Show a live view of each policy's connections
    #[command(after_long_help = examples::TOP)]
    Top(Top),
    /// Show learnt and guarded timers, their evidence and next step; freeze, resume or reset them
    #[command(after_long_help = examples::TUNE)]
    Tune(Tune),
    /// Show where the program is attached, kernel, HZ, last reload and health; exit status 1 on a
    /// problem
    #[command(after_long_help = examples::STATUS)]
    Status(Status),
    /// Read the configuration files again and show what changed, or the errors
    #[command(after_long_help = examples::RELOAD)]
    Reload(Reload),
    /// Compare the kernel's maps and pins with the desired state, and repair them; exit status 1 on a difference
    #[command(after_long_help = examples::VERIFY)]
    Verify(Verify),
    /// Suggest an initial RTO and rto_min from observed round-trip times; changes nothing
    #[command(after_long_help = examples::ADVISE)]
    Advise(Advise),
    /// Suggest prefixes that would benefit from an entry; adds nothing
    #[command(after_long_help = examples::DISCOVER)]
    Discover(Discover),
    /// Apply policies to sockets that are already open
    #[command(after_long_help = examples::APPLY)]
    Apply(Apply),
    /// Deactivate all policies until attach, even without a daemon; open sockets keep their options
    #[command(after_long_help = examples::DETACH)]
    Detach(Detach),
    /// Activate the policies again after detach
    #[command(after_long_help = examples::ATTACH)]
    Attach(Attach),
    /// Diagnose host problems and suggest fixes; exit status 1 on a problem
    #[command(after_long_help = examples::DOCTOR)]
    Doctor(Doctor),
    /// Print the completion script for a shell
    #[command(after_long_help = examples::COMPLETIONS)]
    Completions(Completions),
    /// Print the manual page (roff)
    #[command(after_long_help = examples::MAN)]
    Man(Man),
    /// The child process of a self-test
    #[command(name = SELF_TEST, hide = true)]
    SelfTest(SelfTest),
    /// The child process of a probe
    #[command(name = rto_agent_kernel::kernel::interference::VERB, hide = true)]
    Probe(Probe),
}

/// Which files.
#[derive(Debug, Args)]
pub struct ConfigArg {
    /// The configuration file; policies.d/*.toml in the same directory are read as well
    #[arg(long, short, env = "RTO_AGENT_CONFIG", default_value = rto_agent_core::config::DEFAULT_CONFIG)]
    pub(crate) config: PathBuf,
}

/// Which daemon.
#[derive(Debug, Args)]
pub struct SocketArg {
    /// The daemon's socket
    #[arg(long, env = "RTO_AGENT_SOCKET", default_value = rto_agent_core::config::DEFAULT_SOCKET)]
    pub(crate) socket: PathBuf,
}

/// Which daemon, and how its answer is printed.
#[derive(Debug, Args)]
pub struct DaemonArgs {
    /// The daemon's socket
    #[arg(long, env = "RTO_AGENT_SOCKET", default_value = rto_agent_core::config::DEFAULT_SOCKET)]
    pub(crate) socket: PathBuf,
    /// Print JSON; the fields are documented and stable
    #[arg(long)]
    pub(crate) json: bool,
}

/// For people or for programs.
#[derive(Clone, Copy, Debug, Args)]
pub struct OutputArg {
    /// Print JSON; the fields are documented and stable
    #[arg(long)]
    pub(crate) json: bool,
}

/// For answers with states in them.
#[derive(Clone, Copy, Debug, Args)]
pub struct ColorArg {
    /// When to colour states; auto: on a terminal, unless NO_COLOR is set
    #[arg(long, value_name = "WHEN", default_value_t = clap::ColorChoice::Auto)]
    pub(crate) color: clap::ColorChoice,
}

/// For answers with tables in them.
#[derive(Clone, Copy, Debug, Args)]
pub struct WideArg {
    /// Do not shorten tables to the width of the terminal
    #[arg(long)]
    pub(crate) wide: bool,
}

/// `rto-agent run`.
#[derive(Debug, Args)]
pub struct Run {
    #[command(flatten)]
    pub(crate) config: ConfigArg,
    /// Attach to this cgroup2 directory instead of the configured one
    #[arg(long)]
    pub(crate) cgroup: Option<PathBuf>,
    /// Format of the log on stderr; auto: the journal if stderr is connected to it, else text
    #[arg(long, value_parser = values::log_format(), default_value = "auto")]
    pub(crate) log_format: LogFormat,
}

/// `rto-agent check`.
#[derive(Debug, Args)]
pub struct Check {
    #[command(flatten)]
    pub(crate) config: ConfigArg,
    /// Validate the configurations of many hosts: each HOST/config.toml (with HOST/policies.d) and
    /// each HOST.toml in this directory
    ///
    /// Values are rounded for this host's kernel, or for that of --kernel; the cgroup, directories
    /// and addresses of `[agent]` are not checked.
    #[arg(long, value_name = "DIR")]
    pub(crate) fleet: Option<PathBuf>,
    /// Check for hosts with this kernel instead of this host, for example 5.14
    ///
    /// What the mainline kernel of this version has, with BTF and its default sysctls. Nothing of
    /// this host is checked.
    #[arg(long, value_name = "VERSION", value_parser = values::kernel)]
    pub(crate) kernel: Option<(u32, u32)>,
    /// Check for hosts with this number of jiffies a second
    #[arg(long, value_name = "N", value_parser = values::hz())]
    pub(crate) hz: Option<u32>,
    /// Print all settings of each policy, with defaults, notes and jiffies
    #[arg(long, short)]
    pub(crate) verbose: bool,
    #[command(flatten)]
    pub(crate) output: OutputArg,
    #[command(flatten)]
    pub(crate) color: ColorArg,
}

/// `rto-agent add`.
#[derive(Debug, Args)]
pub struct Add {
    /// Prefixes; an address without a prefix length is one host
    #[arg(required = true, value_name = "CIDR")]
    pub(crate) cidrs: Vec<String>,
    /// The policy, from the configuration
    #[arg(long, short, value_name = "NAME")]
    pub(crate) policy: Option<String>,
    /// Let the entries expire after this time, for example 10m
    ///
    /// At most a year. Without --ttl and --save, entries last until the next reboot. If no daemon
    /// runs when they expire, the program ignores them at most 69 s later.
    #[arg(long, value_name = "DURATION", value_parser = values::ttl_text)]
    pub(crate) ttl: Option<String>,
    /// Save the entries permanently, in policies.d/50-cli.toml
    #[arg(long)]
    pub(crate) save: bool,
    #[command(flatten)]
    pub(crate) daemon: DaemonArgs,
    // Must be last: arguments after it would be listed under its heading.
    #[command(flatten)]
    pub(crate) settings: Option<SettingsArgs>,
}

/// `rto-agent remove`.
#[derive(Debug, Args)]
pub struct Remove {
    /// Prefixes, exactly as listed
    #[arg(required_unless_present = "policy", value_name = "CIDR")]
    pub(crate) cidrs: Vec<String>,
    /// All entries of this policy
    #[arg(long, short, value_name = "NAME", conflicts_with_all = ["cidrs", "undo"])]
    pub(crate) policy: Option<String>,
    /// Remove the entries from policies.d/50-cli.toml
    #[arg(long, conflicts_with = "undo")]
    pub(crate) save: bool,
    /// Switch entries of the configuration files on again after remove has switched them off
    #[arg(long)]
    pub(crate) undo: bool,
    #[command(flatten)]
    pub(crate) daemon: DaemonArgs,
}

/// `rto-agent list`.
#[derive(Debug, Args)]
pub struct List {
    /// List only entries of this policy
    #[arg(long, short, value_name = "NAME")]
    pub(crate) policy: Option<String>,
    /// List only this entry and the entries within it; may be repeated
    #[arg(long, short, value_name = "CIDR")]
    pub(crate) cidr: Vec<String>,
    /// List only runtime entries
    #[arg(long, conflicts_with = "file")]
    pub(crate) runtime: bool,
    /// List only entries of the configuration files
    #[arg(long)]
    pub(crate) file: bool,
    #[command(flatten)]
    pub(crate) table: WideArg,
    #[command(flatten)]
    pub(crate) daemon: DaemonArgs,
}

/// `rto-agent status`.
#[derive(Debug, Args)]
pub struct Status {
    /// Check only that the daemon answers, as a liveness probe (run as root): exit status 0 even if
    /// there are problems
    #[arg(long)]
    pub(crate) alive: bool,
    #[command(flatten)]
    pub(crate) daemon: DaemonArgs,
    #[command(flatten)]
    pub(crate) color: ColorArg,
}

/// `rto-agent reload`.
#[derive(Debug, Args)]
pub struct Reload {
    /// Apply the files even if they no longer have any policy
    #[arg(long)]
    pub(crate) allow_empty: bool,
    /// Also attach again if the policies were detached
    #[arg(long)]
    pub(crate) attach: bool,
    /// Only show what would change
    #[arg(long, conflicts_with = "attach")]
    pub(crate) dry_run: bool,
    #[command(flatten)]
    pub(crate) daemon: DaemonArgs,
}

/// `rto-agent verify`.
#[derive(Debug, Args)]
pub struct Verify {
    #[command(flatten)]
    pub(crate) daemon: DaemonArgs,
    #[command(flatten)]
    pub(crate) color: ColorArg,
}

/// `rto-agent stats`.
#[derive(Debug, Args)]
pub struct Stats {
    /// Show only this policy ("unmatched": connections that no entry covers)
    #[arg(long, short, value_name = "NAME")]
    pub(crate) policy: Option<String>,
    /// Also show policies without any counts
    #[arg(long, short)]
    pub(crate) all: bool,
    #[command(flatten)]
    pub(crate) table: WideArg,
    /// Repeat with the counts of each interval: on a terminal the output is overwritten, with
    /// --json each interval is a line
    #[arg(long, short)]
    pub(crate) watch: bool,
    /// Interval of --watch
    #[arg(
        long,
        short,
        value_name = "DURATION",
        default_value = "2s",
        requires = "watch",
        value_parser = values::interval
    )]
    pub(crate) interval: Duration,
    #[command(flatten)]
    pub(crate) daemon: DaemonArgs,
}

/// `rto-agent watch`.
#[derive(Debug, Args)]
pub struct Watch {
    /// Show only connections of this policy ("unmatched": without an entry)
    #[arg(long, short, value_name = "NAME")]
    pub(crate) policy: Option<String>,
    /// Show only connections with a peer in this prefix; may be repeated
    #[arg(long, short, value_name = "CIDR")]
    pub(crate) cidr: Vec<String>,
    #[command(flatten)]
    pub(crate) table: WideArg,
    #[command(flatten)]
    pub(crate) socket: SocketArg,
    /// Print one JSON object per line; the fields are documented and stable
    #[arg(long)]
    pub(crate) json: bool,
}

/// `rto-agent top`.
#[derive(Debug, Args)]
pub struct Top {
    /// Interval between updates
    #[arg(long, short, value_name = "DURATION", default_value = "1s", value_parser = values::interval)]
    pub(crate) interval: Duration,
    #[command(flatten)]
    pub(crate) socket: SocketArg,
    #[command(flatten)]
    pub(crate) color: ColorArg,
}

/// `rto-agent tune`.
#[derive(Debug, Args)]
pub struct Tune {
    /// Show only this policy; after freeze, resume or reset: the policy to act on
    ///
    /// freeze: use the kernel's own timers until resume. reset: forget what was learnt
    #[arg(num_args = 0..=2, value_names = ["freeze|resume|reset", "POLICY"])]
    pub(crate) what: Vec<String>,
    /// The policy, as an option
    #[arg(long, short, value_name = "NAME")]
    pub(crate) policy: Option<String>,
    #[command(flatten)]
    pub(crate) daemon: DaemonArgs,
}

/// `rto-agent lookup`.
#[derive(Debug, Args)]
pub struct Lookup {
    /// IPv4 or IPv6 addresses, optionally with a port, for example 10.1.2.3:443 or [fd00:1::7]:443
    #[arg(required = true, value_name = "ADDRESS")]
    pub(crate) addresses: Vec<String>,
    #[command(flatten)]
    pub(crate) daemon: DaemonArgs,
}

/// `rto-agent explain`.
#[derive(Debug, Args)]
pub struct Explain {
    /// A process ID, a :PORT, or a local or peer address with a port, for example 10.1.2.3:443 or
    /// [fd00:1::7]:443
    #[arg(value_name = "PID|:PORT|ADDRESS:PORT")]
    pub(crate) what: String,
    #[command(flatten)]
    pub(crate) daemon: DaemonArgs,
}

/// `rto-agent advise`.
#[derive(Debug, Args)]
#[command(
    override_usage = "rto-agent advise [OPTIONS] <CIDR|ADDRESS>\n       \
                      rto-agent advise [OPTIONS] --policy <NAME> [--prometheus <URL>]\n       \
                      rto-agent advise [OPTIONS] --samples <FILE>",
    group = clap::ArgGroup::new("evidence")
        .required(true)
        .multiple(true)
        .args(["target", "policy", "prometheus"])
)]
pub struct Advise {
    /// Use the connections of the policy of this entry, or of the entry that covers this address
    #[arg(value_name = "CIDR|ADDRESS", conflicts_with = "policy")]
    pub(crate) target: Option<String>,
    /// Use the connections of this policy ("unmatched": without an entry)
    #[arg(long, short, value_name = "NAME")]
    pub(crate) policy: Option<String>,
    /// Use the metrics of a fleet, from the HTTP API of Prometheus (or Thanos, Mimir) at this URL,
    /// without a daemon
    ///
    /// Only http:// is supported. --policy is needed if there is more than one policy.
    #[arg(long, value_name = "URL", conflicts_with = "target")]
    pub(crate) prometheus: Option<String>,
    /// Use only series with these labels, for example cluster="a",zone=~"b.*"
    #[arg(long = "match", value_name = "MATCHERS", requires = "prometheus")]
    pub(crate) matchers: Option<String>,
    /// Time range of the metrics to use, up to now
    #[arg(long, value_name = "DURATION", default_value = "1d", value_parser = values::range, requires = "prometheus")]
    pub(crate) range: Duration,
    /// Add a header to the request, for example "X-Scope-OrgID: fleet"; may be repeated
    #[arg(long, value_name = "NAME: VALUE", requires = "prometheus")]
    pub(crate) header: Vec<String>,
    /// The largest acceptable share of spurious retransmissions, 0.001% to 50%
    #[arg(long, value_name = "PERCENT", default_value = "0.1%")]
    pub(crate) spurious: String,
    /// The longest time that peers delay an ACK: their delack_max, or their rto_min if that is
    /// shorter
    #[arg(long, value_name = "DURATION", default_value = "40ms", value_parser = values::delack)]
    pub(crate) peer_delack: Duration,
    #[command(flatten)]
    pub(crate) table: WideArg,
    #[command(flatten)]
    pub(crate) daemon: DaemonArgs,
}

/// `rto-agent discover`.
#[derive(Debug, Args)]
pub struct Discover {
    /// The maximum number of prefixes to show
    #[arg(
        long,
        short = 'n',
        value_name = "N",
        default_value_t = 20,
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    pub(crate) limit: u32,
    #[command(flatten)]
    pub(crate) table: WideArg,
    #[command(flatten)]
    pub(crate) daemon: DaemonArgs,
}

/// `rto-agent detach`.
#[derive(Debug, Args)]
pub struct Detach {
    #[command(flatten)]
    pub(crate) config: ConfigArg,
    /// The daemon's socket [default: as configured]
    #[arg(long, env = "RTO_AGENT_SOCKET")]
    pub(crate) socket: Option<PathBuf>,
    /// The directory of the pins [default: as configured]
    #[arg(long)]
    pub(crate) pin_dir: Option<PathBuf>,
    /// Also restore the options that open sockets had before a policy set them
    #[arg(long)]
    pub(crate) restore: bool,
    #[command(flatten)]
    pub(crate) table: WideArg,
    #[command(flatten)]
    pub(crate) output: OutputArg,
}

/// `rto-agent attach`.
#[derive(Debug, Args)]
pub struct Attach {
    #[command(flatten)]
    pub(crate) config: ConfigArg,
    /// The daemon's socket [default: as configured]
    #[arg(long, env = "RTO_AGENT_SOCKET")]
    pub(crate) socket: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) output: OutputArg,
}

/// `rto-agent doctor`.
#[derive(Debug, Args)]
pub struct Doctor {
    #[command(flatten)]
    pub(crate) config: ConfigArg,
    /// Check this cgroup2 directory instead of the configured one
    #[arg(long)]
    pub(crate) cgroup: Option<PathBuf>,
    /// Test this kernel's timers with connections in a cgroup and network namespace of their own, and print a report;
    /// takes five seconds and does not affect other connections
    #[arg(long, conflicts_with = "cgroup")]
    pub(crate) self_test: bool,
    /// Also print what is good, and notes: kernel defaults, and features that no policy uses
    #[arg(long, short, conflicts_with = "self_test")]
    pub(crate) verbose: bool,
    #[command(flatten)]
    pub(crate) output: OutputArg,
    #[command(flatten)]
    pub(crate) color: ColorArg,
}

/// Name of the hidden verb that starts the child process of a self-test.
pub(crate) const SELF_TEST: &str = "__self-test";

/// The child process of a self-test.
#[derive(Debug, Args)]
pub struct SelfTest {
    /// A cgroup to move into
    pub(crate) cgroup: PathBuf,
    #[command(flatten)]
    pub(crate) output: OutputArg,
}

/// `rto-agent apply`.
#[derive(Debug, Args)]
pub struct Apply {
    /// Skip sockets that already have a policy
    #[arg(long)]
    pub(crate) new_only: bool,
    #[command(flatten)]
    pub(crate) table: WideArg,
    #[command(flatten)]
    pub(crate) daemon: DaemonArgs,
    #[command(flatten)]
    pub(crate) color: ColorArg,
}

/// The child process of a probe: what it needs is made by its parent.
#[derive(Debug, Args)]
pub struct Probe {
    /// A cgroup to move into
    pub(crate) cgroup: PathBuf,
    /// The address to begin a connection to
    pub(crate) address: IpAddr,
}

/// `rto-agent completions`.
#[derive(Debug, Args)]
pub struct Completions {
    /// The shell
    pub(crate) shell: clap_complete::Shell,
}

/// `rto-agent man`.
#[derive(Debug, Args)]
pub struct Man {
    /// Print the page of one verb instead of the main page
    #[arg(conflicts_with = "dir")]
    pub(crate) verb: Option<String>,
    /// Write the pages of all verbs to this directory
    #[arg(long)]
    pub(crate) dir: Option<PathBuf>,
}

#[cfg(test)]
mod tests;
