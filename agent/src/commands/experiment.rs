//! `rto-agent experiment`.

use std::{fs, path::Path, process::ExitCode};

use anyhow::{Context as _, bail, ensure};
use rto_model::tune::experiment::{Arms, Experiment as Counted};

pub(super) mod text;

use rto_agent_core::{
    policy::PolicyName,
    wire::{
        experiments::{ExperimentAnswer, ExperimentView, ExperimentsAnswer, StartRequest},
        histogram::HistogramView,
    },
};
use rto_agent_daemon::experiment::merged;

use super::print;
use crate::{
    cli::{Experiment, ExperimentVerb, OfPolicy, ShowExperiment, StartExperiment},
    client::Client,
};

pub(super) fn run(args: &Experiment) -> anyhow::Result<ExitCode> {
    let client = Client::new(&args.socket);
    let path = |policy: &PolicyName| format!("/v1/experiments/{policy}");
    let end = |of: &OfPolicy, verb: &str| -> anyhow::Result<_> {
        let policy = of.name()?;
        let answer = client.post(&format!("{}/{verb}", path(policy)), &())?;
        Ok((policy.clone(), answer))
    };
    let (policy, answer): (_, ExperimentAnswer) = match &args.verb {
        ExperimentVerb::Start(start) => {
            let policy = start.of.name()?;
            (policy.clone(), client.post(&path(policy), &request(start))?)
        }
        ExperimentVerb::Stop(of) => end(of, "stop")?,
        ExperimentVerb::Clear(of) => end(of, "clear")?,
        ExperimentVerb::Show(show) => {
            let answer = if show.merge.is_empty() {
                shown(client.get("/v1/experiments")?, show)?
            } else {
                merge(show)?
            };
            return print(args.json, &answer, || text::all(&answer));
        }
    };
    print(args.json, &answer, || text::answer(&answer, &policy))
}

fn request(start: &StartExperiment) -> StartRequest {
    StartRequest {
        ramp: start.ramp.clone(),
        duration: Some(start.duration.clone()),
        unit: start.unit,
        promote: start.promote,
        name: start.name.clone(),
    }
}

fn shown(
    mut answer: ExperimentsAnswer,
    show: &ShowExperiment,
) -> anyhow::Result<ExperimentsAnswer> {
    if let Some(policy) = show.policy() {
        answer.experiments.retain(|name, _| name == policy);
        ensure!(
            !answer.experiments.is_empty(),
            "policy {policy} has no experiment; start one with rto-agent experiment start {policy}"
        );
    }
    Ok(answer)
}

/// Merges the experiments of several hosts.
fn merge(show: &ShowExperiment) -> anyhow::Result<ExperimentsAnswer> {
    let mut all = Vec::new();
    let mut at_s = 0;
    for path in &show.merge {
        let answer = read(path).with_context(|| path.display().to_string())?;
        at_s = at_s.max(answer.at_s);
        let view = one(answer, show.policy());
        all.push(view.with_context(|| path.display().to_string())?);
    }
    let counted: Vec<_> = all
        .iter()
        .map(|(_, view)| view.experiment.clone())
        .collect();
    let experiment = Counted::merge(&counted)?;
    let times = all.iter().map(|(_, view)| view.connect_time.clone());
    let connect_time = times.fold(Arms::default(), |sum: Arms<HistogramView>, times| {
        sum.zip(&times, |sum, times| sum.with(times, u64::saturating_add))
    });
    let policy = all.into_iter().next().map(|(policy, _)| policy);
    let policy = policy.context("there is nothing to merge")?;
    Ok(ExperimentsAnswer {
        at_s,
        experiments: [(policy, merged(&experiment, connect_time))].into(),
    })
}

fn read(path: &Path) -> anyhow::Result<ExperimentsAnswer> {
    let text = fs::read_to_string(path)?;
    serde_json::from_str(&text).context("not the output of rto-agent experiment show --json")
}

/// The experiment of a file that the command line selects.
fn one(
    answer: ExperimentsAnswer,
    policy: Option<&PolicyName>,
) -> anyhow::Result<(PolicyName, ExperimentView)> {
    let mut all = answer.experiments;
    let names = all.keys().map(PolicyName::as_str).collect::<Vec<_>>();
    let names = names.join(", ");
    if let Some(policy) = policy {
        let view = all.remove(policy);
        let view = view.with_context(|| match names.as_str() {
            "" => "the file has no experiment".to_owned(),
            names => format!("the file has no experiment of {policy}, only of {names}"),
        })?;
        return Ok((policy.clone(), view));
    }
    match all.pop_first() {
        None => bail!("the file has no experiment"),
        Some(first) if all.is_empty() => Ok(first),
        Some(_) => bail!("the file has experiments of {names}: give the policy"),
    }
}

#[cfg(test)]
mod tests;
