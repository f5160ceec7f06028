//! `rto-agent experiment`.

use std::path::PathBuf;

use anyhow::Context as _;
use clap::{Args, Subcommand};
use rto_agent_core::policy::{PolicyName, Share};
use rto_model::tune::experiment::Unit;

use super::values;

/// `rto-agent experiment`.
#[derive(Debug, Args)]
pub struct Experiment {
    /// What to do
    #[command(subcommand)]
    pub(crate) verb: ExperimentVerb,
    /// The daemon's socket
    #[arg(long, global = true, env = "RTO_AGENT_SOCKET", default_value = rto_agent_core::config::DEFAULT_SOCKET)]
    pub(crate) socket: PathBuf,
    /// Print JSON; the fields are documented and stable
    #[arg(long, global = true)]
    pub(crate) json: bool,
}

/// What to do with experiments.
#[derive(Debug, Subcommand)]
pub enum ExperimentVerb {
    /// Treat a share of a policy's connections and compare them with the others
    Start(StartExperiment),
    /// Show the counts of both arms and the verdict
    Show(ShowExperiment),
    /// Stop a running experiment: connections are no longer treated
    Stop(OfPolicy),
    /// Clear an ended experiment: the policy is active as configured again
    Clear(OfPolicy),
}

/// `rto-agent experiment start`.
#[derive(Debug, Args)]
pub struct StartExperiment {
    #[command(flatten)]
    pub(crate) of: OfPolicy,
    /// Shares to treat, in rising order, 1% to 99% [default: 5%,50%,95% of connections, or 50% of
    /// peers]
    #[arg(long, value_name = "SHARE,...", value_delimiter = ',')]
    pub(crate) ramp: Vec<Share>,
    /// Maximum duration
    #[arg(long = "for", value_name = "DURATION", default_value = "7d", value_parser = values::ttl_text)]
    pub(crate) duration: String,
    /// What is assigned to an arm [default: connections; peers if the policy sets more than
    /// handshake timers]
    ///
    /// With peers there is no verdict: rates are shown, but nothing is proven.
    #[arg(long, value_parser = values::unit())]
    pub(crate) unit: Option<Unit>,
    /// Treat all connections once a gain is proven at the last share
    #[arg(long)]
    pub(crate) promote: bool,
    /// Name of the experiment; give all hosts whose counts you want to merge the same name
    /// [default: the policy's name]
    #[arg(long, value_name = "NAME")]
    pub(crate) name: Option<String>,
}

/// `rto-agent experiment show`.
#[derive(Debug, Args)]
pub struct ShowExperiment {
    /// Show only the experiment of this policy
    pub(crate) policy: Option<PolicyName>,
    /// The policy, as an option
    #[arg(
        long = "policy",
        short = 'p',
        id = "policy-option",
        value_name = "NAME",
        conflicts_with = "policy"
    )]
    pub(crate) option: Option<PolicyName>,
    /// Merge the experiments of several hosts, from their `rto-agent experiment show --json`
    /// outputs, without a daemon
    #[arg(long, value_name = "FILE", num_args = 1..)]
    pub(crate) merge: Vec<PathBuf>,
}

/// One policy, as `rto-agent experiment stop POLICY` or with the option that other verbs have.
#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
pub struct OfPolicy {
    /// An active policy
    pub(crate) policy: Option<PolicyName>,
    /// The policy, as an option
    #[arg(
        long = "policy",
        short = 'p',
        id = "policy-option",
        value_name = "NAME"
    )]
    pub(crate) option: Option<PolicyName>,
}

impl ShowExperiment {
    /// Whichever is given.
    pub(crate) fn policy(&self) -> Option<&PolicyName> {
        self.policy.as_ref().or(self.option.as_ref())
    }
}

impl OfPolicy {
    /// Whichever is given: clap takes care that one is.
    pub(crate) fn name(&self) -> anyhow::Result<&PolicyName> {
        let name = self.policy.as_ref().or(self.option.as_ref());
        name.context("give the policy with --policy")
    }
}
