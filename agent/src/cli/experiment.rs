//! `rto-agent experiment`.

use std::path::PathBuf;

use anyhow::Context as _;
use clap::{Args, Subcommand};
use rto_model::tune::experiment::Unit;

use super::values;
use crate::policy::{PolicyName, Share};

/// `rto-agent experiment`.
#[derive(Debug, Args)]
pub struct Experiment {
    /// What to do
    #[command(subcommand)]
    pub(crate) verb: ExperimentVerb,
    /// The daemon's socket
    #[arg(long, global = true, env = "RTO_AGENT_SOCKET", default_value = crate::config::DEFAULT_SOCKET)]
    pub(crate) socket: PathBuf,
    /// Print JSON; its fields are documented and stable
    #[arg(long, global = true)]
    pub(crate) json: bool,
}

/// What to do with experiments.
#[derive(Debug, Subcommand)]
pub enum ExperimentVerb {
    /// Treat a share of a policy's connections, and compare them with the others
    Start(StartExperiment),
    /// What was counted in both arms, and what that says
    Show(ShowExperiment),
    /// Stop a running experiment: no connection is treated any more
    Stop(OfPolicy),
    /// Forget one that has ended: the policy is in force as configured
    Clear(OfPolicy),
}

/// `rto-agent experiment start`.
#[derive(Debug, Args)]
pub struct StartExperiment {
    #[command(flatten)]
    pub(crate) of: OfPolicy,
    /// Rising shares that are treated, 1% to 99% [default: 5%,50%,95%; 50% of peers]
    #[arg(long, value_name = "SHARE,...", value_delimiter = ',')]
    pub(crate) ramp: Vec<Share>,
    /// How long it runs at most
    #[arg(long = "for", value_name = "DURATION", default_value = "7d", value_parser = values::ttl_text)]
    pub(crate) duration: String,
    /// What is drawn into an arm [default: connections; peers where the policy sets more than handshake timers]
    ///
    /// Where peers are drawn nothing is proven: rates are shown without a verdict.
    #[arg(long, value_parser = values::unit())]
    pub(crate) unit: Option<Unit>,
    /// Treat all connections once the gain is proven at the last share
    #[arg(long)]
    pub(crate) promote: bool,
    /// The same on all hosts whose counts are to be merged [default: the policy's name]
    #[arg(long, value_name = "NAME")]
    pub(crate) name: Option<String>,
}

/// `rto-agent experiment show`.
#[derive(Debug, Args)]
pub struct ShowExperiment {
    /// Only that of this policy
    pub(crate) policy: Option<PolicyName>,
    /// The same policy as an option
    #[arg(
        long = "policy",
        short = 'p',
        id = "policy-option",
        value_name = "NAME",
        conflicts_with = "policy"
    )]
    pub(crate) option: Option<PolicyName>,
    /// Those of several hosts as one: what `rto-agent experiment show --json` printed on each; no daemon is asked
    #[arg(long, value_name = "FILE", num_args = 1..)]
    pub(crate) merge: Vec<PathBuf>,
}

/// One policy, as `rto-agent experiment stop POLICY` or with the option that other verbs have.
#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
pub struct OfPolicy {
    /// A policy in force
    pub(crate) policy: Option<PolicyName>,
    /// The same policy as an option
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
        name.context("which policy? name it with --policy")
    }
}
