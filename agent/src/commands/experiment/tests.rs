use std::fs;

use rto_model::tune::experiment::{Arms, Counts, Design, Increments, Ramp, Unit};

use super::*;

fn counted(host: &str, policy: &str, unit: Unit) -> Counted {
    let design = Design {
        policy: policy.to_owned(),
        settings: "f00d".to_owned(),
        identity: "2026-11".to_owned(),
        seed: host.bytes().map(u32::from).sum(),
        unit,
        ramp: Ramp::try_from(vec![0.5]).unwrap(),
        duration_s: 86_400,
        promote: false,
    };
    let mut experiment = Counted::start(design, host.to_owned()).unwrap();
    let counts = |good| Counts {
        attempts: 1000,
        good,
        ..Counts::default()
    };
    let increments = Increments {
        counts: Arms {
            treated: counts(1000),
            control: counts(996),
        },
        ..Increments::default()
    };
    experiment.observe(&increments, 1000);
    experiment
}

/// Writes the JSON output of one host to a file.
fn printed(dir: &Path, host: &str, policies: &[&str]) -> std::path::PathBuf {
    let all = policies.iter().map(|policy| {
        let view = merged(&counted(host, policy, Unit::Connection), Arms::default());
        (policy.parse().unwrap(), view)
    });
    let answer = ExperimentsAnswer {
        at_s: 2000,
        experiments: all.collect(),
    };
    let path = dir.join(format!("{host}.json"));
    fs::write(&path, serde_json::to_string_pretty(&answer).unwrap()).unwrap();
    path
}

fn merging(
    merge: &[&std::path::PathBuf],
    policy: Option<&str>,
) -> anyhow::Result<ExperimentsAnswer> {
    super::merge(&ShowExperiment {
        policy: policy.map(|policy| policy.parse().unwrap()),
        merge: merge.iter().map(|path| (*path).clone()).collect(),
        option: None,
    })
}

#[test]
fn hosts_are_one_experiment() {
    let dir = tempfile::tempdir().unwrap();
    let hosts = ["a", "b", "c"].map(|host| printed(dir.path(), host, &["near"]));
    let [a, b, c] = &hosts;
    let one = &merging(&[a], None).unwrap().experiments[&"near".parse().unwrap()];
    assert_eq!(
        (one.counts.treated.attempts, one.text.as_str()),
        (1000, "nothing is proven yet")
    );
    let answer = merging(&[a, b, c], None).unwrap();
    let merged = &answer.experiments[&"near".parse().unwrap()];
    assert_eq!(merged.hosts, ["a", "b", "c"]);
    assert_eq!(merged.counts.control.attempts, 3000);
    assert_eq!(merged.text, "gain proven");
    let text = text::all(&answer);
    insta::assert_snapshot!(text);
}

#[test]
fn different_experiments_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let [a, b] = ["a", "b"].map(|host| printed(dir.path(), host, &["near"]));
    let both = printed(dir.path(), "c", &["near", "far"]);
    let other = printed(dir.path(), "d", &["far"]);
    let refused = |files: &[&std::path::PathBuf], policy| {
        format!("{:#}", merging(files, policy).unwrap_err())
    };
    assert_eq!(refused(&[&a, &b, &a], None), "host a occurs twice");
    let text = refused(&[&a, &other], None);
    assert_eq!(
        text,
        "experiments with different policies cannot be merged: near and far"
    );
    let text = refused(&[&a, &both], None);
    assert!(
        text.ends_with("c.json: the file has experiments of far, near: give the policy"),
        "{text}"
    );
    assert!(merging(&[&a, &both], Some("near")).is_ok());
    let text = refused(&[&a, &other], Some("near"));
    assert!(
        text.ends_with("d.json: the file has no experiment of near, only of far"),
        "{text}"
    );
    let file = dir.path().join("x.json");
    fs::write(&file, "{}").unwrap();
    let text = refused(&[&file], None);
    assert!(
        text.contains("not the output of rto-agent experiment show --json"),
        "{text}"
    );
}

#[test]
fn peers_are_summed_without_a_verdict() {
    let view = merged(&counted("a", "near", Unit::Peer), Arms::default());
    assert!(view.evidence.is_none() && !view.answer.contains("ratio"));
    assert_eq!(
        view.text,
        "no verdict: peers are randomised, but connections are counted"
    );
}
