//! Clients that send many requests at once: ours, Python's and Go's.

use super::{super::http_clients::run, Victim};
use crate::prelude::*;

const PYTHON: (&str, &str) = ("attack.py", include_str!("attack.py"));
const GO_PROGRAM: (&str, &str) = ("attack.go", include_str!("attack.go"));

/// Simultaneous clients, and changes made by each.
const CLIENTS: usize = 8;
const CHANGES: usize = 25;

fn body(cidr: &str) -> String {
    serde_json::json!({ "cidrs": [cidr], "policy": "near" }).to_string()
}

/// Makes a change on a new connection; returns the answer.
fn ask(socket: &Path, path: &str, body: &str) -> anyhow::Result<Value> {
    let answer = http::request(UnixStream::connect(socket)?, "POST", path, body)?;
    ensure!(answer.status == 200, "{path} {body}: {answer:?}");
    Ok(serde_json::from_str(&answer.body)?)
}

test!(every_acknowledged_change_is_in_force);
/// Many clients make many changes each.
fn every_acknowledged_change_is_in_force() -> anyhow::Result<()> {
    let victim = Victim::new()?;
    let socket = victim.env.socket();
    let socket = socket.as_path();
    thread::scope(|scope| -> anyhow::Result<()> {
        let clients: Vec<_> = (0..CLIENTS)
            .map(|client| {
                scope.spawn(move || -> anyhow::Result<()> {
                    for i in 0..CHANGES {
                        let cidr = format!("10.{}.{i}.0/24", 100 + client);
                        let answer = ask(socket, "/v1/entries", &body(&cidr))?;
                        ensure!(answer["changed"]["added"] == 1, "{cidr}: {answer:#}");
                        // Every third is removed again.
                        if i % 3 == 0 {
                            let request = serde_json::json!({ "cidrs": [cidr] }).to_string();
                            let answer = ask(socket, "/v1/entries/remove", &request)?;
                            ensure!(answer["changed"]["removed"] == 1, "{cidr}: {answer:#}");
                        }
                    }
                    Ok(())
                })
            })
            .collect();
        for client in clients {
            client.join().map_err(|_| anyhow::anyhow!("panicked"))??;
        }
        Ok(())
    })?;
    let kept = (0..CHANGES).filter(|i| i % 3 != 0).count();
    let cidrs = victim.cidrs()?;
    for client in 0..CLIENTS {
        for i in 0..CHANGES {
            let cidr = format!("10.{}.{i}.0/24", 100 + client);
            ensure!(cidrs.contains(&cidr) == (i % 3 != 0), "{cidr}: {cidrs:?}");
        }
    }
    victim.is_well(1 + CLIENTS * kept)
}

/// Runs an attack in another language: unfinished requests, headers, and simultaneous changes.
fn attack(program: &str, arguments: &[&str], file: (&str, &str)) -> anyhow::Result<()> {
    let victim = Victim::new()?;
    let rest = [CLIENTS, CHANGES].map(|number| number.to_string());
    run(&victim.env, program, arguments, file, &rest)?;
    let cidrs = victim.cidrs()?;
    let changes = (0..CLIENTS)
        .flat_map(|client| (0..CHANGES).map(move |i| format!("10.{}.{i}.0/24", 100 + client)));
    for cidr in changes {
        ensure!(cidrs.contains(&cidr), "{cidr} is not in force: {cidrs:?}");
    }
    victim.is_well(1 + CLIENTS * CHANGES)
}

test!(python_attacks, needs = [PYTHON3], || attack(
    "python3",
    &[],
    PYTHON
));

test!(go_attacks, needs = [GO], || attack(
    "go",
    &["run"],
    GO_PROGRAM
));
