//! `doctor` and the other commands that need no daemon.

use std::process::Stdio;

use nix::{sys::signal::kill, unistd::Pid};
use rto_agent_kernel::kernel::cgroup;
use rto_testbed::netns::{self, nft};

use crate::prelude::*;

pub(super) fn finding(report: &Value, id: &str) -> Value {
    let all = report["findings"].as_array().cloned().unwrap_or_default();
    all.into_iter().find(|f| f["id"] == id).unwrap_or_default()
}

test!(a_good_host_has_no_problem);
fn a_good_host_has_no_problem() -> anyhow::Result<()> {
    let env = TestEnv::with(&near("\"10.88.0.0/24\""))?;
    let brief = env.cli(&["doctor"])?;
    let is_brief = brief.lines().all(|line| !line.starts_with("ok "));
    assert!(is_brief && brief.contains(": 0 problems, "), "{brief}");
    let text = env.cli(&["doctor", "--verbose"])?;
    let report = env.json(&["doctor"])?;
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

test!(start_beside_64_programs_names_the_limit);
fn start_beside_64_programs_names_the_limit() -> anyhow::Result<()> {
    let mut env = configured(&near("\"10.88.0.0/24\""))?;
    let others = (0..64).map(|_| Foreign::attach(env.cgroup.path(), 60));
    let mut others = others.collect::<Result<Vec<_>, _>>()?;
    let error = env.start_fails()?;
    let limit = "64 programs are attached";
    ensure!(
        error.contains(limit) && !error.contains("too long"),
        "{error}"
    );
    let report = env.json(&["doctor"])?;
    let is_named = |finding: &Value| {
        finding["severity"] == "problem" && finding["found"].to_string().contains(limit)
    };
    let findings = report["findings"].as_array().context("no findings")?;
    ensure!(findings.iter().any(is_named), "{report:#}");
    others.pop();
    env.start()?;
    Ok(())
}

test!(a_missing_cgroup_and_bpffs_are_problems);
fn a_missing_cgroup_and_bpffs_are_problems() -> anyhow::Result<()> {
    let env = configured(&near("\"10.88.0.0/24\""))?;
    let text = fs::read_to_string(env.config())?
        .replace(&env.cgroup.path().display().to_string(), "/nonexistent")
        .replace(&env.pin_dir().display().to_string(), "/nonexistent");
    fs::write(env.config(), text)?;
    let report = env.json(&["doctor"])?;
    for id in ["cgroup", "bpffs"] {
        let finding = finding(&report, id);
        assert_eq!(finding["severity"], "problem", "{report:#}");
        assert!(finding["fix"].is_string() && finding["why"].is_string());
    }
    assert_eq!(env.try_cli(&["doctor"])?.status.code(), Some(1));
    Ok(())
}

test!(a_locked_route_is_found);
/// In a separate network namespace, which has its own routes.
fn a_locked_route_is_found() -> anyhow::Result<()> {
    let env = configured("[policy.near]\nrto_min = \"50ms\"\ncidrs = [\"10.88.0.0/16\"]\n")?;
    run(&format!(
        "ip -n {} route add 10.88.7.0/24 via 10.88.0.2 rto_min 300ms",
        env.net.client
    ))?;
    let (report, status) = doctor_inside(&env)?;
    let finding = finding(&report, "locked-rto_min");
    assert_eq!(finding["severity"], "problem", "{report:#}");
    let found = finding["found"].as_str().unwrap_or_default();
    assert_says(found, &["10.88.7.0/24", "300ms", "10.88.0.0/16"]);
    assert_eq!(status, Some(1));
    Ok(())
}

test!(locked_default_route_is_no_problem_beside_a_used_route);
fn locked_default_route_is_no_problem_beside_a_used_route() -> anyhow::Result<()> {
    let env = configured("[policy.near]\nrto_min = \"50ms\"\ncidrs = [\"10.88.0.0/24\"]\n")?;
    run(&format!(
        "ip -n {} route add default via 10.88.0.2 rto_min 300ms",
        env.net.client
    ))?;
    let (report, _) = doctor_inside(&env)?;
    let unused = finding(&report, "locked-rto_min");
    assert_eq!(unused["severity"], "note", "{report:#}");
    let config = fs::read_to_string(env.config())?.replace("10.88.0.0/24", "10.88.0.0/16");
    fs::write(env.config(), config)?;
    let (report, _) = doctor_inside(&env)?;
    let used = finding(&report, "locked-rto_min");
    assert_eq!(used["severity"], "problem", "{report:#}");
    Ok(())
}

/// Runs `doctor` in the client's namespace; returns its report and exit status.
pub(super) fn doctor_inside(env: &TestEnv) -> anyhow::Result<(Value, Option<i32>)> {
    doctor_of(env, Command::new(find(None)?))
}

/// The same without privileges.
fn doctor_unprivileged(env: &TestEnv) -> anyhow::Result<Value> {
    Ok(doctor_of(env, unprivileged()?)?.0)
}

fn doctor_of(env: &TestEnv, mut command: Command) -> anyhow::Result<(Value, Option<i32>)> {
    command
        .args(["doctor", "--json", "--config"])
        .arg(env.config());
    let output = netns::inside(&env.net.client, || Ok(command.output()?))?;
    let report = serde_json::from_slice(&output.stdout)?;
    Ok((report, output.status.code()))
}

/// The agent without capabilities.
fn unprivileged() -> anyhow::Result<Command> {
    let mut command = Command::new("setpriv");
    command
        .args(["--bounding-set=-all", "--inh-caps=-all"])
        .arg(find(None)?);
    Ok(command)
}

test!(another_default_of_rto_min_is_found);
fn another_default_of_rto_min_is_found() -> anyhow::Result<()> {
    let env = configured(&near("\"10.88.0.0/24\""))?;
    let before = finding(&doctor_inside(&env)?.0, "tcp_rto_min_us");
    assert_eq!(before["severity"], "ok", "{before:#}");
    if sysctl(&env.net.client, "net.ipv4.tcp_rto_min_us", "50000").is_err() {
        assert!(before["found"].to_string().contains("absent"), "{before:#}");
        return Ok(());
    }
    let found = finding(&doctor_inside(&env)?.0, "tcp_rto_min_us");
    assert_eq!(found["severity"], "warning", "{found:#}");
    assert!(found["found"].to_string().contains("50000 us"), "{found:#}");
    Ok(())
}

test!(cached_metrics_of_a_slower_past_are_found);
/// A connection whose peer delayed its ACKs leaves a long round-trip time in the cache.
fn cached_metrics_of_a_slower_past_are_found() -> anyhow::Result<()> {
    let env = configured("[policy.near]\nrto_min = \"8ms\"\ncidrs = [\"10.88.0.0/24\"]\n")?;
    let before = finding(&doctor_inside(&env)?.0, "tcp_metrics");
    assert_eq!(before["severity"], "ok", "{before:#}");
    sysctl(&env.net.client, "net.ipv4.tcp_no_metrics_save", "0")?;
    let to = to(SERVER_V4, 4700);
    let _server = env.echo_server(to)?;
    let mut conversation = env.converse(to)?;
    conversation.rounds(20)?;
    for _ in 0..25 {
        // An answer makes the server delay its next ACK, so half of the samples are 40 ms.
        conversation.rounds(1)?;
        conversation.send(conversation::REQUEST)?;
        thread::sleep(Duration::from_millis(60));
    }
    // The kernel writes the cache when the connection ends.
    drop(conversation);
    let found = finding(&doctor_inside(&env)?.0, "tcp_metrics");
    assert_eq!(found["severity"], "warning", "{found:#}");
    let text = found["found"].to_string();
    assert!(
        text.contains(SERVER_V4) && text.contains("rto_min 8ms of policy near"),
        "{text}"
    );
    Ok(())
}

test!(ratelimit_of_duplicate_syns_is_found_beside_a_listener);
fn ratelimit_of_duplicate_syns_is_found_beside_a_listener() -> anyhow::Result<()> {
    const ID: &str = "tcp_invalid_ratelimit";
    let env = configured(&near("\"10.88.0.0/24\""))?;
    ensure!(finding(&doctor_inside(&env)?.0, ID).is_null());
    let _listener = Traffic::serve(&env.net.client, None, to("0.0.0.0", 4701))?;
    let found = finding(&doctor_inside(&env)?.0, ID);
    ensure!(found["severity"] == "note", "{found:#}");
    let fix = found["fix"].to_string();
    ensure!(fix.contains("net.ipv4.tcp_invalid_ratelimit=100"), "{fix}");
    sysctl(&env.net.client, "net.ipv4.tcp_invalid_ratelimit", "100")?;
    let found = finding(&doctor_inside(&env)?.0, ID);
    ensure!(found["severity"] == "ok", "{found:#}");
    Ok(())
}

test!(rules_that_may_count_syns_are_a_note);
fn rules_that_may_count_syns_are_a_note() -> anyhow::Result<()> {
    const RULES: &str = "table inet own {
        set seen { type ipv4_addr; flags dynamic; size 16; }
        chain in {
            type filter hook input priority 0;
            tcp dport 22 ct count over 5 drop
            tcp flags & (syn|ack) == syn update @seen { ip saddr limit rate over 6/minute } drop
        }
    }";
    let env = configured(&near("\"10.88.0.0/24\""))?;
    let before = finding(&doctor_inside(&env)?.0, "syn-limits");
    ensure!(before["severity"] == "ok", "{before:#}");
    nft(&env.net.client, &["-f", "-"], RULES)?;
    let found = finding(&doctor_inside(&env)?.0, "syn-limits");
    ensure!(found["severity"] == "note", "{found:#}");
    let text = found["found"].as_str().unwrap_or_default();
    let rules: Vec<&str> = text.lines().skip(1).collect();
    let [rule] = rules[..] else { bail!("{text}") };
    ensure!(
        rule.starts_with("inet own in: tcp flags") && rule.contains("update @seen"),
        "{text}"
    );
    // Without privileges the rules cannot be read.
    let found = finding(&doctor_unprivileged(&env)?, "syn-limits");
    ensure!(found["severity"] == "note", "{found:#}");
    ensure!(
        found["found"].to_string().contains("needs CAP_NET_ADMIN"),
        "{found:#}"
    );
    Ok(())
}

test!(features_are_probed_and_listed, features);
/// Each feature is probed on this kernel, and the report names the settings that need it.
fn features() -> anyhow::Result<()> {
    let env = TestEnv::with(&near("\"10.88.0.0/24\""))?;
    let status = env.status()?;
    let features = status["features"].as_array().cloned().unwrap_or_default();
    let report = env.json(&["doctor"])?;
    let feature = |name: &str| {
        let found = features.iter().find(|f| f["name"] == name).cloned();
        found.unwrap_or_default()
    };
    for (name, setting) in [
        ("bpf-rto-min", "rto_min"),
        ("bpf-delack-max", "delack_max"),
        ("bpf-thin-linear", "thin_linear"),
        ("tcp-rto-max", "rto_max"),
        ("bpf-user-timeout", "user_timeout"),
        ("bpf-lsm-cgroup", "rto_min"),
        ("iter-tcp", "apply_to_open"),
        ("rto-hook", "linear_retries"),
    ] {
        let feature = feature(name);
        let settings = feature["settings"].as_array().cloned().unwrap_or_default();
        assert!(settings.contains(&setting.into()), "{name}: {feature:#}");
        let there = feature["presence"] == "present";
        let finding = finding(&report, name);
        assert_eq!(
            finding["severity"] == "ok",
            there,
            "{feature:#} {finding:#}"
        );
    }
    // Present on every kernel that the agent supports, and probed rather than inferred.
    for name in ["cgroup-bpf-link", "sock_ops-socket-storage", "bpf-rto-min"] {
        let feature = feature(name);
        assert_eq!(feature["presence"], "present", "{feature:#}");
        assert_eq!(feature["evidence"], "probed", "{feature:#}");
    }
    // Without privileges nothing can be probed, and doctor reports that.
    let report = doctor_unprivileged(&env)?;
    let text = finding(&report, "bpf-rto-min")["found"].to_string();
    assert_says(&text, &["unknown: ", "CAP_BPF"]);
    Ok(())
}

test!(verbs_without_a_daemon_say_so);
fn verbs_without_a_daemon_say_so() -> anyhow::Result<()> {
    let env = configured(&near("\"10.88.0.0/24\""))?;
    for args in [
        &["list"][..],
        &["status"],
        &["reload"],
        &["lookup", "10.0.0.1"],
        &["add", "10.0.0.0/8", "--policy", "near"],
    ] {
        let error = env.cli_fails(args)?;
        assert_says(&error, &["no rto-agent daemon answers at", "--socket"]);
    }
    let usage = env.try_cli(&["add", "--policy"])?;
    assert_eq!(usage.status.code(), Some(2));
    Ok(())
}

test!(fix_is_shown_without_privileges);
fn fix_is_shown_without_privileges() -> anyhow::Result<()> {
    let env = configured(&near("\"10.88.0.0/24\""))?;
    let mut run = unprivileged()?;
    let error = refusal(&run.args(["run", "--config"]).arg(env.config()).output()?)?;
    assert_says(&error, &["missing CAP_BPF", "run as root"]);
    let error = refusal(&unprivileged()?.args(["doctor", "--self-test"]).output()?)?;
    assert_says(&error, &["run it as root"]);
    Ok(())
}

fn self_test() -> anyhow::Result<Command> {
    let mut doctor = Command::new(find(None)?);
    doctor.args(["doctor", "--self-test", "--json"]);
    Ok(doctor)
}

/// The cgroup of this process's self-test.
fn cgroup_of(pid: u32) -> PathBuf {
    let root = cgroup::resolve(None).unwrap_or_default();
    root.join(format!("rto-agent-probe-{pid}"))
}

test!(self_test_measures_the_timers_of_its_policies);
fn self_test_measures_the_timers_of_its_policies() -> anyhow::Result<()> {
    let child = self_test()?.stdout(Stdio::piped()).spawn()?;
    let cgroup = cgroup_of(child.id());
    let output = child.wait_with_output()?;
    let report: Value = serde_json::from_slice(&output.stdout)?;
    ensure!(
        output.status.success() && report["passed"] == true,
        "{report:#}"
    );
    let took = |name: &str| {
        let mut cases = report["cases"].as_array().into_iter().flatten();
        let case = cases.find(|case| case["name"] == name);
        case.and_then(|case| case["measured_ms"].as_f64())
            .context(name.to_owned())
    };
    let jiffy_ms = jiffy().as_secs_f64() * 1000.0;
    // From the timer to shortly before the kernel's own.
    for (name, least, most) in [
        ("SYN, kernel", 1000.0, 1999.0),
        ("SYN, initial_rto = 100ms", 100.0, 999.0),
        ("SYN-ACK, kernel", 1000.0, 1999.0),
        ("SYN-ACK, syn_ack_rto = 200ms", 200.0, 999.0),
        ("data, kernel", 200.0, 999.0),
        ("data, rto_min = 20ms", 20.0, 199.0),
        ("SYNs, kernel", 1500.0, 3999.0),
        ("SYNs, initial_rto = 100ms", 1500.0, 3999.0),
        ("SYN, after the daemon's end", 1000.0, 1999.0),
    ] {
        let ms = took(name)?;
        ensure!(
            (least - jiffy_ms..most).contains(&ms),
            "{name}: {ms} ms\n{report:#}"
        );
    }
    let own = &report["programs"][0];
    ensure!(
        own["name"] == "rto_agent" && own["cgroup"].as_str() == cgroup.to_str(),
        "{report:#}"
    );
    ensure!(!cgroup.exists(), "{} is left", cgroup.display());
    Ok(())
}

test!(self_test_passes_beside_packaged_example_and_refuses_catch_all);
/// The host's program runs for the connections of the self-test as well. Here it covers addresses for documentation,
/// as the packaged example does.
fn self_test_passes_beside_packaged_example_and_refuses_catch_all() -> anyhow::Result<()> {
    let env = TestEnv::with(&near(
        "\"192.0.2.0/24\", \"198.51.100.0/24\", \"2001:db8::/32\"",
    ))?;
    let beside = || {
        let mut command = self_test()?;
        command.arg("--config").arg(env.config());
        Ok::<_, anyhow::Error>(command.output()?)
    };
    let output = beside()?;
    let report: Value = serde_json::from_slice(&output.stdout)?;
    ensure!(
        output.status.success() && report["passed"] == true,
        "{report:#}"
    );
    env.cli(&["add", "0.0.0.0/0", "--initial-rto", "300ms", "--force"])?;
    let error = refusal(&beside()?)?;
    assert_says(
        &error,
        &["an active entry covers 240.0.", "rto-agent detach"],
    );
    Ok(())
}

test!(killed_self_test_is_removed_by_the_next);
fn killed_self_test_is_removed_by_the_next() -> anyhow::Result<()> {
    let mut killed = self_test()?.stdout(Stdio::null()).spawn()?;
    let cgroup = cgroup_of(killed.id());
    // The test has begun when a process is in the cgroup.
    let inside = || fs::read_to_string(cgroup.join("cgroup.procs")).unwrap_or_default();
    eventually("connections", TIMEOUT, || {
        Ok((!inside().is_empty()).then_some(()))
    })?;
    killed.kill()?;
    killed.wait()?;
    ensure!(cgroup.exists(), "nothing is left to remove");
    eventually("end of its processes", TIMEOUT, || {
        Ok(inside().is_empty().then_some(()))
    })?;
    let mut next = self_test()?.stdout(Stdio::null()).spawn()?;
    let removed = eventually("removal", TIMEOUT, || Ok((!cgroup.exists()).then_some(())));
    kill(Pid::from_raw(next.id().cast_signed()), Signal::SIGTERM)?;
    next.wait()?;
    removed
}

test!(self_test_that_is_ended_leaves_nothing);
fn self_test_that_is_ended_leaves_nothing() -> anyhow::Result<()> {
    let child = self_test()?
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()?;
    let (pid, cgroup) = (child.id(), cgroup_of(child.id()));
    let children = |pid: &str| {
        let path = format!("/proc/{pid}/task/{pid}/children");
        let text = fs::read_to_string(path).unwrap_or_default();
        text.split_whitespace()
            .map(ToOwned::to_owned)
            .collect::<Vec<_>>()
    };
    // The test has begun when a process is in the cgroup.
    let begun = || {
        let inside = fs::read_to_string(cgroup.join("cgroup.procs")).unwrap_or_default();
        Ok(inside.lines().next().map(ToOwned::to_owned))
    };
    let tester = eventually("connections", TIMEOUT, begun)?;
    let daemon = children(&tester).pop().context("no daemon")?;
    kill(Pid::from_raw(pid.cast_signed()), Signal::SIGTERM)?;
    let error = refusal(&child.wait_with_output()?)?;
    ensure!(error.contains("interrupted"), "{error}");
    ensure!(!cgroup.exists(), "{} is left", cgroup.display());
    let is_gone = |pid: &str| !Path::new("/proc").join(pid).join("exe").exists();
    eventually("end of the daemon", TIMEOUT, || {
        Ok(is_gone(&daemon).then_some(()))
    })
}
