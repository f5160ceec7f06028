//! `doctor` and the other verbs that need no daemon.

use rto_tests::{
    agent::{World, binary},
    process::{command_in, run},
};
use serde_json::Value;

use super::{Test, near};

pub(super) const TESTS: &[Test] = &[
    ("a_good_host_has_no_problem", good),
    ("a_missing_cgroup_and_bpffs_are_problems", bad),
    ("a_locked_route_is_found", locked_route),
    ("verbs_without_a_daemon_say_so", no_daemon),
    ("without_privileges_the_mend_is_said", unprivileged),
    ("completions_and_manual", generated),
];

fn finding(report: &Value, id: &str) -> Value {
    let all = report["findings"].as_array().cloned().unwrap_or_default();
    all.into_iter().find(|f| f["id"] == id).unwrap_or_default()
}

fn good() -> anyhow::Result<()> {
    let world = World::with(&near("\"10.88.0.0/24\""))?;
    let output = world.try_cli(&["doctor"])?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(0), "{text}");
    let report = world.json(&["doctor"])?;
    for id in [
        "kernel-version",
        "capabilities",
        "cgroup",
        "bpffs",
        "hz",
        "tcp_syn_retries",
        "locked-rto_min",
    ] {
        assert_eq!(finding(&report, id)["severity"], "ok", "{id}: {report:#}");
        assert!(text.contains(id), "{text}");
    }
    Ok(())
}

fn bad() -> anyhow::Result<()> {
    let world = World::new()?;
    world.configure(&near("\"10.88.0.0/24\""))?;
    let text = std::fs::read_to_string(world.config())?
        .replace(&world.cgroup.path().display().to_string(), "/nonexistent")
        .replace(&world.pin_dir().display().to_string(), "/nonexistent");
    std::fs::write(world.config(), text)?;
    let report = world.json(&["doctor"])?;
    for id in ["cgroup", "bpffs"] {
        let finding = finding(&report, id);
        assert_eq!(finding["severity"], "problem", "{report:#}");
        assert!(finding["mend"].is_string() && finding["why"].is_string());
    }
    assert_eq!(world.try_cli(&["doctor"])?.status.code(), Some(1));
    Ok(())
}

/// In a namespace of its own, as routes are.
fn locked_route() -> anyhow::Result<()> {
    let world = World::new()?;
    world.configure("[policy.near]\nrto_min = \"50ms\"\ncidrs = [\"10.88.0.0/16\"]\n")?;
    run(&format!(
        "ip -n {} route add 10.88.7.0/24 via 10.88.0.2 rto_min 300ms",
        world.net.client
    ))?;
    let mut command = command_in(Some(&world.net.client), None, binary()?)?;
    let output = command
        .args(["doctor", "--json", "--config"])
        .arg(world.config())
        .output()?;
    let report: Value = serde_json::from_slice(&output.stdout)?;
    let finding = finding(&report, "locked-rto_min");
    assert_eq!(finding["severity"], "problem", "{report:#}");
    let found = finding["found"].as_str().unwrap_or_default();
    assert!(
        found.contains("10.88.7.0/24") && found.contains("300ms") && found.contains("10.88.0.0/16"),
        "{found}"
    );
    assert_eq!(output.status.code(), Some(1));
    Ok(())
}

fn no_daemon() -> anyhow::Result<()> {
    let world = World::new()?;
    world.configure(&near("\"10.88.0.0/24\""))?;
    for args in [
        &["list"][..],
        &["status"],
        &["reload"],
        &["lookup", "10.0.0.1"],
        &["add", "10.0.0.0/8", "--policy", "near"],
    ] {
        let said = world.cli_fails(args)?;
        assert!(
            said.contains("no rto-agent daemon answers at") && said.contains("--socket"),
            "{said}"
        );
    }
    let usage = world.try_cli(&["add", "--policy"])?;
    assert_eq!(usage.status.code(), Some(2));
    Ok(())
}

fn unprivileged() -> anyhow::Result<()> {
    let world = World::new()?;
    world.configure(&near("\"10.88.0.0/24\""))?;
    let mut command = command_in(None, None, "setpriv")?;
    command
        .args(["--bounding-set=-all", "--inh-caps=-all"])
        .arg(binary()?);
    let output = command
        .args(["run", "--config"])
        .arg(world.config())
        .output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(
        said.contains("missing CAP_BPF") && said.contains("run as root"),
        "{said}"
    );
    Ok(())
}

fn generated() -> anyhow::Result<()> {
    let world = World::new()?;
    for shell in ["bash", "zsh", "fish"] {
        assert!(
            world.cli(&["completions", shell])?.contains("lookup"),
            "{shell}"
        );
    }
    assert!(world.cli(&["man"])?.contains(".TH"));
    assert!(world.cli(&["man", "add"])?.contains("initial"));
    Ok(())
}
