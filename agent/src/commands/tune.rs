//! `rto-agent tune`.

use std::{
    process::ExitCode,
    time::{Duration, UNIX_EPOCH},
};

use anyhow::{Context as _, bail};
use rto_agent_core::{
    policy::PolicyName,
    printable::counted,
    wire::tune::{
        TimerKind, TuneAction, TuneAnswer, TuneRequest, TunedPolicy, TunedTimer, next_text,
    },
};
use rto_model::tune::tuner::Value;

use super::{holdout, print};
use crate::{cli::Tune, client::Client};

/// The most transitions shown for each policy.
const SHOWN: usize = 5;

pub(super) fn run(args: &Tune) -> anyhow::Result<ExitCode> {
    let client = Client::new(&args.daemon.socket);
    let answer: TuneAnswer = match what(&args.what, args.policy.as_deref())? {
        What::Show(None) => client.get("/v1/tune")?,
        // A valid policy name has no character that needs escaping.
        What::Show(Some(policy)) => client.get(&format!("/v1/tune?policy={policy}"))?,
        What::Do(action, policy) => {
            let path = format!("/v1/tune/{}", action.name());
            client.post(&path, &TuneRequest { policy })?
        }
    };
    print(args.daemon.json, &answer, || text(&answer))
}

#[derive(Debug, PartialEq)]
enum What {
    Show(Option<PolicyName>),
    Do(TuneAction, PolicyName),
}

fn what(words: &[String], option: Option<&str>) -> anyhow::Result<What> {
    let action = |word: &String| {
        TuneAction::ALL
            .into_iter()
            .find(|action| action.name() == word)
    };
    let (action, policy) = match (words, option) {
        ([], option) => (None, option),
        ([word], option) if action(word).is_some() => (action(word), option),
        ([policy], None) => (None, Some(policy.as_str())),
        ([word, policy, ..], None) => {
            let action = action(word);
            let action =
                action.with_context(|| format!("{word:?} is not freeze, resume or reset"))?;
            (Some(action), Some(policy.as_str()))
        }
        (_, Some(policy)) => bail!("the policy is given twice: omit --policy {policy}"),
    };
    let policy = policy.map(str::parse).transpose()?;
    Ok(match (action, policy) {
        (None, policy) => What::Show(policy),
        (Some(action), Some(policy)) => What::Do(action, policy),
        (Some(action), None) => {
            bail!(
                "give the policy: rto-agent tune {} --policy NAME",
                action.name()
            )
        }
    })
}

pub(super) fn text(answer: &TuneAnswer) -> String {
    let mut text = String::new();
    if answer.policies.is_empty() {
        text.push_str(
            "no learnt or guarded timers: no policy has initial_rto = \"auto\", a guard or a \
             holdout\n",
        );
    }
    for (name, policy) in &answer.policies {
        text.push_str(&policy_text(name, policy, answer.at_ms));
    }
    if let Some(problem) = &answer.not_stored {
        text.push_str(&format!("\nwarning: {problem}\n"));
    }
    text
}

fn policy_text(name: &PolicyName, policy: &TunedPolicy, now_ms: u64) -> String {
    let mut text = format!("{name}\n");
    for timer in &policy.timers {
        text.push_str(&timer_text(timer, now_ms));
    }
    if let Some(holdout) = &policy.holdout {
        text.push_str(&format!("  {}\n", holdout::verdict(name, holdout)));
        let bad = holdout.arms.map(holdout::connects);
        let ratio = holdout::ratio(holdout.evidence.ratio);
        text.push_str(&format!(
            "    treated: {}; control: {}; {ratio}\n",
            bad.treated, bad.control
        ));
    }
    let older = policy.transitions.len().saturating_sub(SHOWN);
    for transition in policy.transitions.iter().skip(older) {
        let at = time(transition.transition.at_ms);
        text.push_str(&format!("  {at} {transition}\n"));
    }
    text
}

fn time(at_ms: u64) -> humantime::Rfc3339Timestamp {
    humantime::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_millis(at_ms))
}

fn timer_text(timer: &TunedTimer, now_ms: u64) -> String {
    let alarm = timer.alarm.map_or_else(String::new, |alarm| {
        format!("    last fallback: {} {alarm}\n", time(alarm.at_ms))
    });
    format!(
        "  {} {}: {}, {} ({})\n    evidence: {}\n{alarm}    next: {}\n",
        timer.setting,
        timer.direction,
        Value(timer.value_us),
        timer.state.text(),
        kind_text(timer),
        evidence(timer),
        next_text(timer.next, now_ms)
    )
}

/// Describes the kind of a timer.
fn kind_text(timer: &TunedTimer) -> String {
    match timer.kind {
        TimerKind::Auto => "learnt".to_owned(),
        TimerKind::Advice => "advice, not set".to_owned(),
        TimerKind::Guarded => format!("guard of {}", Value(timer.configured_us)),
    }
}

fn evidence(timer: &TunedTimer) -> String {
    let (counts, samples) = (timer.evidence.counts, timer.evidence.samples);
    let mut text = format!(
        "{}, one of each connection",
        counted(samples, "path RTT", "path RTTs")
    );
    if let Some(us) = timer.evidence.want_us {
        text.push_str(&format!(": {} would be safe", Value(Some(us))));
    }
    let judged = counted(counts.connections, "connection", "connections");
    text.push_str(&format!("; {} of {judged} spurious", counts.spurious));
    text
}

#[cfg(test)]
mod tests {
    use rto_agent_core::{
        testing::timer,
        wire::{holdout::Verdict, tune::TransitionView},
    };
    use rto_model::tune::tuner::{Cause, Evidence, State, Transition};

    use super::*;

    /// Parses the words of the command line, with the option last.
    fn words(text: &str) -> anyhow::Result<What> {
        let (text, option) = match text.split_once(" --policy ") {
            Some((text, option)) => (text, Some(option)),
            None => (text, None),
        };
        let words: Vec<String> = text.split_whitespace().map(str::to_owned).collect();
        what(&words, option)
    }

    #[test]
    fn tune_parses_policy_and_action() {
        let near: PolicyName = "near".parse().unwrap();
        assert_eq!(words("").unwrap(), What::Show(None));
        assert_eq!(words("near").unwrap(), What::Show(Some(near.clone())));
        let freeze = What::Do(TuneAction::Freeze, near);
        assert_eq!(words("freeze near").unwrap(), freeze);
        for refused in ["freeze", "stop near", "/", "freeze /"] {
            assert!(words(refused).is_err(), "{refused}");
        }
    }

    #[test]
    fn tune_takes_policy_as_option() {
        let near: PolicyName = "near".parse().unwrap();
        assert_eq!(
            words(" --policy near").unwrap(),
            What::Show(Some(near.clone()))
        );
        let freeze = What::Do(TuneAction::Freeze, near);
        assert_eq!(words("freeze --policy near").unwrap(), freeze);
        // A policy may have the name of an action.
        let named = What::Show("freeze".parse().ok());
        assert_eq!(words(" --policy freeze").unwrap(), named);
        for refused in ["stop --policy near", "freeze far --policy near"] {
            let error = words(refused).unwrap_err().to_string();
            assert!(error.contains("given twice"), "{error}");
        }
    }

    #[test]
    fn a_policy_for_people() {
        let sample = timer("active", State::Active);
        let blown = Transition {
            at_ms: 1_700_000_000_000,
            from: State::Active,
            to: State::FallbackSpurious,
            cause: Cause::Spurious,
            before_us: Some(20_000),
            after_us: None,
            evidence: Evidence {
                samples: 300,
                ..sample.evidence
            },
        };
        let timer = TunedTimer {
            alarm: Some(blown),
            ..sample
        };
        let transition = TransitionView {
            setting: "initial_rto".to_owned(),
            direction: "active".to_owned(),
            transition: blown,
        };
        let policy = TunedPolicy {
            since_ms: None,
            timers: vec![timer],
            transitions: vec![transition],
            holdout: Some(rto_agent_core::testing::holdout(Verdict::NotYet)),
        };
        let answer = TuneAnswer {
            at_ms: 1_000_000,
            policies: [("near".parse().unwrap(), policy)].into(),
            ..TuneAnswer::default()
        };
        assert_eq!(
            text(&answer),
            "near\n  initial_rto active: 48ms, active (learnt)\n    evidence: 5000 path RTTs, one of each connection: 24ms \
             would be safe; 1 of 1200 connections spurious\n    last fallback: 2023-11-14T22:13:20Z active -> fallback (spurious), 20ms -> the \
             kernel's own; 1 of 1200 connections spurious, 300 samples\n    next: lower to 24ms in 40s\n  \
             holdout 5%: not-yet\n    treated: 25 of 9500 connects were bad (0.26%); control: 6 of 500 connects \
             were bad (1.20%); 0.22 times as frequent in the treated arm (0.10 to any)\n  \
             2023-11-14T22:13:20Z initial_rto active: active -> fallback (spurious), 20ms -> the kernel's own; 1 of \
             1200 connections spurious, 300 samples\n"
        );
    }
}
