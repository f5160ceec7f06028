//! `GET /v1/experiments` and what starts, stops and clears one: a policy's timers against the kernel's own.

use std::collections::BTreeMap;

use rto_model::tune::experiment::{Arms, Counts, Experiment, Outcome, SpillOver, Unit, Verdict};
use serde::{Deserialize, Serialize};

use super::types::Caller;
use crate::policy::{PolicyName, Share};

/// Largest e-value that is told: JSON has no infinity.
const LARGEST_E: f64 = 1e300;

/// `POST /v1/experiments/{policy}`. An empty object has the defaults.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct StartRequest {
    /// Rising shares of connections (or peers) that are treated, 1% to 99%; empty: 5%, 50% and 95% of connections, or
    /// 50% of peers.
    pub ramp: Vec<Share>,
    /// How long it runs at most, "7d"; absent: a week.
    #[serde(rename = "for", skip_serializing_if = "Option::is_none")]
    pub duration: Option<String>,
    /// What is drawn into an arm; absent: connections where the policy sets handshake timers alone, else peers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unit: Option<UnitView>,
    /// Treat all connections once the gain is proven at the last share.
    pub promote: bool,
    /// The same on all hosts whose counts are to be merged; absent: the policy's name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

/// What is drawn into an arm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum UnitView {
    /// Each connection.
    Connection,
    /// All connections of a peer.
    Peer,
}

impl UnitView {
    /// "connections" or "peers".
    pub const fn plural(self) -> &'static str {
        match self {
            Self::Connection => "connections",
            Self::Peer => "peers",
        }
    }
}

impl From<UnitView> for Unit {
    fn from(unit: UnitView) -> Self {
        match unit {
            UnitView::Connection => Self::Connection,
            UnitView::Peer => Self::Peer,
        }
    }
}

impl From<Unit> for UnitView {
    fn from(unit: Unit) -> Self {
        match unit {
            Unit::Connection => Self::Connection,
            Unit::Peer => Self::Peer,
        }
    }
}

/// What starting, stopping and clearing one answer.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct ExperimentAnswer {
    /// The experiment; absent once it is cleared.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub experiment: Option<ExperimentView>,
    /// What to know, one sentence each.
    pub notes: Vec<String>,
}

/// `GET /v1/experiments`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct ExperimentsAnswer {
    /// When, Unix seconds.
    pub at_s: u64,
    /// By policy: those that run, and the last one of each policy until it is cleared or another is started.
    pub experiments: BTreeMap<PolicyName, ExperimentView>,
}

/// How an experiment stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// It has begun, and outcomes of connections of before still come in: nothing is counted yet.
    Settling,
    /// It counts.
    Running,
    /// A gain is proven at all shares; the last one stays, and harm is still judged.
    GainProven,
    /// The same, and the policy is in force as configured.
    Promoted,
    /// Harm is proven: no connection is treated.
    Harm,
    /// The arms do not have the connections that they should have: no connection is treated.
    Invalid,
    /// Its time is over and nothing was proven: no connection is treated.
    Inconclusive,
    /// Stopped by the operator, or by a change of the policy.
    Stopped,
}

impl State {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::Settling,
        Self::Running,
        Self::GainProven,
        Self::Promoted,
        Self::Harm,
        Self::Invalid,
        Self::Inconclusive,
        Self::Stopped,
    ];

    /// As in JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Settling => "settling",
            Self::Running => "running",
            Self::GainProven => "gain-proven",
            Self::Promoted => "promoted",
            Self::Harm => "harm",
            Self::Invalid => "invalid",
            Self::Inconclusive => "inconclusive",
            Self::Stopped => "stopped",
        }
    }

    /// Whether it may still come to another end.
    pub const fn is_running(self) -> bool {
        matches!(self, Self::Settling | Self::Running)
    }
}

impl From<Option<Verdict>> for State {
    fn from(verdict: Option<Verdict>) -> Self {
        match verdict {
            None => Self::Running,
            Some(Verdict::GainProven { promoted: false }) => Self::GainProven,
            Some(Verdict::GainProven { promoted: true }) => Self::Promoted,
            Some(Verdict::Harm { .. }) => Self::Harm,
            Some(Verdict::Invalid) => Self::Invalid,
            Some(Verdict::Inconclusive) => Self::Inconclusive,
            Some(Verdict::Stopped) => Self::Stopped,
        }
    }
}

/// What was counted, and what was judged of it: what `rto-agent experiment show --merge` reads.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Evidence {
    /// With the counts that are judged.
    pub experiment: Experiment,
    /// Counts that are shown and not judged: of peers, or of outcomes that connections of before the start may have.
    pub unjudged: Arms<Counts>,
    /// Whether outcomes are judged that come at the end of a connection: no connection of before was open.
    pub judges_ends: bool,
}

impl Evidence {
    /// All that was counted.
    pub fn counts(&self) -> Arms<Counts> {
        self.experiment.counts() + self.unjudged
    }

    /// What is drawn.
    pub fn unit(&self) -> UnitView {
        self.experiment.design().unit.into()
    }

    /// Whether an outcome is judged: nothing is where peers are drawn, as connections are counted, and nothing that
    /// comes at the end of a connection where connections of before may be open. Aborts never: they are counted after a
    /// retransmission, also a spurious one, of which the treatment has more.
    pub fn judges(&self, outcome: Outcome) -> bool {
        self.unit() == UnitView::Connection
            && match outcome {
                Outcome::Failed | Outcome::Beyond500Ms | Outcome::Spurious => true,
                Outcome::Dsack => self.judges_ends,
                Outcome::Aborted => false,
            }
    }
}

/// An experiment: what it compares, what it has counted, and what that says.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct ExperimentView {
    /// How it stands.
    pub state: State,
    /// The same in a sentence.
    pub text: String,
    /// The share that is treated now, 0 to 1.
    pub share: f64,
    /// What is drawn into an arm.
    pub unit: UnitView,
    /// The shares of the ramp, 0 to 1.
    pub ramp: Vec<f64>,
    /// Which of them was reached, from 1.
    pub step: usize,
    /// Whether all connections are treated once the gain is proven.
    pub promote: bool,
    /// The same on all hosts whose counts can be merged.
    pub name: String,
    /// The hosts whose counts are in it.
    pub hosts: Vec<String>,
    /// Who started it; absent of merged ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by: Option<Caller>,
    /// Since when it counts, Unix seconds.
    pub started_s: u64,
    /// How long it runs at most, seconds.
    pub duration_s: u64,
    /// When it ended, Unix seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended_s: Option<u64>,
    /// When the gain was proven, Unix seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gain_proven_s: Option<u64>,
    /// What it waits for, one thing each.
    pub waits_for: Vec<String>,
    /// How to read it, one sentence each.
    pub notes: Vec<String>,
    /// Attempts to connect, by arm.
    pub attempts: ArmsView<u64>,
    /// What became of them.
    pub outcomes: Vec<OutcomeView>,
    /// The ratio of the shares beyond 500 ms, treated to control; absent where peers are drawn.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ratio: Option<RatioView>,
    /// The e-value of a gain: proven from 20 on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gain_e: Option<f64>,
    /// The e-value of a sample-ratio mismatch: invalid from 1000 on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mismatch_e: Option<f64>,
    /// How the control arm has changed with the share.
    pub spill_over: SpillOverView,
    /// Quantiles of the handshakes' time by arm: never tested.
    pub handshake: Vec<QuantileView>,
    /// What `rto-agent experiment show --merge` reads.
    #[cfg_attr(test, schemars(with = "serde_json::Value"))]
    pub evidence: Evidence,
}

/// One thing for each arm.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct ArmsView<T> {
    /// Of connections with the policy's timers.
    pub treated: T,
    /// Of connections with the kernel's own.
    pub control: T,
}

/// A bad outcome in both arms.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct OutcomeView {
    /// "failed", "beyond-500-ms", "spurious", "dsack" or "aborted" (after a retransmission).
    pub outcome: String,
    /// How many had it.
    pub count: ArmsView<u64>,
    /// Their share of the attempts, 0 to 1; absent without any.
    pub rate: ArmsView<Option<f64>>,
    /// The e-value of harm: proven from 400 on; absent where it is not judged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub harm_e: Option<f64>,
}

/// A ratio of rates.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct RatioView {
    /// The likeliest one, each share of the ramp by itself; absent while the control arm has had nothing bad.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub likeliest: Option<f64>,
    /// Lower end of the interval that holds at any time one looks (95 %).
    pub low: f64,
    /// Upper end; absent: none yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub high: Option<f64>,
}

/// How the control arm has changed from the ramp's first share to the present one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct SpillOverView {
    /// It fares so much worse that the treatment may be the cause: the ramp is held.
    pub suspected: bool,
    /// The share beyond 500 ms, 0 to 1; absent until both steps have twelve blocks of time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub beyond_500_ms: Option<ChangeView>,
    /// The median RTT, microseconds; as above.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub median_rtt_us: Option<ChangeView>,
}

/// A value of the control arm at the first share and at the present one.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct ChangeView {
    /// At the first share.
    pub first: f64,
    /// At the present one.
    pub present: f64,
    /// The least rise that would be seen.
    pub visible: f64,
}

impl From<SpillOver> for SpillOverView {
    fn from(spill_over: SpillOver) -> Self {
        let change = |change: rto_model::tune::experiment::Change| ChangeView {
            first: change.first,
            present: change.present,
            visible: change.visible,
        };
        Self {
            suspected: spill_over.is_suspected(),
            beyond_500_ms: spill_over.beyond_500_ms.map(change),
            median_rtt_us: spill_over.median_rtt_us.map(change),
        }
    }
}

/// A quantile of the handshakes' time, microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct QuantileView {
    /// 0 to 1.
    pub quantile: f64,
    /// Its value, upper end of a bucket, by arm.
    pub value_us: ArmsView<Option<u64>>,
    /// 90 % of the draws of whole blocks of time were from here, by arm; absent of fewer than 20 blocks, and where
    /// peers are drawn.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub low_us: Option<ArmsView<u64>>,
    /// And up to here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub high_us: Option<ArmsView<u64>>,
}

/// In `GET /v1/status`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct ExperimentSummary {
    /// How it stands.
    pub state: State,
    /// The same in a sentence.
    pub text: String,
    /// The share that is treated now, 0 to 1.
    pub share: f64,
    /// E-values: "gain", "mismatch", and "harm-" and an outcome; none where peers are drawn.
    pub e_values: BTreeMap<String, f64>,
}

/// An outcome's name, as in JSON.
pub const fn outcome_name(outcome: Outcome) -> &'static str {
    match outcome {
        Outcome::Failed => "failed",
        Outcome::Beyond500Ms => "beyond-500-ms",
        Outcome::Spurious => "spurious",
        Outcome::Dsack => "dsack",
        Outcome::Aborted => "aborted",
    }
}

/// The e-value of a logarithm.
pub fn e_value(ln_e: f64) -> f64 {
    ln_e.exp().min(LARGEST_E)
}
