//! Rejected configurations: `check` reports them, and they never become active.

use std::{os::unix::fs::chown, process::Output};

use rto_testbed::timing::jiffies;

use super::doctor::finding;
use crate::prelude::*;

const PORT: u16 = 4600;

test!(predict_by_policy_and_by_values, needs = [THIN_LINEAR]);
/// No daemon is needed: `rto-lab predict` asks `rto-agent check`.
fn predict_by_policy_and_by_values() -> anyhow::Result<()> {
    let env = TestEnv::new()?;
    env.configure(&format!(
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
    // The prediction also shows the cases in which the setting is worse.
    let worse = "\"worse\":true";
    assert!(by_policy["predictions"].to_string().contains(worse));
    let table = text(&["--policy", "low"])?;
    let becomes = quantised(Duration::from_millis(50));
    assert!(table.contains("worse"), "{table}");
    assert!(table.contains(&becomes), "{becomes}: {table}");
    let csv = text(&["--policy", "low", "--csv"])?;
    assert!(
        csv.starts_with("disruption_ms,kernel_ms,policy_ms,worse\n10,"),
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
    for (args, said) in [
        (
            &["--policy", "unknown"][..],
            "the configuration has: low, near",
        ),
        (&["--chart", "/nowhere/x.png"], ".svg or .html"),
        (&["--policy", "low", "--thin"], "cannot be used with"),
        (&["--rtt", "2h"], "at most 1h"),
    ] {
        let output = lab(args)?;
        let refused = String::from_utf8_lossy(&output.stderr);
        assert!(
            !output.status.success() && refused.contains(said),
            "{args:?}: {refused}"
        );
    }
    env.configure("[policy.low]\nrto_min = \"1s\"\n")?;
    let output = lab(&["--policy", "low"])?;
    let refused = String::from_utf8_lossy(&output.stderr);
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
    let env = TestEnv::with(&near("\"10.88.0.0/24\""))?;
    env.net.black_hole(PORT)?;
    let rto = "initial_rto = \"200ms\"";
    let policy = |lines: &str| format!("[policy.x]\n{lines}\n");
    let cases = [
        (
            policy(&format!("{rto}\ninital_rto = \"5ms\"")),
            ":9:1: unknown key inital_rto; did you mean initial_rto?",
        ),
        (
            policy(&format!("{rto}\ncidrs = [\"10.1.2.3/24\"]")),
            "10.1.2.3/24 has host bits set; did you mean 10.1.2.0/24?",
        ),
        (
            policy(&format!(
                "{rto}\ncidrs = [\"10.1.0.0/16\"]\n[policy.y]\n{rto}\ncidrs = [\"10.1.0.0/16\"]"
            )),
            "10.1.0.0/16 is already listed at ",
        ),
        (
            policy("initial_rto = \"3m\""),
            "must be more than 0 and less than 120s",
        ),
        (policy("rto_min = \"1s\""), "must be 2 jiffies to 200ms"),
        (
            policy("rto_min = \"20ms\"\ndelack_max = \"20ms\""),
            "delack_max = 20ms: an ACK that is delayed as long as rto_min = 20ms",
        ),
        (
            policy("thin_linear = true\nlinear_retries = 7"),
            "linear_retries = 7: must be 1 to 6",
        ),
        (
            policy("rto_min = \"50ms\"\nlinear_retries = 2"),
            "linear_retries = 2: it sets when linear mode ends, but linear mode is not enabled",
        ),
        (
            policy("rto_restart = true"),
            "rto_restart = true: it lowers rto_min by the smoothed RTT, but the policy has no \
             rto_min; add one",
        ),
        (policy("delack_max = \"1us\""), "must be 2 jiffies to 200ms"),
        (
            policy("rto_max = \"2s\"\ninitial_rto = \"3s\""),
            "it is below initial_rto = 3s; raise it",
        ),
        (
            policy("initial_rto = \"100ms\"\ncidrs = [\"0.0.0.0/0\"]"),
            "needs force = true",
        ),
        (
            policy("initial_rto = \"100ms\"\ncidrs = [\"fc00::/7\"]"),
            "on a prefix shorter than /16 needs force = true",
        ),
        (policy("cidrs = [\"10.1.0.0/16\"]"), "unknown policy x"),
        ("[policy.x\n".to_owned(), "unclosed table"),
    ];
    for (text, message) in cases {
        env.configure(&text)?;
        let said = env.cli_fails(&["check"])?;
        assert!(
            said.contains(message),
            "wanted {message:?}, check said {said}"
        );
        assert!(said.contains(&env.config().display().to_string()), "{said}");
        let answer = env.json(&["check"])?;
        assert_eq!(answer["ok"], false);
        assert!(answer["errors"][0]["line"].is_u64(), "{answer:#}");
        let said = env.cli_fails(&["reload"])?;
        assert!(
            said.contains(message) && said.contains("stays active"),
            "{said}"
        );
        let status = env.json(&["status"])?;
        assert_eq!(
            (&status["healthy"], &status["last_reload"]["ok"]),
            (&false.into(), &false.into())
        );
        assert_eq!(status["entries"], 1, "{status:#}");
    }
    env.assert_syn_gap(to(SERVER_V4, PORT), POLICY_RTO)?;
    env.configure(&near("\"10.88.0.0/24\""))?;
    env.cli(&["reload"])?;
    assert_eq!(env.json(&["status"])?["healthy"], true);
    Ok(())
}

test!(check_says_what_values_become);
fn check_says_what_values_become() -> anyhow::Result<()> {
    let env = TestEnv::new()?;
    env.configure(&near("\"10.88.0.0/24\"").replace("100ms", "250us"))?;
    let said = env.cli(&["check"])?;
    let becomes = quantised(Duration::from_micros(250));
    assert_says(&becomes, &["-> ", ", 1 jiffy "]);
    assert!(said.contains(&becomes), "{becomes}: {said}");
    let answer = env.json(&["check"])?;
    assert_eq!(
        (&answer["ok"], &answer["entries"]),
        (&true.into(), &1.into()),
        "{answer:#}"
    );
    Ok(())
}

test!(check_looks_at_the_keys_of_agent);
/// `check` reports each value that a start would reject, with its key.
fn check_looks_at_the_keys_of_agent() -> anyhow::Result<()> {
    let env = TestEnv::new()?;
    let policy = near("\"10.88.0.0/24\"");
    let open = env.dir().join("open");
    fs::create_dir(&open)?;
    fs::set_permissions(&open, fs::Permissions::from_mode(0o777))?;
    let open = open.display();
    for (key, value, said) in [
        ("cgroup", "/proc".to_owned(), "is not on cgroup2"),
        (
            "pin_dir",
            "/tmp/rto-agent-there-is-none".to_owned(),
            "pins need a BPF file system",
        ),
        (
            "group",
            "no-such-group".to_owned(),
            "there is no such group",
        ),
        ("socket", format!("{open}/s.sock"), "all users can write"),
        ("state_dir", open.to_string(), "all users can write"),
        (
            "metrics",
            "192.0.2.1:9464".to_owned(),
            "192.0.2.1 is not an address of this host",
        ),
        (
            "metrics",
            format!("unix:{open}/m.sock"),
            "all users can write",
        ),
    ] {
        let text = env.config_text(&policy);
        let is_other = |line: &&str| !line.starts_with(&format!("{key} "));
        let rest: Vec<&str> = text.lines().filter(is_other).collect();
        let rest = rest.join("\n");
        let text = rest.replacen("[agent]", &format!("[agent]\n{key} = \"{value}\""), 1);
        fs::write(env.config(), text)?;
        let refused = env.cli_fails(&["check"])?;
        assert!(
            refused.contains(&format!("[agent] {key}")) && refused.contains(said),
            "{key}: {refused}"
        );
        assert_eq!(env.json(&["check"])?["ok"], false, "{key}");
    }
    env.configure(&policy)?;
    env.cli(&["check"])?;
    Ok(())
}

test!(a_configuration_that_others_may_change_is_told);
/// `check`, `doctor` and the log report it.
fn a_configuration_that_others_may_change_is_told() -> anyhow::Result<()> {
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
        let said = format!("{place}: all users can write to it; chmod go-w {place}");
        chmod(of, mode | 0o022)?;
        let checked = check()?;
        assert!(checked.contains(&format!("{warning}{said}")), "{checked}");
        let report = env.json(&["doctor", "--config", name])?;
        let finding = finding(&report, "configuration-permissions");
        assert_eq!(finding["severity"], "warning", "{finding:#}");
        assert!(finding["found"].to_string().contains(&said), "{finding:#}");
        chmod(of, mode)?;
    }
    chown(&config, Some(65534), None)?;
    let checked = check()?;
    let owner = "it belongs to uid 65534, who can write to it; chown root";
    assert!(checked.contains(owner), "{checked}");
    env.configure(&policy)?;
    chown(env.config(), Some(65534), None)?;
    env.start()?;
    assert!(env.log().contains(owner), "{}", env.log());
    Ok(())
}

test!(a_start_without_a_good_file_leaves_nothing);
fn a_start_without_a_good_file_leaves_nothing() -> anyhow::Result<()> {
    let mut env = TestEnv::new()?;
    env.configure("[policy.x]\ninitial_rto = 5\n")?;
    let error = env
        .start()
        .err()
        .map(|e| format!("{e:?}"))
        .unwrap_or_default();
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
        let error = env
            .start()
            .err()
            .map(|e| format!("{e:?}"))
            .unwrap_or_default();
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
    let said = env.cli_fails(&["reload"]);
    mode(0o755)?;
    let said = said?;
    assert!(said.contains("policies.d"), "{said}");
    assert!(said.contains("Permission denied"), "{said}");
    env.cli(&["reload"])?;
    Ok(())
}

test!(
    every_setting_by_file_cli_list_lookup_and_json,
    needs = [THIN_LINEAR]
);
fn every_setting_by_file_cli_list_lookup_and_json() -> anyhow::Result<()> {
    let env = TestEnv::with(
        "[policy.all]\nrto_min = \"50ms\"\nrto_restart = true\ndelack_max = \"20ms\"\nthin_linear = true\n\
         linear_retries = 3\nuser_timeout = \"30s\"\ncidrs = [\"10.1.0.0/16\"]\n",
    )?;
    env.cli(&[
        "add",
        "10.2.0.0/16",
        "--rto-min",
        "50ms",
        "--rto-restart",
        "--delack-max",
        "20ms",
        "--thin-linear",
        "true",
        "--linear-retries",
        "3",
        "--user-timeout",
        "30s",
    ])?;
    let list = env.json(&["list"])?;
    let settings = |i: usize| {
        let policy = list["entries"][i]["policy"].as_str();
        list["policies"][policy.unwrap_or_default()]["settings"].clone()
    };
    assert_eq!(settings(0), settings(1), "{list:#}");
    assert_eq!(
        settings(0),
        serde_json::json!({
            "rto_min": "50ms", "rto_restart": true, "delack_max": "20ms", "thin_linear": true, "linear_retries": 3,
            "user_timeout": "30s", "force": false
        })
    );
    let text = env.cli(&["list"])?;
    assert!(text.contains("rto_restart on"), "{text}");
    assert!(text.contains("linear_retries 3"), "{text}");
    let lookup = env.cli(&["lookup", "10.2.3.4"])?;
    let rto_min = format!("rto_min         {}", quantised(Duration::from_millis(50)));
    for line in [
        rto_min.as_str(),
        "rto_restart     on (rto_min minus the smoothed RTT while fewer than 4 segments are \
         outstanding (experimental))",
        "linear_retries  3",
        "user_timeout    30s",
    ] {
        assert!(lookup.contains(line), "{line}: {lookup}");
    }
    // The same settings, saved to a file.
    env.cli(&[
        "add",
        "10.3.0.0/16",
        "--rto-min",
        "100ms",
        "--rto-restart",
        "--thin-linear",
        "true",
        "--linear-retries",
        "1",
        "--save",
    ])?;
    let saved = fs::read_to_string(env.policies_dir().join("50-cli.toml"))?;
    assert!(saved.contains("linear_retries = 1"), "{saved}");
    assert!(saved.contains("rto_restart = true"), "{saved}");
    env.cli_refuses(
        &["add", "10.4.0.0/16", "--rto-restart"],
        "the policy has no --rto-min; add one",
    )?;
    env.cli_refuses(
        &["add", "10.4.0.0/16", "--linear-retries", "2"],
        "linear mode is not enabled; add --thin-linear",
    )?;
    assert_eq!(
        env.json(&["list"])?["entries"].as_array().map(Vec::len),
        Some(3)
    );
    Ok(())
}

test!(start_with_bad_files_uses_last_good_ones);
fn start_with_bad_files_uses_last_good_ones() -> anyhow::Result<()> {
    let mut env = TestEnv::new()?;
    env.net.black_hole(PORT)?;
    let metrics = env.dir().join("metrics.sock");
    let good = format!(
        "metrics = \"unix:{}\"\n{}",
        metrics.display(),
        near("\"10.88.0.0/24\"")
    );
    let bad = format!("{good}inital_rto = \"1s\"\n");
    let expect = |env: &TestEnv, timer| env.assert_syn_gap(to(SERVER_V4, PORT), timer);
    let restored = || -> anyhow::Result<f64> {
        let page = http::get(UnixStream::connect(&metrics)?, "/metrics")?;
        let name = "rto_agent_last_good_configuration_restored ";
        let mut lines = page.body.lines();
        let value = lines.find_map(|line| line.strip_prefix(name));
        Ok(value.context("no such metric")?.parse()?)
    };
    let refused = |env: &mut TestEnv| {
        let error = env.start().err().map(|e| format!("{e:?}"));
        let error = error.unwrap_or_default();
        assert!(error.contains("unknown key inital_rto"), "{error}");
        assert!(!env.pin_dir().exists() && !env.socket().exists());
    };
    // No good configuration has been kept yet.
    env.configure(&bad)?;
    refused(&mut env);
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
    let status = env.json(&["status"])?;
    assert!(in_use(&status), "{status:#}");
    let errors = status["last_reload"]["errors"].to_string();
    assert!(errors.contains("unknown key inital_rto"), "{errors}");
    let text = String::from_utf8(env.try_cli(&["status"])?.stdout)?;
    let said = "; the last good configuration, saved ";
    assert!(text.replace("\n", " ").contains("REFUSED") && text.contains("PROBLEM"));
    let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(words(&text).contains(&words(said)), "{text}");
    let logged = "configuration rejected; using the last good one, saved ";
    assert!(env.log().contains(logged), "{}", env.log());
    // The kept configuration stays active while the files are bad, also after another start.
    env.cli_fails(&["reload"])?;
    assert!(in_use(&env.json(&["status"])?));
    env.end(Signal::SIGTERM)?;
    env.start()?;
    assert!(in_use(&env.json(&["status"])?));
    env.configure(&good)?;
    env.cli(&["reload"])?;
    let status = env.json(&["status"])?;
    assert_eq!(status["healthy"], true, "{status:#}");
    assert!(status["last_reload"]["kept_at_s"].is_null(), "{status:#}");
    assert_eq!(restored()?, 0.0);
    env.end(Signal::SIGTERM)?;
    // A damaged copy is reported, and not used.
    fs::write(env.persistent_dir().join("last-good.json"), "{")?;
    env.configure(&bad)?;
    refused(&mut env);
    let logged = "the last good configuration cannot be used: ";
    assert!(env.log().contains(logged), "{}", env.log());
    Ok(())
}
