//! `rto-agent apply`.

use std::{
    io::{self, IsTerminal as _, Write as _},
    process::ExitCode,
    time::Duration,
};

use rto_agent_core::{
    printable::counted,
    wire::types::{ApplyRequest, WalkView},
};

use super::{exit, print_coloured, table};
use crate::{cli::Apply, client::Client};

/// How often the progress is requested.
const INTERVAL: Duration = Duration::from_millis(100);

pub(super) fn run(args: &Apply) -> anyhow::Result<ExitCode> {
    let client = Client::new(&args.daemon.socket);
    let request = ApplyRequest {
        new_only: args.new_only,
    };
    let mut walk: WalkView = client.post("/v1/apply", &request)?;
    while walk.running {
        std::thread::sleep(INTERVAL);
        walk = client.get("/v1/apply")?;
        progress(&walk);
    }
    print_coloured(args.daemon.json, &walk, args.color, args.table, |columns| {
        table::walk(&walk, columns)
    })?;
    Ok(exit(walk.is_complete()))
}

/// Shows the progress on a terminal, in one line that is overwritten.
fn progress(walk: &WalkView) {
    let mut err = io::stderr();
    if err.is_terminal() {
        let end = if walk.running { "\r" } else { "\x1b[2K\r" };
        let seen: u64 = walk.policies.values().map(|p| p.seen).sum();
        // A failed write of the progress is not an error.
        let _ = write!(
            err,
            "\x1b[2K{} of {}, {} covered{end}",
            walk.namespaces_done + walk.skipped.len(),
            counted(walk.namespaces, "network namespace", "network namespaces"),
            counted(seen, "socket", "sockets"),
        );
    }
}
