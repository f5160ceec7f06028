//! The lab's file beside background load, and the simulated sender.

use anyhow::ensure;
use rto_tests::lab::{cell, measured, quick};

use super::needs::{APACHE, NGINX};

test!(
    simulated_sender_takes_as_long_as_nginx,
    needs = [NGINX, APACHE]
);
/// With Linux's estimator over the queue of the same runs. The rest of the load adapts to a file, and the simulation
/// leaves that out, so both are compared where the load leaves room.
fn simulated_sender_takes_as_long_as_nginx() -> anyhow::Result<()> {
    measured(|| {
        let out = tempfile::tempdir()?;
        let report = quick("file", out.path(), &["--load", "75", "--runs", "3"])?;
        let column = "delay: mean, ms";
        let servers = ["nginx", "Apache"]
            .map(|server| cell(&report, "servers", column, &["75", server, "200"]));
        let simulated = cell(&report, "simulated-delay", "Reno, SACK, 75", &["Linux"])?;
        for server in servers {
            let ratio = simulated / server?;
            ensure!((0.7..1.4).contains(&ratio), "{ratio}\n{report:#}");
        }
        // The file shares the link with the load: it takes longer than on an idle one, and arrives.
        let bare = cell(&report, "simulated-delay", "bare, 75", &["Linux"])?;
        for simulated in [simulated, bare] {
            ensure!(
                (27.0..400.0).contains(&simulated),
                "{simulated}\n{report:#}"
            );
        }
        Ok(())
    })
}
