//! Clients of others at the control socket. None of them may see a connection that ends while it still sends.

use std::{
    fs,
    process::{Command, Output},
};

use anyhow::{Context as _, ensure};
use rto_tests::agent::World;

use super::{Test, near};

pub(super) const TESTS: &[Test] = &[
    ("python3_http_client", python),
    ("curl_reads_its_answers", curl),
    ("go_net_http", go),
];

/// Reloads by each.
const TIMES: u32 = 200;
/// Each of these is a process.
const TIMES_CURL: u32 = 50;

fn world() -> anyhow::Result<World> {
    World::with(&near("\"10.88.0.0/24\""))
}

fn good(output: &Output) -> anyhow::Result<String> {
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let complaint = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.success(),
        "{}: {said}{complaint}",
        output.status
    );
    Ok(said)
}

/// Runs a program that ends with "done" if every answer was as it should be.
fn run(world: &World, program: &str, arguments: &[&str], file: (&str, &str)) -> anyhow::Result<()> {
    let path = world.dir().join(file.0);
    fs::write(&path, file.1)?;
    let output = Command::new(program)
        .args(arguments)
        .arg(&path)
        .arg(world.socket())
        .arg(TIMES.to_string())
        // The toolchain that is there, and nothing from elsewhere.
        .envs([
            ("GOTOOLCHAIN", "local"),
            ("GOPROXY", "off"),
            ("GOFLAGS", ""),
        ])
        .current_dir(world.dir())
        .output()
        .with_context(|| program.to_owned())?;
    let said = good(&output).with_context(|| world.log())?;
    ensure!(said == "done\n", "{said}");
    Ok(())
}

fn python() -> anyhow::Result<()> {
    let script = include_str!("http_clients/http_client.py");
    run(&world()?, "python3", &[], ("client.py", script))
}

fn go() -> anyhow::Result<()> {
    let program = include_str!("http_clients/net_http.go");
    run(&world()?, "go", &["run"], ("client.go", program))
}

fn curl() -> anyhow::Result<()> {
    let world = world()?;
    let asked = |arguments: &[&str]| -> anyhow::Result<String> {
        let output = Command::new("curl")
            .args(["--silent", "--show-error", "--output", "/dev/null"])
            .args(["--write-out", "%{http_code}", "--max-time", "60"])
            .arg("--unix-socket")
            .arg(world.socket())
            .args(arguments)
            .output()?;
        good(&output).with_context(|| format!("{arguments:?}"))
    };
    for _ in 0..TIMES_CURL {
        let reload = ["--data", "{}", "http://x/v1/reload"];
        ensure!(asked(&reload)? == "200");
    }
    // The second is told to go on before it sends its body, the third sends one of an untold length.
    for (more, expected) in [
        (&["--data", "{}", "http://x/v1/nothing"][..], "404"),
        (
            &[
                "-H",
                "Expect: 100-continue",
                "--data",
                "{}",
                "http://x/v1/reload",
            ],
            "200",
        ),
        (
            &[
                "-H",
                "Transfer-Encoding: chunked",
                "--data",
                "{}",
                "http://x/v1/reload",
            ],
            "200",
        ),
        (&["-X", "GET", "--data", "{}", "http://x/v1/status"], "200"),
        (&["-X", "PUT", "--data", "{}", "http://x/v1/status"], "405"),
    ] {
        let status = asked(more)?;
        ensure!(status == expected, "{more:?}: {status}");
    }
    Ok(())
}
