//! The output of single commands, and the log lines beside it.

use rto_testbed::workload::arrivals::{Arrivals, Clients};
use rto_tests::{pinned::map, pty::Terminal};

use crate::prelude::*;

test!(changed_ttl_is_reported);
fn changed_ttl_is_reported() -> anyhow::Result<()> {
    let env = TestEnv::with(&near("\"192.0.2.0/24\""))?;
    let add =
        |more: &[&str]| env.cli(&[&["add", "10.1.0.0/24", "--policy", "near"], more].concat());
    assert_says(&add(&["--ttl", "10m"])?, &["1 added", "expires in 10m\n"]);
    let forever = add(&[])?;
    assert_says(&forever, &["1 lifetime changed\n", "until reboot"]);
    let answer = env.json(&["add", "10.1.0.0/24", "--policy", "near", "--ttl", "90s"])?;
    assert_has(&answer, json!({"lifetimes_changed": 1, "expires_in_s": 90}));
    add(&[])?;
    let same = add(&[])?;
    ensure!(same.starts_with("nothing changed\n"), "{same}");
    Ok(())
}

test!(lookup_takes_several_ends_of_connections);
fn lookup_takes_several_ends_of_connections() -> anyhow::Result<()> {
    let env = TestEnv::with(&near("\"10.88.0.0/16\""))?;
    let ends = ["lookup", "10.88.0.2:443", "[fd00::7]:443"];
    let text = env.cli(&ends)?;
    assert_says(
        &text,
        &["10.88.0.2: 10.88.0.0/16 (policy near", "\nfd00::7: "],
    );
    let answers = env.json(&ends)?;
    assert_eq!(answers[0]["entry"]["policy"], "near", "{answers:#}");
    assert_eq!(answers[1]["entry"], Value::Null, "{answers:#}");
    assert_eq!(
        env.json(&["lookup", "10.88.0.2"])?["entry"]["policy"],
        "near"
    );
    Ok(())
}

test!(lookup_names_what_is_switched_off);
fn lookup_names_what_is_switched_off() -> anyhow::Result<()> {
    let env = TestEnv::with(&near("\"10.88.0.0/16\", \"10.88.0.0/24\""))?;
    env.cli(&["remove", "10.88.0.0/24"])?;
    let text = env.cli(&["lookup", SERVER_V4])?;
    let line = "not applied: 10.88.0.0/24, switched off at run time (undo: rto-agent remove --undo \
                10.88.0.0/24)";
    ensure!(
        text.contains("10.88.0.0/16 (policy near") && text.contains(line),
        "{text}"
    );
    env.cli(&["remove", "10.88.0.0/16"])?;
    let answer = env.json(&["lookup", SERVER_V4])?;
    assert_has(
        &answer,
        json!({"masked": ["10.88.0.0/24", "10.88.0.0/16"], "entry": null}),
    );
    env.cli(&["remove", "--undo", "10.88.0.0/16", "10.88.0.0/24"])?;
    let text = env.cli(&["lookup", SERVER_V4])?;
    ensure!(!text.contains("switched off"), "{text}");
    Ok(())
}

test!(add_names_settings_as_options);
fn add_names_settings_as_options() -> anyhow::Result<()> {
    let env = TestEnv::with(&near("\"192.0.2.0/24\""))?;
    let error = env.cli_fails(&["add", "0.0.0.0/0", "--initial-rto", "100ms"])?;
    ensure!(
        error.contains("needs --force") && !error.contains(" = "),
        "{error}"
    );
    for (option, value) in [
        ("--rto-min", "1ms"),
        ("--guard", "on"),
        ("--mode", "advise"),
    ] {
        let error = env.cli_fails(&["add", "10.1.0.0/24", option, value])?;
        ensure!(
            error.contains(&format!("{option} {value}: ")) && !error.contains("adhoc"),
            "{error}"
        );
    }
    // An error about a policy of the files uses the terms of the files.
    env.cli_refuses(&["add", "0.0.0.0/33", "--policy", "near"], "0 to 32")?;
    env.cli_says(
        &["add", "10.1.0.0/24", "--initial-rto", "1us"],
        "note: --initial-rto 1us becomes ",
    )?;
    Ok(())
}

test!(advised_snippet_passes_check);
/// Changed keys replace the existing keys of the policy. CIDRs of other files and runtime entries are not printed.
fn advised_snippet_passes_check() -> anyhow::Result<()> {
    let policy =
        "sampling = 1\n[policy.near]\ninitial_rto = \"400ms\"\ncidrs = [\"10.88.0.0/24\"]\n";
    let mut env = TestEnv::new()?;
    fs::create_dir_all(env.policies_dir())?;
    let more = "[policy.near]\ncidrs = [\"198.51.100.0/24\"]\n";
    fs::write(env.policies_dir().join("20-more.toml"), more)?;
    env.configure(policy)?;
    env.start()?;
    env.cli(&["add", "192.0.2.0/24", "--policy", "near"])?;
    let _server = env.echo_server(to(SERVER_V4, PORT))?;
    let clients = Clients::new(to(SERVER_V4, PORT), Duration::from_millis(1));
    let mut clients = Arrivals::start(&env.net.client, Some(env.cgroup.path()), &clients)?;
    // Fewer than 300 are no evidence.
    clients.begin(320)?;
    clients.done()?;
    let advise = ["advise", "--policy", "near", "--spurious", "50%"];
    let answer = env.json(&advise)?;
    let snippet = answer["snippet"].as_str().context("no snippet")?;
    let suggested: toml::Table = snippet.parse()?;
    let keys = suggested["policy"]["near"].as_table().context("no keys")?;
    ensure!(
        keys.contains_key("initial_rto") && !keys.contains_key("cidrs"),
        "{snippet}"
    );
    let mut config: toml::Table = env.config_text(policy).parse()?;
    let table = config["policy"]["near"]
        .as_table_mut()
        .context("no policy")?;
    for (key, value) in keys {
        table.insert(key.clone(), value.clone());
    }
    fs::write(env.config(), config.to_string())?;
    env.cli_says(&["check"], "good: 2 entries, 1 policy, 2 files")?;
    env.cli(&["reload"])?;
    let now = env.json(&["lookup", SERVER_V4])?;
    let asked = &now["entry"]["settings"]["initial_rto"];
    assert_eq!(asked.as_str(), keys["initial_rto"].as_str(), "{now:#}");
    Ok(())
}

test!(file_change_is_logged_once);
fn file_change_is_logged_once() -> anyhow::Result<()> {
    let env = TestEnv::with(&near("\"10.88.0.0/24\""))?;
    let count = |text: &str| env.log().matches(text).count();
    let logged = |text: &'static str| {
        eventually_seen("line of the log", TIMEOUT, || Ok(count(text)), |n| *n > 0)
    };
    env.configure("[policy.near]\ninital_rto = \"5ms\"\n")?;
    logged("did you mean initial_rto?")?;
    env.configure(&near("\"10.88.1.0/24\""))?;
    env.wait_status("the good file", |status| {
        status["last_reload"]["ok"] == true
    })?;
    assert_eq!(count("did you mean initial_rto?"), 1, "{}", env.log());
    env.configure(&format!(
        "rtt_sampling = \"1s\"\n{}",
        near("\"10.88.0.0/24\"")
    ))?;
    logged("[agent] rtt_sampling changed: it takes effect at the next start")?;
    Ok(())
}

test!(small_stack_is_enough_for_clients);
/// With and without the capability that raises the limit (CAP_SYS_RESOURCE).
fn small_stack_is_enough_for_clients() -> anyhow::Result<()> {
    let env = TestEnv::with(&near("\"10.88.0.0/24\""))?;
    for wrapper in ["", "setpriv --bounding-set=-sys_resource"] {
        let agent = find(None)?;
        let agent = agent.display();
        for args in [
            "status",
            "list",
            "add 10.1.0.0/24 --initial-rto 60ms",
            "--help",
            "check",
        ] {
            let line = format!("ulimit -s 16; exec {wrapper} {agent} {args}");
            let mut shell = Command::new("sh");
            // The environment is on the stack as well.
            shell
                .env_clear()
                .env("PATH", std::env::var_os("PATH").context("no PATH")?);
            shell.env("RTO_AGENT_SOCKET", env.socket());
            shell.env("RTO_AGENT_CONFIG", env.config());
            let output = shell.args(["-c", &line]).output()?;
            ensure!(output.status.success(), "{wrapper} {args}: {output:?}");
        }
    }
    Ok(())
}

test!(taken_metrics_address_prevents_no_start);
fn taken_metrics_address_prevents_no_start() -> anyhow::Result<()> {
    let taken = std::net::TcpListener::bind("127.0.0.1:0")?;
    let address = taken.local_addr()?;
    let env = TestEnv::with(&format!(
        "metrics = \"{address}\"\n{}",
        near("\"10.88.0.0/24\"")
    ))?;
    let problem = format!("cannot listen on {address}");
    let says = |status: &Value| status["warnings"].to_string().contains(&problem);
    let status = env.wait_status("the problem", says)?;
    ensure!(status["healthy"] == true, "{status:#}");
    env.logs(&problem)?;
    drop(taken);
    env.wait_status("the retry", |status| !says(status))?;
    let answer = http::request(
        std::net::TcpStream::connect(address)?,
        "GET",
        "/healthz",
        "",
    )?;
    ensure!(answer.status == 200, "{answer:?}");
    Ok(())
}

test!(a_start_that_fails_leaves_no_directory);
/// Before anything is loaded, and after everything else was done.
fn a_start_that_fails_leaves_no_directory() -> anyhow::Result<()> {
    let mut env = TestEnv::new()?;
    let policies = near("\"10.88.0.0/24\"");
    let good = env.config_text(&policies);
    // The control socket is bound last, and not where other users could replace it.
    let open = env.dir().join("open");
    fs::create_dir(&open)?;
    fs::set_permissions(&open, fs::Permissions::from_mode(0o777))?;
    let socket = env.socket().display().to_string();
    for (text, error) in [
        (
            env.config_text(&format!("group = \"no-such-group\"\n{policies}")),
            "no such group",
        ),
        (
            good.replace(&socket, &format!("{}/control.sock", open.display())),
            "all users can write to it",
        ),
    ] {
        fs::write(env.config(), text)?;
        env.spawn_under(&[])?;
        ensure!(!env.ended()?.success());
        assert_says(&env.log(), &[error]);
        ensure!(!env.pin_dir().exists(), "{:?} is left", env.pin_dir());
        // A directory that existed before stays.
        fs::create_dir(env.pin_dir())?;
        env.spawn_under(&[])?;
        ensure!(!env.ended()?.success());
        fs::remove_dir(env.pin_dir())?;
    }
    env.configure(&near("\"10.88.0.0/24\""))?;
    env.start()?;
    ensure!(env.pin_dir().exists());
    env.end(Signal::SIGTERM)?;
    ensure!(!env.pin_dir().exists());
    Ok(())
}

test!(list_is_filtered_by_its_arguments);
fn list_is_filtered_by_its_arguments() -> anyhow::Result<()> {
    let other = "[policy.other]\nrto_min = \"100ms\"\ncidrs = [\"10.1.0.0/16\"]\n";
    let env = TestEnv::with(&format!("{}{other}", near("\"10.88.0.0/16\"")))?;
    env.cli(&["add", "10.88.1.0/24", "10.2.0.0/16", "--policy", "near"])?;
    let cidrs = |more: &[&str]| -> anyhow::Result<Vec<String>> {
        let list = env.json(&[&["list"], more].concat())?;
        let entries = list["entries"].as_array().context("no entries")?;
        let cidrs = entries.iter().filter_map(|entry| entry["cidr"].as_str());
        Ok(cidrs.map(ToOwned::to_owned).collect())
    };
    assert_eq!(cidrs(&["--runtime"])?, ["10.2.0.0/16", "10.88.1.0/24"]);
    env.cli_refuses(&["list", "--policy", "nope"], "no active policy nope")?;
    env.cli_says(&["remove", "--policy", "near"], "3 removed")?;
    assert_eq!(cidrs(&[])?, ["10.1.0.0/16"]);
    env.cli_fails(&["remove", "--policy", "near"])?;
    Ok(())
}

test!(entries_of_a_killed_daemon_are_listed);
fn entries_of_a_killed_daemon_are_listed() -> anyhow::Result<()> {
    let mut env = TestEnv::with(&near("\"10.88.0.0/24\""))?;
    env.cli(&["add", "10.88.1.0/24", "--policy", "near"])?;
    env.end(Signal::SIGKILL)?;
    let list = |more: &[&str]| -> anyhow::Result<(Option<i32>, String, String)> {
        let output = env.try_cli(&[&["list"], more].concat())?;
        let [stdout, stderr] = [output.stdout, output.stderr].map(String::from_utf8);
        Ok((output.status.code(), stdout?, stderr?))
    };
    let (status, listed, error) = list(&[])?;
    assert_eq!(status, Some(3), "{error}");
    for line in [
        "10.88.0.0/24  near    file     0     initial_rto 100ms",
        "10.88.1.0/24  near    runtime  0     initial_rto 100ms",
    ] {
        ensure!(listed.contains(line), "{line}: {listed}");
    }
    ensure!(error.contains("are kept active by the pins in"), "{error}");
    for (asked, cidr, other) in [
        ("--file", "10.88.0.0/24", "10.88.1.0/24"),
        ("--runtime", "10.88.1.0/24", "10.88.0.0/24"),
    ] {
        let (status, listed, _) = list(&[asked])?;
        assert_eq!(status, Some(3));
        ensure!(
            listed.contains(cidr) && !listed.contains(other),
            "{asked}: {listed}"
        );
    }
    let (status, json, error) = list(&["--json", "--cidr", "10.88.1.0/24"])?;
    assert_eq!(status, Some(3), "{error}");
    let json: Value = serde_json::from_str(&json)?;
    let expected = json!({
        "daemon": false, "entries": [ {"cidr": "10.88.1.0/24", "policy": "near",
        "source": {"kind": "runtime"}, "hits": 0} ],
        "policies": {"near": {"settings": {"initial_rto": "100ms"}}}
    });
    assert_has(&json, expected);
    env.cli_refuses(&["list", "--policy", "unknown"], "no active policy unknown")?;
    env.cli(&["detach"])?;
    let (status, listed, _) = list(&[])?;
    assert_eq!((status, listed.as_str()), (Some(1), ""));
    Ok(())
}

test!(pins_without_effect_are_not_listed);
/// The pin of a link outlives its attachment; no program uses a foreign map in the place of a pin.
fn pins_without_effect_are_not_listed() -> anyhow::Result<()> {
    type Change = fn(&TestEnv) -> anyhow::Result<()>;
    let changes: [Change; 2] = [
        |env| {
            let link = env.pins()?.join("link");
            run(&format!("bpftool link detach pinned {}", link.display()))?;
            ensure!(link.exists());
            Ok(())
        },
        |env| {
            let trie = map(env, maps::ENTRIES_V4)?;
            let pin = env.pins()?.join(maps::ENTRIES_V4);
            fs::remove_file(&pin)?;
            Ok(trie.twin()?.pin(&pin)?)
        },
    ];
    for change in changes {
        let mut env = TestEnv::with(&near("\"10.88.0.0/24\""))?;
        env.end(Signal::SIGKILL)?;
        let listed = env.try_cli(&["list"])?;
        ensure!(listed.status.code() == Some(3), "{listed:?}");
        change(&env)?;
        for args in [&["list"][..], &["list", "--json"]] {
            let output = env.try_cli(args)?;
            ensure!(
                output.stdout.is_empty() && output.status.code() == Some(1),
                "{output:?}"
            );
        }
    }
    Ok(())
}

test!(json_counts_are_numbers);
fn json_counts_are_numbers() -> anyhow::Result<()> {
    let env = TestEnv::with(&near("\"10.88.0.0/24\""))?;
    let looked = env.json(&["lookup", SERVER_V4])?;
    let effects = looked["entry"]["effects"]
        .as_array()
        .context("no effects")?;
    let retries = effects.iter().find(|e| e["setting"] == "syn_retries");
    let retries = retries.context("no syn_retries")?;
    assert_eq!(retries["effective"], "auto", "{retries:#}");
    env.cli_says(&["lookup", SERVER_V4], "as without the agent")?;
    env.cli(&["add", "10.1.0.0/16", "--syn-retries", "9"])?;
    let list = env.json(&["list"])?;
    let policies = list["policies"].as_object().context("no policies")?;
    let fixed = policies.values().any(|p| p["settings"]["syn_retries"] == 9);
    ensure!(fixed, "{list:#}");
    Ok(())
}

test!(output_fits_and_has_colours_only_on_a_terminal);
fn output_fits_and_has_colours_only_on_a_terminal() -> anyhow::Result<()> {
    const ESCAPE: char = '\u{1b}';
    let idle = "[policy.idle]\nrto_min = \"100ms\"\n";
    let more = "rto_min = \"100ms\"\nuser_timeout = \"30s\"\nsyn_retries = 4\n";
    let near = near("\"10.88.0.0/24\"");
    let env = TestEnv::with(&format!("{near}{more}{idle}"))?;
    let status = env.cli(&["status"])?;
    ensure!(
        status.contains("health         good") && !status.contains(ESCAPE),
        "{status}"
    );
    ensure!(!status.contains("CONNECTED"), "{status}");
    env.cli_says(
        &["status", "--color", "always"],
        "\u{1b}[32mhealth         good\u{1b}[0m",
    )?;
    // Without any connection both policies are idle.
    let stats = env.cli(&["stats"])?;
    assert_eq!(stats, "without any counts: idle, near (--all shows them)\n");
    let all = env.cli(&["stats", "--all"])?;
    ensure!(
        all.lines().count() == 5 && all.contains("UNDECIDED"),
        "{all}"
    );
    // On a terminal with 80 columns.
    for (args, cut) in [
        (&["list"][..], "…"),
        (&["stats", "--all"], "columns more: --wide)"),
    ] {
        let mut terminal = Terminal::start(env.command(args))?;
        let screen = terminal.wait_for("it", |screen| screen.contains(cut))?;
        ensure!(screen.contains("near"), "{screen}");
    }
    Ok(())
}

test!(colours_are_on_a_terminal_alone_and_can_be_switched_off);
fn colours_are_on_a_terminal_alone_and_can_be_switched_off() -> anyhow::Result<()> {
    let env = TestEnv::with(&near("\"10.88.0.0/24\""))?;
    for (no_color, more, coloured) in [
        ("", &[][..], true),
        ("1", &[], false),
        ("", &["--color", "never"], false),
        ("1", &["--color", "always"], true),
    ] {
        let options = || format!("NO_COLOR={no_color:?} {more:?}");
        let on_terminal = |verb: &str| {
            let mut command = env.command(&[&[verb], more].concat());
            command.env("NO_COLOR", no_color);
            let mut terminal = Terminal::start(command)?;
            // On old kernels `status` lists many missing features.
            terminal.resize(60, 80)?;
            anyhow::Ok(terminal)
        };
        for (verb, shown) in [
            ("status", "health         good"),
            ("check", "good: 1 entry"),
        ] {
            let mut terminal = on_terminal(verb)?;
            terminal.wait_for("the state", |screen| screen.contains(shown))?;
            assert_eq!(terminal.has_colours(), coloured, "{verb} {}", options());
        }
        let mut top = on_terminal("top")?;
        top.wait_for("the policy", |screen| screen.contains("near"))?;
        top.press("\r")?;
        top.wait_for("its statistics", |screen| screen.contains("stats --policy"))?;
        assert_eq!(top.has_colours(), coloured, "top {}", options());
    }
    Ok(())
}
