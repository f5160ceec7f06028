//! `rto-agent tune`.

use std::{
    process::ExitCode,
    time::{Duration, UNIX_EPOCH},
};

use anyhow::bail;

use super::print;
use crate::{
    api::client::Client,
    cli::Tune,
    policy::PolicyName,
    printable::counted,
    wire::tune::{
        Evidence, TimerKind, TuneAction, TuneAnswer, TuneRequest, TunedPolicy, TunedTimer,
        kernels_or,
    },
};

/// Transitions that are shown of each policy.
const SHOWN: usize = 5;

pub(super) fn run(args: &Tune) -> anyhow::Result<ExitCode> {
    let client = Client::new(&args.socket.socket);
    let answer: TuneAnswer = match what(&args.what)? {
        What::Show(None) => client.get("/v1/tune")?,
        // A name that can be one has nothing in it that would have to be escaped.
        What::Show(Some(policy)) => client.get(&format!("/v1/tune?policy={policy}"))?,
        What::Do(action, policy) => {
            let path = format!("/v1/tune/{}", action.name());
            client.post(&path, &TuneRequest { policy })?
        }
    };
    print(args.output.json, &answer, || text(&answer))?;
    Ok(ExitCode::SUCCESS)
}

#[derive(Debug, PartialEq)]
enum What {
    Show(Option<PolicyName>),
    Do(TuneAction, PolicyName),
}

fn what(words: &[String]) -> anyhow::Result<What> {
    const ACTIONS: [TuneAction; 3] = [TuneAction::Freeze, TuneAction::Resume, TuneAction::Reset];
    let action = |word: &String| ACTIONS.into_iter().find(|action| action.name() == word);
    Ok(match words {
        [] => What::Show(None),
        [word] if action(word).is_some() => bail!("which policy? rto-agent tune {word} POLICY"),
        [policy] => What::Show(Some(policy.parse()?)),
        [word, policy, ..] => match action(word) {
            Some(action) => What::Do(action, policy.parse()?),
            None => bail!("{word:?} is neither freeze, resume nor reset"),
        },
    })
}

fn text(answer: &TuneAnswer) -> String {
    let mut text = String::new();
    if answer.policies.is_empty() {
        text.push_str("nothing is learnt or guarded: no policy has initial_rto = \"auto\", rto_min = \"auto\" or a guard\n");
    }
    for (name, policy) in &answer.policies {
        text.push_str(&policy_text(name, policy));
    }
    if let Some(problem) = &answer.not_stored {
        text.push_str(&format!("\nwarning: {problem}\n"));
    }
    text
}

fn policy_text(name: &PolicyName, policy: &TunedPolicy) -> String {
    let mut text = format!("{name}\n");
    for timer in &policy.timers {
        text.push_str(&timer_text(timer));
    }
    let older = policy.transitions.len().saturating_sub(SHOWN);
    for transition in policy.transitions.iter().skip(older) {
        let at = UNIX_EPOCH + Duration::from_millis(transition.at_ms);
        let at = humantime::format_rfc3339_seconds(at);
        text.push_str(&format!("  {at} {transition}\n"));
    }
    for note in &policy.notes {
        text.push_str(&format!("  note: {note}\n"));
    }
    text
}

fn timer_text(timer: &TunedTimer) -> String {
    let of = kind_text(timer);
    let canary = match timer.percent {
        100 => String::new(),
        percent => format!(" for {percent}% of connections"),
    };
    format!(
        "  {} {}: {}{canary}, {} ({of})\n    evidence: {}\n    next: {}\n",
        timer.setting,
        timer.direction,
        timer.value(),
        timer.phase,
        evidence(timer),
        timer.next.describe()
    )
}

/// What is done about a timer.
pub(super) fn kind_text(timer: &TunedTimer) -> String {
    match timer.kind {
        TimerKind::Auto => "learnt".to_owned(),
        TimerKind::Advice => "advice, not set".to_owned(),
        TimerKind::Guarded => format!("guard of {}", kernels_or(timer.configured_us)),
        TimerKind::Watched => format!("guard of {}, warns", kernels_or(timer.configured_us)),
    }
}

fn evidence(timer: &TunedTimer) -> String {
    let Evidence {
        samples,
        want_us,
        clean,
        spurious,
        ..
    } = timer.evidence;
    let samples = counted(samples, "sample", "samples");
    let mut text = match want_us {
        Some(us) => format!("{samples} ask for {}", kernels_or(Some(us))),
        None => samples,
    };
    if timer.direction != "both" {
        let judged = counted(clean.saturating_add(spurious), "connection", "connections");
        text.push_str(&format!("; {spurious} of {judged} spurious"));
    }
    if let Some(brakes) = &timer.brakes {
        let percent = |share: f64| format!("{:.0}%", share * 100.0);
        text.push_str(&format!(
            "; fuse {}; {} of the budget left ({})",
            match brakes.blown {
                true => "BLOWN".to_owned(),
                false => format!("{} spent", percent(brakes.fuse_spent)),
            },
            percent(brakes.budget_left),
            counted(brakes.budget, "retransmission", "retransmissions"),
        ));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{commands::top::samples::timer, wire::tune::TransitionView};

    fn words(text: &str) -> anyhow::Result<What> {
        let words: Vec<String> = text.split_whitespace().map(str::to_owned).collect();
        what(&words)
    }

    #[test]
    fn what_is_asked_for() {
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
    fn a_policy_for_people() {
        let sample = timer("active", "lowering");
        let timer = TunedTimer {
            evidence: Evidence {
                clean: 1_200,
                ..sample.evidence
            },
            ..sample
        };
        let transition = TransitionView {
            at_ms: 1_700_000_000_000,
            setting: "initial_rto".to_owned(),
            direction: "active".to_owned(),
            from: "learning".to_owned(),
            to: "lowering".to_owned(),
            cause: "enough-samples".to_owned(),
            before_us: None,
            after_us: Some(500_000),
            samples: 300,
            judged: 300,
            spurious: 0,
        };
        let policy = TunedPolicy {
            timers: vec![timer],
            transitions: vec![transition],
            notes: vec!["one".to_owned()],
        };
        let answer = TuneAnswer {
            policies: [("near".parse().unwrap(), policy)].into(),
            ..TuneAnswer::default()
        };
        assert_eq!(
            text(&answer),
            "near\n  initial_rto active: 48ms, lowering (learnt)\n    evidence: 5000 samples ask for 24ms; 1 of 1201 \
             connections spurious; fuse 5% spent; 100% of the budget left (256 retransmissions)\n    next: lower to \
             24ms in 40s\n  2023-11-14T22:13:20Z initial_rto active: learning -> lowering (enough-samples), the \
             kernel's own -> 500ms; 0 of 300 connections spurious, 300 samples\n  note: one\n"
        );
    }
}
