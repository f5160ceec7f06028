//! Requests about experiments, and their evaluation once a second.

use std::{collections::BTreeSet, net::IpAddr};

use nix::sys::utsname::uname;
use rto_agent_core::{
    policy::{PolicyName, Settings, compile::Compiled},
    wire::{
        events::{ExperimentEvent, StreamItem, TunedEvent},
        experiments::{ExperimentAnswer, StartRequest, State},
        types::{Caller, now_ms, now_s},
    },
};
use rto_agent_kernel::kernel::clock::boottime_ms;
use rto_model::tune::experiment::{Design, Event, Unit, Verdict};
use tracing::{info, warn};

use super::{Control, Readings, design::design, readings};
use crate::{
    engine::{EngineError, apply::Apply, audit::Cause, detach_mark::DETACHED, error::refused},
    experiment::{MOST_COUNTING, Record},
};

/// Fewest peers an arm may have.
const LEAST_PEERS: f64 = 20.0;

impl Control {
    /// `rto-agent experiment start`.
    pub(in crate::engine) fn start_experiment(
        &mut self,
        apply: &mut Apply,
        policy: PolicyName,
        request: &StartRequest,
        by: Caller,
    ) -> Result<ExperimentAnswer, EngineError> {
        apply.check_not_restoring()?;
        self.check_can_experiment(apply, &policy)?;
        let resolved = apply.resolved().clone();
        let settings = match resolved.set.policies.get(&policy) {
            Some(known) => &known.settings,
            None => return refused(resolved.desired.unknown_policy(&policy)),
        };
        let design = design(&policy, settings, request)?;
        if let Some(compiled) = resolved.policies.get(&policy)
            && !compares(settings, compiled)
        {
            return refused(format!(
                "policy {policy} has nothing to compare, because none of its timers is applied: it sets \
                 none (mode = \"advise\" does not apply any), they are not learnt yet, or its guard holds \
                 them back"
            ));
        }
        let Some(reader) = apply.reader() else {
            return refused(DETACHED);
        };
        let Some(statistics) = reader.statistics_of(&policy)? else {
            return refused(DETACHED);
        };
        let mut notes = Vec::new();
        if design.unit == Unit::Peer {
            let is_peer = |address: &IpAddr| {
                let entry = resolved.set.entry_for(*address);
                entry.is_some_and(|(entry, _)| *entry.policy == policy)
            };
            let peers: BTreeSet<IpAddr> =
                reader.recent_peers().into_iter().filter(is_peer).collect();
            check_peers(&design, peers.len())?;
            if peers.is_empty() {
                notes.push(
                    "the number of peers is unknown: in the last hour no connection of this \
                     network namespace to a peer of the policy ended"
                        .to_owned(),
                );
            }
        }
        let host = host_name();
        let record = Record::start(design, host, by, &statistics, now_s())
            .map_err(|e| EngineError::Refused(e.to_string()))?;
        if let Some(holdout) = settings.control_share() {
            notes.push(format!(
                "while it runs, its control arm replaces that of holdout = {holdout}"
            ));
        }
        let before = self.experiments.replace(&policy, Some(record));
        let saved = self.experiments.try_save();
        let saved = saved.map_err(|unsaved| EngineError::Unsaved(unsaved.error));
        let cause = Cause::done("experiment start", by);
        if let Err(e) = saved.and_then(|()| self.adjust(apply, &cause).map(drop)) {
            self.experiments.replace(&policy, before);
            self.experiments.save();
            return Err(e);
        }
        self.answer_experiment(apply, &policy, "started", notes)
    }

    /// `rto-agent experiment stop`.
    pub(in crate::engine) fn stop_experiment(
        &mut self,
        apply: &mut Apply,
        policy: &PolicyName,
        by: Caller,
    ) -> Result<ExperimentAnswer, EngineError> {
        self.look_now(apply);
        // An experiment may have ended just before the stop. Applied even if the stop is refused.
        self.adjust_or_retry(apply);
        let before = self.experiments.get(policy)?;
        if !before.is_counting() {
            let text = before.text();
            return refused(format!("the experiment of {policy} has ended: {text}"));
        }
        let mut stopped = before.clone();
        stopped.stop(now_s());
        self.experiments.replace(policy, Some(stopped));
        if let Err(unsaved) = self.experiments.try_save()
            && unsaved.of_boot.is_some()
        {
            self.experiments.replace(policy, Some(before));
            return Err(EngineError::Unsaved(unsaved.error));
        }
        if let Err(e) = self.adjust(apply, &Cause::done("experiment stop", by)) {
            self.experiments.replace(policy, Some(before));
            self.experiments.save();
            return Err(e);
        }
        let unsaved = self.experiments.problem().cloned();
        self.answer_experiment(apply, policy, "stopped", unsaved.into_iter().collect())
    }

    /// `rto-agent experiment clear`.
    pub(in crate::engine) fn clear_experiment(
        &mut self,
        apply: &mut Apply,
        policy: &PolicyName,
        by: Caller,
    ) -> Result<ExperimentAnswer, EngineError> {
        if self.experiments.get(policy)?.state() == State::Running {
            return refused(format!(
                "the experiment of {policy} is still running: stop it first, with rto-agent \
                 experiment stop {policy}"
            ));
        }
        let before = self.experiments.replace(policy, None);
        let cause = Cause::done("experiment clear", by);
        match self.adjust(apply, &cause) {
            Ok(Some(_)) => {}
            Ok(None) => cause.audit_other("experiment clear"),
            Err(e) => {
                self.experiments.replace(policy, before);
                return Err(e);
            }
        }
        self.experiments.save();
        let text = "cleared: the policy is active as configured";
        let notes = std::iter::once(format!("{policy}: {text}"));
        let notes = notes.chain(self.experiments.problem().cloned());
        let notes = notes.collect();
        self.answer_experiment(apply, policy, text, notes)
    }

    /// After a start with an earlier run's counters: finds arms that were not drawn as the
    /// experiments say.
    pub(in crate::engine) fn resume_experiments(&mut self, apply: &Apply) {
        let mut all = self.experiments.shared.lock();
        for policy in apply.reconciler().arms_changed_at_start() {
            if let Some(record) = all.get_mut(policy) {
                record.arms_changed();
            }
        }
    }

    /// Before the counters are removed: evaluates and saves what they hold.
    pub(in crate::engine) fn keep_experiments(&mut self, apply: &Apply) {
        if apply.detached_by().is_none() && self.experiments.needs_ticks() {
            self.look_now(apply);
            self.experiments.save();
        } else {
            self.experiments.retry_save();
        }
    }

    fn check_can_experiment(&self, apply: &Apply, policy: &PolicyName) -> Result<(), EngineError> {
        if self.is_blind {
            return refused("no statistics: statistics = false in [agent]");
        }
        if let Some(by) = apply.detached_by() {
            return refused(by.detached());
        }
        if let Some(reader) = apply.reader()
            && reader.missing_stats().contains(policy)
        {
            return refused(format!(
                "policy {policy} has no statistics, because there was not enough memory"
            ));
        }
        let all = self.experiments.shared.lock();
        if all.counting().count() >= MOST_COUNTING {
            return refused(format!(
                "{MOST_COUNTING} experiments are running on this host, the limit; stop one with \
                 rto-agent experiment stop"
            ));
        }
        if let Some(record) = all.get(policy)
            && record.is_counting()
        {
            return refused(format!(
                "an experiment of {policy} is already running: {}; stop it with rto-agent \
                 experiment stop {policy}",
                record.text()
            ));
        }
        Ok(())
    }

    fn answer_experiment(
        &self,
        apply: &Apply,
        policy: &PolicyName,
        what: &str,
        notes: Vec<String>,
    ) -> Result<ExperimentAnswer, EngineError> {
        let all = self.experiments.shared.lock();
        let view = all.get(policy).map(Record::view);
        drop(all);
        let text = match &view {
            Some(view) => format!("{what}: {}", view.text),
            None => what.to_owned(),
        };
        info!(%policy, "experiment: {text}");
        tell_experiment(apply, policy, &text);
        Ok(ExperimentAnswer {
            experiment: view,
            notes,
        })
    }

    /// Evaluates the experiments now, not in the next tick.
    fn look_now(&mut self, apply: &Apply) {
        if let Some(mut readings) = readings(apply) {
            let told = self.look_at_experiments(apply, &mut readings);
            self.tell_decisions(apply, &told);
        }
    }

    /// Evaluates the arms' counters, with the consequences for learnt and guarded timers.
    /// [`Self::adjust`] applies the result.
    pub(super) fn look_at_experiments(
        &mut self,
        apply: &Apply,
        readings: &mut Readings,
    ) -> Vec<TunedEvent> {
        let (now_ms, mut told, mut is_changed) = (boottime_ms(), Vec::new(), false);
        {
            let mut all = self.experiments.shared.lock();
            let counting: Vec<PolicyName> = all.counting().cloned().collect();
            let in_force = &apply.desired().adjustments;
            let resolved = apply.resolved();
            for policy in counting {
                let is_missing = readings.reader().missing_stats().contains(&policy);
                let Ok(Some(statistics)) = readings.shared(&policy) else {
                    // The counters continue; the next evaluation includes these connections.
                    continue;
                };
                let Some(record) = all.get_mut(&policy) else {
                    continue;
                };
                is_changed = true;
                let drawn = in_force
                    .get(&policy)
                    .and_then(|adjustment| adjustment.control);
                let is_treated = resolved.set.policies.get(&policy).is_some_and(|known| {
                    let compiled = resolved.policies.get(&policy);
                    compiled.is_some_and(|compiled| compares(&known.settings, compiled))
                });
                // Without a treatment (frozen timers) both arms are the same.
                if drawn != record.control() || !is_treated || is_missing {
                    record.arms_changed();
                }
                if let Some(event) = record.look(statistics, now_ms, now_s()) {
                    told.push((policy.clone(), event, record.describe(event)));
                }
            }
        }
        let mut of_timers = Vec::new();
        for (policy, event, text) in &told {
            if matches!(event, Event::Ended(Verdict::Harm { .. })) {
                of_timers.extend(self.harm_proven(policy));
            }
            let is_bad = matches!(
                event,
                Event::Ended(Verdict::Harm { .. } | Verdict::Invalid | Verdict::Inconclusive)
            );
            if is_bad {
                warn!(%policy, "experiment: {text}");
            } else {
                info!(%policy, "experiment: {text}");
            }
            tell_experiment(apply, policy, text);
        }
        // Save before applying, so that a suspended policy stays suspended after a kill.
        if !told.is_empty() || (is_changed && self.experiments.document.is_save_due()) {
            self.experiments.save();
        }
        of_timers
    }
}

/// Sends an event to watchers.
fn tell_experiment(apply: &Apply, policy: &PolicyName, text: &str) {
    apply.tell(StreamItem::Experiment(ExperimentEvent {
        at_us: now_ms().saturating_mul(1000),
        policy: policy.clone(),
        experiment: text.to_owned(),
    }));
}

/// Refuses to draw from so few peers that chance decides the result. Zero peers means that their
/// number is unknown.
#[expect(clippy::cast_precision_loss, reason = "a number of peers is small")]
fn check_peers(design: &Design, peers: usize) -> Result<(), EngineError> {
    let share = design
        .ramp
        .shares()
        .first()
        .map_or(0.5, |share| share.get());
    let fewest = (peers as f64 * share.min(1.0 - share)).floor();
    if peers == 0 || fewest >= LEAST_PEERS {
        return Ok(());
    }
    refused(format!(
        "policy {}: {peers} peers were seen in the last hour; with {:.0} % treated, the smaller \
         arm has {fewest:.0} of the {LEAST_PEERS} it needs: randomise connections (--unit \
         connection), or cover more peers",
        design.policy,
        share * 100.0
    ))
}

/// Whether connections with these settings have timers of their own.
fn compares(settings: &Settings, compiled: &Compiled) -> bool {
    let kernel = &compiled.kernel;
    let of_requests = kernel.syn_ack_rto_jiffies.iter();
    kernel.initial_rto_jiffies != 0
        || of_requests.into_iter().any(|jiffies| *jiffies != 0)
        || settings.outlives_connections()
}

fn host_name() -> String {
    let name = uname().map(|name| name.nodename().to_string_lossy().into_owned());
    name.unwrap_or_else(|_| "localhost".to_owned())
}

#[cfg(test)]
mod tests {
    use rto_agent_core::{policy::compile::compile, testing::HOST};

    use super::*;

    #[test]
    fn policy_with_a_timer_can_be_compared() {
        let compares = |toml: &str| {
            let settings: Settings = toml::from_str(toml).unwrap();
            let compiled = compile(&"near".parse().unwrap(), &settings, &HOST).unwrap();
            compares(&settings, &compiled)
        };
        for toml in [
            "initial_rto = '100ms'\nsyn_ack_rto = 'keep'",
            "syn_ack_rto = '500ms'",
            "delack_max = '8ms'",
        ] {
            assert!(compares(toml), "{toml}");
        }
        for toml in ["syn_retries = 3", "initial_rto = 'auto'"] {
            assert!(!compares(toml), "{toml}");
        }
    }
}
