//! `rto-agent tune`.

use std::{
    process::ExitCode,
    time::{Duration, UNIX_EPOCH},
};

use anyhow::{Context as _, bail};
use rto_agent_core::{
    policy::PolicyName,
    printable::{counted, direction_text},
    wire::tune::{
        TimerKind, TuneAction, TuneAnswer, TuneRequest, TunedPolicy, TunedTimer, next_text,
    },
};
use rto_model::tune::tuner::{State, Value};

use super::{holdout, print};
use crate::{cli::Tune, client::Client};

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

/// At most six lines: two for each direction, and the verdict.
fn policy_text(name: &PolicyName, policy: &TunedPolicy, now_ms: u64) -> String {
    let mut text = format!("{name}\n");
    for timer in &policy.timers {
        text.push_str(&timer_text(timer, now_ms));
    }
    if let Some(holdout) = &policy.holdout {
        text.push_str(&format!("  {}\n", holdout::verdict(name, holdout)));
    }
    text
}

fn timer_text(timer: &TunedTimer, now_ms: u64) -> String {
    format!(
        "  {}: {}, {}; next: {}\n    {}\n",
        direction_text(&timer.direction),
        Value(timer.value_us),
        state(timer),
        next_text(timer.next, now_ms),
        evidence(timer),
    )
}

/// "learnt", "fallback (outage), configured 100ms".
fn state(timer: &TunedTimer) -> String {
    let kind = match (timer.kind, timer.state) {
        (TimerKind::Auto, _) => "learnt".to_owned(),
        (TimerKind::Advice, _) => "learnt, not applied".to_owned(),
        (TimerKind::Guarded, State::Active) => "configured".to_owned(),
        (TimerKind::Guarded, _) => format!("configured {}", Value(timer.configured_us)),
    };
    match timer.state {
        State::Active => kind,
        other => format!("{}, {kind}", other.text()),
    }
}

fn evidence(timer: &TunedTimer) -> String {
    let (counts, samples) = (timer.evidence.counts, timer.evidence.samples);
    let mut text = counted(samples, "sample", "samples");
    if let Some(us) = timer.evidence.want_us {
        text.push_str(&format!(", the law says {}", Value(Some(us))));
    }
    if counts.connections > 0 {
        let judged = counted(counts.connections, "connection", "connections");
        text.push_str(&format!("; {} of {judged} spurious", counts.spurious));
    }
    if let Some(last) = timer.alarm {
        let at = UNIX_EPOCH + Duration::from_millis(last.at_ms);
        text.push_str(&format!(
            "; last {} at {}",
            last.to.text(),
            humantime::format_rfc3339_seconds(at)
        ));
    }
    text
}

#[cfg(test)]
mod tests {
    use rto_agent_core::{testing::timer, wire::holdout::Verdict};
    use rto_model::tune::tuner::{Cause, Evidence, Next, Transition};

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
    fn policy_has_at_most_six_lines() {
        let learnt = timer("active", State::Active);
        let alarm = Transition {
            at_ms: 1_700_000_000_000,
            from: State::Active,
            to: State::FallbackSpurious,
            cause: Cause::Spurious,
            before_us: Some(100_000),
            after_us: None,
            evidence: Evidence::default(),
        };
        let fallen = TunedTimer {
            kind: TimerKind::Guarded,
            value_us: None,
            configured_us: Some(100_000),
            alarm: Some(alarm),
            next: Next::HoldEnds { at_ms: 1_600_000 },
            ..timer("passive", State::FallbackSpurious)
        };
        let policy = TunedPolicy {
            timers: vec![learnt, fallen],
            holdout: Some(rto_agent_core::testing::holdout(Verdict::NotYet)),
            ..TunedPolicy::default()
        };
        let answer = TuneAnswer {
            at_ms: 1_000_000,
            policies: [("near".parse().unwrap(), policy)].into(),
            ..TuneAnswer::default()
        };
        assert_eq!(
            text(&answer),
            "near\n  \
             outgoing: 48ms, learnt; next: lower to 24ms in 40s\n    \
             5000 samples, the law says 24ms; 1 of 1200 connections spurious\n  \
             incoming: the kernel's own, fallback (spurious), configured 100ms; next: the value again in 10m\n    \
             5000 samples, the law says 24ms; 1 of 1200 connections spurious; last fallback (spurious) at \
             2023-11-14T22:13:20Z\n  \
             holdout 5%: not-yet\n"
        );
    }
}
