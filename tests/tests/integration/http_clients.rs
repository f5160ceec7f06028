//! Third-party clients at the control socket. None of them may see a connection that ends while it still sends.

use std::process::Output;

use crate::prelude::*;

/// Reloads by each client.
const TIMES: u32 = 200;
/// Reloads by curl, where each is a process.
const TIMES_CURL: u32 = 50;

fn env() -> anyhow::Result<TestEnv> {
    TestEnv::with(&near("\"10.88.0.0/24\""))
}

fn good(output: &Output) -> anyhow::Result<String> {
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let complaint = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.success(),
        "{}: {text}{complaint}",
        output.status
    );
    Ok(text)
}

/// Runs a program with the socket and these arguments. It prints "done" last if every answer was right.
pub(super) fn run(
    env: &TestEnv,
    program: &str,
    arguments: &[&str],
    file: (&str, &str),
    rest: &[String],
) -> anyhow::Result<()> {
    let path = env.dir().join(file.0);
    fs::write(&path, file.1)?;
    let output = Command::new(program)
        .args(arguments)
        .arg(&path)
        .arg(env.socket())
        .args(rest)
        // Use the installed toolchain, and download nothing.
        .envs([
            ("GOTOOLCHAIN", "local"),
            ("GOPROXY", "off"),
            ("GOFLAGS", ""),
        ])
        .current_dir(env.dir())
        .output()
        .with_context(|| program.to_owned())?;
    let logged = good(&output).with_context(|| env.log())?;
    ensure!(logged == "done\n", "{logged}");
    Ok(())
}

test!(python3_http_client, needs = [PYTHON3]);
fn python3_http_client() -> anyhow::Result<()> {
    let script = include_str!("http_clients/http_client.py");
    let times = [TIMES.to_string()];
    run(&env()?, "python3", &[], ("client.py", script), &times)
}

test!(go_net_http, needs = [GO]);
fn go_net_http() -> anyhow::Result<()> {
    let program = include_str!("http_clients/net_http.go");
    let times = [TIMES.to_string()];
    run(&env()?, "go", &["run"], ("client.go", program), &times)
}

test!(curl_reads_its_answers, needs = [CURL]);
fn curl_reads_its_answers() -> anyhow::Result<()> {
    let env = env()?;
    let asked = |arguments: &[&str]| -> anyhow::Result<String> {
        let output = Command::new("curl")
            .args(["--silent", "--show-error", "--output", "/dev/null"])
            .args(["--write-out", "%{http_code}", "--max-time", "60"])
            .arg("--unix-socket")
            .arg(env.socket())
            .args(arguments)
            .output()?;
        good(&output).with_context(|| format!("{arguments:?}"))
    };
    for _ in 0..TIMES_CURL {
        let reload = ["--data", "{}", "http://x/v1/reload"];
        ensure!(asked(&reload)? == "200");
    }
    // The second waits for "100 Continue" before it sends its body, the third sends a body without a stated length.
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
