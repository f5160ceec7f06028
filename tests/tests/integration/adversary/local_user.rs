//! An unprivileged user who holds every lock and port that it can.

use std::{
    io::{BufRead as _, BufReader},
    os::unix::process::CommandExt as _,
    process::Stdio,
};

use crate::prelude::*;

/// Opens and locks each of these files and directories, and what is below them, and listens on a port; prints the paths
/// that it has locked, and then an empty line.
const HOLD: &str = "
import fcntl, os, socket, sys, time
held = []
for top in sys.argv[2:]:
    for dir, dirs, files in [(top, [], [])] + list(os.walk(top)):
        for path in [dir] + [os.path.join(dir, name) for name in files]:
            try:
                file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                held.append(file)
                print(path)
            except OSError:
                pass
port = socket.socket()
port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
try:
    port.bind(('127.0.0.1', int(sys.argv[1])))
    port.listen()
except OSError:
    pass
print('', flush=True)
time.sleep(600)
";

/// Returns the process, and what it has locked.
fn hold(env: &TestEnv, port: u16) -> anyhow::Result<(KillOnDrop, Vec<String>)> {
    let mut command = Command::new("python3");
    command.args(["-c", HOLD, &port.to_string()]);
    command.args([env.dir(), &env.pin_dir()]);
    command.uid(NOBODY).gid(NOBODY).current_dir("/");
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()?;
    let output = child.stdout.take().context("no output")?;
    let holder = KillOnDrop(child);
    let mut held = Vec::new();
    for line in BufReader::new(output).lines() {
        let line = line?;
        if line.is_empty() {
            return Ok((holder, held));
        }
        held.push(line);
    }
    bail!("it ended: {held:?}")
}

test!(locks_and_ports_of_a_user_prevent_nothing);
fn locks_and_ports_of_a_user_prevent_nothing() -> anyhow::Result<()> {
    let port = std::net::TcpListener::bind("127.0.0.1:0")?
        .local_addr()?
        .port();
    let metrics = format!("metrics = \"127.0.0.1:{port}\"\n");
    let mut env = TestEnv::new()?;
    env.configure(&format!("{metrics}{}", near("\"10.88.0.0/24\"")))?;
    fs::set_permissions(env.dir(), fs::Permissions::from_mode(0o755))?;
    // What a root shell left: a lock that all may open, and a directory for pins.
    let state = env.dir().join("state");
    fs::create_dir(&state)?;
    fs::write(state.join("lock"), "")?;
    fs::create_dir(env.pin_dir())?;
    for path in [state.join("lock"), env.pin_dir()] {
        fs::set_permissions(path, fs::Permissions::from_mode(0o755))?;
    }
    let (_first, held) = hold(&env, port)?;
    for path in [state.join("lock"), env.pin_dir()] {
        let path = path.display().to_string();
        ensure!(held.contains(&path), "{path} is not held: {held:?}");
    }
    env.start()?;
    let (_second, held) = hold(&env, port)?;
    ensure!(!held.iter().any(|path| path.ends_with("/lock")), "{held:?}");
    ensure!(
        !held.contains(&env.pin_dir().display().to_string()),
        "{held:?}"
    );
    env.second_is_refused(&env.config())?;
    env.cli(&["add", "10.88.1.0/24", "--policy", "near"])?;
    env.cli(&["add", "10.88.2.0/24", "--policy", "near", "--save"])?;
    env.restart(Signal::SIGTERM)?;
    ensure!(env.status()?["entries"] == 3, "{:#}", env.status()?);
    env.cli(&["detach"])?;
    let (_third, _) = hold(&env, port)?;
    env.cli(&["attach"])?;
    env.restart(Signal::SIGKILL)?;
    env.wait_status("health", |status| status["healthy"] == true)?;
    env.end(Signal::SIGTERM)?;
    let (_last, _) = hold(&env, port)?;
    env.cli(&["detach"])?;
    env.cli(&["attach"])?;
    env.start()?;
    ensure!(env.status()?["healthy"] == true);
    Ok(())
}
