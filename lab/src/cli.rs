//! The command line and its help.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use crate::{
    commands::{self, run::Defined},
    topology::LinkBackend,
};

/// Experiments on emulated links: gains and costs of settings of TCP retransmission timers
#[derive(Debug, Parser)]
#[command(name = "rto-lab", version)]
pub struct Cli {
    /// The command
    #[command(subcommand)]
    pub verb: Verb,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Predict how long connections would be idle in disruptions, using the model
    Predict(commands::predict::Predict),
    /// Recommend an initial RTO and an rto_min for a packet capture
    Advise(commands::advise::Advise),
    /// Measure how long a connection is idle if all its packets are lost for a while, by rto_min and backoff
    Blackout(commands::blackout::Blackout),
    /// Measure how often an RTO is too short, by estimator, sampling and minimum: for generated load, a capture or the
    /// agent's statistics
    Estimator(commands::estimator::Estimator),
    /// Measure a file from nginx and from Apache beside background load, by rto_min; and simulate it by estimator
    File(commands::file::File),
    /// Measure how long connect() takes when SYNs or SYN-ACKs are lost for a while, by the end that has the agent
    Outage(commands::outage::Outage),
    /// Render the logs of experiments again
    Report(commands::report::ReportArgs),
    /// Measure pages of many objects with correlated losses: tail loss probes, RTO restart, rto_min, a browser
    Pages(Defined),
    /// Measure what clients of real programs gain: nginx, PostgreSQL, Redis, gRPC
    Programs(Defined),
    /// Compare two logs of the same experiment: kernels, versions, settings
    Compare(commands::report::Compare),
    /// Measure request/response between two hosts: latencies, idle times, and TCP's view of them
    Rr(commands::rr::Rr),
    /// Measure connections to a server: handshakes per second, and percentiles of their duration
    Connect(commands::connect::Connect),
    /// Measure round-trip times as seen by TCP at each end and by the application, by pause and delayed-ACK timer
    Rtt(Defined),
    /// Measure what a lost packet costs a small HTTP/1.1 transfer, compared with published measurements
    Loss(Defined),
    /// Run your own experiment, which a TOML file defines: factors, link, workload, outages
    Run {
        /// The experiment's file; docs/research/lab.md documents its keys
        file: PathBuf,
        /// Options
        #[command(flatten)]
        options: Defined,
    },
    /// Measure round-trip times as a packet sampler reads them, beside TCP's, the application's and ping's
    Sampler(Defined),
    /// Measure flows that lose their last segments: tail loss probes, RTO restart and rto_min, by round-trip time
    Tail(Defined),
    /// Measure which workloads gain from which timer: HTTP/1.1, HTTP/2, gRPC, TLS, health checks, request/response
    Workloads(Defined),
    /// Simulate the effects of initial_rto = "auto" on connections: generated paths, steps, overload, a dead daemon
    Tune(commands::tune::Tune),
    /// Run one end of an experiment's connection
    #[command(hide = true)]
    Workload {
        /// Its role, as JSON
        role: String,
    },
}

/// Options of every experiment.
#[derive(Clone, Debug, Args)]
pub struct Common {
    /// Run a small part of it, in less than two minutes
    #[arg(long)]
    pub quick: bool,
    /// Seed of all random choices; the same seed repeats them
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Directory of the report: HTML, JSON, Markdown and CSV files
    #[arg(long, value_name = "DIR", default_value = "rto-lab-report")]
    pub out: PathBuf,
    /// Print JSON instead of text
    #[arg(long)]
    pub json: bool,
    /// The agent's binary [default: next to this one, or in PATH]
    #[arg(long, value_name = "PATH", env = "RTO_AGENT_BIN")]
    pub agent: Option<PathBuf>,
}

/// Additional options of experiments on links.
#[derive(Clone, Debug, Args)]
pub struct EngineArgs {
    #[command(flatten)]
    pub(crate) common: Common,
    /// The kind of link
    #[arg(long, value_enum, default_value_t)]
    pub(crate) link: LinkBackend,
    /// Simultaneous runs: in an outage most of them wait for its end
    #[arg(long, value_name = "N", default_value_t = 24)]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=256))]
    pub(crate) jobs: u16,
    /// Congestion controls to compare, for example reno,bbr; those that the host does not allow are left out
    #[arg(
        long,
        value_name = "NAME",
        value_delimiter = ',',
        default_value = "reno"
    )]
    pub(crate) congestion: Vec<String>,
    /// Discard the runs that an earlier call left in the report's directory
    #[arg(long)]
    pub(crate) fresh: bool,
}
