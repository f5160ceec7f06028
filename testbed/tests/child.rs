//! Child processes end when their parent is killed.

use std::{
    io::{BufRead as _, BufReader},
    net::SocketAddr,
    path::Path,
    process::Stdio,
};

use rto_testbed::{
    process::KillOnDrop,
    wait::{TIMEOUT, eventually},
    workload::{Program, Role, traffic::Listen},
};

#[test]
fn child_without_commands_ends_with_parent() {
    let program = Program::at(Path::new(env!("CARGO_BIN_EXE_rto-workload")));
    // No client connects.
    let on = SocketAddr::from(([127, 0, 0, 1], 0));
    let options = Listen::default();
    let mptcp = false;
    for role in [
        Role::Accept { on, options },
        Role::EchoServer { on, mptcp },
        Role::FlowServer { on },
    ] {
        let mut command = program.command(None, None, &role).unwrap();
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = KillOnDrop(command.spawn().unwrap());
        let mut replies = BufReader::new(child.0.stdout.take().unwrap());
        let mut ready = String::new();
        replies.read_line(&mut ready).unwrap();
        assert!(ready.contains("Ok"), "{role:?}: {ready}");
        // The kernel closes the pipe like this when the parent is killed.
        drop(child.0.stdin.take());
        eventually("the child's end", TIMEOUT, || Ok(child.0.try_wait()?)).unwrap();
    }
}
