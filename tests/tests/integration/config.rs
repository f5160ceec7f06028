//! Rejected configurations: `check` reports them, and they never become active.

use std::{net::TcpStream, os::unix::fs::chown, process::Output};

use rto_testbed::timing::jiffies;

use super::doctor::finding;
use crate::prelude::*;

test!(predict_by_policy_and_by_values, needs = [THIN_LINEAR]);
/// No daemon is needed: `rto-lab predict` asks `rto-agent check`.
fn predict_by_policy_and_by_values() -> anyhow::Result<()> {
    let env = configured(&format!(
        "{}[policy.low]\nrto_min = \"50ms\"\nthin_linear = true\n",
        near("\"10.88.0.0/24\"")
    ))?;
    let lab = |args: &[&str]| -> anyhow::Result<Output> {
        let mut command = Command::new(beside("rto-lab")?);
        command.args(["predict", "--config"]).arg(env.config());
        Ok(command.args(args).output()?)
    };
    let text = |args: &[&str]| stdout_of("rto-lab predict", lab(args)?);
    let json = |args: &[&str]| -> anyhow::Result<Value> {
        Ok(serde_json::from_str(&text(&[args, &["--json"]].concat())?)?)
    };
    let by_policy = json(&["--policy", "low", "-d", "10ms..20s"])?;
    let rto_min = jiffy() * jiffies(Duration::from_millis(50));
    let rto_min = format!("{}us", rto_min.as_micros());
    let by_values = &["--rto-min", &rto_min, "--thin"];
    assert_eq!(by_policy["predictions"], json(by_values)?["predictions"]);
    let all = by_policy["predictions"].as_array().map_or(0, Vec::len);
    assert_eq!(all, 11, "{by_policy:#}");
    let first = &by_policy["predictions"][0];
    let [kernel, policy] = ["kernel_ms", "policy_ms"].map(|name| first[name].as_f64());
    assert!(kernel >= Some(200.0) && policy < Some(75.0), "{first:#}");
    assert_eq!(first["worse"], false, "{first:#}");
    let table = text(&["--policy", "low"])?;
    let becomes = quantised(Duration::from_millis(50));
    assert!(table.contains(&becomes), "{becomes}: {table}");
    let csv = text(&["--policy", "low", "--csv"])?;
    assert!(
        csv.starts_with("disruption_ms,kernel_ms,policy_ms,worse\n10.0,"),
        "{csv}"
    );
    let chart = env.dir().join("chart.svg");
    let drawn = ["--policy", "low", "--chart", &chart.to_string_lossy()];
    assert_eq!(text(&drawn)?, text(&drawn[..2])?);
    assert!(fs::read_to_string(chart)?.contains("</svg>"));
    // A policy with settings for handshakes only has the kernel's own times here.
    let same = json(&["--policy", "near", "-d", "1s"])?;
    let same = &same["predictions"][0];
    assert_eq!(same["kernel_ms"], same["policy_ms"]);
    for (args, expected) in [
        (
            &["--policy", "unknown"][..],
            "the configuration has: low, near",
        ),
        (&["--chart", "/nowhere/x.png"], ".svg or .html"),
    ] {
        let refused = refusal(&lab(args)?)?;
        assert!(refused.contains(expected), "{args:?}: {refused}");
    }
    env.configure("[policy.low]\nrto_min = \"1s\"\n")?;
    let refused = refusal(&lab(&["--policy", "low"])?)?;
    assert!(refused.contains("must be 2 jiffies to 200ms"), "{refused}");
    Ok(())
}

/// A configured duration in jiffies of this host, as it is printed: "50ms -> 52ms, 13 jiffies at HZ=250".
fn quantised(asked: Duration) -> String {
    let printed = |duration: Duration| match duration.as_nanos() {
        nanos if nanos % 1_000_000 == 0 => format!("{}ms", nanos / 1_000_000),
        nanos if nanos % 1000 == 0 => format!("{}us", nanos / 1000),
        nanos => format!("{nanos}ns"),
    };
    let (count, hz) = (jiffies(asked), 1_000_000_000 / jiffy().as_nanos());
    let becomes = Duration::from_nanos(
        u64::from(count) * 1_000_000_000 / u64::try_from(hz.max(1)).unwrap_or(1),
    );
    let plural = if count == 1 { "jiffy" } else { "jiffies" };
    let mut text = printed(asked);
    if becomes != asked {
        text += &format!(" -> {}", printed(becomes));
    }
    format!("{text}, {count} {plural} at HZ={hz}")
}

test!(every_refusal_of_check_and_of_a_running_daemon);
fn every_refusal_of_check_and_of_a_running_daemon() -> anyhow::Result<()> {
    let env = silent(&near("\"10.88.0.0/24\""))?;
    let rto = "initial_rto = \"200ms\"";
    let policy = |lines: &str| format!("[policy.x]\n{lines}\n");
    // Unit tests have every message; these are of the format, of a value and of TOML.
    let cases = [
        (
            policy(&format!("{rto}\ninital_rto = \"5ms\"")),
            ":9:1: unknown key inital_rto; did you mean initial_rto?",
        ),
        (
            policy(&format!("{rto}\ncidrs = [\"10.1.2.3/24\"]")),
            "10.1.2.3/24 has host bits set; did you mean 10.1.2.0/24?",
        ),
        ("[policy.x\n".to_owned(), "unclosed table"),
    ];
    for (text, message) in cases {
        env.configure(&text)?;
        let error = env.cli_fails(&["check"])?;
        assert!(
            error.contains(message),
            "wanted {message:?}, check said {error}"
        );
        assert!(
            error.contains(&env.config().display().to_string()),
            "{error}"
        );
        let answer = env.json(&["check"])?;
        assert_eq!(answer["ok"], false);
        assert!(answer["errors"][0]["line"].is_u64(), "{answer:#}");
        let error = env.cli_fails(&["reload"])?;
        assert!(
            error.contains(message) && error.contains("stays active"),
            "{error}"
        );
        let status = env.status()?;
        assert_has(
            &status,
            json!({"healthy": false, "last_reload": {"ok": false}, "entries": 1}),
        );
    }
    env.assert_syn_gap(to(SERVER_V4, PORT), POLICY_RTO)?;
    env.load(&near("\"10.88.0.0/24\""))?;
    assert_eq!(env.status()?["healthy"], true);
    Ok(())
}

test!(check_says_what_values_become);
fn check_says_what_values_become() -> anyhow::Result<()> {
    let env = configured(&near("\"10.88.0.0/24\"").replace("100ms", "22ms"))?;
    let text = env.cli(&["check", "--verbose"])?;
    let becomes = quantised(Duration::from_millis(22));
    assert_says(&becomes, &[" jiffies "]);
    assert!(text.contains(&becomes), "{becomes}: {text}");
    let answer = env.json(&["check"])?;
    assert_has(&answer, json!({"ok": true, "entries": 1}));
    Ok(())
}

test!(world_writable_configuration_is_reported);
/// `check`, `doctor` and the log report it.
fn world_writable_configuration_is_reported() -> anyhow::Result<()> {
    let mut env = TestEnv::new()?;
    let policy = near("\"10.88.0.0/24\"");
    let text = env.config_text(&policy);
    let dir = env.dir().join("etc");
    let (config, policies) = (dir.join("config.toml"), dir.join("policies.d"));
    fs::create_dir_all(&policies)?;
    fs::write(&config, text)?;
    let name = config.to_str().context("its name")?;
    let check = || env.cli(&["check", "--config", name]);
    let chmod = |of: &Path, mode| fs::set_permissions(of, fs::Permissions::from_mode(mode));
    let warning = "warning: users other than root can change the configuration: ";
    let good = check()?;
    assert!(!good.contains(warning), "{good}");
    for (of, mode) in [(&config, 0o644), (&policies, 0o755), (&dir, 0o755)] {
        let place = of.display();
        let expected = format!("{place}: all users can write to it; chmod go-w {place}");
        chmod(of, mode | 0o022)?;
        let checked = check()?;
        assert!(
            checked.contains(&format!("{warning}{expected}")),
            "{checked}"
        );
        let report = env.json(&["doctor", "--config", name])?;
        let finding = finding(&report, "configuration-permissions");
        assert_eq!(finding["severity"], "warning", "{finding:#}");
        assert!(
            finding["found"].to_string().contains(&expected),
            "{finding:#}"
        );
        chmod(of, mode)?;
    }
    chown(&config, Some(65534), None)?;
    let checked = check()?;
    let owner = "it belongs to uid 65534, who can write to it; chown root";
    assert!(checked.contains(owner), "{checked}");
    env.configure(&policy)?;
    chown(env.config(), Some(65534), None)?;
    env.start()?;
    env.logs(owner)?;
    Ok(())
}

test!(a_start_without_a_good_file_leaves_nothing);
fn a_start_without_a_good_file_leaves_nothing() -> anyhow::Result<()> {
    let mut env = configured("[policy.x]\ninitial_rto = 5\n")?;
    let error = env.start_fails()?;
    assert!(error.contains("a unit is missing"), "{error}");
    assert!(!env.pin_dir().exists() && !env.socket().exists());
    // (Directly in the directory for temporary files, because the agent's own directory has a dot in its name.)
    let elsewhere = std::env::temp_dir().join(rto_testbed::names::unique());
    // Pins need a BPF file system, and the program needs cgroup2; elsewhere the daemon creates nothing.
    for (key, wrong, message) in [
        ("pin_dir", elsewhere.clone(), "mount -t bpf bpf /sys/fs/bpf"),
        ("cgroup", "/proc".into(), "is not on cgroup2"),
    ] {
        env.configure(&near("\"10.88.0.0/24\""))?;
        let text = fs::read_to_string(env.config())?;
        let line = text
            .lines()
            .find(|l| l.starts_with(key))
            .unwrap_or_default();
        let text = text.replace(line, &format!("{key} = \"{}\"", wrong.display()));
        fs::write(env.config(), text)?;
        env.cli_refuses(&["check"], &format!("[agent] {key}"))?;
        let error = env.start_fails()?;
        assert!(error.contains(message), "{error}");
        assert!(!elsewhere.exists() && !env.pin_dir().exists());
    }
    fs::remove_file(env.config())?;
    env.cli_refuses(&["check"], "--config")
}

test!(a_reload_refuses_what_it_cannot_list);
/// Even if every file that the daemon can read is unchanged.
fn a_reload_refuses_what_it_cannot_list() -> anyhow::Result<()> {
    let env = TestEnv::with(&near("\"10.88.0.0/24\""))?;
    let mode = |mode| fs::set_permissions(env.policies_dir(), fs::Permissions::from_mode(mode));
    mode(0)?;
    let error = env.cli_fails(&["reload"]);
    mode(0o755)?;
    let error = error?;
    assert!(error.contains("policies.d"), "{error}");
    assert!(error.contains("Permission denied"), "{error}");
    env.cli(&["reload"])?;
    Ok(())
}

test!(
    every_setting_by_file_cli_list_lookup_and_json,
    needs = [THIN_LINEAR]
);
fn every_setting_by_file_cli_list_lookup_and_json() -> anyhow::Result<()> {
    let file = "[policy.all]\ninitial_rto = \"100ms\"\nsyn_ack_rto = \"200ms\"\nmptcp = \"apply\"\n\
        rto_min = \"50ms\"\nrto_restart = true\ndelack_max = \"20ms\"\nthin_linear = true\n\
        linear_retries = 3\nuser_timeout = \"30s\"\ncidrs = [\"10.1.0.0/16\"]\n";
    let settings = "--initial-rto 100ms --syn-ack-rto 200ms --mptcp apply --rto-min 50ms --rto-restart \
        --delack-max 20ms --thin-linear true --linear-retries 3 --user-timeout 30s";
    let mut env = TestEnv::with(file)?;
    env.cli_line(&format!("add 10.2.0.0/16 {settings}"))?;
    // Saved to a file, and the others kept over a restart.
    env.cli_line(&format!("add 10.3.0.0/16 {settings} --save"))?;
    let saved = fs::read_to_string(env.policies_dir().join("50-cli.toml"))?;
    assert_says(&saved, &["linear_retries = 3", "rto_restart = true"]);
    env.restart(Signal::SIGTERM)?;
    let list = env.json(&["list"])?;
    for entry in list["entries"].as_array().context("no entries")? {
        let policy = entry["policy"].as_str().context("no policy")?;
        let settings = json!({
            "initial_rto": "100ms", "syn_ack_rto": "200ms", "mptcp": "apply", "rto_min": "50ms", "rto_restart": true,
            "delack_max": "20ms", "thin_linear": true, "linear_retries": 3, "user_timeout": "30s", "force": false
        });
        assert_eq!(list["policies"][policy]["settings"], settings, "{list:#}");
    }
    ensure!(list["entries"][2].is_object(), "{list:#}");
    let text = env.cli(&["list"])?;
    assert_says(&text, &["rto_restart on", "linear_retries 3"]);
    let lookup = env.cli(&["lookup", "10.2.3.4"])?;
    let rto_min = format!("rto_min         {}", quantised(Duration::from_millis(50)));
    for line in [
        rto_min.as_str(),
        "rto_restart     on (rto_min minus the smoothed RTT while fewer than 4 segments are \
         outstanding (experimental))",
        "linear_retries  3",
        "user_timeout    30s",
        "(half-open connections are kept for ",
    ] {
        assert!(lookup.contains(line), "{line}: {lookup}");
    }
    Ok(())
}

test!(start_with_bad_files_uses_last_good_ones);
fn start_with_bad_files_uses_last_good_ones() -> anyhow::Result<()> {
    let mut env = TestEnv::new()?;
    env.net.black_hole(PORT)?;
    let metrics = super::metrics::free_address()?;
    let good = format!("metrics = \"{metrics}\"\n{}", near("\"10.88.0.0/24\""));
    let bad = format!("{good}inital_rto = \"1s\"\n");
    let restored = || -> anyhow::Result<f64> {
        let page = http::get(TcpStream::connect(metrics)?, "/metrics")?;
        let name = "rto_agent_last_good_configuration_restored ";
        let mut lines = page.body.lines();
        let value = lines.find_map(|line| line.strip_prefix(name));
        Ok(value.context("no such metric")?.parse()?)
    };
    let refused = |env: &mut TestEnv| -> anyhow::Result<()> {
        let error = env.start_fails()?;
        ensure!(error.contains("unknown key inital_rto"), "{error}");
        ensure!(!env.pin_dir().exists() && !env.socket().exists());
        Ok(())
    };
    // No good configuration has been kept yet.
    env.configure(&bad)?;
    refused(&mut env)?;
    env.configure(&good)?;
    env.start()?;
    assert_eq!(restored()?, 0.0);
    env.end(Signal::SIGTERM)?;
    expect(&env, KERNEL_RTO)?;
    env.configure(&bad)?;
    env.start()?;
    expect(&env, POLICY_RTO)?;
    assert_eq!(restored()?, 1.0);
    let in_use = |status: &Value| {
        status["healthy"] == false
            && status["last_reload"]["ok"] == false
            && status["last_reload"]["kept_at_s"].is_u64()
    };
    let status = env.status()?;
    assert!(in_use(&status), "{status:#}");
    let errors = status["last_reload"]["errors"].to_string();
    assert!(errors.contains("unknown key inital_rto"), "{errors}");
    let text = String::from_utf8(env.try_cli(&["status"])?.stdout)?;
    let expected = "; the last good configuration, saved ";
    assert!(text.replace("\n", " ").contains("REFUSED") && text.contains("PROBLEM"));
    let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(words(&text).contains(&words(expected)), "{text}");
    let logged = "configuration rejected; using the last good one, saved ";
    env.logs(logged)?;
    // The kept configuration stays active while the files are bad, also after another start.
    env.cli_fails(&["reload"])?;
    assert!(in_use(&env.status()?));
    env.restart(Signal::SIGTERM)?;
    assert!(in_use(&env.status()?));
    env.load(&good)?;
    let status = env.status()?;
    assert_eq!(status["healthy"], true, "{status:#}");
    assert!(status["last_reload"]["kept_at_s"].is_null(), "{status:#}");
    assert_eq!(restored()?, 0.0);
    env.end(Signal::SIGTERM)?;
    // A damaged copy is reported, and not used.
    fs::write(env.persistent_dir().join("last-good.json"), "{")?;
    env.configure(&bad)?;
    refused(&mut env)?;
    let logged = "the last good configuration cannot be used: ";
    env.logs(logged)?;
    Ok(())
}
