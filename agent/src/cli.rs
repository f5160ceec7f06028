//! The command line and its help. Only defines and parses it.

use std::{net::IpAddr, path::PathBuf, time::Duration};

use clap::{Args, Parser, Subcommand};

mod examples;
mod experiment;
mod parse;
mod values;

pub use self::experiment::{Experiment, ExperimentVerb, OfPolicy, ShowExperiment, StartExperiment};
use crate::{build_info, policy::Settings};

/// Per-CIDR TCP retransmission timers for Linux.
///
/// Gives connections to and from listed prefixes their own initial RTO (SYN and SYN-ACK) and
/// other TCP timers, by an eBPF sock_ops program on the root cgroup.
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
    /// The daemon's socket, as after a verb that asks a daemon
    #[arg(long)]
    pub(crate) socket: Option<PathBuf>,
    /// Print JSON, as after a verb that can
    #[arg(long)]
    pub(crate) json: bool,
}

/// Form of the log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// The journal if stderr leads there, else text.
    #[default]
    Auto,
    /// Lines for people.
    Text,
    /// One JSON object a line.
    Json,
}

/// The verbs.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// The daemon, in the foreground
    #[command(after_long_help = examples::RUN)]
    Run(Run),
    /// Validate a configuration and print what it would do on this host
    #[command(after_long_help = examples::CHECK)]
    Check(Check),
    /// Add entries, until the boot ends or for good
    #[command(after_long_help = examples::ADD)]
    Add(Add),
    /// Remove runtime entries, or switch entries of the files off
    #[command(after_long_help = examples::REMOVE)]
    Remove(Remove),
    /// Entries in force: CIDR, policy, source, settings, hits; exit status 3 if no daemon keeps them
    #[command(after_long_help = examples::LIST)]
    List(List),
    /// Which entry a connection to an address takes, and why
    #[command(after_long_help = examples::LOOKUP)]
    Lookup(Lookup),
    /// Which entry live connections have, their timers now and what they retransmitted
    #[command(after_long_help = examples::EXPLAIN)]
    Explain(Explain),
    /// What each policy did: connections, retransmissions, handshake and round-trip times
    #[command(after_long_help = examples::STATS)]
    Stats(Stats),
    /// Retransmissions as they happen
    #[command(after_long_help = examples::WATCH)]
    Watch(Watch),
    /// A live view of each policy's connections
    #[command(after_long_help = examples::TOP)]
    Top(Top),
    /// What is learnt and guarded, what that rests on, and what comes next; freeze, resume or reset it
    #[command(after_long_help = examples::TUNE)]
    Tune(Tune),
    /// Attached where, kernel, HZ, last reload, health; exit status 1 on a problem
    #[command(after_long_help = examples::STATUS)]
    Status(Status),
    /// Read the files again; the answer is what changed, or the error
    #[command(after_long_help = examples::RELOAD)]
    Reload(Reload),
    /// Compare the kernel's maps and pins with the desired state, and repair them; exit status 1 on a difference
    #[command(after_long_help = examples::VERIFY)]
    Verify(Verify),
    /// Which initial RTO and rto_min would suit what was observed; nothing is changed
    #[command(after_long_help = examples::ADVISE)]
    Advise(Advise),
    /// Which prefixes without an entry deserve one; nothing is added
    #[command(after_long_help = examples::DISCOVER)]
    Discover(Discover),
    /// Compare a policy's timers with the kernel's own on a share of its connections
    #[command(after_long_help = examples::EXPERIMENT)]
    Experiment(Experiment),
    /// Give sockets that are open already the options of their policies
    #[command(after_long_help = examples::APPLY)]
    Apply(Apply),
    /// Take every policy out of force, daemon or not, until attach; open sockets keep their options
    #[command(after_long_help = examples::DETACH)]
    Detach(Detach),
    /// Put the policies in force again after detach
    #[command(after_long_help = examples::ATTACH)]
    Attach(Attach),
    /// Diagnose host problems and suggest fixes; exit status 1 on a problem
    #[command(after_long_help = examples::DOCTOR)]
    Doctor(Doctor),
    /// Completions for a shell, on stdout
    #[command(after_long_help = examples::COMPLETIONS)]
    Completions(Completions),
    /// The manual page (roff), on stdout
    #[command(after_long_help = examples::MAN)]
    Man(Man),
    /// The child process of a probe
    #[command(name = crate::kernel::interference::VERB, hide = true)]
    Probe(Probe),
}

/// Which files.
#[derive(Debug, Args)]
pub struct ConfigArg {
    /// The configuration file; policies.d/*.toml beside it are read as well
    #[arg(long, short, env = "RTO_AGENT_CONFIG", default_value = crate::config::DEFAULT_CONFIG)]
    pub(crate) config: PathBuf,
}

/// Which daemon.
#[derive(Debug, Args)]
pub struct SocketArg {
    /// The daemon's socket
    #[arg(long, env = "RTO_AGENT_SOCKET", default_value = crate::config::DEFAULT_SOCKET)]
    pub(crate) socket: PathBuf,
}

/// For people or for programs.
#[derive(Clone, Copy, Debug, Args)]
pub struct OutputArg {
    /// Print JSON; its fields are documented and stable
    #[arg(long)]
    pub(crate) json: bool,
}

/// For answers with states in them.
#[derive(Clone, Copy, Debug, Args)]
pub struct ColorArg {
    /// Colours for states; auto: on a terminal, unless NO_COLOR is set
    #[arg(long, value_name = "WHEN", default_value_t = clap::ColorChoice::Auto)]
    pub(crate) color: clap::ColorChoice,
}

/// For answers with tables in them.
#[derive(Clone, Copy, Debug, Args)]
pub struct WideArg {
    /// Tables in full, also on a narrower terminal
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
    /// Form of the log on stderr; auto means the journal under systemd, else text
    #[arg(long, value_enum, default_value_t)]
    pub(crate) log_format: LogFormat,
}

/// `rto-agent check`.
#[derive(Debug, Args)]
pub struct Check {
    #[command(flatten)]
    pub(crate) config: ConfigArg,
    /// Validate the configurations of many hosts: each HOST/config.toml in this directory, with HOST/policies.d, and each
    /// HOST.toml
    ///
    /// Values are rounded for this host's kernel; cgroup, directories and addresses of `[agent]` are not checked here.
    #[arg(long, value_name = "DIR")]
    pub(crate) fleet: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) output: OutputArg,
    #[command(flatten)]
    pub(crate) color: ColorArg,
}

/// `rto-agent add`.
#[derive(Debug, Args)]
pub struct Add {
    /// Prefixes; a bare address is one host
    #[arg(required = true, value_name = "CIDR")]
    pub(crate) cidrs: Vec<String>,
    /// A policy of the configuration
    #[arg(long, short, value_name = "NAME")]
    pub(crate) policy: Option<String>,
    /// Remove them again after this time, like 10m
    ///
    /// At most a year. Without it, and without --save, they end with the boot. If the daemon is gone by then, the
    /// program ignores them from that time or up to 69 s later.
    #[arg(long, value_name = "DURATION", value_parser = values::ttl_text)]
    pub(crate) ttl: Option<String>,
    /// Write them to policies.d/50-cli.toml, for good
    #[arg(long)]
    pub(crate) save: bool,
    #[command(flatten)]
    pub(crate) socket: SocketArg,
    #[command(flatten)]
    pub(crate) output: OutputArg,
    // Must be last: arguments after it would be listed under its heading.
    #[command(flatten)]
    pub(crate) settings: Option<Settings>,
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
    /// Remove them from policies.d/50-cli.toml
    #[arg(long, conflicts_with = "undo")]
    pub(crate) save: bool,
    /// Switch entries of the files on again that were switched off by remove
    #[arg(long)]
    pub(crate) undo: bool,
    #[command(flatten)]
    pub(crate) socket: SocketArg,
    #[command(flatten)]
    pub(crate) output: OutputArg,
}

/// `rto-agent list`.
#[derive(Debug, Args)]
pub struct List {
    /// Only entries of this policy
    #[arg(long, short, value_name = "NAME")]
    pub(crate) policy: Option<String>,
    /// Only this entry and those within it; may be given again for others
    #[arg(long, short, value_name = "CIDR")]
    pub(crate) cidr: Vec<String>,
    /// Only runtime entries
    #[arg(long, conflicts_with = "file")]
    pub(crate) runtime: bool,
    /// Only entries of the files
    #[arg(long)]
    pub(crate) file: bool,
    #[command(flatten)]
    pub(crate) table: WideArg,
    #[command(flatten)]
    pub(crate) socket: SocketArg,
    #[command(flatten)]
    pub(crate) output: OutputArg,
}

/// `rto-agent status`.
#[derive(Debug, Args)]
pub struct Status {
    /// Only whether the daemon answers, as root's probe of liveness: exit status 0 also where something is wrong
    #[arg(long)]
    pub(crate) alive: bool,
    #[command(flatten)]
    pub(crate) socket: SocketArg,
    #[command(flatten)]
    pub(crate) output: OutputArg,
    #[command(flatten)]
    pub(crate) color: ColorArg,
}

/// `rto-agent reload`.
#[derive(Debug, Args)]
pub struct Reload {
    /// Take the files over though they have no policy left
    #[arg(long)]
    pub(crate) allow_empty: bool,
    /// Also end a detachment, as attach does
    #[arg(long)]
    pub(crate) attach: bool,
    /// Change nothing; show what would change
    #[arg(long, conflicts_with = "attach")]
    pub(crate) dry_run: bool,
    #[command(flatten)]
    pub(crate) socket: SocketArg,
    #[command(flatten)]
    pub(crate) output: OutputArg,
}

/// `rto-agent verify`.
#[derive(Debug, Args)]
pub struct Verify {
    #[command(flatten)]
    pub(crate) socket: SocketArg,
    #[command(flatten)]
    pub(crate) output: OutputArg,
    #[command(flatten)]
    pub(crate) color: ColorArg,
}

/// `rto-agent stats`.
#[derive(Debug, Args)]
pub struct Stats {
    /// Only this policy ("unmatched": connections that no entry covers)
    #[arg(long, short, value_name = "NAME")]
    pub(crate) policy: Option<String>,
    /// Also policies that have not counted anything
    #[arg(long, short)]
    pub(crate) all: bool,
    #[command(flatten)]
    pub(crate) table: WideArg,
    /// Repeat, with the counts since the last line: on a terminal it is overwritten, with --json a line each
    #[arg(long, short)]
    pub(crate) watch: bool,
    /// Time between two looks with --watch
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
    pub(crate) socket: SocketArg,
    #[command(flatten)]
    pub(crate) output: OutputArg,
}

/// `rto-agent watch`.
#[derive(Debug, Args)]
pub struct Watch {
    /// Only connections of this policy ("unmatched": without an entry)
    #[arg(long, short, value_name = "NAME")]
    pub(crate) policy: Option<String>,
    /// Only connections with a peer in this prefix; may be given again for others
    #[arg(long, short, value_name = "CIDR")]
    pub(crate) cidr: Vec<String>,
    #[command(flatten)]
    pub(crate) table: WideArg,
    #[command(flatten)]
    pub(crate) socket: SocketArg,
    /// Print a JSON object a line; its fields are documented and stable
    #[arg(long)]
    pub(crate) json: bool,
}

/// `rto-agent top`.
#[derive(Debug, Args)]
pub struct Top {
    /// Time between two looks
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
    /// Only this policy; after freeze, resume or reset: the policy to do that to
    ///
    /// freeze: the kernel's own timers, until resume; reset: what was learnt is forgotten
    #[arg(num_args = 0..=2, value_names = ["freeze|resume|reset", "POLICY"])]
    pub(crate) what: Vec<String>,
    /// The same policy as an option
    #[arg(long, short, value_name = "NAME")]
    pub(crate) policy: Option<String>,
    #[command(flatten)]
    pub(crate) socket: SocketArg,
    #[command(flatten)]
    pub(crate) output: OutputArg,
}

/// `rto-agent lookup`.
#[derive(Debug, Args)]
pub struct Lookup {
    /// IPv4 or IPv6 addresses, each also with a port, like 10.1.2.3:443 or [fd00:1::7]:443
    #[arg(required = true, value_name = "ADDRESS")]
    pub(crate) addresses: Vec<String>,
    #[command(flatten)]
    pub(crate) socket: SocketArg,
    #[command(flatten)]
    pub(crate) output: OutputArg,
}

/// `rto-agent explain`.
#[derive(Debug, Args)]
pub struct Explain {
    /// A process id, a :PORT, or an end like 10.1.2.3:443 or [fd00:1::7]:443
    #[arg(value_name = "PID|:PORT|ADDRESS:PORT")]
    pub(crate) what: String,
    #[command(flatten)]
    pub(crate) socket: SocketArg,
    #[command(flatten)]
    pub(crate) output: OutputArg,
}

/// `rto-agent advise`.
#[derive(Debug, Args)]
#[command(
    group = clap::ArgGroup::new("evidence")
        .required(true)
        .multiple(true)
        .args(["target", "policy", "stats", "prometheus", "samples"])
)]
pub struct Advise {
    /// An entry, or an address whose entry is meant: what its policy's connections showed
    #[arg(value_name = "CIDR|ADDRESS", conflicts_with_all = ["policy", "stats", "samples"])]
    pub(crate) target: Option<String>,
    /// From this policy's connections ("unmatched": without an entry)
    #[arg(long, short, value_name = "NAME", conflicts_with = "samples")]
    pub(crate) policy: Option<String>,
    /// What `rto-agent stats --json` printed on several hosts, added ("-": standard input); no daemon is asked
    ///
    /// A file may have several documents, as made by cat. --policy is needed where there is more than one policy.
    #[arg(long, value_name = "FILE", num_args = 1.., conflicts_with = "samples")]
    pub(crate) stats: Vec<PathBuf>,
    /// What the metrics of a fleet show, by the HTTP API of Prometheus (or Thanos, Mimir) at this address; no daemon is
    /// asked
    ///
    /// http:// alone. --policy is needed where there is more than one policy.
    #[arg(long, value_name = "URL", conflicts_with_all = ["target", "stats", "samples"])]
    pub(crate) prometheus: Option<String>,
    /// Only of series with these labels, like cluster="a",zone=~"b.*"
    #[arg(long = "match", value_name = "MATCHERS", requires = "prometheus")]
    pub(crate) matchers: Option<String>,
    /// How far back
    #[arg(long, value_name = "DURATION", default_value = "1d", value_parser = values::range, requires = "prometheus")]
    pub(crate) range: Duration,
    /// A header of the request, like "X-Scope-OrgID: fleet"; may be given again for others
    #[arg(long, value_name = "NAME: VALUE", requires = "prometheus")]
    pub(crate) header: Vec<String>,
    /// What a packet capture shows, as `rto-lab advise --pcap` reads it (JSON; "-": standard input); no daemon is
    /// asked
    #[arg(long, value_name = "FILE")]
    pub(crate) samples: Option<PathBuf>,
    /// Only connections of the capture with a peer in this prefix; may be given again for others
    #[arg(long, short, value_name = "CIDR", conflicts_with_all = ["target", "policy", "stats", "prometheus"])]
    pub(crate) cidr: Vec<String>,
    /// An address of the host that the capture was taken at; may be given again for others
    #[arg(long, value_name = "ADDRESS", conflicts_with_all = ["target", "policy", "stats", "prometheus"])]
    pub(crate) host: Vec<IpAddr>,
    /// The share of spurious retransmissions that is not to be exceeded, 0.001% to 50%
    #[arg(long, value_name = "PERCENT", default_value = "0.1%")]
    pub(crate) spurious: String,
    /// How long the peers delay an ACK: their delack_max, or rto_min if that is shorter
    #[arg(long, value_name = "DURATION", default_value = "40ms", value_parser = values::delack)]
    pub(crate) peer_delack: Duration,
    #[command(flatten)]
    pub(crate) table: WideArg,
    #[command(flatten)]
    pub(crate) socket: SocketArg,
    #[command(flatten)]
    pub(crate) output: OutputArg,
}

/// What `rto-agent discover` takes for one prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum DiscoverBy {
    /// The destinations of this network namespace's routes, and prefixes where there is only a default route
    Route,
    /// The /24s and /48s that are counted, neighbours with like times together
    Prefix,
}

/// `rto-agent discover`.
#[derive(Debug, Args)]
pub struct Discover {
    /// What is taken for one prefix
    #[arg(long, value_enum, default_value_t = DiscoverBy::Route)]
    pub(crate) by: DiscoverBy,
    /// The most prefixes to show
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
    pub(crate) socket: SocketArg,
    #[command(flatten)]
    pub(crate) output: OutputArg,
}

/// `rto-agent detach`.
#[derive(Debug, Args)]
pub struct Detach {
    #[command(flatten)]
    pub(crate) config: ConfigArg,
    /// The daemon's socket [default: the configuration's]
    #[arg(long, env = "RTO_AGENT_SOCKET")]
    pub(crate) socket: Option<PathBuf>,
    /// The pins' directory [default: the configuration's]
    #[arg(long)]
    pub(crate) pin_dir: Option<PathBuf>,
    /// Also give every open socket back the options it had before a policy set them
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
    /// The daemon's socket [default: the configuration's]
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
    /// Look at this cgroup2 directory instead of the configured one
    #[arg(long)]
    pub(crate) cgroup: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) output: OutputArg,
    #[command(flatten)]
    pub(crate) color: ColorArg,
}

/// `rto-agent apply`.
#[derive(Debug, Args)]
pub struct Apply {
    /// Leave sockets alone that have a policy already
    #[arg(long)]
    pub(crate) new_only: bool,
    #[command(flatten)]
    pub(crate) table: WideArg,
    #[command(flatten)]
    pub(crate) socket: SocketArg,
    #[command(flatten)]
    pub(crate) output: OutputArg,
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
    /// Page of one verb instead of the whole
    #[arg(conflicts_with = "dir")]
    pub(crate) verb: Option<String>,
    /// Write the pages of all verbs into this directory
    #[arg(long)]
    pub(crate) dir: Option<PathBuf>,
}

#[cfg(test)]
mod tests;
