//! What can be said on the command line, and its help.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use crate::{
    commands::{self, run::Defined},
    topology::LinkBackend,
};

/// Experiments on emulated links: what a setting of TCP retransmission timers gains and costs.
#[derive(Debug, Parser)]
#[command(name = "rto-lab", version)]
pub struct Cli {
    /// What to do
    #[command(subcommand)]
    pub verb: Verb,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// How long connections would be idle in disruptions, by the model
    Predict(commands::predict::Predict),
    /// Which initial RTO and rto_min would suit what a packet capture shows, by rto-agent advise
    Advise(commands::advise::Advise),
    /// How long a connection is idle if all its packets are lost for a while, by rto_min and backoff
    Blackout(commands::blackout::Blackout),
    /// How often an RTO is too short, by estimator, sampling and minimum: over generated load, a capture or the
    /// agent's statistics
    Estimator(commands::estimator::Estimator),
    /// Renders the logs of experiments again
    Report(commands::report::ReportArgs),
    /// Two logs of the same experiment next to each other: kernels, versions, settings
    Compare(commands::report::Compare),
    /// Request and response between two hosts: latencies, idle times, and how TCP sees them
    Rr(commands::rr::Rr),
    /// Connections to a server: handshakes a second, and how long each takes, by percentile
    Connect(commands::connect::Connect),
    /// Round-trip times as each end's TCP and the application see them, by pause and delayed-ACK timer
    Rtt(Defined),
    /// What a lost packet costs a small HTTP/1.1 transfer, next to published measurements
    Loss(Defined),
    /// An experiment of your own, which a TOML file defines: factors, link, workload, outages
    Run {
        /// The file; docs/research/lab.md has its keys
        file: PathBuf,
        /// How
        #[command(flatten)]
        options: Defined,
    },
    /// Flows that lose their last segments: tail loss probes, RTO restart and rto_min, by round-trip time
    Tail(Defined),
    /// Which workloads gain from which timer: HTTP/1.1, HTTP/2, gRPC, TLS, health checks, request/response
    Workloads(Defined),
    /// What initial_rto = "auto" does to connections, simulated: generated paths, steps, overload, a dead daemon
    Tune(commands::tune::Tune),
    /// One end of an experiment's connection
    #[command(hide = true)]
    Workload {
        /// Its role, as JSON
        role: String,
    },
}

/// What every experiment takes.
#[derive(Clone, Debug, Args)]
pub struct Common {
    /// A small part of it, in less than two minutes
    #[arg(long)]
    pub quick: bool,
    /// Of all that is left to chance; the same seed makes the same choices again
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Where the report goes: HTML, JSON, Markdown and CSV files
    #[arg(long, value_name = "DIR", default_value = "rto-lab-report")]
    pub out: PathBuf,
    /// Print JSON instead of text
    #[arg(long)]
    pub json: bool,
    /// The agent's binary [default: beside this one, or on the path]
    #[arg(long, value_name = "PATH", env = "RTO_AGENT_BIN")]
    pub agent: Option<PathBuf>,
}

/// What experiments on links take besides.
#[derive(Clone, Debug, Args)]
pub struct EngineArgs {
    #[command(flatten)]
    pub(crate) common: Common,
    /// Over which link
    #[arg(long, value_enum, default_value_t)]
    pub(crate) link: LinkBackend,
    /// Runs at once: in an outage most of them wait for its end
    #[arg(long, alias = "lanes", value_name = "N", default_value_t = 24)]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=256))]
    pub(crate) jobs: u16,
    /// Forget the runs that an earlier call left in the report's directory
    #[arg(long, alias = "again")]
    pub(crate) fresh: bool,
}
