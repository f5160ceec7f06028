//! `GET /v1/experiments`, and the requests that start, stop and clear an experiment: a policy's
//! timers against the kernel's own.

use std::collections::BTreeMap;

pub use rto_model::tune::experiment::State;
use rto_model::tune::experiment::{Arms, Assessment, Counts, Experiment, ShareResult, Unit};
use serde::{Deserialize, Serialize};

use super::{histogram::HistogramView, types::Caller};
use crate::policy::{PolicyName, Share};

/// `POST /v1/experiments/{policy}`. An empty object has the defaults.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct StartRequest {
    /// Rising shares of connections (or peers) that are treated, 1% to 99%; empty: 5%, 50% and 95% of connections, or
    /// 50% of peers.
    pub ramp: Vec<Share>,
    /// Maximum duration, for example "7d"; absent: a week.
    #[serde(rename = "for", skip_serializing_if = "Option::is_none")]
    pub duration: Option<String>,
    /// What is assigned to an arm; absent: connections if the policy sets only handshake timers,
    /// else peers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unit: Option<Unit>,
    /// Treat all connections once the gain is proven at the last share.
    pub promote: bool,
    /// Name of the experiment; use the same name on all hosts whose counts you want to merge;
    /// absent: the policy's name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

/// The answer to starting, stopping and clearing an experiment.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct ExperimentAnswer {
    /// The experiment; absent after it was cleared.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub experiment: Option<ExperimentView>,
    /// Notes, one sentence each.
    pub notes: Vec<String>,
}

/// `GET /v1/experiments`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct ExperimentsAnswer {
    /// When, Unix seconds.
    pub at_s: u64,
    /// By policy: running experiments, and the last one of each policy until it is cleared or another is started.
    pub experiments: BTreeMap<PolicyName, ExperimentView>,
}

/// An experiment: the result, and the data behind it.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct ExperimentView {
    /// The numbers of bad connects and of all connects in each arm, and the ratio, in a sentence.
    pub answer: String,
    /// The verdict, in a sentence.
    pub text: String,
    /// What happens next, one step each; empty after the end.
    pub next: Vec<String>,
    /// The counts and the ratio behind the result, from the latest share with a bad connect.
    pub result: ShareResult,
    /// Its state.
    pub state: State,
    /// Whether a gain was proven.
    pub gain_proven: bool,
    /// The share that is treated now, 0 to 1.
    pub share: f64,
    /// What is assigned to an arm.
    pub unit: Unit,
    /// The shares of the ramp, 0 to 1.
    pub ramp: Vec<f64>,
    /// Number of the current share, from 1.
    pub step: usize,
    /// Whether all connections are treated once the gain is proven.
    pub promote: bool,
    /// Name of the experiment; the same on all hosts whose counts can be merged.
    pub name: String,
    /// The hosts whose counts are in it.
    pub hosts: Vec<String>,
    /// Who started it; absent for merged experiments.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by: Option<Caller>,
    /// When it was started, Unix seconds; absent for merged experiments.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub started_s: Option<u64>,
    /// Maximum duration, seconds.
    pub duration_s: u64,
    /// How long it was observed, seconds.
    pub elapsed_s: u64,
    /// When it ended, Unix seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended_s: Option<u64>,
    /// Notes on the result, one sentence each.
    pub notes: Vec<String>,
    /// Counts, all shares together.
    pub counts: Arms<Counts>,
    /// Counts by share, for all shares that were reached.
    pub shares: Vec<ShareResult>,
    /// Evaluation of the counts; absent if peers are randomised.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub evidence: Option<Assessment>,
    /// Connect times by arm, losses included; not used for the verdict.
    pub connect_time: Arms<HistogramView>,
    /// Data for `rto-agent experiment show --merge`.
    #[cfg_attr(test, schemars(with = "serde_json::Value"))]
    pub experiment: Experiment,
}
